//! One tag that has not ended: its task, and how far the task is.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::crd::kruise::{ImageTagStatus, PullPhase, SandboxConfig};
use prepull_api::enroll::hex;
use prepull_api::overriders::SecretRef;
use prepull_api::task::{
    CheckItem, ImageTask, JobUid, SandboxMetadata, Task, TaskId, TaskOutcome, TaskResult,
};
use prepull_api::wire::truncate_reason;

use super::compact::{CompactTag, TagStatus};
use super::effects::{CancelledTasks, NodeEffects};
use super::owners::{job_of, round_jobs, round_namespace};
use super::shared_parts::ImageTerms;
use super::{RequestOf, TagDispatch};
use crate::kruise::rules::{MAX_SECRETS, ValidTag};
use crate::kruise::{TagKey, TagRequest};
use crate::shared::access::KeysSent;
use crate::shared::pacing::{Moment, OWN_WINDOWS};
use crate::shared::postponement::Postponement;

/// What a task may take beyond all of its tries and the waits between them: for the check of the disk, and for a node that
/// is about to work on something else.
const SLACK: Duration = Duration::from_secs(60);
/// Longest time of a task that can work: it keeps a slot that the jobs of all namespaces wait for.
const LONGEST: Duration = Duration::from_secs(24 * 3600);
/// Most secrets that are read for a task, one after the other while it keeps a slot: those of the job that asked last, and
/// as many of other jobs, or that were written by hand.
const MOST_SECRETS: usize = 2 * MAX_SECRETS;
/// Seconds of the longest wait between two tries, as the edge does it.
const LONGEST_WAIT: u64 = 30;
/// How long an online node may be silent beyond its time, before it is given up.
const SILENCE: Duration = Duration::from_secs(120);
/// The wait before a task that the node did not take, or gave back, is sent once more.
pub(super) const RESEND: Duration = Duration::from_secs(5);

/// Job ids of NodeImage tasks are `<uid>.<hash>`; Kubernetes UIDs contain no dot.
const SEPARATOR: char = '.';

/// Whether a task is for a tag of a NodeImage, and not for an ImagePrePullJob.
pub fn is_of_node_image(task: &TaskId) -> bool {
    task.job.0.contains(SEPARATOR)
}

/// A tag that has not ended.
#[derive(Debug)]
pub(super) struct TagPull {
    pub(super) key: TagKey,
    /// The task that the spec asks for.
    pub(super) task: TaskId,
    /// The task that the node has or is to get: `task`, or an earlier round of the very same, which is not interrupted.
    pub(super) sent: TaskId,
    /// `version` of the tag.
    pub(super) version: i64,
    pub(super) tag: ValidTag,
    state: TagPullState,
    /// When the task was sent for the first time.
    pub(super) started: Option<Timestamp>,
    /// When the node last said something about the task.
    pub(super) last_heard: Option<Timestamp>,
    /// Percent.
    pub(super) progress: i32,
    pub(super) message: String,
    /// The node's reason for downloading nothing at the moment, such as its window; empty if nothing holds it up.
    pub(super) waits: String,
    /// Whether the node said when it connected that its ledger has the task without its keys. It is sent again with them.
    pub(super) needs_keys: bool,
    /// Whether an earlier cloudcore sent the task, or it was sent for a tag that was removed since and added again: with
    /// credentials that may be out of date, so that a failure does not count.
    pub(super) is_inherited: bool,
    /// Before this the task is not sent.
    pub(super) not_before: Option<Timestamp>,
    /// When the dispatch that is under way has begun, or the last one.
    dispatched: Option<Timestamp>,
    /// Since a secret of the task could not be read, until the task is sent.
    postponement: Option<Box<Postponement>>,
    /// The credentials that were sent last, by this leader.
    pub(super) keys: Option<KeysSent>,
}

