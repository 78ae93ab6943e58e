#![allow(clippy::unwrap_used)]
//! The object itself: created, labelled, deleted; and how rarely it is written.

use prepull_api::crd::kruise::PullPhase;

use super::*;

#[test]
fn an_older_list_deletes_no_new_object() {
    let mut world = World::bare();
    world.input(Input::NodeImagesListing);
    world.hear(FleetEvent::Nodes(vec![view(&[("edge", "")])]));
    world.connect(&[]);
    world.input(Input::NodeImages(Vec::new()));
    world.pass(Duration::from_secs(2));
    let is_creation = |write: &&NodeImageWrite| matches!(write, NodeImageWrite::Create(_));
    let deleted = Action::NotifyJobs(NodeImageUpdate::Deleted(node()));
    assert_eq!((world.writes.iter().filter(is_creation).count(), world.done.contains(&deleted)), (1, false));

    world.input(Input::NodeImagesListing);
    world.hear(FleetEvent::Node(view(&[("edge", ""), ("zone", "a")])));
    world.api = false;
    world.hear(FleetEvent::Node(view(&[])));
    world.input(Input::NodeImages(Vec::new()));
    assert!(world.done.contains(&deleted), "it was there when this list began");
}

#[test]
fn a_ready_edge_node_gets_a_node_image() {
    let mut world = World::bare();
    world.hear(FleetEvent::Nodes(vec![NodeView { ready: false, ..view(&[("edge", "")]) }]));
    assert_eq!(world.writes, [], "not Ready");
    world.hear(FleetEvent::Node(view(&[("zone", "a")])));
    assert_eq!(world.writes, [], "not an edge node");
    world.hear(FleetEvent::Node(view(&[("edge", ""), ("type", "virtual-kubelet")])));
    assert_eq!(world.writes, [], "virtual");
    world.hear(FleetEvent::Node(view(&[("edge", ""), ("zone", "a")])));
    assert_eq!(world.status(), NodeImageStatus::default());
    assert_eq!(world.object.as_ref().unwrap().metadata.labels.as_ref().unwrap()["zone"], "a");
    let news = |world: &World| {
        let labels = |action: &Action| match action {
            Action::NotifyJobs(NodeImageUpdate::Exists { labels, .. }) => Some(labels.get("zone").cloned()),
            _ => None,
        };
        world.done.iter().filter_map(labels).collect::<Vec<_>>()
    };
    assert_eq!(news(&world), [Some("a".to_owned())]);

    world.hear(FleetEvent::Node(NodeView { ready: false, ..view(&[("edge", ""), ("zone", "b")]) }));
    assert_eq!(world.object.as_ref().unwrap().metadata.labels.as_ref().unwrap()["zone"], "b");
    assert_eq!(news(&world), [Some("a".to_owned()), Some("b".to_owned())]);

    world.hear(FleetEvent::NodeGone(node()));
    assert_eq!(world.object, None);
    assert_eq!(world.done.last(), Some(&Action::NotifyJobs(NodeImageUpdate::Deleted(node()))));
    assert!(world.images.nodes.is_empty(), "nothing is kept of it");
}

#[test]
fn a_deleted_node_image_is_recreated() {
    let mut world = World::new();
    world.edit(|spec| add_manual_tag(spec, "a", "1"));
    let task = world.take_dispatched()[0].task.id.clone();
    world.input(Input::NodeImageGone { name: node(), uid: "an-earlier-one".to_owned() });
    assert_eq!(world.take_sent(), []);
    world.object = None;
    world.input(Input::NodeImageGone { name: node(), uid: UID.to_owned() });
    assert_eq!(world.object.as_ref().unwrap().spec, NodeImageSpec::default());
    let said = world.take_sent();
    assert!(matches!(&said[..], [CloudMessage::Cancel { task: of, .. }] if *of == task), "{said:?}");
    assert_eq!(world.slots, 1);
}

#[test]
fn a_quick_pull_costs_four_writes() {
    let mut world = World::new();
    world.run_jobs(&["job"]);
    world.request(&Arc::new(request("job")), false);
    let task = world.take_dispatched()[0].task.id.clone();
    world.report_progress(&task, 10, 100);
    world.pass(Duration::from_secs(2));
    world.end_task(&task, pulled());
    world.pass(Duration::from_secs(60));
    assert_eq!(world.take_write_counts(), (1, 1), "into the spec, and how it ended");
    world.jobs.borrow_mut().insert(JobUid("job".to_owned()), Liveness::Finished);
    world.input(Input::LivenessChanged(JobUid("job".to_owned())));
    world.pass(Duration::from_secs(700));
    assert_eq!(world.take_write_counts(), (1, 1), "out of the spec, and out of the status");
}

