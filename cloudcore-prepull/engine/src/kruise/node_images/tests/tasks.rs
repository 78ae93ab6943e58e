#![allow(clippy::unwrap_used)]
//! What is sent to the node, and what it says.

use prepull_api::crd::kruise::PullPhase;
use prepull_api::task::PullPolicy;

use super::*;

fn acked(task: &TaskId) -> CloudMessage {
    CloudMessage::ResultAck { task: task.clone() }
}

fn is_cancel(message: &CloudMessage, of: &TaskId) -> bool {
    matches!(message, CloudMessage::Cancel { task, .. } if task == of)
}

#[test]
fn a_tag_by_hand_is_pulled_told_and_acknowledged_once_it_is_written() {
    let mut world = World::new();
    world.edit(|spec| by_hand(spec, "ubuntu", "latest"));
    let orders = world.sent();
    let [order] = orders.as_slice() else { panic!("{orders:?}") };
    let image = &order.task.images[0];
    assert_eq!(
        (image.image.as_str(), image.reference.as_str()),
        ("ubuntu:latest", "docker.io/library/ubuntu:latest")
    );
    assert_eq!((image.policy, image.retries), (PullPolicy::IfNotPresent, 3));
    assert_eq!(image.timeout, Some(Duration::from_secs(600)));
    assert_eq!(order.task.title, "nodeimage/ubuntu:latest");
    assert!(is_of_node_image(&order.task.id) && order.task.id.attempt == 1, "{}", order.task.id);
    // Four tries of 600 s, 1 + 2 + 4 s between them, and a minute.
    assert_eq!(order.remaining, Duration::from_secs(2400 + 7 + 60));

    world.api = false;
    world.ends(&order.task.id, pulled());
    assert_eq!(world.said(), [], "not before the API server has it");
    world.api = true;
    world.pass(Duration::from_secs(1));
    assert_eq!(world.said(), [acked(&order.task.id)]);
    let tag = world.tag("ubuntu", "latest").unwrap();
    assert_eq!((tag.phase, tag.progress), (PullPhase::Succeeded, 100));
    assert_eq!(tag.image_id.as_deref(), Some("ubuntu@sha256:bb"));
    assert!(tag.start_time.is_some() && tag.completion_time.is_some());
    let status = world.status();
    assert_eq!((status.desired, status.succeeded, status.pulling, status.failed), (1, 1, 0, 0));
    world.ends(&order.task.id, pulled());
    assert_eq!(world.said(), [acked(&order.task.id)], "said once more, since the acknowledgement was lost");
}

#[test]
fn a_digest_is_pulled_by_its_digest() {
    let mut world = World::new();
    let digest = format!("sha256:{}", "a".repeat(64));
    world.edit(|spec| by_hand(spec, "r.io:5000/team/app", &digest));
    let order = &world.sent()[0];
    assert_eq!(order.task.images[0].reference, format!("r.io:5000/team/app@{digest}"));
    assert_eq!(order.task.images[0].image, format!("r.io:5000/team/app@{digest}"));
}

#[test]
fn places_bound_what_a_node_has_at_a_time_and_who_came_first_is_served_first() {
    let mut world = World::new();
    let made = |second| Some(Time(Timestamp::from_second(second).unwrap()));
    world.edit(|spec| {
        by_hand(spec, "a", "1");
        by_hand(spec, "b", "1");
        spec.images.get_mut("a").unwrap().tags[0].created_at = made(20);
        spec.images.get_mut("b").unwrap().tags[0].created_at = made(10);
    });
    let first = world.sent();
    assert_eq!(first.iter().map(|order| order.task.images[0].image.as_str()).collect::<Vec<_>>(), ["b:1"]);
    assert_eq!(world.places, 0);
    world.ends(&first[0].task.id, failed("no"));
    let second = world.sent();
    assert_eq!(second[0].task.images[0].image, "a:1");
    world.ends(&second[0].task.id, pulled());
    world.pass(Duration::from_secs(1));
    assert_eq!(world.places, 1, "every place comes back");
    assert_eq!((world.status().succeeded, world.status().failed), (1, 1));
    assert_eq!(world.tag("b", "1").unwrap().message, "no");
}