#[derive(Debug)]
pub(super) enum TagPullState {
    /// It waits for the node to be online and to have a free slot.
    Waiting,
    /// It holds a slot, and its credentials are being resolved.
    Dispatching,
    /// It holds a slot, and the node has it.
    OnNode,
    /// The node has it, and is offline.
    OnOfflineNode,
    /// It has ended, and the API server does not have its status yet.
    Ended {
        status: Box<ImageTagStatus>,
        /// The node keeps this task's result until the acknowledgement. `None` if the task ended without the node.
        unacknowledged: Option<TaskId>,
    },
}

impl TagPullState {
    /// Whether the task takes one of the node's slots.
    fn holds_slot(&self) -> bool {
        matches!(self, Self::Dispatching | Self::OnNode)
    }
}

impl TagPull {
    pub(super) fn new(key: TagKey, task: TaskId, version: i64, tag: ValidTag) -> Self {
        Self {
            key,
            sent: task.clone(),
            task,
            version,
            tag,
            state: TagPullState::Waiting,
            started: None,
            last_heard: None,
            progress: 0,
            message: String::new(),
            waits: String::new(),
            needs_keys: false,
            is_inherited: false,
            not_before: None,
            dispatched: None,
            postponement: None,
            keys: None,
        }
    }

    /// Continues from the status that the API server has of this version.
    pub(super) fn resume(mut self, stored: Option<&TagStatus>) -> Self {
        if let Some(stored) = stored.filter(|stored| stored.version == self.version) {
            self.started = stored.started;
            self.progress = stored.progress;
        }
        self
    }

    pub(super) fn state(&self) -> &TagPullState {
        &self.state
    }

    /// Changes the state, and takes or frees the node's slot with it.
    fn set_state(&mut self, state: TagPullState, fx: &mut NodeEffects<'_>) {
        if self.state.holds_slot() != state.holds_slot() {
            fx.change_slot(state.holds_slot());
        }
        self.state = state;
    }

    /// Has the task sent from the beginning.
    pub(super) fn wait_to_send(&mut self, fx: &mut NodeEffects<'_>) {
        self.set_state(TagPullState::Waiting, fx);
        self.sent = self.task.clone();
    }

    /// Has the task sent from the beginning, but not at once.
    pub(super) fn wait_to_resend(&mut self, fx: &mut NodeEffects<'_>) {
        self.wait_to_send(fx);
        self.not_before = fx.now.checked_add(RESEND).ok();
    }

    /// A secret of the task could not be read: it is sent after a while. `false` where its time does not allow another
    /// try.
    pub(super) fn postpone(&mut self, reason: &str, fx: &mut NodeEffects<'_>) -> bool {
        let limit = self.whole_time();
        let tried = self.dispatched.map_or(Duration::ZERO, |since| Moment::time_since(fx.now, since));
        let Some(wait) = self.postponement.get_or_insert_default().next_wait(tried, limit) else {
            return false;
        };
        self.wait_to_send(fx);
        self.not_before = Some(fx.now.later_by(wait));
        self.message = truncate_reason(reason);
        true
    }

    /// Sends the task. A slot has been taken for it already.
    pub(super) fn begin_dispatch(&mut self, now: Timestamp) {
        self.state = TagPullState::Dispatching;
        self.sent = self.task.clone();
        self.dispatched = Some(now);
    }

    pub(super) fn mark_sent(&mut self, now: Timestamp) {
        self.started = self.started.or(Some(now));
        self.last_heard = Some(now);
        if self.postponement.take().is_some() {
            self.message.clear();
        }
    }

    pub(super) fn mark_on_node(&mut self, fx: &mut NodeEffects<'_>) {
        self.set_state(TagPullState::OnNode, fx);
        self.last_heard = Some(fx.now);
        // A node that waits reports that in each session.
        self.waits.clear();
    }

    /// The node went offline with the task, or the task reached it just before.
    pub(super) fn mark_offline(&mut self, fx: &mut NodeEffects<'_>) {
        self.set_state(TagPullState::OnOfflineNode, fx);
    }

    /// Takes over a task that the node has from before a restart of cloudcore.
    pub(super) fn inherit(&mut self, task: &TaskId, fx: &mut NodeEffects<'_>) {
        self.sent = task.clone();
        self.mark_on_node(fx);
        self.started = self.started.or(Some(fx.now));
        self.is_inherited = true;
    }

