//! One tag that has not ended: what is to be done for it, and how far that is.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::crd::kruise::{ImageSpec, ImageTagSpec, ImageTagStatus, PullPhase};
use prepull_api::overriders::SecretRef;
use prepull_api::task::{
    CheckItem, ImageTask, JobUid, NodeName, SandboxMetadata, Task, TaskId, TaskOutcome, TaskResult,
};
use prepull_api::wire::truncate_reason;

use super::super::rules::ValidTag;
use super::Order;
use super::edit::is_job;

/// What a task may take beyond all of its tries and the waits between them: the check of the disk, and a node that was
/// about to be busy with something else.
const SLACK: Duration = Duration::from_secs(60);
/// The longest wait between two tries, as the edge does it.
const LONGEST_WAIT: u64 = 30;
/// A node that is connected and has said nothing for this much longer than its time is not going to.
const SILENCE: Duration = Duration::from_secs(120);
/// Before a task that the node gave back is sent once more.
pub(super) const GIVEN_BACK: Duration = Duration::from_secs(5);

/// Separates the NodeImage from the tag in a task's job. A UID has none.
const MARK: char = '.';

/// Whether a task is of a NodeImage, and not of an ImagePrePullJob.
pub fn is_of_node_image(task: &TaskId) -> bool {
    task.job.0.contains(MARK)
}

/// See the module.
#[derive(Debug)]
pub(super) struct Work {
    /// What is wanted.
    pub(super) task: TaskId,
    /// What is with the node: as `task`, or an earlier round of the very same.
    pub(super) sent: TaskId,
    pub(super) version: i64,
    pub(super) tag: ValidTag,
    pub(super) state: State,
    /// When it was first sent.
    pub(super) since: Option<Timestamp>,
    /// When the node was last heard of it.
    pub(super) heard: Option<Timestamp>,
    pub(super) progress: i32,
    pub(super) message: String,
    /// It takes a place on the node.
    pub(super) has_place: bool,
    /// The node has it in its ledger, and waits for its keys.
    pub(super) waits_for_keys: bool,
    /// It was sent by an earlier cloudcore, or for an entry of the same name that was taken out since: with keys that may
    /// be old.
    pub(super) is_inherited: bool,
    pub(super) not_before: Option<Timestamp>,
}

/// How far it is.
#[derive(Debug)]
pub(super) enum State {
    /// For the node to be online, and to have a place free.
    Waiting,
    /// Its key is being resolved.
    Resolving,
    /// The node has it.
    With,
    /// The node has it, and is offline.
    Away,
    /// The API server does not know yet.
    Ended {
        status: Box<ImageTagStatus>,
        /// What the node waits for.
        ack: Option<TaskId>,
    },
}

impl Work {
    pub(super) fn new(task: TaskId, version: i64, tag: ValidTag) -> Self {
        Self {
            sent: task.clone(),
            task,
            version,
            tag,
            state: State::Waiting,
            since: None,
            heard: None,
            progress: 0,
            message: String::new(),
            has_place: false,
            waits_for_keys: false,
            is_inherited: false,
            not_before: None,
        }
    }

    /// Goes on where the API server knows it to be.
    pub(super) fn resume(mut self, known: Option<&ImageTagStatus>) -> Self {
        if let Some(known) = known.filter(|known| known.version == self.version) {
            self.since = known.start_time.as_ref().map(|time| time.0);
            self.progress = known.progress;
        }
        self
    }

    /// Whether the node has it, or is about to.
    pub(super) fn is_out(&self) -> bool {
        matches!(self.state, State::Resolving | State::With | State::Away)
    }

    /// Whether the node's ledger has it, or is about to.
    pub(super) fn is_in_ledger(&self) -> bool {
        self.is_out() || self.waits_for_keys || matches!(self.state, State::Ended { ack: Some(_), .. })
    }

