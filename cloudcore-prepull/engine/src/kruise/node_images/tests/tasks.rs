#![allow(clippy::unwrap_used)]
//! Tasks sent to the node, and its answers.

use prepull_api::crd::kruise::PullPhase;
use prepull_api::task::PullPolicy;
use serde_json::json;

use super::*;

fn acked(task: &TaskId) -> CloudMessage {
    CloudMessage::ResultAck { task: task.clone() }
}

fn is_cancel(message: &CloudMessage, of: &TaskId) -> bool {
    matches!(message, CloudMessage::Cancel { task, .. } if task == of)
}

#[test]
fn a_manual_tags_ack_follows_its_status() {
    let mut world = World::new();
    world.edit(|spec| add_manual_tag(spec, "ubuntu", "latest"));
    let dispatches = world.take_dispatched();
    let [dispatch] = dispatches.as_slice() else { panic!("{dispatches:?}") };
    let image = &dispatch.task.images[0];
    assert_eq!(
        (image.image.as_str(), image.reference.as_str()),
        ("ubuntu:latest", "docker.io/library/ubuntu:latest")
    );
    assert_eq!((image.policy, image.retries), (PullPolicy::IfNotPresent, 3));
    assert_eq!(image.timeout, Some(Duration::from_secs(600)));
    assert_eq!(dispatch.task.title, "nodeimage/ubuntu:latest");
    assert!(is_of_node_image(&dispatch.task.id) && dispatch.task.id.attempt == 1, "{}", dispatch.task.id);
    // Four tries of 600 s, 1 + 2 + 4 s between them, and a minute.
    assert_eq!(dispatch.remaining, Duration::from_secs(2400 + 7 + 60));

    world.api = false;
    world.end_task(&dispatch.task.id, pulled());
    world.connect(&[(dispatch.task.id.clone(), OpenPhase::Finished)]);
    assert_eq!(world.take_sent(), [], "not before the API server has it");
    world.api = true;
    world.pass(Duration::from_secs(1));
    assert_eq!(world.take_sent(), [acked(&dispatch.task.id)]);
    let tag = world.tag("ubuntu", "latest").unwrap();
    assert_eq!((tag.phase, tag.progress), (PullPhase::Succeeded, 100));
    assert_eq!(tag.image_id.as_deref(), Some("ubuntu@sha256:bb"));
    assert!(tag.start_time.is_some() && tag.completion_time.is_some());
    let status = world.status();
    assert_eq!((status.desired, status.succeeded, status.pulling, status.failed), (1, 1, 0, 0));
    world.end_task(&dispatch.task.id, pulled());
    assert_eq!(
        world.take_sent(),
        [acked(&dispatch.task.id)],
        "said once more, since the acknowledgement was lost"
    );
}

#[test]
fn a_digest_is_pulled_by_its_digest() {
    let mut world = World::new();
    let digest = format!("sha256:{}", "a".repeat(64));
    world.edit(|spec| add_manual_tag(spec, "r.io:5000/team/app", &digest));
    let dispatch = &world.take_dispatched()[0];
    assert_eq!(dispatch.task.images[0].reference, format!("r.io:5000/team/app@{digest}"));
    assert_eq!(dispatch.task.images[0].image, format!("r.io:5000/team/app@{digest}"));
}

#[test]
fn slots_go_to_the_oldest_tag() {
    let mut world = World::new();
    let made = |second| Some(Time(Timestamp::from_second(second).unwrap()));
    world.edit(|spec| {
        add_manual_tag(spec, "a", "1");
        add_manual_tag(spec, "b", "1");
        spec.images.get_mut("a").unwrap().tags[0].created_at = made(20);
        spec.images.get_mut("b").unwrap().tags[0].created_at = made(10);
    });
    let first = world.take_dispatched();
    assert_eq!(
        first.iter().map(|dispatch| dispatch.task.images[0].image.as_str()).collect::<Vec<_>>(),
        ["b:1"]
    );
    assert_eq!(world.slots, 0);
    world.end_task(&first[0].task.id, failed("no"));
    let second = world.take_dispatched();
    assert_eq!(second[0].task.images[0].image, "a:1");
    world.end_task(&second[0].task.id, pulled());
    world.pass(Duration::from_secs(1));
    assert_eq!(world.slots, 1, "every place comes back");
    assert_eq!((world.status().succeeded, world.status().failed), (1, 1));
    assert_eq!(world.tag("b", "1").unwrap().message, "no");
}

