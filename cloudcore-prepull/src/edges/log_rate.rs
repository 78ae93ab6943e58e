//! Limits for log lines that any client of a port can cause, or one with a single node's certificate.

use parking_lot::Mutex;
use prepull_api::task::NodeName;
use prepull_engine::shared::pacing::{BucketPerKey, TokenBucket};
use tokio::time::Instant;

/// Lines per second, and at once.
const LINES: (f64, f64) = (5.0, 50.0);
/// Lines per second and at once about one node, however often it connects, renews, or gets its tasks again. An honest
/// edge that begins with 64 tasks on a link that breaks every few seconds has fewer.
const NODE_LINES: (f64, f64) = (1.0, 200.0);
/// The most nodes that are logged about at a time: as many as there are sessions.
const MAX_NODES: usize = 20_000;

#[derive(Debug)]
pub(super) struct LogRate(Mutex<TokenBucket<std::time::Instant>>);

impl Default for LogRate {
    fn default() -> Self {
        let (per_second, burst) = LINES;
        Self(Mutex::new(TokenBucket::new(per_second, burst)))
    }
}

impl LogRate {
    pub(super) fn allows(&self, now: Instant) -> bool {
        let mut rate = self.0.lock();
        rate.try_take(1.0, now.into_std()).is_ok()
    }
}

#[derive(Debug)]
pub(super) struct NodeLogRate(Mutex<BucketPerKey<NodeName, std::time::Instant>>);

impl Default for NodeLogRate {
    fn default() -> Self {
        let (per_second, burst) = NODE_LINES;
        Self(Mutex::new(BucketPerKey::new(per_second, burst, MAX_NODES)))
    }
}

impl NodeLogRate {
    pub(super) fn allows(&self, node: &NodeName, now: Instant) -> bool {
        self.0.lock().try_take(node, now.into_std()).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn log_lines_are_limited_per_node() {
        let (rate, now) = (NodeLogRate::default(), Instant::now());
        let lines = |node: &str, now| (0..1000).filter(|_| rate.allows(&node.into(), now)).count();
        assert_eq!(lines("edge-1", now), 200);
        assert_eq!(lines("edge-1", now + Duration::from_secs(10)), 10);
        assert!(rate.allows(&"edge-2".into(), now));
    }
}
