#![allow(clippy::unwrap_used)]
use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::edges::sites::{SiteActivity, SiteDownload, SiteList};

use super::table::render;
use super::*;
use crate::screen::Screen;
use crate::snapshot::assert_snapshot;

const NOW: Timestamp = Timestamp::constant(1_795_000_000, 0);

fn ago(seconds: i64) -> Time {
    Time(NOW - SignedDuration::from_secs(seconds))
}

fn list(items: Vec<SiteActivity>) -> SiteList {
    SiteList { items, known_since: ago(11_100), site_label: "topology.kubernetes.io/zone".to_owned() }
}

fn site(name: &str) -> SiteActivity {
    let download = |node: &str, rate, alone: Option<&str>| SiteDownload {
        node: node.into(),
        digest: format!("sha256:{}", "0123456789abcdef".repeat(4)),
        size: 80 << 20,
        done: 20 << 20,
        since: ago(252),
        bytes_per_second: rate,
        alone: alone.map(str::to_owned),
    };
    SiteActivity {
        name: name.to_owned(),
        nodes: 20,
        layers: 7,
        waiting: 12,
        carriers: 2,
        uplink_bytes_per_second: 1_300_000,
        bytes_shared: 9 << 30,
        bytes_carried: 1 << 30,
        leases_lost: 1,
        claims_refused: 2,
        holders_delisted: 3,
        downloads: vec![
            download("edge-1", 1_000_000, None),
            download("edge-of-the-branch", 300_000, Some("its site has too many layers to be kept track of")),
        ],
    }
}

#[test]
fn sites_are_a_table_by_width() {
    let sites =
        list(vec![site("store-17"), SiteActivity { name: "north".to_owned(), ..SiteActivity::default() }]);
    for width in [80, 160] {
        let text = render(&sites, false, Screen::plain(width), false, NOW);
        assert_snapshot(&format!("commands/sites/tests/sites-{width}.txt"), &text);
        let text = render(&list(vec![site("store-17")]), true, Screen::plain(width), false, NOW);
        assert_snapshot(&format!("commands/sites/tests/site-{width}.txt"), &text);
    }
    assert_eq!(
        render(&sites, false, Screen::plain(80), true, NOW),
        render(&sites, false, Screen::plain(160), false, NOW)
    );
}

#[test]
fn no_site_names_the_label() {
    let text = render(&list(Vec::new()), false, Screen::plain(80), false, NOW);
    assert!(text.starts_with("No site fits") && text.contains("topology.kubernetes.io/zone"), "{text}");
}

#[test]
fn an_edge_forges_no_line_of_a_site() {
    let hostile = "a\u{1b}[2K\r\nedge-9\u{202e}x\u{2028}";
    let mut site = site(hostile);
    for download in &mut site.downloads {
        download.digest = hostile.to_owned();
        download.alone = Some(hostile.to_owned());
        download.node = hostile.into();
    }
    let text = render(&list(vec![site]), true, Screen::plain(200), true, NOW);
    assert!(!text.contains(|c: char| c != '\n' && prepull_api::text::is_display_control(c)), "{text:?}");
    assert!(!text.lines().any(|line| line.starts_with("edge-9")), "{text}");
}
