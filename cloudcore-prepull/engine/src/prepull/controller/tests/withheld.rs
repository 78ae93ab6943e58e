//! Secrets without their owners' consent, and labels that nodes give themselves.

use prepull_api::failure::FailureCode;

use super::*;

fn allowed(job: &str, secret: &str) -> Input {
    Input::SecretAllowed { job: JobUid(job.to_owned()), secret: secret.to_owned() }
}

/// A job with a node that has tried three times, and tries again in twenty seconds.
fn waiting() -> World {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.withheld = true;
    world.give(on(&["a"]));
    for _ in 0..17 {
        world.pass(1_000);
    }
    assert_eq!((world.dispatched.len(), world.phase_of("a")), (3, NodePhase::Pending));
    world
}

#[test]
fn waiting_for_consent_takes_no_slot() {
    let world = waiting();
    assert_eq!((world.record("a").reason.as_str(), world.record("a").code), ("s/t is not allowed", None));
    assert_eq!(world.status().reason, "1 node waiting: s/t is not allowed");
    assert_eq!(world.status().summary.in_progress, 0);
    assert_eq!(world.events, ["Started", "SecretWithheld"], "once, and not for every try");
}

#[test]
fn only_consent_resumes_a_withheld_node() {
    let mut world = waiting();
    for other in [allowed(UID, "s/other"), allowed("another job", "s/t")] {
        world.give(other);
        world.pass(1_000);
        assert_eq!(world.dispatched.len(), 3);
    }
    world.withheld = false;
    world.give(allowed(UID, "s/t"));
    world.pass(300);
    assert_eq!((world.dispatched.len(), world.phase_of("a")), (4, NodePhase::InProgress));
    let left = world.remaining.last().unwrap().as_secs();
    assert!(left >= 280, "{left} s of 300: of the last wait only what has passed counts");
    // It has been waited for once.
    world.give(allowed(UID, "s/t"));
    world.ends("a", TaskOutcome::Succeeded);
    world.pass(60_000);
    assert_eq!((world.dispatched.len(), world.status().phase), (4, JobPhase::Completed));
}

#[test]
fn consent_may_take_half_the_nodes_time() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.withheld = true;
    world.give(on(&["a"]));
    for _ in 0..200 {
        world.pass(1_000);
    }
    assert_eq!(world.phase_of("a"), NodePhase::InProgress, "it was still sent");
    let left = world.remaining.last().unwrap().as_secs();
    assert!((150..=200).contains(&left), "{left} s of 300");
}

#[test]
fn a_dispatched_task_waits_for_no_owner() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.give(on(&["a"]));
    world.says("a", EdgeMessage::Accepted { task: task() });
    world.withheld = true;
    world.up("a", &[(UID, 1, OpenPhase::NeedsKeys)]);
    assert_eq!((world.dispatched.len(), world.phase_of("a")), (2, NodePhase::InProgress));
    world.pass(10_000);
    assert_eq!(world.dispatched.len(), 2, "it was sent");
}

#[test]
fn selecting_by_self_set_labels_is_warned_about() {
    let message = |template: serde_json::Value, overriders: serde_json::Value| {
        let mut node = edge("a");
        for label in ["site", "node-restriction.kubernetes.io/site"] {
            node.labels.insert(label.to_owned(), "x".to_owned());
        }
        let mut world = World::new(&[]);
        world.hear(FleetEvent::Node(node));
        let spec = json!({"imagePrePullOverriders": overriders});
        world.give(with_spec(template, spec, 1, None));
        let status = world.status();
        let valid = status.conditions.iter().find(|condition| condition.type_ == "Valid").unwrap();
        assert_eq!((valid.status.as_str(), valid.reason.as_str()), ("True", "Accepted"));
        valid.message.clone()
    };
    let labels = |label: &str| json!({"matchLabels": {label: "x"}});
    let by_label = |label: &str, secret: Option<&str>| {
        message(json!({"labelSelector": labels(label), "imageSecrets": secret}), json!([]))
    };
    assert_eq!(
        by_label("site", Some("s/t")),
        "warning: a node may give itself the labels of these selectors, and get the job's registry secrets by that: site \
         in spec.imagePrePullTemplate.labelSelector; use labels below node-restriction.kubernetes.io/"
    );
    assert_eq!(by_label("site", None), "", "there is nothing to get");
    assert_eq!(by_label("node-restriction.kubernetes.io/site", Some("s/t")), "");
    let registry = json!([{"registry": "r.io", "imageSecret": "s/t"}]);
    let template = json!({"labelSelector": labels("site"), "registrySecrets": registry});
    assert!(message(template, json!([])).contains("site in spec.imagePrePullTemplate"));
    // An overrider may choose the secret, and be the only one that names one.
    let rule = json!({"component": "SecretName", "operator": "add", "value": "s/t"});
    let group = |label: &str| json!([{"imagePrePullOverrider": {"nodeLabel": label, "overriders": {"secretOverriders": [rule]}}}]);
    let names = json!({"nodeNames": ["a"]});
    assert!(message(names.clone(), group("site")).contains("site in spec.imagePrePullOverriders[0];"));
    assert_eq!(message(names, group("node-restriction.kubernetes.io/site")), "");
}

/// A node that is asked whether it needs the secret, which is withheld.
fn asked() -> World {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    (world.withheld, world.asks) = (true, 9);
    world.give(on(&["a"]));
    assert_eq!((world.dispatched.len(), world.phase_of("a")), (1, NodePhase::InProgress));
    world
}

fn lacks_keys() -> EdgeMessage {
    let image =
        ImageResult { code: Some(FailureCode::SecretUnusable), ..ImageResult::new(ImageOutcome::Failed) };
    EdgeMessage::Result(TaskResult { images: vec![image], ..result(TaskOutcome::Failed) })
}

#[test]
fn what_is_there_needs_no_secret() {
    let mut world = asked();
    world.ends("a", TaskOutcome::Succeeded);
    world.pass(60_000);
    assert_eq!((world.dispatched.len(), world.status().phase), (1, JobPhase::Completed));
    assert_eq!(world.record("a").attempt, 1);
}

#[test]
fn what_is_missing_waits_for_its_secret() {
    for leader_changes in [false, true] {
        let mut world = asked();
        if leader_changes {
            let stored = world.stored.clone();
            world.restart(&["a".to_owned()]);
            world.up("a", &[(UID, 1, OpenPhase::Running)]);
            let Input::Job(Ok(job)) = on(&["a"]) else { panic!() };
            let job = Box::new(ImagePrePullJob { status: stored, ..*job });
            world.give(Input::Job(Ok(job)));
        }
        world.says("a", lacks_keys());
        (0..3).for_each(|_| world.pass(1_000));
        assert_eq!((world.phase_of("a"), world.record("a").attempt), (NodePhase::Pending, 2));
        assert_eq!((world.record("a").reason.as_str(), world.acks()), ("s/t is not allowed", 1));
        assert!(!world.events.contains(&"NodeFailed"), "{:?}", world.events);
        world.withheld = false;
        world.give(allowed(UID, "s/t"));
        (0..3).for_each(|_| world.pass(1_000));
        assert_eq!(world.phase_of("a"), NodePhase::InProgress);
    }
}

#[test]
fn withheld_keys_hide_no_other_failure() {
    let mut world = asked();
    world.ends("a", TaskOutcome::Failed);
    world.pass(1_000);
    assert_eq!(world.phase_of("a"), NodePhase::Failure);
}
