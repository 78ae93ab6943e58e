//! Metrics of what the controller does not learn about: connections that wait or do not get in, and edges that are sent
//! away.

use prepull_program::metrics::{Label, TwoLabels};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use crate::edges::pki::CaCensus;

prepull_program::metrics! {
    /// Metrics of both ports. Cheap to clone; all clones share the values.
    pub struct EdgeMetrics {
        /// Edges that were told to come back later, by reason
        sent_away: Family<Label, Counter>,
        /// Connections that wait for their handshake to begin
        waiting_connections: Gauge<i64>,
        /// Connections that ended before or during their handshake, by port and reason
        turned_away: Family<TwoLabels, Counter>,
        /// Connected edges that are not done with a change of the CA or of the subject, by what is of before
        outdated_edges: Family<Label, Gauge>,
    }
}

impl EdgeMetrics {
    /// Counts an edge that we sent away for some time.
    pub(super) fn count_sent_away(&self, reason: &'static str) {
        self.sent_away.get_or_create(&[("reason", reason)]).inc();
    }

    /// Counts a connection that waits for its handshake, until the guard is dropped.
    pub(super) fn count_waiting(&self) -> WaitingConnection {
        self.waiting_connections.inc();
        WaitingConnection(self.waiting_connections.clone())
    }

    /// Sets how many edges keep a rotation from its next step, or the old subject in use.
    pub(crate) fn set_outdated(&self, census: &CaCensus) {
        let CaCensus { connected, informed, renewed, unable, old_subject } = *census;
        for (part, edges) in [
            ("agent", unable),
            ("trust", connected - informed),
            ("certificate", connected - renewed),
            ("subject", old_subject),
        ] {
            let edges = i64::try_from(edges).unwrap_or(i64::MAX);
            self.outdated_edges.get_or_create(&[("part", part)]).set(edges);
        }
    }

    /// Counts a connection that did not get in.
    pub(super) fn count_turned_away(&self, port: &'static str, reason: &'static str) {
        self.turned_away.get_or_create(&[("port", port), ("reason", reason)]).inc();
    }
}

/// One counted connection that waits for its handshake.
pub(super) struct WaitingConnection(Gauge<i64>);

impl Drop for WaitingConnection {
    fn drop(&mut self) {
        self.0.dec();
    }
}
