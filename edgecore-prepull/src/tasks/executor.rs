//! Execution of one task: the checks, then its images, within the node's limit of parallel pulls.
//!
//! - An image holds no permit to pull between two attempts, or while it's being flushed.
//! - A task requests no more permits than the node has, so that a long task doesn't starve a short one.
//! - The deadline is enforced here, by the monotonic clock. Pulls in progress are dropped, which stops them in the
//!   runtime as well. The removal of an image that has begun is awaited.

mod board;
mod clearing;
mod conclusion;
mod context;
mod control;
mod image;
mod leftovers;
mod locks;
mod login;
mod pinning;
mod progress;
#[cfg(test)]
mod tests;
mod upgrading;
mod wanted;
mod window;

use std::convert::Infallible;
use std::num::NonZeroUsize;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use prepull_api::download::DownloadTerms;
use prepull_api::failure::FailureCode;
use prepull_api::task::{
    CheckItem, CheckOutcome, ImageFacts, ImageOutcome, ImageResult, ImageTask, KubeletRecord, Task, TaskId,
    TaskOutcome,
};
use prepull_api::wire::truncate_reason;
use tokio::sync::{mpsc, watch};
use tokio::time::sleep;

use self::board::ImageBoard;
use self::clearing::{RemovalBoard, remove_images};
use self::conclusion::{ExecutionEnd, conclude};
use self::context::TaskContext;
use self::control::{wait_for_deadline, wait_for_stop};
use self::image::ImagePulls;
use self::leftovers::keep_tidy;
use self::progress::{ProgressPace, send_progress};
use self::window::{announce_waits, follow_rates, wait_until};
use crate::clock::CloudClock;
use crate::config::CheckLimits;
use crate::images::kubelet::{AskReason, KubeletRecords};
use crate::images::providers::Providers;
use crate::images::puller::{ErrorClass, PullError, Puller};
use crate::images::rate::Bucket;
use crate::machine::{read_load, read_memory};
use crate::metrics::AgentMetrics;
use crate::tasks::agent::{Execution, TaskEnd};
use crate::tasks::checks::{self, Readings};
use crate::upgrade::Upgrades;
pub use control::TaskControl;
pub use progress::TaskUpdate;

/// Retries after an error other than an absent runtime: the answer needs no link and no registry, so an error that
/// lasts for these seconds is a problem of the node.
const CHECK_RETRIES: u32 = 3;

/// Runs the tasks of a node, concurrently if its caller does.
#[derive(Debug)]
pub struct Executor<P> {
    images: ImagePulls<P>,
    limits: CheckLimits,
    pace: ProgressPace,
    /// Explains why the kubelet will ask the registry; absent in pulls by hand.
    kubelet: Option<KubeletRecords>,
    /// Upgrades this program; absent in pulls by hand.
    upgrades: Option<Arc<Upgrades>>,
}

impl<P: Puller> Executor<P> {
    /// An executor that pulls `parallel` images at a time, over all tasks, and checks the node against `limits`.
    pub fn new(puller: Arc<P>, parallel: NonZeroUsize, limits: CheckLimits) -> Self {
        Self {
            images: ImagePulls::new(puller, parallel),
            limits,
            pace: ProgressPace::default(),
            kubelet: None,
            upgrades: None,
        }
    }

    /// Adds credential providers, which are asked if a task's credentials are missing or refused.
    #[must_use]
    pub(crate) fn with_credential_providers(mut self, providers: Arc<Providers>) -> Self {
        self.images.providers = providers;
        self
    }

    /// Checks the kubelet's records for each image on the node.
    #[must_use]
    pub(crate) fn with_kubelet_records(mut self, records: KubeletRecords) -> Self {
        self.kubelet = Some(records);
        self
    }

    /// Upgrades this program if a task asks for that.
    #[must_use]
    pub(crate) fn with_upgrades(mut self, upgrades: Arc<Upgrades>) -> Self {
        self.upgrades = Some(upgrades);
        self
    }

    /// Uses this clock for windows.
    #[must_use]
    pub(crate) fn with_clock(mut self, clock: Arc<CloudClock>) -> Self {
        self.images.clock = clock;
        self
    }

    /// Counts the tries that fail.
    #[must_use]
    pub(crate) fn counted_in(mut self, metrics: Arc<AgentMetrics>) -> Self {
        self.images.metrics = Some(metrics);
        self
    }

    /// Interval and session of progress updates.
    pub(crate) fn pace(&self) -> &ProgressPace {
        &self.pace
    }

    /// Keeps fetched content of a task's images, even if it isn't running, until [`Self::let_go`].
    pub(crate) fn hold(&self, task: &Task) {
        self.images.wanted.add(task);
    }

