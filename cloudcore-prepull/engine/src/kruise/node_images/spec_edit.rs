//! Edits of a NodeImage's spec: tags that jobs request are added, and tags that have served their time are removed.

use std::collections::HashSet;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::crd::kruise::{
    ImageSpec, ImageTagSpec, MAX_IMAGES, MAX_TAGS, NodeImageSpec, NodeImageStatus, SecretObject,
};
use prepull_api::task::JobUid;

use super::Context;
use super::compact::CompactNodeImage;
use super::owners::{is_in_round, is_job, job_of, jobs_of, namespace, round_namespace};
use super::requests::QueuedRequest;
use super::shares::make_room;
use super::status::{ended_at, find_tag_status};
use crate::kruise::rules::MAX_SECRETS;
use crate::kruise::{Liveness, TagKey, TagRequest};

/// Secrets that stay where jobs have left them, the first ones of each image with a tag that a person has written: that tag may
/// need them, and they may be the person's.
const SPARE_SECRETS: usize = MAX_SECRETS;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EditOutcome {
    Unchanged,
    Changed,
    /// The tag is in a round of another namespace's jobs: apply the request once that round has ended.
    Deferred {
        /// Whether the tags that the job requested before were still removed.
        has_disowned: bool,
    },
    /// The NodeImage has no room for the tag.
    Full {
        /// Whether the tags that the job requested before were still removed.
        has_disowned: bool,
    },
}

/// What the API server has of a NodeImage's tags at the time of an edit, and which of them are being pulled.
#[derive(Clone, Copy)]
pub(super) struct StoredTags<'a> {
    pub(super) object: &'a CompactNodeImage,
    pub(super) status: &'a NodeImageStatus,
    pub(super) has_begun: &'a dyn Fn(&TagKey) -> bool,
    pub(super) now: Timestamp,
}

/// Writes a request into a spec.
pub(super) fn apply_request(
    spec: &mut NodeImageSpec,
    StoredTags { object, status, has_begun, now }: StoredTags<'_>,
    QueuedRequest { request, new_round, .. }: &QueuedRequest,
) -> EditOutcome {
    let has_disowned = disown_others(spec, request);
    let full = EditOutcome::Full { has_disowned };
    let key = &request.key;
    let has_room = |spec: &NodeImageSpec| match spec.images.get(&key.image) {
        Some(image) => image.tags.len() < MAX_TAGS || image.tags.iter().any(|tag| tag.tag == key.tag),
        None => spec.images.len() < MAX_IMAGES,
    };
    if !make_room(spec, has_begun, namespace(&request.owner), has_room) {
        return full;
    }
    let image = spec.images.entry(key.image.clone()).or_default();
    match image.tags.iter_mut().find(|tag| tag.tag == key.tag) {
        Some(tag) if has_owner(tag, &request.owner) && is_in_round(&tag.owner_references, &request.owner) => {
            let has_ended = ended_at(status, &key.image, &key.tag, tag.version).is_some();
            if has_ended && *new_round {
                begin_round(tag, request, now);
                set_image_terms(image, request);
                return EditOutcome::Changed;
            }
            // A tag that has ended is not changed any more, and of several jobs the last one's terms are in force.
            let is_last = tag.owner_references.last().is_some_and(|last| last.uid == request.owner.uid);
            let has_changed =
                !has_ended && is_last && (set_tag_terms(tag, request) | set_image_terms(image, request));
            if has_changed || has_disowned { EditOutcome::Changed } else { EditOutcome::Unchanged }
        }
        Some(tag)
            if round_namespace(&tag.owner_references).is_some()
                && !is_in_round(&tag.owner_references, &request.owner)
                && ended_at(status, &key.image, &key.tag, tag.version).is_none() =>
        {
            EditOutcome::Deferred { has_disowned }
        }
        Some(tag) => {
            // A new round for the new owner: what was pulled before may have been pulled on other terms, and with the
            // secrets of another namespace.
            tag.owner_references.retain(|owner| owner.uid != request.owner.uid);
            tag.owner_references.push(request.owner.clone());
            begin_round(tag, request, now);
            set_image_terms(image, request);
            EditOutcome::Changed
        }
        None => {
            // Above the version of a removed tag of this name. It may still be in the status. Or this edit removes it, and the
            // node still has its task.
            let in_status = find_tag_status(status, &key.image, &key.tag).map(|tag| tag.version);
            let before = in_status.max(object.tag(key).map(|(_, tag)| tag.version));
            let mut tag = ImageTagSpec {
                tag: key.tag.clone(),
                created_at: Some(Time(now)),
                owner_references: vec![request.owner.clone()],
                version: before.map_or(0, |version| version.saturating_add(1)),
                ..ImageTagSpec::default()
            };
            set_tag_terms(&mut tag, request);
            image.tags.push(tag);
            image.tags.sort_by(|a, b| a.tag.cmp(&b.tag));
            set_image_terms(image, request);
            EditOutcome::Changed
        }
    }
}

/// Whether the spec has the tag that a job requests, for that job.
pub(super) fn is_requested(spec: &NodeImageSpec, request: &TagRequest) -> bool {
    let image = spec.images.get(&request.key.image);
    let mut tags = image.into_iter().flat_map(|image| &image.tags);
    tags.any(|tag| tag.tag == request.key.tag && has_owner(tag, &request.owner))
}

/// Has the tag pulled once more.
fn begin_round(tag: &mut ImageTagSpec, request: &TagRequest, now: Timestamp) {
    tag.version = tag.version.saturating_add(1);
    tag.created_at = Some(Time(now));
    set_tag_terms(tag, request);
}

