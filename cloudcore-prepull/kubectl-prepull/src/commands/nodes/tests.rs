#![allow(clippy::unwrap_used, clippy::unnecessary_wraps)] // as the fields have it
use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::edges::{EdgeList, ListedEdge};
use prepull_api::wire::Filesystem;

use super::table::Table;
use super::*;
use crate::screen::Screen;
use crate::snapshot::assert_snapshot;

const NOW: Timestamp = Timestamp::constant(1_795_000_000, 0);

fn at(seconds: i64) -> Option<Time> {
    Some(Time(NOW + SignedDuration::from_secs(seconds)))
}

fn edge(name: &str) -> ListedEdge {
    ListedEdge {
        name: name.into(),
        connected: true,
        connected_since: at(-11_100),
        ready: true,
        site: Some("north".to_owned()),
        version: Some("0.1.0".to_owned()),
        os: Some("linux".to_owned()),
        arch: Some("arm64".to_owned()),
        runtime: Some("containerd 1.7.24".to_owned()),
        disk: Some(Filesystem {
            mountpoint: "/var/lib/containerd".to_owned(),
            available: 2 << 30,
            capacity: 30 << 30,
        }),
        certificate_until: at(27 * 86_400),
        tasks: Some(1),
        max_tasks: Some(2),
        ..ListedEdge::default()
    }
}

#[test]
fn edges_cannot_forge_lines_or_move_cursors() {
    let hostile =
        |name: &str| Some(format!("{name}\u{1b}]52;c;eA==\u{7}\u{1b}[2K\r\nedge-9\u{202e}x\u{2028}"));
    let edge = ListedEdge {
        version: hostile("v"),
        runtime: hostile("r"),
        arch: hostile("a"),
        site: hostile("s"),
        disk: Some(Filesystem { mountpoint: hostile("/").unwrap(), available: 1, capacity: 2 }),
        ..edge("edge-1")
    };
    let mut table = Table::new(NOW);
    table.add(&EdgeList {
        items: vec![edge],
        total: 1,
        connected: 1,
        next: None,
        known_since: at(-400_000).unwrap(),
        site_label: None,
        version: None,
    });
    let text = table.render(Screen::plain(200), true);
    assert!(!text.contains(|c: char| c != '\n' && prepull_api::text::is_display_control(c)), "{text:?}");
    assert_eq!(text.lines().filter(|line| line.contains("edge-")).count(), 1, "{text}");
}

fn table() -> Table {
    let away =
        ListedEdge { connected: false, connected_since: None, last_seen: at(-300_000), ..edge("edge-2") };
    let revoked = ListedEdge {
        connected: false,
        connected_since: None,
        last_seen: at(-60),
        revoked: true,
        ..edge("edge-3")
    };
    let unknown =
        ListedEdge { name: "edge-of-the-southern-branch".into(), ready: true, ..ListedEdge::default() };
    let mut table = Table::new(NOW);
    let page = |items| EdgeList {
        items,
        total: 4,
        connected: 1,
        next: None,
        known_since: at(-400_000).unwrap(),
        site_label: None,
        version: None,
    };
    table.add(&page(vec![edge("edge-1"), away]));
    table.add(&page(vec![revoked, unknown]));
    table
}

#[test]
fn narrow_tables_drop_columns() {
    assert_snapshot("commands/nodes/tests/edges-80.txt", &table().render(Screen::plain(80), false));
    assert_snapshot("commands/nodes/tests/edges-160.txt", &table().render(Screen::plain(160), false));
    assert_snapshot("commands/nodes/tests/edges-wide.txt", &table().render(Screen::plain(80), true));
}

#[test]
fn an_empty_list_explains_edges() {
    let mut table = Table::new(NOW);
    table.add(&EdgeList {
        items: Vec::new(),
        total: 0,
        connected: 0,
        next: None,
        known_since: at(0).unwrap(),
        site_label: None,
        version: None,
    });
    let text = table.render(Screen::plain(80), false);
    assert!(text.starts_with("No edge fits") && text.contains("node-role.kubernetes.io/edge"), "{text}");
}

#[test]
fn the_flags_ask_for_what_they_say() {
    use clap::Parser;
    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: NodesArgs,
    }
    let query = |line: &str| Line::try_parse_from(line.split(' ')).map(|line| line.args.query().unwrap());
    let away = query("nodes --away -l site=a edge-1").unwrap();
    assert_eq!(
        (away.connected, away.names.len(), away.selector.to_string().as_str()),
        (Some(false), 1, "site=a")
    );
    assert_eq!(query("nodes --connected").unwrap().connected, Some(true));
    assert_eq!(query("nodes").unwrap(), EdgeQuery::default());
    assert!(query("nodes --connected --away").is_err() && query("nodes -l ~").is_err());
}

#[test]
fn unknown_names_and_verbs_are_errors() {
    let found = [edge("edge-1")];
    let said = |names: &str| {
        let asked: Vec<_> = names.split(' ').map(str::to_owned).collect();
        refuse_unknown(&asked, &found).map_err(|error| error.to_string())
    };
    assert_eq!(said("edge-1"), Ok(()));
    assert!(said("edge-1 edge-2 edge-3").unwrap_err().contains("no edge is called edge-2, edge-3"));
    assert!(said("revoke edge-1").unwrap_err().ends_with("kubectl prepull node revoke NAME"));
}

#[test]
fn edges_are_sorted_and_outdated_ones_kept() {
    let of = |name: &str, version: &str, free: u64, seen: Option<i64>| ListedEdge {
        version: Some(version.to_owned()),
        disk: Some(Filesystem { mountpoint: "/".to_owned(), available: free, capacity: 9 }),
        connected: seen.is_none(),
        last_seen: seen.and_then(at),
        ..edge(name)
    };
    let items = vec![
        of("a", "0.0.9", 3, None),
        of("b", "0.0.10", 1, Some(-5)),
        of("c", env!("CARGO_PKG_VERSION"), 2, Some(-900)),
        of("d", "mine", 4, None),
    ];
    let names_at = |leader: Option<&str>, outdated, order| {
        let (total, connected, known_since) = (4, 2, at(0).unwrap());
        let (next, site_label, version) = (None, None, leader.map(str::to_owned));
        let mut list =
            EdgeList { items: items.clone(), total, connected, next, known_since, site_label, version };
        filter_and_sort(&mut list, outdated, order);
        list.items.iter().map(|edge| edge.name.to_string()).collect::<Vec<_>>().join(" ")
    };
    let names = |outdated, order| names_at(None, outdated, order);
    assert_eq!(names(false, None), "a b c d");
    assert_eq!(names(false, Some(EdgeOrder::Disk)), "b c a d");
    assert_eq!(names(false, Some(EdgeOrder::Version)), "d a b c");
    assert_eq!(names(false, Some(EdgeOrder::Seen)), "c b a d");
    assert_eq!(names(true, None), "a");
    assert_eq!(names_at(Some("0.0.10"), true, None), "a");
    assert_eq!(names_at(Some("0.0.9"), true, None), "");
}
