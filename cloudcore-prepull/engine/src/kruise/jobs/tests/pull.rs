use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::crd::kruise::{ImagePullJob, ImagePullJobSpec, ImagePullJobStatus};
use serde_json::{Value, json};

use super::super::status::FAILED_NODES;
use super::super::*;
use super::driver::{Driver, owner, uid};
use crate::kruise::{TagKey, TagState};
use crate::shared::objects::{ObjectId, Unreadable};
use crate::shared::outcomes::WriteOutcome;

const THREE: &[&str] = &["a", "b", "c"];

/// A job for all nodes, with these fields besides the image.
fn spec(more: &Value) -> Value {
    let mut spec = json!({"image": "nginx:1.9.1"});
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    spec
}

#[test]
fn parallelism_bounds_the_nodes_asked() {
    let mut d = Driver::with(&["c", "a", "b"]);
    let started = d.now;
    d.job("job", spec(&json!({"parallelism": 2})));
    assert_eq!(d.take_asked(), ["a", "b"]);
    let status = d.status("job");
    assert_eq!(status.start_time.as_ref().map(|time| time.0), Some(started));
    assert_eq!((status.message.as_str(), d.numbers("job")), ("job is running, progress 0.0%", [3, 2, 0, 0]));
    d.set_state("job", "a", TagState::Pending);
    d.fails("job", &["b"]);
    assert_eq!(d.take_asked(), ["c"]);
    assert_eq!(d.numbers("job"), [3, 2, 0, 1]);
    assert_eq!(d.status("job").message, "job is running, progress 33.3%");
    d.succeeds("job", &["a"]);
    d.log.clear();
    d.fails("job", &["c"]);
    assert_eq!(d.take_events(), ["Warning Failed: job has completed: 1 of 3 nodes succeeded"]);
    let status = d.status("job");
    assert_eq!(status.failed_nodes, ["b", "c"]);
    assert_eq!((status.message.as_str(), d.numbers("job")), ("job has completed", [3, 0, 1, 2]));
    assert_eq!(d.jobs.liveness(&uid("job")), Liveness::Finished);
    // Nothing moves it any more.
    d.node("d", &[]);
    d.online("d", true);
    d.succeeds("job", &["b"]);
    d.pass(100_000);
    assert!(d.log.is_empty() && d.jobs.early_states.is_empty(), "{:?}", d.log);
}

#[test]
fn a_successful_job_releases_its_tags() {
    let mut d = Driver::with(&["a"]);
    d.job("job", spec(&json!({})));
    assert_eq!(d.jobs.liveness(&uid("job")), Liveness::Active);
    assert_eq!(d.jobs.liveness(&uid("other")), Liveness::Deleted);
    d.succeeds("job", &["a"]);
    assert!(d.log.contains(&Action::LivenessChanged(uid("job"))));
    assert_eq!(d.take_events(), ["Normal Completed: job has completed: 1 of 1 nodes succeeded"]);
    d.delete("job");
    d.settle();
    assert_eq!(d.log, [Action::LivenessChanged(uid("job"))]);
    assert_eq!(d.jobs.liveness(&uid("job")), Liveness::Deleted);
}

#[test]
fn a_living_jobs_own_secrets_need_no_consent() {
    let mut d = Driver::with(&["a"]);
    d.job("job", spec(&json!({"pullSecrets": ["registry"]})));
    let secrets = d.jobs.request_of(&uid("job")).unwrap().secrets.clone();
    let named: Vec<_> = secrets.iter().map(|secret| (&*secret.namespace, &*secret.name)).collect();
    assert_eq!(named, [("team", "registry")], "the namespace is the job's, whatever a NodeImage says");
    assert!(d.jobs.request_of(&uid("made-up")).is_none());
    d.delete("job");
    d.settle();
    assert!(d.jobs.request_of(&uid("job")).is_none());
}

#[test]
fn only_always_jobs_end_without_nodes() {
    let mut d = Driver::with(THREE);
    d.job("none", spec(&json!({"selector": {"names": ["x"]}})));
    assert_eq!((d.numbers("none"), d.status("none").message.as_str()), ([0; 4], "job has completed"));
    d.job("never", spec(&json!({"selector": {"names": []}, "completionPolicy": {"type": "Never"}})));
    assert!(!d.has_finished("never"));
    assert_eq!(d.status("never").message, "job is running, no progress");
}

