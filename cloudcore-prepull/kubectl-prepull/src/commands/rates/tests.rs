#![allow(clippy::unwrap_used)]
use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::edges::EdgeDownload;
use prepull_api::edges::sites::SiteActivity;
use prepull_api::task::JobUid;

use super::*;
use crate::screen::Screen;
use crate::snapshot::assert_snapshot;

const NOW: Timestamp = Timestamp::constant(1_795_000_000, 0);

fn download(job: &str, bytes_per_second: u64, shared: bool) -> EdgeDownload {
    let heard = Time(NOW - SignedDuration::from_secs(if shared { 12 } else { 2 }));
    EdgeDownload { job: JobUid(job.to_owned()), bytes_per_second, shared, heard }
}

fn edge(name: &str, site: Option<&str>, downloads: Vec<EdgeDownload>) -> ListedEdge {
    let site = site.map(str::to_owned);
    ListedEdge { name: name.into(), connected: true, site, downloads, ..ListedEdge::default() }
}

fn sites(items: Vec<SiteActivity>) -> SiteList {
    SiteList { items, known_since: Time(NOW), site_label: "zone".to_owned() }
}

fn jobs() -> BTreeMap<String, String> {
    [("u1", "spring-release"), ("u2", "nightly")].map(|(uid, name)| (uid.to_owned(), name.to_owned())).into()
}

fn busy(site: Option<&str>) -> Rates {
    let edges = [
        edge("edge-1", Some("store-17"), vec![download("u1", 3 << 20, true)]),
        edge("edge-2", Some("store-17"), vec![download("u2", 1 << 20, false), download("u1", 2 << 20, true)]),
        edge("edge-3", None, vec![download("gone", 9 << 20, false)]),
    ];
    let shop = SiteActivity {
        name: "store-17".to_owned(),
        uplink_bytes_per_second: 4 << 20,
        ..SiteActivity::default()
    };
    let idle = SiteActivity { name: "store-18".to_owned(), ..SiteActivity::default() };
    summarize_rates(&edges, &sites(vec![shop, idle]), &jobs(), site, NOW)
}

#[test]
fn an_uplink_has_carriers_and_lone_nodes() {
    let rates = busy(None);
    let sums: Vec<_> = rates
        .sites
        .iter()
        .map(|row| (row.site.as_deref(), row.uplink_bytes_per_second >> 20, row.nodes))
        .collect();
    assert_eq!(sums, [(None, 9, 1), (Some("store-17"), 5, 2)]);
    let order: Vec<_> = rates.nodes.iter().map(|row| row.bytes_per_second >> 20).collect();
    assert_eq!(order, [9, 3, 2, 1]);
    let one = busy(Some("store-17"));
    assert_eq!((one.sites.len(), one.nodes.len()), (1, 3));
}

#[test]
fn an_invented_rate_wraps_no_sum() {
    let lying = edge("edge-1", None, vec![download("u1", u64::MAX, false), download("u2", u64::MAX, false)]);
    let rates = summarize_rates(&[lying], &sites(Vec::new()), &jobs(), None, NOW);
    assert_eq!(rates.sites[0].uplink_bytes_per_second, u64::MAX);
}

#[test]
fn rates_are_tables_by_width() {
    for width in [80, 160] {
        let text = render(&busy(None), Screen::plain(width), false);
        assert_snapshot(&format!("commands/rates/tests/rates-{width}.txt"), &text);
    }
    let idle = summarize_rates(&[], &sites(Vec::new()), &jobs(), None, NOW);
    assert!(render(&idle, Screen::plain(80), false).starts_with("Nothing is downloaded now"));
}

#[test]
fn many_nodes_need_the_wide_table() {
    let edges: Vec<_> =
        (0..40).map(|n| edge(&format!("edge-{n}"), None, vec![download("u1", 1 << 20, false)])).collect();
    let rates = summarize_rates(&edges, &sites(Vec::new()), &jobs(), None, NOW);
    let text = render(&rates, Screen::plain(80), false);
    assert!(text.contains("25 more with -o wide") && !text.contains("edge-39"), "{text}");
    assert!(render(&rates, Screen::plain(80), true).contains("edge-39"));
}

#[test]
fn an_edge_forges_no_line_of_rates() {
    let hostile = "a\u{1b}[2K\r\nedge-9\u{202e}x\u{2028}";
    let edges = [edge(hostile, Some(hostile), vec![download("u1", 1, false)])];
    let text =
        render(&summarize_rates(&edges, &sites(Vec::new()), &jobs(), None, NOW), Screen::plain(200), true);
    assert!(!text.contains(|c: char| c != '\n' && prepull_api::text::is_display_control(c)), "{text:?}");
}
