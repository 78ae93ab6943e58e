//! Makes the reports of sites.

use jiff::Timestamp;

use super::Sites;
use super::book::AssignedSource;
use super::nodes::NodeId;
use super::report::{CarrierReport, SiteReport};
use super::site::Site;

/// Most sites of a report.
const MAX_REPORTS: usize = 1000;
/// Most downloads over the uplink in the report of a site.
const MAX_CARRIERS: usize = 64;

impl Sites {
    /// The sites with blobs, the most active first.
    pub(crate) fn reports(&self, now: Timestamp) -> Vec<SiteReport> {
        let mut reports: Vec<_> = self.by_name.values().map(|site| self.report(site, now)).collect();
        reports
            .sort_by_key(|report| std::cmp::Reverse((report.carriers.len(), report.waiting, report.nodes)));
        reports.truncate(MAX_REPORTS);
        reports
    }

    /// One site, also one that the list has no place for.
    pub(crate) fn report_of(&self, site: &str, now: Timestamp) -> Option<SiteReport> {
        self.by_name.get(site).map(|site| self.report(site, now))
    }

    fn report(&self, site: &Site, now: Timestamp) -> SiteReport {
        let carrier = |(node, number): &(NodeId, u32)| {
            let book = site.books.get(number)?;
            let seeker = book.seekers.get(node)?;
            let AssignedSource::Registry(carry) = &seeker.way else { return None };
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