#[test]
fn parallelism_zero_pauses_a_job() {
    let mut d = Driver::with(THREE);
    d.job("job", spec(&json!({"parallelism": 0})));
    assert_eq!((d.take_asked(), d.numbers("job")), (vec![], [3, 0, 0, 0]));
    d.job("job", spec(&json!({"parallelism": "2"})));
    assert_eq!(d.take_asked(), ["a", "b"]);
    d.job("job", spec(&json!({"parallelism": 1})));
    d.succeeds("job", &["a"]);
    assert_eq!(d.take_asked(), Vec::<String>::new());
    d.succeeds("job", &["b"]);
    assert_eq!(d.take_asked(), ["c"]);
}

#[test]
fn only_online_nodes_are_asked() {
    let mut d = Driver::with(&["b"]);
    d.node("a", &[]);
    d.job("job", spec(&json!({"parallelism": 5})));
    assert_eq!(d.take_asked(), ["b"]);
    d.online("a", true);
    d.settle();
    assert_eq!(d.take_asked(), ["a"]);
}

#[test]
fn an_offline_nodes_slot_lasts_a_minute() {
    let mut d = Driver::with(THREE);
    d.job("job", spec(&json!({})));
    assert_eq!(d.take_asked(), ["a"]);
    d.online("a", false);
    d.pass(59);
    assert_eq!((d.take_asked(), d.status("job").active), (vec![], 1));
    d.pass(1);
    assert_eq!(d.take_asked(), ["b"]);
    // Back again it is active, beside the other one.
    d.online("a", true);
    assert_eq!(d.numbers("job"), [3, 2, 0, 0]);
    d.succeeds("job", &["b"]);
    assert_eq!(d.take_asked(), Vec::<String>::new());
    d.succeeds("job", &["a"]);
    assert_eq!(d.take_asked(), ["c"]);
}

#[test]
fn pending_nodes_keep_slots_over_a_restart() {
    let mut d = Driver::with(THREE);
    d.job("job", spec(&json!({})));
    d.restart(THREE);
    d.set_state("job", "a", TagState::Pending);
    d.log.clear();
    d.online("b", true);
    d.pass(59);
    assert_eq!(d.take_asked(), Vec::<String>::new());
    // The last run's request may differ from the job's present spec.
    d.online("a", true);
    d.pass(600);
    assert_eq!(d.take_asked(), ["a"]);
    d.succeeds("job", &["a"]);
    assert_eq!(d.take_asked(), ["b"]);
}

#[test]
fn the_nodes_follow_their_labels() {
    let mut d = Driver::with(&[]);
    for node in THREE {
        d.node(node, &[("zone", "x")]);
        d.online(node, true);
    }
    d.job("job", spec(&json!({"selector": {"matchLabels": {"zone": "x"}}})));
    d.set_state("job", "a", TagState::Pending);
    d.succeeds("job", &["a"]);
    assert_eq!(d.numbers("job"), [3, 1, 1, 0]);
    // One that has ended, one that is at work, one that waits.
    d.node("a", &[("zone", "y")]);
    d.node("b", &[]);
    assert_eq!(d.numbers("job"), [1, 1, 0, 0]);
    assert_eq!(d.take_asked(), ["a", "b", "c"]);
    d.node("d", &[("zone", "x")]);
    assert_eq!(d.numbers("job"), [2, 1, 0, 0]);
    // What had ended is known still.
    d.node("a", &[("zone", "x")]);
    assert_eq!(d.numbers("job"), [3, 1, 1, 0]);
    d.input(Input::NodeImage(NodeImageUpdate::Deleted("c".into())));
    assert_eq!(d.numbers("job"), [2, 0, 1, 0]);
    d.input(Input::NodeImage(NodeImageUpdate::Deleted("d".into())));
    d.settle();
    assert!(d.has_finished("job"));
    assert_eq!(d.take_asked(), Vec::<String>::new());
}

