#![allow(clippy::unwrap_used)]
use std::collections::BTreeMap;
use std::time::{Duration, UNIX_EPOCH};

use prepull_api::crd::EDGE_LABEL;
use prepull_api::enroll::SubjectForm;
use prepull_api::task::{ByteProgress, ImagePhase, ImageProgress, JobUid, TaskOutcome, TaskResult};
use prepull_api::wire::{OpenTask, TaskProgress};

use super::*;
use crate::edges::pki::KeyHash;

const SESSION: SessionId = SessionId(1);

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn node(name: &str, site: &str) -> NodeView {
    let labels = [(EDGE_LABEL, ""), ("topology.kubernetes.io/zone", site), ("line", "l1")];
    let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    NodeView { name: name.into(), labels, ready: true }
}

fn task(number: u32) -> TaskId {
    TaskId { job: JobUid("u".to_owned()), attempt: number }
}

fn result(number: u32) -> EdgeMessage {
    EdgeMessage::Result(TaskResult::new(task(number), TaskOutcome::Succeeded))
}

fn hello() -> Hello {
    let disk = Filesystem { mountpoint: "/var".to_owned(), available: 5, capacity: 9 };
    let open = |number, phase| OpenTask { task: task(number), phase, limited: false };
    Hello {
        version: "0.2.0".to_owned(),
        os: "linux".to_owned(),
        arch: "arm64".to_owned(),
        runtime: Some("containerd 1.7.24".to_owned()),
        image_filesystem: Some(disk),
        max_tasks: Some(2),
        open: vec![open(1, OpenPhase::Running), open(2, OpenPhase::Finished)],
        ..Hello::default()
    }
}

fn peer(node: &str) -> PeerIdentity {
    let key = KeyHash::new([0; 32]);
    PeerIdentity { node: node.into(), form: SubjectForm::Own, key, not_after: UNIX_EPOCH }
}

fn list(directory: &Directory, nodes: &[NodeView], query: &str) -> EdgeList {
    list_by(directory, nodes, query, "topology.kubernetes.io/zone")
}

fn list_by(directory: &Directory, nodes: &[NodeView], query: &str, site_label: &str) -> EdgeList {
    let recorded = |node: &NodeName| Recorded {
        certificate_until: (node.as_str() != "new").then_some(UNIX_EPOCH + Duration::from_secs(1000)),
        is_revoked: node.as_str() == "stolen",
    };
    let query = EdgeQuery::parse(query).unwrap();
    directory.list(nodes.iter(), NodeView::is_edge, recorded, &query, (at(0), at(30)), site_label)
}

fn names(list: &EdgeList) -> Vec<&str> {
    list.items.iter().map(|edge| edge.name.as_str()).collect()
}

/// The only edge of the list.
fn only(list: EdgeList) -> ListedEdge {
    let [edge]: [ListedEdge; 1] = list.items.try_into().unwrap();
    edge
}

