//! The tags of one NodeImage that have not ended in its stored status: their pulls, and those that the rules refuse.

mod session;

use std::collections::{BTreeMap, HashSet};

use jiff::Timestamp;
use prepull_api::crd::kruise::ImageTagStatus;

use super::Context;
use super::compact::{CompactNodeImage, CompactTag};
use super::effects::{CancelledTasks, NodeEffects};
use super::events::end_events;
use super::owners;
use super::tag_pull::{ABANDONED, TagPull, TagPullState, refused_status, task_id};
use crate::kruise::TagKey;
use crate::kruise::node_images::Action;
use crate::kruise::rules::{self, ValidTag};

/// Tasks of NodeImages in a node's ledger, those that wait for their acknowledgement included: half of its capacity
/// ([`prepull_api::wire::MAX_OPEN_TASKS`]), the other half is for ImagePrePullJobs. A ledger that is full would answer with
/// a failure, though nothing is wrong but that the API server is slow.
const LEDGER_SHARE: usize = prepull_api::wire::MAX_OPEN_TASKS / 2;

#[derive(Debug, Default)]
pub(super) struct Pulls {
    open: BTreeMap<TagKey, TagPull>,
    /// The statuses of tags that the rules refuse: they have failed without a task.
    refused: BTreeMap<TagKey, ImageTagStatus>,
    cancelled: CancelledTasks,
}

/// A tag that the spec wants, and that hasn't ended.
struct WantedTag<'a> {
    object: &'a CompactNodeImage,
    key: TagKey,
    tag: &'a CompactTag,
}

impl Pulls {
    pub(super) fn has_waiting(&self) -> bool {
        self.open.values().any(|pull| matches!(pull.state(), TagPullState::Waiting))
    }

    /// Whether the node has the tag's task, is about to get it, or has ended it since the status was stored. That status may be
    /// minutes behind: progress waits for its turn.
    pub(super) fn has_begun(&self, key: &TagKey) -> bool {
        self.open.get(key).is_some_and(|pull| pull.is_sent() || pull.started.is_some())
    }

    /// The status of a tag that has not ended in the stored status.
    pub(super) fn status_of(&self, key: &TagKey) -> Option<ImageTagStatus> {
        let refused = self.refused.get(key).cloned();
        refused.or_else(|| self.open.get(key).map(TagPull::status))
    }

    /// Brings the pulls in line with the spec. A tag that has ended in the stored status needs none any more, which is when
    /// the node's result is acknowledged.
    pub(super) fn sync(&mut self, object: &CompactNodeImage, fx: &mut NodeEffects<'_>) {
        let mut wanted: HashSet<TagKey> = HashSet::new();
        for (name, terms, tags) in object.images() {
            let has_ended = |tag: &CompactTag| {
                let status = object.status_of(name, &tag.name);
                status.and_then(|status| status.ended_at(tag.version)).is_some()
            };
            // True of most images of most nodes, and cheaper than their rules.
            if tags.iter().all(has_ended) {
                continue;
            }
            let image = CompactNodeImage::restore_image(terms, tags);
            for (tag, valid) in tags.iter().zip(rules::image_rules(name, &image)) {
                let key = TagKey::new(name, &tag.name);
                if has_ended(tag) || !wanted.insert(key.clone()) {
                    continue;
                }
                let wanted = WantedTag { object, key, tag };
                match valid {
                    Ok(valid) => {
                        self.refused.remove(&wanted.key);
                        self.sync_pull(wanted, valid, fx);
                    }
                    Err(reason) => self.refuse(wanted, reason, fx),
                }
            }
        }
        self.refused.retain(|key, _| wanted.contains(key));
        self.retain(|key| wanted.contains(key), fx);
    }

    fn sync_pull(
        &mut self,
        WantedTag { object, key, tag }: WantedTag<'_>,
        valid: ValidTag,
        fx: &mut NodeEffects<'_>,
    ) {
        let task = task_id(object.uid(), &key, &valid);
        let new = |valid| TagPull::new(key.clone(), task.clone(), tag.version, valid);
        match self.open.get_mut(&key) {
            Some(pull) if pull.task == task => {}
            // A new round of the very same: the node goes on to the end of the earlier one, and what that fetches need not
            // be fetched again.
            Some(pull) if pull.task.job == task.job && pull.is_sent() => {
                (pull.task, pull.version) = (task, tag.version);
                // The time of the new round begins now, even while the node works on the earlier one.
                pull.started = pull.started.and(Some(fx.now));
            }
            Some(pull) => {
                pull.abandon(&mut self.cancelled, fx);
                *pull = new(valid);
            }
            None => {
                let stored = object.status_of(&key.image, &key.tag);
                let pull = new(valid).resume(stored);
                self.open.insert(key, pull);
            }
        }
    }

