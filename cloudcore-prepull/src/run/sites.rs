//! Sites, for operators: the events as lines of the log, the reports as the document `/sites`, and a warning.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::edges::sites::{SiteActivity, SiteDownload};
use prepull_engine::prepull::plan::may_kubelet_set;
use prepull_engine::shared::pacing::TokenBucket;
use prepull_engine::sites::{SiteEvent, SiteEventKind, SiteReport, SiteSettings};
use tracing::{info, warn};

/// Lines per second, and at once: a failover with a thousand broken sites must not push everything else out of the log.
const LINES: (f64, f64) = (5.0, 100.0);

/// The log of what nodes of sites did, at a pace.
#[derive(Debug)]
pub(super) struct SiteLog {
    pace: TokenBucket<Timestamp>,
    /// Events without a line since the last one that got one.
    left_out: u64,
    /// The site label, if a kubelet may set it and no warning has said so yet.
    open_label: Option<String>,
}

impl SiteLog {
    pub(super) fn new(settings: &SiteSettings) -> Self {
        let (per_second, burst) = LINES;
        let open_label = Some(settings.label.clone()).filter(|label| may_kubelet_set(label));
        let mut log = Self { pace: TokenBucket::new(per_second, burst), left_out: 0, open_label };
        if settings.share_by_default {
            log.warn_of_label();
        }
        log
    }

    /// Warns once, from the first site that shares, of a label that lets a stolen node choose its neighbours. Returns
    /// whether it did.
    pub(super) fn warn_of_label(&mut self) -> bool {
        let Some(label) = self.open_label.take() else { return false };
        warn!(
            label,
            "nodes share layers by a site label that a kubelet may set on its own Node: a stolen node can move to any site, \
             hold it up and learn the names and addresses of its nodes. Use a label below node-restriction.kubernetes.io/ \
             (--site-label)"
        );
        true
    }

    /// Logs an event, unless there were too many. Returns whether it got its line.
    pub(super) fn log(&mut self, event: &SiteEvent, now: Timestamp) -> bool {
        if self.pace.try_take(1.0, now).is_err() {
            self.left_out += 1;
            return false;
        }
        let left_out = std::mem::take(&mut self.left_out);
        let SiteEvent { site, node, digest, kind } = event;
        match kind {
            SiteEventKind::LeaseLost => {
                info!(
                    site,
                    %node,
                    digest,
                    left_out,
                    "a node made too little progress with a layer: another node of the site downloads it"
                );
            }
            SiteEventKind::ClaimRefused => {
                info!(site, %node, digest, left_out, "a node downloads a layer out of turn, and is sent to wait");
            }
            SiteEventKind::CarriesNothing => {
                warn!(
                    site,
                    %node,
                    left_out,
                    "a node twice made too little progress: it downloads nothing for its site for an hour"
                );
            }
            SiteEventKind::HolderDelisted => {
                warn!(
                    site,
                    %node,
                    digest,
                    left_out,
                    "two neighbours complained about the bytes of a node: none is sent to it for an hour"
                );
            }
            SiteEventKind::TooManyBlobs => {
                warn!(site, %node, digest, left_out, "a node named more layers than a node may: they aren't shared");
            }
        }
        true
    }
}

/// Sites without their downloads.
pub(super) fn describe_all(reports: Vec<SiteReport>) -> Vec<SiteActivity> {
    reports.into_iter().map(|report| describe_site(report, false)).collect()
}

/// A site with its downloads.
pub(super) fn describe_one(report: Option<SiteReport>) -> Vec<SiteActivity> {
    report.into_iter().map(|report| describe_site(report, true)).collect()
}

fn describe_site(report: SiteReport, with_downloads: bool) -> SiteActivity {
    let SiteReport { site: name, nodes, blobs, waiting, carriers, counters } = report;
    let rates = carriers.iter().map(|carrier| carrier.bytes_per_second);
    let uplink_bytes_per_second = rates.fold(0, u64::saturating_add);
    let count = carriers.len();
    let downloads = carriers.into_iter().filter(|_| with_downloads).map(|carrier| SiteDownload {
        node: carrier.node,
        digest: carrier.digest,
        size: carrier.size,
        done: carrier.done,
        since: Time(carrier.since),
        bytes_per_second: carrier.bytes_per_second,
        alone: Some(carrier.alone.to_owned()).filter(|why| !why.is_empty()),
    });
    SiteActivity {
        name,
        nodes,
        layers: blobs,
        waiting,
        carriers: count,
        uplink_bytes_per_second,
        bytes_shared: counters.bytes_shared,
        bytes_carried: counters.bytes_carried,
        leases_lost: counters.leases_lost,
        claims_refused: counters.claims_refused,
        holders_delisted: counters.holders_delisted,
        downloads: downloads.collect(),
    }
}

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;

    use super::*;

    #[test]
    fn an_open_label_is_warned_of_once() {
        let log = |label: &str, share_by_default| {
            SiteLog::new(&SiteSettings {
                label: label.to_owned(),
                share_by_default,
                ..SiteSettings::default()
            })
        };
        let mut open = log("topology.kubernetes.io/zone", false);
        assert!(open.warn_of_label() && !open.warn_of_label());
        assert!(!log("site", true).warn_of_label(), "it was said at the start");
        assert!(!log("node-restriction.kubernetes.io/site", false).warn_of_label());
    }

    #[test]
    fn many_events_fill_no_log() {
        let (mut log, now) = (SiteLog::new(&SiteSettings::default()), Timestamp::UNIX_EPOCH);
        let event = SiteEvent {
            site: "north".to_owned(),
            node: "edge-1".into(),
            digest: String::new(),
            kind: SiteEventKind::LeaseLost,
        };
        let mut lines = |now| (0..1000).filter(|_| log.log(&event, now)).count();
        assert_eq!(lines(now), 100);
        assert_eq!(lines(now + SignedDuration::from_secs(2)), 10);
    }
}
