#![allow(clippy::unwrap_used, clippy::needless_pass_by_value)] // documents are written where they are used
use jiff::SignedDuration;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::status::{JobImageStatus, NodePhase, NodeStatus, Tristate};
use prepull_api::edges::ListedEdge;
use prepull_api::failure::FailureCode;
use prepull_api::task::{ImageFacts, KubeletRecord};
use prepull_api::wire::Filesystem;
use serde_json::json;

use super::facts::{NodeFacts, OfJob, may_have_had};
use super::judge::judge_facts;
use super::*;
use crate::checklist::Mark;
use crate::kruise::OfNode;
use crate::leader::Leaderless;
use crate::progress::view::JobView;
use crate::snapshot::assert_snapshot;

const NOW: Timestamp = Timestamp::constant(1_795_000_000, 0);

fn at(seconds: i64) -> Time {
    Time(NOW + SignedDuration::from_secs(seconds))
}

fn node(labels: serde_json::Value, ready: &str) -> Node {
    let condition = json!({"type": "Ready", "status": ready, "lastTransitionTime": at(-7_200), "message": "kubelet stopped"});
    serde_json::from_value(
        json!({"metadata": {"name": "edge-7", "labels": labels}, "status": {"conditions": [condition]}}),
    )
    .unwrap()
}

fn edge() -> ListedEdge {
    ListedEdge {
        name: "edge-7".into(),
        connected: true,
        connected_since: Some(at(-11_100)),
        version: Some("0.1.0".to_owned()),
        runtime: Some("containerd 1.7.24".to_owned()),
        disk: Some(Filesystem { mountpoint: "/var".to_owned(), available: 20 << 30, capacity: 30 << 30 }),
        certificate_until: Some(at(27 * 86_400)),
        tasks: Some(0),
        max_tasks: Some(1),
        ..ListedEdge::default()
    }
}

/// A node with which all is well, and no job.
fn well() -> NodeFacts {
    NodeFacts {
        name: "edge-7".to_owned(),
        node: Ok(Some(node(json!({"node-role.kubernetes.io/edge": "", "site": "a"}), "True"))),
        edge: Ok(Some(edge())),
        known_since: Some(at(-90_000).0),
        gone: None,
        jobs: Ok(Vec::new()),
        pull_jobs: Vec::new(),
        is_job_named: false,
    }
}

fn job(template: serde_json::Value, status: serde_json::Value) -> ImagePrePullJob {
    serde_json::from_value(json!({
        "metadata": {"name": "web"}, "spec": {"imagePrePullTemplate": template}, "status": status,
    }))
    .unwrap()
}

fn running(template: serde_json::Value, skipped: serde_json::Value) -> ImagePrePullJob {
    job(template, json!({"phase": "InProgress", "startTime": at(-60), "skippedNodes": skipped}))
}

fn with(job: ImagePrePullJob, record: Option<NodeStatus>) -> NodeFacts {
    NodeFacts { jobs: Ok(vec![OfJob { job, record }]), is_job_named: true, ..well() }
}

fn failed() -> NodeFacts {
    let record = NodeStatus {
        node_name: "edge-7".to_owned(),
        phase: NodePhase::Failure,
        code: Some(FailureCode::NoSpace),
        reason: "harbor.example/shop/web:v2: no space left on device".to_owned(),
        attempt: 2,
        ..NodeStatus::default()
    };
    let over = job(json!({"nodeNames": ["edge-7"]}), json!({"phase": "Failure", "startTime": at(-600)}));
    let mut facts = with(over, Some(record));
    let disk =
        Filesystem { mountpoint: "/var/lib/containerd".to_owned(), available: 1 << 30, capacity: 30 << 30 };
    facts.edge = Ok(Some(ListedEdge { disk: Some(disk), ..edge() }));
    facts
}

#[test]
fn a_failed_nodes_points_end_with_next_step() {
    for width in [80, 160] {
        let text = render(&judge_facts(&failed(), NOW), Screen::plain(width));
        assert_snapshot(&format!("commands/why/tests/failed-{width}.txt"), &text);
    }
}

