//! Metrics of what the controller does not learn about: queued and rejected connections.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

/// Metrics of the tunnel. Cheap to clone; all clones share the values.
#[derive(Clone, Debug, Default)]
pub struct TunnelMetrics {
    sent_away: Family<ReasonLabel, Counter>,
    queued: Gauge<i64>,
}

impl TunnelMetrics {
    /// Adds the metrics to a registry.
    pub(crate) fn register(&self, registry: &mut Registry) {
        let sent_away = "Edges that were told to come back later, by reason";
        registry.register("sent_away", sent_away, self.sent_away.clone());
        let queued = "Connections that wait for their handshake to begin";
        registry.register("waiting_connections", queued, self.queued.clone());
    }

    /// Counts an edge that was told to come back later.
    pub(super) fn count_sent_away(&self, reason: &'static str) {
        self.sent_away.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// Counts a connection that waits for its handshake, until the guard is dropped.
    pub(super) fn count_queued(&self) -> QueuedConnection {
        self.queued.inc();
        QueuedConnection(self.queued.clone())
    }
}

/// One counted connection that waits for its handshake.
pub(super) struct QueuedConnection(Gauge<i64>);

impl Drop for QueuedConnection {
    fn drop(&mut self) {
        self.0.dec();
    }
}
