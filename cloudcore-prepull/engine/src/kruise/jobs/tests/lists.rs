use std::sync::Arc;

use serde_json::{Value, json};

use super::super::tag_requests::child_name;
use super::super::*;
use super::driver::{Driver, uid};
use crate::kruise::TagState;
use crate::shared::events::ObjectKind;
use crate::shared::objects::Unreadable;
use crate::shared::outcomes::WriteOutcome;

const THREE: &[&str] = &["a", "b", "c"];

/// A list of two images for all nodes, with these fields besides.
fn spec(more: &Value) -> Value {
    let mut spec = json!({"images": ["nginx:1", "redis:2"]});
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    spec
}

fn nginx() -> String {
    child_name("list", "nginx:1")
}

fn redis() -> String {
    child_name("list", "redis:2")
}

/// The nodes that were asked since the last look at the log, each with the image.
fn take_asked(d: &mut Driver) -> Vec<String> {
    let asked = d.log.iter().filter_map(|action| match action {
        Action::RequestTag { node, request, .. } => Some(format!("{node} {}", request.key.image)),
        _ => None,
    });
    let mut asked: Vec<String> = asked.collect();
    asked.sort_unstable();
    d.log.clear();
    asked
}

/// The writes of children since the last look at the log.
fn take_child_writes(d: &mut Driver) -> Vec<String> {
    let writes = d.log.iter().filter_map(|action| match action {
        Action::Write(JobWrite::CreateChild { spec, .. }) => Some(format!("make {}", spec.image)),
        Action::Write(JobWrite::UpdateChild { spec, .. }) => Some(format!("change {}", spec.image)),
        Action::Write(JobWrite::DeleteChild { image, .. }) => Some(format!("delete {image}")),
        _ => None,
    });
    let writes = writes.collect();
    d.log.clear();
    writes
}

#[test]
fn child_names_depend_on_list_and_image() {
    assert_eq!(nginx(), "list-ea996a051a");
    assert_ne!(nginx(), redis());
    let long = child_name(&format!("{}.{}", "a".repeat(241), "b".repeat(11)), "nginx");
    assert!(long.len() < 253 && long.starts_with(&format!("{}-", "a".repeat(241))), "{long}");
    assert_eq!(child_name(&"a".repeat(253), "nginx").len(), 253);
}

#[test]
fn writes_of_children_share_the_template() {
    let mut d = Driver::with(THREE);
    d.list("list", spec(&json!({"selector": {"names": ["a"]}})));
    let template = |action: &Action| match action {
        Action::Write(JobWrite::CreateChild { spec, .. }) => Some(spec.template.clone()),
        _ => None,
    };
    let templates: Vec<_> = d.log.iter().filter_map(template).collect();
    assert!(templates.len() == 2 && Arc::ptr_eq(&templates[0], &templates[1]), "{templates:?}");
}

#[test]
fn a_list_ends_with_its_children() {
    let mut d = Driver::with(THREE);
    d.list(
        "list",
        spec(&json!({
            "parallelism": 5, "pullSecrets": ["s"],
            "completionPolicy": {"type": "Always", "activeDeadlineSeconds": 1000, "ttlSecondsAfterFinished": 60},
        })),
    );
    let child = &d.api[&nginx()];
    assert_eq!(child.spec.image, "nginx:1");
    let expected = json!({
        "image": "nginx:1", "parallelism": 5, "pullSecrets": ["s"],
        "completionPolicy": {"type": "Always", "activeDeadlineSeconds": 1000},
    });
    assert_eq!(serde_json::to_value(&child.spec).unwrap(), expected);
    d.pass(2);
    let status = d.list_status("list");
    assert_eq!((status.desired, status.active, status.completed, status.succeeded), (2, 2, 0, 0));
    assert_eq!((status.start_time.is_some(), status.message.as_str()), (true, ""));
    d.succeeds(&nginx(), THREE);
    d.succeeds(&redis(), &["a", "c"]);
    d.fails(&redis(), &["b"]);
    let status = d.list_status("list");
    assert_eq!((status.desired, status.active, status.completed, status.succeeded), (2, 0, 2, 1));
    let failed = &status.failed_image_statuses;
    assert_eq!((failed.len(), &failed[0].image_pull_job, failed[0].name.as_str()), (1, &redis(), "redis:2"));
    assert!(status.completion_time.is_some());
    let of_list = |action: &Action| match action {
        Action::Event(event) if event.kind == ObjectKind::ImageListPullJob => {
            Some((event.warning, event.reason, event.note.clone()))
        }
        _ => None,
    };
    let events: Vec<_> = d.log.iter().filter_map(of_list).collect();
    assert_eq!(events, [(true, "Failed", "job has completed: 1 of 2 images are on all nodes".to_owned())]);
    // The list's own time to live takes the children along; they have none.
    d.log.clear();
    d.outcomes = vec![WriteOutcome::Failed];
    d.pass(59);
    assert!(d.log.is_empty());
    d.pass(31);
    assert!(
        matches!(
            d.log[..],
            [Action::Write(JobWrite::DeleteListJob(..)), Action::Write(JobWrite::DeleteListJob(..))]
        ),
        "{:?}",
        d.log
    );
    d.input(Input::ListJobGone(uid("list")));
    d.pass(1000);
    assert_eq!(d.log.len(), 2);
}