#[test]
fn lists_an_edges_reports_and_last_connection() {
    let (directory, nodes) = (Directory::default(), [node("a", "north")]);
    directory.note_connected(&peer("a"), SESSION, &hello(), at(10));
    let connected = ListedEdge {
        name: "a".into(),
        connected: true,
        connected_since: Some(Time(at(10))),
        last_seen: None,
        ready: true,
        site: Some("north".to_owned()),
        version: Some("0.2.0".to_owned()),
        os: Some("linux".to_owned()),
        arch: Some("arm64".to_owned()),
        runtime: Some("containerd 1.7.24".to_owned()),
        disk: Some(Filesystem { mountpoint: "/var".to_owned(), available: 5, capacity: 9 }),
        certificate_until: Some(Time(at(1000))),
        revoked: false,
        tasks: Some(1),
        max_tasks: Some(2),
        downloads: Vec::new(),
    };
    assert_eq!(only(list(&directory, &nodes, "")), connected);

    directory.apply_message(&"a".into(), SESSION, &EdgeMessage::Accepted { task: task(3) }, at(15));
    directory.apply_message(&"a".into(), SESSION, &EdgeMessage::Accepted { task: task(3) }, at(15));
    assert_eq!(only(list(&directory, &nodes, "")).tasks, Some(2));
    directory.apply_message(&"a".into(), SESSION, &result(1), at(15));
    directory.apply_message(&"a".into(), SESSION, &result(3), at(15));
    directory.apply_message(&"a".into(), SESSION, &result(3), at(15));
    let disk = Filesystem { mountpoint: "/var".to_owned(), available: 1, capacity: 9 };
    let state =
        NodeState { runtime: Some("containerd 2.1.0".to_owned()), image_filesystem: Some(disk.clone()) };
    directory.apply_message(&"a".into(), SESSION, &EdgeMessage::State(state), at(15));
    directory.note_disconnected(&"a".into(), SESSION, at(20));
    let runtime = Some("containerd 2.1.0".to_owned());
    let gone = ListedEdge {
        connected: false,
        connected_since: None,
        last_seen: Some(Time(at(20))),
        runtime,
        disk: Some(disk),
        tasks: Some(0),
        ..connected
    };
    assert_eq!(only(list(&directory, &nodes, "")), gone);
}

#[test]
fn a_new_leader_lists_edges_by_node() {
    let list = list(&Directory::default(), &[node("a", "north"), node("stolen", "")], "limit=1");
    assert_eq!((list.total, list.connected, list.known_since), (2, 0, Time(at(0))));
    let expected = ListedEdge {
        name: "a".into(),
        ready: true,
        site: Some("north".to_owned()),
        certificate_until: Some(Time(at(1000))),
        ..ListedEdge::default()
    };
    assert_eq!(list.items, [expected]);
}

#[test]
fn a_replaced_session_is_ignored() {
    let (directory, nodes) = (Directory::default(), [node("a", "")]);
    directory.note_connected(&peer("a"), SESSION, &hello(), at(1));
    let newer = Hello { version: "0.3.0".to_owned(), ..Hello::default() };
    directory.note_connected(&peer("a"), SessionId(2), &newer, at(2));
    directory.note_connected(&peer("a"), SESSION, &hello(), at(2));
    directory.apply_message(&"a".into(), SESSION, &EdgeMessage::Accepted { task: task(1) }, at(15));
    directory.note_disconnected(&"a".into(), SESSION, at(3));
    let edge = only(list(&directory, &nodes, ""));
    assert_eq!((edge.connected, edge.version.as_deref(), edge.tasks), (true, Some("0.3.0"), Some(0)));
    assert_eq!((edge.max_tasks, edge.runtime, edge.disk), (Some(1), None, None), "an old agent says less");
}

#[test]
fn pages_are_consecutive_and_count_all_matches() {
    let directory = Directory::default();
    let other = NodeView { name: "cloud".into(), labels: BTreeMap::new(), ready: true };
    let nodes = [node("a", "n"), node("b", "s"), node("c", "n"), other, node("d", "n"), node("e", "n")];
    for up in ["a", "d"] {
        directory.note_connected(&peer(up), SESSION, &hello(), at(1));
    }
    let zone = "labelSelector=topology.kubernetes.io/zone=n&limit=2";
    let first = list(&directory, &nodes, zone);
    assert_eq!((names(&first), first.total, first.connected), (vec!["a", "c"], 4, 2));
    assert_eq!(first.next, Some("c".into()));
    let second = list(&directory, &nodes, &format!("{zone}&after=c"));
    assert_eq!((names(&second), second.total, second.next.as_ref()), (vec!["d", "e"], 4, None));
    assert_eq!(names(&list(&directory, &nodes, "connected=true")), ["a", "d"]);
    assert_eq!(names(&list(&directory, &nodes, "connected=false")), ["b", "c", "e"]);
    let named = list(&directory, &nodes, "names=b,x,cloud&siteLabel=line");
    assert_eq!((names(&named), named.items[0].site.as_deref()), (vec!["b"], Some("l1")));
    // A node without the label has an edge all the same, if one has connected.
    directory.note_connected(&peer("cloud"), SESSION, &hello(), at(1));
    assert_eq!(list(&directory, &nodes, "").total, 6);
}

