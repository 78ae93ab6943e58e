//! What people are told: statuses in Kruise's words, and events.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::crd::kruise::ImagePullJobStatus;
use prepull_api::task::NodeName;

use super::Action;
use super::roster::Roster;
use crate::shared::events::{ObjectEvent, ObjectKind};
use crate::shared::objects::ObjectId;
use crate::shared::reasons;

/// Bytes of an event's note, and of the words why a spec is refused: what an event may have.
const LONGEST_NOTE: usize = 1024;
/// Nodes that an event names.
const NAMED: usize = 5;

/// How a job ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Each node has succeeded or failed.
    Completed,
    /// activeDeadlineSeconds have passed.
    Deadline,
    /// Those that are left have been offline for too long.
    Unresponsive,
}

pub(super) fn running(roster: &Roster, start: Option<Time>) -> ImagePullJobStatus {
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
        desired: int(counts.desired),
        active: int(counts.active),
        succeeded: int(counts.succeeded),
        failed: int(counts.failed),
        message,
        failed_nodes: names(roster.failed()),
    }
}

/// Whatever has not ended has failed.
pub(super) fn ended(roster: &Roster, start: Timestamp, ended: Time, end: End) -> ImagePullJobStatus {
    let counts = roster.counts();
    let mut failed_nodes = names(roster.failed().chain(roster.open()));
    failed_nodes.sort_unstable();
    let message = match end {
        End::Completed | End::Unresponsive => "job has completed",
        End::Deadline => "job exceeds activeDeadlineSeconds",
    };
    ImagePullJobStatus {
        start_time: Some(Time(start)),
        completion_time: Some(ended),
        desired: int(counts.desired),
        active: 0,
        succeeded: int(counts.succeeded),
        failed: int(counts.desired.saturating_sub(counts.succeeded)),
        message: message.to_owned(),
        failed_nodes,
    }
}

pub(super) fn refused(start: Option<Time>, words: &str) -> ImagePullJobStatus {
    ImagePullJobStatus { start_time: start, message: words.to_owned(), ..ImagePullJobStatus::default() }
}

/// Of a job that ended so.
pub(super) fn ended_events(
    id: &ObjectId,
    status: &ImagePullJobStatus,
    roster: &Roster,
    end: End,
) -> impl Iterator<Item = Action> {
    let silent = (end == End::Unresponsive).then(|| {
        let open = roster.open();
        let first: Vec<&str> = open.iter().take(NAMED).map(|node| node.as_str()).collect();
        let more = if open.len() > NAMED { ", …" } else { "" };
        let note = format!(
            "{} of {} nodes did not respond for a long time and count as failed: {}{more}",
            open.len(),
            status.desired,
            first.join(", ")
        );
        event(ObjectKind::ImagePullJob, id, reasons::UNRESPONSIVE, note)
    });
    let failed = status.failed > 0;
    let note = format!("{}: {} of {} nodes succeeded", status.message, status.succeeded, status.desired);
    let over =
        event(ObjectKind::ImagePullJob, id, if failed { reasons::FAILED } else { reasons::COMPLETED }, note);
    let over = ObjectEvent { warning: failed, ..over };
    silent.into_iter().chain([over]).map(Action::Event)
}

/// A spec is refused.
pub(super) fn invalid(kind: ObjectKind, id: &ObjectId, words: &str) -> Action {
    Action::Event(event(kind, id, reasons::INVALID, words.to_owned()))
}

/// A warning.
pub(super) fn event(kind: ObjectKind, id: &ObjectId, reason: &'static str, note: String) -> ObjectEvent {
    ObjectEvent { kind, object: id.clone(), warning: true, reason, note: cut(note) }
}

/// As much of a text as an event takes.
pub(super) fn cut(mut text: String) -> String {
    if text.len() > LONGEST_NOTE {
        let end =
            (0..=LONGEST_NOTE - '…'.len_utf8()).rfind(|at| text.is_char_boundary(*at)).unwrap_or_default();
        text.truncate(end);
        text.push('…');
    }
    text
}

fn names<'a>(nodes: impl Iterator<Item = &'a NodeName>) -> Vec<String> {
    nodes.map(|node| node.0.clone()).collect()
}

pub(super) fn int(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}
