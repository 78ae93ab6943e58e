#![allow(clippy::unwrap_used)]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use prepull_api::crd::EDGE_LABEL;
use prepull_api::crd::settings::ImagePrePullSettingsSpec;
use prepull_api::wire::Hello;
use serde_json::{Value, json};

use super::*;

/// The settings of a fleet, and the objects with the statuses that were written.
struct Fleet {
    settings: FleetSettings,
    nodes: BTreeMap<NodeName, NodeView>,
    now: Timestamp,
    sessions: u64,
    /// The settings that each node got last, in this order.
    sent: Vec<(String, NodeSettings)>,
    stored: BTreeMap<String, ImagePrePullSettings>,
}

impl Fleet {
    fn with_nodes(labels: &[(&str, &str)]) -> Self {
        let node = |(name, site): &(&str, &str)| {
            let labels = [(EDGE_LABEL, ""), ("site", site)];
            let labels = labels.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
            (NodeName::from(*name), NodeView { name: NodeName::from(*name), labels, ready: true })
        };
        let mut settings = FleetSettings::default();
        settings.handle(Input::All(Vec::new()));
        let nodes = labels.iter().map(node).collect();
        let now = Timestamp::UNIX_EPOCH;
        Self { settings, nodes, now, sessions: 0, sent: Vec::new(), stored: BTreeMap::new() }
    }

    fn apply(&mut self, name: &str, spec: Value) {
        let created = Timestamp::UNIX_EPOCH.later_by(Duration::from_secs(self.stored.len() as u64));
        let stored = self.stored.entry(name.to_owned()).or_insert_with(|| {
            let mut object = ImagePrePullSettings::new(name, ImagePrePullSettingsSpec::default());
            object.metadata.uid = Some(format!("uid-of-{name}"));
            object.metadata.creation_timestamp = Some(Time(created));
            object
        });
        stored.spec = serde_json::from_value(spec).unwrap();
        stored.metadata.generation = Some(stored.metadata.generation.unwrap_or(0) + 1);
        self.settings.handle(Input::One(Box::new(stored.clone())));
        self.settle();
    }

    fn remove(&mut self, name: &str) {
        self.stored.remove(name);
        self.settings.handle(Input::Gone(name.to_owned()));
        self.settle();
    }

    fn connect(&mut self, node: &str, has: Option<NodeSettings>) -> SessionId {
        self.sessions += 1;
        let session = SessionId(self.sessions);
        let hello = Box::new(Hello { settings: has, ..Hello::default() });
        self.settings.note_session_event(&SessionEvent::Up { node: NodeName::from(node), session, hello });
        self.settle();
        session
    }

    fn confirm(&mut self, node: &str, session: SessionId, settings: NodeSettings) {
        let message = EdgeMessage::Configured { settings, windows: Vec::new() };
        self.settings.note_session_event(&SessionEvent::Message {
            node: NodeName::from(node),
            session,
            message,
        });
        self.settle();
    }

    fn relabel(&mut self, node: &str, site: &str) {
        let node = NodeName::from(node);
        self.nodes.get_mut(&node).unwrap().labels.insert("site".to_owned(), site.to_owned());
        self.settings.relabel(&node);
        self.settle();
    }

    fn settle(&mut self) {
        for _ in 0..4 {
            for action in self.settings.flush(&self.nodes, self.now) {
                match action {
                    Action::Configure(node, settings) => self.sent.push((node.to_string(), settings)),
                    Action::WriteStatus(id, status) => {
                        let object = self.stored.get_mut(&id.name).unwrap();
                        object.status = Some(*status);
                        self.settings.handle(Input::One(Box::new(object.clone())));
                    }
                }
            }
            self.now = self.settings.next_wakeup().unwrap_or(self.now).max(self.now);
        }
        assert_eq!(self.settings.next_wakeup(), None, "the statuses settle");
    }

