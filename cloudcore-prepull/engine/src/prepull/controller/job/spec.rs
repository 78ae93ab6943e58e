//! The spec of a job: which version of it was seen, and which one is carried out.
//!
//! The accepted spec is stored in the status, so that another leader continues with it even after an edit: the spec
//! that the job began with, and the edits that it could follow. The names of nodes are left out, for there may be
//! thousands: those that were chosen are in the reports, and those that were skipped in the status.

use std::collections::BTreeSet;

use prepull_api::crd::job::ImagePrePullJobSpec;
use prepull_api::crd::status::ImagePrePullJobStatus;
use prepull_api::enroll;
use prepull_api::wire::truncate_reason;
use ring::digest::{SHA256, digest};

use crate::prepull::aggregate;

/// The longest spec, as JSON without the names of nodes, that is stored in the status: etcd takes objects of 1.5 MiB, and
/// this one holds the spec itself as well. Of a longer one only the hash is stored. `kubectl apply` takes none of that
/// size.
const MAX_STORED: usize = 256 * 1024;

/// The spec as it was seen last, and the one that is carried out.
#[derive(Debug, Default)]
pub(super) struct SpecState {
    generation: i64,
    /// Why the spec, or its last change, was not accepted.
    refusal: Option<String>,
    /// Whether the present spec is not carried out because of that.
    is_other: bool,
    /// `status.specHash`: see [`spec_hash`]. Empty before the job has begun.
    hash: String,
    /// `None` before the job has begun, and where an earlier run of cloudcore has not stored it.
    accepted: Option<ImagePrePullJobSpec>,
    /// `status.startedSpec`: [`Self::accepted`] as it is stored.
    stored: String,
}

impl SpecState {
    pub(super) fn generation(&self) -> i64 {
        self.generation
    }

    pub(super) fn set_generation(&mut self, generation: i64) {
        self.generation = generation;
    }

    pub(super) fn refusal(&self) -> Option<&str> {
        self.refusal.as_deref()
    }

    /// Whether the spec differs from the one that is carried out, or was.
    pub(super) fn is_other(&self) -> bool {
        self.is_other
    }

    /// The job's end counts for the present spec, although a part of it was refused.
    pub(super) fn ends_as_asked(&mut self) {
        self.is_other = false;
    }

    /// Refuses the spec, or its last change, for this reason, which is cut to the length of a condition's message.
    pub(super) fn refuse(&mut self, reason: &str) -> &str {
        self.is_other = true;
        self.refusal.insert(truncate_reason(reason))
    }

    pub(super) fn clear_refusal(&mut self) {
        (self.refusal, self.is_other) = (None, false);
    }

    pub(super) fn begin(&mut self, spec: &ImagePrePullJobSpec) {
        self.clear_refusal();
        self.hash = spec_hash(spec);
        self.accept(spec.clone());
    }

    /// The job began before this run of cloudcore, with a spec of this hash.
    pub(super) fn restore(&mut self, hash: String, accepted: Option<ImagePrePullJobSpec>) {
        self.hash = hash;
        if let Some(accepted) = accepted {
            self.accept(accepted);
        }
    }

    /// This is carried out from now on.
    pub(super) fn accept(&mut self, mut spec: ImagePrePullJobSpec) {
        if self.hash.is_empty() {
            self.hash = spec_hash(&spec);
        }
        let names = std::mem::take(&mut spec.image_pre_pull_template.node_names);
        // A spec always serialises.
        self.stored = serde_json::to_string(&spec).unwrap_or_default();
        if self.stored.len() > MAX_STORED {
            self.stored.clear();
        }
        spec.image_pre_pull_template.node_names = names;
        self.accepted = Some(spec);
    }

    /// What is carried out, as far as it is known.
    pub(super) fn accepted(&self) -> Option<&ImagePrePullJobSpec> {
        self.accepted.as_ref()
    }

    /// Whether the job may have begun with this spec. It matters if the accepted spec is unknown.
    pub(super) fn may_have_begun_with(&self, spec: &ImagePrePullJobSpec) -> bool {
        self.hash.is_empty() || self.hash == spec_hash(spec)
    }

    /// `status.specHash`.
    pub(super) fn hash(&self) -> &str {
        &self.hash
    }

    /// `status.startedSpec`.
    pub(super) fn stored(&self) -> &str {
        &self.stored
    }
}

