//! Rows of nodes and jobs for the page. Pure.

use jiff::Timestamp;
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::kruise::ImagePullJob;
use prepull_api::crd::status::{NodePhase, NodeStatus};
use prepull_api::failure::FailureCode;
use serde::Serialize;

use crate::kruise;
use crate::progress::render::phase_of;
use crate::progress::tally::{bytes_of, reason_of};
use crate::progress::view::JobView;

/// Longest reason that is shown with every node, in characters; the node's own view has all of it.
const REASON: usize = 300;

/// A node of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct NodeRow {
    pub(crate) name: String,
    pub(crate) phase: NodePhase,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) code: Option<FailureCode>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) reason: String,
    pub(crate) attempt: u32,
    /// When its last step ended, once it has ended itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ended: Option<Timestamp>,
    pub(crate) done: u64,
    pub(crate) total: u64,
}

impl NodeRow {
    pub(crate) fn from_status(node: &NodeStatus) -> Self {
        let bytes = bytes_of(node);
        let has_ended = matches!(node.phase, NodePhase::Successful | NodePhase::Failure | NodePhase::Unknown);
        let last = node.action_flow.iter().map(|step| step.time.0).max();
        Self {
            name: node.node_name.clone(),
            phase: node.phase,
            code: node.code,
            reason: reason_of(node).chars().take(REASON).collect(),
            attempt: node.attempt,
            ended: last.filter(|_| has_ended),
            done: bytes.done,
            total: bytes.total,
        }
    }
}

/// A job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct JobRow {
    #[serde(flatten)]
    view: JobView,
    /// In the words of `kubectl prepull list`.
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    created: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    began: Option<Timestamp>,
    #[serde(rename = "endedAt", skip_serializing_if = "Option::is_none")]
    ended: Option<Timestamp>,
}

impl JobRow {
    /// The row of a job of OpenKruise.
    pub(crate) fn of_kruise(job: &ImagePullJob, now: Timestamp) -> Self {
        let status = job.status.as_ref();
        let view = kruise::job_row(job, now);
        Self {
            state: phase_of(&view).0,
            view,
            created: job.metadata.creation_timestamp.as_ref().map(|time| time.0),
            began: status.and_then(|status| status.start_time.as_ref()).map(|time| time.0),
            ended: status.and_then(|status| status.completion_time.as_ref()).map(|time| time.0),
        }
    }

    pub(crate) fn new(job: &ImagePrePullJob, view: JobView) -> Self {
        let status = job.status.as_ref();
        Self {
            state: phase_of(&view).0,
            created: job.metadata.creation_timestamp.as_ref().map(|time| time.0),
            began: status.and_then(|status| status.start_time.as_ref()).map(|time| time.0),
            ended: status
                .and_then(|status| status.completion_time.as_ref())
                .filter(|_| view.is_over)
                .map(|time| time.0),
            view,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::{Value, json};

    use super::*;
    use crate::progress::tally::Tally;

    fn state(spec: &Value, status: &Value) -> &'static str {
        let job: ImagePrePullJob = serde_json::from_value(json!({
            "apiVersion": "operations.kubeedge.io/v1alpha1", "kind": "ImagePrePullJob",
            "metadata": { "name": "web", "generation": 1 }, "spec": spec, "status": status,
        }))
        .unwrap();
        let view = JobView::new(&job, &Tally::default(), None, Timestamp::UNIX_EPOCH);
        JobRow::new(&job, view).state
    }

    #[test]
    fn refusal_and_suspension_are_states() {
        let spec =
            |suspend: bool| json!({ "imagePrePullTemplate": { "images": ["a:1"] }, "suspend": suspend });
        let status = |phase: &str, desired: u32, failed: u32, valid: &str| {
            let (time, reason) = ("1970-01-01T00:00:00Z", "Checked");
            let valid = json!({ "type": "Valid", "status": valid, "reason": reason, "message": "", "lastTransitionTime": time });
            json!({ "phase": phase, "observedGeneration": 1, "conditions": [valid],
                    "summary": { "desired": desired, "failure": failed } })
        };
        for (suspend, status, expected) in [
            (false, status("Failure", 0, 0, "False"), "Refused"),
            (false, status("Failure", 0, 0, "True"), "Failure"),
            (false, status("Failure", 2, 2, "False"), "Failure"),
            (false, status("InProgress", 2, 0, "False"), "InProgress"),
            (true, status("Init", 0, 0, "True"), "Suspended"),
            (true, status("InProgress", 2, 0, "True"), "Suspended"),
            (true, status("Completed", 2, 0, "True"), "Completed"),
            (false, status("Completed", 2, 1, "True"), "Completed with failures"),
        ] {
            assert_eq!(state(&spec(suspend), &status), expected, "{status}");
        }
        let with = |field: &str| json!({ "imagePrePullTemplate": { "images": ["a:1"] }, field: true });
        for (field, phase, expected) in [
            ("pause", "InProgress", "Paused"),
            ("pause", "Init", "Paused"),
            ("cancel", "Failure", "Cancelled"),
            ("cancel", "InProgress", "InProgress"),
        ] {
            assert_eq!(state(&with(field), &status(phase, 2, 0, "True")), expected, "{field} {phase}");
        }
    }
}
