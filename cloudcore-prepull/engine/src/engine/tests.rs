use std::collections::BTreeMap;
use std::time::Duration;

use prepull_api::crd::EDGE_LABEL;
use prepull_api::crd::kruise::{NodeImage, NodeImageSpec};
use prepull_api::settings::NodeSettings;
use prepull_api::sites::{BlobNews, BlobState, Blobs, PeerDoor};
use prepull_api::task::{JobUid, NodeName, TaskId, TaskOutcome, TaskResult};
use prepull_api::wire::{OpenPhase, OpenTask, TaskProgress};
use serde_json::json;

use super::*;
use crate::fleet::session::SessionId;
use crate::kruise::jobs;
use crate::shared::outcomes::{DispatchOutcome, WriteOutcome};
use crate::sites::{Direction, SITE_LABEL};

#[test]
fn each_api_reports_its_first_lists() {
    use controller::Input as Prepull;
    let now = Timestamp::UNIX_EPOCH;
    let mut engine = Engine::with_kruise(Selector::parse("edge").unwrap());
    let mut without = Engine::default();
    let mut listed = |input: fn() -> Input| {
        engine.handle(input(), now);
        without.handle(input(), now);
        assert_eq!(without.listed(), FirstLists { kruise: false, ..engine.listed() });
        engine.listed()
    };
    let nodes = FirstLists { nodes: true, ..FirstLists::default() };
    let jobs = FirstLists { jobs: true, ..nodes };
    assert_eq!(listed(|| Input::Tick), FirstLists::default());
    assert_eq!(listed(|| FleetEvent::Nodes(Vec::new()).into()), nodes);
    assert_eq!(listed(|| Prepull::Jobs(Vec::new()).into()), jobs);
    for input in [
        || kruise::Input::Node(node_images::Input::NodeImages(Vec::new())).into(),
        || kruise::Input::Job(jobs::Input::Pods(Vec::new())).into(),
        || kruise::Input::Job(jobs::Input::PullJobs(Vec::new())).into(),
    ] {
        assert_eq!(listed(input), jobs);
    }
    let last = || kruise::Input::Job(jobs::Input::ListJobs(Vec::new())).into();
    assert_eq!(listed(last), FirstLists { kruise: true, ..jobs });
}

#[test]
fn jobs_are_listed_once_those_that_go_on_are_read() {
    let (mut engine, now) = (Engine::default(), Timestamp::UNIX_EPOCH);
    let job = json!({
        "metadata": { "name": "job", "uid": "job", "generation": 1 },
        "spec": { "imagePrePullTemplate": { "images": ["b:1"], "nodeNames": ["a"] } },
        "status": { "phase": "InProgress", "startTime": "2026-01-01T00:00:00Z" },
    });
    let job = || Ok(Box::new(serde_json::from_value(job.clone()).unwrap()));
    engine.handle(FleetEvent::Nodes(Vec::new()).into(), now);
    engine.handle(controller::Input::Jobs(vec![job()]).into(), now);
    assert!(!engine.listed().jobs);
    let uid = JobUid("job".to_owned());
    engine.handle(controller::Input::Recalled(uid, Vec::new(), Some(job())).into(), now);
    assert!(engine.listed().jobs);
}

#[test]
fn only_jobs_that_select_by_pods_need_them() {
    let now = Timestamp::UNIX_EPOCH;
    let mut engine = Engine::with_kruise(Selector::parse("edge").unwrap());
    assert!(!engine.needs_pods());
    for (generation, nodes, needs_pods) in [(1, "selector", false), (2, "podSelector", true)] {
        let job = serde_json::from_value(json!({
            "metadata": { "name": "job", "namespace": "team", "uid": "uid", "generation": generation },
            "spec": { "image": "a:1", nodes: { "matchLabels": { "app": "web" } } },
        }));
        let job = jobs::Input::PullJob(Ok(job.unwrap()));
        engine.handle(kruise::Input::Job(job).into(), now);
        assert_eq!(engine.needs_pods(), needs_pods);
    }
}

