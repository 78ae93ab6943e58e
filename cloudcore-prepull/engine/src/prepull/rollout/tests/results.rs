//! The images and the result in the record of a node.

use prepull_api::crd::status::Action;
use prepull_api::task::{ImageRemoval, MAX_REMOVALS, RemovalResult};

use super::*;

/// The record of a node with this result.
fn recorded(result: &TaskResult) -> NodeStatus {
    let mut rollout = rollout(1, 1, "0");
    all_online(&mut rollout, 1);
    rollout.advance(at(0));
    assert!(rollout.record_result(&node(0), None, result, at(1)));
    rollout.record(&node(0)).unwrap().clone()
}

#[test]
fn a_starting_nodes_record_names_its_images() {
    let (mut rollout, mut plan) = (rollout(1, 1, "0"), NodePlan::clone(&plan()));
    plan.images[0].name = Some("web".to_owned());
    rollout.name_images(&node(0), &plan);
    let image = &rollout.record(&node(0)).unwrap().image_status[0];
    let names = [&image.image, image.name.as_ref().unwrap(), &image.pulled_image];
    assert_eq!(names, ["app", "web", "registry.example/app:v1"]);
}

#[test]
fn a_removals_images_are_bounded_and_counted() {
    let images = vec![ImageRemoval::default(); 2 * MAX_REMOVALS];
    let removal = RemovalResult { removed: 100, freed_bytes: u64::MAX, images, ..RemovalResult::default() };
    let record = recorded(&TaskResult { removal: Some(removal), ..result(TaskOutcome::Succeeded) });
    let removal = record.removal.unwrap();
    assert_eq!((removal.removed, removal.freed_bytes), (100, i64::MAX.unsigned_abs()));
    assert_eq!((removal.images.len(), record.action_flow[1].action), (MAX_REMOVALS, Action::Remove));
}

#[test]
fn an_end_of_a_newer_edge_asks_for_an_update() {
    for (reason, expected) in [("because", "because"), ("", "update cloudcore-prepull")] {
        let result = TaskResult { reason: reason.to_owned(), ..result(TaskOutcome::Other) };
        assert!(recorded(&result).reason.ends_with(expected));
    }
}