    fn take_sent(&mut self) -> Vec<(String, NodeSettings)> {
        std::mem::take(&mut self.sent)
    }

    /// The condition Ready in short, after the numbers.
    fn status(&self, name: &str) -> String {
        let status = self.stored[name].status.clone().unwrap();
        let [ready] = &status.conditions[..] else { panic!("{status:?}") };
        let Condition { status: is, reason, message, .. } = ready;
        format!("{}/{} {is} {reason}: {message}", status.informed, status.nodes)
    }
}

fn rate(kib: u64) -> NodeSettings {
    NodeSettings { max_download_rate: std::num::NonZeroU64::new(kib << 10), ..NodeSettings::default() }
}

fn to(node: &str, settings: NodeSettings) -> (String, NodeSettings) {
    (node.to_owned(), settings)
}

#[test]
fn a_node_gets_what_chooses_it() {
    let mut fleet = Fleet::with_nodes(&[("a", "north"), ("b", "south"), ("c", "north")]);
    let none = Some(NodeSettings::default());
    let a = fleet.connect("a", none.clone());
    fleet.connect("b", none.clone());
    assert_eq!(fleet.take_sent(), []);
    fleet.apply(
        "north",
        json!({ "labelSelector": { "matchLabels": { "site": "north" } }, "maxDownloadRate": "64Ki" }),
    );
    assert_eq!(fleet.take_sent(), [to("a", rate(64))]);
    assert_eq!(
        fleet.status("north"),
        "0/2 False Waiting: 1 node has not confirmed it yet: a; 1 node is not connected, and gets it then: c"
    );
    fleet.confirm("a", a, rate(64));
    assert_eq!(fleet.status("north"), "1/2 True InForce: 1 node is not connected, and gets it then: c");
    // It has them from an earlier session.
    fleet.connect("c", Some(rate(64)));
    assert_eq!((fleet.take_sent(), fleet.status("north")), (vec![], "2/2 True InForce: ".to_owned()));
    fleet.relabel("b", "north");
    assert_eq!(fleet.take_sent(), [to("b", rate(64))]);
    fleet.relabel("b", "south");
    assert_eq!(fleet.take_sent(), [to("b", NodeSettings::default())]);
    fleet.remove("north");
    assert_eq!(fleet.take_sent(), [to("a", NodeSettings::default()), to("c", NodeSettings::default())]);
}

#[test]
fn an_object_that_is_made_again_counts() {
    let mut fleet = Fleet::with_nodes(&[("a", "north")]);
    fleet.connect("a", Some(NodeSettings::default()));
    fleet.apply("cap", json!({ "labelSelector": {}, "maxDownloadRate": "64Ki" }));
    // The watch has missed the deletion.
    let metadata = &mut fleet.stored.get_mut("cap").unwrap().metadata;
    (metadata.uid, metadata.generation) = (Some("another".to_owned()), None);
    fleet.apply("cap", json!({ "labelSelector": {}, "maxDownloadRate": "32Ki" }));
    assert_eq!(fleet.take_sent(), [to("a", rate(64)), to("a", rate(32))]);
}

#[test]
fn later_names_override_earlier_ones() {
    let mut fleet = Fleet::with_nodes(&[("a", "north")]);
    fleet.connect("a", Some(NodeSettings::default()));
    fleet.apply("20-a", json!({ "nodeNames": ["a"], "maxDownloadRate": "64Ki" }));
    fleet.apply("10-all", json!({ "labelSelector": {}, "maxDownloadRate": "1Ki", "makeRoom": true }));
    let sent = fleet.take_sent();
    let both = NodeSettings { make_room: Some(true), ..rate(64) };
    assert_eq!(sent, [to("a", rate(64)), to("a", both)]);
}