#[test]
fn an_offline_node_gets_no_task() {
    let mut world = World::new();
    world.edit(|spec| add_manual_tag(spec, "a", "1"));
    let task = world.take_dispatched()[0].task.id.clone();
    world.disconnect();
    assert_eq!(world.slots, 1);
    world.pass(Duration::from_secs(7200));
    assert_eq!(world.tag("a", "1").unwrap().phase, PullPhase::Pulling, "without a deadline it waits");
    world.connect(&[(task.clone(), OpenPhase::Running)]);
    assert_eq!((world.slots, world.take_dispatched().len()), (0, 0), "it is at work on it still");
    world.end_task(&task, pulled());
    assert_eq!(world.slots, 1);
    assert_eq!(world.tag("a", "1").unwrap().phase, PullPhase::Succeeded);
}

#[test]
fn a_lost_task_is_sent_again() {
    for open in [None, Some(OpenPhase::NeedsKeys)] {
        let mut world = World::new();
        world.edit(|spec| add_manual_tag(spec, "a", "1"));
        let task = world.take_dispatched()[0].task.id.clone();
        world.disconnect();
        let open: Vec<_> = open.map(|phase| (task.clone(), phase)).into_iter().collect();
        world.connect(&open);
        let again = world.take_dispatched();
        assert_eq!(again.iter().map(|dispatch| &dispatch.task.id).collect::<Vec<_>>(), [&task]);
        assert_eq!((world.slots, world.take_sent()), (0, Vec::new()));
    }
}

#[test]
fn a_restart_adopts_a_running_task() {
    let mut world = World::new();
    world.edit(|spec| add_manual_tag(spec, "a", "1"));
    let task = world.take_dispatched()[0].task.id.clone();

    let mut restarted = world.restarted();
    // The hello comes before anything was settled.
    restarted.connect(&[(task.clone(), OpenPhase::Running)]);
    assert_eq!((restarted.take_dispatched(), restarted.take_sent(), restarted.slots), (vec![], vec![], 0));
    restarted.end_task(&task, pulled());
    restarted.pass(Duration::from_secs(1));
    assert_eq!(restarted.take_sent(), [acked(&task)]);
    assert_eq!(restarted.tag("a", "1").unwrap().phase, PullPhase::Succeeded);
}

#[test]
fn a_removed_tags_task_is_cancelled() {
    let mut world = World::new();
    world.edit(|spec| add_manual_tag(spec, "a", "1"));
    let task = world.take_dispatched()[0].task.id.clone();
    world.edit(|spec| spec.images.clear());
    let said = world.take_sent();
    assert!(said.len() == 1 && is_cancel(&said[0], &task), "{said:?}");
    assert_eq!(world.slots, 1);
    world.receive(EdgeMessage::Accepted { task: task.clone() });
    assert_eq!(world.take_sent(), [], "it is cancelled");
    let stopped = ImageResult { outcome: ImageOutcome::Stopped, ..failed("cancelled") };
    world.end_task(&task, stopped);
    assert_eq!(world.take_sent(), [acked(&task)]);
    world.pass(Duration::from_secs(10));
    assert_eq!(world.status(), NodeImageStatus::default());
}

#[test]
fn changed_terms_make_another_task() {
    let mut world = World::new();
    world.edit(|spec| add_manual_tag(spec, "a", "1"));
    let first = world.take_dispatched()[0].task.id.clone();
    world.edit(|spec| spec.images.get_mut("a").unwrap().tags[0].version = 1);
    assert_eq!((world.take_dispatched(), world.take_sent()), (vec![], vec![]), "what runs goes on");
    world.end_task(&first, pulled());
    assert_eq!(world.take_sent(), [acked(&first)]);
    let second = world.take_dispatched()[0].task.id.clone();
    assert_eq!((&second.job, second.attempt), (&first.job, 2));
    world.pass(Duration::from_secs(5));
    let tag = world.tag("a", "1").unwrap();
    assert_eq!((tag.phase, tag.version), (PullPhase::Pulling, 1));

    world.edit(|spec| {
        spec.images.get_mut("a").unwrap().tags[0].pull_policy.as_mut().unwrap().timeout_seconds = Some(5);
    });
    let third = world.take_dispatched()[0].task.clone();
    assert!(is_cancel(&world.take_sent()[0], &second));
    assert_ne!(third.id.job, second.job);
    assert_eq!(third.images[0].timeout, Some(Duration::from_secs(5)));
}