#[test]
fn a_node_that_is_offline_is_sent_nothing_and_takes_no_place() {
    let mut world = World::new();
    world.edit(|spec| by_hand(spec, "a", "1"));
    let task = world.sent()[0].task.id.clone();
    world.down();
    assert_eq!(world.places, 1);
    world.pass(Duration::from_secs(7200));
    assert_eq!(world.tag("a", "1").unwrap().phase, PullPhase::Pulling, "without a deadline it waits");
    world.up(&[(task.clone(), OpenPhase::Running)]);
    assert_eq!((world.places, world.sent().len()), (0, 0), "it is at work on it still");
    world.ends(&task, pulled());
    assert_eq!(world.places, 1);
    assert_eq!(world.tag("a", "1").unwrap().phase, PullPhase::Succeeded);
}

#[test]
fn a_node_that_lost_the_task_or_its_keys_is_sent_it_again() {
    for open in [None, Some(OpenPhase::NeedsKeys)] {
        let mut world = World::new();
        world.edit(|spec| by_hand(spec, "a", "1"));
        let task = world.sent()[0].task.id.clone();
        world.down();
        let open: Vec<_> = open.map(|phase| (task.clone(), phase)).into_iter().collect();
        world.up(&open);
        let again = world.sent();
        assert_eq!(again.iter().map(|order| &order.task.id).collect::<Vec<_>>(), [&task]);
        assert_eq!((world.places, world.said()), (0, Vec::new()));
    }
}

#[test]
fn a_task_that_runs_when_cloudcore_comes_back_is_taken_up() {
    let mut world = World::new();
    world.edit(|spec| by_hand(spec, "a", "1"));
    let task = world.sent()[0].task.id.clone();

    let mut restarted = world.restarted();
    // The hello comes before anything was settled.
    restarted.up(&[(task.clone(), OpenPhase::Running)]);
    assert_eq!((restarted.sent(), restarted.said(), restarted.places), (vec![], vec![], 0));
    restarted.ends(&task, pulled());
    restarted.pass(Duration::from_secs(1));
    assert_eq!(restarted.said(), [acked(&task)]);
    assert_eq!(restarted.tag("a", "1").unwrap().phase, PullPhase::Succeeded);
}

#[test]
fn a_tag_that_is_taken_out_is_cancelled_and_a_late_result_acknowledged() {
    let mut world = World::new();
    world.edit(|spec| by_hand(spec, "a", "1"));
    let task = world.sent()[0].task.id.clone();
    world.edit(|spec| spec.images.clear());
    let said = world.said();
    assert!(said.len() == 1 && is_cancel(&said[0], &task), "{said:?}");
    assert_eq!(world.places, 1);
    let stopped = ImageResult { outcome: ImageOutcome::Stopped, ..failed("cancelled") };
    world.ends(&task, stopped);
    assert_eq!(world.said(), [acked(&task)]);
    world.pass(Duration::from_secs(10));
    assert_eq!(world.status(), NodeImageStatus::default());
}

#[test]
fn other_terms_are_another_task_and_a_further_round_of_the_same_waits_for_the_first() {
    let mut world = World::new();
    world.edit(|spec| by_hand(spec, "a", "1"));
    let first = world.sent()[0].task.id.clone();
    world.edit(|spec| spec.images.get_mut("a").unwrap().tags[0].version = 1);
    assert_eq!((world.sent(), world.said()), (vec![], vec![]), "what runs goes on");
    world.ends(&first, pulled());
    assert_eq!(world.said(), [acked(&first)]);
    let second = world.sent()[0].task.id.clone();
    assert_eq!((&second.job, second.attempt), (&first.job, 2));

    world.edit(|spec| {
        spec.images.get_mut("a").unwrap().tags[0].pull_policy.as_mut().unwrap().timeout_seconds = Some(5);
    });
    let third = world.sent()[0].task.clone();
    assert!(is_cancel(&world.said()[0], &second));
    assert_ne!(third.id.job, second.job);
    assert_eq!(third.images[0].timeout, Some(Duration::from_secs(5)));
}

