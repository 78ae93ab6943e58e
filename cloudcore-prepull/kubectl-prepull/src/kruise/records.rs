//! Records of nodes, made from NodeImages. Pure.

use std::collections::HashSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use prepull_api::crd::kruise::{ImagePullJob, ImageTagStatus, NodeImage, PullPhase};
use prepull_api::crd::status::{Action, ActionStatus, JobImageStatus, NodePhase, NodeStatus, Tristate};
use prepull_api::failure::FailureCode;
use prepull_api::image::Reference;

/// The reason for a failed node if its NodeImage has none.
const SILENT: &str = "no result before the job ended: it was offline, or is gone";

/// The image of a job and its tag, as NodeImages name them.
pub(super) fn name_and_tag(image: &str) -> Option<(String, String)> {
    Some(Reference::parse(image).ok()?.normalized().familiar_name_and_tag())
}

/// The record of a node, if its NodeImage has the image for this job.
pub(super) fn node_record(job: &ImagePullJob, node: &NodeImage) -> Option<NodeStatus> {
    let (name, tag) = name_and_tag(&job.spec.image)?;
    let wanted = node.spec.images.get(&name)?.tags.iter().find(|wanted| wanted.tag == tag)?;
    let uid = job.uid();
    wanted.owner_references.iter().find(|owner| owner.uid == uid)?;
    let tags = node.status.as_ref().and_then(|status| status.image_statuses.get(&name));
    let of_version = |state: &&ImageTagStatus| state.tag == tag && state.version == wanted.version;
    let state = tags.and_then(|status| status.tags.iter().find(of_version)).cloned().unwrap_or_default();
    Some(record(&node.name_any(), &job.spec.image, &state))
}

fn record(node: &str, image: &str, state: &ImageTagStatus) -> NodeStatus {
    let (phase, status) = match state.phase {
        PullPhase::Waiting => (NodePhase::Pending, Tristate::Unknown),
        PullPhase::Pulling => (NodePhase::InProgress, Tristate::Unknown),
        PullPhase::Succeeded => (NodePhase::Successful, Tristate::True),
        PullPhase::Failed => (NodePhase::Failure, Tristate::False),
    };
    let has_part = phase == NodePhase::InProgress && state.progress > 0 && state.message.is_empty();
    let reason = if has_part { format!("{} %", state.progress) } else { state.message.clone() };
    let ended = |time: &Time| ActionStatus {
        action: Action::Pull,
        status,
        reason: String::new(),
        time: time.clone(),
    };
    NodeStatus {
        node_name: node.to_owned(),
        phase,
        reason: if phase == NodePhase::Successful { String::new() } else { reason },
        code: (phase == NodePhase::Failure).then_some(FailureCode::Other),
        attempt: 1,
        start_time: state.start_time.clone(),
        action_flow: state.completion_time.iter().map(ended).collect(),
        image_status: vec![JobImageStatus { image: image.to_owned(), status, ..JobImageStatus::default() }],
        ..NodeStatus::default()
    }
}

/// Brings the records of a job into agreement with its status, which decides who has failed.
pub(super) fn apply_job_status(job: &ImagePullJob, records: &mut Vec<NodeStatus>) {
    let Some(status) = &job.status else { return };
    let failed: HashSet<_> = status.failed_nodes.iter().map(String::as_str).collect();
    let is_over = status.completion_time.is_some();
    // The list is bounded: a node that it does not name may have failed as well.
    let names_all = usize::try_from(status.failed).is_ok_and(|failed| failed <= status.failed_nodes.len());
    for record in records.iter_mut() {
        if failed.contains(record.node_name.as_str()) {
            fail(record, status.completion_time.as_ref());
        } else if is_over && names_all && record.phase != NodePhase::Successful {
            // Another job has asked for the same image since.
            let succeeded = ImageTagStatus { phase: PullPhase::Succeeded, ..ImageTagStatus::default() };
            *record = self::record(&record.node_name, &job.spec.image, &succeeded);
        }
    }
    let known: HashSet<_> = records.iter().map(|record| record.node_name.clone()).collect();
    let missing = status.failed_nodes.iter().filter(|node| !known.contains(*node));
    records.extend(missing.map(|node| {
        let mut record = record(node, &job.spec.image, &ImageTagStatus::default());
        fail(&mut record, status.completion_time.as_ref());
        record
    }));
}

fn fail(record: &mut NodeStatus, ended: Option<&Time>) {
    if record.phase == NodePhase::Failure {
        return;
    }
    let message = if record.reason.is_empty() { SILENT.to_owned() } else { record.reason.clone() };
    let state = ImageTagStatus {
        phase: PullPhase::Failed,
        message,
        completion_time: ended.cloned(),
        ..ImageTagStatus::default()
    };
    let image = record.image_status.first().map(|image| image.image.clone()).unwrap_or_default();
    *record =
        NodeStatus { code: Some(FailureCode::NoResult), ..self::record(&record.node_name, &image, &state) };
}
