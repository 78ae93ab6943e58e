//! Updates from a running task, and the pace of its progress updates.

use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prepull_api::task::{CheckOutcome, ImageProgress, ImageResult};
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::board::ImageBoard;
use crate::tasks::removal::RemovalRecord;

/// Shortest interval between two progress updates of a task, even if the cloud asks for more.
const SHORTEST_INTERVAL: Duration = Duration::from_secs(1);
/// Delay of the first progress update. It's short for people who watch the job.
const FIRST_UPDATE: Duration = Duration::from_millis(200);

/// News from the executor about a task that it works on.
#[derive(Clone, Debug, PartialEq)]
pub enum TaskUpdate {
    /// The checks have ended.
    Checked(CheckOutcome),
    /// Changes since the last update.
    Progress {
        /// Images that have changed.
        images: Vec<ImageProgress>,
        /// The reason for which the whole task waits; empty if it doesn't.
        waits: String,
    },
    /// The removal of the task has come further: first its images are chosen, and then one after the other ends.
    Removal(Box<RemovalRecord>),
    /// An image has ended for good.
    ImageEnded {
        /// Index into the images of the task.
        index: usize,
        /// Final result of the image.
        result: Box<ImageResult>,
    },
}

/// Interval of progress updates, and the session that they are for. All tasks of the node share it.
#[derive(Debug)]
pub(crate) struct ProgressPace {
    millis: AtomicU64,
    session: AtomicU64,
}

impl Default for ProgressPace {
    fn default() -> Self {
        let pace = Self { millis: AtomicU64::new(0), session: AtomicU64::new(0) };
        pace.set_interval(SHORTEST_INTERVAL);
        pace
    }
}

impl ProgressPace {
    /// Sets the interval, which is at least one second.
    pub(crate) fn set_interval(&self, interval: Duration) {
        let millis = u64::try_from(interval.max(SHORTEST_INTERVAL).as_millis()).unwrap_or(u64::MAX);
        self.millis.store(millis, Ordering::Relaxed);
    }

    /// Begins a new session: the cloud has received no earlier update in it.
    pub(crate) fn begin_session(&self) {
        self.session.fetch_add(1, Ordering::Relaxed);
    }

    fn interval(&self) -> Duration {
        Duration::from_millis(self.millis.load(Ordering::Relaxed))
    }

    fn session(&self) -> u64 {
        self.session.load(Ordering::Relaxed)
    }
}

/// Sends changes of the board, in an endless loop.
pub(super) async fn send_progress(
    pace: &ProgressPace,
    board: &ImageBoard,
    updates: &mpsc::Sender<TaskUpdate>,
) -> Infallible {
    let mut session = pace.session();
    sleep(FIRST_UPDATE).await;
    loop {
        let now = pace.session();
        if now != session {
            session = now;
            board.mark_all_unreported();
        }
        // Read the board only if there's room for the update: a dropped update must not count as reported.
        if let Ok(permit) = updates.try_reserve() {
            let images = board.take_changes();
            if board.take_new_waits() || !images.is_empty() {
                permit.send(TaskUpdate::Progress { images, waits: board.wait_reason() });
            }
        }
        sleep(pace.interval()).await;
    }
}
