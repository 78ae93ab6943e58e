//! What the node's session says of its tasks.

use jiff::Timestamp;
use prepull_api::crd::kruise::ImageTagSpec;
use prepull_api::task::{TaskId, TaskOutcome, TaskResult};
use prepull_api::wire::{OpenPhase, OpenTask, Progress, truncate_reason};

use super::super::super::News;
use super::super::work::{GIVEN_BACK, State, Work, full_name, is_of_node_image};
use super::super::{Action, Out};
use super::{Held, Key, UNWANTED, give_place, tell_end};
use crate::shared::outcomes::DispatchOutcome;
use crate::shared::session::SessionId;

impl Held {
    /// The node said hello.
    pub(in super::super) fn up(
        &mut self,
        session: SessionId,
        open: &[OpenTask],
        now: Timestamp,
        out: &mut Out<'_>,
    ) {
        if self.session.is_some_and(|current| current > session) {
            return;
        }
        // What it has may have been asked for a moment ago.
        self.align(now, out);
        let was_online = self.session.replace(session).is_some();
        if self.exists() && !was_online {
            out.act(Action::News(News::Online(self.name.clone(), true)));
        }
        let open: Vec<_> = open.iter().filter(|open| is_of_node_image(&open.task)).collect();
        for work in self.works.values_mut() {
            // Whatever it was that did not reach the node, on a new session it may.
            (work.waits_for_keys, work.not_before) = (false, None);
        }
        for work in self.works.values_mut().filter(|work| matches!(work.state, State::With | State::Away)) {
            match open.iter().find(|open| open.task == work.sent).map(|open| open.phase) {
                Some(OpenPhase::Running | OpenPhase::Finished) => {
                    (work.state, work.heard) = (State::With, Some(now));
                    if !std::mem::replace(&mut work.has_place, true) {
                        out.took();
                    }
                }
                Some(OpenPhase::NeedsKeys) | None => wait(work, out),
            }
        }
        for open in open {
            let known = self.works.values_mut().find(|work| work.task.job == open.task.job);
            match known {
                Some(work) if matches!(work.state, State::With) && work.sent == open.task => {}
                // It is sent again, with its keys.
                Some(work) if open.phase == OpenPhase::NeedsKeys && work.task == open.task => {
                    work.waits_for_keys = true;
                }
                // From before a restart of this side.
                Some(work)
                    if matches!(work.state, State::Waiting | State::Resolving)
                        && open.phase != OpenPhase::NeedsKeys =>
                {
                    work.sent = open.task.clone();
                    (work.state, work.heard) = (State::With, Some(now));
                    work.since = work.since.or(Some(now));
                    work.is_inherited = true;
                    if !std::mem::replace(&mut work.has_place, true) {
                        out.took();
                    }
                }
                _ if open.phase == OpenPhase::Finished => {}
                _ => out.cancel(open.task.clone(), UNWANTED),
            }
        }
    }

    /// The node's session ended.
    pub(in super::super) fn down(&mut self, session: SessionId, out: &mut Out<'_>) {
        if self.session != Some(session) {
            return;
        }
        self.session = None;
        if self.exists() {
            out.act(Action::News(News::Online(self.name.clone(), false)));
        }
        for work in self.works.values_mut().filter(|work| matches!(work.state, State::With)) {
            work.state = State::Away;
            give_place(work, out);
        }
    }

    /// A dispatch ended.
    pub(in super::super) fn dispatched(
        &mut self,
        task: &TaskId,
        outcome: DispatchOutcome,
        now: Timestamp,
        out: &mut Out<'_>,
    ) {
        let current = self.session;
        let resolving = |work: &Work| work.sent == *task && matches!(work.state, State::Resolving);
        let Some((key, work)) = self.works.iter_mut().find(|(_, work)| resolving(work)) else {
            // Not where the node's hello was quicker.
            let is_wanted = self.works.values().any(|work| work.sent == *task && work.is_out());
            if matches!(outcome, DispatchOutcome::Sent(_)) && !is_wanted {
                out.cancel(task.clone(), UNWANTED);
            }
            return;
        };
        match outcome {
            DispatchOutcome::Sent(session) => {
                work.since = work.since.or(Some(now));
                work.heard = Some(now);
                if current == Some(session) {
                    work.state = State::With;
                } else if current.is_some_and(|current| current > session) {
                    // Another session has come meanwhile, and its hello did not name the task.
                    wait(work, out);
                } else {
                    work.state = State::Away;
                    give_place(work, out);
                }
            }
            DispatchOutcome::Offline => {
                wait(work, out);
                work.not_before = now.checked_add(GIVEN_BACK).ok();
            }
            DispatchOutcome::Unsendable(reason) => {
                give_place(work, out);
                let key = key.clone();
                self.fail(&key, truncate_reason(&reason), now, out);
            }
        }
    }

