//! The rules of a NodeImage's tags. A tag that breaks one does not keep the others from being pulled.

use std::collections::HashSet;
use std::time::Duration;

use prepull_api::crd::kruise::{ImageSpec, ImageTagPullPolicy, ImageTagSpec};
use prepull_api::image::{NormalizedReference, Reference};
use prepull_api::task::PullPolicy;

use super::{backoff_limit_of, duration, policy_of, timeout_of};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::kruise) struct ValidTag {
    /// The image with its tag, or with its digest if the tag is one.
    pub(in crate::kruise) reference: NormalizedReference,
    /// Whether to pull an image that is on the node already.
    pub(in crate::kruise) policy: PullPolicy,
    /// `attempt` of the task for this version: one more than the version.
    pub(in crate::kruise) attempt: u32,
    /// How long one try may take.
    pub(in crate::kruise) timeout: Duration,
    /// Tries after the first one.
    pub(in crate::kruise) retries: u32,
    /// How long all tries together may take; not limited if `None`.
    pub(in crate::kruise) active_deadline: Option<Duration>,
    /// From its end to its removal.
    pub(in crate::kruise) ttl: Duration,
}

/// Validates the tags of one image, in their order. Of two tags with the same name neither is valid: their terms may differ.
pub(in crate::kruise) fn image_rules(image_name: &str, spec: &ImageSpec) -> Vec<Result<ValidTag, String>> {
    let mut seen = HashSet::new();
    let twice: HashSet<&str> =
        spec.tags.iter().map(|tag| tag.tag.as_str()).filter(|tag| !seen.insert(*tag)).collect();
    let of_tag = |tag: &ImageTagSpec| {
        if !tag.tag.is_empty() && twice.contains(tag.tag.as_str()) {
            return Err(format!("duplicated tag {} for image {image_name}", tag.tag));
        }
        tag_rules(image_name, tag)
    };
    spec.tags.iter().map(of_tag).collect()
}

pub(super) fn tag_rules(image_name: &str, spec: &ImageTagSpec) -> Result<ValidTag, String> {
    // All fields are named, so that none is forgotten here.
    let ImageTagSpec { tag, created_at: _, pull_policy, owner_references: _, version, image_pull_policy } =
        spec;
    if image_name.is_empty() {
        return Err("image name can not be empty".to_owned());
    }
    if tag.is_empty() {
        return Err(format!("tag for image {image_name} can not be empty"));
    }
    let full_name = format!("{image_name}/{tag}");
    if *version < 0 {
        return Err(format!("version for {full_name} can not be less than 0"));
    }
    let Some(attempt) = u32::try_from(*version).ok().and_then(|version| version.checked_add(1)) else {
        return Err(format!("version for {full_name} can not be more than {}", u32::MAX - 1));
    };
    let Some(limits) = pull_policy else {
        return Err(format!("pullPolicy field for {full_name} must set"));
    };
    let ImageTagPullPolicy {
        timeout_seconds,
        backoff_limit,
        ttl_seconds_after_finished,
        active_deadline_seconds,
    } = limits;
    let Some(ttl) = *ttl_seconds_after_finished else {
        return Err(format!("pullPolicy.ttlSecondsAfterFinished for {full_name} must set"));
    };
    let field = |name: &str| format!("pullPolicy.{name} for {full_name}");
    let active_deadline = match *active_deadline_seconds {
        Some(seconds) if seconds < 1 => {
            return Err(format!("{} must be at least 1", field("activeDeadlineSeconds")));
        }
        seconds => seconds.map(|seconds| Duration::from_secs(seconds.unsigned_abs())),
    };
    Ok(ValidTag {
        reference: reference(image_name, tag)?,
        policy: policy_of(image_pull_policy.as_deref(), &format!("imagePullPolicy for {full_name}"))?,
        attempt,
        timeout: Duration::from_secs(timeout_of(*timeout_seconds, &field("timeoutSeconds"))?.into()),
        retries: backoff_limit_of(*backoff_limit),
        active_deadline,
        ttl: duration(ttl, &field("ttlSecondsAfterFinished"))?,
    })
}

fn reference(image_name: &str, tag: &str) -> Result<NormalizedReference, String> {
    let invalid = |error: String| format!("invalid image {image_name}: {error}");
    let name = Reference::parse(image_name).map_err(|error| invalid(error.to_string()))?;
    if name.tag().is_some() || name.digest().is_some() {
        return Err(invalid("it has a tag of its own: write the name here, and the tag in tags".to_owned()));
    }
    // No tag has a colon, every digest has one.
    let (tag, digest) = if tag.contains(':') { (None, Some(tag)) } else { (Some(tag), None) };
    Reference::from_parts(name.registry(), name.repository(), tag, digest)
        .map(|reference| reference.normalized())
        .map_err(|error| invalid(error.to_string()))
}
