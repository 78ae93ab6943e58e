//! Simulated executor and container runtime of an edge. Pulls only take time. Pure: time is an argument, and the
//! results are events for the agent.

use std::collections::hash_map::DefaultHasher;
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use edgecore_prepull::tasks::agent::{AgentEvent, Execution, TaskEnd, TaskTerms};
use prepull_api::failure::FailureCode;
use prepull_api::task::{
    ByteProgress, CheckOutcome, ImageOutcome, ImagePhase, ImageProgress, ImageResult, PullPolicy, TaskId,
    TaskOutcome,
};
use prepull_api::wire::TaskProgress;

use super::behaviour::Behaviour;
use super::counts::FleetCounters;
use crate::chance::Chance;

/// Digest of every simulated image.
const DIGEST: &str = "sha256:0000000000000000000000000000000000000000000000000000000000000000";
/// Reason of every simulated failure.
const FAILED: &str = "simulated: the registry is away";
/// Interval of progress, as on real edges.
const PROGRESS_EVERY: Duration = Duration::from_secs(1);
/// Time after which another pull of a NodeImage's tag counts as a new request: the earlier jobs have gone, and the next
/// task has the same id if another job requests exactly the same.
const ASKED_ANEW: Duration = Duration::from_secs(60);

/// A simulated executor with its container runtime.
pub(super) struct SimulatedMachine {
    behaviour: Arc<Behaviour>,
    chance: Chance,
    /// Whether every image fails.
    fails: bool,
    counts: Arc<FleetCounters>,
    /// Hashes of the references in the store, which survives restarts like that of a container runtime.
    images: HashSet<u64>,
    /// Completion times of images, by task and index.
    whole: HashMap<(TaskId, usize), Instant>,
    /// Tasks. The first one is being worked on.
    runs: VecDeque<SimulatedTask>,
    /// The version of the agent.
    version: String,
    /// The task with the program that is on trial, or was last, and whether the edge goes back from it.
    trial: Option<(TaskId, bool)>,
    wants_restart: bool,
}

/// A task that was started.
struct SimulatedTask {
    work: Execution,
    pull: Option<Pull>,
}

/// A pull that is under way.
struct Pull {
    index: usize,
    began: Instant,
    ends: Instant,
    next_progress: Instant,
    fails: bool,
}

impl SimulatedMachine {
    pub(super) fn new(
        behaviour: Arc<Behaviour>,
        chance: Chance,
        fails: bool,
        counts: Arc<FleetCounters>,
    ) -> Self {
        let (images, whole, runs) = (HashSet::new(), HashMap::new(), VecDeque::new());
        let (version, trial, wants_restart) = ("simulated".to_owned(), None, false);
        Self { behaviour, chance, fails, counts, images, whole, runs, version, trial, wants_restart }
    }

    /// The version of the agent: the tag of the image that it was upgraded by.
    pub(super) fn version(&self) -> &str {
        &self.version
    }

    /// Whether a trial needs the agent to restart.
    pub(super) fn take_restart(&mut self) -> bool {
        std::mem::take(&mut self.wants_restart)
    }

    /// Time of the next call of [`Self::advance`].
    pub(super) fn next_due(&self) -> Option<Instant> {
        let progress = self.behaviour.image_bytes > 0;
        let of_first = self.runs.front().and_then(|run| {
            let pull = run.pull.as_ref()?;
            Some(if progress { pull.ends.min(pull.next_progress) } else { pull.ends })
        });
        self.runs.iter().map(|run| run.work.terms.deadline).chain(of_first).min()
    }

    pub(super) fn start_task(&mut self, work: Execution, now: Instant, events: &mut VecDeque<AgentEvent>) {
        if work.check.is_none() {
            events.push_back(AgentEvent::Checked(work.task.id.clone(), passed()));
        }
        self.runs.push_back(SimulatedTask { work, pull: None });
        if self.runs.len() == 1 {
            self.counts.begin_work();
        }
        self.advance(now, events);
    }