#[test]
fn a_nodes_settings_follow_its_labels() {
    let (mut engine, now) = (Engine::default(), Timestamp::UNIX_EPOCH);
    let object = serde_json::from_value(json!({
        "metadata": { "name": "north", "uid": "uid", "generation": 1 },
        "spec": { "labelSelector": { "matchLabels": { "site": "north" } }, "makeRoom": true },
    }));
    let node = |site: &str| {
        let labels =
            [(EDGE_LABEL, ""), ("site", site)].map(|(key, value)| (key.to_owned(), value.to_owned()));
        NodeView { name: "edge-1".into(), labels: labels.into(), ready: true }
    };
    let hello = Box::new(Hello { settings: Some(NodeSettings::default()), ..Hello::default() });
    let up = SessionEvent::Up { node: node("").name, session: SessionId(1), hello };
    let inputs: [Input; 4] = [
        settings::Input::All(vec![object.unwrap()]).into(),
        FleetEvent::Nodes(vec![node("south")]).into(),
        FleetEvent::Session(up).into(),
        FleetEvent::Node(node("north")).into(),
    ];
    let sent = inputs.map(|input| {
        engine.handle(input, now);
        engine.flush(now).iter().filter(|action| action.kind() == "configure").count()
    });
    assert_eq!(sent, [0, 0, 0, 1]);
}

#[test]
fn node_images_follow_nodes() {
    use node_images::{NodeImageWrite, WrittenNodeImage};
    let mut engine = Engine::with_kruise(Selector::parse("edge").unwrap());
    let mut now = Timestamp::UNIX_EPOCH;
    // What is written when the engine has taken these in.
    let mut give = |inputs: Vec<Input>| {
        for input in inputs {
            engine.handle(input, now);
        }
        let mut actions = engine.flush(now);
        while actions.is_empty()
            && let Some(at) = engine.next_wakeup()
        {
            now = now.max(at);
            actions = engine.flush(now);
        }
        assert!(actions.iter().all(|action| action.kind() == "writeNodeImage"), "{actions:?}");
        let write = |action| match action {
            Action::Kruise(kruise::Action::NodeImage(_, write)) => Some(write),
            _ => None,
        };
        actions.into_iter().filter_map(write).collect::<Vec<_>>()
    };
    let node = || NodeView {
        name: NodeName::from("edge-1"),
        labels: [("edge".to_owned(), String::new())].into(),
        ready: true,
    };
    let of_node = |input| kruise::Input::Node(input).into();
    let written = |written| of_node(node_images::Input::Written(node().name, written));
    let lists = vec![
        kruise::Input::Job(jobs::Input::Pods(Vec::new())).into(),
        kruise::Input::Job(jobs::Input::PullJobs(Vec::new())).into(),
        kruise::Input::Job(jobs::Input::ListJobs(Vec::new())).into(),
    ];
    assert_eq!(give(lists), []);
    assert_eq!(give(vec![FleetEvent::Nodes(vec![node()]).into()]), [], "not before all is listed");
    let listed = of_node(node_images::Input::NodeImages(Vec::new()));
    assert!(matches!(give(vec![listed])[..], [NodeImageWrite::Create(_)]));
    // Until the API server answers there's one write of it, however often the Node changes.
    for change in 0..300 {
        let label = ("change".to_owned(), change.to_string());
        let labels = node().labels.into_iter().chain([label]).collect();
        assert_eq!(give(vec![FleetEvent::Node(NodeView { labels, ..node() }).into()]), []);
    }
    let other = NodeView { name: "edge-2".into(), ..node() };
    assert!(matches!(give(vec![FleetEvent::Node(other).into()])[..], [NodeImageWrite::Create(_)]));
    give(vec![FleetEvent::Node(node()).into()]);
    let mut object = NodeImage::new("edge-1", NodeImageSpec::default());
    object.metadata.uid = Some("uid".to_owned());
    object.metadata.resource_version = Some("1".to_owned());
    object.metadata.labels = Some(node().labels);
    let done = written(WrittenNodeImage::Done(Some(Box::new(object.into()))));
    assert!(matches!(give(vec![done])[..], [NodeImageWrite::Status { .. }]));
    let gone = || FleetEvent::NodeGone(node().name).into();
    let back = FleetEvent::Node(node()).into();
    assert!(matches!(
        give(vec![written(WrittenNodeImage::Failed), gone(), back])[..],
        [NodeImageWrite::Status { .. }]
    ));
    assert!(matches!(
        give(vec![written(WrittenNodeImage::Failed), gone()])[..],
        [NodeImageWrite::Delete { .. }]
    ));
}