    /// Gives the task up because the spec does not ask for it any more: cancels it, or acknowledges its result.
    pub(super) fn abandon(&mut self, cancelled: &mut CancelledTasks, fx: &mut NodeEffects<'_>) {
        if self.is_assigned() || self.needs_keys {
            cancelled.cancel(&self.sent, UNWANTED, fx);
        }
        if let TagPullState::Ended { unacknowledged: Some(task), .. } = &self.state {
            fx.acknowledge(task.clone());
        }
        self.set_state(TagPullState::Waiting, fx);
    }

    /// Whether the node has the task, or is about to get it.
    pub(super) fn is_sent(&self) -> bool {
        self.is_assigned() || matches!(self.state, TagPullState::Dispatching)
    }

    /// Whether the node has the task. One that it is about to get is cancelled once it has been sent.
    pub(super) fn is_assigned(&self) -> bool {
        matches!(self.state, TagPullState::OnNode | TagPullState::OnOfflineNode)
    }

    /// Whether the node's ledger has the task, or is about to have it.
    pub(super) fn is_in_ledger(&self) -> bool {
        let has_result = matches!(self.state, TagPullState::Ended { unacknowledged: Some(_), .. });
        self.is_sent() || self.needs_keys || has_result
    }

    /// The time that all tries and the waits between them may take.
    fn time_for_tries(&self) -> Duration {
        let waits: u64 = (0..self.tag.retries.min(1000)).map(|n| (1_u64 << n.min(5)).min(LONGEST_WAIT)).sum();
        let tries = self.tag.timeout.saturating_mul(self.tag.retries.saturating_add(1));
        tries.saturating_add(Duration::from_secs(waits)).saturating_add(SLACK).min(LONGEST)
    }

    /// How long the task may take in all: see [`LONGEST`].
    fn whole_time(&self) -> Duration {
        self.tag.active_deadline.map_or_else(
            || self.time_for_tries(),
            |deadline| deadline.min(OWN_WINDOWS.saturating_add(LONGEST)),
        )
    }

    /// How long the task may take from now on.
    fn remaining(&self, now: Timestamp) -> Duration {
        let whole = self.whole_time();
        let waited = self.postponement.as_ref().map_or(Duration::ZERO, |postponement| postponement.spent());
        let passed = self.started.map_or(waited, |since| Moment::time_since(now, since));
        match self.tag.active_deadline {
            Some(_) => whole.saturating_sub(passed),
            // Without a deadline a task that is sent again has all of its tries again.
            None => whole,
        }
    }

    /// When an open task is given up, even if the node still works on it.
    pub(super) fn give_up_due(&self) -> Option<Timestamp> {
        let (since, whole) = match (&self.state, self.tag.active_deadline) {
            (_, Some(_)) => (self.started?, self.whole_time()),
            // It has nothing to say until its window opens, and its tries have not begun.
            (TagPullState::OnNode, None) if !self.waits.is_empty() => {
                (self.last_heard?, self.time_for_tries().saturating_add(OWN_WINDOWS))
            }
            (TagPullState::OnNode, None) => (self.last_heard?, self.time_for_tries()),
            (_, None) => return None,
        };
        since.checked_add(whole.saturating_add(SILENCE)).ok()
    }

