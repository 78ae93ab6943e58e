#![allow(clippy::unwrap_used)]

use crate::engine::Input;
use crate::fleet::event::FleetEvent;
use std::collections::BTreeMap;
use std::time::Duration;

use prepull_api::crd::EDGE_LABEL;
use prepull_api::crd::report::ImagePrePullReport;
use prepull_api::sites::PeerDoor;
use prepull_api::task::JobUid;
use prepull_api::wire::{EdgeMessage, Hello, OpenPhase, OpenTask};
use serde_json::{Value, json};

use super::*;
use crate::fleet::node_view::NodeView;
use crate::fleet::session::{SessionEvent, SessionId};
use crate::prepull::controller::{Action as Prepull, Content};
use crate::shared::access::KeysSent;
use crate::shared::outcomes::{DispatchOutcome, WriteOutcome};
use crate::sites::{Direction, SITE_LABEL, SiteEventKind};

/// An engine with a job of one private image, and what of it is stored.
struct World {
    engine: Engine,
    now: Timestamp,
    job: Value,
    reports: BTreeMap<u32, Value>,
    /// The credentials that each node gets.
    keys: BTreeMap<&'static str, KeysSent>,
    sent: Vec<String>,
    /// Whether the secrets of dispatches are still being read.
    is_reading: bool,
    heard: Vec<String>,
}

fn task() -> TaskId {
    TaskId { job: JobUid("uid".to_owned()), attempt: 1 }
}

