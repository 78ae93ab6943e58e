//! Reports of sites for metrics, the log, the list of edges and the page.

use jiff::Timestamp;
use prepull_api::task::NodeName;

/// The present state of one site.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SiteReport {
    /// The value of the site label.
    pub site: String,
    /// Nodes that want or have a blob of a running task.
    pub nodes: usize,
    /// Blobs that some node wants.
    pub blobs: usize,
    /// Nodes that wait for a source of at least one blob.
    pub waiting: usize,
    /// Downloads over the uplink, the one with the most bytes a second first.
    pub carriers: Vec<CarrierReport>,
    /// Totals since this process began to lead.
    pub counters: SiteCounters,
}

/// A node that downloads a blob over the uplink of its site.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CarrierReport {
    /// The node.
    pub node: NodeName,
    /// `sha256:…`
    pub digest: String,
    /// Bytes of the whole blob.
    pub size: u64,
    /// Bytes that the node reports.
    pub done: u64,
    /// When its lease began.
    pub since: Timestamp,
    /// Bytes a second over the last minute, as the node reports them.
    pub bytes_per_second: u64,
    /// Why it doesn't share what it downloads; empty for the carrier of the site.
    pub alone: &'static str,
}

/// Totals of one site since this process began to lead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SiteCounters {
    /// Leases that ended without the whole blob.
    pub leases_lost: u64,
    /// Downloads that a node began without a lease, and had to stop.
    pub claims_refused: u64,
    /// Holders that were removed after complaints of two neighbours.
    pub holders_delisted: u64,
    /// Bytes that came from neighbours.
    pub bytes_shared: u64,
    /// Bytes that came over the uplink.
    pub bytes_carried: u64,
}

/// An event of a node for the operator's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SiteEvent {
    /// The value of the site label.
    pub site: String,
    /// The node.
    pub node: NodeName,
    /// `sha256:…`; empty if it isn't about one blob.
    pub digest: String,
    /// The kind.
    pub kind: SiteEventKind,
}

/// See [`SiteEvent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SiteEventKind {
    /// Its lease ended: it made no progress that a neighbour could confirm, or was far slower than others here.
    LeaseLost,
    /// It gets no lease for an hour, after two lost ones.
    CarriesNothing,
    /// It downloads over the uplink without a lease.
    ClaimRefused,
    /// Two neighbours complained about its bytes: no neighbour is sent to it for an hour.
    HolderDelisted,
    /// It named more blobs than a node may.
    TooManyBlobs,
}