#[test]
fn a_lists_parallelism_bounds_all_images() {
    let mut d = Driver::with(THREE);
    d.list("list", spec(&json!({"parallelism": 1})));
    assert_eq!(take_asked(&mut d), ["a nginx", "a redis"]);
    d.succeeds(&nginx(), &["a"]);
    assert_eq!(take_asked(&mut d), Vec::<String>::new());
    d.succeeds(&redis(), &["a"]);
    assert_eq!(take_asked(&mut d), ["b nginx", "b redis"]);
    d.list("list", spec(&json!({"parallelism": 2})));
    assert_eq!(take_asked(&mut d), ["c nginx", "c redis"]);
    d.list("list", spec(&json!({"parallelism": 0, "images": ["nginx:1", "redis:2", "busybox"]})));
    assert_eq!(take_asked(&mut d), Vec::<String>::new());
    d.list("list", spec(&json!({"parallelism": 1, "images": ["nginx:1", "redis:2", "busybox"]})));
    // Both are busy anyway.
    assert_eq!(take_asked(&mut d), ["b busybox", "c busybox"]);
    d.succeeds(&nginx(), &["b", "c"]);
    d.succeeds(&redis(), &["b", "c"]);
    let busybox = child_name("list", "busybox");
    d.succeeds(&busybox, &["b", "c"]);
    assert!(d.has_finished(&nginx()) && d.has_finished(&redis()));
    assert_eq!(take_asked(&mut d), ["a busybox"]);
    d.delete(&nginx());
    d.settle();
    assert_eq!(take_asked(&mut d), ["a nginx"]);
    // One that is over gives its slots to the others.
    d.succeeds(&busybox, &["a"]);
    d.succeeds(&nginx(), &["a"]);
    assert_eq!(take_asked(&mut d), ["b nginx"]);
}

