//! The metrics of sites. The number of series is bounded: a fleet may have thousands of sites, and a stolen node
//! makes up more if its kubelet may set the label.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use prepull_engine::sites::{SiteCounters, SiteEventKind, SiteReport};
use prepull_program::metrics::Label;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

/// Most sites that have series: each has seven. The sums of a fleet's downloads are in the metrics of images.
const MAX_SITES: usize = 50;

prepull_program::metrics! {
    /// Metrics of sites. All clones share the values.
    pub(super) struct SiteSeries {
        /// Faults of nodes that share layers, of all sites together, by what happened
        sharing_faults: Family<Label, Counter>,
        /// Faults of nodes that share layers, by what happened; of the 50 most active sites
        site_faults: Family<(Label<String>, Label), Counter>,
        /// Bytes that nodes got from neighbours, as they say; of the 50 most active sites
        site_shared_bytes: Family<Label<String>, Counter>,
        /// Bytes that nodes downloaded over the uplink of their site, as they say; of the 50 most active sites
        site_carried_bytes: Family<Label<String>, Counter>,
        /// Downloads of layers over the uplink of a site now, at most 64; of the 50 most active sites
        site_carriers: Family<Label<String>, Gauge>,
        /// Bytes a second of layers over the uplink of a site, as its nodes say; of the 50 most active sites
        site_uplink_bytes_per_second: Family<Label<String>, Gauge>,
        /// Bytes of memory that is taken by what is known of sites, roughly
        sites_memory_bytes: Gauge,
        /// Bytes of memory that what is known of sites may take: --site-memory
        sites_memory_limit_bytes: Gauge,
    }
}

#[derive(Debug, Default)]
pub(super) struct SiteMetrics {
    pub(super) series: SiteSeries,
    shown: Mutex<HashSet<String>>,
}

impl SiteMetrics {
    pub(super) fn count_event(&self, kind: SiteEventKind) {
        let fault = match kind {
            SiteEventKind::LeaseLost => "lease_lost",
            SiteEventKind::CarriesNothing => "carries_nothing",
            SiteEventKind::ClaimRefused => "claim_refused",
            SiteEventKind::HolderDelisted => "holder_delisted",
            SiteEventKind::TooManyBlobs => "too_many_blobs",
        };
        self.series.sharing_faults.get_or_create(&[("fault", fault)]).inc();
    }

    pub(super) fn set_memory(&self, bytes: usize, limit: usize) {
        self.series.sites_memory_bytes.set(i64::try_from(bytes).unwrap_or(i64::MAX));
        self.series.sites_memory_limit_bytes.set(i64::try_from(limit).unwrap_or(i64::MAX));
    }

    /// Sets the series of the sites, and removes those of others. `reports` starts with the most active site.
    pub(super) fn set_reports(&self, reports: &[SiteReport]) {
        let reports = &reports[..reports.len().min(MAX_SITES)];
        let mut shown = self.shown.lock();
        let now: HashSet<String> = reports.iter().map(|report| report.site.clone()).collect();
        shown.difference(&now).for_each(|site| self.remove(site));
        *shown = now;
        for report in reports {
            self.set_one(report);
        }
    }

    fn set_one(&self, report: &SiteReport) {
        let label = [("site", report.site.clone())];
        for (fault, count) in faults(&report.counters) {
            let labels = (label.clone(), [("fault", fault)]);
            set_counter(&self.series.site_faults.get_or_create(&labels), count);
        }
        set_counter(&self.series.site_shared_bytes.get_or_create(&label), report.counters.bytes_shared);
        set_counter(&self.series.site_carried_bytes.get_or_create(&label), report.counters.bytes_carried);
        let rates = report.carriers.iter().map(|carrier| carrier.bytes_per_second);
        let rate = i64::try_from(rates.fold(0, u64::saturating_add)).unwrap_or(i64::MAX);
        self.series.site_uplink_bytes_per_second.get_or_create(&label).set(rate);
        let carriers = i64::try_from(report.carriers.len()).unwrap_or(i64::MAX);
        self.series.site_carriers.get_or_create(&label).set(carriers);
    }

    fn remove(&self, site: &str) {
        let label = [("site", site.to_owned())];
        for (fault, _) in faults(&SiteCounters::default()) {
            self.series.site_faults.remove(&(label.clone(), [("fault", fault)]));
        }
        self.series.site_shared_bytes.remove(&label);
        self.series.site_carried_bytes.remove(&label);
        self.series.site_carriers.remove(&label);
        self.series.site_uplink_bytes_per_second.remove(&label);
    }
}

fn faults(counters: &SiteCounters) -> [(&'static str, u64); 3] {
    [
        ("lease_lost", counters.leases_lost),
        ("claim_refused", counters.claims_refused),
        ("holder_delisted", counters.holders_delisted),
    ]
}

/// The tracker counts; a site that it has forgotten begins at nothing, like a counter after a restart.
fn set_counter(counter: &Counter<u64, AtomicU64>, value: u64) {
    counter.inner().store(value, Ordering::Relaxed);
}
