//! Messages of the node's session about its tasks.

use std::sync::Arc;

use prepull_api::task::{TaskId, TaskOutcome, TaskResult};
use prepull_api::wire::{OpenPhase, OpenTask, TaskProgress, truncate_reason};

use super::{Pulls, publish_end};
use crate::fleet::session::SessionId;
use crate::kruise::node_images::compact::CompactNodeImage;
use crate::kruise::node_images::effects::{CancelledTasks, NodeEffects};
use crate::kruise::node_images::tag_pull::{TagPull, TagPullState, UNWANTED, is_of_node_image};
use crate::shared::access::KeysSent;
use crate::shared::outcomes::DispatchOutcome;

impl Pulls {
    pub(in super::super) fn image_of(&self, task: &TaskId) -> Option<String> {
        self.on_node(task).map(|pull| pull.tag.reference.to_string())
    }

    /// What entitles the node to the layers of a task.
    pub(in super::super) fn entitlement(&self, task: &TaskId, object: &CompactNodeImage) -> Option<Arc<str>> {
        let pull = self.on_node(task)?;
        let (image, tag) = object.tag(&pull.key)?;
        pull.entitlement(image, tag).map(Arc::from)
    }

    fn on_node(&self, task: &TaskId) -> Option<&TagPull> {
        let pull = self.open.values().find(|pull| pull.sent == *task)?;
        matches!(pull.state(), TagPullState::OnNode).then_some(pull)
    }

    /// The credentials that the task was sent with.
    pub(in super::super) fn note_keys(&mut self, task: &TaskId, keys: Option<KeysSent>) {
        if let Some(pull) = self.open.values_mut().find(|pull| pull.task == *task) {
            pull.keys = keys;
        }
    }

    /// The node has connected, and its ledger has these tasks.
    pub(in super::super) fn reconnect(&mut self, open: &[OpenTask], fx: &mut NodeEffects<'_>) {
        self.cancelled = CancelledTasks::default();
        let open: Vec<_> = open.iter().filter(|open| is_of_node_image(&open.task)).collect();
        for pull in self.open.values_mut() {
            // A new session may deliver the task that the old one couldn't.
            (pull.needs_keys, pull.not_before) = (false, None);
            if matches!(pull.state(), TagPullState::OnNode | TagPullState::OnOfflineNode) {
                match open.iter().find(|open| open.task == pull.sent).map(|open| open.phase) {
                    Some(OpenPhase::Running | OpenPhase::Finished | OpenPhase::Other) => {
                        pull.mark_on_node(fx);
                    }
                    Some(OpenPhase::NeedsKeys) | None => pull.wait_to_send(fx),
                }
            }
        }
        for open in open {
            let known = self.open.values_mut().find(|pull| pull.task.job == open.task.job);
            match known {
                Some(pull) if matches!(pull.state(), TagPullState::OnNode) && pull.sent == open.task => {}
                // It is sent again, with its keys.
                Some(pull) if open.phase == OpenPhase::NeedsKeys && pull.task == open.task => {
                    pull.needs_keys = true;
                }
                Some(pull)
                    if matches!(pull.state(), TagPullState::Waiting | TagPullState::Dispatching)
                        && open.phase != OpenPhase::NeedsKeys =>
                {
                    pull.inherit(&open.task, fx);
                }
                // Its result follows, and is acknowledged then.
                _ if open.phase == OpenPhase::Finished => {}
                _ => self.cancelled.cancel(&open.task, UNWANTED, fx),
            }
        }
    }

    pub(in super::super) fn disconnect(&mut self, fx: &mut NodeEffects<'_>) {
        for pull in self.open.values_mut().filter(|pull| matches!(pull.state(), TagPullState::OnNode)) {
            pull.mark_offline(fx);
        }
    }