#[test]
fn a_template_edit_updates_or_replaces_children() {
    let mut d = Driver::with(THREE);
    d.list("list", spec(&json!({})));
    assert_eq!(take_child_writes(&mut d), ["make nginx:1", "make redis:2"]);
    // What an API server fills in is no change.
    for name in [nginx(), redis()] {
        let mut spec = serde_json::to_value(&d.api[&name].spec).unwrap();
        spec["completionPolicy"] = json!({"type": "Always"});
        spec["pullPolicy"] = json!({"timeoutSeconds": 600, "backoffLimit": 3});
        spec["imagePullPolicy"] = json!("IfNotPresent");
        d.job(&name, spec);
    }
    d.pass(1000);
    assert_eq!(take_child_writes(&mut d), Vec::<String>::new());
    d.list("list", spec(&json!({"pullPolicy": {"timeoutSeconds": 30}})));
    assert_eq!(take_child_writes(&mut d), ["change nginx:1", "change redis:2"]);
    let timeout = |d: &Driver| d.api[&redis()].spec.template.pull_policy.clone().unwrap().timeout_seconds;
    assert_eq!(timeout(&d), Some(30));
    // Secrets are immutable, so the jobs are re-created.
    d.list("list", spec(&json!({"pullPolicy": {"timeoutSeconds": 30}, "pullSecrets": ["s"]})));
    assert_eq!(
        take_child_writes(&mut d),
        ["delete nginx:1", "delete redis:2", "make nginx:1", "make redis:2"]
    );
    assert_eq!(d.api[&redis()].spec.template.pull_secrets, ["s"]);
    // A time to live is the list's alone.
    let ttl = json!({"pullPolicy": {"timeoutSeconds": 30}, "pullSecrets": ["s"], "completionPolicy": {"ttlSecondsAfterFinished": 5}});
    d.list("list", spec(&ttl));
    assert_eq!(take_child_writes(&mut d), Vec::<String>::new());
    // A user's edit of a child is reverted, with backoff if the revert has no effect.
    d.job(&nginx(), json!({"image": "nginx:1", "pullSecrets": ["s"], "parallelism": 7}));
    d.pass(0);
    assert_eq!(take_child_writes(&mut d), ["change nginx:1"]);
    d.job(&nginx(), json!({"image": "nginx:1", "pullSecrets": ["s"], "parallelism": 7}));
    d.pass(29);
    assert_eq!(take_child_writes(&mut d), Vec::<String>::new());
    d.pass(1);
    assert_eq!(take_child_writes(&mut d), ["change nginx:1"]);
}

#[test]
fn a_childs_image_is_its_lists() {
    for other in ["redis:2", "busybox"] {
        let mut d = Driver::with(THREE);
        d.list("list", spec(&json!({"parallelism": 9})));
        take_child_writes(&mut d);
        d.job(&nginx(), json!({"image": other, "parallelism": 9}));
        assert_eq!(take_child_writes(&mut d), ["change nginx:1"], "{other}");
        assert_eq!(d.api[&nginx()].spec.image, "nginx:1");
        d.succeeds(&nginx(), THREE);
        assert!(d.has_finished(&nginx()));
        take_child_writes(&mut d);
        // Its end is not that of the other image.
        d.job(&nginx(), json!({"image": other, "parallelism": 9}));
        assert_eq!(take_child_writes(&mut d), ["delete nginx:1", "make nginx:1"], "{other}");
        d.succeeds(&nginx(), THREE);
        d.succeeds(&redis(), THREE);
        assert!(d.list_status("list").completion_time.is_some());
    }
}

#[test]
fn an_edit_runs_a_finished_child_again() {
    let mut d = Driver::with(THREE);
    d.list("list", spec(&json!({"selector": {"names": ["a"]}})));
    d.succeeds(&nginx(), &["a"]);
    assert!(d.has_finished(&nginx()));
    take_child_writes(&mut d);
    d.list("list", spec(&json!({"selector": {"names": ["a"]}, "parallelism": 7})));
    assert_eq!(take_child_writes(&mut d), ["change nginx:1", "change redis:2"], "it's as it was pulled");
    d.list("list", spec(&json!({"selector": {"names": ["a", "b"]}, "parallelism": 7})));
    assert_eq!(take_child_writes(&mut d), ["delete nginx:1", "change redis:2", "make nginx:1"]);
    d.succeeds(&redis(), &["a", "b"]);
    assert_eq!(d.list_status("list").completion_time, None);
    d.succeeds(&nginx(), &["a", "b"]);
    let status = d.list_status("list");
    assert!(status.completion_time.is_some() && status.succeeded == 2, "{status:?}");
}

