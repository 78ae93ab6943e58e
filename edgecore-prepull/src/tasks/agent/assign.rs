//! What the cloud asks for: that a task be done, and that it be not.

use std::sync::Arc;
use std::time::{Duration, Instant};

use prepull_api::task::{ImageOutcome, ImageResult, ImageTask, Task, TaskId, TaskOutcome, TaskResult};
use prepull_api::wire::{Assign, EdgeMessage, Key, MAX_IMAGES, MAX_OPEN_TASKS, truncate_reason};

use super::entry::{Entry, Saving, Stage};
use super::{Agent, Effect, Now, TaskRecord, Terms, send_result};

impl Terms {
    /// The keys of an assignment, by image of the task as the ledger has it. A key is taken over only for the
    /// very reference that the cloud sent it for: should the cloud have changed its mind about a task that it
    /// had assigned before, no credential reaches another image.
    fn of(task: &Task, assign: Assign, deadline: Instant) -> Self {
        let Assign { task: sent, remaining: _, keys } = assign;
        let keys: Vec<_> = keys.into_iter().map(Arc::new).collect();
        let unavailable = |reason: String| Arc::new(Key::Unavailable { reason });
        let key = |(index, image): (usize, &ImageTask)| match sent.images.get(index) {
            Some(same) if same.reference == image.reference => {
                keys.get(same.key as usize).cloned().unwrap_or_else(|| {
                    unavailable(format!("the assignment has no key number {} for this image", same.key))
                })
            }
            _ => unavailable("the task was assigned again with another image in this place".to_owned()),
        };
        Self { deadline, keys: task.images.iter().enumerate().map(key).collect() }
    }
}

impl Agent {
    pub(super) fn assign(&mut self, assign: Assign, now: Now, effects: &mut Vec<Effect>) {
        let deadline = now.after(assign.remaining);
        let (connected, new_turn) = (self.connected, self.take_turn());
        let Some(entry) = self.tasks.get_mut(&assign.task.id) else {
            return self.assign_new(assign, deadline, now, effects);
        };
        let accepted = EdgeMessage::Accepted { task: assign.task.id.clone() };
        match &mut entry.stage {
            Stage::Storing(terms) => {
                entry.record.renew(assign.remaining, now.wall());
                *terms = Terms::of(&entry.record.task, assign, deadline);
                entry.save(effects);
            }
            stage @ (Stage::NeedsKeys { .. } | Stage::Queued { .. }) => {
                let turn = if let Stage::Queued { turn, .. } = stage { *turn } else { new_turn };
                entry.record.renew(assign.remaining, now.wall());
                let terms = Terms::of(&entry.record.task, assign, deadline);
                entry.stage = Stage::Queued { terms, turn };
                entry.save(effects);
                effects.push(Effect::Send(accepted));
            }
            Stage::Running => {
                entry.record.renew(assign.remaining, now.wall());
                let terms = Terms::of(&entry.record.task, assign, deadline);
                entry.save(effects);
                effects.push(Effect::Renew(entry.record.id().clone(), terms));
                effects.push(Effect::Send(accepted));
            }
            // The result follows as soon as it is on the disk.
            Stage::Ending => {}
            Stage::Ended => {
                if connected && let Some(result) = &entry.record.result {
                    effects.push(send_result(result.clone()));
                }
            }
        }
    }

    fn assign_new(&mut self, assign: Assign, deadline: Instant, now: Now, effects: &mut Vec<Effect>) {
        let id = assign.task.id.clone();
        let attempts = self.tasks.keys().filter(|task| task.job == id.job).map(|task| task.attempt);
        if let Some(later) = attempts.filter(|attempt| *attempt > id.attempt).max() {
            let reason = format!("attempt {} is replaced by attempt {later}", id.attempt);
            return refuse(&assign.task, TaskOutcome::Cancelled, &reason, effects);
        }
        if assign.task.images.len() > MAX_IMAGES {
            let reason = format!(
                "the task has {} images; a node takes {MAX_IMAGES} at most",
                assign.task.images.len()
            );
            return refuse(&assign.task, TaskOutcome::Failed, &reason, effects);
        }
        // Not persisted: the bound is there to keep the ledger small. Should the answer be lost, the task is in
        // no `Hello`, so that it is assigned again, and refused or taken as things stand then.
        if self.tasks.len() >= MAX_OPEN_TASKS {
            let reason = format!(
                "the node has {MAX_OPEN_TASKS} tasks whose results the cloud has not acknowledged, and takes no more"
            );
            return refuse(&assign.task, TaskOutcome::Failed, &reason, effects);
        }
        let replaced: Vec<_> = self.tasks.keys().filter(|task| task.job == id.job).cloned().collect();
        for task in replaced {
            self.cancel(&task, &format!("replaced by attempt {}", id.attempt), now, effects);
        }
        let record = TaskRecord::new(assign.task.clone(), assign.remaining, now.wall());
        let terms = Terms::of(&record.task, assign, deadline);
        let accepted = Some(now.monotonic);
        let mut entry = Entry { record, accepted, stage: Stage::Storing(terms), saving: Saving::Clean };
        entry.save(effects);
        self.tasks.insert(id, entry);
    }

    pub(super) fn cancel(&mut self, task: &TaskId, reason: &str, now: Now, effects: &mut Vec<Effect>) {
        let connected = self.connected;
        let Some(entry) = self.tasks.get_mut(task) else { return };
        match entry.stage {
            Stage::Storing(_) | Stage::NeedsKeys { .. } | Stage::Queued { .. } => {
                entry.stop(TaskOutcome::Cancelled, &format!("cancelled: {reason}"), now, effects);
            }
            Stage::Running => {
                effects.push(Effect::Stop { task: task.clone(), reason: truncate_reason(reason) });
            }
            Stage::Ending => {}
            Stage::Ended => {
                if connected && let Some(result) = &entry.record.result {
                    effects.push(send_result(result.clone()));
                }
            }
        }
    }
}

/// Answers a task that is not taken. Such a result is not on the disk: there is nothing that a restart could
/// lose, since the same task would be answered anew.
pub(super) fn refuse(task: &Task, outcome: TaskOutcome, reason: &str, effects: &mut Vec<Effect>) {
    let reason = truncate_reason(reason);
    let image = || ImageResult {
        outcome: if outcome == TaskOutcome::Failed { ImageOutcome::Failed } else { ImageOutcome::Stopped },
        digest: None,
        id: None,
        reason: String::new(),
        bytes: None,
        attempts: 0,
    };
    let images = task.images.iter().take(MAX_IMAGES).map(|_| image()).collect();
    let took = Duration::ZERO;
    effects.push(send_result(TaskResult {
        task: task.id.clone(),
        outcome,
        reason,
        check: None,
        images,
        took,
    }));
}