    /// Ends [`Self::hold`].
    pub(crate) fn let_go(&self, task: &TaskId) {
        self.images.wanted.remove(task);
    }

    /// Releases a task's content of unfinished pulls of this reference, unless a pull is running or another task will
    /// resume it.
    pub(crate) async fn give_up(&self, task: &TaskId, reference: &str) {
        self.images.give_up_unless_wanted(task, reference).await;
    }

    /// Releases content that no task wants, in an endless loop: after the time that `kept` returns, or soon if the disk needs
    /// the room.
    pub(crate) async fn keep_tidy(&self, kept: impl Fn() -> Duration) -> Infallible {
        keep_tidy(&self.images, &self.limits, kept).await
    }

    /// Runs one task, until its deadline, or until the image that is being removed by then is gone. Dropping the future stops
    /// the pulls.
    pub async fn run(
        &self,
        execution: Execution,
        control: watch::Receiver<TaskControl>,
        updates: mpsc::Sender<TaskUpdate>,
    ) -> TaskEnd {
        let task = &execution.task.id;
        self.hold(&execution.task);
        let board = ImageBoard::new(&execution.done);
        let removals = RemovalBoard::new(execution.removal.clone());
        let mut check = execution.check.clone();
        let mut trouble = None;
        let clock = &*self.images.clock;
        let DownloadTerms { max_rate, site_rate, .. } = *execution.terms.download;
        let (bucket, site) = (Bucket::new(max_rate), Bucket::new(site_rate));
        let ending = {
            let mut carry_out = pin!(async {
                if check.is_none() {
                    let open = open_images(&execution).map(|(_, image)| image);
                    if !execution.task.checks.is_empty() && !self.images.needs_no_link(open).await {
                        // The free space may change until the pulls begin.
                        wait_until(true, control.clone(), clock).await;
                    }
                    let outcome = self.check(&execution.task.checks, &mut trouble).await;
                    let _ = updates.send(TaskUpdate::Checked(outcome.clone())).await;
                    check = Some(outcome);
                }
                if !check.as_ref().is_some_and(|outcome| outcome.passed) {
                    return;
                }
                if execution.task.removal.is_some() {
                    let control = control.clone();
                    remove_images(&self.images, &execution, &removals, control, &updates).await;
                } else {
                    let context = TaskContext {
                        task,
                        board: &board,
                        control: control.clone(),
                        task_permits: self.images.task_permits(),
                        verification: None,
                        bucket: &bucket,
                        site: &site,
                    };
                    self.pull_images(&execution, context, &updates).await;
                }
            });
            let ending = tokio::select! {
                // Biased: a task that ends at the very moment of the deadline has ended.
                biased;
                () = &mut carry_out => ExecutionEnd::Completed,
                reason = wait_for_stop(control.clone()) => ExecutionEnd::Stopped(reason),
                () = wait_for_deadline(control.clone(), clock) => ExecutionEnd::DeadlineExceeded,
                never = announce_waits(control.clone(), &board, clock) => match never {},
                never = follow_rates(control.clone(), &bucket, &site) => match never {},
                never = send_progress(&self.pace, &board, &updates) => match never {},
            };
            if !matches!(ending, ExecutionEnd::Completed) {
                removals.finish(carry_out).await;
            }
            ending
        };
        let end = conclude(&execution, ending, check, trouble.as_ref(), (&board, &removals));
        self.let_go(task);
        if end.outcome == TaskOutcome::Cancelled {
            // Pulls of a cancelled task are resumed only by another task with the same image.
            let images = execution.task.images.iter().zip(&end.images);
            let unfinished =
                images.filter(|(_, result)| result.outcome == ImageOutcome::Stopped && result.attempts > 0);
            join_all(unfinished.map(|(image, _)| self.give_up(task, &image.reference))).await;
        }
        end
    }

    async fn pull_images(
        &self,
        execution: &Execution,
        context: TaskContext<'_>,
        updates: &mpsc::Sender<TaskUpdate>,
    ) {
        if let Some(upgrade) = execution.task.upgrade {
            // Boxed: few tasks need it, and each future would be as large.
            return Box::pin(self.upgrade(upgrade, execution, context, updates)).await;
        }
        let context = &context;
        let pulls = open_images(execution).map(|(index, image)| async move {
            let mut result = self.images.pull(context, index, image).await;
            // The board already has the result, so a deadline during this look doesn't cost us the image.
            if let Some(AskReason { record, text }) = self.find_ask_reason(image, &result).await {
                let facts = &mut result.facts;
                (facts.kubelet_record, facts.kubelet_record_reason) = (Some(record), text);
                result = context.board.end_image(index, result);
            }
            result.took = context.board.time_since_first_attempt(index);
            log_end(image, &result);
            // The receiver is gone when the agent stops.
            let _ = updates.send(TaskUpdate::ImageEnded { index, result: Box::new(result) }).await;
        });
        join_all(pulls).await;
    }