#[test]
fn an_invalid_object_leaves_its_nodes_as_they_are() {
    let mut fleet = Fleet::with_nodes(&[("a", "north"), ("b", "south")]);
    fleet.apply("cap", json!({ "nodeNames": ["a"], "maxDownloadRate": "64Ki" }));
    let none = Some(NodeSettings::default());
    let a = fleet.connect("a", none.clone());
    fleet.confirm("a", a, rate(64));
    fleet.connect("b", none);
    fleet.take_sent();
    for (spec, problem) in [
        (
            json!({ "nodeNames": ["a"], "maxDownloadRate": "64" }),
            "spec.maxDownloadRate: \"64\" is not a rate",
        ),
        (json!({ "nodeNames": ["a"], "imageGcHighThreshold": 101 }), "spec.imageGcHighThreshold: 101 is not"),
        (
            json!({ "nodeNames": ["a"], "windows": [{ "start": "01:00", "duration": "1h", "timeZone": "Mars" }] }),
            "spec.windows[0].timeZone: \"Mars\" is not a time zone",
        ),
        (
            json!({ "nodeNames": ["a"], "keepUnfinished": "30s" }),
            "spec.keepUnfinished: \"30s\" is not allowed: write 1m to 336h",
        ),
        (json!({}), "spec: neither nodeNames nor labelSelector is set"),
        (
            json!({ "labelSelector": { "matchExpressions": [{ "key": "a", "operator": "Is" }] } }),
            "spec.labelSelector: ",
        ),
    ] {
        fleet.apply("cap", spec);
        let status = fleet.status("cap");
        assert!(status.starts_with(&format!("0/0 False Invalid: {problem}")), "{status}");
        assert!(status.ends_with("; the nodes keep what they have"), "{status}");
        assert_eq!(fleet.take_sent(), [], "{problem}");
    }
    fleet.apply("cap", json!({ "nodeNames": ["a"], "maxDownloadRate": "32Ki" }));
    assert_eq!(fleet.take_sent(), [to("a", rate(32))]);
    fleet.apply("cap", json!({ "nodeNames": ["a"], "maxDownloadRate": "32Ki", "keepUnfinished": "36h" }));
    let kept = NodeSettings { keep_unfinished: Some(Duration::from_secs(36 * 3600)), ..rate(32) };
    assert_eq!(fleet.take_sent(), [to("a", kept)]);
}

#[test]
fn an_old_agent_is_named() {
    let mut fleet = Fleet::with_nodes(&[("a", "north")]);
    fleet.connect("a", None);
    fleet.apply("cap", json!({ "labelSelector": {}, "maxDownloadRate": "64Ki" }));
    assert_eq!(fleet.take_sent(), []);
    let expected = "0/1 False AgentTooOld: 1 node has an agent that doesn't know all of these settings (update edgecore-prepull): a";
    assert_eq!(fleet.status("cap"), expected);
    fleet.connect("a", Some(NodeSettings::default()));
    assert_eq!(fleet.take_sent(), [to("a", rate(64))]);
}

#[test]
fn an_agent_that_knows_less_is_named() {
    let mut fleet = Fleet::with_nodes(&[("a", "north")]);
    let a = fleet.connect("a", Some(NodeSettings::default()));
    fleet.apply("cap", json!({ "labelSelector": {}, "maxDownloadRate": "64Ki", "makeRoom": true }));
    assert!(fleet.status("cap").starts_with("0/1 False Waiting"), "{}", fleet.status("cap"));
    for known in [NodeSettings::default(), rate(64)] {
        fleet.confirm("a", a, known);
        assert!(fleet.status("cap").starts_with("0/1 False AgentTooOld"), "{}", fleet.status("cap"));
    }
    assert_eq!(fleet.take_sent().len(), 1);
}

