#![allow(clippy::unwrap_used)]
//! Messages at the wrong time: from a closed session, about an unrequested task, after a deadline.

use prepull_api::crd::kruise::{PullPhase, SandboxConfig};
use prepull_api::wire::MAX_REASON;

use super::*;
use crate::kruise::node_images::tag_pull::RESEND;
use crate::shared::access::KeysSent;
use crate::shared::objects::ObjectId;

fn acked(task: &TaskId) -> CloudMessage {
    CloudMessage::ResultAck { task: task.clone() }
}

fn cancels(said: &[CloudMessage]) -> Vec<&TaskId> {
    let task = |message: &'_ CloudMessage| matches!(message, CloudMessage::Cancel { .. });
    assert!(said.iter().all(task), "{said:?}");
    said.iter()
        .filter_map(|message| if let CloudMessage::Cancel { task, .. } = message { Some(task) } else { None })
        .collect()
}

/// A world with the tag a:1, and the task that was sent for it.
fn pulling() -> (World, TaskId) {
    let mut world = World::new();
    world.edit(|spec| add_manual_tag(spec, "a", "1"));
    let task = world.take_dispatched()[0].task.id.clone();
    (world, task)
}

/// A task of the NodeImage that no tag asks for.
fn unwanted(task: &TaskId) -> TaskId {
    TaskId { job: JobUid(format!("{}0", task.job.0)), attempt: 1 }
}

#[test]
fn few_invented_tasks_are_remembered() {
    let (mut world, task) = pulling();
    let mut cancelled = |attempt| {
        world.receive(EdgeMessage::Accepted { task: TaskId { attempt, ..unwanted(&task) } });
        cancels(&world.take_sent()).len()
    };
    assert!((1..1_000).all(|attempt| cancelled(attempt) == 1));
    assert_eq!([1, 999].map(cancelled), [0, 1], "only the first ones");
}

#[test]
fn an_unrequested_task_is_cancelled() {
    let (mut world, task) = pulling();
    let unwanted = unwanted(&task);
    world.receive(EdgeMessage::Accepted { task: task.clone() });
    world.report_progress(&task, 1, 2);
    assert_eq!(world.take_sent(), []);
    world.receive(EdgeMessage::Accepted { task: unwanted.clone() });
    assert_eq!(cancels(&world.take_sent()), [&unwanted]);
    world.report_progress(&unwanted, 1, 2);
    assert_eq!(world.take_sent(), [], "a second Cancel would bring a second result");
    world.end_task(&unwanted, failed("cancelled"));
    world.take_sent();
    world.report_progress(&unwanted, 1, 2);
    assert_eq!(cancels(&world.take_sent()), [&unwanted]);
    for phase in [OpenPhase::Running, OpenPhase::NeedsKeys] {
        world.connect(&[(task.clone(), OpenPhase::Running), (unwanted.clone(), phase)]);
        assert_eq!(cancels(&world.take_sent()), [&unwanted], "{phase:?}");
    }
    // What has ended cannot be cancelled: its result follows, and is acknowledged then.
    world.connect(&[(task.clone(), OpenPhase::Running), (unwanted.clone(), OpenPhase::Finished)]);
    assert_eq!(world.take_sent(), []);
    world.end_task(&unwanted, pulled());
    assert_eq!(world.take_sent(), [acked(&unwanted)]);
    assert_eq!((world.take_dispatched(), world.slots), (vec![], 0), "the task that is wanted goes on");
}

#[test]
fn an_unknown_nodes_result_is_acknowledged() {
    let mut world = World::bare();
    let task = TaskId { job: JobUid(format!("{UID}.0")), attempt: 1 };
    world.end_task(&task, pulled());
    assert_eq!(world.take_sent(), [acked(&task)]);
    assert!(world.images.nodes.is_empty());
}

