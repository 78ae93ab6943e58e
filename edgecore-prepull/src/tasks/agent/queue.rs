//! Who works next.

#[cfg(test)]
mod tests;

use prepull_api::task::TaskOutcome;

use super::entry::Stage;
use super::{Agent, Effect, Now};

impl Agent {
    /// A place at the end of the queue. A number that is not used is no loss.
    pub(super) fn take_turn(&mut self) -> u64 {
        self.turn += 1;
        self.turn
    }

    /// Fills the free places, in the order of acceptance. After every event: whatever happened may have freed
    /// a place or filled the queue.
    pub(super) fn start_next(&mut self, now: Now, effects: &mut Vec<Effect>) {
        self.end_overdue(now, effects);
        let running = self.tasks.values().filter(|entry| matches!(entry.stage, Stage::Running)).count();
        let free = (self.max_tasks.get() as usize).saturating_sub(running);
        if free == 0 {
            return;
        }
        let mut queued: Vec<_> = self
            .tasks
            .values_mut()
            .filter_map(|entry| match entry.stage {
                Stage::Queued { turn, .. } => Some((turn, entry)),
                _ => None,
            })
            .collect();
        queued.sort_unstable_by_key(|(turn, _)| *turn);
        for (_, entry) in queued.into_iter().take(free) {
            entry.start(effects);
        }
    }

    /// A task whose time is over is not begun.
    fn end_overdue(&mut self, now: Now, effects: &mut Vec<Effect>) {
        let at_a_time = self.max_tasks;
        for entry in self.tasks.values_mut() {
            if let Stage::Queued { terms, .. } = &entry.stage
                && terms.deadline <= now.monotonic
            {
                let reason = format!(
                    "the deadline passed before the task's turn came: the node works on {at_a_time} at a time (its \
                     --max-tasks)"
                );
                entry.stop(TaskOutcome::DeadlineExceeded, &reason, now, effects);
            }
        }
    }
}