impl World {
    fn new(keys: &[(&'static str, KeysSent)]) -> Self {
        let job = json!({
            "metadata": { "name": "job", "uid": "uid", "generation": 1 },
            "spec": {
                "imagePrePullTemplate": { "images": ["r.io/private:1"], "imageSecrets": "shop/registry",
                    "labelSelector": { "matchLabels": { EDGE_LABEL: "" } }, "concurrency": 10 },
                "followNodes": true,
            },
        });
        let mut world = Self {
            engine: Engine::default(),
            now: Timestamp::UNIX_EPOCH,
            job,
            reports: BTreeMap::new(),
            keys: keys.iter().copied().collect(),
            sent: Vec::new(),
            is_reading: false,
            heard: Vec::new(),
        };
        world.lead(&[]);
        world
    }

    /// A new leader begins with what is stored, and with what these nodes report in their first message.
    fn lead(&mut self, at_work: &[&str]) {
        let settings = crate::sites::SiteSettings { share_by_default: true, ..Default::default() };
        self.engine = Engine::default().with_sites(settings);
        let nodes = self.keys.keys().map(|name| node(name)).collect();
        self.give(FleetEvent::Nodes(nodes));
        self.give(controller::Input::Jobs(vec![Ok(serde_json::from_value(self.job.clone()).unwrap())]));
        for name in self.keys.keys().copied().collect::<Vec<_>>() {
            self.connect(name, at_work.contains(&name));
        }
        self.pass(5);
    }

    fn connect(&mut self, name: &str, is_at_work: bool) {
        self.connect_as(SessionId(1), name, is_at_work);
    }

    fn connect_as(&mut self, session: SessionId, name: &str, is_at_work: bool) {
        let open = OpenTask { task: task(), phase: OpenPhase::Running, limited: false };
        let hello = Hello {
            open: if is_at_work { vec![open] } else { Vec::new() },
            peer: Some(PeerDoor { addresses: vec!["10.0.0.1:1".to_owned()], streams: false }),
            ..Hello::default()
        };
        let up = SessionEvent::Up { node: name.into(), session, hello: Box::new(hello) };
        self.give(FleetEvent::Session(up));
    }

    fn add(&mut self, name: &'static str, keys: KeysSent) {
        self.keys.insert(name, keys);
        self.give(FleetEvent::Node(node(name)));
        self.connect(name, false);
        self.pass(5);
    }

    fn give(&mut self, input: impl Into<Input>) {
        self.engine.handle(input.into(), self.now);
        loop {
            let actions = self.engine.flush(self.now);
            if actions.is_empty() {
                return;
            }
            for action in actions {
                self.carry_out(action);
            }
        }
    }

    fn carry_out(&mut self, action: Action) {
        match action {
            Action::Prepull(Prepull::Write { job, version, content, .. }) => {
                let object = content.object();
                match content {
                    Content::Status(status) => self.job["status"] = serde_json::to_value(*status).unwrap(),
                    Content::Report(body) => {
                        let owner = json!([{ "apiVersion": "v1", "kind": "x", "name": "job", "uid": "uid" }]);
                        let index = body.index;
                        let mut report = serde_json::to_value(*body).unwrap();
                        report["metadata"] = json!({ "name": "r", "ownerReferences": owner });
                        self.reports.insert(index, report);
                    }
                }
                let outcome = WriteOutcome::Done;
                let written = controller::Input::Written { job, object, version, outcome, stored: None };
                self.engine.handle(written.into(), self.now);
            }
            Action::Prepull(Prepull::Recall { job, .. }) => {
                let reports: Vec<ImagePrePullReport> = self
                    .reports
                    .values()
                    .map(|report| serde_json::from_value(report.clone()).unwrap())
                    .collect();
                let object = Ok(serde_json::from_value(self.job.clone()).unwrap());
                let recalled = controller::Input::Recalled(job, reports, Some(object));
                self.engine.handle(recalled.into(), self.now);
            }
            Action::Prepull(Prepull::Dispatch(_)) if self.is_reading => {}
            Action::Prepull(Prepull::Dispatch(order)) => {
                self.sent.push(order.node.0.clone());
                let dispatched = controller::Input::Dispatched {
                    job: order.job.uid.clone(),
                    keys: Some(self.keys[order.node.as_str()]),
                    attempt: order.attempt,
                    node: order.node,
                    outcome: DispatchOutcome::Sent(SessionId(1)),
                };
                self.engine.handle(dispatched.into(), self.now);
            }
            Action::Direct(directions) => {
                let of = |direction: &Direction| match direction {
                    Direction::Registry { alone: "", max_rate: None } => "carry".to_owned(),
                    Direction::Registry { alone: "", max_rate: Some(rate) } => format!("carry at {rate}"),
                    Direction::Registry { alone, .. } => format!("alone: {alone}"),
                    Direction::Wait => "wait".to_owned(),
                    Direction::Peers(peers) => peers[0].0.to_string(),
                };
                let node = &directions.node;
                self.heard.extend(directions.blobs.iter().map(|(_, way)| format!("{node}: {}", of(way))));
            }
            _ => {}
        }
    }

    fn pass(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.now += Duration::from_secs(1);
            self.give(Input::Tick);
        }
    }

    fn session(&mut self, name: &str, message: EdgeMessage) {
        let (node, session) = (name.into(), SessionId(1));
        self.give(FleetEvent::Session(SessionEvent::Message { node, session, message }));
    }

    /// The node reports the layer. Returns what nodes hear in the next seconds.
    fn say(&mut self, name: &str, state: BlobState) -> Vec<String> {
        let (digest, size) = (format!("sha256:{}", "0".repeat(64)), 1 << 20);
        let blobs = vec![BlobNews { digest, size, state, done: 0 }];
        let blobs = Blobs { task: task(), blobs, failures: Vec::new(), reads_streams: false };
        self.heard.clear();
        self.session(name, EdgeMessage::Blobs(blobs));
        self.pass(3);
        std::mem::take(&mut self.heard)
    }

    fn succeed(&mut self, name: &str) {
        self.end(name, TaskOutcome::Succeeded);
    }

    fn end(&mut self, name: &str, outcome: TaskOutcome) {
        let result = TaskResult::new(task(), outcome);
        self.session(name, EdgeMessage::Result(result));
        self.pass(5);
    }
}

fn node(name: &str) -> NodeView {
    let labels = [(EDGE_LABEL, ""), (SITE_LABEL, "factory")];
    let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    NodeView { name: name.into(), labels, ready: true }
}

const KEYS: KeysSent = KeysSent::All(7);

#[test]
fn equal_keys_open_a_neighbours_layers() {
    let mut world = World::new(&[("a", KEYS), ("b", KEYS)]);
    assert_eq!(world.sent, ["a", "b"]);
    assert_eq!(world.say("a", BlobState::Here), [""; 0]);
    assert_eq!(world.say("b", BlobState::Wanted), ["b: a"]);
}

#[test]
fn a_node_without_keys_reads_nothing_private() {
    let mut world = World::new(&[("a", KEYS), ("b", KeysSent::Missing)]);
    world.say("a", BlobState::Here);
    assert_eq!(world.say("b", BlobState::Wanted), ["b: carry"]);
}

#[test]
fn older_keys_open_nothing() {
    let mut world = World::new(&[("a", KEYS), ("b", KEYS)]);
    world.add("c", KeysSent::All(8));
    world.say("a", BlobState::Here);
    assert_eq!(world.say("b", BlobState::Wanted), [format!("b: alone: {OLDER_KEYS}")]);
    assert_eq!(world.say("c", BlobState::Wanted), ["c: a"]);
}

#[test]
fn a_reader_with_older_keys_is_dropped() {
    let mut world = World::new(&[("a", KEYS), ("b", KEYS)]);
    assert_eq!(world.say("b", BlobState::Wanted), ["b: carry"]);
    world.add("c", KeysSent::All(8));
    assert_eq!(world.say("b", BlobState::Carrying), [""; 0]);
    assert_eq!(world.say("c", BlobState::Wanted), ["c: carry"], "the lease of b has ended");
}

#[test]
fn a_failover_entitles_only_nodes_that_get_keys() {
    let mut world = World::new(&[("a", KEYS), ("b", KeysSent::Missing), ("c", KEYS)]);
    world.succeed("a");
    world.sent.clear();
    world.lead(&["b", "c"]);
    assert_eq!(world.sent, ["b", "c"], "they are sent their tasks once more, with their keys");
    world.say("a", BlobState::Here);
    assert_eq!(world.say("b", BlobState::Wanted), ["b: carry"], "in the group without keys");
    assert_eq!(world.say("c", BlobState::Wanted), ["c: a"], "a has succeeded, and still serves");
    let heard = world.say("a", BlobState::Wanted);
    assert_eq!(heard[0], format!("a: alone: {NOT_SHARED}"), "which keys it got isn't known");
}

#[test]
fn a_reader_waits_until_its_keys_are_known() {
    let mut world = World::new(&[("a", KEYS), ("c", KEYS)]);
    world.succeed("a");
    world.is_reading = true;
    world.lead(&["c"]);
    world.say("a", BlobState::Here);
    assert_eq!(world.say("c", BlobState::Wanted), [""; 0]);
}

#[test]
fn a_replaced_sessions_end_leaves_a_holder_reachable() {
    let mut world = World::new(&[("a", KEYS), ("b", KEYS), ("c", KEYS)]);
    world.say("a", BlobState::Here);
    world.connect_as(SessionId(2), "a", true);
    world.give(FleetEvent::Session(SessionEvent::Down { node: "a".into(), session: SessionId(1) }));
    assert_eq!(world.say("b", BlobState::Wanted), ["b: a"]);
    world.give(FleetEvent::Session(SessionEvent::Down { node: "a".into(), session: SessionId(2) }));
    assert_eq!(world.say("c", BlobState::Wanted), ["c: wait"]);
}

#[test]
fn a_refused_claim_is_an_event_once() {
    let mut world = World::new(&[("a", KEYS), ("b", KEYS)]);
    assert_eq!(world.say("a", BlobState::Wanted), ["a: carry"]);
    assert_eq!(world.say("b", BlobState::Carrying), ["b: wait"]);
    let events = world.engine.take_site_events();
    let events: Vec<_> = events.iter().map(|event| (event.node.as_str(), event.kind)).collect();
    assert_eq!(events, [("b", SiteEventKind::ClaimRefused)]);
    assert_eq!(world.engine.take_site_events(), []);
}

#[test]
fn the_latest_session_says_if_a_holder_serves() {
    let mut world = World::new(&[("a", KEYS), ("b", KEYS), ("c", KEYS)]);
    world.say("a", BlobState::Here);
    let open = vec![OpenTask { task: task(), phase: OpenPhase::Running, limited: false }];
    let (session, hello) = (SessionId(3), Box::new(Hello { open, ..Hello::default() }));
    world.give(FleetEvent::Session(SessionEvent::Up { node: "a".into(), session, hello }));
    assert_eq!(world.say("b", BlobState::Wanted), ["b: carry"]);
    world.connect_as(SessionId(2), "a", true);
    assert_eq!(world.say("c", BlobState::Wanted), ["c: wait"]);
}

#[test]
fn a_task_that_succeeds_proves_its_nodes_layers() {
    for (outcome, heard) in [(TaskOutcome::Failed, &[][..]), (TaskOutcome::Succeeded, &["a: b"])] {
        let mut world = World::new(&[("a", KEYS), ("b", KEYS)]);
        assert_eq!(world.say("a", BlobState::Wanted), ["a: carry"]);
        assert_eq!(world.say("b", BlobState::Here), [""; 0]);
        world.end("b", outcome);
        assert_eq!(world.heard, heard);
    }
}

#[test]
fn a_deleted_jobs_nodes_carry_nothing() {
    let mut world = World::new(&[("a", KEYS), ("b", KEYS)]);
    world.say("a", BlobState::Wanted);
    world.say("b", BlobState::Wanted);
    let carriers = |world: &World| {
        world.engine.site_reports(world.now).iter().map(|site| site.carriers.len()).sum::<usize>()
    };
    assert_eq!(carriers(&world), 1);
    world.give(controller::Input::JobGone(JobUid("uid".to_owned())));
    assert_eq!(carriers(&world), 0, "before they report anything");
    for name in ["a", "b"] {
        world.say(name, BlobState::Dropped);
    }
    world.pass(120);
    assert_eq!((carriers(&world), world.engine.site_reports(world.now).len()), (0, 0));
}

#[test]
fn a_jobs_new_limit_reaches_its_carriers() {
    let mut world = World::new(&[("a", KEYS)]);
    world.say("a", BlobState::Wanted);
    world.job["metadata"]["generation"] = json!(2);
    world.job["spec"]["download"] = json!({ "maxSiteRate": "1Ki" });
    world.give(controller::Input::Job(Ok(serde_json::from_value(world.job.clone()).unwrap())));
    world.pass(1);
    assert_eq!(world.heard, ["a: carry at 1024"]);
}

#[test]
fn an_engine_reports_its_sites() {
    let mut world = World::new(&[("a", KEYS)]);
    let (empty, before) = (world.engine.site_reports(world.now), world.engine.site_bytes());
    world.say("a", BlobState::Wanted);
    let (engine, now) = (&world.engine, world.now);
    let reports = engine.site_reports(now);
    assert_eq!((empty.len(), reports.len(), reports[0].carriers.len()), (0, 1, 1));
    assert_eq!(
        (engine.site_report("factory", now), engine.site_report("ship", now)),
        (reports.into_iter().next(), None)
    );
    assert!(before < engine.site_bytes());
}

#[test]
fn credentials_beyond_the_bound_replace_all() {
    let mut world = World::new(&[("a", KEYS)]);
    for (name, others, known) in [("b", MAX_ENTITLEMENTS - 1, MAX_ENTITLEMENTS), ("c", MAX_ENTITLEMENTS, 1)] {
        world.engine.last_keys = (0..others).map(|n| (n.to_string().into(), 1)).collect();
        world.add(name, KEYS);
        assert_eq!(world.engine.last_keys.len(), known);
    }
}