#[test]
fn progress_is_written_every_five_seconds() {
    let mut world = World::new();
    world.edit(|spec| add_manual_tag(spec, "a", "1"));
    let task = world.take_dispatched()[0].task.id.clone();
    world.take_write_counts();
    for second in 1..=60 {
        world.pass(Duration::from_secs(1));
        world.report_progress(&task, second, 60);
    }
    let (specs, statuses) = world.take_write_counts();
    assert!(specs == 0 && (11..=13).contains(&statuses), "{statuses}");
    let tag = world.tag("a", "1").unwrap();
    assert!(tag.phase == PullPhase::Pulling && (90..100).contains(&tag.progress), "{tag:?}");
    world.pass(Duration::from_secs(600));
    assert_eq!(world.take_write_counts(), (0, 1), "where nothing moves nothing is written");
}

#[test]
fn a_failed_write_is_retried_with_backoff() {
    let mut world = World::new();
    world.api = false;
    world.edit(|spec| add_manual_tag(spec, "a", "1"));
    let task = world.take_dispatched()[0].task.id.clone();
    world.end_task(&task, pulled());
    world.take_write_counts();
    world.pass(Duration::from_secs(60));
    let (_, tried) = world.take_write_counts();
    assert!((4..=10).contains(&tried), "{tried}");
    world.api = true;
    world.pass(Duration::from_secs(31));
    assert_eq!(world.tag("a", "1").unwrap().phase, PullPhase::Succeeded);
}

#[test]
fn an_older_watched_version_is_ignored() {
    let mut world = World::new();
    let old = world.object.clone().unwrap();
    world.edit(|spec| add_manual_tag(spec, "a", "1"));
    world.input(Input::NodeImage(Ok(Box::new(old.into()))));
    assert_eq!(world.take_sent(), [], "nothing is cancelled");
    assert_eq!(world.take_dispatched().len(), 1);
}

#[test]
fn tags_that_end_together_share_a_write() {
    let mut world = World::new();
    world.slots = 5;
    world.edit(|spec| (0..5).for_each(|n| add_manual_tag(spec, &format!("i{n}"), "1")));
    let sent = world.take_dispatched();
    world.take_write_counts();
    for dispatch in sent {
        world.receive(EdgeMessage::Result(TaskResult {
            images: vec![pulled()],
            took: Duration::from_secs(1),
            ..TaskResult::new(dispatch.task.id, TaskOutcome::Succeeded)
        }));
    }
    world.pass(Duration::from_secs(1));
    assert_eq!((world.take_write_counts(), world.status().succeeded), ((0, 2), 5));
}

#[test]
fn twenty_progress_writes_a_second_are_allowed() {
    let mut budget = progress_budget();
    let start = Timestamp::from_second(1_800_000_000).unwrap();
    let mut allowed = |at| (0..1000).filter(|_| budget.try_take(1.0, at).is_ok()).count();
    assert_eq!(allowed(start), 20);
    assert_eq!(allowed(start + Duration::from_millis(500)), 10);
}

#[test]
fn a_large_fleets_writes_take_turns() {
    let now = Timestamp::UNIX_EPOCH;
    let mut images = NodeImageTracker::new(Selector::default());
    let nodes = (0..260).map(|n| NodeView { name: NodeName(format!("n{n:03}")), ..view(&[]) });
    images.note_fleet_event(FleetEvent::Nodes(nodes.collect()), now);
    let flush = |images: &mut NodeImageTracker| {
        let actions = images.flush(now, &|_| Liveness::Deleted, &|_| None, &mut |_| false);
        let node = |action| if let Action::Write(node, _) = action { Some(node) } else { None };
        actions.into_iter().filter_map(node).collect::<Vec<_>>()
    };
    let first = flush(&mut images);
    assert_eq!((first.len(), flush(&mut images)), (256, vec![]));
    for node in &first[..2] {
        images.handle(Input::Written(node.clone(), WrittenNodeImage::Failed), now);
    }
    assert_eq!(flush(&mut images), ["n256".into(), "n257".into()], "those that wait come first");
}

