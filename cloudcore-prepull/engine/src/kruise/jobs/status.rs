//! Statuses of ImagePullJobs in Kruise's words, and the events of both kinds of jobs.

use std::collections::BTreeSet;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::crd::kruise::ImagePullJobStatus;
use prepull_api::task::NodeName;

use super::Action;
use super::roster::NodeRoster;
use crate::shared::events::{ObjectEvent, ObjectKind};
use crate::shared::objects::ObjectId;
use crate::shared::reasons;

/// Bytes of an event's note, which the API server limits, and of a status' message.
const LONGEST_NOTE: usize = 1024;
const NAMED_NODES: usize = 5;

/// Nodes that a status names, the first by name: with the longest names that Kubernetes allows they are a sixth of what
/// etcd takes of an object. `failed` counts all of them.
pub(super) const FAILED_NODES: usize = 1000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PullJobEnd {
    /// Each node has succeeded or failed.
    Completed,
    /// `activeDeadlineSeconds` have passed.
    Deadline,
    /// The nodes that are left have been offline for too long.
    Unresponsive,
}

pub(super) fn running_status(roster: &NodeRoster, start: Option<Time>) -> ImagePullJobStatus {
    let counts = roster.counts();
    let message = if counts.desired == 0 {
        "job is running, no progress".to_owned()
    } else {
        let ended = f64::from(counts.succeeded + counts.failed);
        format!("job is running, progress {:.1}%", 100.0 * ended / f64::from(counts.desired))
    };
    ImagePullJobStatus {
        start_time: start,
        completion_time: None,
        desired: saturating_i32(counts.desired),
        active: i32::try_from(roster.busy_nodes().len()).unwrap_or(i32::MAX),
        succeeded: saturating_i32(counts.succeeded),
        failed: saturating_i32(counts.failed),
        message,
        failed_nodes: first_names(roster.failed_nodes()),
    }
}

/// The final status of an ImagePullJob: the nodes that have not ended count as failed.
pub(super) fn ended_status(
    roster: &NodeRoster,
    start: Timestamp,
    completed: Time,
    end: PullJobEnd,
) -> ImagePullJobStatus {
    let counts = roster.counts();
    let not_succeeded: BTreeSet<&NodeName> = roster.failed_nodes().chain(roster.unfinished_nodes()).collect();
    let message = match end {
        PullJobEnd::Completed | PullJobEnd::Unresponsive => "job has completed",
        PullJobEnd::Deadline => "job exceeds activeDeadlineSeconds",
    };
    ImagePullJobStatus {
        completion_time: Some(completed),
        active: 0,
        failed: saturating_i32(counts.desired.saturating_sub(counts.succeeded)),
        message: message.to_owned(),
        failed_nodes: first_names(not_succeeded.into_iter()),
        ..running_status(roster, Some(Time(start)))
    }
}

pub(super) fn end_events(
    id: &ObjectId,
    status: &ImagePullJobStatus,
    roster: &NodeRoster,
    end: PullJobEnd,
) -> impl Iterator<Item = Action> {
    let unresponsive = (end == PullJobEnd::Unresponsive).then(|| {
        let nodes = roster.unfinished_nodes();
        let first: Vec<&str> = nodes.iter().take(NAMED_NODES).map(|node| node.as_str()).collect();
        let more = if nodes.len() > NAMED_NODES { ", …" } else { "" };
        let note = format!(
            "{} of {} nodes did not respond for a long time and count as failed: {}{more}",
            nodes.len(),
            status.desired,
            first.join(", ")
        );
        warning_event(ObjectKind::ImagePullJob, id, reasons::UNRESPONSIVE, note)
    });
    let note = format!("{}: {} of {} nodes succeeded", status.message, status.succeeded, status.desired);
    let end = end_event(ObjectKind::ImagePullJob, id, status.failed == 0, note);
    unresponsive.into_iter().chain([end])
}

pub(super) fn end_event(kind: ObjectKind, id: &ObjectId, is_success: bool, note: String) -> Action {
    let reason = if is_success { reasons::COMPLETED } else { reasons::FAILED };
    job_event(kind, id, !is_success, reason, note)
}

pub(super) fn invalid_event(kind: ObjectKind, id: &ObjectId, reason: &str) -> Action {
    warning_event(kind, id, reasons::INVALID, reason.to_owned())
}

pub(super) fn warning_event(kind: ObjectKind, id: &ObjectId, reason: &'static str, note: String) -> Action {
    job_event(kind, id, true, reason, note)
}

fn job_event(kind: ObjectKind, id: &ObjectId, warning: bool, reason: &'static str, note: String) -> Action {
    Action::Event(ObjectEvent { kind, object: id.clone(), warning, reason, note: cut_note(note) })
}

/// Cuts a text to the length of an event's note.
pub(super) fn cut_note(mut text: String) -> String {
    if text.len() > LONGEST_NOTE {
        let end =
            (0..=LONGEST_NOTE - '…'.len_utf8()).rfind(|at| text.is_char_boundary(*at)).unwrap_or_default();
        text.truncate(end);
        text.push('…');
    }
    text
}

/// The first of these nodes, which are sorted.
fn first_names<'a>(nodes: impl Iterator<Item = &'a NodeName>) -> Vec<String> {
    nodes.take(FAILED_NODES).map(|node| node.0.clone()).collect()
}

pub(super) fn saturating_i32(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}
