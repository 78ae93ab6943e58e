//! What a job wants in each of its NodeImages, and what is drawn by lot. The lot is a hash, so that it falls the same
//! in each life of cloudcore: a job that did not change writes nothing.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use prepull_api::crd::kruise::{GROUP, ImageTagPullPolicy, SecretObject, VERSION};
use prepull_api::task::{JobUid, NodeName};
use ring::digest::{SHA256, digest};

use crate::kruise::Wish;
use crate::kruise::rules::{Completion, ValidPullJob};
use crate::shared::events::ObjectKind;
use crate::shared::objects::ObjectId;

/// What a tag of an Always job is kept beyond the time that the job may take, in seconds, and how much longer by lot
/// at most, so that a fleet's tags do not go at the same time: Kruise's.
const TTL_ALWAYS: (i64, u64) = (600, 300);
/// From one round of a Never job to the next, in seconds, and how much sooner or later by lot: Kruise's.
const ROUND: (i64, u64) = (24 * 3600, 600);
/// All tries of one round of a Never job, in seconds, unless one try takes longer: Kruise's.
const DEADLINE_NEVER: i64 = 1800;

pub(super) fn wish(id: &ObjectId, job: &ValidPullJob) -> Wish {
    let ValidPullJob { image: (image, tag), template } = job;
    let (ttl, deadline) = match template.completion {
        Completion::Always { deadline, ttl } => {
            let tries = i64::from(template.timeout) * i64::from(template.backoff_limit);
            let base = ttl.or(deadline).map_or(tries, seconds);
            (
                base.saturating_add(TTL_ALWAYS.0).saturating_add(lot(&[&id.uid.0], TTL_ALWAYS.1)),
                deadline.map(seconds),
            )
        }
        Completion::Never => (around(ROUND, &[&id.uid.0]), Some(DEADLINE_NEVER.max(template.timeout.into()))),
    };
    let secret = |name: &String| SecretObject { namespace: id.namespace.clone(), name: name.clone() };
    Wish {
        owner: ObjectReference {
            api_version: Some(format!("{GROUP}/{VERSION}")),
            kind: Some(ObjectKind::ImagePullJob.as_str().to_owned()),
            name: Some(id.name.clone()),
            namespace: Some(id.namespace.clone()),
            uid: Some(id.uid.0.clone()),
            ..ObjectReference::default()
        },
        image: image.clone(),
        tag: tag.clone(),
        limits: ImageTagPullPolicy {
            timeout_seconds: Some(int(template.timeout.into())),
            backoff_limit: Some(int(template.backoff_limit.into())),
            ttl_seconds_after_finished: Some(int(ttl)),
            active_deadline_seconds: deadline,
        },
        image_pull_policy: Some(template.policy.to_string()),
        secrets: template.secrets.iter().map(secret).collect(),
        sandbox: template.sandbox.clone(),
    }
}

/// When a node that ended then is asked once more.
pub(super) fn next_round(job: &JobUid, node: &NodeName, ended: Timestamp) -> Timestamp {
    let wait = around(ROUND, &[&job.0, &node.0, &ended.to_string()]);
    ended.checked_add(Duration::from_secs(wait.unsigned_abs())).unwrap_or(Timestamp::MAX)
}

/// The name of the child for an image: the same in each life, valid as a name, and another one for each image.
pub(super) fn child_name(list: &str, image: &str) -> String {
    /// Bytes of a Kubernetes name.
    const LONGEST: usize = 253;
    let hash = digest(&SHA256, image.as_bytes());
    let hash = hash.as_ref().iter().take(5).fold(String::new(), |text, byte| text + &format!("{byte:02x}"));
    // Names are ASCII; where this one is cut, a dash or a dot may be last, which a dash must not follow.
    let part = list.get(..LONGEST - 1 - hash.len()).map_or(list, |cut| cut.trim_end_matches(['-', '.']));
    format!("{part}-{hash}")
}

/// Something between `middle - spread` and `middle + spread`.
fn around((middle, spread): (i64, u64), parts: &[&str]) -> i64 {
    middle - i64::try_from(spread).unwrap_or_default() + lot(parts, 2 * spread)
}

/// Something between 0 and `most`.
fn lot(parts: &[&str], most: u64) -> i64 {
    let hash = digest(&SHA256, parts.join("\n").as_bytes());
    let number = hash.as_ref().iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte));
    i64::try_from(number % (most + 1)).unwrap_or_default()
}

fn seconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_secs()).unwrap_or(i64::MAX)
}

fn int(number: i64) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}
