//! The spec of a job: which version of it was seen, and how it relates to what the job began with.

use prepull_api::crd::job::{ImagePrePullJob, ImagePrePullJobSpec};
use prepull_api::crd::status::ImagePrePullJobStatus;
use prepull_api::enroll;
use prepull_api::wire::truncate_reason;
use ring::digest::{SHA256, digest};

/// How the spec relates to what the job began with, in the part that must not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Divergence {
    /// It is what the job began with.
    None,
    /// It was edited since. The job goes on with what it began with.
    Edited,
    /// It was edited while no cloudcore ran, and what the job began with is not known: no further node starts until the
    /// edit is undone.
    BeginningUnknown,
}

/// The spec as it was seen last.
#[derive(Debug, Default)]
pub(super) struct SpecState {
    generation: i64,
    /// Why the spec, or its last change, was not accepted.
    refusal: Option<String>,
    /// What the job began with; `None` before that.
    beginning: Option<Beginning>,
}

#[derive(Debug)]
struct Beginning {
    /// See [`spec_hash`].
    hash: String,
    /// See [`fixed_part`].
    fixed: ImagePrePullJobSpec,
    divergence: Divergence,
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

    /// The spec, or its last change, is not accepted for this reason, which is cut to what a condition may hold.
    pub(super) fn refuse(&mut self, reason: &str) -> &str {
        self.refusal.insert(truncate_reason(reason))
    }

    pub(super) fn clear_refusal(&mut self) {
        self.refusal = None;
    }

    /// The job begins with this spec.
    pub(super) fn begin(&mut self, spec: &ImagePrePullJobSpec) {
        self.refusal = None;
        self.restore(spec_hash(spec), spec, Divergence::None);
    }

    /// The job began with a spec of this hash, before this run of cloudcore.
    pub(super) fn restore(&mut self, hash: String, spec: &ImagePrePullJobSpec, divergence: Divergence) {
        self.beginning = Some(Beginning { hash, fixed: fixed_part(spec), divergence });
    }

    /// Whether the fixed part of this spec is what the job began with; the divergence is noted.
    pub(super) fn compare(&mut self, spec: &ImagePrePullJobSpec) -> bool {
        let Some(beginning) = &mut self.beginning else { return false };
        let same = beginning.hash == spec_hash(spec);
        // A job whose beginning is unknown is taken up again only by an undone edit that is valid: see `adopt`.
        if beginning.divergence != Divergence::BeginningUnknown {
            beginning.divergence = if same { Divergence::None } else { Divergence::Edited };
        }
        same
    }

    /// The edit that hid the beginning of the job is undone: this is what the job began with.
    pub(super) fn adopt(&mut self, spec: &ImagePrePullJobSpec) {
        if let Some(beginning) = &mut self.beginning {
            (beginning.fixed, beginning.divergence) = (fixed_part(spec), Divergence::None);
        }
    }

    /// Whether nothing may start because it is not known what the job began with.
    pub(super) fn is_beginning_unknown(&self) -> bool {
        self.beginning.as_ref().is_some_and(|known| known.divergence == Divergence::BeginningUnknown)
    }

    /// `status.specHash`; empty before the job has begun.
    pub(super) fn hash(&self) -> &str {
        self.beginning.as_ref().map(|beginning| beginning.hash.as_str()).unwrap_or_default()
    }

    /// `status.startedSpec`: what the job goes on with where its spec says something else.
    pub(super) fn started(&self) -> Option<&ImagePrePullJobSpec> {
        let edited = self.beginning.as_ref().filter(|known| known.divergence == Divergence::Edited);
        edited.map(|beginning| &beginning.fixed)
    }
}

/// The job that is carried out after a restart: its fixed part is what it began with, where that is known.
pub(super) fn effective_job(
    object: &ImagePrePullJob,
    status: &ImagePrePullJobStatus,
) -> (ImagePrePullJob, Divergence) {
    // Without a status the reports have only just been made.
    if status.spec_hash.is_empty() || status.spec_hash == spec_hash(&object.spec) {
        return (object.clone(), Divergence::None);
    }
    match serde_json::from_str(&status.started_spec) {
        Ok(started) => {
            let spec = with_fixed_part(&object.spec, started);
            (ImagePrePullJob { spec, ..object.clone() }, Divergence::Edited)
        }
        Err(_) => (object.clone(), Divergence::BeginningUnknown),
    }
}

/// The spec without what may change while the job runs, and without the names of nodes: those that were chosen are in
/// the reports.
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
    template.node_names.clear();
    fixed
}

/// The spec with the fixed part of the one that the job began with. A job that names its nodes takes the names that the
/// spec has now: no node joins by that, since such a job does not follow nodes.
fn with_fixed_part(spec: &ImagePrePullJobSpec, started: ImagePrePullJobSpec) -> ImagePrePullJobSpec {
    let (now, mut spec) = (&spec.image_pre_pull_template, spec.clone());
    spec.image_pre_pull_overriders = started.image_pre_pull_overriders;
    let mut template = started.image_pre_pull_template;
    template.concurrency = now.concurrency;
    template.timeout_seconds = now.timeout_seconds;
    template.failure_tolerate.clone_from(&now.failure_tolerate);
    if template.label_selector.is_none() {
        template.node_names.clone_from(&now.node_names);
        if template.node_names.is_empty() {
            // The edited spec has a selector instead. Any name makes the spec valid.
            template.node_names.push("none".to_owned());
        }
    }
    spec.image_pre_pull_template = template;
    spec
}

/// A hash of the fixed part and of the names of nodes. A field that is not set is not in the hash, so that a later
/// version with more fields computes the same.
pub(super) fn spec_hash(spec: &ImagePrePullJobSpec) -> String {
    let mut fixed = fixed_part(spec);
    fixed.image_pre_pull_template.node_names.clone_from(&spec.image_pre_pull_template.node_names);
    // Maps are sorted, and a spec always serialises.
    let json = serde_json::to_vec(&fixed).unwrap_or_default();
    // Half of the digest tells any two specs apart that nobody made for the purpose.
    enroll::hex(digest(&SHA256, &json).as_ref().get(..16).unwrap_or_default())
}