    fn refuse(
        &mut self,
        WantedTag { object, key, tag }: WantedTag<'_>,
        reason: String,
        fx: &mut NodeEffects<'_>,
    ) {
        if let Some(mut pull) = self.open.remove(&key) {
            pull.abandon(&mut self.cancelled, fx);
        }
        let known = self.refused.get(&key);
        if known.is_none_or(|known| known.version != tag.version || known.message != reason) {
            let status = refused_status(tag, reason, fx.now);
            end_events(object.uid(), &key, &tag.terms.owner_references, &status, fx);
            self.refused.insert(key, status);
        }
    }

    /// Gives up all pulls: there is no NodeImage any more.
    pub(super) fn abandon_all(&mut self, fx: &mut NodeEffects<'_>) {
        self.retain(|_| false, fx);
    }

    fn retain(&mut self, is_wanted: impl Fn(&TagKey) -> bool, fx: &mut NodeEffects<'_>) {
        self.open.retain(|key, pull| {
            let is_wanted = is_wanted(key);
            if !is_wanted {
                pull.abandon(&mut self.cancelled, fx);
            }
            is_wanted
        });
    }

    /// Ends the pulls that are out of time, or that no job waits for any more, even if the node still works on them.
    pub(super) fn give_up(
        &mut self,
        object: &CompactNodeImage,
        context: &Context<'_>,
        fx: &mut NodeEffects<'_>,
    ) {
        let mut given_up: Vec<(TagKey, &'static str)> = Vec::new();
        for (key, pull) in &self.open {
            if matches!(pull.state(), TagPullState::Ended { .. }) {
                continue;
            }
            let tag = object.tag(key).map(|(_, tag)| tag);
            let is_abandoned =
                |tag: &CompactTag| owners::is_abandoned(&tag.terms.owner_references, context.liveness);
            let reason = if tag.is_some_and(is_abandoned) {
                ABANDONED
            } else {
                let Some(due) = pull.give_up_due() else { continue };
                if due > fx.now {
                    fx.wake_at(due);
                    continue;
                }
                pull.give_up_reason()
            };
            if pull.is_assigned() {
                self.cancelled.cancel(&pull.sent, reason, fx);
            }
            given_up.push((key.clone(), reason));
        }
        for (key, reason) in given_up {
            self.fail(object, &key, reason.to_owned(), fx);
        }
    }

    /// Dispatches the pulls that wait, the oldest tag first, as long as the node has slots.
    pub(super) fn dispatch_waiting(
        &mut self,
        object: &CompactNodeImage,
        context: &mut Context<'_>,
        fx: &mut NodeEffects<'_>,
    ) {
        let in_ledger = self.open.values().filter(|pull| pull.is_in_ledger()).count();
        let mut room = LEDGER_SHARE.saturating_sub(in_ledger);
        let mut waiting: Vec<(Option<Timestamp>, TagKey)> = Vec::new();
        for (key, pull) in self.open.iter().filter(|(_, pull)| matches!(pull.state(), TagPullState::Waiting))
        {
            if let Some(not_before) = pull.not_before.filter(|not_before| *not_before > fx.now) {
                fx.wake_at(not_before);
                continue;
            }
            let created = object.tag(key).and_then(|(_, tag)| tag.created);
            waiting.push((created, key.clone()));
        }
        waiting.sort_unstable();
        for (_, key) in waiting {
            let Some((image, tag)) = object.tag(&key) else { continue };
            let Some(pull) = self.open.get_mut(&key) else { continue };
            if room == 0 || !(context.take_slot)(fx.node) {
                return;
            }
            room -= 1;
            pull.begin_dispatch(fx.now);
            let dispatch = pull.make_dispatch(image, tag, context.request_of, fx);
            fx.emit(Action::Dispatch(Box::new(dispatch)));
        }
    }

    /// Ends a pull as failed without a result of the node.
    fn fail(&mut self, object: &CompactNodeImage, key: &TagKey, message: String, fx: &mut NodeEffects<'_>) {
        let Some(pull) = self.open.get_mut(key) else { return };
        pull.fail_without_result(message, fx);
        publish_end(object, pull, fx);
    }
}

fn publish_end(object: &CompactNodeImage, pull: &TagPull, fx: &mut NodeEffects<'_>) {
    if let (Some((_, tag)), TagPullState::Ended { status, .. }) = (object.tag(&pull.key), pull.state()) {
        end_events(object.uid(), &pull.key, &tag.terms.owner_references, status, fx);
    }
}