fn set_tag_terms(tag: &mut ImageTagSpec, request: &TagRequest) -> bool {
    let differs = tag.pull_policy.as_ref() != Some(&request.limits)
        || tag.image_pull_policy != request.image_pull_policy;
    if differs {
        tag.pull_policy = Some(request.limits.clone());
        tag.image_pull_policy.clone_from(&request.image_pull_policy);
    }
    differs
}

fn set_image_terms(image: &mut ImageSpec, request: &TagRequest) -> bool {
    let missing = |secret: &&_| !image.pull_secrets.contains(secret);
    let new: Vec<_> = request.secrets.iter().filter(missing).cloned().collect();
    let differs = !new.is_empty() || image.sandbox_config != request.sandbox;
    image.pull_secrets.extend(new);
    image.sandbox_config.clone_from(&request.sandbox);
    differs
}

/// Removes the job as an owner of all other tags: a job has one tag, and its image may have been changed. Returns whether
/// there were any.
fn disown_others(spec: &mut NodeImageSpec, request: &TagRequest) -> bool {
    let mut has_changed = false;
    for (name, image) in &mut spec.images {
        image.tags.retain_mut(|tag| {
            let is_requested = *name == request.key.image && tag.tag == request.key.tag;
            if is_requested || !has_owner(tag, &request.owner) {
                return true;
            }
            has_changed = true;
            tag.owner_references.retain(|owner| owner.uid != request.owner.uid);
            !tag.owner_references.is_empty()
        });
    }
    spec.images.retain(|_, image| !image.tags.is_empty());
    has_changed
}

/// Removes deleted owners, tags without owners, and expired tags. Returns whether there were any, and when the next tag
/// expires; a job that finishes may bring that forward.
pub(super) fn prune_tags(
    spec: &mut NodeImageSpec,
    status: &NodeImageStatus,
    liveness: &dyn Fn(&JobUid) -> Liveness,
    now: Timestamp,
) -> (bool, Option<Timestamp>) {
    let (mut has_changed, mut next) = (false, None::<Timestamp>);
    for (name, image) in &mut spec.images {
        image.tags.retain_mut(|tag| {
            let before = tag.owner_references.len();
            let round = round_namespace(&tag.owner_references).map(str::to_owned);
            tag.owner_references.retain(|owner| {
                !is_job(owner) || job_of(owner).is_some_and(|job| liveness(&job) != Liveness::Deleted)
            });
            let left = tag.owner_references.len();
            has_changed |= left != before;
            if left == 0 && before > 0 {
                return false;
            }
            // The round was for jobs that are gone: how it ends is no answer to those of another namespace.
            let left = round_namespace(&tag.owner_references);
            if left.is_some_and(|left| round.as_deref() != Some(left)) {
                return false;
            }
            if jobs_of(&tag.owner_references).any(|job| liveness(&job) == Liveness::Active) {
                return true;
            }
            let Some(due) = expiry(name, tag, status) else { return true };
            if due <= now {
                has_changed = true;
                return false;
            }
            next = Some(next.map_or(due, |next| next.min(due)));
            true
        });
    }
    if has_changed {
        spec.images.retain(|_, image| !image.tags.is_empty());
    }
    (has_changed, next)
}

/// Removes the secrets that jobs have left behind in an image: of a namespace that has lost an owner of its tags, those that no
/// running owner names. Other secrets were written by hand, or by a job that is still there.
pub(super) fn drop_left_secrets(
    spec: &mut NodeImageSpec,
    object: &CompactNodeImage,
    Context { liveness, request_of, .. }: &Context<'_>,
) {
    for (name, _, before) in object.images() {
        let Some(ImageSpec { tags, pull_secrets, .. }) = spec.images.get_mut(&**name) else { continue };
        let owners = || tags.iter().flat_map(|tag| &tag.owner_references).filter(|owner| is_job(owner));
        let present: HashSet<_> = owners().map(|owner| &owner.uid).collect();
        let before = before.iter().flat_map(|tag| &tag.terms.owner_references).filter(|owner| is_job(owner));
        let mut left: HashSet<&str> =
            before.filter(|owner| !present.contains(&owner.uid)).map(namespace).collect();
        if left.is_empty() || pull_secrets.is_empty() {
            continue;
        }
        let mut requests = Vec::new();
        for owner in owners() {
            let Some(job) = job_of(owner).filter(|job| liveness(job) == Liveness::Active) else { continue };
            match request_of(&job) {
                Some(request) => requests.push(request),
                // It can't be read, so that what it names isn't known.
                None => _ = left.remove(namespace(owner)),
            }
        }
        let named: HashSet<(&str, &str)> =
            requests.iter().flat_map(|request| &request.secrets).map(id).collect();
        let is_manual = |tag: &ImageTagSpec| round_namespace(&tag.owner_references).is_none();
        let mut spare = if tags.iter().any(is_manual) { SPARE_SECRETS } else { 0 };
        pull_secrets.retain(|secret| {
            let is_needed = !left.contains(&*secret.namespace) || named.contains(&id(secret));
            let is_kept = is_needed || spare > 0;
            spare -= usize::from(!is_needed && is_kept);
            is_kept
        });
    }
}

fn id(secret: &SecretObject) -> (&str, &str) {
    (&secret.namespace, &secret.name)
}

/// When the time to live of a tag that has ended passes.
fn expiry(name: &str, tag: &ImageTagSpec, status: &NodeImageStatus) -> Option<Timestamp> {
    let ttl = tag.pull_policy.as_ref()?.ttl_seconds_after_finished?;
    let ended = ended_at(status, name, &tag.tag, tag.version)?;
    ended.checked_add(Duration::from_secs(u64::try_from(ttl).unwrap_or(0))).ok()
}

fn has_owner(tag: &ImageTagSpec, owner: &ObjectReference) -> bool {
    tag.owner_references.iter().any(|known| known.uid == owner.uid)
}
