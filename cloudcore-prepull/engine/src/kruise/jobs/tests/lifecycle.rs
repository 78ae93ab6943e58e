//! The beginning and the end of a job, and what is kept of it after that.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use prepull_api::crd::kruise::ImagePullJobSpec;
use serde_json::json;

use super::super::status::cut_note;
use super::super::*;
use super::driver::{Driver, owner, uid};
use crate::shared::objects::ObjectId;
use crate::shared::outcomes::WriteOutcome;

#[test]
fn a_deletion_follows_the_final_status() {
    let mut d = Driver::with(&["a"]);
    d.job("job", json!({"image": "nginx:1", "completionPolicy": {"ttlSecondsAfterFinished": 0}}));
    d.set_state_of("job", "a", ("nginx", "1"), TagState::Succeeded(d.now));
    let writes = |actions: Vec<Action>| {
        let write = |action| if let Action::Write(write) = action { Some(write) } else { None };
        actions.into_iter().filter_map(write).collect::<Vec<_>>()
    };
    let status = writes(d.jobs.flush(d.now)).remove(0);
    let target = status.target();
    // The watch is faster than the answer.
    d.apply(status);
    assert_eq!(writes(d.jobs.flush(d.now)), [], "there is one write of an object at a time");
    d.input(Input::Written { target, outcome: WriteOutcome::Done });
    d.settle();
    assert!(!d.api.contains_key("job"));
}

#[test]
fn a_list_ends_once_though_its_write_fails() {
    let mut d = Driver::with(&["a"]);
    d.list("list", json!({"images": ["nginx:1"]}));
    d.pass(2);
    d.log.clear();
    d.outcomes = vec![WriteOutcome::Done, WriteOutcome::Failed];
    let child = d.api.keys().next().cloned().unwrap();
    d.succeeds(&child, &["a"]);
    assert!(d.has_finished(&child) && d.list_status("list").completion_time.is_none());
    d.pass(2);
    assert!(d.list_status("list").completion_time.is_some());
    assert_eq!(d.take_events().len(), 2, "of the child, and of the list");
}

#[test]
fn an_edit_voids_an_unwritten_end() {
    let mut d = Driver::with(&["a"]);
    d.job("job", json!({"image": "nginx:1"}));
    d.set_state_of("job", "a", ("nginx", "1"), TagState::Succeeded(d.now));
    let written = |d: &mut Driver| {
        let write = |action| if let Action::Write(write) = action { Some(write) } else { None };
        d.jobs.flush(d.now).into_iter().find_map(write).unwrap()
    };
    let end = written(&mut d);
    d.log.clear();
    assert!(matches!(&end, JobWrite::PullJobStatus(_, 1, status) if status.completion_time.is_some()));
    d.node("b", &[]);
    d.online("b", true);
    d.job("job", json!({"image": "nginx:2", "parallelism": 2}));
    let target = end.target();
    let outcome = d.apply(end);
    assert_eq!(outcome, WriteOutcome::Failed);
    d.input(Input::Written { target, outcome });
    assert_eq!(d.take_asked(), ["a*", "b*"]);
    assert_eq!(d.numbers("job"), [2, 2, 0, 0]);
    d.succeeds("job", &["a", "b"]);
    assert_eq!((d.has_finished("job"), d.numbers("job")), (true, [2, 0, 2, 0]));
}

#[test]
fn a_list_that_is_edited_goes_on() {
    let mut d = Driver::with(&["a"]);
    d.list("list", json!({"images": ["nginx:1"]}));
    d.outcomes = vec![WriteOutcome::Done, WriteOutcome::Failed];
    let child = d.api.keys().next().cloned().unwrap();
    d.succeeds(&child, &["a"]);
    assert!(d.has_finished(&child) && d.list_status("list").completion_time.is_none());
    d.list("list", json!({"images": ["nginx:1", "nginx:2"]}));
    d.pass(2);
    let status = d.list_status("list");
    assert_eq!((status.completion_time, status.desired, status.completed), (None, 2, 1));
}

#[test]
fn a_refused_job_does_not_end() {
    let mut d = Driver::with(&["a"]);
    d.job("job", json!({"image": "nginx:1"}));
    d.job("job", json!({"image": ""}));
    d.set_state_of("job", "a", ("nginx", "1"), TagState::Succeeded(d.now));
    d.pass(2);
    assert!(!d.has_finished("job"));
    d.job("job", json!({"image": "nginx:1"}));
    assert!(d.has_finished("job"));
}

#[test]
fn a_deleted_job_is_known_until_its_last_event() {
    for last in [Input::PullJobGone(uid("job")), Input::PullJobs(Vec::new())] {
        let mut d = Driver::with(&["a"]);
        d.outcomes = vec![WriteOutcome::Gone];
        for _ in 0..2 {
            d.job("job", json!({"image": "nginx:1"}));
            d.set_state("job", "a", TagState::Pending);
            assert_eq!(d.jobs.liveness(&uid("job")), Liveness::Deleted);
        }
        assert!(d.jobs.early_states.is_empty() && d.jobs.registry.is_deleted(&uid("job")));
        d.input(last);
        assert!(!d.jobs.registry.is_deleted(&uid("job")));
    }
}

#[test]
fn the_oldest_job_comes_first() {
    let mut d = Driver::new();
    for (name, age) in [("young", 1), ("old", 2)] {
        let created = d.now.checked_sub(Duration::from_secs(age)).ok().map(Time);
        let spec = ImagePullJobSpec { image: "nginx".to_owned(), ..ImagePullJobSpec::default() };
        let metadata = ObjectMeta { creation_timestamp: created, ..Driver::metadata(name) };
        d.input(Input::PullJob(Ok(Box::new(ImagePullJob { metadata, spec, status: None }))));
    }
    let actions = d.jobs.flush(d.now);
    let ended = |action: &Action| match action {
        Action::Event(event) => Some(event.object.name.clone()),
        _ => None,
    };
    assert_eq!(actions.iter().filter_map(ended).collect::<Vec<_>>(), ["old", "young"]);
}

#[test]
fn only_a_controlling_list_has_children() {
    let mut job = ImagePullJob::new("job", ImagePullJobSpec::default());
    job.metadata.namespace = Some("team".to_owned());
    let id = ObjectId { namespace: "team".to_owned(), name: "list".to_owned(), uid: uid("list") };
    let list = owner(&id);
    for (owner, expected) in [
        (list.clone(), Some(id)),
        (OwnerReference { controller: None, ..list.clone() }, None),
        (OwnerReference { kind: "CloneSet".to_owned(), ..list.clone() }, None),
        (OwnerReference { api_version: "example.io/v1".to_owned(), ..list }, None),
    ] {
        job.metadata.owner_references = Some(vec![owner.clone()]);
        assert_eq!(metadata::list_of(&job), expected, "{owner:?}");
    }
}

#[test]
fn texts_are_cut_only_where_too_long() {
    let whole = "x".repeat(1024);
    assert_eq!(cut_note(whole.clone()), whole);
    let names = ["n1", "n2", "n3", "n4", "n5"];
    let mut d = Driver::new();
    for node in names {
        d.node(node, &[]);
    }
    d.job("job", json!({"image": "nginx", "pullPolicy": {"timeoutSeconds": 1, "backoffLimit": 0}}));
    d.pass(61);
    let events = d.take_events();
    assert!(events[0].ends_with(&format!(": {}", names.join(", "))), "{events:?}");
}