#[test]
fn a_new_node_gets_what_valid_objects_set() {
    let mut fleet = Fleet::with_nodes(&[("a", "north"), ("b", "north")]);
    let a = fleet.connect("a", Some(NodeSettings::default()));
    fleet.apply("10-all", json!({ "labelSelector": {}, "maxDownloadRate": "64Ki" }));
    fleet.confirm("a", a, rate(64));
    fleet.take_sent();
    fleet.apply("20-bad", json!({ "labelSelector": {}, "maxDownloadRate": "fast" }));
    fleet.connect("b", Some(NodeSettings::default()));
    assert_eq!(fleet.take_sent(), [to("b", rate(64))]);
    // From now on it keeps that, as every other one.
    fleet.apply("10-all", json!({ "labelSelector": {}, "maxDownloadRate": "32Ki" }));
    assert_eq!(fleet.take_sent(), []);
    // What isn't sent, because the other object is invalid, isn't what an agent doesn't know.
    fleet.apply("10-all", json!({ "labelSelector": {}, "maxDownloadRate": "64Ki", "makeRoom": true }));
    assert!(fleet.status("10-all").starts_with("0/2 False Waiting"), "{}", fleet.status("10-all"));
}

#[test]
fn a_message_names_a_few_nodes() {
    let mut fleet = Fleet::with_nodes(&[("a", ""), ("b", ""), ("c", ""), ("d", "")]);
    fleet.apply("cap", json!({ "labelSelector": {} }));
    let expected = "0/4 True InForce: 4 nodes are not connected, and get it then: a, b, c, …";
    assert_eq!(fleet.status("cap"), expected);
}

#[test]
fn a_node_that_is_no_edge_is_not_chosen() {
    let mut fleet = Fleet::with_nodes(&[("a", "north")]);
    fleet.nodes.get_mut(&NodeName::from("a")).unwrap().labels.remove(EDGE_LABEL);
    fleet.connect("a", Some(NodeSettings::default()));
    fleet.apply("cap", json!({ "nodeNames": ["a"], "maxDownloadRate": "64Ki" }));
    assert_eq!(
        (fleet.take_sent(), fleet.status("cap")),
        (vec![], "0/0 True NoNodes: no edge node is chosen".to_owned())
    );
}

#[test]
fn what_was_sent_is_not_sent_again_in_the_session() {
    let mut fleet = Fleet::with_nodes(&[("a", "north")]);
    fleet.apply("cap", json!({ "labelSelector": {}, "maxDownloadRate": "64Ki" }));
    let a = fleet.connect("a", Some(NodeSettings::default()));
    fleet.apply("cap", json!({ "labelSelector": {}, "maxDownloadRate": "32Ki" }));
    assert_eq!(fleet.take_sent(), [to("a", rate(64)), to("a", rate(32))]);
    // The answer to the first message.
    fleet.confirm("a", a, rate(64));
    assert!(fleet.status("cap").starts_with("0/1 False Waiting"), "{}", fleet.status("cap"));
    fleet.confirm("a", a, rate(32));
    assert_eq!(fleet.status("cap"), "1/1 True InForce: ");
    assert_eq!(fleet.take_sent(), []);
    // The message was lost with the session.
    fleet.apply("cap", json!({ "labelSelector": {}, "maxDownloadRate": "16Ki" }));
    fleet.connect("a", Some(rate(32)));
    assert_eq!(fleet.take_sent(), [to("a", rate(16)), to("a", rate(16))]);
}

#[test]
fn an_earlier_session_that_comes_late_changes_nothing() {
    let mut fleet = Fleet::with_nodes(&[("a", "north")]);
    fleet.apply("cap", json!({ "labelSelector": {}, "maxDownloadRate": "64Ki" }));
    fleet.sessions = 1;
    fleet.connect("a", Some(rate(64)));
    assert_eq!(fleet.status("cap"), "1/1 True InForce: ");
    let (node, session) = (NodeName::from("a"), SessionId(1));
    let hello = Box::new(Hello { settings: Some(rate(32)), ..Hello::default() });
    for event in [
        SessionEvent::Up { node: node.clone(), session, hello },
        SessionEvent::Down { node: node.clone(), session },
    ] {
        fleet.settings.note_session_event(&event);
        fleet.settle();
    }
    fleet.confirm("a", session, rate(32));
    assert_eq!((fleet.status("cap").as_str(), fleet.take_sent()), ("1/1 True InForce: ", Vec::new()));
}

