//! What an earlier life of cloudcore has left: the records in the reports, and what the job began with.

use std::collections::HashSet;

use prepull_api::crd::job::{ImagePrePullJob, ImagePrePullJobSpec};
use prepull_api::crd::report::ReportBody;
use prepull_api::crd::status::{ImagePrePullJobStatus, NodeStatus};
use prepull_api::enroll;
use ring::digest::{SHA256, digest};

/// The records of all reports, each node once.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// In the order of the job.
    pub(super) records: Vec<NodeStatus>,
    /// Index and length of each report.
    pub(super) reports: Vec<(u32, usize)>,
    /// The nodes.
    pub(super) nodes: HashSet<String>,
}

impl Known {
    pub(super) fn of(mut reports: Vec<ReportBody>) -> Self {
        reports.sort_by_key(|report| report.index);
        let mut all = Self::default();
        for report in reports {
            let before = all.records.len();
            let new = report.node_status.into_iter().filter(|node| all.nodes.insert(node.node_name.clone()));
            all.records.extend(new);
            all.reports.push((report.index, all.records.len() - before));
        }
        all
    }
}

/// The spec that a job is carried out by.
#[derive(Debug)]
pub(super) struct Spec {
    /// The spec is another one than that which the job began with.
    pub(super) diverged: bool,
    /// It is known what the job began with.
    pub(super) known: bool,
    /// With what the job began with, where that is known.
    pub(super) object: ImagePrePullJob,
}

impl Spec {
    pub(super) fn of(object: &ImagePrePullJob, status: &ImagePrePullJobStatus) -> Self {
        // Without a status the reports have only just been made.
        let diverged = !status.spec_hash.is_empty() && status.spec_hash != spec_hash(&object.spec);
        let started = Some(status.started_spec.as_str()).filter(|_| diverged);
        let started = started.and_then(|json| serde_json::from_str(json).ok());
        let known = !diverged || started.is_some();
        let spec =
            started.map_or_else(|| object.spec.clone(), |started| with_fixed_part(&object.spec, started));
        Self { diverged, known, object: ImagePrePullJob { spec, ..object.clone() } }
    }
}

/// The spec without what may change while the job runs, and without the names of nodes: those that were chosen stand
/// in the reports.
pub(super) fn fixed_part(spec: &ImagePrePullJobSpec) -> ImagePrePullJobSpec {
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

/// The spec with what must not change as it was at the start. Where the job names its nodes the names are those of
/// the spec as it is now: nobody joins, since such a job does not follow nodes.
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
            // It has a selector by now. Any name will do.
            template.node_names.push("none".to_owned());
        }
    }
    spec.image_pre_pull_template = template;
    spec
}

/// Of the fixed part, with the names of nodes. What is not set is not in it, so that a later version with more fields
/// reckons the same.
pub(super) fn spec_hash(spec: &ImagePrePullJobSpec) -> String {
    let mut fixed = fixed_part(spec);
    fixed.image_pre_pull_template.node_names.clone_from(&spec.image_pre_pull_template.node_names);
    // Maps are sorted and a spec always serialises.
    let json = serde_json::to_vec(&fixed).unwrap_or_default();
    // Half of it tells any two specs apart that nobody made for the purpose.
    enroll::hex(digest(&SHA256, &json).as_ref().get(..16).unwrap_or_default())
}
