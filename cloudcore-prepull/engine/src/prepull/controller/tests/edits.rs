//! Edits of a job that has begun: those that it follows, those that it refuses, and what another leader makes of them.

use super::course::fleet;
use super::*;

/// What the released version would have stored: the spec only where it had become another one, and only its fixed part.
fn as_released(status: &ImagePrePullJobStatus) -> ImagePrePullJobStatus {
    ImagePrePullJobStatus { started_spec: String::new(), ..status.clone() }
}

fn unfinished(nodes: &[String]) -> Vec<(&str, u32, OpenPhase)> {
    nodes.iter().map(|_| (UID, 1, OpenPhase::Running)).collect()
}

#[test]
fn a_bad_edit_keeps_the_accepted_value() {
    let bad: [(&str, serde_json::Value, serde_json::Value); 3] = [
        ("failureTolerate", json!({"failureTolerate": "20%"}), json!({})),
        ("activeDeadlineSeconds", json!({}), json!({"activeDeadlineSeconds": 0})),
        ("retry", json!({}), json!({"retry": -1})),
    ];
    for (field, wrong, beside) in bad {
        let (mut world, nodes) = fleet(3);
        let good =
            json!({"nodeNames": nodes, "concurrency": 2, "timeoutSeconds": 3600, "failureTolerate": "0.4"});
        world.give(job(good.clone(), 1, None));
        world.pass(1_000);
        assert_eq!(world.taken(), ["n0", "n1"]);
        let mut edited = good.clone();
        edited.as_object_mut().unwrap().extend(wrong.as_object().unwrap().clone());
        for is_seen in [true, false] {
            let stored = world.status().clone();
            if is_seen {
                world.give(with_spec(edited.clone(), beside.clone(), 2, None));
                world.pass(1_000);
            }
            let stored = if is_seen { world.status().clone() } else { stored };
            world.restart(&nodes);
            world.give(with_spec(edited.clone(), beside.clone(), 2, Some(&stored)));
            for node in &nodes {
                let open = unfinished(&nodes[..usize::from(node != "n2")]);
                world.up(node, &open);
            }
            world.pass(400_000);
            assert_eq!((world.taken(), world.cancels().len()), (vec![], 0), "{field}");
            assert_eq!(
                (world.status().phase, world.phase_of("n0")),
                (JobPhase::InProgress, NodePhase::InProgress)
            );
            let valid = world.status().conditions.iter().find(|c| c.type_ == "Valid").unwrap();
            assert!(valid.status == "False" && valid.message.contains(field), "{valid:?}");
            // One of three may fail by what was accepted.
            if !is_seen {
                world.ends("n0", TaskOutcome::Failed);
                world.pass(1_000);
                assert_eq!(world.taken(), ["n2"], "{field}");
            }
        }
        let corrected =
            json!({"nodeNames": nodes, "concurrency": 2, "timeoutSeconds": 7200, "failureTolerate": "0.4"});
        world.give(job(corrected, 3, None));
        world.pass(3_300_000);
        assert_eq!((world.condition("Valid").0, world.phase_of("n1")), ("True", NodePhase::InProgress));
        world.all_end(&nodes[1..], TaskOutcome::Succeeded);
        assert_eq!(world.status().phase, JobPhase::Completed, "{field}");
    }
}

#[test]
fn an_unreadable_job_is_deleted_by_ttl() {
    let (mut world, nodes) = fleet(1);
    let template = json!({"nodeNames": nodes});
    world.give(with_spec(template, json!({"ttlSecondsAfterFinished": 4_000}), 1, None));
    world.all_end(&nodes, TaskOutcome::Succeeded);
    world.pass(3_600_000);
    assert_eq!((world.controller.parked.len(), world.deleted), (1, 0));
    let broken = unreadable(UID, 2, Some(&world.status().clone()), "spec.retry: 1e20 is no integer");
    world.give(Input::Job(Err(broken)));
    world.pass(500_000);
    assert_eq!(world.deleted_generation, Some(2), "the generation that the API server has");
}