#[test]
fn one_apis_pull_blocks_the_other() {
    use controller::Input as Prepull;
    let mut now = Timestamp::UNIX_EPOCH;
    let (node, session) = (NodeName::from("edge-1"), SessionId(1));
    let mut engine = Engine::with_kruise(Selector::parse(EDGE_LABEL).unwrap());
    let labels = BTreeMap::from([(EDGE_LABEL.to_owned(), String::new())]);
    let job = serde_json::from_value(json!({
        "metadata": { "name": "job", "uid": "job", "generation": 1 },
        "spec": { "imagePrePullTemplate": { "images": ["b:1"], "labelSelector": { "matchLabels": labels } } },
    }));
    list_pulling_nodes(&mut engine, &labels, &[&node], now);
    let up = SessionEvent::Up { node: node.clone(), session, hello: Box::default() };
    engine.handle(FleetEvent::Session(up).into(), now);
    // What is sent to the node within ten seconds, when each write is made at once.
    let mut sent = |input: Input| {
        engine.handle(input, now);
        let mut sent = Vec::new();
        for _ in 0..10 {
            for action in engine.flush(now) {
                match action {
                    Action::Prepull(controller::Action::Write { job, version, content, .. }) => {
                        let (object, outcome) = (content.object(), WriteOutcome::Done);
                        let written = Prepull::Written { job, object, version, outcome, stored: None };
                        engine.handle(written.into(), now);
                    }
                    Action::Prepull(controller::Action::Dispatch(order)) => {
                        sent.push(TaskId { job: order.job.uid.clone(), attempt: order.attempt });
                    }
                    Action::Kruise(kruise::Action::Dispatch(order)) => sent.push(order.task.id.clone()),
                    _ => {}
                }
            }
            now += Duration::from_secs(1);
        }
        sent
    };
    let of_node_image = sent(Input::Tick);
    assert!(matches!(&of_node_image[..], [task] if is_of_node_image(task)), "{of_node_image:?}");
    assert_eq!(sent(Prepull::Job(Ok(Box::new(job.unwrap()))).into()), []);
    let message = EdgeMessage::Result(succeeded(&of_node_image[0]));
    let told = |message| FleetEvent::Session(SessionEvent::Message { node: node.clone(), session, message });
    let of_job = sent(told(message).into());
    assert_eq!(of_job, [TaskId { job: JobUid("job".to_owned()), attempt: 1 }]);

    // The task's facts are known until its result has been handled.
    let known = engine.task_in_hand(&node, &of_job[0]).unwrap();
    let expected = (Some("job".to_owned()), vec!["docker.io/library/b:1".to_owned()]);
    assert_eq!((known.job, known.images), expected);
    assert!(known.started.is_some_and(|started| started <= now));
    let of_before = TaskId { attempt: 2, ..of_job[0].clone() };
    let elsewhere = NodeName::from("edge-2");
    assert_eq!(engine.task_in_hand(&node, &of_before), None);
    assert_eq!(engine.task_in_hand(&elsewhere, &of_job[0]), None);
    assert_eq!(engine.phases().map(|(_, jobs)| jobs), [0, 1, 0, 0]);
    assert_eq!(
        engine.running_jobs().map(|(name, nodes)| (name, nodes.in_progress)).collect::<Vec<_>>(),
        [("job", 1)]
    );
    engine.handle(told(EdgeMessage::Result(succeeded(&of_job[0]))).into(), now);
    assert_eq!(engine.task_in_hand(&node, &of_job[0]), None);
}

/// The first lists: these nodes, each with a NodeImage of the image a:1, and no jobs.
fn list_pulling_nodes(
    engine: &mut Engine,
    labels: &BTreeMap<String, String>,
    nodes: &[&NodeName],
    now: Timestamp,
) {
    let tag = json!({ "tag": "1", "pullPolicy": { "ttlSecondsAfterFinished": 300 } });
    let image = |(n, node): (usize, &&NodeName)| -> NodeImage {
        serde_json::from_value(json!({
            "metadata": { "name": node, "uid": format!("0f7c3a51-8a5c-4a3e-9d0b-{:0>12}", n),
                "resourceVersion": "1", "labels": labels },
            "spec": { "images": { "a": { "tags": [tag] } } },
        }))
        .unwrap()
    };
    let images = nodes.iter().enumerate().map(|node| Ok(Box::new(image(node).into()))).collect();
    let view = |node: &&NodeName| NodeView { name: (*node).clone(), labels: labels.clone(), ready: true };
    for input in [
        FleetEvent::Nodes(nodes.iter().map(view).collect()).into(),
        controller::Input::Jobs(Vec::new()).into(),
        kruise::Input::Node(node_images::Input::NodeImages(images)).into(),
        kruise::Input::Job(jobs::Input::Pods(Vec::new())).into(),
        kruise::Input::Job(jobs::Input::PullJobs(Vec::new())).into(),
        kruise::Input::Job(jobs::Input::ListJobs(Vec::new())).into(),
    ] {
        engine.handle(input, now);
    }
}