#[test]
fn a_deadline_is_kept_also_where_the_node_is_cut_off() {
    let mut world = World::new();
    world.edit(|spec| {
        by_hand(spec, "a", "1");
        spec.images.get_mut("a").unwrap().tags[0].pull_policy.as_mut().unwrap().active_deadline_seconds =
            Some(1200);
    });
    let order = &world.sent()[0];
    assert_eq!(order.remaining, Duration::from_secs(1200));
    let task = order.task.id.clone();
    world.down();
    world.pass(Duration::from_secs(200));
    world.up(&[(task.clone(), OpenPhase::NeedsKeys)]);
    assert_eq!(world.sent()[0].remaining, Duration::from_secs(1000), "from its start, also over a restart");
    world.down();
    world.pass(Duration::from_secs(1200));
    let tag = world.tag("a", "1").unwrap();
    assert_eq!(
        (tag.phase, tag.message.as_str()),
        (PullPhase::Failed, "pulling exceeds the activeDeadlineSeconds")
    );
    world.said();
    // It comes back, and has pulled it all the same.
    world.up(&[(task.clone(), OpenPhase::Finished)]);
    world.ends(&task, pulled());
    assert_eq!(world.said(), [acked(&task)]);
}

#[test]
fn what_the_rules_refuse_fails_with_the_words_and_harms_nobody() {
    let mut world = World::new();
    world.edit(|spec| {
        by_hand(spec, "good", "1");
        by_hand(spec, "bad", "1");
        spec.images.get_mut("bad").unwrap().tags[0].pull_policy = None;
    });
    assert_eq!(world.sent().len(), 1);
    let bad = world.tag("bad", "1").unwrap();
    assert_eq!((bad.phase, bad.message.as_str()), (PullPhase::Failed, "pullPolicy field for bad/1 must set"));
    let told = world.done.iter().filter(|action| matches!(action, Action::Event(_))).count();
    assert_eq!(told, 1);
}

#[test]
fn a_node_uses_secrets_of_its_owners_namespaces_only() {
    let mut world = World::new();
    world.jobs.borrow_mut().insert(JobUid("job".to_owned()), Liveness::Active);
    let secret = |namespace: &str| prepull_api::crd::kruise::SecretObject {
        namespace: namespace.to_owned(),
        name: "s".to_owned(),
    };
    world.ask(&Arc::new(Wish { secrets: vec![secret("shop")], ..wish("job") }), false);
    let task = world.sent()[0].clone();
    assert_eq!(task.secrets.iter().map(ToString::to_string).collect::<Vec<_>>(), ["shop/s"]);
    world.ends(&task.task.id, pulled());
    world.edit(|spec| {
        let image = spec.images.get_mut("nginx").unwrap();
        image.pull_secrets.push(secret("bank"));
        image.tags[0].version = 1;
    });
    let task = world.sent()[0].clone();
    assert_eq!(task.secrets.iter().map(ToString::to_string).collect::<Vec<_>>(), ["shop/s"]);
}

#[test]
fn a_node_is_sent_no_more_than_its_ledger_takes_while_the_api_server_is_away() {
    let mut world = World::new();
    world.places = 100;
    world.edit(|spec| (0..100).for_each(|n| by_hand(spec, &format!("i{n}"), "1")));
    let sent = world.sent();
    assert_eq!(sent.len(), 32);
    world.api = false;
    for order in &sent {
        world.ends(&order.task.id, pulled());
    }
    assert_eq!(world.sent(), [], "each result is in the ledger until it is acknowledged");
    world.api = true;
    world.pass(Duration::from_secs(60));
    assert_eq!(world.sent().len(), 32);
}