/// What is carried out if the spec becomes this one: the changes that a job can follow while it runs are taken over.
pub(super) fn merge_edit(
    accepted: &ImagePrePullJobSpec,
    edited: &ImagePrePullJobSpec,
) -> ImagePrePullJobSpec {
    let now = &edited.image_pre_pull_template;
    let mut merged = ImagePrePullJobSpec {
        image_pre_pull_template: accepted.image_pre_pull_template.clone(),
        image_pre_pull_overriders: accepted.image_pre_pull_overriders.clone(),
        ..edited.clone()
    };
    let template = &mut merged.image_pre_pull_template;
    template.concurrency = now.concurrency;
    template.timeout_seconds = now.timeout_seconds;
    template.failure_tolerate.clone_from(&now.failure_tolerate);
    // A job that removes or upgrades can't have these fields. Where the run or the edit is such a job, what the edit
    // says, or leaves out, is meant for the next run.
    let removes = template.remove.is_some() || now.remove.is_some();
    if removes || template.upgrade.is_some() || now.upgrade.is_some() {
        merged.recheck = accepted.recheck;
        merged.verify.clone_from(&accepted.verify);
    }
    if removes {
        merged.pin = accepted.pin;
        merged.download.clone_from(&accepted.download);
    }
    merged
}

/// What an earlier run of cloudcore carried out, if that is known. `spec`: the spec as it is now, if it can be read.
/// `nodes`: the names of the nodes that were chosen.
pub(super) fn accepted_before(
    status: &ImagePrePullJobStatus,
    spec: Option<&ImagePrePullJobSpec>,
    is_seen: bool,
    nodes: impl Iterator<Item = String>,
) -> Option<ImagePrePullJobSpec> {
    let Ok(mut stored) = serde_json::from_str::<ImagePrePullJobSpec>(&status.started_spec) else {
        // Too long.
        let begun_with =
            |spec: &&ImagePrePullJobSpec| status.spec_hash.is_empty() || status.spec_hash == spec_hash(spec);
        return spec.filter(begun_with).map(|spec| as_before(spec.clone(), status, is_seen));
    };
    if stored.image_pre_pull_template.label_selector.is_none() {
        let template = &mut stored.image_pre_pull_template;
        template.node_names =
            spec.map(|spec| spec.image_pre_pull_template.node_names.clone()).unwrap_or_default();
        if status.spec_hash != spec_hash(&stored) {
            // The names were edited, or cannot be read. Reports may not have been made yet.
            let shown = status.node_status.iter().map(|node| node.node_name.clone());
            let known: BTreeSet<_> = nodes.chain(shown).collect();
            if known.len() < status.summary.desired as usize {
                return None;
            }
            let skipped = status.skipped_nodes.iter().map(|skipped| skipped.node_name.clone());
            stored.image_pre_pull_template.node_names = known.into_iter().chain(skipped).collect();
        }
    }
    Some(stored)
}

/// Completes a stored spec without its changeable part from the present spec. Fields that the status has keep their
/// value of that time, so that we notice an edit since.
fn as_before(
    mut spec: ImagePrePullJobSpec,
    status: &ImagePrePullJobStatus,
    is_seen: bool,
) -> ImagePrePullJobSpec {
    let is_true = |type_| {
        status.conditions.iter().any(|condition| condition.type_ == type_ && condition.status == "True")
    };
    if status.completion_time.is_none() {
        spec.pause = is_true(aggregate::PAUSED);
        spec.suspend = is_true(aggregate::SUSPENDED) && !spec.pause;
    } else if !is_seen {
        spec.retry = spec.retry.min(status.retry.into());
        let rechecks = status.recheck.as_ref().map_or(0, |recheck| recheck.rounds);
        spec.recheck = spec.recheck.min(rechecks.into());
    }
    spec
}

/// A hash of what must not change once a job has begun, the names of nodes included.
fn spec_hash(spec: &ImagePrePullJobSpec) -> String {
    let mut fixed = fixed_part(spec);
    let template = &mut fixed.image_pre_pull_template;
    template.registry_secrets.clear();
    template.image_secrets = None;
    template.image_sources.iter_mut().for_each(|source| source.image_secret = None);
    let overriders = &mut fixed.image_pre_pull_overriders;
    overriders.retain_mut(|entry| {
        let overriders = &mut entry.image_pre_pull_overrider.overriders;
        overriders.secret_overriders.clear();
        !overriders.image_overriders.is_empty()
    });
    hash_of(&fixed)
}