#[test]
fn nodes_share_a_node_images_layers() {
    let mut now = Timestamp::UNIX_EPOCH;
    let share = SiteSettings { share_by_default: true, ..Default::default() };
    let mut engine = Engine::with_kruise(Selector::parse(EDGE_LABEL).unwrap()).with_sites(share);
    let labels = [(EDGE_LABEL, ""), (SITE_LABEL, "factory")];
    let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    let (holder, reader) = (NodeName::from("edge-1"), NodeName::from("edge-2"));
    list_pulling_nodes(&mut engine, &labels, &[&holder, &reader], now);
    let peer = PeerDoor { addresses: vec!["10.0.0.1:1".to_owned()], streams: false };
    for node in [&holder, &reader] {
        let hello = Box::new(Hello { peer: Some(peer.clone()), ..Hello::default() });
        let up = SessionEvent::Up { node: node.clone(), session: SessionId(1), hello };
        engine.handle(FleetEvent::Session(up).into(), now);
    }
    let mut flush = |inputs: Vec<Input>| {
        for input in inputs {
            engine.handle(input, now);
        }
        let mut next = || {
            now += Duration::from_secs(1);
            engine.flush(now)
        };
        [next(), next(), next()].concat()
    };
    let dispatched = |action| match action {
        Action::Kruise(kruise::Action::Dispatch(order)) => Some((order.node, order.task.id.clone())),
        _ => None,
    };
    let tasks: BTreeMap<_, _> = flush(Vec::new()).into_iter().filter_map(dispatched).collect();
    let sent = |(node, task): (&NodeName, &TaskId)| {
        let (node, task, outcome) = (node.clone(), task.clone(), DispatchOutcome::Sent(SessionId(1)));
        kruise::Input::Node(node_images::Input::Dispatched { node, task, outcome, keys: None }).into()
    };
    flush(tasks.iter().map(sent).collect());
    let says = |node: &NodeName, state| {
        let news = BlobNews { digest: format!("sha256:{}", "0".repeat(64)), size: 1 << 20, state, done: 0 };
        let (task, failures) = (tasks[node].clone(), Vec::new());
        let message = EdgeMessage::Blobs(Blobs { task, blobs: vec![news], failures, reads_streams: false });
        let (node, session) = (node.clone(), SessionId(1));
        FleetEvent::Session(SessionEvent::Message { node, session, message }).into()
    };
    let actions = flush(vec![says(&holder, BlobState::Here), says(&reader, BlobState::Wanted)]);
    let directed = |action: &Action| match action {
        Action::Direct(Directions { node, blobs, .. }) => match &blobs[..] {
            [(_, Direction::Peers(peers))] => Some((node.clone(), peers[0].0.clone())),
            _ => None,
        },
        _ => None,
    };
    assert_eq!(actions.iter().filter_map(directed).collect::<Vec<_>>(), [(reader, holder)]);
}

fn succeeded(task: &TaskId) -> TaskResult {
    TaskResult::new(task.clone(), TaskOutcome::Succeeded)
}

#[test]
fn a_message_reaches_its_tasks_engine() {
    let task = |job: &str| TaskId { job: JobUid(job.to_owned()), attempt: 1 };
    let of_job = task("0f7c3a51-8a5c-4a3e-9d0b-111111111111");
    let of_node_image = task("0f7c3a51-8a5c-4a3e-9d0b-111111111111.0011223344556677");
    let (node, session) = (NodeName::from("edge-1"), SessionId(1));
    for (task, is_of_node_image) in [(&of_job, false), (&of_node_image, true)] {
        for message in [
            EdgeMessage::Accepted { task: task.clone() },
            EdgeMessage::Progress(TaskProgress {
                task: task.clone(),
                images: Vec::new(),
                waits: String::new(),
            }),
            EdgeMessage::Result(succeeded(task)),
        ] {
            let (of_node_images, of_jobs) =
                split_event(SessionEvent::Message { node: node.clone(), session, message });
            assert_eq!((of_node_images.is_some(), of_jobs.is_some()), (is_of_node_image, !is_of_node_image));
        }
    }
    let open = |task: &TaskId| OpenTask { task: task.clone(), phase: OpenPhase::Running, limited: false };
    let hello = Hello { open: vec![open(&of_job), open(&of_node_image)], ..Hello::default() };
    let hello = Box::new(hello);
    let (first, second) = split_event(SessionEvent::Up { node: node.clone(), session, hello });
    let tasks = |event: Option<SessionEvent>| match event {
        Some(SessionEvent::Up { hello, .. }) => hello.open.into_iter().map(|open| open.task).collect(),
        _ => Vec::new(),
    };
    assert_eq!((tasks(first), tasks(second)), (vec![of_node_image], vec![of_job]));
    let (first, second) = split_event(SessionEvent::Down { node, session });
    assert!(first.is_some() && second.is_some());
}
