//! The tag that a job requests in its NodeImages, the time of its rounds, and the names of children.
//!
//! What Kruise draws at random is a hash here, the same after each restart of cloudcore: a job that has not changed
//! writes nothing.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use prepull_api::crd::kruise::{GROUP, ImageTagPullPolicy, SecretObject, VERSION};
use prepull_api::enroll::hex;
use prepull_api::task::{JobUid, NodeName};
use ring::digest::{SHA256, digest};

use crate::kruise::TagRequest;
use crate::kruise::rules::{Completion, ValidPullJob};
use crate::shared::events::ObjectKind;
use crate::shared::objects::ObjectId;

/// Seconds that a tag of an Always job is kept beyond the time that the job may take, as in Kruise.
const ALWAYS_TTL: i64 = 600;
/// Seconds of jitter added to [`ALWAYS_TTL`], so that a fleet's tags are not all removed at once, as in Kruise.
const ALWAYS_TTL_JITTER: u64 = 300;
/// Seconds from one round of a Never job to the next, as in Kruise.
const ROUND: i64 = 24 * 3600;
/// Seconds by which a round may come sooner or later than [`ROUND`], as in Kruise.
const ROUND_JITTER: u64 = 600;
/// Seconds for all tries of one round of a Never job, unless one try may take longer, as in Kruise.
const NEVER_DEADLINE: i64 = 1800;

pub(super) fn tag_request(id: &ObjectId, job: &ValidPullJob) -> TagRequest {
    let ValidPullJob { image, template } = job;
    let (ttl, deadline) = match template.completion {
        Completion::Always { deadline, ttl } => {
            let tries = i64::from(template.timeout) * i64::from(template.backoff_limit);
            let base = ttl.or(deadline).map_or(tries, seconds);
            let extra = ALWAYS_TTL + jitter(&[&id.uid.0], ALWAYS_TTL_JITTER);
            (base.saturating_add(extra), deadline.map(seconds))
        }
        Completion::Never => (round_length(&[&id.uid.0]), Some(NEVER_DEADLINE.max(template.timeout.into()))),
    };
    let secret = |name: &String| SecretObject { namespace: id.namespace.clone(), name: name.clone() };
    TagRequest {
        owner: ObjectReference {
            api_version: Some(format!("{GROUP}/{VERSION}")),
            kind: Some(ObjectKind::ImagePullJob.as_str().to_owned()),
            name: Some(id.name.clone()),
            namespace: Some(id.namespace.clone()),
            uid: Some(id.uid.0.clone()),
            ..ObjectReference::default()
        },
        key: image.clone(),
        limits: ImageTagPullPolicy {
            timeout_seconds: Some(saturating_i32(template.timeout.into())),
            backoff_limit: Some(saturating_i32(template.backoff_limit.into())),
            ttl_seconds_after_finished: Some(saturating_i32(ttl)),
            active_deadline_seconds: deadline,
        },
        image_pull_policy: Some(template.policy.to_string()),
        secrets: template.secrets.iter().map(secret).collect(),
        sandbox: template.sandbox.clone(),
    }
}

/// When a Never job's next round begins on a node, after a round that ended at `ended`.
pub(super) fn next_round(job: &JobUid, node: &NodeName, ended: Timestamp) -> Timestamp {
    let wait = round_length(&[&job.0, &node.0, &ended.to_string()]);
    ended.checked_add(Duration::from_secs(wait.unsigned_abs())).unwrap_or(Timestamp::MAX)
}

/// The name of a list's child for an image: the same after each restart, valid as a name, and different for each image.
pub(super) fn child_name(list: &str, image: &str) -> String {
    /// Bytes that a Kubernetes name may have.
    const LONGEST: usize = 253;
    let hash = hex(&digest(&SHA256, image.as_bytes()).as_ref()[..5]);
    // Names are ASCII. A name that is cut may end in a dot, after which no dash may follow.
    let part = list.get(..LONGEST - 1 - hash.len()).map_or(list, |cut| cut.trim_end_matches(['-', '.']));
    format!("{part}-{hash}")
}

/// The seconds of a round, jitter included.
fn round_length(seed: &[&str]) -> i64 {
    ROUND - ROUND_JITTER.cast_signed() + jitter(seed, 2 * ROUND_JITTER)
}

/// A number between 0 and `most` that depends on nothing but the seed.
fn jitter(seed: &[&str], most: u64) -> i64 {
    let hash = digest(&SHA256, seed.join("\n").as_bytes());
    let number = hash.as_ref().iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte));
    i64::try_from(number % (most + 1)).unwrap_or_default()
}

fn seconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_secs()).unwrap_or(i64::MAX)
}

fn saturating_i32(number: i64) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}
