//! A job as people follow it. Pure: made of the job, the sums of its reports, its pace and the time.

use jiff::Timestamp;
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::kruise;
use prepull_api::crd::remove::RemovalStatus;
use prepull_api::crd::status::{ImageBytes, JobPhase, Summary};
use prepull_api::failure::FailureCode;
use serde::Serialize;

use super::tally::{NodeAtWork, NodeGroup, Tally};
use crate::amounts::seconds_between;
use crate::jobs;
use crate::leader::Leaderless;
use crate::output::job_name;
use crate::screen::sanitize_line;

/// Seconds without a status after which a job has no leader: a leader that works takes a moment.
const NO_LEADER_AFTER: u64 = 10;

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[allow(clippy::struct_excessive_bools, reason = "the fields of a document")]
pub(crate) struct JobView {
    /// Name of the job; of one of OpenKruise's with its kind.
    pub(crate) job: String,
    /// Namespace of the job. Those that are ours have none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) namespace: Option<String>,
    pub(crate) phase: JobPhase,
    pub(crate) is_over: bool,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) reason: String,
    pub(crate) suspended: bool,
    /// Whether its downloads stand still as well.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) paused: bool,
    /// Whether it was cancelled, or is being cancelled.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) cancelled: bool,
    /// Whether its spec was refused before it began. The refusal of an edit isn't: the job goes on as before.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) refused: bool,
    /// How long it has been running, or how long it took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) seconds: Option<u64>,
    /// Rounds beyond the first that have begun.
    pub(crate) round: u32,
    pub(crate) images: Vec<String>,
    /// What the job has removed. Absent for a job that pulls; its `images` are those to remove, or their repositories.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) removal: Option<RemovalStatus>,
    /// Whether it removes nothing, and only shows what it would remove.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) dry_run: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) wave: Option<Wave>,
    /// Nodes by phase; of a list each counts once for each image.
    pub(crate) nodes: Summary,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) parts: Vec<ListPart>,
    /// Bytes on the nodes, and the total of all images with a known size.
    pub(crate) bytes: ImageBytes,
    /// Bytes of these that nodes didn't download, thanks to deltas.
    #[serde(skip_serializing_if = "is_zero")]
    pub(crate) delta_saved_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bytes_per_second: Option<u64>,
    /// How long it will still take, if it goes on like that. Windows close, and so it isn't known of a job that has some.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) seconds_left: Option<u64>,
    /// Failed nodes by code, the most frequent first.
    pub(crate) failures: Vec<Failures>,
    /// Waiting nodes by reason, the most frequent first.
    pub(crate) waiting: Vec<Alike>,
    /// Skipped nodes by reason, the most frequent first.
    pub(crate) skipped: Vec<Alike>,
    /// Nodes with an image that the kubelet will ask the registry for, although it's there, by reason.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) asking: Vec<Alike>,
    pub(crate) at_work: Vec<NodeAtWork>,
    /// How much is done, from 0 to 1.
    #[serde(skip)]
    pub(crate) done: f64,
}

/// Seconds of the pauses between waves that are still to come.
fn pauses_ahead(job: &ImagePrePullJob, now: Timestamp) -> u64 {
    let Some(wave) = job.status.as_ref().and_then(|status| status.rollout.as_ref()) else { return 0 };
    let each =
        job.spec.rollout.as_ref().and_then(|rollout| u64::try_from(rollout.pause_seconds).ok()).unwrap_or(0);
    let ahead = u64::from(wave.steps.saturating_sub(wave.step));
    match &wave.paused_until {
        None => ahead.saturating_mul(each),
        Some(until) => {
            seconds_between(now, until.0).saturating_add(ahead.saturating_sub(1).saturating_mul(each))
        }
    }
}

/// Whether the job has paused before its present wave.
fn has_paused_between_waves(job: &ImagePrePullJob) -> bool {
    let has_pauses = job.spec.rollout.as_ref().is_some_and(|rollout| rollout.pause_seconds > 0);
    let wave = job.status.as_ref().and_then(|status| status.rollout.as_ref());
    has_pauses && wave.is_some_and(|wave| wave.step > 1)
}

