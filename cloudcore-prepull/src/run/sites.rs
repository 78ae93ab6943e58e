//! The events of sites, as lines of the log.

use jiff::Timestamp;
use prepull_engine::shared::pacing::TokenBucket;
use prepull_engine::sites::{SiteEvent, SiteEventKind};
use tracing::{info, warn};

/// Lines per second, and at once: a failover with a thousand broken sites must not push everything else out of the log.
const LINES: (f64, f64) = (5.0, 100.0);

/// The log of what nodes of sites did, at a pace.
#[derive(Debug)]
pub(super) struct SiteLog {
    pace: TokenBucket<Timestamp>,
    /// Events without a line since the last one that got one.
    left_out: u64,
}

impl Default for SiteLog {
    fn default() -> Self {
        let (per_second, burst) = LINES;
        Self { pace: TokenBucket::new(per_second, burst), left_out: 0 }
    }
}

impl SiteLog {
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

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;

    use super::*;

    #[test]
    fn many_events_fill_no_log() {
        let (mut log, now) = (SiteLog::default(), Timestamp::UNIX_EPOCH);
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