#[test]
fn a_removed_tags_sent_dispatch_is_cancelled() {
    let (mut world, task) = pulling();
    let end = |world: &mut World, task: &TaskId, outcome| {
        world.input(Input::Dispatched { node: node(), task: task.clone(), outcome, keys: None });
        world.take_sent()
    };
    let unwanted = unwanted(&task);
    let sent = || DispatchOutcome::Sent(SessionId(1));
    assert_eq!(cancels(&end(&mut world, &unwanted, sent())), [&unwanted]);
    assert_eq!(end(&mut world, &unwanted, DispatchOutcome::Offline), []);
    for outcome in [sent(), DispatchOutcome::Offline] {
        assert_eq!(end(&mut world, &task, outcome), [], "Hello may have confirmed it before");
    }
    assert_eq!(world.slots, 0);
}

#[test]
fn a_dispatch_counts_for_its_session() {
    let mut world = World::new();
    world.connect(&[]);
    world.next_outcome = Some(DispatchOutcome::Sent(SessionId(1)));
    world.edit(|spec| add_manual_tag(spec, "a", "1"));
    let sent = world.take_dispatched();
    assert_eq!((sent.len(), world.slots), (2, 0), "the Hello of session 2 did not name it: it is sent again");
    assert_eq!(sent[0].task.id, sent[1].task.id);

    let mut world = World::new();
    // A session still unknown to the engine.
    world.next_outcome = Some(DispatchOutcome::Sent(SessionId(2)));
    world.edit(|spec| add_manual_tag(spec, "a", "1"));
    let sent = world.take_dispatched();
    assert_eq!((sent.len(), world.slots), (1, 1), "the session is not there yet");
    world.connect(&[(sent[0].task.id.clone(), OpenPhase::Running)]);
    assert_eq!((world.take_dispatched(), world.take_sent(), world.slots), (vec![], vec![], 0));
}

#[test]
fn credentials_are_part_of_an_entitlement() {
    let mut world = World::new();
    world.edit(|spec| {
        add_manual_tag(spec, "a", "1");
        let secret = prepull_api::crd::kruise::SecretObject {
            namespace: "shop".to_owned(),
            name: "registry".to_owned(),
        };
        spec.images.get_mut("a").unwrap().pull_secrets.push(secret);
    });
    let task = world.take_dispatched()[0].task.id.clone();
    let mut given = |keys| {
        let outcome = DispatchOutcome::Sent(SessionId(1));
        world.input(Input::Dispatched { node: node(), task: task.clone(), outcome, keys });
        world.images.entitlement(&node(), &task)
    };
    let all = [KeysSent::All(1), KeysSent::All(2), KeysSent::Missing].map(|keys| given(Some(keys)).unwrap());
    assert!(all[0] != all[1] && all[0] != all[2] && all[1] != all[2], "{all:?}");
    let mut next = world.restarted();
    next.connect(&[(task.clone(), OpenPhase::Running)]);
    assert_eq!(next.images.entitlement(&node(), &task), None, "an earlier leader gave the keys");
    let (mut world, task) = pulling();
    assert!(world.images.entitlement(&node(), &task).is_some(), "it needs none");
    world.end_task(&task, pulled());
    assert_eq!(world.images.entitlement(&node(), &task), None);
}

#[test]
fn messages_of_an_older_session_are_ignored() {
    let (mut world, task) = pulling();
    world.connect(&[(task.clone(), OpenPhase::Running)]);
    world.done.clear();
    let (node, session) = (node(), SessionId(1));
    world.hear(FleetEvent::Session(SessionEvent::Up { node: node.clone(), session, hello: Box::default() }));
    world.hear(FleetEvent::Session(SessionEvent::Down { node, session }));
    assert_eq!((world.take_dispatched(), world.done.as_slice(), world.slots), (vec![], &[][..], 0));
}

#[test]
fn an_undelivered_task_is_sent_again_later() {
    let mut world = World::new();
    world.next_outcome = Some(DispatchOutcome::Offline);
    world.edit(|spec| add_manual_tag(spec, "a", "1"));
    assert_eq!((world.take_dispatched().len(), world.slots), (1, 1));
    world.pass(RESEND.saturating_sub(Duration::from_millis(1)));
    assert_eq!(world.take_dispatched(), []);
    world.pass(Duration::from_millis(1));
    assert_eq!((world.take_dispatched().len(), world.slots), (1, 0));
}