#[test]
fn no_node_fills_our_memory() {
    let mut fleet = Fleet::with_nodes(&[("a", "north")]);
    let window = |zone: &str| Window { time_zone: Zone::Named(zone.to_owned()), ..Window::never() };
    let mut takes = |windows| {
        fleet.connect("a", Some(NodeSettings { windows, ..NodeSettings::default() }));
        let has = fleet.settings.agents[&NodeName::from("a")].has.as_deref();
        has != Some(&NodeSettings::default())
    };
    let on_days = |days: usize| vec![Window { days: vec![Weekday::ALL[0]; days], ..window("UTC") }];
    assert!(takes(vec![window("UTC"); 16]) && !takes(vec![window("UTC"); 17]));
    assert!(takes(vec![window(&"z".repeat(64))]) && !takes(vec![window(&"z".repeat(65))]));
    assert!(takes(on_days(7)) && !takes(on_days(8)));
}

#[test]
fn the_hundred_oldest_count() {
    let mut fleet = Fleet::with_nodes(&[("a", "north")]);
    fleet.connect("a", Some(NodeSettings::default()));
    for index in 0..MAX_SETTINGS {
        fleet.apply(&format!("{index:03}"), json!({ "nodeNames": ["other"] }));
    }
    fleet.apply("000-new", json!({ "nodeNames": ["a"], "maxDownloadRate": "64Ki" }));
    assert_eq!(fleet.take_sent(), []);
    assert_eq!(fleet.status("099"), "0/0 True NoNodes: no edge node is chosen");
    assert!(
        fleet.status("000-new").contains("TooMany: there are 100 older ones"),
        "{}",
        fleet.status("000-new")
    );
}

#[test]
fn a_late_status_is_replaced() {
    let mut fleet = Fleet::with_nodes(&[("a", "north")]);
    fleet.apply("cap", json!({ "labelSelector": {} }));
    let late = fleet.stored["cap"].clone();
    fleet.connect("a", Some(NodeSettings::default()));
    assert_ne!(fleet.stored["cap"].status, late.status);
    fleet.settings.handle(Input::One(Box::new(late)));
    fleet.now = fleet.settings.next_wakeup().unwrap().max(fleet.now);
    let actions = fleet.settings.flush(&fleet.nodes, fleet.now);
    assert!(matches!(actions[..], [Action::WriteStatus(..)]), "{actions:?}");
}

#[test]
fn a_status_that_does_not_come_back_is_written_again() {
    // The second has none yet, so that its condition is new at each look.
    for has_status in [true, false] {
        let mut fleet = Fleet::with_nodes(&[]);
        fleet.apply("cap", json!({ "labelSelector": {} }));
        let labels = [(EDGE_LABEL.to_owned(), String::new())].into();
        let node = NodeView { name: NodeName::from("a"), labels, ready: true };
        fleet.nodes.insert(node.name.clone(), node);
        if has_status {
            fleet.settings.relabel_all();
        } else {
            fleet.settings.handle(Input::Gone("cap".to_owned()));
            let object = ImagePrePullSettings { status: None, ..fleet.stored["cap"].clone() };
            fleet.settings.handle(Input::One(Box::new(object)));
        }
        let (mut writes, end) = (Vec::new(), fleet.now.later_by(Duration::from_secs(100)));
        while fleet.now < end {
            fleet.now = fleet.settings.next_wakeup().unwrap().max(fleet.now);
            let written = !fleet.settings.flush(&fleet.nodes, fleet.now).is_empty();
            writes.extend(written.then(|| fleet.now.as_second()));
        }
        assert_eq!(writes.len(), 2, "{has_status} {writes:?}");
        assert_eq!(writes[1] - writes[0], 60, "{has_status} {writes:?}");
    }
}
