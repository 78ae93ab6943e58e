//! Further rounds: who asks for one, what it may cost, and what is left over at the end.

use super::course::{fleet, template};
use super::*;

#[test]
fn a_retry_that_is_left_over_at_the_end_starts_nothing_before_somebody_raises_it() {
    let (mut world, nodes) = fleet(2);
    let one_by_one = json!({"nodeNames": nodes, "concurrency": 1});
    let spec =
        |retry, ttl| json!({"retry": retry, "activeDeadlineSeconds": 60, "ttlSecondsAfterFinished": ttl});
    world.give(with_spec(one_by_one.clone(), spec(1, 900_000), 1, None));
    world.pass(61_000);
    world.pass(1_000);
    assert_eq!((world.taken().len(), world.condition("Failed").1), (1, "DeadlineExceeded"));
    let ended = world.status().clone();
    let is_over = |world: &mut World| {
        for node in &nodes {
            world.up(node, &[]);
        }
        world.pass(2_000);
        assert_eq!((world.taken(), world.status().retry), (vec![], 0));
        assert_eq!(world.status().completion_time, ended.completion_time);
    };
    // Another leader; an edit of something else; both, also long after the end.
    world.restart(&nodes);
    world.give(with_spec(one_by_one.clone(), spec(1, 900_000), 1, Some(&ended)));
    is_over(&mut world);
    world.give(with_spec(one_by_one.clone(), spec(1, 800_000), 2, None));
    is_over(&mut world);
    for (generation, seen) in [(2, true), (3, false), (4, false)] {
        world.pass(if generation == 4 { 3_600_000 } else { 0 });
        let stored = world.status().clone();
        assert_eq!(stored.observed_generation == Some(generation), seen);
        world.restart(&nodes);
        let ttl = 800_000 - generation;
        world.give(with_spec(one_by_one.clone(), spec(1, ttl), generation, Some(&stored)));
        is_over(&mut world);
    }
    world.give(with_spec(one_by_one, spec(2, 800_000), 5, None));
    world.pass(1_000);
    assert_eq!((world.taken(), world.status().retry), (vec!["n0".to_owned()], 1));
}

#[test]
fn nodes_that_become_eligible_after_the_end_do_not_use_up_what_is_left_of_retry() {
    let select = json!({"labelSelector": {"matchLabels": {"pool": "a"}}, "concurrency": 10});
    let spec = |retry| json!({"retry": retry, "followNodes": true});
    let pool = |name: &str| {
        let mut node = edge(name);
        node.labels.insert("pool".to_owned(), "a".to_owned());
        node
    };
    let mut world = World::new(&[]);
    world.give(Input::Node(pool("first")));
    world.up("first", &[]);
    world.give(with_spec(select.clone(), spec(1), 1, None));
    world.ends("first", TaskOutcome::Succeeded);
    world.pass(1_000);
    assert_eq!((world.status().phase, world.taken().len()), (JobPhase::Completed, 1));
    let ended = world.status().clone();
    world.restart(&[]);
    world.give(Input::Node(pool("first")));
    world.give(Input::Node(pool("new")));
    world.give(with_spec(select.clone(), spec(1), 1, Some(&ended)));
    world.up("new", &[]);
    world.pass(2_000);
    assert_eq!((world.taken(), world.status()), (vec![], &ended));
    // A further round takes them up, whoever leads.
    world.give(with_spec(select, spec(2), 2, None));
    world.pass(1_000);
    assert_eq!((world.taken(), world.status().summary.desired), (vec!["new".to_owned()], 2));
}

#[test]
fn a_finished_job_is_parked_although_something_is_left_of_retry() {
    let (mut world, nodes) = fleet(1);
    world.give(with_spec(template(&nodes), json!({"retry": 3}), 1, None));
    world.all_end(&nodes, TaskOutcome::Succeeded);
    world.pass(3_600_000);
    let stored = world.status().clone();
    world.restart(&nodes);
    world.give(with_spec(template(&nodes), json!({"retry": 3}), 1, Some(&stored)));
    assert_eq!((world.controller.jobs.len(), world.controller.parked.len()), (0, 1));
}
