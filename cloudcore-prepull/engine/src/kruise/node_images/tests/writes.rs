#![allow(clippy::unwrap_used)]
//! The object itself: made, labelled, deleted; and how rarely it is written.

use prepull_api::crd::kruise::PullPhase;

use super::*;

#[test]
fn it_is_made_for_a_ready_edge_node_labelled_as_the_node_and_deleted_with_it() {
    let mut world = World::bare();
    world.tell(Input::Nodes(vec![NodeView { ready: false, ..view(&[("edge", "")]) }]));
    assert_eq!(world.writes, [], "not Ready");
    world.tell(Input::Node(view(&[("zone", "a")])));
    assert_eq!(world.writes, [], "not an edge node");
    world.tell(Input::Node(view(&[("edge", ""), ("type", "virtual-kubelet")])));
    assert_eq!(world.writes, [], "virtual");
    world.tell(Input::Node(view(&[("edge", ""), ("zone", "a")])));
    assert_eq!(world.status(), NodeImageStatus::default());
    assert_eq!(world.object.as_ref().unwrap().metadata.labels.as_ref().unwrap()["zone"], "a");
    let news = |world: &World| {
        let labels = |action: &Action| match action {
            Action::News(News::Node { labels, .. }) => Some(labels.get("zone").cloned()),
            _ => None,
        };
        world.done.iter().filter_map(labels).collect::<Vec<_>>()
    };
    assert_eq!(news(&world), [Some("a".to_owned())]);

    world.tell(Input::Node(NodeView { ready: false, ..view(&[("edge", ""), ("zone", "b")]) }));
    assert_eq!(world.object.as_ref().unwrap().metadata.labels.as_ref().unwrap()["zone"], "b");
    assert_eq!(news(&world), [Some("a".to_owned()), Some("b".to_owned())]);

    world.tell(Input::NodeGone(node()));
    assert_eq!(world.object, None);
    assert_eq!(world.done.last(), Some(&Action::News(News::NodeGone(node()))));
    assert!(world.images.held.is_empty(), "nothing is kept of it");
}

#[test]
fn one_that_was_deleted_by_hand_is_made_again() {
    let mut world = World::new();
    world.edit(|spec| by_hand(spec, "a", "1"));
    let task = world.sent()[0].task.id.clone();
    world.object = None;
    world.tell(Input::NodeImageGone { name: node(), uid: UID.to_owned() });
    assert_eq!(world.object.as_ref().unwrap().spec, NodeImageSpec::default());
    let said = world.said();
    assert!(matches!(&said[..], [CloudMessage::Cancel { task: of, .. }] if *of == task), "{said:?}");
    assert_eq!(world.places, 1);
}

#[test]
fn a_quick_pull_makes_four_writes_in_all() {
    let mut world = World::new();
    world.jobs.borrow_mut().insert(JobUid("job".to_owned()), Liveness::Active);
    world.ask(&Arc::new(wish("job")), false);
    let task = world.sent()[0].task.id.clone();
    world.advances(&task, 10, 100);
    world.pass(Duration::from_secs(2));
    world.ends(&task, pulled());
    world.pass(Duration::from_secs(60));
    assert_eq!(world.counts(), (1, 1), "into the spec, and how it ended");
    world.jobs.borrow_mut().insert(JobUid("job".to_owned()), Liveness::Over);
    world.tell(Input::Liveness(JobUid("job".to_owned())));
    world.pass(Duration::from_secs(700));
    assert_eq!(world.counts(), (1, 1), "out of the spec, and out of the status");
}

#[test]
fn a_slow_pull_is_told_after_three_seconds_and_then_every_five() {
    let mut world = World::new();
    world.edit(|spec| by_hand(spec, "a", "1"));
    let task = world.sent()[0].task.id.clone();
    world.counts();
    for second in 1..=60 {
        world.pass(Duration::from_secs(1));
        world.advances(&task, second, 60);
    }
    let (specs, statuses) = world.counts();
    assert!(specs == 0 && (11..=13).contains(&statuses), "{statuses}");
    let tag = world.tag("a", "1").unwrap();
    assert!(tag.phase == PullPhase::Pulling && (90..100).contains(&tag.progress), "{tag:?}");
    world.pass(Duration::from_secs(600));
    assert_eq!(world.counts(), (0, 1), "where nothing moves nothing is written");
}

#[test]
fn a_write_that_fails_or_changes_nothing_is_not_made_in_a_loop() {
    let mut world = World::new();
    world.api = false;
    world.edit(|spec| by_hand(spec, "a", "1"));
    let task = world.sent()[0].task.id.clone();
    world.ends(&task, pulled());
    world.counts();
    world.pass(Duration::from_secs(60));
    let (_, tried) = world.counts();
    assert!((4..=10).contains(&tried), "{tried}");
    world.api = true;
    world.pass(Duration::from_secs(31));
    assert_eq!(world.tag("a", "1").unwrap().phase, PullPhase::Succeeded);
}

#[test]
fn what_the_watch_tells_late_does_not_count() {
    let mut world = World::new();
    let old = world.object.clone().unwrap();
    world.edit(|spec| by_hand(spec, "a", "1"));
    world.tell(Input::NodeImage(Ok(Box::new(old))));
    assert_eq!(world.said(), [], "nothing is cancelled");
    assert_eq!(world.sent().len(), 1);
}

#[test]
fn what_ends_together_is_told_together() {
    let mut world = World::new();
    world.places = 5;
    world.edit(|spec| (0..5).for_each(|n| by_hand(spec, &format!("i{n}"), "1")));
    let sent = world.sent();
    world.counts();
    for order in sent {
        world.say(EdgeMessage::Result(TaskResult {
            task: order.task.id,
            outcome: TaskOutcome::Succeeded,
            reason: String::new(),
            check: None,
            images: vec![pulled()],
            took: Duration::from_secs(1),
        }));
    }
    world.pass(Duration::from_secs(1));
    assert_eq!((world.counts(), world.status().succeeded), ((0, 2), 5));
}

#[test]
fn twenty_statuses_a_second_tell_of_progress_and_the_others_wait() {
    let mut budget = progress_budget();
    let start = Timestamp::from_second(1_800_000_000).unwrap();
    let mut allowed = |at| (0..1000).filter(|_| budget.try_take(1.0, at).is_ok()).count();
    assert_eq!(allowed(start), 20);
    assert_eq!(allowed(start + Duration::from_millis(500)), 10);
}