#[test]
fn an_unreadable_job_survives_failover() {
    let (mut world, nodes) = fleet(2);
    let good = json!({"nodeNames": nodes, "concurrency": 1, "timeoutSeconds": 3600});
    world.give(job(good.clone(), 1, None));
    world.pass(1_000);
    assert_eq!(world.taken(), ["n0"]);
    let stored = world.status().clone();
    world.pass(500_000);
    world.restart(&nodes);
    let broken = unreadable(UID, 2, Some(&stored), "spec.retry: 1e20 is no integer");
    world.give(Input::Job(Err(broken.clone())));
    world.up("n0", &[(UID, 1, OpenPhase::Running)]);
    world.up("n1", &[]);
    world.pass(1_000);
    assert_eq!(
        (world.status().start_time.clone(), world.status().phase),
        (stored.start_time, JobPhase::InProgress)
    );
    assert_eq!((world.condition("Valid").0, world.status().summary.in_progress), ("False", 1));
    assert_eq!((world.taken(), world.record("n0").attempt), (vec![], 1));
    world.ends("n0", TaskOutcome::Succeeded);
    world.pass(1_000);
    assert_eq!(world.taken(), ["n1"]);
    world.ends("n1", TaskOutcome::Succeeded);
    world.pass(1_000);
    let ended = world.status().clone();
    assert_eq!((ended.phase, ended.summary.successful), (JobPhase::Completed, 2));
    // It is over for the next leader too, soon and long after.
    for later in [1_000, 3_600_000] {
        world.restart(&nodes);
        world.pass(later);
        let broken = UnreadableJob { error: broken.error.clone(), ..unreadable(UID, 3, Some(&ended), "") };
        world.give(Input::Job(Err(broken)));
        world.pass(1_000);
        assert_eq!(
            (world.status().phase, &world.status().completion_time),
            (JobPhase::Completed, &ended.completion_time)
        );
        assert_eq!(world.taken(), Vec::<String>::new());
    }
    world.give(job(good, 4, None));
    world.pass(1_000);
    assert_eq!((world.status().phase, world.condition("Valid").0), (JobPhase::Completed, "True"));
}

#[test]
fn without_an_accepted_spec_nothing_happens() {
    let (mut world, nodes) = fleet(3);
    let good = json!({"nodeNames": nodes, "concurrency": 2, "timeoutSeconds": 600, "failureTolerate": "0.4"});
    world.give(job(good.clone(), 1, None));
    world.pass(1_000);
    world.taken();
    let stored = as_released(world.status());
    let mut bad = good.clone();
    bad["failureTolerate"] = json!("20%");
    let Input::Job(invalid) = job(bad, 2, Some(&stored)) else { panic!() };
    let unreadable = Err(unreadable(UID, 2, Some(&stored), "spec.retry: 1e20 is no integer"));
    let reports = world.reports.clone();
    for object in [invalid, unreadable] {
        world.reports.clone_from(&reports);
        world.restart(&nodes);
        world.give(Input::Job(object));
        world.up("n0", &[(UID, 1, OpenPhase::NeedsKeys)]);
        world.up("n1", &[(UID, 1, OpenPhase::Running)]);
        world.up("n2", &[]);
        for _ in 0..4 {
            world.pass(1_000_000);
        }
        assert!(world.controller.next_wakeup().is_none_or(|next| next > world.now));
        let start = world.record("n0").start_time.clone();
        assert_eq!(
            (world.taken(), world.cancels().len(), world.status().summary.in_progress),
            (vec![], 0, 2)
        );
        assert_eq!((world.condition("Valid").0, world.status().phase), ("False", JobPhase::InProgress));
        assert_eq!(start.unwrap().0, stored.start_time.as_ref().unwrap().0);
        // What ends is recorded, and the job goes on once the value is corrected.
        world.ends("n1", TaskOutcome::Failed);
        world.pass(1_000);
        assert_eq!((world.status().summary.failure, world.acks(), world.taken().len()), (1, 1, 0));
        let longer = json!({"nodeNames": nodes, "concurrency": 2, "timeoutSeconds": 9_000_000, "failureTolerate": "0.4"});
        world.give(job(longer, 3, None));
        world.pass(1_000);
        assert_eq!(world.taken(), ["n0", "n2"]);
        assert_eq!(world.condition("Valid").0, "True");
        world.ends("n0", TaskOutcome::Succeeded);
        world.ends("n2", TaskOutcome::Succeeded);
        world.pass(1_000);
        assert_eq!((world.status().phase, world.status().summary.failure), (JobPhase::Completed, 1));
        world.sent.clear();
    }
}