fn is_refused(job: &ImagePrePullJob) -> bool {
    let Some(status) = &job.status else { return false };
    let is_invalid = status.conditions.iter().any(|it| it.type_ == "Valid" && it.status == "False");
    is_invalid && status.summary.desired == 0 && status.phase == JobPhase::Failure
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ListPart {
    pub(crate) image: String,
    pub(crate) job: String,
    pub(crate) phase: JobPhase,
    pub(crate) nodes: Summary,
}

/// The current wave.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Wave {
    /// Its number, from 1.
    pub(crate) number: u32,
    /// How many there are.
    pub(crate) of: u32,
    /// How many nodes may have started by its end.
    pub(crate) nodes: u32,
    /// For how long the next one is still put off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) paused_seconds: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Failures {
    pub(crate) code: FailureCode,
    pub(crate) nodes: u64,
    pub(crate) examples: Vec<String>,
    /// The most frequent reason.
    pub(crate) reason: String,
    /// How many nodes have this very reason.
    pub(crate) nodes_with_reason: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Alike {
    pub(crate) reason: String,
    pub(crate) nodes: u64,
    pub(crate) examples: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct JobPace {
    pub(crate) bytes: f64,
    /// Parts of the whole job a second.
    pub(crate) done: f64,
}

impl JobView {
    /// The view without the fields that change with time alone. Used to find out whether anything else has changed.
    pub(crate) fn without_clock(&self) -> Self {
        let mut still = self.clone();
        (still.seconds, still.seconds_left, still.bytes_per_second) = (None, None, None);
        if let Some(wave) = &mut still.wave {
            wave.paused_seconds = None;
        }
        still
    }

    /// Makes the view. `pace`: what was observed; without it, the average since the start counts.
    pub(crate) fn new(job: &ImagePrePullJob, tally: &Tally, pace: Option<JobPace>, now: Timestamp) -> Self {
        let status = job.status.clone().unwrap_or_default();
        let is_over = jobs::is_over(job);
        let created = job.metadata.creation_timestamp.as_ref().map(|time| time.0);
        let started = status.start_time.as_ref().map(|time| time.0);
        let ended = status.completion_time.as_ref().filter(|_| is_over).map(|time| time.0);
        let seconds = started.map(|started| seconds_between(started, ended.unwrap_or(now)));
        let mut reason = sanitize_line(&status.reason);
        if status.observed_generation.is_none()
            && created.is_some_and(|created| seconds_between(created, now) >= NO_LEADER_AFTER)
        {
            "no cloudcore-prepull has looked at it yet; kubectl prepull check looks for the reason"
                .clone_into(&mut reason);
        }
        let nodes = status.summary;
        let done = part_done(&nodes, tally.done_at_work);
        let bytes = tally.bytes;
        // It has been suspended since its start, or had ended: for how long isn't known.
        let was_suspended = status.conditions.iter().any(|condition| {
            condition.type_ == "Suspended"
                && started.is_some_and(|start| condition.last_transition_time.0 > start)
        });
        let pauses = pauses_ahead(job, now);
        let has_stood = status.retry > 0 || was_suspended || pauses > 0 || has_paused_between_waves(job);
        // Those of the job, and those of boxes, as far as their agents say so.
        let waits = |node: &NodeAtWork| node.reason.starts_with("waits");
        let has_windows = !job.spec.windows.is_empty() || tally.at_work.iter().any(waits);
        let pace = pace
            .or_else(|| average(seconds?, bytes.done, done).filter(|_| !has_stood && !has_windows))
            .filter(|_| !is_over && nodes.in_progress > 0);
        let template = &job.spec.image_pre_pull_template;
        let sources = template.image_sources.iter().map(|source| {
            let tag = source.tag.as_ref().map(|tag| format!(":{tag}")).unwrap_or_default();
            let registry =
                source.registry.as_ref().map(|registry| format!("{registry}/")).unwrap_or_default();
            format!("{registry}{}{tag}", source.repository)
        });
        let removed = template
            .remove
            .iter()
            .flat_map(|remove| remove.images.iter().chain(&remove.repositories))
            .cloned();
        Self {
            job: job.metadata.name.clone().unwrap_or_default(),
            namespace: None,
            parts: Vec::new(),
            phase: status.phase,
            is_over,
            reason,
            suspended: job.spec.suspend || job.spec.pause,
            paused: job.spec.pause,
            cancelled: job.spec.cancel,
            refused: is_refused(job),
            seconds,
            round: status.retry,
            images: template
                .images
                .iter()
                .cloned()
                .chain(sources)
                .chain(removed)
                .map(|image| sanitize_line(&image))
                .collect(),
            removal: template.remove.as_ref().map(|_| status.removal.unwrap_or_default()),
            dry_run: template.remove.as_ref().is_some_and(|remove| remove.dry_run),
            wave: status.rollout.map(|wave| Wave {
                number: wave.step,
                of: wave.steps,
                nodes: wave.nodes,
                paused_seconds: wave.paused_until.map(|until| seconds_between(now, until.0)),
            }),
            bytes_per_second: pace.map(|pace| round_to_whole(pace.bytes)).filter(|rate| *rate > 0),
            seconds_left: pace
                .filter(|pace| pace.done > 0.0 && !has_windows)
                .map(|pace| round_to_whole((1.0 - done) / pace.done).saturating_add(pauses)),
            failures: failures(tally),
            waiting: groups(tally.waiting.iter().map(|(reason, group)| (reason.as_str(), group))),
            skipped: skipped(&status.skipped_nodes),
            asking: groups(tally.asking.iter().map(|(reason, group)| (reason.as_str(), group))),
            at_work: tally.at_work.clone(),
            nodes,
            bytes,
            delta_saved_bytes: tally.delta_saved,
            done,
        }
    }

    /// The view of another kind of job, with what its nodes say and the average pace.
    pub(crate) fn with_tally(mut self, tally: &Tally) -> Self {
        self.done = part_done(&self.nodes, 0.0);
        let pace = self.seconds.and_then(|seconds| average(seconds, 0, self.done));
        let pace = pace.filter(|pace| !self.is_over && self.nodes.in_progress > 0 && pace.done > 0.0);
        self.seconds_left = pace.map(|pace| round_to_whole((1.0 - self.done) / pace.done));
        self.failures = failures(tally);
        self.waiting = groups(tally.waiting.iter().map(|(reason, group)| (reason.as_str(), group)));
        self.at_work.clone_from(&tally.at_work);
        self
    }

    /// The view of a job that no replica carries on, if there is none.
    pub(crate) fn without_leader(mut self, gone: Option<&Leaderless>) -> Self {
        if let Some(gone) = gone.filter(|_| !self.is_over) {
            self.reason = format!(
                "{}. Nothing below is newer; kubectl prepull check looks for the reason",
                gone.text()
            );
            (self.bytes_per_second, self.seconds_left) = (None, None);
        }
        self
    }

    /// The view with this reason, unless it is one of the usual ones.
    pub(crate) fn with_reason(mut self, reason: &str, usual: &[&str]) -> Self {
        if !usual.iter().any(|usual| reason.starts_with(usual)) {
            self.reason = sanitize_line(reason);
        }
        self
    }

    /// The job as a command names it: `web`, or `imagepulljob/web -n shop`.
    pub(crate) fn command_name(&self) -> String {
        match &self.namespace {
            Some(namespace) => format!("{} -n {namespace}", self.job),
            None => self.job.clone(),
        }
    }

    /// The job as kubectl writes and takes it.
    pub(crate) fn full_name(&self) -> String {
        match self.job.split_once('/') {
            Some((kind, name)) => format!("{kind}.{}/{name}", kruise::GROUP),
            None => job_name(&self.job),
        }
    }

    pub(crate) fn noun(&self) -> &'static str {
        if self.parts.is_empty() { "node" } else { "pull" }
    }

    /// Nodes that have ended, well or badly.
    pub(crate) fn ended_nodes(&self) -> u32 {
        self.nodes.successful + self.nodes.failure + self.nodes.unknown
    }
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

fn part_done(nodes: &Summary, at_work: f64) -> f64 {
    let ended = f64::from(nodes.successful + nodes.failure + nodes.unknown);
    if nodes.desired == 0 { 0.0 } else { ((ended + at_work) / f64::from(nodes.desired)).min(1.0) }
}

/// The average of a job that has been running for so long. The first seconds say nothing.
fn average(seconds: u64, bytes: u64, done: f64) -> Option<JobPace> {
    const TOO_EARLY: u64 = 5;
    #[allow(clippy::cast_precision_loss)] // it becomes a rate for people
    (seconds >= TOO_EARLY)
        .then(|| JobPace { bytes: bytes as f64 / seconds as f64, done: done / seconds as f64 })
}

fn round_to_whole(number: f64) -> u64 {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // the cast saturates
    (number.round() as u64)
}

fn failures(tally: &Tally) -> Vec<Failures> {
    let mut failures: Vec<_> = tally
        .failures
        .iter()
        .map(|(code, group)| {
            let (reason, nodes_with_reason) = group.main_reason().unwrap_or_default();
            Failures {
                code: *code,
                nodes: group.nodes,
                examples: group.examples.clone(),
                reason: reason.to_owned(),
                nodes_with_reason,
            }
        })
        .collect();
    failures.sort_by_key(|failures| std::cmp::Reverse(failures.nodes));
    failures
}

fn groups<'a>(groups: impl Iterator<Item = (&'a str, &'a NodeGroup)>) -> Vec<Alike> {
    let mut nodes: Vec<_> = groups
        .map(|(reason, group)| Alike {
            reason: reason.to_owned(),
            nodes: group.nodes,
            examples: group.examples.clone(),
        })
        .collect();
    nodes.sort_by_key(|group| std::cmp::Reverse(group.nodes));
    nodes
}

fn skipped(skipped: &[prepull_api::crd::status::SkippedNode]) -> Vec<Alike> {
    let mut by_reason = std::collections::BTreeMap::<String, NodeGroup>::new();
    for node in skipped {
        by_reason.entry(sanitize_line(&node.reason)).or_default().add(&node.node_name);
    }
    groups(by_reason.iter().map(|(reason, group)| (reason.as_str(), group)))
}