#[test]
fn a_returned_task_is_sent_again_later() {
    let (mut world, task) = pulling();
    world.end_task(&task, ImageResult { outcome: ImageOutcome::Stopped, ..failed("the agent ends") });
    assert_eq!((world.take_sent(), world.take_dispatched(), world.slots), (vec![acked(&task)], vec![], 1));
    world.pass(RESEND);
    assert_eq!((world.take_dispatched()[0].task.id.clone(), world.slots), (task, 0));
}

#[test]
fn an_unsendable_task_fails_with_the_reason() {
    let mut world = World::new();
    world.next_outcome = Some(DispatchOutcome::Unsendable("the task is too large".to_owned()));
    world.edit(|spec| add_manual_tag(spec, "a", "1"));
    assert_eq!((world.take_dispatched().len(), world.slots), (1, 1));
    let told = world.done.iter().filter(|action| matches!(action, Action::Event(_))).count();
    assert_eq!(told, 1);
    world.pass(Duration::from_secs(60));
    let tag = world.tag("a", "1").unwrap();
    assert_eq!((tag.phase, tag.message.as_str()), (PullPhase::Failed, "the task is too large"));
    assert_eq!(world.take_dispatched(), []);
}

#[test]
fn a_late_success_beats_an_unwritten_failure() {
    for (image, phase) in [(pulled(), PullPhase::Succeeded), (failed("late"), PullPhase::Failed)] {
        let mut world = World::new();
        world.edit(|spec| {
            add_manual_tag(spec, "a", "1");
            let tag = &mut spec.images.get_mut("a").unwrap().tags[0];
            tag.pull_policy.as_mut().unwrap().active_deadline_seconds = Some(60);
        });
        let task = world.take_dispatched()[0].task.id.clone();
        world.api = false;
        world.pass(Duration::from_secs(60 + 200));
        assert_eq!(cancels(&world.take_sent()), [&task]);
        for _ in 0..2 {
            world.end_task(&task, image.clone());
        }
        assert_eq!(world.take_sent(), [], "not before the API server has it");
        world.api = true;
        world.pass(Duration::from_secs(60));
        assert_eq!(world.take_sent(), [acked(&task)]);
        let tag = world.tag("a", "1").unwrap();
        let message =
            if phase == PullPhase::Failed { "pulling exceeds the activeDeadlineSeconds" } else { "" };
        assert_eq!((tag.phase, tag.message.as_str()), (phase, message));
    }
}

#[test]
fn a_timeout_names_its_own_deadline() {
    for (deadline, message) in [(Some(60), "pulling exceeds the activeDeadlineSeconds: 40 %"), (None, "40 %")]
    {
        let mut world = World::new();
        world.edit(|spec| {
            add_manual_tag(spec, "a", "1");
            let tag = &mut spec.images.get_mut("a").unwrap().tags[0];
            tag.pull_policy.as_mut().unwrap().active_deadline_seconds = deadline;
        });
        let task = world.take_dispatched()[0].task.id.clone();
        world.receive(EdgeMessage::Result(TaskResult {
            images: vec![failed("40 %")],
            took: Duration::from_secs(60),
            ..TaskResult::new(task, TaskOutcome::DeadlineExceeded)
        }));
        world.pass(Duration::from_secs(1));
        assert_eq!(world.tag("a", "1").unwrap().message, message);
    }
}

fn unreadable(error: &str) -> Input {
    let id = ObjectId { namespace: String::new(), name: node().0, uid: JobUid(UID.to_owned()) };
    let (error, start_time, completion_time) = (error.to_owned(), None, None);
    Input::NodeImage(Err(Unreadable { id, generation: 2, error, start_time, completion_time }))
}

#[test]
fn a_mended_node_image_reports_all_tags() {
    let mut world = World::new();
    world.run_jobs(&["job"]);
    world.request(&Arc::new(request("job")), false);
    assert_eq!(world.take_tag_states(), [("job".to_owned(), TagState::Pending)]);
    world.input(unreadable("spec.images: invalid type"));
    world.edit(|_| {});
    assert_eq!(world.take_tag_states(), [("job".to_owned(), TagState::Pending)]);
}

