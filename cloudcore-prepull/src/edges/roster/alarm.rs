//! Alarms about keys: events on the Node, log lines, metrics.

use std::time::{Instant, SystemTime};

use parking_lot::Mutex;
use prepull_api::task::{JobUid, NodeName};
use prepull_engine::shared::events::{ObjectEvent, ObjectKind};
use prepull_engine::shared::objects::ObjectId;
use prepull_engine::shared::pacing::{BucketPerKey, TokenBucket};
use prepull_engine::shared::reasons;
use prepull_program::metrics::Label;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

use crate::edges::pki::KeyHash;
use crate::kube_api::events::Events;
use prepull_admission::records::record::NodeRefusal;

/// Events of one kind about one node, at once and per second: two machines with one identity alternate every few seconds.
const PER_NODE: (f64, f64) = (1.0, 1.0 / 600.0);
/// Events of all nodes together, at once and per second: a fleet that was off for months comes back all at once.
const OVERALL: (f64, f64) = (50.0, 0.1);
/// The most nodes that events are remembered of; more than come together in ten minutes by [`OVERALL`].
const MAX_REMEMBERED: usize = 1024;

prepull_program::metrics! {
    /// Metrics of the nodes' keys. Cheap to clone; all clones share the values.
    pub struct RosterMetrics {
        /// Keys that were presented although a newer key of the same node was in use, by where
        superseded_keys: Family<Label, Counter>,
        /// Edges that were refused although TLS accepted their certificate or their token was valid, by reason
        refused_edges: Family<Label, Counter>,
        /// Certificates that were renewed after they had expired
        late_renewals: Counter,
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) enum AlarmPlace {
    Tunnel,
    Renewal,
}

impl AlarmPlace {
    fn label(self) -> Label {
        [("at", if let Self::Tunnel = self { "tunnel" } else { "renewal" })]
    }
}

impl RosterMetrics {
    /// Metrics with the series that an alert is about: Prometheus sees no increase from nothing to one.
    pub(crate) fn with_alerted_series() -> Self {
        let metrics = Self::default();
        for place in [AlarmPlace::Tunnel, AlarmPlace::Renewal] {
            drop(metrics.superseded_keys.get_or_create(&place.label()));
        }
        metrics
    }
}

/// Raises alarms at a bounded rate.
#[derive(Debug)]
pub(super) struct Alarms {
    events: Option<Events>,
    metrics: RosterMetrics,
    told: Mutex<Told>,
}

#[derive(Debug)]
struct Told {
    /// By node and reason, so that one reason doesn't hide another.
    each: BucketPerKey<(NodeName, &'static str), Instant>,
    overall: TokenBucket<Instant>,
}

impl Default for Told {
    fn default() -> Self {
        Self {
            each: BucketPerKey::new(PER_NODE.1, PER_NODE.0, MAX_REMEMBERED),
            overall: TokenBucket::new(OVERALL.1, OVERALL.0),
        }
    }
}

impl Alarms {
    pub(super) fn new(events: Option<Events>, metrics: RosterMetrics) -> Self {
        Self { events, metrics, told: Mutex::default() }
    }

    /// A key that a newer one of the node has superseded is still there.
    pub(super) fn raise_superseded(
        &self,
        node: &NodeName,
        presented: KeyHash,
        newest: KeyHash,
        place: AlarmPlace,
    ) {
        let outcome = match place {
            AlarmPlace::Tunnel => "It is served until its certificate ends",
            AlarmPlace::Renewal => "Its certificate was not renewed",
        };
        self.metrics.superseded_keys.get_or_create(&place.label()).inc();
        let note = format!(
            "Two machines act as this node: one has presented the key {presented}, which the newer key {newest} had \
             superseded. {outcome}. The agent's state directory was copied, or restored from a copy. Unless you know \
             why: `kubectl prepull node revoke {node}`, then join the right machine with a new token \
             (`kubectl prepull tokens create --node {node}`)"
        );
        self.send_event(node, reasons::SUPERSEDED_KEY, note);
    }

    /// A certificate was renewed after it had expired.
    pub(super) fn renewed_late(&self, node: &NodeName, not_after: SystemTime) {
        self.metrics.late_renewals.inc();
        let end = humantime::format_rfc3339_seconds(not_after);
        let note = format!(
            "The certificate of this node had expired at {end}, and was renewed for the holder of its key. If the \
             machine was not away since then: `kubectl prepull node revoke {node}`"
        );
        self.send_event(node, reasons::RENEWED_AFTER_EXPIRY, note);
    }

    #[cfg(test)]
    pub(super) fn late_renewals(&self) -> u64 {
        self.metrics.late_renewals.get()
    }

    pub(super) fn count_refused(&self, refusal: &NodeRefusal) {
        let reason = match refusal {
            NodeRefusal::Revoked { .. } => "revoked",
            NodeRefusal::Superseded { .. } => "superseded",
            NodeRefusal::NoNode { .. } => "no_node",
            NodeRefusal::NotAnEdge { .. } | NodeRefusal::HasJoined { .. } | NodeRefusal::OldToken { .. } => {
                "token"
            }
            // Of a command, and not of an edge.
            NodeRefusal::HasRejoined { .. } => return,
        };
        self.metrics.refused_edges.get_or_create(&[("reason", reason)]).inc();
    }

    fn send_event(&self, node: &NodeName, reason: &'static str, note: String) {
        if !self.told.lock().may_tell(node, reason, Instant::now()) {
            return;
        }
        tracing::warn!(%node, reason, note, "event");
        if let Some(events) = &self.events {
            // kubectl looks for the events of a Node by its name in place of the UID, as the kubelet writes them.
            let (name, uid) = (node.to_string(), JobUid(node.to_string()));
            let object = ObjectId { namespace: String::new(), name, uid };
            events.send(ObjectEvent { kind: ObjectKind::Node, object, warning: true, reason, note });
        }
    }
}

impl Told {
    fn may_tell(&mut self, node: &NodeName, reason: &'static str, now: Instant) -> bool {
        let key = (node.clone(), reason);
        self.each.wait_for(&key, now).is_zero()
            && self.overall.try_take(1.0, now).is_ok()
            && self.each.try_take(&key, now).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn alarms_are_limited_per_node_and_fleet() {
        let (start, pause) = (Instant::now(), Duration::from_secs(600));
        let mut told = Told::default();
        let mut tell = |reason, after| told.may_tell(&"edge-1".into(), reason, start + after);
        assert!(tell("a", Duration::ZERO) && !tell("a", pause / 2) && tell("a", pause));
        assert!(tell("b", pause), "one alarm does not silence another");
        let later = start + 2 * pause;
        let many = (0..10_000).filter(|n| told.may_tell(&NodeName(format!("edge-{n}")), "a", later)).count();
        assert_eq!(many, 50);
    }
}