#[test]
fn the_deadline_applies_to_offline_nodes() {
    let mut world = World::new();
    world.edit(|spec| add_tag_with_deadline(spec, 1200));
    let dispatch = &world.take_dispatched()[0];
    assert_eq!(dispatch.remaining, Duration::from_secs(1200));
    let task = dispatch.task.id.clone();
    world.disconnect();
    world.pass(Duration::from_secs(200));
    world.connect(&[(task.clone(), OpenPhase::NeedsKeys)]);
    assert_eq!(
        world.take_dispatched()[0].remaining,
        Duration::from_secs(1000),
        "from its start, also over a restart"
    );
    world.disconnect();
    world.pass(Duration::from_secs(1200));
    let tag = world.tag("a", "1").unwrap();
    assert_eq!(
        (tag.phase, tag.message.as_str()),
        (PullPhase::Failed, "pulling exceeds the activeDeadlineSeconds")
    );
    world.take_sent();
    // It comes back, and has pulled the image anyway.
    world.connect(&[(task.clone(), OpenPhase::Finished)]);
    world.end_task(&task, pulled());
    assert_eq!(world.take_sent(), [acked(&task)]);
}

#[test]
fn a_refused_tag_fails_alone() {
    let mut world = World::new();
    world.edit(|spec| {
        add_manual_tag(spec, "good", "1");
        add_manual_tag(spec, "bad", "1");
        spec.images.get_mut("bad").unwrap().tags[0].pull_policy = None;
    });
    assert_eq!(world.take_dispatched().len(), 1);
    let bad = world.tag("bad", "1").unwrap();
    assert_eq!((bad.phase, bad.message.as_str()), (PullPhase::Failed, "pullPolicy field for bad/1 must set"));
    let told = |world: &World| world.done.iter().filter(|action| matches!(action, Action::Event(_))).count();
    assert_eq!(told(&world), 1);
    // Each version has one event, also while its status can't be written.
    world.api = false;
    let set_version = |spec: &mut NodeImageSpec, version| {
        spec.images.get_mut("bad").unwrap().tags[0].version = version;
    };
    world.edit(|spec| set_version(spec, 1));
    world.edit(|spec| add_manual_tag(spec, "good", "2"));
    assert_eq!(told(&world), 2);
    world.edit(|spec| set_version(spec, 2));
    assert_eq!(told(&world), 3);
}

#[test]
fn a_tag_uses_only_its_owners_secrets() {
    let mut world = World::new();
    world.run_jobs(&["job"]);
    let secret = |namespace: &str| prepull_api::crd::kruise::SecretObject {
        namespace: namespace.to_owned(),
        name: "s".to_owned(),
    };
    world.request(&Arc::new(TagRequest { secrets: vec![secret("shop")], ..request("job") }), false);
    let task = world.take_dispatched()[0].clone();
    assert_eq!(task.secrets.iter().map(ToString::to_string).collect::<Vec<_>>(), ["shop/s"]);
    world.end_task(&task.task.id, pulled());
    world.edit(|spec| {
        let image = spec.images.get_mut("nginx").unwrap();
        image.pull_secrets.push(secret("bank"));
        image.tags[0].version = 1;
    });
    let task = world.take_dispatched()[0].clone();
    assert_eq!(task.secrets.iter().map(ToString::to_string).collect::<Vec<_>>(), ["shop/s"]);
}

