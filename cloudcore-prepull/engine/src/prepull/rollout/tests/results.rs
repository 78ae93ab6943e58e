//! The images and the result in the record of a node.

use prepull_api::crd::status::Action;
use prepull_api::task::{ByteProgress, ImageRemoval, KubeletRecord, MAX_REMOVALS, PulledBy, RemovalResult};
use prepull_api::wire::MAX_NOTE;

use super::*;

/// The record of a node with this result.
fn recorded(result: &TaskResult) -> NodeStatus {
    let mut rollout = rollout(1, 1, "0");
    all_online(&mut rollout, 1);
    rollout.advance(at(0));
    assert!(rollout.record_result(&node(0), Some(&plan()), result, at(1)));
    rollout.record(&node(0)).unwrap().clone()
}

/// The record of an image that was pulled, with these changes to its result.
fn recorded_image(change: impl FnOnce(&mut ImageResult)) -> JobImageStatus {
    let mut result = result(TaskOutcome::Succeeded);
    change(&mut result.images[0]);
    recorded(&result).image_status.remove(0)
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

#[test]
fn numbers_beyond_the_apis_range_are_cut() {
    let all = ByteProgress { done: u64::MAX, total: u64::MAX };
    let bytes = recorded_image(|image| image.bytes = Some(all)).bytes.unwrap();
    assert_eq!((bytes.done, bytes.total), (i64::MAX.unsigned_abs(), i64::MAX.unsigned_abs()));
}

#[test]
fn deltas_save_at_most_the_image() {
    let saved = |bytes: Option<u64>, saved| {
        let image = recorded_image(|image| {
            image.bytes = bytes.map(|total| ByteProgress { done: total, total });
            image.facts.delta_saved_bytes = saved;
        });
        image.facts.delta_saved_bytes
    };
    assert_eq!(saved(Some(100), Some(70)), Some(70));
    assert_eq!(saved(Some(100), Some(u64::MAX)), Some(100));
    assert_eq!(saved(Some(u64::MAX), Some(u64::MAX)), Some(i64::MAX.unsigned_abs()));
    assert_eq!((saved(None, Some(7)), saved(Some(100), None)), (Some(0), None));
}

#[test]
fn the_record_keeps_facts_and_cuts_their_notes() {
    let facts = recorded_image(|image| {
        image.facts.pulled_by = Some(PulledBy::Runtime);
        image.facts.pulled_by_reason = "x".repeat(5000);
        image.facts.kubelet_record = Some(KubeletRecord::OtherRepository);
        image.facts.kubelet_record_reason = "x".repeat(5000);
    })
    .facts;
    assert_eq!((facts.pulled_by, facts.pulled_by_reason.len()), (Some(PulledBy::Runtime), MAX_NOTE));
    let expected = (Some(KubeletRecord::OtherRepository), MAX_NOTE);
    assert_eq!((facts.kubelet_record, facts.kubelet_record_reason.len()), expected);
}

#[test]
fn the_record_keeps_a_keys_fingerprint_and_no_other_text() {
    for (claimed, kept) in [("sha256:0123456789ab", Some("sha256:0123456789ab")), ("by the vendor", None)] {
        let image = recorded_image(|image| image.facts.signed_by = Some(claimed.to_owned()));
        assert_eq!(image.facts.signed_by.as_deref(), kept);
    }
}