    /// Time for the node, all tries and waits together.
    fn budget(&self) -> Duration {
        let waits: u64 = (0..self.tag.retries.min(1000)).map(|n| (1_u64 << n.min(5)).min(LONGEST_WAIT)).sum();
        let tries = self.tag.timeout.saturating_mul(self.tag.retries.saturating_add(1));
        tries.saturating_add(Duration::from_secs(waits)).saturating_add(SLACK)
    }

    /// What is left of that.
    pub(super) fn remaining(&self, now: Timestamp) -> Duration {
        let whole = self.tag.active_deadline.unwrap_or_else(|| self.budget());
        let passed = self.since.map_or(Duration::ZERO, |since| {
            Duration::try_from(now.duration_since(since)).unwrap_or_default()
        });
        match self.tag.active_deadline {
            Some(_) => whole.saturating_sub(passed),
            // Without a deadline a node that was cut off has all of its tries again.
            None => whole,
        }
    }

    /// When it is given up here, whatever the node does.
    pub(super) fn gives_up(&self) -> Option<Timestamp> {
        let (since, whole) = match (&self.state, self.tag.active_deadline) {
            (State::With | State::Away | State::Waiting | State::Resolving, Some(deadline)) => {
                (self.since?, deadline)
            }
            (State::With, None) => (self.heard?, self.budget()),
            _ => return None,
        };
        since.checked_add(whole.saturating_add(SILENCE)).ok()
    }

    /// Why it was given up then.
    pub(super) fn gave_up(&self) -> &'static str {
        if self.tag.active_deadline.is_some() { EXCEEDED } else { SILENT }
    }

    /// What the status says of it.
    pub(super) fn status(&self, tag: &ImageTagSpec) -> ImageTagStatus {
        match &self.state {
            State::Ended { status, .. } => status.as_ref().clone(),
            _ => ImageTagStatus {
                tag: tag.tag.clone(),
                phase: if self.since.is_some() { PullPhase::Pulling } else { PullPhase::Waiting },
                progress: self.progress,
                start_time: self.since.map(stamp),
                version: self.version,
                message: self.message.clone(),
                ..ImageTagStatus::default()
            },
        }
    }

    /// It ended without the node.
    pub(super) fn failed(&mut self, tag: &str, message: String, now: Timestamp) {
        let status = ended(self, tag, PullPhase::Failed, message, now);
        self.state = State::Ended { status: Box::new(status), ack: None };
    }

    /// The node says how it ended.
    pub(super) fn ends(&mut self, name: &str, tag: &str, result: &TaskResult, now: Timestamp) {
        let image = result.images.first();
        let there = image.filter(|image| image.outcome.is_on_node());
        let mut status = if let Some(image) = there {
            let mut status = ended(self, tag, PullPhase::Succeeded, String::new(), now);
            status.progress = 100;
            let id = image.id.as_ref().or(image.digest.as_ref());
            status.image_id = id.map(|id| truncate_reason(&format!("{name}@{id}")));
            status
        } else {
            // What is said of an image that was not tried says less than what is said of the check.
            let checked = result.check.as_ref().is_none_or(|check| check.passed);
            let said = image.map(|image| image.reason.as_str()).filter(|said| checked && !said.is_empty());
            let mut why = truncate_reason(said.unwrap_or(&result.reason));
            if result.outcome == TaskOutcome::DeadlineExceeded && self.tag.active_deadline.is_some() {
                why = format!("{EXCEEDED}: {why}");
            }
            ended(self, tag, PullPhase::Failed, why, now)
        };
        status.start_time = status.start_time.or_else(|| now.checked_sub(result.took).ok().map(stamp));
        self.state = State::Ended { status: Box::new(status), ack: Some(result.task.clone()) };
    }

    /// The task, to be sent to the node.
    pub(super) fn order(
        &self,
        node: &NodeName,
        name: &str,
        image: &ImageSpec,
        tag: &ImageTagSpec,
        now: Timestamp,
    ) -> Order {
        let full = full_name(name, &tag.tag);
        let task = Task {
            id: self.task.clone(),
            title: format!("nodeimage/{full}"),
            checks: vec![CheckItem::Disk],
            images: vec![ImageTask {
                image: full,
                reference: self.tag.reference.to_string(),
                policy: self.tag.policy,
                retries: self.tag.retries,
                key: 0,
                timeout: Some(self.tag.timeout),
                sandbox: sandbox(image),
            }],
        };
        Order {
            node: node.clone(),
            task,
            reference: self.tag.reference.clone(),
            secrets: secrets(image, tag),
            remaining: self.remaining(now),
        }
    }
}

