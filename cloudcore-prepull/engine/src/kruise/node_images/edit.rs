//! What a NodeImage's spec is to be, given what it is: wishes come in, what has served its time goes out.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::crd::kruise::{
    GROUP, ImageSpec, ImageTagSpec, MAX_IMAGES, MAX_TAGS, NodeImageSpec, NodeImageStatus,
};
use prepull_api::task::JobUid;

use super::super::{Liveness, Wish};
use crate::shared::events::ObjectKind;

/// How one wish stands against a spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// There is nothing to do for it.
    None,
    /// The spec was changed.
    Changed,
    /// The NodeImage is full.
    Full {
        /// What the job wanted before was taken out all the same.
        disowned: bool,
    },
}

/// Writes a wish into a spec.
pub(super) fn apply(
    spec: &mut NodeImageSpec,
    status: &NodeImageStatus,
    wish: &Wish,
    again: bool,
    now: Timestamp,
) -> Effect {
    let mut effect = disown_others(spec, wish);
    let full = Effect::Full { disowned: effect == Effect::Changed };
    if !spec.images.contains_key(&wish.image) && spec.images.len() >= MAX_IMAGES {
        return full;
    }
    let image = spec.images.entry(wish.image.clone()).or_default();
    let has_room = image.tags.len() < MAX_TAGS;
    let ended = |version| ended_at(status, &wish.image, &wish.tag, version).is_some();
    match image.tags.iter_mut().find(|tag| tag.tag == wish.tag) {
        Some(tag) if owns(tag, &wish.owner) => {
            let ended = ended(tag.version);
            if ended && again {
                tag.version = tag.version.saturating_add(1);
                tag.created_at = Some(Time(now));
                set_terms(tag, wish);
                set_image_terms(image, wish);
                return Effect::Changed;
            }
            // What has ended is not changed any more, and of several jobs the last one's terms are in force.
            let is_last = tag.owner_references.last().is_some_and(|last| last.uid == wish.owner.uid);
            if !ended && is_last && (set_terms(tag, wish) | set_image_terms(image, wish)) {
                effect = Effect::Changed;
            }
            effect
        }
        Some(tag) => {
            // A further round for the newcomer: what was pulled before may have been pulled on other terms.
            tag.version = tag.version.saturating_add(1);
            tag.owner_references.push(wish.owner.clone());
            tag.created_at = Some(Time(now));
            set_terms(tag, wish);
            set_image_terms(image, wish);
            Effect::Changed
        }
        None if !has_room => full,
        None => {
            // Above that of a tag of this name whose status has not been cleared yet.
            let before = find(status, &wish.image, &wish.tag).map(|tag| tag.version);
            let mut tag = ImageTagSpec {
                tag: wish.tag.clone(),
                created_at: Some(Time(now)),
                owner_references: vec![wish.owner.clone()],
                version: before.map_or(0, |version| version.saturating_add(1)),
                ..ImageTagSpec::default()
            };
            set_terms(&mut tag, wish);
            image.tags.push(tag);
            image.tags.sort_by(|a, b| a.tag.cmp(&b.tag));
            set_image_terms(image, wish);
            Effect::Changed
        }
    }
}

fn set_terms(tag: &mut ImageTagSpec, wish: &Wish) -> bool {
    let differs =
        tag.pull_policy.as_ref() != Some(&wish.limits) || tag.image_pull_policy != wish.image_pull_policy;
    if differs {
        tag.pull_policy = Some(wish.limits.clone());
        tag.image_pull_policy.clone_from(&wish.image_pull_policy);
    }
    differs
}

fn set_image_terms(image: &mut ImageSpec, wish: &Wish) -> bool {
    let new: Vec<_> =
        wish.secrets.iter().filter(|secret| !image.pull_secrets.contains(secret)).cloned().collect();
    let differs = !new.is_empty() || image.sandbox_config != wish.sandbox;
    image.pull_secrets.extend(new);
    image.sandbox_config.clone_from(&wish.sandbox);
    differs
}