    /// The message of a task that is out of time.
    pub(super) fn give_up_reason(&self) -> &'static str {
        if self.tag.active_deadline.is_some() { EXCEEDED } else { SILENT }
    }

    pub(super) fn status(&self) -> ImageTagStatus {
        match &self.state {
            TagPullState::Ended { status, .. } => status.as_ref().clone(),
            _ => ImageTagStatus {
                tag: self.key.tag.clone(),
                phase: if self.started.is_some() { PullPhase::Pulling } else { PullPhase::Waiting },
                progress: self.progress,
                start_time: self.started.map(whole_seconds),
                version: self.version,
                message: if self.waits.is_empty() { &self.message } else { &self.waits }.clone(),
                ..ImageTagStatus::default()
            },
        }
    }

    /// Ends the task as failed without a result of the node.
    pub(super) fn fail_without_result(&mut self, message: String, fx: &mut NodeEffects<'_>) {
        let status = self.ended_status(PullPhase::Failed, message, fx.now);
        self.set_state(TagPullState::Ended { status: Box::new(status), unacknowledged: None }, fx);
    }

    /// Has the node's result acknowledged once the status is stored, if the task has ended without it.
    pub(super) fn await_acknowledgement(&mut self, task: &TaskId) {
        if let TagPullState::Ended { unacknowledged, .. } = &mut self.state {
            *unacknowledged = Some(task.clone());
        }
    }

    pub(super) fn end_with_result(&mut self, result: &TaskResult, fx: &mut NodeEffects<'_>) {
        let now = fx.now;
        let image = result.images.first();
        let present = image.filter(|image| image.outcome.is_on_node());
        let mut status = if let Some(image) = present {
            let mut status = self.ended_status(PullPhase::Succeeded, String::new(), now);
            status.progress = 100;
            let id = image.id.as_ref().or(image.digest.as_ref());
            status.image_id = id.map(|id| truncate_reason(&format!("{}@{id}", self.key.image)));
            status
        } else {
            // If the node failed its checks, it didn't try the image, and the task's reason is more precise.
            let has_passed = result.check.as_ref().is_none_or(|check| check.passed);
            let reason = image.map(|image| image.reason.as_str());
            let reason = reason.filter(|reason| has_passed && !reason.is_empty()).unwrap_or(&result.reason);
            let mut message = truncate_reason(reason);
            if result.outcome == TaskOutcome::DeadlineExceeded && self.tag.active_deadline.is_some() {
                message = format!("{EXCEEDED}: {message}");
            }
            self.ended_status(PullPhase::Failed, message, now)
        };
        status.start_time =
            status.start_time.or_else(|| now.checked_sub(result.took).ok().map(whole_seconds));
        let unacknowledged = Some(result.task.clone());
        self.set_state(TagPullState::Ended { status: Box::new(status), unacknowledged }, fx);
    }

    fn ended_status(&self, phase: PullPhase, message: String, now: Timestamp) -> ImageTagStatus {
        ImageTagStatus {
            tag: self.key.tag.clone(),
            phase,
            progress: self.progress,
            start_time: self.started.map(whole_seconds),
            completion_time: Some(whole_seconds(now)),
            version: self.version,
            image_id: None,
            message,
        }
    }

    /// The image, with the credentials that were given for it. `None`: an earlier leader gave them.
    pub(super) fn entitlement(&self, image: &ImageTerms, tag: &CompactTag) -> Option<String> {
        let image_only = usable_secrets(image, &tag.terms.owner_references).is_empty();
        match self.keys {
            Some(KeysSent::All(keys)) => Some(format!("{} {keys:x}", self.tag.reference)),
            // The registry gives it to everyone, or the node has none of it.
            Some(KeysSent::Missing) => Some(self.tag.reference.to_string()),
            None => image_only.then(|| self.tag.reference.to_string()),
        }
    }

    pub(super) fn make_dispatch(
        &self,
        image: &ImageTerms,
        tag: &CompactTag,
        request_of: RequestOf<'_>,
        fx: &NodeEffects<'_>,
    ) -> TagDispatch {
        let owners = &tag.terms.owner_references;
        let jobs: Vec<JobUid> = round_jobs(owners).filter_map(job_of).collect();
        // The one that asked last comes first.
        let requests: Vec<_> = jobs.iter().rev().filter_map(request_of).collect();
        let (secrets, of_jobs) = choose_secrets(usable_secrets(image, owners), &requests);
        // The image's is that of the job which asked last for any tag of it, maybe in another namespace. It counts where no job is
        // known: for tags without one, and where none can be read.
        let sandbox = match requests.first() {
            Some(request) => request.sandbox.as_ref(),
            None => image.sandbox_config.as_ref(),
        };
        let image_task = ImageTask {
            image: self.key.to_string(),
            reference: self.tag.reference.to_string(),
            policy: self.tag.policy,
            retries: self.tag.retries,
            key: 0,
            timeout: Some(self.tag.timeout),
            sandbox: sandbox.map(sandbox_metadata),
        };
        TagDispatch {
            node: fx.node.clone(),
            task: Task {
                upgrade: None,
                removal: None,
                id: self.task.clone(),
                title: format!("nodeimage/{}", self.key),
                checks: vec![CheckItem::Disk],
                images: vec![image_task],
            },
            reference: self.tag.reference.clone(),
            secrets,
            jobs,
            of_jobs,
            remaining: self.remaining(fx.now),
        }
    }
}