#[test]
fn a_query_can_override_the_site_label() {
    let (directory, nodes) = (Directory::default(), [node("a", "north")]);
    for (query, label, site) in [
        ("", "line", "l1"),
        ("siteLabel=topology.kubernetes.io/zone", "topology.kubernetes.io/zone", "north"),
    ] {
        let list = list_by(&directory, &nodes, query, "line");
        assert_eq!(list.site_label.as_deref(), Some(label));
        assert_eq!(only(list).site.as_deref(), Some(site));
    }
}

#[test]
fn an_edge_without_node_goes_with_its_session() {
    let (directory, nodes) = (Directory::default(), [node("a", ""), node("b", "")]);
    for name in ["a", "b"] {
        directory.note_connected(&peer(name), SESSION, &hello(), at(1));
    }
    directory.note_disconnected(&"b".into(), SESSION, at(2));
    directory.keep_nodes(|_| false);
    assert_eq!(directory.all.lock().known.len(), 1, "one is still connected");
    directory.note_disconnected(&"a".into(), SESSION, at(2));
    assert_eq!(directory.all.lock().known.len(), 0);
    // Made again in the meantime, it is known as before.
    directory.note_connected(&peer("a"), SESSION, &hello(), at(1));
    directory.note_node(&"a".into(), false);
    directory.note_node(&"a".into(), true);
    directory.note_disconnected(&"a".into(), SESSION, at(2));
    assert_eq!(only(list(&directory, &nodes[..1], "")).last_seen, Some(Time(at(2))));
    directory.note_node(&"a".into(), false);
    assert_eq!(directory.all.lock().known.len(), 0);
}

#[test]
fn what_an_edge_says_takes_bounded_memory() {
    let (directory, nodes) = (Directory::default(), [node("a", "")]);
    let long = "x".repeat(100_000);
    let disk = Filesystem { mountpoint: long.clone(), available: 1, capacity: 1 };
    let hello = Hello {
        version: long.clone(),
        os: long.clone(),
        arch: long.clone(),
        runtime: Some(long.clone()),
        image_filesystem: Some(disk.clone()),
        ..Hello::default()
    };
    directory.note_connected(&peer("a"), SESSION, &hello, at(1));
    let state = NodeState { runtime: Some(long), image_filesystem: Some(disk) };
    directory.apply_message(&"a".into(), SESSION, &EdgeMessage::State(state), at(15));
    for number in 0..1000 {
        directory.apply_message(&"a".into(), SESSION, &EdgeMessage::Accepted { task: task(number) }, at(15));
    }
    let edge = only(list(&directory, &nodes, ""));
    assert_eq!(edge.tasks, u32::try_from(MAX_OPEN_TASKS).ok());
    assert!(serde_json::to_string(&edge).unwrap().len() < 1500);
}

#[test]
fn what_an_edge_downloads_is_listed() {
    let (directory, nodes) = (Directory::default(), [node("a", "north")]);
    directory.note_connected(&peer("a"), SESSION, &hello(), at(10));
    for (second, done) in [(20, 0), (30, 1_000)] {
        let image = ImageProgress {
            bytes: Some(ByteProgress { done, total: 9_000 }),
            attempts: 1,
            ..ImageProgress::new(0, ImagePhase::Pulling)
        };
        let progress = TaskProgress { task: task(1), images: vec![image], waits: String::new() };
        directory.apply_message(&"a".into(), SESSION, &EdgeMessage::Progress(progress), at(second));
    }
    let downloads = only(list(&directory, &nodes, "")).downloads;
    assert_eq!((downloads[0].bytes_per_second, &downloads[0].job), (100, &task(1).job));
    directory.apply_message(&"a".into(), SESSION, &result(1), at(30));
    assert_eq!(only(list(&directory, &nodes, "")).downloads, []);
}