/// A job wants one tag: what it wanted before its image was changed is not wanted any more.
fn disown_others(spec: &mut NodeImageSpec, wish: &Wish) -> Effect {
    let mut changed = false;
    for (name, image) in &mut spec.images {
        image.tags.retain_mut(|tag| {
            if (*name == wish.image && tag.tag == wish.tag) || !owns(tag, &wish.owner) {
                return true;
            }
            changed = true;
            tag.owner_references.retain(|owner| owner.uid != wish.owner.uid);
            !tag.owner_references.is_empty()
        });
    }
    spec.images.retain(|_, image| !image.tags.is_empty());
    if changed { Effect::Changed } else { Effect::None }
}

/// Takes out what is over. Returns when there will be more to take out, though a job may end before that.
pub(super) fn prune(
    spec: &mut NodeImageSpec,
    status: &NodeImageStatus,
    liveness: &dyn Fn(&JobUid) -> Liveness,
    now: Timestamp,
) -> (bool, Option<Timestamp>) {
    let (mut changed, mut next) = (false, None::<Timestamp>);
    for (name, image) in &mut spec.images {
        image.tags.retain_mut(|tag| {
            let before = tag.owner_references.len();
            tag.owner_references.retain(|owner| {
                !is_job(owner) || job_of(owner).is_some_and(|job| liveness(&job) != Liveness::Gone)
            });
            let left = tag.owner_references.len();
            changed |= left != before;
            if left == 0 && before > 0 {
                return false;
            }
            let is_active = |owner: &ObjectReference| {
                is_job(owner) && job_of(owner).is_some_and(|job| liveness(&job) == Liveness::Active)
            };
            if tag.owner_references.iter().any(is_active) {
                return true;
            }
            let Some(due) = expires(name, tag, status) else { return true };
            if due <= now {
                changed = true;
                return false;
            }
            next = Some(next.map_or(due, |next| next.min(due)));
            true
        });
    }
    if changed {
        spec.images.retain(|_, image| !image.tags.is_empty());
    }
    (changed, next)
}

/// Whether nobody waits for a tag any more: it belongs to jobs, and all of them are over.
pub(super) fn is_over(tag: &ImageTagSpec, liveness: &dyn Fn(&JobUid) -> Liveness) -> bool {
    let is_over = |owner: &ObjectReference| {
        is_job(owner) && job_of(owner).is_some_and(|job| liveness(&job) == Liveness::Over)
    };
    !tag.owner_references.is_empty() && tag.owner_references.iter().all(is_over)
}

/// When a tag that has ended has served its time.
fn expires(name: &str, tag: &ImageTagSpec, status: &NodeImageStatus) -> Option<Timestamp> {
    let ttl = tag.pull_policy.as_ref()?.ttl_seconds_after_finished?;
    let ended = ended_at(status, name, &tag.tag, tag.version)?;
    ended.checked_add(Duration::from_secs(u64::try_from(ttl).unwrap_or(0))).ok()
}

/// When a tag succeeded or failed in this version.
pub(super) fn ended_at(status: &NodeImageStatus, image: &str, tag: &str, version: i64) -> Option<Timestamp> {
    let found = find(status, image, tag).filter(|found| found.has_ended(version))?;
    found.completion_time.as_ref().map(|time| time.0)
}

/// The status of a tag, of whatever version.
pub(super) fn find<'a>(
    status: &'a NodeImageStatus,
    image: &str,
    tag: &str,
) -> Option<&'a prepull_api::crd::kruise::ImageTagStatus> {
    status.image_statuses.get(image)?.tags.iter().find(|found| found.tag == tag)
}

fn owns(tag: &ImageTagSpec, owner: &ObjectReference) -> bool {
    tag.owner_references.iter().any(|known| known.uid == owner.uid)
}

/// Whether an owner is an ImagePullJob. Owners of other kinds are somebody else's affair, and stay.
pub(super) fn is_job(owner: &ObjectReference) -> bool {
    let group =
        owner.api_version.as_deref().and_then(|version| version.split_once('/')).map(|(group, _)| group);
    group == Some(GROUP) && owner.kind.as_deref() == Some(ObjectKind::ImagePullJob.as_str())
}

/// The job that an owner is.
pub(super) fn job_of(owner: &ObjectReference) -> Option<JobUid> {
    owner.uid.clone().map(JobUid)
}