#[test]
fn an_api_outage_bounds_a_nodes_ledger() {
    let mut world = World::new();
    world.slots = 100;
    world.edit(|spec| (0..100).for_each(|n| add_manual_tag(spec, &format!("i{n}"), "1")));
    let sent = world.take_dispatched();
    assert_eq!(sent.len(), 32);
    world.api = false;
    for dispatch in &sent {
        world.end_task(&dispatch.task.id, pulled());
    }
    assert_eq!(world.take_dispatched(), [], "each result is in the ledger until it is acknowledged");
    world.api = true;
    world.pass(Duration::from_secs(60));
    assert_eq!(world.take_dispatched().len(), 32);
}

#[test]
fn another_tags_request_disturbs_no_pull() {
    let mut world = World::new();
    world.run_jobs(&["one", "two"]);
    world.request(&Arc::new(request("one")), false);
    world.take_dispatched();
    let labels = Some(BTreeMap::from([("app".to_owned(), "shop".to_owned())]));
    let sandbox = Some(prepull_api::crd::kruise::SandboxConfig { labels, annotations: None });
    world.request(
        &Arc::new(TagRequest { key: TagKey::new("nginx", "1.26"), sandbox, ..request("two") }),
        false,
    );
    assert_eq!((world.take_sent(), world.take_dispatched()), (vec![], vec![]), "one place, and it is taken");
}

#[test]
fn a_restart_continues_from_the_stored_status() {
    let mut world = World::new();
    world.edit(|spec| add_tag_with_deadline(spec, 600));
    let task = world.take_dispatched()[0].task.id.clone();
    world.report_progress(&task, 40, 100);
    // Of an unknown size.
    world.report_progress(&task, 0, 0);
    world.pass(Duration::from_secs(10));
    assert_eq!(world.tag("a", "1").unwrap().progress, 40);

    let mut restarted = world.restarted();
    restarted.settle();
    restarted.pass(Duration::from_secs(30));
    let tag = restarted.tag("a", "1").unwrap();
    assert_eq!((tag.phase, tag.progress), (PullPhase::Pulling, 40));
    assert_eq!(restarted.take_write_counts(), (0, 0), "nothing new is to be said");
    restarted.connect(&[(task, OpenPhase::NeedsKeys)]);
    assert_eq!(restarted.take_dispatched()[0].remaining, Duration::from_secs(560), "from its first start");
}

#[test]
fn an_inherited_tasks_failure_is_retried_once() {
    let mut world = World::new();
    world.edit(|spec| add_manual_tag(spec, "a", "1"));
    let task = world.take_dispatched()[0].task.id.clone();

    let mut restarted = world.restarted();
    restarted.settle();
    restarted.connect(&[(task.clone(), OpenPhase::Finished)]);
    restarted.end_task(&task, failed("401"));
    assert_eq!((restarted.take_sent(), restarted.slots), (vec![acked(&task)], 0));
    assert_eq!(restarted.take_dispatched()[0].task.id, task, "the secret may have been mended");
    restarted.end_task(&task, failed("401"));
    assert_eq!(restarted.tag("a", "1").unwrap().phase, PullPhase::Failed);

    world.connect(&[(task.clone(), OpenPhase::Running)]);
    world.end_task(&task, failed("401"));
    assert_eq!(world.tag("a", "1").unwrap().phase, PullPhase::Failed, "it's of this cloudcore");
}

