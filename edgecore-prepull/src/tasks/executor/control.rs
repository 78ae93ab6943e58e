//! Controls of a running execution: its deadline and keys, and the request to stop.

use std::sync::Arc;
use std::time::Duration;

use prepull_api::wire::PullKey;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::clock::CloudClock;
use crate::tasks::agent::{Now, OpenClock, TaskTerms};

/// Controls that may change while a task runs. The code that started the task holds the sender of the watch channel.
#[derive(Clone, Debug)]
pub struct TaskControl {
    /// Current deadline and keys.
    pub terms: TaskTerms,
    /// Whether the choice of the images to remove is on the disk, or can't be written.
    pub may_remove: bool,
    /// Reason to stop the task; `None` lets it run.
    pub stop: Option<String>,
}

/// Returns the current key of an image: a later `Assign` may have replaced it.
pub(super) fn current_key(control: &watch::Receiver<TaskControl>, index: usize) -> Arc<PullKey> {
    let key = control.borrow().terms.keys.get(index).cloned();
    key.unwrap_or_else(|| {
        Arc::new(PullKey::Unavailable { reason: "the assignment has no key for this image".to_owned() })
    })
}

/// Waits for a change. Waits forever if the sender is gone, since then the controls stay as they are.
pub(super) async fn wait_for_change(control: &mut watch::Receiver<TaskControl>) {
    if control.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Waits for a request to stop, and returns the reason.
pub(super) async fn wait_for_stop(mut control: watch::Receiver<TaskControl>) -> String {
    loop {
        if let Some(reason) = &control.borrow_and_update().stop {
            return reason.clone();
        }
        wait_for_change(&mut control).await;
    }
}

/// Waits until the deadline has passed. The deadline may move, for instance with the clock of a task with windows.
pub(super) async fn wait_for_deadline(mut control: watch::Receiver<TaskControl>, clock: &CloudClock) {
    let mut open = OpenClock::default();
    loop {
        let now = now(clock);
        let (deadline, look) = open.update_deadline(&control.borrow_and_update().terms, now);
        if deadline <= now.monotonic {
            return;
        }
        tokio::select! {
            () = wait_for_change(&mut control) => {}
            () = sleep_until(look.into()) => {}
        }
    }
}

/// When a pull that begins now fails: at the deadline of its task, or after its own limit.
pub(super) fn pull_deadline(terms: &TaskTerms, limit: Option<Duration>, clock: &CloudClock) -> Instant {
    let now = now(clock);
    let (deadline, _) = OpenClock::default().update_deadline(terms, now);
    let own = limit.and_then(|limit| now.monotonic.checked_add(limit));
    own.map_or(deadline, |own| own.min(deadline)).into()
}

fn now(clock: &CloudClock) -> Now {
    Now { monotonic: Instant::now().into_std(), wall: clock.wall(), boot: None }
}