#[test]
fn the_nodes_follow_the_pods() {
    let mut d = Driver::with(THREE);
    d.pod("web-1", &[("app", "web")], Some("a"));
    d.pod("web-2", &[("app", "web")], Some("a"));
    d.pod("db", &[("app", "db")], Some("b"));
    d.pod("lost", &[("app", "web")], Some("x"));
    d.job("job", spec(&json!({"podSelector": {"app": "web"}})));
    assert_eq!((d.take_asked(), d.numbers("job")), (vec!["a".to_owned()], [1, 1, 0, 0]));
    d.pod("web-1", &[("app", "web")], Some("c"));
    assert_eq!(d.numbers("job"), [2, 1, 0, 0]);
    d.pod("db", &[("app", "web")], Some("b"));
    d.node("x", &[]);
    assert_eq!(d.numbers("job"), [4, 1, 0, 0]);
    d.pod("db", &[("app", "web")], None);
    d.input(Input::PodGone { namespace: "team".to_owned(), name: "web-2".to_owned() });
    assert_eq!(d.numbers("job"), [2, 1, 0, 0]);
    let pod = |namespace: &str, node: &str| Pod {
        namespace: namespace.to_owned(),
        name: "p".to_owned(),
        labels: [("app".to_owned(), "web".to_owned())].into(),
        node: Some(node.into()),
    };
    d.input(Input::Pods(vec![pod("team", "b"), pod("other", "a")]));
    assert_eq!(d.numbers("job"), [1, 1, 0, 0]);
    assert_eq!(d.take_asked(), ["c", "b"]);
}

#[test]
fn a_job_waits_until_pods_are_known() {
    let mut d = Driver::with(THREE);
    d.pod("web-1", &[("app", "web")], Some("b"));
    d.input(Input::PodsUnwatched);
    d.job("first", spec(&json!({"selector": {"names": ["c"]}})));
    assert_eq!((d.take_asked(), d.jobs.needs_pods()), (vec!["c".to_owned()], false));
    d.job("job", spec(&json!({"podSelector": {"app": "web"}})));
    assert!(d.take_asked().is_empty() && !d.has_finished("job") && d.jobs.needs_pods());
    let labels = [("app".to_owned(), "web".to_owned())].into();
    let pod = Pod { namespace: "team".to_owned(), name: "web-2".to_owned(), labels, node: Some("a".into()) };
    d.input(Input::Pods(vec![pod]));
    d.settle();
    assert_eq!(d.take_asked(), ["a"]);
    d.succeeds("job", &["a"]);
    assert!(d.has_finished("job") && !d.jobs.needs_pods());
    // There may be none at all.
    d.input(Input::PodsUnwatched);
    d.job("other", spec(&json!({"podSelector": {"app": "none"}})));
    d.input(Input::Pods(Vec::new()));
    d.pass(2);
    assert!(d.has_finished("other"));
}

#[test]
fn a_finished_always_node_stays_finished() {
    let mut d = Driver::with(THREE);
    d.job("job", spec(&json!({"parallelism": 3})));
    d.succeeds("job", &["a"]);
    d.fails("job", &["b"]);
    for tag_state in [TagState::Pending, TagState::Absent] {
        d.set_state("job", "a", tag_state);
        d.set_state("job", "b", tag_state);
        assert_eq!(d.numbers("job"), [3, 1, 1, 1]);
    }
    d.fails("job", &["a"]);
    d.succeeds("job", &["b"]);
    assert_eq!(d.numbers("job"), [3, 1, 2, 0]);
    // An open tag that a user removes is requested once more.
    d.log.clear();
    d.set_state("job", "c", TagState::Pending);
    d.set_state("job", "c", TagState::Absent);
    assert_eq!(d.take_asked(), ["c"]);
}

