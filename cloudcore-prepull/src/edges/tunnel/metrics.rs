//! Metrics of what the controller does not learn about: queued and rejected connections.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

prepull_program::metrics! {
    /// Metrics of the tunnel. Cheap to clone; all clones share the values.
    pub struct TunnelMetrics {
        /// Edges that were told to come back later, by reason
        sent_away: Family<ReasonLabel, Counter>,
        /// Connections that wait for their handshake to begin
        waiting_connections: Gauge<i64>,
    }
}

impl TunnelMetrics {
    /// Counts an edge that was told to come back later.
    pub(super) fn count_sent_away(&self, reason: &'static str) {
        self.sent_away.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// Counts a connection that waits for its handshake, until the guard is dropped.
    pub(super) fn count_queued(&self) -> QueuedConnection {
        self.waiting_connections.inc();
        QueuedConnection(self.waiting_connections.clone())
    }
}

/// One counted connection that waits for its handshake.
pub(super) struct QueuedConnection(Gauge<i64>);

impl Drop for QueuedConnection {
    fn drop(&mut self) {
        self.0.dec();
    }
}