/// What cannot change once a job has begun, and the secrets.
fn fixed_part(spec: &ImagePrePullJobSpec) -> ImagePrePullJobSpec {
    let mut fixed = ImagePrePullJobSpec {
        image_pre_pull_template: spec.image_pre_pull_template.clone(),
        image_pre_pull_overriders: spec.image_pre_pull_overriders.clone(),
        ..ImagePrePullJobSpec::default()
    };
    let template = &mut fixed.image_pre_pull_template;
    template.concurrency = 0;
    template.timeout_seconds = 0;
    template.failure_tolerate.clear();
    fixed
}

/// A field that is not set is not in the hash, so that a later version with more fields computes the same.
fn hash_of(spec: &ImagePrePullJobSpec) -> String {
    // Maps are sorted, and a spec always serialises.
    let json = serde_json::to_vec(spec).unwrap_or_default();
    // Half of the digest suffices: only a deliberate collision could hide an edit.
    enroll::hex(digest(&SHA256, &json).as_ref().get(..16).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
    use serde_json::{Value, json};

    use super::*;

    fn spec(template: &Value, rest: &Value) -> ImagePrePullJobSpec {
        let mut spec = rest.clone();
        spec["imagePrePullTemplate"] = json!({"images": ["app:1"], "labelSelector": {}});
        let fields = template.as_object().unwrap().clone();
        spec["imagePrePullTemplate"].as_object_mut().unwrap().extend(fields);
        serde_json::from_value(spec).unwrap()
    }

    #[test]
    fn an_incomplete_status_uses_the_current_spec() {
        let now = spec(&json!({"concurrency": 7, "failureTolerate": "0.5"}), &json!({"retry": 3}));
        let status = |ended: bool, is_suspended: bool| ImagePrePullJobStatus {
            // It was too long.
            started_spec: String::new(),
            spec_hash: spec_hash(&now),
            retry: 1,
            completion_time: ended.then_some(Time(jiff::Timestamp::UNIX_EPOCH)),
            conditions: vec![Condition {
                type_: aggregate::SUSPENDED.to_owned(),
                status: if is_suspended { "True" } else { "False" }.to_owned(),
                last_transition_time: Time(jiff::Timestamp::UNIX_EPOCH),
                message: String::new(),
                observed_generation: None,
                reason: String::new(),
            }],
            ..ImagePrePullJobStatus::default()
        };
        let before = |status: &ImagePrePullJobStatus, is_seen| {
            accepted_before(status, Some(&now), is_seen, std::iter::empty()).unwrap()
        };
        let running = before(&status(false, false), false);
        let template = &running.image_pre_pull_template;
        assert_eq!((&template.images[..], template.concurrency), (&["app:1".to_owned()][..], 7));
        assert_eq!((template.failure_tolerate.as_str(), running.suspend, running.retry), ("0.5", false, 3));
        assert!(before(&status(false, true), false).suspend, "it was suspended, and is not any more");
        // Rounds that were asked for since its end have not begun.
        assert_eq!(before(&status(true, true), false).retry, 1);
        let seen = before(&status(true, true), true);
        assert_eq!((seen.retry, seen.suspend), (3, false));
    }

    #[test]
    fn a_running_pull_keeps_its_terms() {
        let terms =
            json!({"verify": {"keys": []}, "download": {"maxRate": "1Mi"}, "pin": true, "recheck": 1});
        let begun = spec(&json!({}), &terms);
        let removal =
            spec(&json!({"images": [], "remove": {"images": ["old:1"]}}), &json!({"suspend": true}));
        assert_eq!(merge_edit(&begun, &removal), ImagePrePullJobSpec { suspend: true, ..begun.clone() });
        // An upgrade can have a limit and pins, so that these are followed.
        let upgrade = spec(&json!({"upgrade": {}}), &json!({}));
        let kept = ImagePrePullJobSpec { download: None, pin: false, ..begun.clone() };
        assert_eq!(merge_edit(&begun, &upgrade), kept);
    }

    #[test]
    fn a_too_long_spec_is_not_stored() {
        let stored = |length: usize| {
            let mut state = SpecState::default();
            state.accept(spec(&json!({"images": ["a".repeat(length)]}), &json!({})));
            state.stored().len()
        };
        let longest = MAX_STORED - stored(0);
        assert_eq!([longest, longest + 1].map(stored), [MAX_STORED, 0]);
    }
}