#[test]
fn an_unreadable_node_image_is_left_alone() {
    let (mut world, task) = pulling();
    world.input(unreadable(&format!("spec.images: invalid type{}", " x".repeat(MAX_REASON))));
    assert_eq!((cancels(&world.take_sent()), world.slots), (vec![&task], 1));
    let note = world.done.iter().find_map(|action| match action {
        Action::Event(event) => Some(event.note.as_str()),
        _ => None,
    });
    let (note, beginning) =
        (note.unwrap(), "the NodeImage cannot be read, nothing is done for it: spec.images: ");
    assert!(note.starts_with(beginning) && note.len() <= MAX_REASON, "{note}");
    assert!(world.done.contains(&Action::NotifyJobs(NodeImageUpdate::Deleted(node()))));
    world.writes.clear();
    world.hear(FleetEvent::Node(view(&[("edge", ""), ("zone", "a")])));
    world.pass(Duration::from_secs(60));
    assert_eq!(world.writes, [], "it is not created, nor labelled");
    world.edit(|_| {});
    assert_eq!((world.take_dispatched().len(), world.slots), (1, 0));
}

#[test]
fn a_node_image_being_deleted_is_gone() {
    let (mut world, task) = pulling();
    world.edit_unseen(|_| {});
    let mut object = world.object.clone().unwrap();
    object.metadata.deletion_timestamp = Some(Time(world.now));
    world.writes.clear();
    world.input(Input::NodeImage(Ok(Box::new(object.into()))));
    assert_eq!((cancels(&world.take_sent()), world.slots), (vec![&task], 1));
    world.pass(Duration::from_secs(60));
    assert_eq!(world.writes, [], "its name is free only once it is gone");
    let deleted = Action::NotifyJobs(NodeImageUpdate::Deleted(node()));
    assert!(!world.done.contains(&deleted), "the jobs wait for the next one");
    world.object = None;
    world.input(Input::NodeImageGone { name: node(), uid: UID.to_owned() });
    assert!(matches!(world.writes[0], NodeImageWrite::Create(_)), "{:?}", world.writes);
}

#[test]
fn a_node_missing_from_a_list_is_gone() {
    let mut world = World::new();
    let other = NodeView { name: NodeName::from("edge-2"), ready: false, ..view(&[]) };
    world.hear(FleetEvent::Nodes(vec![other, view(&[("edge", "")])]));
    assert!(world.object.is_some());
    world.hear(FleetEvent::Nodes(Vec::new()));
    assert_eq!(world.object, None);
}

#[test]
fn jobs_learn_which_nodes_are_online() {
    type Step = fn(&mut World);
    let mut world = World::bare();
    let is_edge = |world: &mut World| world.hear(FleetEvent::Node(view(&[("edge", "")])));
    let connect = |world: &mut World| world.connect(&[]);
    let restart = |world: &mut World| {
        *world = world.restarted();
        world.settle();
    };
    // Jobs don't know a node without a NodeImage. A session that replaces another one changes nothing for them.
    let steps: [(Step, &[bool]); 6] = [
        (connect, &[]),
        (is_edge, &[true]),
        (connect, &[]),
        (World::disconnect, &[false]),
        (restart, &[]),
        (connect, &[true]),
    ];
    for (number, (step, expected)) in steps.into_iter().enumerate() {
        step(&mut world);
        let online = |action| match action {
            Action::NotifyJobs(NodeImageUpdate::Online(_, online)) => Some(online),
            _ => None,
        };
        let news: Vec<_> = std::mem::take(&mut world.done).into_iter().filter_map(online).collect();
        assert_eq!(news, expected, "{number}");
    }
}

#[test]
fn jobs_wait_for_all_node_images() {
    let mut world = World::bare();
    assert!(world.images.has_created_all(), "there is no node");
    world.api = false;
    world.images.note_fleet_event(FleetEvent::Nodes(vec![view(&[("edge", "")])]), world.now);
    assert!(!world.images.has_created_all());
    world.settle();
    assert!(world.images.has_created_all(), "its creation has failed");
    world.api = true;
    world.pass(Duration::from_secs(60));
    assert!(world.object.is_some() && world.images.has_created_all());
}

