//! The leader's Lease: since when no cloudcore-prepull leads.

use std::time::Duration;

use futures::Stream;
use futures::stream::unfold;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use tokio::time::Instant;

use crate::cluster::Cluster;
use crate::edges::DOOR;
use crate::problem;

/// What a Lease may be late: its times are of the leader's clock.
const LATE: SignedDuration = SignedDuration::from_secs(15);
/// When a Lease that looks old is read again: a leader that is there renews it every two seconds.
const SECOND_LOOK: Duration = Duration::from_secs(5);
/// How often the Lease is looked at while a job is followed: as often as a leader renews it, or less.
const LOOK: Duration = Duration::from_secs(10);

/// That no replica leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Leaderless {
    pub(crate) since: Timestamp,
    /// The replica that has not renewed the Lease; none if it was given back.
    pub(crate) holder: Option<String>,
}

impl Leaderless {
    /// A sentence that stays the same while nothing changes.
    pub(crate) fn text(&self) -> String {
        let how = match &self.holder {
            Some(holder) => format!("{holder} does not renew its Lease"),
            None => "the last leader has given its Lease back".to_owned(),
        };
        let since = self.since.strftime("%Y-%m-%d %H:%M:%S UTC");
        format!("no cloudcore-prepull has led since {since}: {how}")
    }
}

/// The replica that leads, if the clock of `now` and the leader's agree.
pub(crate) fn current_leader(lease: &Lease, now: Timestamp) -> Result<String, Leaderless> {
    let spec = lease.spec.clone().unwrap_or_default();
    let since = spec.renew_time.map_or(Timestamp::UNIX_EPOCH, |time| time.0);
    let lasts = SignedDuration::from_secs(spec.lease_duration_seconds.unwrap_or_default().into());
    match spec.holder_identity.filter(|holder| !holder.is_empty()) {
        Some(holder) if now.duration_since(since) <= lasts.saturating_add(LATE) => Ok(holder),
        holder => Err(Leaderless { since, holder }),
    }
}

/// A Lease that is read more than once. A leader is there as long as its Lease changes, by our monotonic clock: the clock of a
/// laptop may be minutes wrong, and then it and the Lease's times say nothing.
#[derive(Debug, Default)]
pub(crate) struct LeaseWatch {
    /// The version that was last seen, and since when.
    seen: Option<(Option<String>, Instant)>,
    has_changed: bool,
    /// Whether a second look decides: the Lease's time doesn't fit our clock, and we haven't seen it change.
    is_doubtful: bool,
}

impl LeaseWatch {
    /// Takes note of the Lease as it was read now, `at` by the monotonic clock.
    pub(crate) fn take(&mut self, lease: &Lease, now: Timestamp, at: Instant) -> Option<Leaderless> {
        let version = lease.metadata.resource_version.clone();
        let since = match &self.seen {
            Some((seen, since)) if *seen == version => *since,
            seen => {
                self.has_changed = seen.is_some();
                self.seen = Some((version, at));
                at
            }
        };
        let spec = lease.spec.clone().unwrap_or_default();
        let renewed = spec.renew_time.map_or(Timestamp::UNIX_EPOCH, |time| time.0);
        let holder = spec.holder_identity.filter(|holder| !holder.is_empty());
        let seconds = spec.lease_duration_seconds.unwrap_or_default().max(0).unsigned_abs();
        let lasts = Duration::from_secs(seconds.into());
        let limit = SignedDuration::from_secs(seconds.into()).saturating_add(LATE);
        let fits = now.duration_since(renewed).abs() <= limit;
        self.is_doubtful = holder.is_some() && !fits && !self.has_changed;
        let patience = if self.is_doubtful { SECOND_LOOK } else { lasts.max(SECOND_LOOK) };
        let leads = holder.is_some() && at.duration_since(since) < patience;
        (!leads).then_some(Leaderless { since: renewed, holder })
    }
}