#[test]
fn a_child_that_ends_meanwhile_runs_again() {
    let mut d = Driver::with(THREE);
    d.list("list", json!({"images": ["nginx:1"], "selector": {"names": ["a"]}}));
    take_child_writes(&mut d);
    d.child_outcomes = vec![WriteOutcome::Failed];
    d.list("list", json!({"images": ["nginx:1"], "selector": {"names": ["a", "b"]}}));
    let is_update = |action: &&Action| matches!(action, Action::Write(JobWrite::UpdateChild { .. }));
    let Some(Action::Write(update)) = d.log.iter().find(is_update).cloned() else { panic!("no update") };
    d.succeeds(&nginx(), &["a"]);
    assert_eq!(d.apply(update), WriteOutcome::Failed, "it would give the end of one node to the spec of two");
    d.pass(1);
    assert_eq!(take_child_writes(&mut d), ["change nginx:1", "delete nginx:1", "make nginx:1"]);
    d.succeeds(&nginx(), &["a", "b"]);
    let status = d.list_status("list");
    assert!(status.completion_time.is_some() && d.status(&nginx()).desired == 2, "{status:?}");
}

#[test]
fn a_child_runs_again_for_each_edit() {
    let mut d = Driver::with(THREE);
    // The list goes on for its second image.
    let wanted = |nodes: &[&str]| spec(&json!({"selector": {"names": nodes}}));
    d.list("list", wanted(&["a"]));
    d.succeeds(&nginx(), &["a"]);
    take_child_writes(&mut d);
    let made_again = ["delete nginx:1", "change redis:2", "make nginx:1"];
    d.list("list", wanted(&["a", "b"]));
    assert_eq!(take_child_writes(&mut d), made_again);
    // It is edited while it runs, and back when it has ended.
    d.list("list", wanted(&["a"]));
    assert_eq!(take_child_writes(&mut d), ["change nginx:1", "change redis:2"]);
    d.succeeds(&nginx(), &["a"]);
    d.child_outcomes = vec![WriteOutcome::Failed];
    d.list("list", wanted(&["a", "b"]));
    d.pass(1);
    assert_eq!(
        take_child_writes(&mut d),
        ["delete nginx:1", "change redis:2", "delete nginx:1", "make nginx:1"]
    );
}

#[test]
fn an_unreadable_child_is_written_over() {
    let mut d = Driver::with(THREE);
    d.list("list", json!({"images": ["nginx:1"]}));
    let metadata = d.api[&nginx()].metadata.clone();
    let (id, error) = (metadata::object_id(&metadata), "a field of the wrong type".to_owned());
    let unreadable = Unreadable { id, generation: 2, error, start_time: None, completion_time: None };
    d.input(Input::PullJob(Err(unreadable)));
    d.settle();
    d.list("list", json!({"images": ["nginx:1"], "parallelism": 2}));
    let is_meant =
        |action: &Action| matches!(action, Action::Write(JobWrite::UpdateChild { version: None, .. }));
    assert!(d.log.iter().any(is_meant));
}

#[test]
fn a_policy_on_children_has_none_run_for_ever() {
    let mut d = Driver::with(THREE);
    // The list goes on for its second image.
    d.list("list", spec(&json!({})));
    take_child_writes(&mut d);
    let mut deletions = 0;
    for _ in 0..3 {
        d.succeeds(&nginx(), THREE);
        // The policy has its say.
        d.job(&nginx(), json!({"image": "nginx:1", "imagePullPolicy": "Always"}));
        d.pass(60);
        deletions += take_child_writes(&mut d).iter().filter(|write| write.starts_with("delete")).count();
    }
    assert_eq!(deletions, 1);
    d.succeeds(&redis(), THREE);
    assert!(d.list_status("list").completion_time.is_some());
}

#[test]
fn children_follow_the_images_of_their_list() {
    let mut d = Driver::with(THREE);
    d.list("list", spec(&json!({})));
    d.succeeds(&nginx(), THREE);
    d.log.clear();
    // Only the one that is through is left, but the other one is to go first.
    d.child_outcomes = vec![WriteOutcome::Failed];
    d.list("list", spec(&json!({"images": ["nginx:1"]})));
    assert_eq!(take_child_writes(&mut d), ["delete redis:2"]);
    assert!(d.list_status("list").completion_time.is_none());
    d.pass(1);
    assert_eq!(take_child_writes(&mut d), ["delete redis:2"]);
    assert!(d.list_status("list").completion_time.is_some() && !d.api.contains_key(&redis()));
    d.list("list", spec(&json!({"images": ["nginx:1", "busybox"]})));
    d.pass(100);
    assert_eq!(take_child_writes(&mut d), Vec::<String>::new());
}

