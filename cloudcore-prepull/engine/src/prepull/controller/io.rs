//! The inputs and the actions of the controller.

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
use crate::shared::access::KeysSent;
use crate::shared::events::ObjectEvent;
use crate::shared::outcomes::{DispatchOutcome, WriteOutcome};

/// What happened.
#[derive(Debug, Serialize, Deserialize)]
pub enum Input {
    /// The reports that exist, by job and index: again after each break of their watch.
    ReportsListed(Vec<(JobUid, u32)>),
    /// A report was deleted.
    ReportGone {
        /// The job that owned it.
        job: JobUid,
        /// Its index.
        index: u32,
    },
    /// The answer to [`Action::Recall`]: the job, unless it is gone, and then its reports, which were read after it.
    Recalled(JobUid, Vec<ImagePrePullReport>, Option<JobObject>),
    /// The whole list of jobs, after which those that are not in it are gone. What
    /// [`drop_unread_fields`](super::drop_unread_fields) leaves of each is enough.
    Jobs(Vec<JobObject>),
    /// A job is new or changed. What [`drop_unread_fields`](super::drop_unread_fields) leaves of it is enough.
    Job(JobObject),
    /// A job was deleted.
    JobGone(JobUid),
    /// A dispatch ended.
    Dispatched {
        /// The job of the task.
        job: JobUid,
        /// The node that the task was for.
        node: NodeName,
        /// The attempt that the task is.
        attempt: u32,
        /// How the dispatch ended.
        outcome: DispatchOutcome,
        /// The credentials that were sent. `None`: no image names a secret, or the task only looks.
        #[serde(default)]
        keys: Option<KeysSent>,
    },
    /// The owner of a secret has allowed a job to use it, after [`DispatchOutcome::Withheld`].
    SecretAllowed {
        /// The job.
        job: JobUid,
        /// The secret, as namespace/name.
        secret: String,
    },
    /// A write ended.
    Written {
        /// The job of the written status or report.
        job: JobUid,
        /// Which of the job's objects was written.
        object: StatusOrReport,
        /// The version of [`Action::Write`].
        version: u64,
        /// How the write ended.
        outcome: WriteOutcome,
        /// The resourceVersion that the object has by that, if the write is known to be made.
        #[serde(default)]
        stored: Option<String>,
    },
}

/// A write that ended, as in [`Input::Written`].
#[derive(Debug)]
pub(super) struct WriteEnd {
    pub(super) object: StatusOrReport,
    pub(super) version: u64,
    pub(super) stored: Option<String>,
    pub(super) done: bool,
}

/// A job as the API server has it, or what can be read of it.
pub type JobObject = Result<Box<ImagePrePullJob>, UnreadableJob>;

/// A job that has a field of the wrong type: written before its definition was, or past its validation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UnreadableJob {
    /// Its metadata and its status, without its spec.
    pub rest: Box<ImagePrePullJob>,
    /// Why it cannot be read.
    pub error: String,
}

/// What can be read of any job: its metadata and its status.
pub fn rest_of(object: &JobObject) -> &ImagePrePullJob {
    match object {
        Ok(job) => job,
        Err(unreadable) => &unreadable.rest,
    }
}

/// An object that is written for a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum StatusOrReport {
    /// The status of the job.
    Status,
    /// The report of the job with this index.
    Report(u32),
}

/// The content of a write.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// The whole status of the job.
    Status(Box<ImagePrePullJobStatus>),
    /// A whole report, which is created if there is none yet.
    Report(Box<ReportBody>),
}

impl Content {
    /// The object that this is the content of.
    pub fn object(&self) -> StatusOrReport {
        match self {
            Self::Status(_) => StatusOrReport::Status,
            Self::Report(report) => StatusOrReport::Report(report.index),
        }
    }
}

/// An effect that the controller asks for.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Resolve the keys of the images, and send the task.
    Dispatch(Dispatch),
    /// Hand a message to a node's session, if there is one.
    Send(NodeName, CloudMessage),
    /// Write an object. At most one write of each object is under way.
    Write {
        /// The job.
        job: JobUid,
        /// The name of the job.
        name: String,
        /// A number that [`Input::Written`] returns.
        version: u64,
        /// The resourceVersion that the write replaces, as far as it is known. `None` for a report: there is none yet.
        replaces: Option<String>,
        /// The content to write.
        content: Content,
    },
    /// Delete a job, unless it was edited meanwhile.
    Delete {
        /// The job, and never another one of the same name.
        job: JobUid,
        /// The name of the job.
        name: String,
        /// Its metadata.generation, as far as the controller knows.
        generation: i64,
    },
    /// Forget the job, which is gone or has been over for long: nothing more is written for it.
    Forget(JobUid),
    /// Read a job that has begun, and then its reports: it is to go on.
    Recall {
        /// The job.
        job: JobUid,
        /// The name of the job.
        name: String,
    },
    /// Publish a Kubernetes event.
    Event(ObjectEvent),
}

/// A task that is to go out.
#[derive(Clone, Debug, PartialEq)]
pub struct Dispatch {
    /// The job of the task.
    pub job: Arc<ValidatedJob>,
    /// The node that pulls.
    pub node: NodeName,
    /// The attempt, from 1.
    pub attempt: u32,
    /// The images to pull, and with which secrets.
    pub plan: Arc<NodePlan>,
    /// Whether the node only looks whether the images are there, and downloads nothing.
    pub only_look: bool,
    /// The images that an earlier attempt has pulled, by their index in the plan.
    pub there: Vec<usize>,
    /// How much of the node's timeout is left.
    pub remaining: Duration,
    /// Whether there is time to wait for the owners of secrets, and to dispatch it once more.
    pub may_wait: bool,
    /// Whether the node is asked first if it needs them: an image that is there needs no key.
    pub asks_first: bool,
}