    /// The node has taken a task.
    pub(in super::super) fn accepted(&mut self, task: &TaskId, out: &mut Out<'_>) {
        if !self.works.values().any(|work| work.sent == *task && work.is_out()) {
            out.cancel(task.clone(), UNWANTED);
        }
    }

    /// How far a task is.
    pub(in super::super) fn progress(&mut self, progress: &Progress, now: Timestamp, out: &mut Out<'_>) {
        let of = |work: &&mut Work| work.sent == progress.task && work.is_out();
        let Some(work) = self.works.values_mut().find(of) else {
            return out.cancel(progress.task.clone(), UNWANTED);
        };
        work.heard = Some(now);
        let Some(image) = progress.images.first() else { return };
        if let Some(bytes) = image.bytes.filter(|bytes| bytes.total > 0) {
            let percent = u128::from(bytes.done.min(bytes.total)) * 100 / u128::from(bytes.total);
            // 100 is for an image that is there: unpacking takes its time, too.
            work.progress = i32::try_from(percent).unwrap_or(0).min(99);
        }
        work.message = truncate_reason(&image.reason);
    }

    /// How a task ended.
    pub(in super::super) fn result(&mut self, result: &TaskResult, now: Timestamp, out: &mut Out<'_>) {
        let Some((key, work)) = self.works.iter_mut().find(|(_, work)| work.sent == result.task) else {
            return out.ack(result.task.clone());
        };
        match &mut work.state {
            // Said once more: the acknowledgement waits for the write.
            State::Ended { ack: Some(_), .. } => return,
            // It was given up here, and the API server does not know yet: better news is in time, unless it is being told.
            State::Ended { ack: None, .. }
                if result.outcome == TaskOutcome::Succeeded && !self.write.in_flight =>
            {
                return work.ends(&key.0, &key.1, result, now);
            }
            State::Ended { ack, .. } => {
                *ack = Some(result.task.clone());
                return;
            }
            _ if work.task != work.sent => {
                // An earlier round. The later one begins.
                out.ack(result.task.clone());
                return wait(work, out);
            }
            // It may have failed for want of what is there by now, such as a secret that was mended.
            _ if work.is_inherited && result.outcome != TaskOutcome::Succeeded => {
                out.ack(result.task.clone());
                work.is_inherited = false;
                return wait(work, out);
            }
            _ if result.outcome == TaskOutcome::Cancelled => {
                out.ack(result.task.clone());
                wait(work, out);
                work.not_before = now.checked_add(GIVEN_BACK).ok();
                return;
            }
            _ => {}
        }
        give_place(work, out);
        work.ends(&key.0, &key.1, result, now);
        let key = key.clone();
        self.tell_end_of(&key, out);
    }

    /// It ends without the node.
    pub(super) fn fail(&mut self, key: &Key, message: String, now: Timestamp, out: &mut Out<'_>) {
        if let Some(work) = self.works.get_mut(key) {
            work.failed(&key.1, message, now);
        }
        self.tell_end_of(key, out);
    }

    fn tell_end_of(&self, key: &Key, out: &mut Out<'_>) {
        let Some((object, work)) = self.object.as_ref().zip(self.works.get(key)) else { return };
        let tags = object.spec.images.get(&key.0).map(|image| image.tags.as_slice()).unwrap_or_default();
        let tag: Option<&ImageTagSpec> = tags.iter().find(|tag| tag.tag == key.1);
        if let (Some(tag), State::Ended { status, .. }) = (tag, &work.state) {
            tell_end(&self.name, &object.uid, &full_name(&key.0, &key.1), tag, status, out);
        }
    }
}

/// It is to be sent, from the beginning.
fn wait(work: &mut Work, out: &mut Out<'_>) {
    give_place(work, out);
    work.state = State::Waiting;
    work.sent = work.task.clone();
}