    async fn find_ask_reason(&self, image: &ImageTask, result: &ImageResult) -> Option<AskReason> {
        let id = result.id.as_ref().filter(|_| result.outcome.is_on_node())?;
        self.kubelet.as_ref()?.find_reason(id, &image.reference).await
    }

    /// Runs the checks. While the runtime doesn't answer, we can't check the disk: this waits, and leaves the error in
    /// `trouble` in case the deadline comes first. Other errors are retried a few times.
    async fn check(&self, items: &[CheckItem], trouble: &mut Option<PullError>) -> CheckOutcome {
        let mut backoff = ImagePulls::<P>::new_backoff();
        let mut failures = 0;
        let disk = loop {
            if !items.contains(&CheckItem::Disk) {
                break Err("was not asked for".to_owned());
            }
            match self.images.puller.read_filesystem().await {
                Ok(filesystem) => break Ok(filesystem),
                Err(error) if error.class == ErrorClass::RuntimeDown || failures < CHECK_RETRIES => {
                    if error.class != ErrorClass::RuntimeDown {
                        failures += 1;
                    }
                    let wait = backoff.next((self.images.random)());
                    tracing::warn!(%error, retry_in = ?wait, "cannot check the disk yet");
                    *trouble = Some(error);
                    sleep(wait).await;
                }
                Err(error) => break Err(error.message),
            }
        };
        *trouble = None;
        // Removable images count only if they make a difference: counting takes the runtime some work.
        let removable = match &disk {
            Ok(disk) if disk.available < self.limits.disk_min_free.in_bytes(disk.capacity) => {
                self.images.puller.removable_bytes(&self.images.wanted.references()).await
            }
            _ => 0,
        };
        let readings = Readings { disk, removable, load: read_load(), memory: read_memory() };
        let mut outcome = checks::check_readings(items, &self.limits, &readings);
        outcome.reason = truncate_reason(&outcome.reason);
        outcome
    }
}

/// The images that had not ended before a restart, with their positions.
fn open_images(execution: &Execution) -> impl Iterator<Item = (usize, &ImageTask)> {
    let images = execution.task.images.iter().enumerate();
    images.filter(|(index, _)| execution.done.get(*index).is_none_or(Option::is_none))
}

/// Logs how an image ended, in fields that a person can filter by.
fn log_end(image: &ImageTask, result: &ImageResult) {
    let ImageResult {
        outcome,
        digest,
        id: _,
        reason,
        code,
        bytes,
        attempts,
        pinned,
        facts,
        from_peers,
        took,
        ended: _,
    } = result;
    let ImageFacts {
        pulled_by,
        pulled_by_reason: left_because,
        signed_by,
        unshared_reason: not_shared_because,
        delta_saved_bytes,
        no_delta,
        no_delta_reason,
        kubelet_record,
        kubelet_record_reason,
    } = facts;
    let image = &image.reference;
    let done = bytes.map(|bytes| bytes.done);
    let bytes = bytes.map(|bytes| bytes.total);
    let seconds = took.map(|took| took.as_secs_f64());
    let rate = done.zip(*took).and_then(|(done, took)| bytes_per_second(done, took));
    if outcome.is_on_node() {
        if !reason.is_empty() {
            tracing::warn!(image, reason, "on the node, but not as the job wants it");
        }
        // For a private image it's normal that some pods must ask.
        if kubelet_record.is_some_and(|record| record != KubeletRecord::SomeCredentials) {
            tracing::warn!(
                image,
                reason = kubelet_record_reason,
                "on the node, but pods may not start offline"
            );
        }
        tracing::info!(
            image,
            ?outcome,
            digest,
            bytes,
            seconds,
            rate,
            attempts,
            pinned,
            ?pulled_by,
            left_because,
            signed_by,
            from_peers,
            not_shared_because,
            delta_saved_bytes,
            ?no_delta,
            no_delta_reason,
            "image ended"
        );
    } else {
        let code = code.map(FailureCode::as_str);
        tracing::warn!(image, ?outcome, code, reason, bytes, seconds, rate, attempts, "image failed");
    }
}

/// `None` if it took too little time for a meaningful rate.
fn bytes_per_second(bytes: u64, took: Duration) -> Option<u64> {
    let millis = u64::try_from(took.as_millis()).ok().filter(|millis| *millis > 0)?;
    Some(bytes.saturating_mul(1000) / millis)
}