#[test]
fn what_another_tag_asks_for_does_not_disturb_a_pull() {
    let mut world = World::new();
    for job in ["one", "two"] {
        world.jobs.borrow_mut().insert(JobUid(job.to_owned()), Liveness::Active);
    }
    world.ask(&Arc::new(wish("one")), false);
    world.sent();
    let labels = Some(BTreeMap::from([("app".to_owned(), "shop".to_owned())]));
    let sandbox = Some(prepull_api::crd::kruise::SandboxConfig { labels, annotations: None });
    world.ask(&Arc::new(Wish { tag: "1.26".to_owned(), sandbox, ..wish("two") }), false);
    assert_eq!((world.said(), world.sent()), (vec![], vec![]), "one place, and it is taken");
}

#[test]
fn a_restart_goes_on_where_the_status_says_it_was() {
    let mut world = World::new();
    world.edit(|spec| {
        by_hand(spec, "a", "1");
        spec.images.get_mut("a").unwrap().tags[0].pull_policy.as_mut().unwrap().active_deadline_seconds =
            Some(600);
    });
    let task = world.sent()[0].task.id.clone();
    world.advances(&task, 40, 100);
    world.pass(Duration::from_secs(10));
    assert_eq!(world.tag("a", "1").unwrap().progress, 40);

    let mut restarted = world.restarted();
    restarted.settle();
    restarted.pass(Duration::from_secs(30));
    let tag = restarted.tag("a", "1").unwrap();
    assert_eq!((tag.phase, tag.progress), (PullPhase::Pulling, 40));
    assert_eq!(restarted.counts(), (0, 0), "nothing new is to be said");
    restarted.up(&[(task, OpenPhase::NeedsKeys)]);
    assert_eq!(restarted.sent()[0].remaining, Duration::from_secs(560), "from its first start");
}

#[test]
fn a_failure_from_before_a_restart_is_tried_once_more_and_then_believed() {
    let mut world = World::new();
    world.edit(|spec| by_hand(spec, "a", "1"));
    let task = world.sent()[0].task.id.clone();

    let mut restarted = world.restarted();
    restarted.settle();
    restarted.up(&[(task.clone(), OpenPhase::Finished)]);
    restarted.ends(&task, failed("401"));
    assert_eq!((restarted.said(), restarted.places), (vec![acked(&task)], 0));
    assert_eq!(restarted.sent()[0].task.id, task, "the secret may have been mended");
    restarted.ends(&task, failed("401"));
    assert_eq!(restarted.tag("a", "1").unwrap().phase, PullPhase::Failed);
}

#[test]
fn why_a_node_was_not_fit_is_what_the_status_says() {
    let mut world = World::new();
    world.edit(|spec| by_hand(spec, "a", "1"));
    let task = world.sent()[0].task.id.clone();
    world.say(EdgeMessage::Result(TaskResult {
        task,
        outcome: TaskOutcome::Failed,
        reason: "check failed: disk: 1 GiB free".to_owned(),
        check: Some(prepull_api::task::CheckOutcome { passed: false, reason: "disk: 1 GiB free".to_owned() }),
        images: vec![failed("not pulled: the node did not pass the checks")],
        took: Duration::from_secs(1),
    }));
    assert_eq!(world.tag("a", "1").unwrap().message, "check failed: disk: 1 GiB free");
}

#[test]
fn a_pull_that_no_job_waits_for_any_more_is_stopped() {
    let mut world = World::new();
    world.jobs.borrow_mut().insert(JobUid("job".to_owned()), Liveness::Active);
    world.ask(&Arc::new(wish("job")), false);
    let task = world.sent()[0].task.id.clone();
    world.jobs.borrow_mut().insert(JobUid("job".to_owned()), Liveness::Over);
    world.tell(Input::Liveness(JobUid("job".to_owned())));
    assert!(is_cancel(&world.said()[0], &task));
    world.pass(Duration::from_secs(1));
    assert_eq!(world.tag("nginx", "1.25").unwrap().phase, PullPhase::Failed);
    assert!(world.spec_tag("nginx", "1.25").is_some(), "for as long as an outcome is shown");
}