#[test]
fn a_deleted_child_is_recreated() {
    let mut d = Driver::with(THREE);
    d.list("list", spec(&json!({})));
    d.log.clear();
    let mut leaving = d.api[&nginx()].clone();
    leaving.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(d.now));
    d.input(Input::PullJob(Ok(Box::new(leaving))));
    d.pass(100);
    assert_eq!(d.list_status("list").desired, 2);
    assert_eq!(take_child_writes(&mut d), Vec::<String>::new());
    let child = JobUid(d.api[&nginx()].metadata.uid.clone().unwrap());
    assert_eq!(d.jobs.liveness(&child), Liveness::Deleted);
    // It has its own name still, and no other child's.
    d.delete(&redis());
    d.settle();
    assert_eq!(take_child_writes(&mut d), ["make redis:2"]);
    d.delete(&nginx());
    d.settle();
    assert_eq!(take_child_writes(&mut d), ["make nginx:1"]);
    // Failed writes are made again, sooner at first.
    d.child_outcomes = vec![WriteOutcome::Failed; 3];
    d.delete(&nginx());
    d.settle();
    d.pass_for(std::time::Duration::from_millis(1750));
    assert_eq!(take_child_writes(&mut d).len(), 4);
    assert!(d.api.contains_key(&nginx()));
}

#[test]
fn a_taken_name_is_reported_and_retried() {
    let mut d = Driver::with(THREE);
    d.child_outcomes = vec![WriteOutcome::Gone];
    d.list("list", spec(&json!({})));
    let note = format!(
        "image nginx:1 waits: its ImagePullJob must have the name {}, and an ImagePullJob of this name exists that does not belong to the list; delete that one",
        nginx()
    );
    assert_eq!(d.take_events(), [format!("Warning NameTaken: {note}")]);
    d.pass(2);
    assert_eq!(d.list_status("list").message, note);
    d.log.clear();
    d.child_outcomes = vec![WriteOutcome::Gone];
    d.pass(28);
    assert_eq!(d.list_status("list").message, note);
    let again = std::mem::take(&mut d.log);
    assert!(matches!(again[..], [Action::Write(JobWrite::CreateChild { .. })]), "{again:?}");
    d.pass(31);
    assert_eq!((take_child_writes(&mut d).len(), d.list_status("list").message), (1, String::new()));
}

#[test]
fn a_refused_lists_children_continue() {
    let mut d = Driver::with(THREE);
    d.list("list", spec(&json!({"parallelism": 2})));
    d.log.clear();
    d.list("list", spec(&json!({"parallelism": 2, "images": []})));
    assert_eq!(d.take_events(), ["Warning Invalid: image can not be empty"]);
    d.pass(2);
    let status = d.list_status("list");
    assert_eq!((status.message.as_str(), status.desired), ("image can not be empty", 0));
    d.succeeds(&nginx(), &["a", "b"]);
    d.succeeds(&redis(), &["a"]);
    assert_eq!(take_asked(&mut d), ["c nginx", "c redis"]);
    assert!(d.list_status("list").completion_time.is_none());
    d.list("list", spec(&json!({"parallelism": 2})));
    d.pass(2);
    assert_eq!((d.list_status("list").desired, d.list_status("list").message.as_str()), (2, ""));
    d.list("bad", spec(&json!({"images": ["Nginx"]})));
    assert!(d.list_status("bad").start_time.is_none());
}

#[test]
fn a_refused_list_writes_no_children() {
    let mut d = Driver::with(THREE);
    d.list("list", spec(&json!({})));
    d.list("list", spec(&json!({"images": []})));
    d.log.clear();
    d.delete(&nginx());
    d.settle();
    assert_eq!(take_child_writes(&mut d), Vec::<String>::new());
    d.list("list", spec(&json!({})));
    assert_eq!(take_child_writes(&mut d), ["make nginx:1"]);
}