/// Why a task is cancelled that no tag asks for.
pub(super) const UNWANTED: &str = "the NodeImage does not ask for this any more";
/// The message of a task whose jobs don't wait for it. The node may be at work, and in time: an edit may have taken it out of
/// its job, or the job's time was over before the task's.
pub(super) const ABANDONED: &str = "its jobs have ended";
const EXCEEDED: &str = "pulling exceeds the activeDeadlineSeconds";
const SILENT: &str = "node has not responded for a long time";

/// The status of a tag that the rules refuse.
pub(super) fn refused_status(tag: &CompactTag, reason: String, now: Timestamp) -> ImageTagStatus {
    ImageTagStatus {
        tag: tag.name.to_string(),
        phase: PullPhase::Failed,
        completion_time: Some(whole_seconds(now)),
        version: tag.version,
        message: reason,
        ..ImageTagStatus::default()
    }
}

/// The id of a tag's task: it changes with everything that changes the node's work. The sandbox does not count, since
/// it belongs to the whole image: a job that changes it does not disturb the other tags.
pub(super) fn task_id(uid: &str, key: &TagKey, valid: &ValidTag) -> TaskId {
    let what = serde_json::json!([
        key.image,
        key.tag,
        valid.reference.to_string(),
        valid.policy,
        valid.retries,
        valid.timeout.as_secs(),
        valid.active_deadline.map(|deadline| deadline.as_secs()),
    ]);
    let hash = ring::digest::digest(&ring::digest::SHA256, what.to_string().as_bytes());
    let hash = hex(&hash.as_ref()[..8]);
    TaskId { job: JobUid(format!("{uid}{SEPARATOR}{hash}")), attempt: valid.attempt }
}

fn sandbox_metadata(config: &SandboxConfig) -> SandboxMetadata {
    SandboxMetadata {
        labels: config.labels.clone().unwrap_or_default(),
        annotations: config.annotations.clone().unwrap_or_default(),
    }
}

/// The secrets that a tag may use. Those of an image are shared by its tags; a tag that is pulled for jobs uses only those
/// in their namespace, or a job could pull with credentials that it may not read.
fn usable_secrets(image: &ImageTerms, owners: &[ObjectReference]) -> Vec<SecretRef> {
    let round = round_namespace(owners);
    let usable =
        image.pull_secrets.iter().filter(|secret| round.is_none_or(|round| round == secret.namespace));
    usable.filter_map(|secret| SecretRef::new(&secret.namespace, &secret.name).ok()).collect()
}

/// The secrets to read for a task, and those of them that its jobs name, which come first.
fn choose_secrets(
    mut usable: Vec<SecretRef>,
    requests: &[Arc<TagRequest>],
) -> (Vec<SecretRef>, Vec<SecretRef>) {
    let mut ranks: HashMap<(&str, &str), usize> = HashMap::new();
    for (rank, request) in requests.iter().enumerate() {
        for secret in &request.secrets {
            ranks.entry((&secret.namespace, &secret.name)).or_insert(rank);
        }
    }
    let rank_of = |secret: &SecretRef| ranks.get(&(secret.namespace(), secret.name())).copied();
    usable.sort_by_key(|secret| rank_of(secret).unwrap_or(usize::MAX));
    usable.truncate(MOST_SECRETS);
    let of_jobs = usable.iter().filter(|secret| rank_of(secret).is_some()).cloned().collect();
    (usable, of_jobs)
}

/// The time as Kubernetes stores it.
fn whole_seconds(now: Timestamp) -> Time {
    Time(Timestamp::from_second(now.as_second()).unwrap_or(now))
}