    pub(super) fn renew_terms(&mut self, task: &TaskId, terms: TaskTerms) {
        if let Some(run) = self.runs.iter_mut().find(|run| run.work.task.id == *task) {
            run.work.terms = terms;
        }
    }

    pub(super) fn stop_task(
        &mut self,
        task: &TaskId,
        reason: &str,
        now: Instant,
        events: &mut VecDeque<AgentEvent>,
    ) {
        if let Some(place) = self.runs.iter().position(|run| run.work.task.id == *task) {
            self.end_task(place, Some((TaskOutcome::Cancelled, reason)), events);
            self.advance(now, events);
        }
    }

    /// Simulates a power cut: forgets running pulls and keeps everything that would be on disk.
    pub(super) fn restart(&mut self) {
        if !self.runs.is_empty() {
            self.counts.end_work();
        }
        self.runs.clear();
    }

    /// Handles everything that's due by now.
    pub(super) fn advance(&mut self, now: Instant, events: &mut VecDeque<AgentEvent>) {
        while let Some(late) = self.runs.iter().position(|run| run.work.terms.deadline <= now) {
            self.end_task(late, Some((TaskOutcome::DeadlineExceeded, "the deadline passed")), events);
        }
        while !self.wants_restart
            && let Some(run) = self.runs.front_mut()
        {
            if let Some(pull) = run.pull.as_mut() {
                if pull.ends > now {
                    if self.behaviour.image_bytes > 0 && pull.next_progress <= now {
                        pull.next_progress = now + PROGRESS_EVERY;
                        events.push_back(progress_event(&run.work, pull, self.behaviour.image_bytes, now));
                    }
                    return;
                }
                let (index, fails) = (pull.index, pull.fails);
                run.pull = None;
                self.end_pull(index, fails, now, events);
            } else if let Some(index) = run.work.done.iter().position(Option::is_none) {
                self.begin_image(index, now, events);
            } else {
                self.end_task(0, None, events);
            }
        }
    }

    /// Begins with an image of the first task: starts a pull, or ends the image if it is in the store.
    fn begin_image(&mut self, index: usize, now: Instant, events: &mut VecDeque<AgentEvent>) {
        let Some(run) = self.runs.front_mut() else { return };
        let image = &run.work.task.images[index];
        let id = &run.work.task.id;
        if let Some((_, goes_back)) = self.trial.as_ref().filter(|(trial, _)| trial == id) {
            let ended = if *goes_back {
                let code = Some(FailureCode::UpgradeFailed);
                ImageResult { code, ..result(ImageOutcome::Failed, 1) }
            } else {
                result(ImageOutcome::Present, 1)
            };
            return self.end_image(index, ended, events);
        }
        let whole_since = self.whole.get(&(id.clone(), index));
        if whole_since.is_some_and(|since| !is_of_node_image(id) || now < *since + ASKED_ANEW) {
            self.counts.pull_twice(&run.work.task.id.job);
        }
        let there = self.images.contains(&hash(&image.reference));
        if image.policy != PullPolicy::Always && there {
            return self.end_image(index, result(ImageOutcome::Present, 0), events);
        }
        self.counts.pulls.fetch_add(1, Ordering::SeqCst);
        let fails = self.fails || self.chance.happens(self.behaviour.fail_rate);
        let ends = now + self.behaviour.pull.draw(&mut self.chance);
        // Spread over the second, so that the edges don't all report at the same moment.
        let next_progress = now + self.chance.between(Duration::ZERO, PROGRESS_EVERY);
        run.pull = Some(Pull { index, began: now, ends, next_progress, fails });
    }

