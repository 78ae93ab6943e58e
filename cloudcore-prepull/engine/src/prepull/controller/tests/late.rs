//! Late messages about ended jobs, tasks and sessions, and objects missing from a list.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::failure::FailureCode;

use super::*;

fn reasons(world: &World) -> Vec<&str> {
    let reason = |(_, message): &'_ (NodeName, CloudMessage)| match message {
        CloudMessage::Cancel { reason, .. } => Some(reason.clone()),
        _ => None,
    };
    let reasons = world.sent.iter().filter_map(reason);
    reasons.map(|reason| if reason == OVER { OVER } else { DELETED }).collect()
}

fn dispatched(attempt: u32, outcome: DispatchOutcome) -> Input {
    Input::Dispatched { job: task().job, node: "a".into(), attempt, outcome, keys: None }
}

fn sent(attempt: u32) -> Input {
    dispatched(attempt, DispatchOutcome::Sent(SessionId(1)))
}

#[test]
fn relisting_drops_deleted_jobs() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.give(on(&["a"]));
    let object = world.object.clone().unwrap();
    world.give(Input::Jobs(vec![object]));
    assert_eq!((world.cancels(), world.dispatched.len()), (vec![], 1));
    world.give(Input::Jobs(Vec::new()));
    assert_eq!((world.cancels(), world.controller.next_wakeup()), (vec!["a"], None));
}

#[test]
fn relisting_drops_deleted_nodes() {
    let mut world = World::new(&["a", "b"]);
    world.give(on(&["a", "b"]));
    world.hear(FleetEvent::Nodes(vec![edge("a")]));
    world.pass(1_000);
    let status = world.status();
    assert_eq!((status.summary.desired, status.skipped_nodes[0].node_name.as_str()), (1, "b"));
}

#[test]
fn an_unknown_jobs_tasks_are_cancelled() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.says("a", EdgeMessage::Accepted { task: task() });
    assert_eq!(reasons(&world), [DELETED]);
    world.says(
        "a",
        EdgeMessage::Progress(TaskProgress { task: task(), images: Vec::new(), waits: String::new() }),
    );
    assert_eq!(reasons(&world), [DELETED; 2]);
    world.give(sent(1));
    assert_eq!(reasons(&world), [DELETED; 3], "the job was deleted while its secrets were read");
    world.give(dispatched(1, DispatchOutcome::Offline));
    assert_eq!((reasons(&world).len(), world.acks()), (3, 0));
    world.ends("a", TaskOutcome::Succeeded);
    assert_eq!((reasons(&world).len(), world.acks()), (3, 1));
}

#[test]
fn an_unwanted_task_is_cancelled() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.give(on(&["a"]));
    world.says("a", EdgeMessage::Accepted { task: task() });
    world.give(sent(1));
    assert_eq!(reasons(&world), Vec::<&str>::new());
    world.says("a", EdgeMessage::Accepted { task: TaskId { attempt: 2, ..task() } });
    assert_eq!(reasons(&world), [OVER]);
    world.give(sent(2));
    assert_eq!(reasons(&world), [OVER; 2]);
    world.give(dispatched(2, DispatchOutcome::Unsendable("too large".to_owned())));
    world.pass(1_000);
    assert_eq!((reasons(&world).len(), world.phase_of("a")), (2, NodePhase::InProgress));
}

#[test]
fn messages_of_an_older_session_are_ignored() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.up("a", &[]);
    world.give(on(&["a"]));
    let (node, session) = (NodeName::from("a"), SessionId(1));
    world.hear(FleetEvent::Session(SessionEvent::Up { node: node.clone(), session, hello: Box::default() }));
    world.hear(FleetEvent::Session(SessionEvent::Down { node, session }));
    assert_eq!((world.dispatched.len(), reasons(&world)), (1, vec![]));
}