#[test]
fn pending_nodes_get_a_changed_policy() {
    let mut d = Driver::with(&["a", "b", "c", "d"]);
    d.job("job", spec(&json!({"parallelism": 3})));
    d.succeeds("job", &["a"]);
    d.online("c", false);
    d.log.clear();
    d.job("job", spec(&json!({"parallelism": 3, "pullPolicy": {"timeoutSeconds": 7}})));
    let tag_requests: Vec<_> = d
        .log
        .iter()
        .filter_map(|action| match action {
            Action::RequestTag { node, request, new_round } => {
                Some((node.0.as_str(), request.limits.timeout_seconds.unwrap(), *new_round))
            }
            _ => None,
        })
        .collect();
    assert_eq!(tag_requests, [("b", 7, false), ("d", 7, false)]);
    d.log.clear();
    d.online("c", true);
    d.settle();
    assert_eq!(d.take_asked(), ["c"]);
    d.job("job", spec(&json!({"parallelism": 2, "pullPolicy": {"timeoutSeconds": 7}})));
    assert_eq!(d.take_asked(), Vec::<String>::new());
}

#[test]
fn a_changed_image_restarts_every_node() {
    let mut d = Driver::with(THREE);
    d.job("job", spec(&json!({"parallelism": 2})));
    d.succeeds("job", &["a"]);
    d.log.clear();
    d.job("job", json!({"image": "nginx:2", "parallelism": 1}));
    assert_eq!(d.take_asked(), ["a*"]);
    assert_eq!(d.numbers("job"), [3, 1, 0, 0]);
    // Of the image before.
    d.set_state_of("job", "a", ("nginx", "1.9.1"), TagState::Succeeded(d.now));
    d.set_state_of("job", "b", ("nginx", "1.9.1"), TagState::Failed(d.now));
    assert_eq!(d.numbers("job"), [3, 1, 0, 0]);
    // c was not asked yet: what stands there may be of an earlier time.
    d.succeeds("job", &["c"]);
    assert_eq!(d.numbers("job"), [3, 1, 0, 0]);
    d.succeeds("job", THREE);
    assert!(d.has_finished("job"));
    assert_eq!(d.status("job").succeeded, 3);
}

#[test]
fn a_refused_job_starts_once_corrected() {
    let mut d = Driver::with(THREE);
    d.job("job", spec(&json!({"parallelism": "10%"})));
    let words = "parallelism does not support percentage value";
    assert_eq!(d.take_events(), [format!("Warning Invalid: {words}")]);
    let refused = ImagePullJobStatus { message: words.to_owned(), ..ImagePullJobStatus::default() };
    assert_eq!(d.status("job"), refused);
    // The same after a restart, without another event.
    d.restart(THREE);
    d.set_state_of("job", "a", ("nginx", "1.9.1"), TagState::Succeeded(d.now));
    d.pass(10);
    assert!(d.log.is_empty(), "{:?}", d.log);
    d.online("b", true);
    d.job("job", spec(&json!({})));
    assert_eq!((d.take_asked(), d.numbers("job")), (vec!["b".to_owned()], [3, 1, 1, 0]));
    d.job("job", spec(&json!({"image": ""})));
    assert_eq!(d.take_events(), ["Warning Invalid: image can not be empty"]);
    assert_eq!(d.numbers("job"), [0; 4]);
    assert!(d.status("job").start_time.is_some());
    d.job("job", spec(&json!({})));
    assert_eq!(d.numbers("job"), [3, 1, 1, 0]);
    d.input(Input::PullJob(Err(Unreadable {
        id: ObjectId { namespace: "team".to_owned(), name: "job".to_owned(), uid: uid("job") },
        generation: d.api["job"].metadata.generation.unwrap(),
        error: "x".repeat(5000),
        start_time: None,
        completion_time: None,
    })));
    d.pass(2);
    assert_eq!((d.status("job").message.len(), d.jobs.liveness(&uid("job"))), (1024, Liveness::Active));
}

#[test]
fn the_deadline_survives_a_restart() {
    let mut d = Driver::with(THREE);
    let limits =
        json!({"pullPolicy": {"timeoutSeconds": 10}, "completionPolicy": {"activeDeadlineSeconds": 100}});
    d.job("job", spec(&limits));
    d.pass(50);
    d.succeeds("job", &["a"]);
    d.restart(THREE);
    d.set_state("job", "a", TagState::Succeeded(d.now));
    d.set_state("job", "b", TagState::Pending);
    d.log.clear();
    d.pass_for(Duration::from_millis(49_900));
    assert!(!d.has_finished("job"));
    d.pass(1);
    let status = d.status("job");
    assert_eq!(status.message, "job exceeds activeDeadlineSeconds");
    assert_eq!((status.succeeded, status.failed, status.active), (1, 2, 0));
    assert_eq!((status.desired, status.failed_nodes), (3, vec!["b".to_owned(), "c".to_owned()]));
    assert_eq!(
        d.take_events(),
        ["Warning Failed: job exceeds activeDeadlineSeconds: 1 of 3 nodes succeeded"]
    );
}

