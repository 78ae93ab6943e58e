//! What sites do right now, for metrics, the log, the list of edges and the page.

use jiff::Timestamp;
use prepull_api::task::NodeName;

use super::Sites;
use super::book::Way;
use super::nodes::NodeId;
use super::site::Site;

/// Most sites of a report.
const MAX_REPORTS: usize = 1000;
/// Most downloads over the uplink in the report of a site.
const MAX_CARRIERS: usize = 64;

/// What one site does right now.
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
    /// Bytes that the node says it has.
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
    /// Downloads that a node began without a lease, and was told to stop.
    pub claims_refused: u64,
    /// Nodes that no neighbour is sent to any more, because two of them complained.
    pub holders_delisted: u64,
    /// Bytes that came from neighbours.
    pub bytes_shared: u64,
    /// Bytes that came over the uplink.
    pub bytes_carried: u64,
}

/// What a node did that an operator may want to know, one line of the log each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SiteEvent {
    /// The value of the site label.
    pub site: String,
    /// The node.
    pub node: NodeName,
    /// `sha256:…`; empty where it isn't about one blob.
    pub digest: String,
    /// What it did.
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

impl Sites {
    /// The sites with blobs, the most active first.
    pub(crate) fn reports(&self, now: Timestamp) -> Vec<SiteReport> {
        let mut reports: Vec<_> = self.by_name.values().map(|site| self.report(site, now)).collect();
        reports
            .sort_by_key(|report| std::cmp::Reverse((report.carriers.len(), report.waiting, report.nodes)));
        reports.truncate(MAX_REPORTS);
        reports
    }

    fn report(&self, site: &Site, now: Timestamp) -> SiteReport {
        let carrier = |(node, number): &(NodeId, u32)| {
            let book = site.books.get(number)?;
            let seeker = book.seekers.get(node)?;
            let Way::Registry(carry) = &seeker.way else { return None };
            Some(CarrierReport {
                node: self.nodes[*node].name.clone(),
                digest: book.id.digest.to_string(),
                size: book.id.size,
                done: seeker.done,
                since: Timestamp::from_millisecond(carry.since).unwrap_or(now),
                bytes_per_second: carry.bytes_per_second,
                alone: carry.alone,
            })
        };
        let mut carriers: Vec<_> = site.carrying.iter().take(MAX_CARRIERS).filter_map(carrier).collect();
        carriers.sort_by_key(|carrier| std::cmp::Reverse(carrier.bytes_per_second));
        SiteReport {
            site: site.name.to_string(),
            nodes: site.nodes,
            blobs: site.books.len() - site.idle.len(),
            waiting: site.waiting_nodes,
            carriers,
            counters: site.counters,
        }
    }
}
