//! The leader's Lease: since when no cloudcore-prepull leads.

use std::time::Duration;

use futures::Stream;
use futures::stream::unfold;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;

use crate::cluster::Cluster;
use crate::edges::DOOR;
use crate::problem;

/// What a Lease may be late: its times are of the leader's clock.
const LATE: SignedDuration = SignedDuration::from_secs(15);
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

/// The replica that leads.
pub(crate) fn current_leader(lease: &Lease, now: Timestamp) -> Result<String, Leaderless> {
    let spec = lease.spec.clone().unwrap_or_default();
    let since = spec.renew_time.map_or(Timestamp::UNIX_EPOCH, |time| time.0);
    let lasts = SignedDuration::from_secs(spec.lease_duration_seconds.unwrap_or_default().into());
    match spec.holder_identity.filter(|holder| !holder.is_empty()) {
        Some(holder) if now.duration_since(since) <= lasts.saturating_add(LATE) => Ok(holder),
        holder => Err(Leaderless { since, holder }),
    }
}

/// Looks whether a replica leads. None if one does, if there is no Lease, and for those who may not read it.
pub(crate) async fn check_leader(cluster: &Cluster) -> Option<Leaderless> {
    read_leader(cluster).await.ok()?
}

/// The same, and an error if the API server can't be asked.
async fn read_leader(cluster: &Cluster) -> anyhow::Result<Option<Leaderless>> {
    let lease = Api::<Lease>::namespaced(cluster.client(), cluster.system_namespace()).get_opt(DOOR).await;
    match lease {
        Ok(lease) => Ok(lease.and_then(|lease| current_leader(&lease, Timestamp::now()).err())),
        Err(error) => {
            let error = anyhow::Error::from(error);
            // It answers, and that's enough to know that it's there.
            if problem::server_answer(&error).is_some() { Ok(None) } else { Err(error) }
        }
    }
}

/// Looks again and again. An error says that the API server isn't heard: a watch takes over a minute to notice that.
pub(crate) fn watch_leader(cluster: &Cluster) -> impl Stream<Item = anyhow::Result<Option<Leaderless>>> {
    unfold(false, move |waits| async move {
        if waits {
            tokio::time::sleep(LOOK).await;
        }
        Some((read_leader(cluster).await, true))
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
}