#[test]
fn a_child_is_the_one_with_its_name() {
    for uid in ["a-stray", "z-stray"] {
        let mut d = Driver::with(THREE);
        d.list("list", spec(&json!({})));
        d.log.clear();
        let mut stray = d.api[&nginx()].clone();
        stray.metadata.name = Some("stray".to_owned());
        stray.metadata.uid = Some(uid.to_owned());
        stray.spec.template.pull_secrets = vec!["s".to_owned()];
        d.input(Input::PullJob(Ok(Box::new(stray))));
        d.settle();
        assert_eq!(take_child_writes(&mut d), Vec::<String>::new(), "{uid}");
    }
}

#[test]
fn a_never_list_survives_a_restart() {
    let mut d = Driver::with(THREE);
    d.list("list", spec(&json!({"completionPolicy": {"type": "Never"}, "parallelism": 9})));
    d.succeeds(&nginx(), THREE);
    d.succeeds(&redis(), THREE);
    d.pass(2);
    let status = d.list_status("list");
    assert_eq!((status.completed, status.succeeded), (2, 2));
    d.restart(THREE);
    for node in THREE {
        d.set_state_of(&nginx(), node, ("nginx", "1"), TagState::Succeeded(d.now));
        d.set_state_of(&redis(), node, ("redis", "2"), TagState::Succeeded(d.now));
    }
    d.log.clear();
    d.pass(100);
    assert!(d.log.is_empty(), "{:?}", d.log);
    assert_eq!(d.list_status("list"), status);
    // A list that is gone is not written, and a write that did not find it is the last.
    d.outcomes = vec![WriteOutcome::Gone];
    d.list(
        "list",
        spec(&json!({"completionPolicy": {"type": "Never"}, "parallelism": 9, "images": ["nginx:1"]})),
    );
    d.pass(100);
    d.log.clear();
    d.list("list", spec(&json!({"images": ["nginx:1"]})));
    d.pass(100);
}

#[test]
fn a_recreated_list_awaits_its_old_children() {
    let mut d = Driver::with(THREE);
    d.list("list", spec(&json!({})));
    d.log.clear();
    // Its children are still there when it is deleted and made again under another UID.
    d.input(Input::ListJobGone(uid("list")));
    let before = std::mem::take(&mut d.api);
    // The writer has found jobs of these names that belong to a list of this name which is gone.
    d.child_outcomes = vec![WriteOutcome::Failed; 2];
    let mut anew = d.lists["list"].clone();
    anew.metadata.uid = Some("uid-anew".to_owned());
    anew.status = None;
    d.input(Input::ListJob(Ok(Box::new(anew))));
    d.settle();
    assert_eq!(take_child_writes(&mut d), ["make nginx:1", "make redis:2"]);
    // As soon as one of them is gone, the new one is made: no wait has to pass.
    let gone = before[&nginx()].metadata.uid.clone().unwrap();
    d.input(Input::PullJobGone(JobUid(gone)));
    d.settle();
    assert_eq!(take_child_writes(&mut d), ["make nginx:1"]);
    d.pass(1);
    assert_eq!(take_child_writes(&mut d), ["make redis:2"]);
}

#[test]
fn a_freed_name_is_used_at_once() {
    let mut d = Driver::with(THREE);
    let foreign = json!({"image": "foreign:1", "parallelism": 0});
    d.job(&nginx(), foreign);
    d.child_outcomes = vec![WriteOutcome::Gone];
    d.list("list", spec(&json!({})));
    d.log.clear();
    d.delete(&nginx());
    d.settle();
    assert_eq!(take_child_writes(&mut d), ["make nginx:1"]);
}

#[test]
fn deletion_frees_only_the_jobs_own_name() {
    let mut d = Driver::with(THREE);
    for name in [nginx().as_str(), "other"] {
        d.job(name, json!({"image": "foreign:1", "parallelism": 3}));
        d.succeeds(name, THREE);
        d.pass(2);
        assert!(d.has_finished(name));
    }
    d.child_outcomes = vec![WriteOutcome::Gone];
    d.list("list", spec(&json!({})));
    d.log.clear();
    d.delete("other");
    d.settle();
    assert_eq!(take_child_writes(&mut d), Vec::<String>::new());
    d.delete(&nginx());
    d.settle();
    assert_eq!(take_child_writes(&mut d), ["make nginx:1"]);
}