#[test]
fn results_are_written_while_the_spec_is_refused() {
    let mut world = World::new();
    world.edit(|spec| add_manual_tag(spec, "a", "1"));
    let task = world.take_dispatched()[0].task.id.clone();
    world.refuses = |_, _| true;
    world.run_jobs(&["job"]);
    world.request(&Arc::new(request("job")), false);
    world.pass(Duration::from_secs(60));
    world.end_task(&task, pulled());
    assert_eq!(world.tag("a", "1").map(|tag| tag.phase), Some(PullPhase::Succeeded));
    world.take_write_counts();
    world.pass(Duration::from_secs(3600));
    let (specs, statuses) = world.take_write_counts();
    assert!((100..=130).contains(&specs) && statuses <= 1, "{specs} {statuses}");
}

#[test]
fn a_policy_that_sets_labels_holds_up_nothing() {
    let policies: [fn(u64) -> Option<String>; 2] =
        [|version| Some(version.to_string()), |_| Some("the same".to_owned())];
    for sets_label in policies {
        let mut world = World::new();
        world.edit(|spec| add_manual_tag(spec, "a", "1"));
        let task = world.take_dispatched()[0].task.id.clone();
        world.sets_label = sets_label;
        world.hear(FleetEvent::Node(view(&[("edge", ""), ("zone", "a")])));
        world.end_task(&task, pulled());
        assert_eq!(world.tag("a", "1").map(|tag| tag.phase), Some(PullPhase::Succeeded));
        world.take_write_counts();
        world.pass(Duration::from_secs(290));
        let (specs, _) = world.take_write_counts();
        assert!((8..=20).contains(&specs), "{specs}");
        for job in ["one", "two"] {
            world.run_jobs(&[job]);
            let key = TagKey::new(job, "1");
            world.request(&Arc::new(TagRequest { key, ..request(job) }), false);
            assert!(world.spec_tag(job, "1").is_some(), "it's written at once");
        }
    }
}

#[test]
fn a_policy_that_refuses_labels_holds_up_no_request() {
    for comes_first in [true, false] {
        let mut world = World::new();
        world.refuses = |_, labels| labels.contains_key("zone");
        world.run_jobs(&["job"]);
        // Both in one write, or one after the other.
        world.api = comes_first;
        world.hear(FleetEvent::Node(view(&[("edge", ""), ("zone", "a")])));
        world.pass(Duration::from_secs(if comes_first { 60 } else { 0 }));
        world.request(&Arc::new(request("job")), false);
        world.api = true;
        world.pass(Duration::from_secs(10));
        assert!(world.spec_tag("nginx", "1.25").is_some(), "{comes_first}");
        // And a request that's refused holds up no label.
        world.refuses = |spec, _| spec.images.contains_key("refused");
        world.run_jobs(&["other"]);
        let refused = TagRequest { key: TagKey::new("refused", "1"), ..request("other") };
        world.request(&Arc::new(refused), false);
        world.pass(Duration::from_secs(60));
        let labels = world.object.as_ref().and_then(|object| object.metadata.labels.clone());
        assert!(labels.is_some_and(|labels| labels.contains_key("zone")), "{comes_first}");
    }
}

#[test]
fn one_refused_request_holds_up_no_other() {
    let mut world = World::new();
    world.run_jobs(&["pulls"]);
    world.request(&Arc::new(TagRequest { key: TagKey::new("pulled", "1"), ..request("pulls") }), false);
    world.api = false;
    for job in ["refused", "waits", "one", "two"] {
        world.run_jobs(&[job]);
        let key = TagKey::new(if job == "waits" { "pulled" } else { job }, "1");
        let mut request = TagRequest { key, ..request(job) };
        if job == "waits" {
            request.owner.namespace = Some("bank".to_owned());
        }
        world.request(&Arc::new(request), false);
    }
    world.api = true;
    world.refuses = |spec, _| spec.images.contains_key("refused");
    world.pass(Duration::from_secs(60));
    let tags = ["refused", "one", "two"].map(|image| world.spec_tag(image, "1").is_some());
    assert_eq!(tags, [false, true, true]);
    world.refuses = |_, _| false;
    world.pass(Duration::from_secs(60));
    assert!(world.spec_tag("refused", "1").is_some());
}