#[test]
fn offline_nodes_fail_after_their_possible_tries() {
    let nodes: Vec<String> = (0..8).map(|i| format!("n{i}")).collect();
    let names: Vec<&str> = nodes.iter().map(String::as_str).collect();
    let mut d = Driver::with(&names[..1]);
    for node in &names[1..] {
        d.node(node, &[]);
    }
    let spec = spec(&json!({"pullPolicy": {"timeoutSeconds": 10, "backoffLimit": 1}}));
    d.job("job", spec.clone());
    d.pass(1000);
    assert!(!d.has_finished("job"));
    d.succeeds("job", &["n0"]);
    d.pass(19);
    // One node comes and goes: its time starts over after a minute offline.
    d.online("n3", true);
    d.settle();
    d.online("n3", false);
    d.pass(79);
    assert!(!d.has_finished("job"));
    // The same spec once more gives no more time.
    d.job("job", spec);
    d.log.clear();
    d.pass(1);
    assert_eq!(
        d.take_events(),
        [
            "Warning Unresponsive: 7 of 8 nodes did not respond for a long time and count as failed: n1, n2, n3, n4, n5, …",
            "Warning Failed: job has completed: 1 of 8 nodes succeeded"
        ]
    );
    let status = d.status("job");
    assert_eq!(
        (status.failed, status.failed_nodes.len(), status.message.as_str()),
        (7, 7, "job has completed")
    );
}

