use serde_json::{Value, json};

use super::super::wishes::{next_round, wish};
use super::super::*;
use crate::kruise::{Wish, rules};
use crate::shared::objects::ObjectId;

fn wish_of(spec: Value, job: &str) -> Wish {
    let uid = JobUid(job.to_owned());
    let id = ObjectId { namespace: "team".to_owned(), name: "job".to_owned(), uid };
    wish(&id, &rules::pull_job(&serde_json::from_value(spec).unwrap()).unwrap())
}

#[test]
fn a_wish_says_what_the_job_says() {
    let wish = wish_of(
        json!({
            "image": "docker.io/library/nginx:1", "pullSecrets": ["a", "b"], "imagePullPolicy": "Always",
            "pullPolicy": {"timeoutSeconds": 7, "backoffLimit": 2}, "sandboxConfig": {"labels": {"x": "y"}},
        }),
        "u",
    );
    let limits = &wish.limits;
    assert_eq!((wish.image.as_str(), wish.tag.as_str()), ("nginx", "1"));
    assert_eq!((limits.timeout_seconds, limits.backoff_limit), (Some(7), Some(2)));
    assert_eq!(wish.image_pull_policy.as_deref(), Some("Always"));
    let secrets: Vec<_> = wish.secrets.iter().map(|s| format!("{}/{}", s.namespace, s.name)).collect();
    assert_eq!(secrets, ["team/a", "team/b"]);
    assert_eq!(serde_json::to_value(&wish.sandbox).unwrap(), json!({"labels": {"x": "y"}}));
    let owner = json!({"apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob", "name": "job", "namespace": "team", "uid": "u"});
    assert_eq!(serde_json::to_value(&wish.owner).unwrap(), owner);
}

/// A policy, the time to live without its lot, and the deadline of a tag.
type Limits = (Value, i32, Option<i64>);

#[test]
fn tags_live_beyond_their_jobs_and_not_all_to_the_same_second() {
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
            let limits = wish_of(spec.clone(), &job.to_string()).limits;
            assert_eq!(limits.active_deadline_seconds, deadline, "{spec}");
            let ttl = limits.ttl_seconds_after_finished.unwrap();
            let lot = ttl.checked_sub(base + 600).unwrap();
            assert!((0..=if never { 1200 } else { 300 }).contains(&lot), "{spec}: {ttl}");
            ttls.insert(ttl);
        }
        assert!(ttls.len() > 50 || base > 1_000_000, "{spec}: {ttls:?}");
        assert_eq!(wish_of(spec.clone(), "u"), wish_of(spec.clone(), "u"));
    }
}

#[test]
fn rounds_are_a_day_apart_give_or_take_ten_minutes() {
    let ended = Timestamp::from_second(1_800_000_000).unwrap();
    let (job, other) = (JobUid("u".to_owned()), JobUid("v".to_owned()));
    let mut waits = HashSet::new();
    for node in 0..500 {
        let node = NodeName(format!("n{node}"));
        let wait = next_round(&job, &node, ended).duration_since(ended).as_secs();
        assert!((86_400 - 600..=86_400 + 600).contains(&wait), "{wait}");
        assert_eq!(next_round(&job, &node, ended).duration_since(ended).as_secs(), wait);
        waits.insert(wait);
    }
    assert!(waits.len() > 300, "{}", waits.len());
    let node = NodeName::from("n0");
    let later = next_round(&job, &node, Timestamp::from_second(1_800_000_001).unwrap());
    assert_ne!(next_round(&job, &node, ended), next_round(&other, &node, ended));
    assert_ne!(later.duration_since(next_round(&job, &node, ended)).as_secs(), 1);
}