    /// A dispatch has ended, and this is the node's session now.
    pub(in super::super) fn end_dispatch(
        &mut self,
        task: &TaskId,
        outcome: DispatchOutcome,
        current: Option<SessionId>,
        object: Option<&CompactNodeImage>,
        fx: &mut NodeEffects<'_>,
    ) {
        let is_dispatching =
            |pull: &&mut TagPull| pull.sent == *task && matches!(pull.state(), TagPullState::Dispatching);
        let Some(pull) = self.open.values_mut().find(is_dispatching) else {
            // Unless Hello already confirmed the task: do not cancel it. A newer session's Hello would have named it.
            if let DispatchOutcome::Sent(session) | DispatchOutcome::SentWithoutKeys(session) = outcome
                && current == Some(session)
            {
                self.cancel_unless_wanted(task, fx);
            }
            return;
        };
        match outcome {
            DispatchOutcome::Sent(session) | DispatchOutcome::SentWithoutKeys(session) => {
                pull.mark_sent(fx.now);
                match current {
                    Some(current) if current == session => pull.mark_on_node(fx),
                    // The node has reconnected since, and its Hello did not name the task.
                    Some(current) if current > session => pull.wait_to_send(fx),
                    _ => pull.mark_offline(fx),
                }
            }
            DispatchOutcome::Offline => pull.wait_to_resend(fx),
            DispatchOutcome::Postponed(reason) | DispatchOutcome::Withheld { reason, .. }
                if pull.postpone(&reason, fx) => {}
            DispatchOutcome::Postponed(reason)
            | DispatchOutcome::Withheld { reason, .. }
            | DispatchOutcome::TooOld(reason)
            | DispatchOutcome::Unsendable(reason) => {
                pull.fail_without_result(truncate_reason(&reason), fx);
                if let Some(object) = object {
                    publish_end(object, pull, fx);
                }
            }
        }
    }

    pub(in super::super) fn accept(&mut self, task: &TaskId, fx: &mut NodeEffects<'_>) {
        self.cancel_unless_wanted(task, fx);
    }

    fn cancel_unless_wanted(&mut self, task: &TaskId, fx: &mut NodeEffects<'_>) {
        if !self.open.values().any(|pull| pull.sent == *task && pull.is_sent()) {
            self.cancelled.cancel(task, UNWANTED, fx);
        }
    }

    pub(in super::super) fn progress(&mut self, progress: &TaskProgress, fx: &mut NodeEffects<'_>) {
        let is_meant = |pull: &&mut TagPull| pull.sent == progress.task && pull.is_sent();
        let Some(pull) = self.open.values_mut().find(is_meant) else {
            return self.cancelled.cancel(&progress.task, UNWANTED, fx);
        };
        pull.last_heard = Some(fx.now);
        pull.waits = truncate_reason(&progress.waits);
        let Some(image) = progress.images.first() else { return };
        if let Some(bytes) = image.bytes.filter(|bytes| bytes.total > 0) {
            let percent = u128::from(bytes.done.min(bytes.total)) * 100 / u128::from(bytes.total);
            // 100 is for an image that is on the node: unpacking takes its time, too.
            pull.progress = i32::try_from(percent).unwrap_or(0).min(99);
        }
        pull.message = truncate_reason(&image.reason);
    }

    /// The node has ended a task. `is_writing`: a write of the NodeImage is in flight.
    pub(in super::super) fn end_task(
        &mut self,
        result: &TaskResult,
        is_writing: bool,
        object: Option<&CompactNodeImage>,
        fx: &mut NodeEffects<'_>,
    ) {
        self.cancelled.note_result(&result.task);
        let Some(pull) = self.open.values_mut().find(|pull| pull.sent == result.task) else {
            return fx.acknowledge(result.task.clone());
        };
        match pull.state() {
            // Sent again: the acknowledgement waits for the write of the status.
            TagPullState::Ended { unacknowledged: Some(_), .. } => return,
            TagPullState::Ended { unacknowledged: None, .. } => {
                // The task was given up. A success still counts until a write records its failure.
                if result.outcome == TaskOutcome::Succeeded && !is_writing {
                    pull.end_with_result(result, fx);
                } else {
                    pull.await_acknowledgement(&result.task);
                }
                return;
            }
            _ => {}
        }
        let is_earlier_round = pull.task != pull.sent;
        // It may have failed for want of something that is there by now, such as a corrected secret.
        let is_doubtful = pull.is_inherited && result.outcome != TaskOutcome::Succeeded;
        if is_earlier_round || is_doubtful || result.outcome == TaskOutcome::Cancelled {
            fx.acknowledge(result.task.clone());
            if is_earlier_round {
                pull.wait_to_send(fx);
            } else if is_doubtful {
                pull.is_inherited = false;
                pull.wait_to_send(fx);
            } else {
                pull.wait_to_resend(fx);
            }
            return;
        }
        pull.end_with_result(result, fx);
        if let Some(object) = object {
            publish_end(object, pull, fx);
        }
    }
}
