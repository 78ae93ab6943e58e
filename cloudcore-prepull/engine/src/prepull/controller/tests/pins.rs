//! Pins: edges get a message when a job gives up its pins.

use serde_json::Value;

use super::*;

fn job_with(beside: Value, generation: i64, status: Option<&ImagePrePullJobStatus>) -> Input {
    with_spec(json!({"nodeNames": ["a"]}), beside, generation, status)
}

fn pinned() -> Value {
    json!({"pin": true})
}

impl World {
    /// A session of an edge that has pinned images for these jobs.
    fn up_with_pins(&mut self, node: &str, pins: &[&str]) {
        let pins = pins.iter().map(|uid| JobUid((*uid).to_owned())).collect();
        self.up_with(node, &[], Hello { pins: Some(pins), ..Hello::default() });
    }

    /// The unpin messages to each node since the last call.
    fn unpinned(&mut self) -> Vec<String> {
        let unpinned = |(node, message): (NodeName, CloudMessage)| match message {
            CloudMessage::Unpin { jobs } => {
                Some(jobs.iter().map(|job| format!("{node}: {job}")).collect::<Vec<_>>())
            }
            _ => None,
        };
        std::mem::take(&mut self.sent).into_iter().filter_map(unpinned).flatten().collect()
    }

    fn complete(&mut self) {
        self.ends("a", TaskOutcome::Succeeded);
        self.pass(1_000);
        assert_eq!(self.status().phase, JobPhase::Completed);
    }
}

#[test]
fn each_session_begins_by_unpinning() {
    let mut world = World::new(&["a", "b"]);
    world.give(job_with(pinned(), 1, None));
    world.up_with_pins("a", &[UID, "gone"]);
    assert_eq!(world.unpinned(), ["a: gone"]);
    world.up_with_pins("b", &[]);
    world.up("b", &[]);
    assert!(world.unpinned().is_empty());
    world.complete();
    world.up_with_pins("a", &[UID]);
    assert!(world.unpinned().is_empty(), "the job is over, and exists");
}

#[test]
fn deleting_or_editing_a_job_unpins() {
    let mut world = World::new(&["a", "b", "c", "d"]);
    world.give(job_with(pinned(), 1, None));
    for node in ["a", "b"] {
        world.up_with_pins(node, &[UID]);
    }
    world.up_with_pins("c", &[]);
    world.up("d", &[]);
    assert!(world.unpinned().is_empty());
    // Only what was pinned before.
    world.give(job_with(json!({"pin": true, "suspend": true}), 2, None));
    assert!(world.unpinned().is_empty());
    world.give(job_with(json!({"pin": false}), 3, None));
    assert_eq!(world.unpinned(), ["a: uid-1", "b: uid-1"]);
    world.give(job_with(pinned(), 4, None));
    world.hear(FleetEvent::Session(SessionEvent::Down { node: "b".into(), session: SessionId(2) }));
    world.give(Input::JobGone(JobUid(UID.to_owned())));
    assert_eq!(world.unpinned(), ["a: uid-1"]);
    // Jobs without pins are none of their business.
    world.give(job_with(json!({}), 1, None));
    world.give(Input::JobGone(JobUid(UID.to_owned())));
    assert!(world.unpinned().is_empty());
}

#[test]
fn a_parked_job_keeps_its_pins() {
    for under_a_new_leader in [false, true] {
        let mut world = World::new(&["a"]);
        world.up_with_pins("a", &[]);
        world.give(job_with(pinned(), 1, None));
        world.complete();
        let ended = world.status().clone();
        if under_a_new_leader {
            world.restart(&["a".to_owned()]);
        }
        world.pass(2 * 3_600_000);
        if under_a_new_leader {
            world.give(job_with(pinned(), 1, Some(&ended)));
        }
        world.up_with_pins("a", &[UID, "gone"]);
        assert_eq!(world.unpinned(), ["a: gone"], "{under_a_new_leader}");

        let Input::Job(edited) = job_with(json!({}), 2, Some(&ended)) else { panic!() };
        world.object = Some(edited.clone());
        world.give(Input::Job(edited));
        assert_eq!(world.unpinned(), ["a: uid-1"], "{under_a_new_leader}");
    }
    let mut world = World::new(&["a"]);
    world.up_with_pins("a", &[]);
    world.give(job_with(pinned(), 1, None));
    world.says("a", EdgeMessage::Result(with_pins()));
    world.pass(1_000);
    world.pass(2 * 3_600_000);
    world.give(Input::JobGone(JobUid(UID.to_owned())));
    assert_eq!(world.unpinned(), ["a: uid-1"]);
}

#[test]
fn an_unreadable_jobs_pins_stay() {
    let mut world = World::new(&["a"]);
    world.up_with_pins("a", &[]);
    world.give(job_with(pinned(), 1, None));
    world.complete();
    let mut ended = world.status().clone();
    for started_spec in [ended.started_spec.clone(), String::new()] {
        ended.started_spec = started_spec;
        for later in [1_000, 2 * 3_600_000] {
            world.restart(&["a".to_owned()]);
            world.pass(later);
            world.give(Input::Job(Err(unreadable(UID, 2, Some(&ended), "spec.pin: 7 is no boolean"))));
            world.up_with_pins("a", &[UID]);
            assert!(world.unpinned().is_empty(), "{later} {}", ended.started_spec);
        }
    }
}

#[test]
fn an_unpinned_result_causes_no_unpin() {
    let mut world = World::new(&["a"]);
    world.up_with_pins("a", &[]);
    world.give(job_with(json!({}), 1, None));
    world.complete();
    assert!(world.unpinned().is_empty());
}

/// A result with a pinned image.
fn with_pins() -> TaskResult {
    let mut result = result(TaskOutcome::Succeeded);
    result.images[0].pinned = Some(true);
    result
}

#[test]
fn an_edge_hears_once_of_all_jobs() {
    let mut world = World::new(&["a"]);
    let uids: Vec<String> = (0..1_500).map(|n| format!("job-{n:04}")).collect();
    for uid in &uids {
        let Input::Job(Ok(mut job)) = job_with(pinned(), 1, None) else { panic!() };
        job.metadata.uid = Some(uid.clone());
        world.controller.handle(Input::Job(Ok(job)), world.now);
    }
    world.settle();
    world.up_with_pins("a", &[&uids[7]]);
    world.sent.clear();
    for uid in &uids {
        world.controller.handle(Input::JobGone(JobUid(uid.clone())), world.now);
    }
    world.settle();
    let told = world.sent.iter().filter_map(|(_, message)| match message {
        CloudMessage::Unpin { jobs } => Some(jobs.len()),
        _ => None,
    });
    assert_eq!(told.collect::<Vec<_>>(), [1024, 476]);
}

#[test]
fn all_edges_share_one_list_of_jobs() {
    let mut world = World::new(&["a"]);
    world.controller.handle(job_with(pinned(), 1, None), world.now);
    world.settle();
    for node in ["a", "b", "c"] {
        world.up_with_pins(node, &[UID]);
    }
    world.sent.clear();
    world.controller.handle(Input::JobGone(JobUid(UID.to_owned())), world.now);
    world.settle();
    let lists = world.sent.iter().filter_map(|(_, message)| match message {
        CloudMessage::Unpin { jobs } => Some(jobs),
        _ => None,
    });
    let lists: Vec<_> = lists.collect();
    assert_eq!(lists.len(), 3);
    assert!(lists.iter().all(|list| std::sync::Arc::ptr_eq(list, lists[0])));
}
