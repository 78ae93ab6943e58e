//! What is counted at the door, where the controller does not come to know of it.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

/// Cheap to clone; all clones count the same.
#[derive(Clone, Debug, Default)]
pub struct Meters {
    sent_away: Family<ReasonLabel, Counter>,
    waiting: Gauge<i64>,
}

impl Meters {
    /// Makes them part of what is shown.
    pub fn register(&self, registry: &mut Registry) {
        let sent_away = "Edges that were told to come back later, by reason";
        registry.register("sent_away", sent_away, self.sent_away.clone());
        let waiting = "Connections that wait for their handshake to begin";
        registry.register("waiting_connections", waiting, self.waiting.clone());
    }

    pub(super) fn sent_away(&self, reason: &'static str) {
        self.sent_away.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// A connection waits until the answer is dropped.
    pub(super) fn waits(&self) -> Waits {
        self.waiting.inc();
        Waits(self.waiting.clone())
    }
}

pub(super) struct Waits(Gauge<i64>);

impl Drop for Waits {
    fn drop(&mut self) {
        self.0.dec();
    }
}