#[test]
fn an_orphaned_child_is_replaced() {
    let mut d = Driver::with(THREE);
    d.list("list", spec(&json!({})));
    d.pass(2);
    d.log.clear();
    let mut child = d.api[&nginx()].clone();
    child.metadata.owner_references = None;
    d.child_outcomes = vec![WriteOutcome::Gone];
    d.input(Input::PullJob(Ok(Box::new(child))));
    d.settle();
    assert_eq!(take_child_writes(&mut d), ["make nginx:1"]);
}

/// A job of another namespace that names the list of `like` as its owner.
fn foreign_child(like: &ImagePullJob, name: &str) -> ImagePullJob {
    let mut job = like.clone();
    job.metadata.namespace = Some("evil".to_owned());
    job.metadata.name = Some(name.to_owned());
    job.metadata.uid = Some(format!("evil-{name}"));
    job
}

#[test]
fn a_child_is_in_its_lists_namespace() {
    let mut d = Driver::with(THREE);
    d.list("list", json!({"images": ["nginx:1"]}));
    let mut foreign = foreign_child(&d.api[&nginx()], &nginx());
    foreign.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(d.now));
    d.input(Input::PullJob(Ok(Box::new(foreign))));
    d.settle();
    take_child_writes(&mut d);
    d.delete(&nginx());
    d.settle();
    assert_eq!(take_child_writes(&mut d), ["make nginx:1"], "its name is free");
    let mut foreign = foreign_child(&d.api[&nginx()], "other");
    foreign.spec.image = "other:1".to_owned();
    d.input(Input::PullJob(Ok(Box::new(foreign))));
    d.settle();
    assert_eq!(take_child_writes(&mut d), Vec::<String>::new(), "an image that the list doesn't have");
}

#[test]
fn a_foreign_child_shares_no_slots() {
    let mut d = Driver::with(THREE);
    d.list("list", json!({"images": ["nginx:1"], "parallelism": 0}));
    let mut foreign = foreign_child(&d.api[&nginx()], "other");
    foreign.spec = serde_json::from_value(json!({"image": "other:1"})).unwrap();
    foreign.status = None;
    d.input(Input::PullJob(Ok(Box::new(foreign))));
    d.settle();
    assert_eq!(take_asked(&mut d), ["a other"], "its parallelism is its own");
}

#[test]
fn relisting_drops_deleted_lists() {
    let mut d = Driver::with(THREE);
    d.list("list", spec(&json!({"parallelism": 2})));
    let list = Box::new(d.lists["list"].clone());
    let id = metadata::object_id(&list.metadata);
    d.input(Input::ListJobs(vec![Ok(list)]));
    assert_eq!(d.jobs.lists.parallelism(&id), Some(2));
    d.input(Input::ListJobs(Vec::new()));
    assert_eq!(d.jobs.lists.parallelism(&id), None);
}

#[test]
fn an_unreadable_child_gives_its_slots_back() {
    let mut d = Driver::with(THREE);
    d.list("list", spec(&json!({"parallelism": 1})));
    d.succeeds(&redis(), &["a"]);
    assert_eq!(take_asked(&mut d), ["a nginx", "a redis"]);
    let child = d.api[&nginx()].clone();
    let id = metadata::object_id(&child.metadata);
    let (error, start_time, completion_time) = ("a field is missing".to_owned(), None, None);
    d.input(Input::PullJob(Err(Unreadable { id, generation: 2, error, start_time, completion_time })));
    d.settle();
    assert_eq!(take_asked(&mut d), ["b redis"]);
    // Once it can be read, it shares the slots of its list again.
    d.input(Input::PullJob(Ok(Box::new(child))));
    d.settle();
    assert_eq!(take_asked(&mut d), ["b nginx"]);
    d.succeeds(&redis(), &["b"]);
    d.succeeds(&nginx(), &["b"]);
    assert_eq!(take_asked(&mut d), Vec::<String>::new());
    d.succeeds(&nginx(), &["a"]);
    assert_eq!(take_asked(&mut d), ["c nginx", "c redis"]);
}