#[test]
fn an_unsendable_task_fails_with_the_reason() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.next_outcome = Some(DispatchOutcome::Unsendable("the task is too large".to_owned()));
    world.give(on(&["a"]));
    world.pass(1_000);
    let record = world.record("a");
    assert_eq!((record.phase, record.code), (NodePhase::Failure, Some(FailureCode::Internal)));
    assert_eq!(record.reason, "the task is too large");
    assert_eq!((world.status().phase, world.dispatched.len()), (JobPhase::Failure, 1));
}

#[test]
fn a_task_without_a_session_waits_for_one() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.give(on(&["a"]));
    world.says("a", EdgeMessage::Accepted { task: task() });
    for dispatched in [2, 3] {
        world.next_outcome = Some(DispatchOutcome::Offline);
        world.up("a", &[(UID, 1, OpenPhase::NeedsKeys)]);
        assert_eq!(world.dispatched.len(), dispatched);
    }
}

#[test]
fn a_deleted_status_stops_its_job() {
    let mut world = World::new(&["a"]);
    world.give(on(&["a"]));
    let (job, object) = (task().job, StatusOrReport::Status);
    let outcome = WriteOutcome::Gone;
    world.give(Input::Written { job: job.clone(), object, version: 1, outcome, stored: None });
    assert_eq!(world.controller.phases().map(|(_, jobs)| jobs), [0; 4]);
    world.up("a", &[]);
    // The watch is late.
    world.give(on(&["a"]));
    assert_eq!(world.dispatched, []);
    world.give(Input::JobGone(job));
    world.give(on(&["a"]));
    assert_eq!(world.dispatched, ["a".into()]);
}

#[test]
fn both_engines_share_a_nodes_slots() {
    let mut world = World::new(&["a"]);
    let node = NodeName::from("a");
    assert!(world.controller.take_place(&node));
    assert!(!world.controller.take_place(&node));
    world.up("a", &[]);
    world.give(on(&["a"]));
    assert_eq!((world.dispatched.len(), world.controller.take_freed()), (0, vec![]));
    world.controller.place_moved(&node, false);
    assert_eq!(world.controller.take_freed(), std::slice::from_ref(&node));
    assert_eq!(world.controller.take_freed(), []);
    world.pass(1_000);
    assert_eq!((world.dispatched.len(), world.controller.take_place(&node)), (1, false));
    // The edge was restarted, and takes two.
    let hello = Hello {
        open: vec![OpenTask { task: task(), phase: OpenPhase::Running, limited: false }],
        max_tasks: Some(2),
        ..Hello::default()
    };
    world.hear(FleetEvent::Session(SessionEvent::Up {
        node: node.clone(),
        session: SessionId(7),
        hello: Box::new(hello),
    }));
    assert_eq!(world.controller.take_freed(), std::slice::from_ref(&node));
    assert!(world.controller.take_place(&node) && !world.controller.take_place(&node));
}

#[test]
fn a_deleted_jobs_late_write_leaves_nothing() {
    let mut world = World::new(&[]);
    let (job, object, outcome) = (task().job, StatusOrReport::Status, WriteOutcome::Done);
    world.controller.handle(Input::Written { job, object, version: 1, outcome, stored: None }, world.now);
    let actions = world.controller.flush(world.now);
    assert!(matches!(&actions[..], [Action::Forget(job)] if *job == task().job), "{actions:?}");
}

#[test]
fn a_job_being_deleted_counts_as_gone() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.give(on(&["a"]));
    assert!(world.controller.phases().contains(&(JobPhase::InProgress, 1)));
    let mut object = world.object.clone().unwrap().unwrap();
    object.metadata.deletion_timestamp = Some(Time(world.now));
    world.give(Input::Job(Ok(object)));
    assert_eq!((reasons(&world), world.controller.phases().map(|(_, jobs)| jobs)), (vec![DELETED], [0; 4]));
}

#[test]
fn a_dispatch_counts_for_its_session() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.up("a", &[]);
    world.next_outcome = Some(DispatchOutcome::Sent(SessionId(1)));
    world.give(on(&["a"]));
    assert_eq!(world.dispatched.len(), 2, "the Hello of session 2 did not name it: it is sent again");
}
