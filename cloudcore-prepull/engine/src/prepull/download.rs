//! Download windows of a job's nodes, and the download terms in each task.

use std::time::Duration;

use jiff::Timestamp;
use prepull_api::crd::status::NodeClock;
use prepull_api::download::{DownloadTerms, MAX_WINDOWS, Verification, Window, Zone};
use prepull_api::task::{JobUid, NodeName};
use prepull_api::wire::Hello;
use prepull_window::{Openings, is_zone, parse_window, write_window};
use ring::digest::{SHA256, digest};

use crate::prepull::validate::ValidatedJob;

/// The windows of a job, and what puts off their openings on each node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WindowRule {
    windows: Vec<Window>,
    jitter: Duration,
    job: JobUid,
    /// Since when the time of nodes counts, where the job was paused before.
    counts_from: Option<Timestamp>,
}

impl WindowRule {
    /// The rule in the job's spec.
    pub fn from_job(job: &ValidatedJob) -> Self {
        let download = &job.download;
        let windows = if download.paused { vec![Window::never()] } else { download.windows.clone() };
        Self { windows, jitter: download.jitter, job: job.uid.clone(), counts_from: None }
    }

    /// Counts no time before the job's last pause ended.
    pub(crate) fn resumed_at(self, resumed: Option<Timestamp>) -> Self {
        Self { counts_from: resumed, ..self }
    }

    /// From when the time of a node counts that began at this moment.
    pub(crate) fn counted_from(&self, started: Timestamp) -> Timestamp {
        self.counts_from.map_or(started, |resumed| resumed.max(started))
    }

    /// How much later than others this node begins in each window: for one node of a job always the same.
    fn delay(&self, node: &str) -> Duration {
        if self.windows.is_empty() || self.jitter.is_zero() {
            return Duration::ZERO;
        }
        let hash = digest(&SHA256, format!("{}/{node}", self.job).as_bytes());
        let mut first = [0; 8];
        hash.as_ref().iter().zip(&mut first).for_each(|(from, to)| *to = *from);
        let jitter = u64::try_from(self.jitter.as_millis()).unwrap_or(u64::MAX);
        Duration::from_millis(u64::from_be_bytes(first) % jitter.saturating_add(1))
    }

    /// When this node may download by the windows of the job.
    pub(crate) fn openings_of_job(&self, node: &str, clock: &NodeClock) -> Openings {
        if self.windows.is_empty() {
            return Openings::always();
        }
        Openings::new(&self.windows, self.delay(node), clock.time_zone.as_deref())
    }

    /// When this node may download.
    pub(crate) fn openings(&self, node: &str, clock: &NodeClock) -> Openings {
        if clock.windows.is_empty() {
            return self.openings_of_job(node, clock);
        }
        let zone = clock.time_zone.as_deref();
        // An edge of a later version may have windows that cannot be read here: it keeps to them by itself.
        let own: Vec<_> = clock.windows.iter().filter_map(|text| parse_window(text).ok()).collect();
        self.openings_of_job(node, clock).intersect_with(Openings::new(&own, Duration::ZERO, zone))
    }

    /// The part of the clock that counts for this job; nothing where the time of day does not matter.
    pub(crate) fn relevant(&self, clock: &NodeClock) -> Option<NodeClock> {
        let names_node = |window: &Window| window.time_zone == Zone::Node;
        let has_own = !clock.windows.is_empty();
        let needs_zone = has_own || self.windows.iter().any(names_node);
        let time_zone = clock.time_zone.clone().filter(|_| needs_zone);
        let relevant = NodeClock { time_zone, windows: clock.windows.clone() };
        (relevant != NodeClock::default()).then_some(relevant)
    }
}

/// The clock that an edge reports. Invalid zones and windows don't get into any status.
pub(crate) fn clock_of(hello: &Hello) -> NodeClock {
    NodeClock {
        time_zone: hello.time_zone.clone().filter(|zone| is_zone(zone)),
        windows: texts_of(&hello.windows),
    }
}