/// Looks whether a replica leads. None if one does, if there is no Lease, and for those who may not read it.
pub(crate) async fn check_leader(cluster: &Cluster) -> Option<Leaderless> {
    let mut watched = LeaseWatch::default();
    let gone = read_leader(cluster, &mut watched).await.ok()?;
    if !watched.is_doubtful {
        return gone;
    }
    tokio::time::sleep(SECOND_LOOK).await;
    read_leader(cluster, &mut watched).await.ok()?
}

/// The same, and an error if the API server can't be asked.
async fn read_leader(cluster: &Cluster, watched: &mut LeaseWatch) -> anyhow::Result<Option<Leaderless>> {
    let lease = Api::<Lease>::namespaced(cluster.client(), cluster.system_namespace()).get_opt(DOOR).await;
    match lease {
        Ok(lease) => Ok(lease.and_then(|lease| watched.take(&lease, Timestamp::now(), Instant::now()))),
        Err(error) => {
            let error = anyhow::Error::from(error);
            // It answers, and that's enough to know that it's there.
            if problem::server_answer(&error).is_some() { Ok(None) } else { Err(error) }
        }
    }
}

/// Looks again and again. An error says that the API server isn't heard: a watch takes over a minute to notice that.
pub(crate) fn watch_leader(cluster: &Cluster) -> impl Stream<Item = anyhow::Result<Option<Leaderless>>> {
    unfold((false, LeaseWatch::default()), move |(waits, mut watched)| async move {
        if waits {
            tokio::time::sleep(LOOK).await;
        }
        let gone = read_leader(cluster, &mut watched).await;
        Some((gone, (true, watched)))
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    #[test]
    fn an_old_lease_means_no_leader() {
        let lease = |holder: &str| -> Lease {
            let spec = json!({"holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": "2026-11-24T12:00:00.000000Z"});
            serde_json::from_value(json!({"metadata": {}, "spec": spec})).unwrap()
        };
        let at = |time: &str| format!("2026-11-24T{time}Z").parse::<Timestamp>().unwrap();
        assert_eq!(current_leader(&lease("a"), at("12:00:30")), Ok("a".to_owned()));
        let said = current_leader(&lease("a"), at("12:00:31")).unwrap_err().text();
        assert!(
            said.starts_with("no cloudcore-prepull has led since 2026-11-24 12:00:00 UTC: a does not renew"),
            "{said}"
        );
        let said = current_leader(&lease(""), at("12:00:01")).unwrap_err().text();
        assert!(said.contains("has given its Lease back"), "{said}");
    }

    #[test]
    fn a_lease_that_changes_has_a_leader() {
        let lease = |version: &str, holder: &str| -> Lease {
            let spec = json!({"holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": "2026-11-24T12:00:00.000000Z"});
            serde_json::from_value(json!({"metadata": {"resourceVersion": version}, "spec": spec})).unwrap()
        };
        let begun = Instant::now();
        let after = |seconds| begun + Duration::from_secs(seconds);
        // The clocks of a laptop that is fast, one that is slow, and one that is right.
        for (time, doubtful) in [("12:00:45", true), ("11:00:00", true), ("12:00:01", false)] {
            let now = format!("2026-11-24T{time}Z").parse::<Timestamp>().unwrap();
            let mut watched = LeaseWatch::default();
            assert_eq!(watched.take(&lease("1", "a"), now, begun), None);
            assert_eq!(watched.is_doubtful, doubtful, "{time}");
            assert_eq!(watched.take(&lease("2", "a"), now, after(5)), None);
            assert_eq!(watched.take(&lease("2", "a"), now, after(15)), None);
            assert!(watched.take(&lease("2", "a"), now, after(20)).is_some(), "{time}");
            let mut watched = LeaseWatch::default();
            watched.take(&lease("1", "a"), now, begun);
            assert_eq!(watched.take(&lease("1", "a"), now, after(5)).is_some(), doubtful, "{time}");
            assert!(watched.take(&lease("3", ""), now, after(6)).is_some(), "{time}");
        }
    }
}
