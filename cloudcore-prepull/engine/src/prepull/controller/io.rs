//! What goes into the controller, and what comes out.

use std::sync::Arc;
use std::time::Duration;

use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::report::{ImagePrePullReport, ReportBody};
use prepull_api::crd::status::ImagePrePullJobStatus;
use prepull_api::task::{JobUid, NodeName};
use prepull_api::wire::CloudMessage;
use serde::{Deserialize, Serialize};

use crate::prepull::plan::NodePlan;
use crate::prepull::validate::ValidatedJob;
use crate::shared::events::ObjectEvent;
use crate::shared::node_view::NodeView;
use crate::shared::objects::Unreadable;
use crate::shared::outcomes::{DispatchOutcome, WriteOutcome};
use crate::shared::session::SessionEvent;

/// What happened.
#[derive(Debug, Serialize, Deserialize)]
pub enum Input {
    /// All nodes that there are.
    Nodes(Vec<NodeView>),
    /// A node is new or changed.
    Node(NodeView),
    /// A node is gone.
    NodeGone(NodeName),
    /// The reports of all jobs that [need them](super::needs_reports). Once, before the first [`Input::Jobs`].
    Reports(Vec<ImagePrePullReport>),
    /// The answer to [`Action::Recall`]: its reports, and the job as it is now, if it is still there.
    Recalled(JobUid, Vec<ImagePrePullReport>, Option<JobObject>),
    /// All jobs that there are.
    Jobs(Vec<JobObject>),
    /// A job is new or changed.
    Job(JobObject),
    /// A job is gone.
    JobGone(JobUid),
    /// A session came, spoke or went.
    Session(SessionEvent),
    /// A dispatch ended.
    Dispatched {
        /// Of this job,
        job: JobUid,
        /// to this node,
        node: NodeName,
        /// the task of this attempt:
        attempt: u32,
        /// how.
        outcome: DispatchOutcome,
    },
    /// A write ended.
    Written {
        /// Of this job:
        job: JobUid,
        /// what of it.
        object: Object,
        /// As given in [`Action::Write`].
        version: u64,
        /// How.
        outcome: WriteOutcome,
    },
    /// Nothing but time.
    Tick,
}

/// A job as the API server has it, or what is known of one that cannot be read.
pub type JobObject = Result<Box<ImagePrePullJob>, Unreadable>;

/// What is written of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Object {
    /// Its status.
    Status,
    /// The report of this index.
    Report(u32),
}

/// The content of a write.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// The whole status of the job.
    Status(Box<ImagePrePullJobStatus>),
    /// A whole report; it is made where there is none yet.
    Report(Box<ReportBody>),
}

impl Content {
    /// What it is the content of.
    pub fn object(&self) -> Object {
        match self {
            Self::Status(_) => Object::Status,
            Self::Report(report) => Object::Report(report.index),
        }
    }
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Resolve the keys, and send the task.
    Dispatch(Dispatch),
    /// Hand a message to a node's session, if there is one.
    Send(NodeName, CloudMessage),
    /// Write an object. At most one write of each object is under way.
    Write {
        /// Of this job,
        job: JobUid,
        /// its name,
        name: String,
        /// to come back in [`Input::Written`],
        version: u64,
        /// what.
        content: Content,
    },
    /// Delete a job.
    Delete {
        /// Which: never another one of the same name.
        job: JobUid,
        /// Its name.
        name: String,
    },
    /// The job is gone, or over for long: nothing more is written of it.
    Forget(JobUid),
    /// Read a job that was over for long, and has been edited, and its reports.
    Recall {
        /// Which.
        job: JobUid,
        /// Its name.
        name: String,
    },
    /// Tell people.
    Event(ObjectEvent),
}

/// A task that is to go out.
#[derive(Clone, Debug, PartialEq)]
pub struct Dispatch {
    /// Of this job,
    pub job: Arc<ValidatedJob>,
    /// to this node,
    pub node: NodeName,
    /// this attempt,
    pub attempt: u32,
    /// these images,
    pub plan: Arc<NodePlan>,
    /// of which these are there since an earlier attempt, by their place,
    pub there: Vec<usize>,
    /// within this time.
    pub remaining: Duration,
}
