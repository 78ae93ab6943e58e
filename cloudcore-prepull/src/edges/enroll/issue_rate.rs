//! Rate limits for issuing certificates: each one is recorded, which costs a write at the API server.

use std::time::Duration;

use parking_lot::Mutex;
use prepull_api::task::NodeName;
use prepull_engine::shared::pacing::{BucketPerKey, TokenBucket};
use tokio::time::Instant;

/// Certificates of one node, at once and per second. An edge waits a minute after a renewal; it gets several at once if
/// answers are lost, or if people run a join again and again until it works.
const OF_NODE: (f64, f64) = (20.0, 1.0 / 60.0);
/// Renewals of all nodes together, at once and per second: a third of a core. A rotation of the CA asks for 50 a second,
/// so it's a fleet that comes back after its certificates have expired, or many stolen keys.
const OF_ALL: (f64, f64) = (1000.0, 200.0);
/// The most nodes that are remembered: more than can renew, at the pace of all, before the first one's bucket is full.
const MAX_NODES: usize = 65_536;

/// Decides which node may have a certificate now.
#[derive(Debug)]
pub(super) struct IssueRate(Mutex<Buckets>);

#[derive(Debug)]
struct Buckets {
    nodes: BucketPerKey<NodeName, std::time::Instant>,
    all: TokenBucket<std::time::Instant>,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum TooOften {
    #[error(
        "node {node} got several certificates within minutes, and gets one a minute now: wait {}",
        humantime::format_duration(*wait)
    )]
    Node { node: NodeName, wait: Duration },
    #[error("too many edges renew their certificates at once: wait {}", humantime::format_duration(*wait))]
    All { wait: Duration },
}

impl TooOften {
    /// How long the edge should wait, in whole seconds.
    pub(super) fn wait_time(&self) -> Duration {
        match self {
            Self::Node { wait, .. } | Self::All { wait } => *wait,
        }
    }
}

impl Default for IssueRate {
    fn default() -> Self {
        let nodes = BucketPerKey::new(OF_NODE.1, OF_NODE.0, MAX_NODES);
        Self(Mutex::new(Buckets { nodes, all: TokenBucket::new(OF_ALL.1, OF_ALL.0) }))
    }
}

impl IssueRate {
    pub(super) fn check_join(&self, node: &NodeName, now: Instant) -> Result<(), TooOften> {
        let wait = self.0.lock().nodes.wait_for(node, now.into_std());
        if wait.is_zero() {
            Ok(())
        } else {
            Err(TooOften::Node { node: node.clone(), wait: whole_seconds(wait) })
        }
    }

    pub(super) fn check_renewal(&self, node: &NodeName, now: Instant) -> Result<(), TooOften> {
        self.check_join(node, now)?;
        let wait = self.0.lock().all.wait_for(1.0, now.into_std());
        if wait.is_zero() { Ok(()) } else { Err(TooOften::All { wait: whole_seconds(wait) }) }
    }

    /// Counts a join that was recorded. What is refused isn't counted: with an old key of the node, a thief could
    /// otherwise keep the node itself from renewing.
    pub(super) fn count_join(&self, node: &NodeName, now: Instant) {
        self.0.lock().nodes.take(node, now.into_std());
    }

    pub(super) fn count_renewal(&self, node: &NodeName, now: Instant) {
        self.count_join(node, now);
        self.0.lock().all.take(1.0, now.into_std());
    }
}

/// Rounded up, so that who waits that long is not too early.
fn whole_seconds(wait: Duration) -> Duration {
    Duration::from_secs(wait.as_secs() + u64::from(wait.subsec_nanos() > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Renews until that is refused.
    fn renew_all(rate: &IssueRate, node: &str, now: Instant) -> (usize, TooOften) {
        let node = node.into();
        for renewed in 0.. {
            match rate.check_renewal(&node, now) {
                Ok(()) => rate.count_renewal(&node, now),
                Err(refusal) => return (renewed, refusal),
            }
        }
        unreachable!("it may renew without end");
    }

    #[test]
    fn a_node_gets_one_certificate_a_minute() {
        let (rate, now) = (IssueRate::default(), Instant::now());
        let wait = |seconds| TooOften::Node { node: "edge-1".into(), wait: seconds * SECOND };
        assert_eq!(renew_all(&rate, "edge-1", now), (20, wait(60)));
        assert_eq!(renew_all(&rate, "edge-1", now + 59 * SECOND), (0, wait(1)));
        assert_eq!(renew_all(&rate, "edge-1", now + 60 * SECOND), (1, wait(60)));
        assert_eq!(rate.check_join(&"edge-1".into(), now + 60 * SECOND), Err(wait(60)));
        assert_eq!(renew_all(&rate, "edge-2", now).0, 20);
    }

    #[test]
    fn a_rotation_of_a_large_fleet_isnt_slowed_down() {
        let (rate, now) = (IssueRate::default(), Instant::now());
        for n in 0..20_000_u32 {
            let (node, at) = (NodeName(format!("edge-{n}")), now + n * SECOND / 50);
            assert_eq!(rate.check_renewal(&node, at), Ok(()), "{node}");
            rate.count_renewal(&node, at);
        }
    }

    #[test]
    fn all_nodes_together_have_a_pace() {
        let (rate, now) = (IssueRate::default(), Instant::now());
        let renewed = |at| {
            let nodes = (0..10_000).map(|n| NodeName(format!("edge-{n}")));
            let passed = nodes.filter(|node| {
                let is_allowed = rate.check_renewal(node, at).is_ok();
                if is_allowed {
                    rate.count_renewal(node, at);
                }
                is_allowed
            });
            passed.count()
        };
        assert_eq!((renewed(now), renewed(now), renewed(now + SECOND)), (1000, 0, 200));
        assert_eq!(rate.check_join(&"edge-9999".into(), now), Ok(()), "joins don't wait for renewals");
    }
}