#[test]
fn distinguishes_unknown_nodes_from_absent_ones() {
    let unknown = NodeFacts { node: Ok(None), edge: Ok(None), ..well() };
    let away = ListedEdge { connected: false, connected_since: None, last_seen: Some(at(-3_000)), ..edge() };
    let away = NodeFacts { edge: Ok(Some(away)), ..well() };
    let refused =
        NodeFacts { edge: Err("user jane lacks a right: to get services/proxy".to_owned()), ..well() };
    let texts = [unknown, away, refused].map(|facts| render(&judge_facts(&facts, NOW), Screen::plain(80)));
    assert_snapshot("commands/why/tests/away-80.txt", &texts.join("\n"));
}

#[test]
fn a_node_without_any_facts_is_not_clear() {
    let refused = "user jane lacks a right".to_owned();
    let nothing = NodeFacts { node: Err(refused.clone()), edge: Err(refused.clone()), ..well() };
    assert!(judge_facts(&nothing, NOW).is_clear(), "its jobs are known");
    let nothing = NodeFacts { jobs: Err(refused), ..nothing };
    let why = judge_facts(&nothing, NOW);
    assert!(why.points.iter().all(|point| point.mark == Mark::Open), "{:?}", why.points);
    assert!(!why.is_clear());
}

#[test]
fn a_missing_leader_is_the_first_obstacle() {
    let gone = Leaderless { since: NOW, holder: None };
    let why = judge_facts(&NodeFacts { gone: Some(gone), ..failed() }, NOW);
    assert!(why.points[0].text.contains("has given its Lease back"), "{:?}", why.points[0]);
    assert_eq!(why.next, "kubectl prepull check looks for the reason");
    assert!(!why.is_clear());
}

#[test]
fn the_next_step_removes_the_first_obstacle() {
    let next = |facts: &NodeFacts| judge_facts(facts, NOW).next;
    assert_eq!(next(&well()), "nothing is in its way: kubectl prepull run IMAGE --node edge-7");
    let unlabelled = NodeFacts { node: Ok(Some(node(json!({}), "True"))), ..well() };
    assert_eq!(next(&unlabelled), "kubectl label node edge-7 node-role.kubernetes.io/edge=");
    let unready =
        NodeFacts { node: Ok(Some(node(json!({"node-role.kubernetes.io/edge": ""}), "False"))), ..well() };
    assert!(next(&unready).contains("kubectl describe node edge-7"));
    let revoked =
        NodeFacts { edge: Ok(Some(ListedEdge { revoked: true, connected: false, ..edge() })), ..failed() };
    assert!(next(&revoked).contains("kubectl prepull node allow edge-7"), "{}", next(&revoked));
    let expired = NodeFacts {
        edge: Ok(Some(ListedEdge { certificate_until: Some(at(-5)), connected: false, ..edge() })),
        ..well()
    };
    assert!(next(&expired).contains("--renew-grace"));
    let pending = NodeStatus { phase: NodePhase::Pending, ..NodeStatus::default() };
    let mut suspended = running(json!({"nodeNames": ["edge-7"]}), json!([]));
    suspended.spec.suspend = true;
    assert_eq!(next(&with(suspended.clone(), Some(pending.clone()))), "kubectl prepull resume web");
    let mut paused = suspended.clone();
    paused.spec.pause = true;
    let at_work = NodeStatus { phase: NodePhase::InProgress, ..NodeStatus::default() };
    for record in [&pending, &at_work] {
        assert_eq!(next(&with(paused.clone(), Some(record.clone()))), "kubectl prepull resume web");
    }
    suspended.spec.cancel = true;
    assert_eq!(next(&with(suspended, Some(pending.clone()))), "make another job: kubectl prepull run IMAGE");
    let waiting = with(running(json!({"nodeNames": ["edge-7"], "concurrency": 2}), json!([])), Some(pending));
    assert!(next(&waiting).contains("a larger concurrency"));
}