#[test]
fn a_request_that_is_too_large_fails_alone() {
    let mut world = World::new();
    world.is_too_large = |spec| spec.images.contains_key("large");
    for job in ["one", "large", "two"] {
        world.run_jobs(&[job]);
        let request = TagRequest { key: TagKey::new(job, "1"), ..request(job) };
        world.images.request_tag(&node(), Arc::new(request), false);
    }
    world.settle();
    world.pass(Duration::from_secs(10));
    assert_eq!(world.object.as_ref().unwrap().spec.images.keys().collect::<Vec<_>>(), ["one", "two"]);
    let failed = |world: &mut World| {
        let told = world.take_tag_states().into_iter();
        told.filter(|(_, state)| matches!(state, TagState::Failed(_))).map(|(job, _)| job).collect::<Vec<_>>()
    };
    assert_eq!(failed(&mut world), ["large"]);
    let warns = |action: &Action| matches!(action, Action::Event(e) if e.note.starts_with("image large: "));
    assert!(world.done.iter().any(warns), "{:?}", world.done);
    world.take_write_counts();
    world.pass(Duration::from_secs(60));
    assert_eq!(world.take_write_counts().0, 0, "it isn't tried again");
}

#[test]
fn a_node_image_deleted_by_hand_ends_no_job() {
    let mut world = World::new();
    world.run_jobs(&["job"]);
    let wanted = Arc::new(request("job"));
    world.request(&wanted, false);
    world.take_tag_states();
    world.object = None;
    world.input(Input::NodeImageGone { name: node(), uid: UID.to_owned() });
    let deleted = Action::NotifyJobs(NodeImageUpdate::Deleted(node()));
    assert!(!world.done.contains(&deleted), "it's created again");
    assert_eq!(world.take_tag_states(), [("job".to_owned(), TagState::Absent)]);
    world.request(&wanted, false);
    assert!(world.spec_tag("nginx", "1.25").is_some());

    // What the node does in between counts.
    world.api = false;
    world.object = None;
    world.input(Input::NodeImageGone { name: node(), uid: format!("{UID}-2") });
    world.disconnect();
    assert_eq!(world.done.last(), Some(&Action::NotifyJobs(NodeImageUpdate::Online(node(), false))));
    world.hear(FleetEvent::Node(NodeView { ready: false, ..view(&[("edge", "")]) }));
    assert_eq!(world.done.last(), Some(&deleted));
}

#[test]
fn a_job_waits_five_minutes_for_a_new_node_image() {
    let mut world = World::new();
    world.api = false;
    world.object = None;
    world.input(Input::NodeImageGone { name: node(), uid: UID.to_owned() });
    let deleted = Action::NotifyJobs(NodeImageUpdate::Deleted(node()));
    for (wait, expected) in [(299, false), (2, true)] {
        world.pass(Duration::from_secs(wait));
        assert_eq!(world.done.contains(&deleted), expected);
    }
    world.api = true;
    world.pass(Duration::from_secs(31));
    assert!(matches!(world.done.last(), Some(Action::NotifyJobs(NodeImageUpdate::Online(..)))));
}

#[test]
fn requests_outlive_a_deleted_node_image() {
    let mut world = World::new();
    world.run_jobs(&["shop-job", "bank-job", "late-job"]);
    let mut bank = request("bank-job");
    bank.owner.namespace = Some("bank".to_owned());
    world.request(&Arc::new(request("shop-job")), false);
    // One waits for the end of the other's pull, and one for the API server.
    world.request(&Arc::new(bank), false);
    world.api = false;
    let late = TagRequest { key: TagKey::new("late", "1"), ..request("late-job") };
    world.request(&Arc::new(late), false);
    world.object = None;
    world.input(Input::NodeImageGone { name: node(), uid: UID.to_owned() });
    world.api = true;
    world.pass(Duration::from_secs(31));
    let owner = world.spec_tag("nginx", "1.25").and_then(|tag| tag.owner_references.first()?.name.clone());
    assert_eq!(owner.as_deref(), Some("bank-job"));
    assert!(world.spec_tag("late", "1").is_some());
}

#[test]
fn a_late_answer_brings_no_deleted_node_image_back() {
    let mut world = World::new();
    let deleted = world.object.take().unwrap();
    let answer = || WrittenNodeImage::Done(Some(Box::new(deleted.clone().into())));
    world.api = false;
    world.input(Input::NodeImageGone { name: node(), uid: UID.to_owned() });
    world.input(Input::Written(node(), answer()));
    world.api = true;
    world.pass(Duration::from_secs(31));
    world.input(Input::Written(node(), answer()));
    world.edit(|spec| add_manual_tag(spec, "a", "1"));
    assert_eq!(world.take_dispatched().len(), 1, "the next one is there, and stays");
}