#[test]
fn an_unseen_change_is_refused_after_failover() {
    let (mut world, nodes) = fleet(2);
    let of =
        |image: &str, concurrency| json!({"nodeNames": nodes, "concurrency": concurrency, "images": [image]});
    world.give(job(of("nginx:1.25", 1), 1, None));
    world.pass(1_000);
    let stored = world.status().clone();
    world.restart(&nodes);
    // What may change takes effect at once, also where something beside it may not.
    world.give(job(of("redis:7", 2), 2, Some(&stored)));
    world.up("n0", &[(UID, 1, OpenPhase::Running)]);
    world.up("n1", &[]);
    world.pass(1_000);
    assert_eq!((world.taken(), world.condition("Valid").0), (vec!["n1".to_owned()], "False"));
    assert_eq!(world.images, ["nginx:1.25", "nginx:1.25"]);
    world.give(job(of("nginx:1.25", 2), 3, None));
    world.pass(1_000);
    assert_eq!(world.condition("Valid").0, "True");
}

#[test]
fn refused_names_stay_refused_after_failover() {
    let mut world = World::new(&["a", "b", "c"]);
    world.hear(FleetEvent::Node(NodeView { ready: false, ..edge("late") }));
    let of = |names: &[&str]| json!({"nodeNames": names, "concurrency": 5});
    let follow = json!({"followNodes": true});
    world.give(with_spec(of(&["a", "late"]), follow.clone(), 1, None));
    world.pass(1_000);
    for (names, first) in [(&["a", "late", "b"], true), (&["c", "b", "a"], false)] {
        if first {
            world.give(with_spec(of(names), follow.clone(), 2, None));
            world.pass(1_000);
        }
        let stored = world.status().clone();
        world.boot(&["a", "b", "c"]);
        world.give(with_spec(of(names), follow.clone(), if first { 2 } else { 3 }, Some(&stored)));
        world.pass(1_000);
        assert_eq!((world.status().summary.desired, world.condition("Valid").0), (1, "False"));
    }
    // One that was skipped at the start may.
    world.hear(FleetEvent::Node(edge("late")));
    world.pass(1_000);
    assert_eq!(world.status().summary.desired, 2);
    world.give(with_spec(of(&["a", "late"]), follow, 4, None));
    world.pass(1_000);
    assert_eq!((world.status().summary.desired, world.condition("Valid").0), (2, "True"));
}

#[test]
fn the_stored_spec_omits_node_names() {
    let (mut world, nodes) = fleet(2_000);
    world.give(job(json!({"nodeNames": nodes, "concurrency": 1}), 1, None));
    world.pass(1_000);
    assert!(world.status().started_spec.len() < 500, "{}", world.status().started_spec);
    // A spec that is too long is compared by its hash, as in earlier versions.
    let (mut world, nodes) = fleet(2);
    let labels: Vec<_> = (0..20_000).map(|n| format!("value-{n:020}")).collect();
    let of = |image: &str| {
        let select = json!({"matchExpressions": [{"key": "k", "operator": "NotIn", "values": labels}]});
        json!({"labelSelector": select, "concurrency": 1, "images": [image]})
    };
    world.give(job(of("nginx:1.25"), 1, None));
    world.pass(1_000);
    let stored = world.status().clone();
    assert_eq!((stored.started_spec.len(), world.taken().len()), (0, 1));
    for (image, generation, goes_on) in [("nginx:1.25", 1, true), ("redis:7", 2, false)] {
        world.restart(&nodes);
        world.give(job(of(image), generation, Some(&stored)));
        world.up("n0", &[(UID, 1, OpenPhase::NeedsKeys)]);
        world.pass(1_000);
        assert_eq!(world.taken().len(), usize::from(goes_on));
    }
}

/// A job with images that need a secret of this name.
fn with_secret(retry: u32, secret: &str, image: &str) -> (serde_json::Value, serde_json::Value) {
    let overrider = json!({"imagePrePullOverrider": {"nodeLabel": "gpu", "overriders":
        {"secretOverriders": [{"component": "SecretName", "operator": "replace", "value": secret}]}}});
    let template = json!({"nodeNames": ["a", "b"], "failureTolerate": "0.5", "images": [image],
        "imageSecrets": format!("default/{secret}")});
    (template, json!({"retry": retry, "imagePrePullOverriders": [overrider]}))
}

