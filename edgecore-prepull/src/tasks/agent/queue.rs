//! The queue of accepted tasks, and the number of tasks that run at the same time.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use prepull_api::task::{TaskId, TaskOutcome};

use super::entry::{TaskEntry, TaskStage};
use super::io::AgentEffect;
use super::time::Now;

/// The order of the queued tasks. The agent owns the tasks themselves.
#[derive(Debug)]
pub(super) struct TaskQueue {
    max_tasks: NonZeroU32,
    last_turn: u64,
}

impl TaskQueue {
    pub(super) fn new(max_tasks: NonZeroU32) -> Self {
        Self { max_tasks, last_turn: 0 }
    }

    pub(super) fn max_tasks(&self) -> NonZeroU32 {
        self.max_tasks
    }

    /// Takes a place at the end of the queue. Places may stay unused.
    pub(super) fn take_turn(&mut self) -> u64 {
        self.last_turn += 1;
        self.last_turn
    }

    /// Starts queued tasks in order, while fewer than `max_tasks` run. Call it after each event: any event may have
    /// ended a task or queued one.
    pub(super) fn start_next(
        &self,
        tasks: &mut BTreeMap<TaskId, TaskEntry>,
        now: Now,
        effects: &mut Vec<AgentEffect>,
    ) {
        self.end_overdue(tasks, now, effects);
        let running = tasks.values().filter(|entry| entry.is_running()).count();
        let free = (self.max_tasks.get() as usize).saturating_sub(running);
        if free == 0 {
            return;
        }
        let mut queued: Vec<_> = tasks
            .values_mut()
            .filter_map(|entry| match entry.stage() {
                TaskStage::Queued { turn, .. } => Some((*turn, entry)),
                _ => None,
            })
            .collect();
        queued.sort_unstable_by_key(|(turn, _)| *turn);
        for (_, entry) in queued.into_iter().take(free) {
            entry.start(effects);
        }
    }

    /// Ends queued tasks past their deadline: they must not start any more.
    fn end_overdue(&self, tasks: &mut BTreeMap<TaskId, TaskEntry>, now: Now, effects: &mut Vec<AgentEffect>) {
        for entry in tasks.values_mut() {
            if let TaskStage::Queued { terms, .. } = entry.stage()
                && terms.is_over(now)
            {
                let reason = format!(
                    "the deadline passed before the task started: the node runs at most {} at a time (--max-tasks)",
                    self.max_tasks
                );
                entry.end_unstarted(TaskOutcome::DeadlineExceeded, &reason, now, effects);
            }
        }
    }
}