#[test]
fn the_list_of_failed_nodes_is_bounded() {
    let names: Vec<String> = (0..FAILED_NODES + 2).map(|node| format!("n{node:05}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut d = Driver::with(&names);
    d.job("job", spec(&json!({"parallelism": 5000})));
    d.fails("job", &names[1..]);
    d.pass(5);
    let status = d.status("job");
    assert_eq!(
        (status.failed, status.failed_nodes.len(), status.failed_nodes[0].as_str()),
        (1001, 1000, "n00001")
    );
    d.fails("job", &names[..1]);
    d.settle();
    let status = d.status("job");
    assert_eq!(
        (status.failed, status.failed_nodes.len(), status.failed_nodes[0].as_str()),
        (1002, 1000, "n00000")
    );
}

#[test]
fn a_restart_renews_the_offline_grace() {
    let mut d = Driver::with(THREE);
    d.job("job", spec(&json!({"pullPolicy": {"timeoutSeconds": 1, "backoffLimit": 0}})));
    d.restart(THREE);
    d.settle();
    d.pass(60);
    assert!(!d.has_finished("job"));
    d.pass(1);
    assert!(d.has_finished("job"));
    d.job("paused", spec(&json!({"parallelism": 0, "pullPolicy": {"timeoutSeconds": 1, "backoffLimit": 0}})));
    d.pass(10_000);
    assert!(!d.has_finished("paused"));
}

#[test]
fn a_finished_job_is_deleted_by_ttl() {
    let mut d = Driver::with(&["a"]);
    d.job("job", spec(&json!({"completionPolicy": {"ttlSecondsAfterFinished": 100}})));
    d.succeeds("job", &["a"]);
    d.pass_for(Duration::from_millis(99_900));
    d.restart(&["a"]);
    d.settle();
    assert!(d.api.contains_key("job"));
    d.log.clear();
    d.outcomes = vec![WriteOutcome::Failed, WriteOutcome::Failed];
    d.pass(1);
    assert!(matches!(d.log[..], [Action::Write(JobWrite::DeletePullJob(..))]), "{:?}", d.log);
    d.pass(30);
    assert_eq!(d.log.len(), 2);
    d.pass(30);
    assert!(d.log.len() == 4 && !d.api.contains_key("job"), "{:?}", d.log);
    // A time to live that is written after the end counts.
    d.online("a", true);
    d.job("late", spec(&json!({})));
    d.settle();
    d.succeeds("late", &["a"]);
    d.pass(1000);
    d.job("late", spec(&json!({"completionPolicy": {"ttlSecondsAfterFinished": 10}})));
    assert!(!d.api.contains_key("late"));
}

#[test]
fn a_never_job_pulls_once_a_day() {
    let mut d = Driver::with(THREE);
    d.job("job", spec(&json!({"parallelism": 2, "completionPolicy": {"type": "Never"}})));
    d.succeeds("job", &["a", "b"]);
    d.fails("job", &["c"]);
    assert_eq!(d.take_asked(), THREE);
    let ended = d.now;
    assert_eq!(d.numbers("job"), [3, 0, 2, 1]);
    assert_eq!(d.jobs.liveness(&uid("job")), Liveness::Active);
    // A day, give or take ten minutes; a restart changes nothing.
    d.pass(23 * 3600);
    d.restart(THREE);
    for (node, tag_state) in
        [("a", TagState::Succeeded(ended)), ("b", TagState::Succeeded(ended)), ("c", TagState::Failed(ended))]
    {
        d.set_state("job", node, tag_state);
        d.online(node, true);
    }
    d.online("b", false);
    d.pass(3000 - 10);
    assert_eq!((d.take_asked(), d.numbers("job")), (vec![], [3, 0, 2, 1]));
    d.pass(1200);
    assert_eq!(d.numbers("job"), [3, 2, 1, 0]);
    let mut asked = d.take_asked();
    asked.sort_unstable();
    assert_eq!(asked, ["a*", "c*"]);
    // An answer of the round before doesn't count.
    d.set_state("job", "a", TagState::Succeeded(ended));
    d.set_state("job", "a", TagState::Pending);
    assert_eq!(d.numbers("job"), [3, 2, 1, 0]);
    d.succeeds("job", &["a"]);
    d.online("b", true);
    d.settle();
    assert_eq!(d.take_asked(), ["b*"]);
}

#[test]
fn status_writes_are_paced_and_retried() {
    let nodes: Vec<String> = (0..40).map(|i| format!("n{i:02}")).collect();
    let names: Vec<&str> = nodes.iter().map(String::as_str).collect();
    let mut d = Driver::with(&names);
    d.job("job", spec(&json!({})));
    for node in &names[..39] {
        d.succeeds("job", &[node]);
        d.pass_for(Duration::from_millis(200));
    }
    let writes = |d: &Driver| {
        d.log.iter().filter(|action| matches!(action, Action::Write(JobWrite::PullJobStatus(..)))).count()
    };
    // Eight seconds: a burst of ten, what comes back of it, and then one a second.
    let count = writes(&d);
    assert!((14..=20).contains(&count), "{count}");
    // The end is not held up.
    d.outcomes = vec![WriteOutcome::Failed; 3];
    d.log.clear();
    d.succeeds("job", &["n39"]);
    assert!(writes(&d) == 1 && !d.has_finished("job"));
    assert_eq!(d.jobs.liveness(&uid("job")), Liveness::Active);
    d.pass_for(Duration::from_millis(250 + 500 + 999));
    assert_eq!(writes(&d), 3);
    d.pass_for(Duration::from_millis(1));
    assert!(d.has_finished("job"));
    assert_eq!(d.jobs.liveness(&uid("job")), Liveness::Finished);
    // A job that is gone is not written any more.
    d.job("gone", spec(&json!({"selector": {"names": ["n01", "n02"]}})));
    d.outcomes = vec![WriteOutcome::Gone];
    d.pass(1);
    d.succeeds("gone", &["n01"]);
    d.pass(1);
    d.log.clear();
    d.job("gone", spec(&json!({"parallelism": 3})));
    assert!(d.log.is_empty() && d.jobs.liveness(&uid("gone")) == Liveness::Deleted, "{:?}", d.log);
}

#[test]
fn relisting_drops_deleted_jobs() {
    let mut d = Driver::with(THREE);
    for job in ["one", "two"] {
        d.job(job, spec(&json!({})));
    }
    d.log.clear();
    let two = Box::new(d.api["two"].clone());
    d.input(Input::PullJobs(vec![Ok(two)]));
    d.settle();
    let gone = |job| Action::LivenessChanged(uid(job));
    assert_eq!((d.log.contains(&gone("one")), d.log.contains(&gone("two"))), (true, false));
    assert_eq!(d.jobs.liveness(&uid("one")), Liveness::Deleted);
    assert_eq!(d.jobs.liveness(&uid("two")), Liveness::Active);
}

#[test]
fn a_tag_seen_before_its_job_counts() {
    let tag = |state| {
        let (job, key) = (uid("job"), TagKey::new("nginx", "1.9.1"));
        Input::NodeImage(NodeImageUpdate::Tag { job, node: "a".into(), key, state })
    };
    for (is_gone, asked) in [(None, vec![]), (Some(true), vec!["a"]), (Some(false), vec!["a"])] {
        let mut d = Driver::with(&["a"]);
        d.input(tag(TagState::Succeeded(d.now)));
        match is_gone {
            Some(true) => {
                d.input(Input::NodeImage(NodeImageUpdate::Deleted("a".into())));
                d.node("a", &[]);
                d.online("a", true);
            }
            Some(false) => d.input(tag(TagState::Absent)),
            None => {}
        }
        d.job("job", spec(&json!({})));
        assert_eq!(d.take_asked(), asked, "{is_gone:?}");
        assert_eq!(d.has_finished("job"), is_gone.is_none(), "{is_gone:?}");
    }
}

#[test]
fn a_job_shares_its_lists_slots() {
    let mut d = Driver::with(&["a", "b", "c", "d"]);
    for job in ["one", "two"] {
        d.job(job, spec(&json!({"parallelism": 1})));
    }
    d.succeeds("two", &["a"]);
    assert_eq!(d.take_asked(), ["a", "a", "b"]);
    let list = ObjectId { namespace: "team".to_owned(), name: "list".to_owned(), uid: uid("list") };
    let set_list = |d: &mut Driver, job: &str, has_list: bool| {
        let object = d.api.get_mut(job).unwrap();
        object.metadata.owner_references = has_list.then(|| vec![owner(&list)]);
        let object = Box::new(object.clone());
        d.input(Input::PullJob(Ok(object)));
        d.settle();
    };
    set_list(&mut d, "one", true);
    set_list(&mut d, "two", true);
    assert_eq!(d.take_asked(), ["b"], "of one: the list is at work there anyway");
    d.succeeds("two", &["b"]);
    d.succeeds("one", &["a"]);
    assert_eq!(d.take_asked(), Vec::<String>::new(), "one of them is at work on b");
    d.succeeds("one", &["b"]);
    assert_eq!(d.take_asked(), ["c", "c"]);
    set_list(&mut d, "two", false);
    d.succeeds("two", &["c"]);
    assert_eq!(d.take_asked(), ["d"], "of two, which has its own slot again");
}

#[test]
fn a_never_job_shares_another_jobs_round() {
    let mut d = Driver::with(&["a"]);
    d.job("job", spec(&json!({"completionPolicy": {"type": "Never"}})));
    d.succeeds("job", &["a"]);
    assert_eq!(d.numbers("job"), [1, 0, 1, 0]);
    d.set_state("job", "a", TagState::Pending);
    assert_eq!(d.numbers("job"), [1, 1, 0, 0]);
    d.succeeds("job", &["a"]);
    assert_eq!(d.numbers("job"), [1, 0, 1, 0]);
}

#[test]
fn an_unreadable_job_keeps_its_start() {
    let mut d = Driver::new();
    let started = Time(d.now);
    d.api.insert("job".to_owned(), ImagePullJob::new("job", ImagePullJobSpec::default()));
    d.input(Input::PullJob(Err(Unreadable {
        id: ObjectId { namespace: "team".to_owned(), name: "job".to_owned(), uid: uid("job") },
        generation: 1,
        error: "spec.image: a number".to_owned(),
        start_time: Some(started.clone()),
        completion_time: None,
    })));
    d.settle();
    let written = d.log.iter().find_map(|action| match action {
        Action::Write(JobWrite::PullJobStatus(_, _, status)) => Some(status.start_time.clone()),
        _ => None,
    });
    assert_eq!(written, Some(Some(started)));
}