    fn end_pull(&mut self, index: usize, fails: bool, now: Instant, events: &mut VecDeque<AgentEvent>) {
        let Some(run) = self.runs.front() else { return };
        let image = &run.work.task.images[index];
        if run.work.task.upgrade.is_some() {
            self.trial = Some((run.work.task.id.clone(), fails));
            if !fails {
                self.version = image.reference.rsplit(':').next().unwrap_or_default().to_owned();
            }
            self.wants_restart = true;
            return;
        }
        if fails {
            return self.end_image(index, result(ImageOutcome::Failed, image.retries + 1), events);
        }
        self.counts.whole.fetch_add(1, Ordering::SeqCst);
        self.images.insert(hash(&image.reference));
        self.whole.insert((run.work.task.id.clone(), index), now);
        let bytes = self.behaviour.image_bytes;
        let bytes = (bytes > 0).then_some(ByteProgress { done: bytes, total: bytes });
        self.end_image(index, ImageResult { bytes, ..result(ImageOutcome::Pulled, 1) }, events);
    }

    fn end_image(&mut self, index: usize, result: ImageResult, events: &mut VecDeque<AgentEvent>) {
        let Some(run) = self.runs.front_mut() else { return };
        run.work.done[index] = Some(result.clone());
        events.push_back(AgentEvent::ImageEnded { task: run.work.task.id.clone(), index, result });
    }

    /// Ends a task, with the outcome of its images unless it's ended early.
    fn end_task(
        &mut self,
        place: usize,
        early: Option<(TaskOutcome, &str)>,
        events: &mut VecDeque<AgentEvent>,
    ) {
        let Some(run) = self.runs.remove(place) else { return };
        if place == 0 {
            self.counts.end_work();
            if !self.runs.is_empty() {
                self.counts.begin_work();
            }
        }
        self.counts.ended.fetch_add(1, Ordering::SeqCst);
        let unended = early.map_or("", |(_, reason)| reason);
        let stopped = || ImageResult { reason: unended.to_owned(), ..result(ImageOutcome::Stopped, 0) };
        let images: Vec<_> = run.work.done.into_iter().map(|done| done.unwrap_or_else(stopped)).collect();
        let (outcome, reason) = match early {
            Some(early) => early,
            None if images.iter().all(|image| image.outcome.is_on_node()) => (TaskOutcome::Succeeded, ""),
            None => (TaskOutcome::Failed, FAILED),
        };
        self.counts.failed.fetch_add(u64::from(outcome != TaskOutcome::Succeeded), Ordering::SeqCst);
        let end =
            TaskEnd { removal: None, outcome, reason: reason.to_owned(), check: Some(passed()), images };
        events.push_back(AgentEvent::Ended(run.work.task.id, end));
    }
}

fn hash(reference: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    reference.hash(&mut hasher);
    hasher.finish()
}

fn passed() -> CheckOutcome {
    CheckOutcome { passed: true, reason: String::new() }
}

fn result(outcome: ImageOutcome, attempts: u32) -> ImageResult {
    ImageResult {
        digest: outcome.is_on_node().then(|| DIGEST.to_owned()),
        reason: if outcome == ImageOutcome::Failed { FAILED.to_owned() } else { String::new() },
        code: (outcome == ImageOutcome::Failed).then_some(FailureCode::Unreachable),
        attempts,
        ..ImageResult::new(outcome)
    }
}

/// Whether a task is for a tag of a NodeImage: its job id contains a dot, and no UID does.
fn is_of_node_image(task: &TaskId) -> bool {
    task.job.0.contains('.')
}

fn progress_event(work: &Execution, pull: &Pull, total: u64, now: Instant) -> AgentEvent {
    let (part, whole) = ((now - pull.began).as_millis(), (pull.ends - pull.began).as_millis());
    let done = (u128::from(total) * part).checked_div(whole).and_then(|done| u64::try_from(done).ok());
    let bytes = Some(ByteProgress { done: done.unwrap_or(0), total });
    let index = u32::try_from(pull.index).unwrap_or(u32::MAX);
    let image = ImageProgress { bytes, attempts: 1, ..ImageProgress::new(index, ImagePhase::Pulling) };
    AgentEvent::Progress(TaskProgress {
        task: work.task.id.clone(),
        images: vec![image],
        waits: String::new(),
    })
}

#[cfg(test)]
mod tests;