const EXCEEDED: &str = "pulling exceeds the activeDeadlineSeconds";
const SILENT: &str = "node has not responded for a long time";

fn ended(work: &Work, tag: &str, phase: PullPhase, message: String, now: Timestamp) -> ImageTagStatus {
    ImageTagStatus {
        tag: tag.to_owned(),
        phase,
        progress: work.progress,
        start_time: work.since.map(stamp),
        completion_time: Some(stamp(now)),
        version: work.version,
        image_id: None,
        message,
    }
}

/// A tag that cannot be done at all.
pub(super) fn refused(tag: &ImageTagSpec, words: String, now: Timestamp) -> ImageTagStatus {
    ImageTagStatus {
        tag: tag.tag.clone(),
        phase: PullPhase::Failed,
        completion_time: Some(stamp(now)),
        version: tag.version,
        message: words,
        ..ImageTagStatus::default()
    }
}

/// Names the task of a tag: another one where the node would do something else for it. The sandbox is of the whole image: a
/// job that gives another one for its tag does not disturb the other tags; it counts from the next task.
pub(super) fn task_id(uid: &str, name: &str, tag: &ImageTagSpec, valid: &ValidTag) -> TaskId {
    let what = serde_json::json!([
        name,
        tag.tag,
        valid.reference.to_string(),
        valid.policy,
        valid.retries,
        valid.timeout.as_secs(),
        valid.active_deadline.map(|deadline| deadline.as_secs()),
    ]);
    let hash = ring::digest::digest(&ring::digest::SHA256, what.to_string().as_bytes());
    let hash = hash.as_ref().iter().take(8).fold(String::new(), |mut hex, byte| {
        use std::fmt::Write;
        // Writing to a String cannot fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    });
    TaskId { job: JobUid(format!("{uid}{MARK}{hash}")), attempt: valid.attempt }
}

/// `name:tag`, or `name@digest`.
pub fn full_name(name: &str, tag: &str) -> String {
    let mark = if tag.contains(':') { '@' } else { ':' };
    format!("{name}{mark}{tag}")
}

fn sandbox(image: &ImageSpec) -> Option<SandboxMetadata> {
    let config = image.sandbox_config.as_ref()?;
    Some(SandboxMetadata {
        labels: config.labels.clone().unwrap_or_default(),
        annotations: config.annotations.clone().unwrap_or_default(),
    })
}

/// The secrets of an image are shared by its tags. One that belongs to jobs uses no secret of a namespace where none of
/// them is: a job could else pull with what it may not read.
fn secrets(image: &ImageSpec, tag: &ImageTagSpec) -> Vec<SecretRef> {
    let owners: Vec<_> = tag.owner_references.iter().filter(|owner| is_job(owner)).collect();
    let may_use = |namespace: &str| {
        owners.is_empty() || owners.iter().any(|owner| owner.namespace.as_deref() == Some(namespace))
    };
    let usable = image.pull_secrets.iter().filter(|secret| may_use(&secret.namespace));
    usable.filter_map(|secret| SecretRef::new(&secret.namespace, &secret.name).ok()).collect()
}

/// Kubernetes' times have whole seconds.
pub(super) fn stamp(now: Timestamp) -> Time {
    Time(Timestamp::from_second(now.as_second()).unwrap_or(now))
}