#[test]
fn a_further_round_uses_a_corrected_secret() {
    let mut world = World::new(&["a", "b"]);
    for node in ["a", "b"] {
        world.up(node, &[]);
    }
    let (template, spec) = with_secret(0, "wrong", "nginx:1.25");
    world.give(with_spec(template, spec, 1, None));
    world.pass(1000);
    // Also a node that starts after the edit uses it.
    let (template, spec) = with_secret(0, "better", "nginx:1.25");
    world.give(with_spec(template, spec, 2, None));
    world.pass(1000);
    assert_eq!(world.condition("Valid").0, "True");
    world.ends("a", TaskOutcome::Failed);
    world.ends("b", TaskOutcome::Succeeded);
    world.pass(1000);
    assert_eq!(world.status().phase, JobPhase::Completed);
    assert_eq!(world.used_secrets, ["default/wrong", "default/better"]);
    let (template, spec) = with_secret(1, "right", "nginx:1.25");
    let stored = world.status().clone();
    world.restart(&["a".to_owned(), "b".to_owned()]);
    for node in ["a", "b"] {
        world.up(node, &[]);
    }
    world.give(with_spec(template, spec, 3, Some(&stored)));
    world.pass(1000);
    assert_eq!((world.condition("Valid").0, world.status().retry), ("True", 1));
    assert_eq!(world.taken(), ["a"]);
    assert_eq!(world.used_secrets.last().map(String::as_str), Some("default/right"));
}

#[test]
fn a_jobs_exclusions_wait_for_its_next_run() {
    let remove = json!({"nodeNames": ["a"], "images": [], "remove": {"images": ["old:1"]}});
    let pull = json!({"nodeNames": ["a"], "images": ["new:1"]});
    let upgrade = json!({"nodeNames": ["a"], "images": ["agent:1"], "upgrade": {}});
    for (begun, template, edit, refusal) in [
        (&remove, &pull, json!({"pin": true, "suspend": true}), "what is pulled"),
        (&remove, &pull, json!({"download": {"maxRate": "1Mi"}, "suspend": true}), "what is pulled"),
        (&remove, &pull, json!({"recheck": 1, "suspend": true}), "what is pulled"),
        (&remove, &remove, json!({"pin": true, "suspend": true}), "spec.pin: is about pulling"),
        (&upgrade, &pull, json!({"recheck": 1, "suspend": true}), "what is pulled"),
        (
            &upgrade,
            &upgrade,
            json!({"recheck": 1, "suspend": true}),
            "spec.recheck: has no effect on an upgrade",
        ),
    ] {
        let mut world = World::new(&["a"]);
        world.give(with_spec(begun.clone(), json!({}), 1, None));
        world.pass(1000);
        world.give(with_spec(template.clone(), edit.clone(), 2, None));
        world.pass(1000);
        let reason = &world.status().reason;
        assert!(reason.contains(&format!("edit refused: {refusal}")), "{edit}: {reason}");
        assert_eq!(world.condition("Suspended").0, "True", "{edit}");
    }
}

#[test]
fn a_refused_edit_stays_reported_until_undone() {
    let mut world = World::new(&["a", "b"]);
    world.up("a", &[]);
    let (template, spec) = with_secret(0, "s", "nginx:1.25");
    world.give(with_spec(template.clone(), spec.clone(), 1, None));
    world.ends("a", TaskOutcome::Failed);
    world.pass(1000);
    let own = world.status().reason.clone();
    assert!(!own.is_empty() && !own.contains("edit refused"), "{own}");
    let (edited, _) = with_secret(0, "s", "redis:7");
    world.give(with_spec(edited.clone(), spec.clone(), 2, None));
    world.pass(1000);
    let refused = world.status().reason.clone();
    assert!(refused.starts_with(&format!("{own}; edit refused: what is pulled")), "{refused}");
    let stored = world.status().clone();
    world.restart(&["a".to_owned(), "b".to_owned()]);
    world.give(with_spec(edited, spec.clone(), 2, Some(&stored)));
    world.up("a", &[]);
    world.pass(5000);
    assert_eq!(world.status().reason.matches("edit refused").count(), 1, "{}", world.status().reason);
    world.give(with_spec(template, spec, 3, None));
    world.pass(1000);
    assert!(!world.status().reason.contains("edit refused"), "{}", world.status().reason);
}
