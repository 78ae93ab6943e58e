use serde_json::{Value, json};

use super::super::tag_requests::{next_round, tag_request};
use super::super::*;
use crate::kruise::{TagRequest, rules};
use crate::shared::objects::ObjectId;

fn request_of(spec: Value, job: &str) -> TagRequest {
    let uid = JobUid(job.to_owned());
    let id = ObjectId { namespace: "team".to_owned(), name: "job".to_owned(), uid };
    tag_request(&id, &rules::pull_job(&serde_json::from_value(spec).unwrap()).unwrap())
}

#[test]
fn a_tag_request_has_its_jobs_terms() {
    let request = request_of(
        json!({
            "image": "docker.io/library/nginx:1", "pullSecrets": ["a", "b"], "imagePullPolicy": "Always",
            "pullPolicy": {"timeoutSeconds": 7, "backoffLimit": 2}, "sandboxConfig": {"labels": {"x": "y"}},
        }),
        "u",
    );
    let limits = &request.limits;
    assert_eq!((request.key.image.as_str(), request.key.tag.as_str()), ("nginx", "1"));
    assert_eq!((limits.timeout_seconds, limits.backoff_limit), (Some(7), Some(2)));
    assert_eq!(request.image_pull_policy.as_deref(), Some("Always"));
    let secrets: Vec<_> = request.secrets.iter().map(|s| format!("{}/{}", s.namespace, s.name)).collect();
    assert_eq!(secrets, ["team/a", "team/b"]);
    assert_eq!(serde_json::to_value(&request.sandbox).unwrap(), json!({"labels": {"x": "y"}}));
    let owner = json!({"apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob", "name": "job", "namespace": "team", "uid": "u"});
    assert_eq!(serde_json::to_value(&request.owner).unwrap(), owner);
}

/// A policy, the time to live without its jitter, and the deadline of a tag.
type Limits = (Value, i32, Option<i64>);

#[test]
fn each_jobs_tags_expire_with_own_jitter() {
    let cases: [Limits; 8] = [
        (json!({}), 600 * 3, None),
        (json!({"pullPolicy": {"timeoutSeconds": 10, "backoffLimit": 0}}), 0, None),
        (json!({"completionPolicy": {"activeDeadlineSeconds": 1000}}), 1000, Some(1000)),
        (
            json!({"completionPolicy": {"activeDeadlineSeconds": 1000, "ttlSecondsAfterFinished": 5}}),
            5,
            Some(1000),
        ),
        (json!({"completionPolicy": {"activeDeadlineSeconds": i64::MAX}}), i32::MAX - 600, Some(i64::MAX)),
        (json!({"pullPolicy": {"timeoutSeconds": i32::MAX, "backoffLimit": i32::MAX}}), i32::MAX - 600, None),
        (json!({"completionPolicy": {"type": "Never"}}), 86_400 - 600 - 600, Some(1800)),
        (
            json!({"completionPolicy": {"type": "Never"}, "pullPolicy": {"timeoutSeconds": 2000}}),
            86_400 - 600 - 600,
            Some(2000),
        ),
    ];
    for (mut spec, base, deadline) in cases {
        spec["image"] = json!("nginx");
        let never = spec["completionPolicy"]["type"] == "Never";
        let mut ttls = HashSet::new();
        for job in 0..200 {
            let limits = request_of(spec.clone(), &job.to_string()).limits;
            assert_eq!(limits.active_deadline_seconds, deadline, "{spec}");
            let ttl = limits.ttl_seconds_after_finished.unwrap();
            let jitter = ttl.checked_sub(base + 600).unwrap();
            assert!((0..=if never { 1200 } else { 300 }).contains(&jitter), "{spec}: {ttl}");
            ttls.insert(ttl);
        }
        assert!(ttls.len() > 50 || base > 1_000_000, "{spec}: {ttls:?}");
        assert_eq!(request_of(spec.clone(), "u"), request_of(spec.clone(), "u"));
    }
}

#[test]
fn rounds_are_a_jittered_day_apart() {
    let ended = Timestamp::from_second(1_800_000_000).unwrap();
    let (job, other) = (JobUid("u".to_owned()), JobUid("v".to_owned()));
    let mut waits = HashSet::new();
    for node in 0..10_000 {
        let node = NodeName(format!("n{node}"));
        let wait = next_round(&job, &node, ended).duration_since(ended).as_secs();
        assert!((86_400 - 600..=86_400 + 600).contains(&wait), "{wait}");
        assert_eq!(next_round(&job, &node, ended).duration_since(ended).as_secs(), wait);
        waits.insert(wait);
    }
    assert!(waits.len() > 1_000, "{}", waits.len());
    let ends = [waits.iter().min(), waits.iter().max()];
    assert_eq!(ends, [Some(&(86_400 - 600)), Some(&(86_400 + 600))]);
    let node = NodeName::from("n0");
    let later = next_round(&job, &node, Timestamp::from_second(1_800_000_001).unwrap());
    assert_ne!(next_round(&job, &node, ended), next_round(&other, &node, ended));
    assert_ne!(later.duration_since(next_round(&job, &node, ended)).as_secs(), 1);
}