#[test]
fn a_job_without_the_node_gives_reasons() {
    let last = |facts: &NodeFacts| judge_facts(facts, NOW).points.pop().unwrap();
    let is_bad = |job, words: [&str; 2]| {
        let point = last(&with(job, None));
        let remedy = point.remedy.unwrap();
        assert!(
            point.mark == Mark::Bad && point.text.contains(words[0]) && remedy.contains(words[1]),
            "{} {remedy}",
            point.text
        );
    };
    let by_label = |site: &str| json!({"labelSelector": {"matchLabels": {"site": site}}});
    is_bad(
        running(by_label("b"), json!([])),
        ["is for nodes with the labels site=b", "give edge-7 the labels"],
    );
    is_bad(
        running(json!({"nodeNames": ["edge-1"]}), json!([])),
        ["names its nodes, and not this one", "--node edge-7"],
    );
    let skipped = json!([{"nodeName": "edge-7", "reason": "NotReady"}]);
    is_bad(running(by_label("a"), skipped), ["skips it: NotReady", r#"{"spec":{"followNodes":true}}"#]);
    is_bad(running(by_label("a"), json!([])), ["began before it was chosen", "followNodes"]);
    let refused = last(&with(job(by_label("a"), json!({"reason": "images: none"})), None));
    assert!(
        refused.mark == Mark::Open && refused.text.ends_with("has not begun: images: none"),
        "{}",
        refused.text
    );
    // The command line doesn't name this job.
    let other = NodeFacts { is_job_named: false, ..with(running(by_label("b"), json!([])), None) };
    assert_eq!(last(&other).text, "no job runs that has selected it");
}

#[test]
fn kruise_jobs_are_points_with_next_steps() {
    let of = |record: Option<NodeStatus>, has_node_image, is_over| {
        let view = JobView { job: "imagepulljob/web -n shop".to_owned(), is_over, ..JobView::default() };
        let pull_jobs = vec![OfNode { job: view, record, has_node_image }];
        let why = judge_facts(&NodeFacts { pull_jobs, is_job_named: true, ..well() }, at(0).0);
        (why.points.last().unwrap().text.clone(), why.next)
    };
    let record =
        |phase, reason: &str| NodeStatus { phase, reason: reason.to_owned(), ..NodeStatus::default() };
    for (record, has_node_image, is_over, text, next) in [
        (Some(record(NodePhase::Successful, "")), true, true, "has succeeded on it", "nothing is in its way"),
        (
            Some(record(NodePhase::Failure, "401")),
            true,
            true,
            "has failed on it: 401",
            "mend that; then delete",
        ),
        (Some(record(NodePhase::InProgress, "40 %")), true, false, "is at work on it: 40 %", "--watch"),
        (None, true, false, "waits for its turn", "status imagepulljob/web -n shop --watch"),
        (None, false, false, "there is no NodeImage edge-7", "--kruise-node-selector"),
    ] {
        let (said, then) = of(record, has_node_image, is_over);
        assert!(said.starts_with("imagepulljob/web -n shop") && said.contains(text), "{said}");
        assert!(then.contains(next), "{said}: {then}");
    }
}

#[test]
fn kubelet_records_are_open_points() {
    let image = |name: &str, kubelet_record| JobImageStatus {
        image: name.to_owned(),
        status: Tristate::True,
        facts: ImageFacts {
            kubelet_record,
            kubelet_record_reason: format!("why {name}"),
            ..ImageFacts::default()
        },
        ..JobImageStatus::default()
    };
    let of = |images: Vec<JobImageStatus>| {
        let checked = serde_json::from_value(json!({"checkedTime": at(-60)})).unwrap();
        let record = NodeStatus {
            phase: NodePhase::Successful,
            image_status: images,
            recheck: Some(checked),
            ..NodeStatus::default()
        };
        let over =
            job(json!({"nodeNames": ["edge-7"]}), json!({"phase": "Completed", "startTime": at(-600)}));
        judge_facts(&with(over, Some(record)), NOW)
    };
    let other = Some(KubeletRecord::OtherRepository);
    let why = of(vec![image("a", None), image("b", other), image("c", other), image("d", other)]);
    let last = why.points.last().unwrap();
    assert_eq!(last.mark, Mark::Open);
    assert_eq!(last.text, "job web has brought b and 2 more images: why b");
    assert!(why.next.contains("use it once") && why.next.contains("Allowlist"), "{}", why.next);
    // Where only pods with other secrets have to ask, nothing is in the way.
    let why = of(vec![image("a", Some(KubeletRecord::SomeCredentials))]);
    assert_eq!(why.points.last().unwrap().mark, Mark::Open);
    assert!(why.next.starts_with("nothing is in its way"), "{}", why.next);
    let missing = JobImageStatus { status: Tristate::False, ..image("a", other) };
    assert_eq!(of(vec![missing]).points.last().unwrap().mark, Mark::Good);
}

#[test]
fn successes_are_shown_with_their_time() {
    let over =
        || job(json!({"nodeNames": ["edge-7"]}), json!({"phase": "Completed", "startTime": at(-90_000)}));
    let of = |recheck: serde_json::Value| {
        let record = json!({
            "nodeName": "edge-7", "phase": "Successful", "recheck": recheck,
            "actionFlow": [{"action": "Pull", "status": "True", "time": at(-12 * 86_400)}],
        });
        let why = judge_facts(&with(over(), Some(serde_json::from_value(record).unwrap())), NOW);
        (why.points.last().unwrap().text.clone(), why.next)
    };
    let verify = "kubectl prepull verify web asks the nodes whether their images are still there";
    let began = "job web has succeeded on it: pulled 12d ago";
    assert_eq!(of(json!(null)), (format!("{began}, not checked since"), verify.to_owned()));
    let (text, next) = of(json!({"checkedTime": at(-7_200)}));
    assert_eq!(text, format!("{began}, and its images were still there 2h ago"));
    assert!(next.starts_with("nothing is in its way"), "{next}");
    let (text, next) = of(json!({"checkedTime": at(-7_200), "notCheckedReason": "offline"}));
    assert_eq!(text, format!("{began}, checked 2h ago, and not checked by the last re-check: offline"));
    assert_eq!(next, verify);
}

#[test]
fn only_possible_jobs_count() {
    let of = |template: serde_json::Value, desired: u32, listed: &[&str]| {
        let records: Vec<_> =
            listed.iter().map(|name| json!({"nodeName": name, "phase": "Failure"})).collect();
        let status = json!({"phase": "Failure", "summary": {"desired": desired}, "nodeStatus": records});
        may_have_had(&job(template, status), "edge-7", well().node.unwrap().as_ref())
    };
    let selects = |site: &str| json!({"labelSelector": {"matchLabels": {"site": site}}});
    for (template, desired, listed, expected) in [
        // The status lists all nodes.
        (selects("a"), 1, &["edge-8"][..], false),
        (selects("a"), 0, &[], false),
        (selects("a"), 2, &["edge-8", "edge-7"], true),
        (selects("b"), 1, &["edge-7"], true),
        // It lists a part of them.
        (selects("a"), 300, &["edge-8"], true),
        (selects("b"), 300, &["edge-8"], false),
        (selects("b"), 300, &["edge-7"], true),
        (json!({"nodeNames": ["edge-8"]}), 300, &["edge-8"], false),
        (json!({"nodeNames": ["edge-7"]}), 300, &["edge-8"], true),
    ] {
        assert_eq!(of(template.clone(), desired, listed), expected, "{template} {desired} {listed:?}");
    }
    let large = job(selects("a"), json!({"phase": "Failure", "summary": {"desired": 300}}));
    assert!(may_have_had(&large, "edge-7", None), "the labels aren't known");
}
