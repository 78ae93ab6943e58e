//! One task in memory.

use std::time::Instant;

use prepull_api::task::{TaskOutcome, TaskResult};
use prepull_api::wire::truncate_reason;

use super::{Effect, Now, TaskEnd, TaskRecord, Terms, Work};

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) record: TaskRecord,
    /// Absent for a task from before the restart, whose age only the wall clock knows.
    pub(super) accepted: Option<Instant>,
    pub(super) stage: Stage,
    pub(super) saving: Saving,
}

#[derive(Debug)]
pub(super) enum Stage {
    /// The first record is on its way to the disk. Nothing has been said of it.
    Storing(Terms),
    /// From before a restart. Waits for an `Assign`.
    NeedsKeys {
        /// When it ends without one.
        deadline: Instant,
    },
    /// Accepted, and waiting for its turn.
    Queued {
        /// For the executor.
        terms: Terms,
        /// The lowest one starts first.
        turn: u64,
    },
    /// The executor has it.
    Running,
    /// The record with the result is on its way to the disk.
    Ending,
    /// The result is on the disk.
    Ended,
}

/// How the record in memory relates to the one on the disk.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Saving {
    /// They are the same.
    Clean,
    /// A write is under way.
    Writing {
        /// And the record has changed since it began.
        stale: bool,
    },
    /// The last write failed. The next one begins then.
    Failed(Instant),
}

impl Entry {
    pub(super) fn save(&mut self, effects: &mut Vec<Effect>) {
        match &mut self.saving {
            Saving::Clean => {
                self.saving = Saving::Writing { stale: false };
                effects.push(Effect::Persist(Box::new(self.record.clone())));
            }
            Saving::Writing { stale } => *stale = true,
            // The retry writes what there is by then.
            Saving::Failed(_) => {}
        }
    }

    /// Hands a queued task to the executor.
    pub(super) fn start(&mut self, effects: &mut Vec<Effect>) {
        let terms = match std::mem::replace(&mut self.stage, Stage::Running) {
            Stage::Queued { terms, .. } => terms,
            other => {
                self.stage = other;
                return;
            }
        };
        effects.push(Effect::Start(Box::new(Work {
            task: self.record.task.clone(),
            check: self.record.check.clone(),
            done: self.record.images.clone(),
            terms,
        })));
    }

    pub(super) fn stop(&mut self, outcome: TaskOutcome, reason: &str, now: Now, effects: &mut Vec<Effect>) {
        let images = self.record.images_stopped(reason);
        let check = self.record.check.clone();
        self.end(TaskEnd { outcome, reason: reason.to_owned(), check, images }, now, effects);
    }

    pub(super) fn end(&mut self, end: TaskEnd, now: Now, effects: &mut Vec<Effect>) {
        let TaskEnd { outcome, reason, check, images } = end;
        let took = self
            .accepted
            .map_or_else(|| self.record.age(now.wall()), |then| now.monotonic.duration_since(then));
        let task = self.record.id().clone();
        let reason = truncate_reason(&reason);
        self.record.result = Some(TaskResult { task, outcome, reason, check, images, took });
        self.record.images = Vec::new();
        self.record.check = None;
        self.stage = Stage::Ending;
        self.save(effects);
    }
}