/// Windows as a status has them.
pub(crate) fn texts_of(windows: &[Window]) -> Vec<String> {
    windows.iter().take(MAX_WINDOWS).filter_map(checked_text).collect()
}

/// The window as it is stored, if it can be read again.
fn checked_text(window: &Window) -> Option<String> {
    let text = write_window(window);
    parse_window(&text).is_ok().then_some(text)
}

/// The download terms in a node's task. It shares with its site `by_default` if the job leaves that open.
pub fn download_terms(
    job: &ValidatedJob,
    node: &NodeName,
    verify: Option<Verification>,
    by_default: bool,
) -> DownloadTerms {
    let download = &job.download;
    let share = download.share.unwrap_or(by_default);
    let rule = WindowRule::from_job(job);
    DownloadTerms {
        max_rate: download.max_rate,
        delay: rule.delay(node.as_str()),
        windows: rule.windows,
        pin: download.pin,
        verify,
        share,
        site_rate: download.max_site_rate.filter(|_| share),
        paused: download.paused,
        deltas: download.deltas,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(jitter: u64) -> WindowRule {
        WindowRule {
            windows: vec![parse_window("01:00+4h").unwrap()],
            jitter: Duration::from_secs(jitter),
            job: JobUid("uid".to_owned()),
            counts_from: None,
        }
    }

    #[test]
    fn a_paused_job_opens_nowhere() {
        let paused = WindowRule { windows: vec![Window::never()], ..rule(0) };
        let now = Timestamp::UNIX_EPOCH;
        assert_eq!(paused.openings_of_job("edge-1", &NodeClock::default()).next_open(now), None);
        let later = Timestamp::from_second(600).unwrap();
        let resumed = rule(0).resumed_at(Some(later));
        assert_eq!((resumed.counted_from(now), rule(0).counted_from(now)), (later, now));
    }

    #[test]
    fn node_delays_are_spread_and_stable() {
        let rule = rule(1200);
        let mut delays: Vec<_> = (0..200).map(|n| rule.delay(&format!("edge-{n}"))).collect();
        assert_eq!(delays[7], rule.delay("edge-7"));
        assert!(delays.iter().all(|delay| *delay <= Duration::from_secs(1200)));
        delays.sort_unstable();
        assert!(
            delays[20] < Duration::from_secs(300) && delays[180] > Duration::from_secs(900),
            "{delays:?}"
        );
        let other = WindowRule { job: JobUid("other".to_owned()), ..rule.clone() };
        assert_ne!(rule.delay("edge-7"), other.delay("edge-7"));
        assert_eq!(self::rule(0).delay("edge-7"), Duration::ZERO);
        assert_eq!(WindowRule { windows: Vec::new(), ..rule }.delay("edge-7"), Duration::ZERO);
    }

    #[test]
    fn only_relevant_clock_fields_are_kept() {
        let clock = NodeClock { time_zone: Some("Europe/Berlin".to_owned()), windows: Vec::new() };
        assert_eq!(rule(0).relevant(&clock), Some(clock.clone()));
        assert_eq!(WindowRule::default().relevant(&clock), None);
        assert_eq!(rule(0).relevant(&NodeClock::default()), None);
        let own = NodeClock { windows: vec!["01:00+1h Node".to_owned()], ..clock };
        assert_eq!(WindowRule::default().relevant(&own), Some(own));
    }

    #[test]
    fn an_edges_clock_report_is_validated() {
        let mut bad = parse_window("01:00+1h").unwrap();
        bad.time_zone = "x\ny".to_owned().into();
        let hello = Hello {
            time_zone: Some("Europe/Nowhere".to_owned()),
            windows: vec![bad, parse_window("Mon 01:00+1h UTC").unwrap()],
            ..Hello::default()
        };
        let clock = clock_of(&hello);
        assert_eq!((clock.time_zone, clock.windows), (None, vec!["Mon 01:00+1h UTC".to_owned()]));
    }
}
