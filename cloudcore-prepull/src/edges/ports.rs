//! The parts that the tunnel's port and the enrolment port have in common.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::metrics::EdgeMetrics;
use super::pki::ServerIdentity;
use super::roster::Roster;

/// The identity that both ports show, the keys that they accept, and their end.
#[derive(Clone)]
pub struct PortTerms {
    /// The server's certificate, and the CAs.
    pub identity: Arc<ServerIdentity>,
    /// The keys of the nodes.
    pub roster: Roster,
    /// Counts connections and refusals.
    pub metrics: EdgeMetrics,
    /// Ends the port.
    pub shutdown: CancellationToken,
}
