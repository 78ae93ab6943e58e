//! The context of one node's step: the time, and the sinks for its actions, slot changes and wake-up.

use std::collections::BTreeSet;

use jiff::Timestamp;
use prepull_api::task::{NodeName, TaskId};
use prepull_api::wire::{CloudMessage, MAX_OPEN_TASKS, truncate_reason};

use super::{Action, NodeImageWrite};
use crate::kruise::NodeImageUpdate;
use crate::shared::effects::Effects;
use crate::shared::events::ObjectEvent;

pub(super) struct NodeEffects<'a> {
    pub(super) node: &'a NodeName,
    pub(super) now: Timestamp,
    effects: Effects<'a, Action>,
    slot_changes: &'a mut Vec<(NodeName, bool)>,
    wakeup: Option<Timestamp>,
    waits_to_write: bool,
}

impl<'a> NodeEffects<'a> {
    pub(super) fn new(
        node: &'a NodeName,
        now: Timestamp,
        actions: &'a mut Vec<Action>,
        slot_changes: &'a mut Vec<(NodeName, bool)>,
    ) -> Self {
        Self {
            node,
            now,
            effects: Effects::new(now, actions),
            slot_changes,
            wakeup: None,
            waits_to_write: false,
        }
    }

    pub(super) fn emit(&mut self, action: Action) {
        self.effects.emit(action);
    }

    pub(super) fn acknowledge(&mut self, task: TaskId) {
        self.send(CloudMessage::ResultAck { task });
    }

    fn send(&mut self, message: CloudMessage) {
        self.emit(Action::Send(self.node.clone(), message));
    }

    pub(super) fn request_write(&mut self, write: NodeImageWrite) {
        self.emit(Action::Write(self.node.clone(), write));
    }

    pub(super) fn notify_jobs(&mut self, update: NodeImageUpdate) {
        self.emit(Action::NotifyJobs(update));
    }

    /// Emits an event, with a note of any length.
    pub(super) fn emit_event(&mut self, event: ObjectEvent) {
        let note = truncate_reason(&event.note);
        self.emit(Action::Event(ObjectEvent { note, ..event }));
    }

    /// A task slot of the node is taken (`true`) or freed.
    pub(super) fn change_slot(&mut self, taken: bool) {
        self.slot_changes.push((self.node.clone(), taken));
    }

    /// Has the node reconciled once there is room for its write.
    pub(super) fn wait_to_write(&mut self) {
        self.waits_to_write = true;
    }

    pub(super) fn waits_to_write(&self) -> bool {
        self.waits_to_write
    }

    /// Has the node reconciled at this time even without an input.
    pub(super) fn wake_at(&mut self, at: Timestamp) {
        self.wakeup = Some(self.wakeup.map_or(at, |known| known.min(at)));
    }

    pub(super) fn wakeup(&self) -> Option<Timestamp> {
        self.wakeup
    }
}

/// As many tasks as a ledger has, before and after a session's change of all of them.
const MOST_CANCELLED: usize = 2 * MAX_OPEN_TASKS;

/// The tasks that were cancelled in this session, until their results come. At a second Cancel the node would send its
/// result again, and that could be taken for the result of the same task's next sending.
/// Beyond [`MOST_CANCELLED`] tasks, which only an edge that makes them up can have, each is cancelled again.
#[derive(Debug, Default)]
pub(super) struct CancelledTasks(BTreeSet<TaskId>);

impl CancelledTasks {
    pub(super) fn cancel(&mut self, task: &TaskId, reason: &str, fx: &mut NodeEffects<'_>) {
        let is_new =
            if self.0.len() < MOST_CANCELLED { self.0.insert(task.clone()) } else { !self.0.contains(task) };
        if is_new {
            fx.send(CloudMessage::Cancel { task: task.clone(), reason: reason.to_owned() });
        }
    }

    pub(super) fn note_result(&mut self, task: &TaskId) {
        self.0.remove(task);
    }
}
