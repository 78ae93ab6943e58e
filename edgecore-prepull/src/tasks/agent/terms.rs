//! Deadline, keys and download terms of a task, taken from an assignment.

use std::sync::Arc;
use std::time::{Duration, Instant};

use prepull_api::download::DownloadTerms;
use prepull_api::task::{ImageTask, Task};
use prepull_api::wire::{Assign, PullKey};

use super::time::Now;
use super::windows::{CountedWindows, NodeWindows, TaskTerms};
use crate::tasks::NOT_KNOWN;

impl TaskTerms {
    /// The terms of a task without a cloud. Only time within the node's windows counts.
    pub(crate) fn by_hand(
        keys: Vec<Arc<PullKey>>,
        time: Duration,
        clock: &NodeWindows,
        now: Instant,
    ) -> Self {
        let download = DownloadTerms::default();
        let openings = clock.task_openings(&download);
        let windows = (!openings.is_always()).then_some(CountedWindows { since: now, openings });
        Self { deadline: now + time, windows, keys, download: Arc::new(download) }
    }

    /// Takes the terms of an assignment, with one key per image of `task`, which is the task in the ledger. A key is
    /// used only for its own reference: if the cloud assigns the task again with other images, no credential reaches
    /// another image.
    pub(super) fn of_assignment(task: &Task, assign: Assign, clock: &NodeWindows, now: Now) -> Self {
        let deadline = now.moment_after(assign.remaining);
        let openings = clock.task_openings(&assign.download);
        let windows = (!openings.is_always()).then_some(CountedWindows { since: now.monotonic, openings });
        let Assign { task: sent, remaining: _, keys, download } = assign;
        let known = |key| match key {
            PullKey::Other => {
                PullKey::Unavailable { reason: format!("its kind of credentials is {NOT_KNOWN}") }
            }
            known => known,
        };
        let keys: Vec<_> = keys.into_iter().map(known).map(Arc::new).collect();
        let unavailable = |reason: String| Arc::new(PullKey::Unavailable { reason });
        let key = |(index, image): (usize, &ImageTask)| match sent.images.get(index) {
            Some(same) if same.reference == image.reference => {
                keys.get(same.key as usize).cloned().unwrap_or_else(|| {
                    unavailable(format!("the assignment has no key number {} for this image", same.key))
                })
            }
            _ => {
                unavailable("the task was assigned again with a different image at this position".to_owned())
            }
        };
        Self {
            deadline,
            windows,
            keys: task.images.iter().enumerate().map(key).collect(),
            download: Arc::new(download),
        }
    }
}