#[test]
fn a_failed_checks_reason_is_in_status() {
    let mut world = World::new();
    world.edit(|spec| add_manual_tag(spec, "a", "1"));
    let task = world.take_dispatched()[0].task.id.clone();
    world.receive(EdgeMessage::Result(TaskResult {
        removal: None,
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
fn a_pull_without_active_owners_is_cancelled() {
    for deadline in [None, Some(600)] {
        let mut world = World::new();
        world.run_jobs(&["job"]);
        let mut request = request("job");
        request.limits.active_deadline_seconds = deadline;
        world.request(&Arc::new(request), false);
        let task = world.take_dispatched()[0].task.id.clone();
        world.jobs.borrow_mut().insert(JobUid("job".to_owned()), Liveness::Finished);
        world.input(Input::LivenessChanged(JobUid("job".to_owned())));
        assert!(is_cancel(&world.take_sent()[0], &task));
        world.pass(Duration::from_secs(1));
        let tag = world.tag("nginx", "1.25").unwrap();
        // The node isn't silent, and its time isn't over.
        assert_eq!((tag.phase, tag.message.as_str()), (PullPhase::Failed, "its jobs have ended"));
        assert!(world.spec_tag("nginx", "1.25").is_some(), "for as long as an outcome is shown");
    }
}

#[test]
fn an_unreadable_secret_holds_no_slot() {
    let mut world = World::new();
    world.secrets = Some("secret s/t could not be read: 500");
    world.edit(|spec| add_manual_tag(spec, "a", "1"));
    assert_eq!((world.take_dispatched().len(), world.slots), (1, 1));
    world.pass(Duration::from_secs(4));
    let tag = world.tag("a", "1").unwrap();
    assert_eq!((tag.phase, tag.message.as_str()), (PullPhase::Waiting, "secret s/t could not be read: 500"));
    assert_eq!(world.take_dispatched(), []);
    // It counts: without a deadline of its own after the time that all tries may take, 2467 s here.
    world.pass(Duration::from_secs(2400));
    let tries = world.take_dispatched().len();
    assert!((30..60).contains(&tries), "{tries}");
    world.pass(Duration::from_secs(70));
    let tag = world.tag("a", "1").unwrap();
    assert_eq!((tag.phase, tag.message.as_str()), (PullPhase::Failed, "secret s/t could not be read: 500"));
    assert_eq!(world.slots, 1);
}

#[test]
fn a_secrets_wait_counts_against_the_tag() {
    let mut world = World::new();
    world.secrets = Some("secret s/t could not be read: 500");
    world.edit(|spec| add_tag_with_deadline(spec, 600));
    world.pass(Duration::from_secs(10));
    world.take_dispatched();
    world.secrets = None;
    world.pass(Duration::from_secs(5));
    let sent = world.take_dispatched();
    assert_eq!(sent.len(), 1);
    assert_eq!(sent[0].remaining, Duration::from_secs(585), "after waits of 5 s and 10 s");
    world.pass(Duration::from_secs(10));
    assert_eq!(world.tag("a", "1").unwrap().message, "", "it does not wait any more");
    world.end_task(&sent[0].task.id, pulled());
    assert_eq!(world.tag("a", "1").unwrap().phase, PullPhase::Succeeded);
}

#[test]
fn no_tag_keeps_a_slot_for_ever() {
    for (limits, hours) in [
        (json!({"timeoutSeconds": 600, "backoffLimit": i32::MAX}), 24),
        (json!({"timeoutSeconds": i32::MAX, "backoffLimit": 1}), 24),
        // The node may have to wait for its window besides.
        (json!({"timeoutSeconds": 600, "activeDeadlineSeconds": i64::from(i32::MAX)}), 8 * 24),
    ] {
        let mut world = World::new();
        world.edit(|spec| {
            add_manual_tag(spec, "a", "1");
            let policy = spec.images.get_mut("a").unwrap().tags[0].pull_policy.as_mut().unwrap();
            let ttl = policy.ttl_seconds_after_finished;
            *policy = serde_json::from_value(limits.clone()).unwrap();
            policy.ttl_seconds_after_finished = ttl;
        });
        let sent = world.take_dispatched();
        assert_eq!(sent[0].remaining, Duration::from_secs(hours * 3600), "{limits}");
        let slots = world.slots;
        world.pass(Duration::from_secs((hours + 1) * 3600));
        assert!(world.slots > slots, "{limits}");
    }
}

#[test]
fn a_new_round_has_its_own_deadline() {
    let mut world = World::new();
    world.edit(|spec| add_tag_with_deadline(spec, 60));
    world.pass(Duration::from_secs(50));
    world.edit(|spec| spec.images.get_mut("a").unwrap().tags[0].version += 1);
    // Of a node that says nothing the deadline counts two minutes later.
    for (wait, expected) in [(140, PullPhase::Pulling), (50, PullPhase::Failed)] {
        world.pass(Duration::from_secs(wait));
        assert_eq!(world.tag("a", "1").unwrap().phase, expected);
    }
}