#[test]
fn a_task_has_its_sandboxs_labels() {
    let mut world = World::new();
    let map = |key: &str| Some(BTreeMap::from([(key.to_owned(), "x".to_owned())]));
    world.edit(|spec| {
        add_manual_tag(spec, "a", "1");
        let config = SandboxConfig { labels: map("label"), annotations: map("annotation") };
        spec.images.get_mut("a").unwrap().sandbox_config = Some(config);
    });
    let sandbox = world.take_dispatched()[0].task.images[0].sandbox.clone().unwrap();
    assert_eq!((Some(sandbox.labels), Some(sandbox.annotations)), (map("label"), map("annotation")));
}

#[test]
fn other_tags_leave_an_ended_tag_alone() {
    let (mut world, task) = pulling();
    world.end_task(&task, pulled());
    world.edit(|spec| add_manual_tag(spec, "a", "2"));
    let sent = world.take_dispatched();
    assert_eq!(sent.iter().map(|sent| sent.task.images[0].image.as_str()).collect::<Vec<_>>(), ["a:2"]);
    // What becomes impossible while it is pulled is cancelled.
    world.take_sent();
    world.edit(|spec| spec.images.get_mut("a").unwrap().tags[1].pull_policy = None);
    assert_eq!((cancels(&world.take_sent()), world.slots), (vec![&sent[0].task.id], 1));
    world.pass(Duration::from_secs(1));
    assert_eq!((world.status().succeeded, world.status().failed), (1, 1));
}

#[test]
fn progress_waits_for_the_fleets_budget() {
    let (mut world, task) = pulling();
    world.pass(Duration::from_secs(10));
    world.report_progress(&task, 40, 100);
    // As much as comes back in four seconds and a half, with a try every second from the third one on.
    world.images.progress_budget.take(109.0, world.now);
    world.pass(Duration::from_millis(4_900));
    assert_eq!(world.tag("a", "1").unwrap().progress, 0);
    world.pass(Duration::from_millis(100));
    assert_eq!(world.tag("a", "1").unwrap().progress, 40);
}

/// How the tag ends within an hour, before its status is removed.
fn end_of(world: &mut World) -> (PullPhase, String) {
    let ended = (0..60).find_map(|_| {
        world.pass(Duration::from_secs(60));
        world.tag("a", "1").filter(|tag| tag.phase != PullPhase::Pulling)
    });
    ended.map(|tag| (tag.phase, tag.message)).unwrap()
}

#[test]
fn a_node_outside_its_window_is_kept() {
    let (mut world, task) = pulling();
    let waits = "waits for its window, opens at 01:00 Europe/Berlin (Mon 23 Nov)";
    world.report_waits(&task, waits);
    world.pass(Duration::from_secs(10));
    let tag = world.tag("a", "1").unwrap();
    assert_eq!((tag.phase, tag.message.as_str()), (PullPhase::Pulling, waits));
    // The time for all tries is some forty minutes.
    world.pass(Duration::from_secs(12 * 3600));
    assert_eq!(world.tag("a", "1").unwrap().phase, PullPhase::Pulling);
    let mut silent = pulling();
    silent.0.report_waits(&silent.1, waits);
    silent.0.pass(Duration::from_secs(7 * 24 * 3600));
    assert_eq!(silent.0.tag("a", "1").unwrap().phase, PullPhase::Pulling);
    assert_eq!(end_of(&mut silent.0).0, PullPhase::Failed, "windows recur weekly");

    world.report_waits(&task, "");
    world.pass(Duration::from_secs(10));
    assert_eq!(world.tag("a", "1").unwrap().message, "");
    assert_eq!(end_of(&mut world), (PullPhase::Failed, "node has not responded for a long time".to_owned()));
}

#[test]
fn an_earlier_sessions_wait_is_forgotten() {
    let (mut world, task) = pulling();
    world.report_waits(&task, "waits for its window");
    world.disconnect();
    world.connect(&[(task, OpenPhase::Running)]);
    assert_eq!(end_of(&mut world).0, PullPhase::Failed);
}
