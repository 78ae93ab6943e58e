//! One node with its NodeImage: our knowledge of both, and the order in which we reconcile them.

mod write;

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use prepull_api::selector::Selector;
use prepull_api::task::{JobUid, TaskId, TaskResult};
use prepull_api::wire::OpenTask;

use super::compact::CompactNodeImage;
use super::effects::NodeEffects;
use super::object::ObjectState;
use super::pulls::Pulls;
use super::reported::ReportedStates;
use super::requests::RequestQueue;
use super::shared_parts::SharedParts;
use super::{Context, WrittenNodeImage};
use crate::fleet::node_view::NodeView;
use crate::fleet::session::SessionId;
use crate::kruise::NodeImageUpdate;
use crate::shared::events::{ObjectEvent, ObjectKind};
use crate::shared::objects::Unreadable;
use crate::shared::outcomes::DispatchOutcome;
use crate::shared::pacing::Moment;
use crate::shared::reasons;
use write::NodeImageWrites;

/// How long jobs wait for a NodeImage that was deleted by hand. We create it within a second, but a finalizer may hold the old
/// one, or a policy refuse the new one.
const LONGEST_RETURN: Duration = Duration::from_secs(300);
/// The label of nodes that get no NodeImage, as in Kruise.
const VIRTUAL: (&str, &str) = ("type", "virtual-kubelet");

#[derive(Debug, Default)]
pub(super) struct TrackedNode {
    /// The Node; `None` if there is none.
    pub(super) node: Option<NodeView>,
    object: ObjectState,
    /// UID of the last NodeImage that the watch reported as deleted: the answer to a write may come after that.
    deleted: Option<String>,
    /// The node's session; `None` while the node is offline.
    session: Option<SessionId>,
    pub(super) pulls: Pulls,
    /// Since when the jobs count the node although its NodeImage is gone, because it will be created again.
    awaited_since: Option<Timestamp>,
    /// Whether the pulls are in line with the object.
    is_synced: bool,
    pub(super) requests: RequestQueue,
    reported: ReportedStates,
    writes: NodeImageWrites,
}

impl TrackedNode {
    pub(super) fn is_without_object(&self) -> bool {
        matches!(self.object, ObjectState::Absent)
    }

    /// Whether there is no NodeImage although the node should have one.
    pub(super) fn needs_creation(&self, selector: &Selector) -> bool {
        self.is_without_object() && self.should_have_object(selector)
    }

    pub(super) fn should_have_object(&self, selector: &Selector) -> bool {
        self.node.as_ref().is_some_and(|node| {
            let is_virtual = node.labels.get(VIRTUAL.0).is_some_and(|kind| kind == VIRTUAL.1);
            node.ready && !is_virtual && selector.matches(&node.labels)
        })
    }

    /// Whether the jobs know the node.
    fn is_counted(&self) -> bool {
        self.awaited_since.is_some() || self.object.present().is_some()
    }

    /// Whether the last write of the NodeImage or of its spec failed.
    pub(super) fn has_failed_writes(&self) -> bool {
        self.writes.have_failed()
    }

    pub(super) fn is_writing(&self) -> bool {
        self.writes.is_in_flight()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.node.is_none()
            && self.is_without_object()
            && self.session.is_none()
            && !self.writes.is_in_flight()
    }

    pub(super) fn is_owned_by_any(&self, is_meant: impl Fn(&JobUid) -> bool) -> bool {
        self.object.present().is_some_and(|object| object.is_owned_by_any(is_meant))
    }

    /// The NodeImage with this UID was deleted. Returns whether it was the node's, as far as we know.
    pub(super) fn note_deleted(&mut self, uid: String) -> bool {
        let is_known = self.object.present().is_none_or(|object| object.uid() == uid);
        self.deleted = Some(uid);
        is_known
    }

    /// The API server has a NodeImage that cannot be read.
    pub(super) fn observe_unreadable(&mut self, unreadable: Unreadable, fx: &mut NodeEffects<'_>) {
        self.forget_object(false, fx);
        self.object = ObjectState::Unreadable;
        let note = format!("the NodeImage cannot be read, nothing is done for it: {}", unreadable.error);
        let (kind, object, reason) = (ObjectKind::NodeImage, unreadable.id, reasons::INVALID);
        fx.emit_event(ObjectEvent { kind, object, warning: true, reason, note });
    }

    /// The API server has this NodeImage, or none.
    pub(super) fn observe(
        &mut self,
        object: Option<CompactNodeImage>,
        selector: &Selector,
        parts: &mut SharedParts,
        fx: &mut NodeEffects<'_>,
    ) {
        if object.as_ref().is_some_and(|object| self.deleted.as_deref() == Some(object.uid())) {
            return;
        }
        let will_return = self.should_have_object(selector);
        match object {
            None => self.forget_object(will_return, fx),
            Some(object) if object.is_being_deleted() => {
                self.forget_object(will_return, fx);
                self.object = ObjectState::Terminating;
            }
            Some(object) => self.observe_present(object, parts, fx),
        }
    }

    /// There is no NodeImage any more. If it `will_return`, the jobs request their tags again. Otherwise a job without other
    /// nodes would end.
    fn forget_object(&mut self, will_return: bool, fx: &mut NodeEffects<'_>) {
        let before = std::mem::replace(&mut self.object, ObjectState::Absent);
        if let ObjectState::Present(_) = before {
            self.pulls.abandon_all(fx);
            self.awaited_since = Some(fx.now);
            self.requests.end_object();
            if will_return {
                self.reported.take_back(fx);
            } else {
                self.reported = ReportedStates::default();
            }
        }
        if !will_return {
            self.give_up_waiting(fx);
        }
    }

    /// The jobs go on without the node.
    fn give_up_waiting(&mut self, fx: &mut NodeEffects<'_>) {
        if self.awaited_since.take().is_some() {
            self.requests.clear();
            fx.notify_jobs(NodeImageUpdate::Deleted(fx.node.clone()));
        }
    }

    /// Gives up waiting for the NodeImage if the node gets none, or not in time.
    fn check_return(&mut self, selector: &Selector, fx: &mut NodeEffects<'_>) {
        let Some(since) = self.awaited_since.as_mut() else { return };
        // The clock may have been set back.
        *since = fx.now.min(*since);
        let end = since.later_by(LONGEST_RETURN);
        if end <= fx.now || !self.should_have_object(selector) {
            self.give_up_waiting(fx);
        } else {
            fx.wake_at(end);
        }
    }

    fn observe_present(&mut self, new: CompactNodeImage, parts: &mut SharedParts, fx: &mut NodeEffects<'_>) {
        if let Some(known) = self.object.present().filter(|known| new.is_older_than(known)) {
            // A write that ended with an older version may have answered requests: by the newer one, then.
            return self.reported.report(known, parts, fx);
        }
        let before = self.object.present();
        let is_new = before.is_none_or(|before| before.uid() != new.uid());
        if is_new || before.is_some_and(|before| before.labels != new.labels) {
            let (node, labels) = (fx.node.clone(), new.labels.clone());
            fx.notify_jobs(NodeImageUpdate::Exists { node, labels });
        }
        if is_new && self.session.is_some() {
            fx.notify_jobs(NodeImageUpdate::Online(fx.node.clone(), true));
        }
        self.reported.report(&new, parts, fx);
        self.object = ObjectState::Present(new);
        self.awaited_since = None;
        self.is_synced = false;
    }

    /// The node has connected, and its ledger has these tasks.
    pub(super) fn connect(&mut self, session: SessionId, open: &[OpenTask], fx: &mut NodeEffects<'_>) {
        if self.session.is_some_and(|current| current > session) {
            return;
        }
        // The spec may ask for these tasks since a moment ago: they are not to be cancelled.
        self.sync_pulls(fx);
        let was_online = self.session.replace(session).is_some();
        if self.is_counted() && !was_online {
            fx.notify_jobs(NodeImageUpdate::Online(fx.node.clone(), true));
        }
        self.pulls.reconnect(open, fx);
    }

    pub(super) fn disconnect(&mut self, session: SessionId, fx: &mut NodeEffects<'_>) {
        if self.session != Some(session) {
            return;
        }
        self.session = None;
        if self.is_counted() {
            fx.notify_jobs(NodeImageUpdate::Online(fx.node.clone(), false));
        }
        self.pulls.disconnect(fx);
    }

    pub(super) fn end_dispatch(&mut self, task: &TaskId, outcome: DispatchOutcome, fx: &mut NodeEffects<'_>) {
        self.pulls.end_dispatch(task, outcome, self.session, self.object.present(), fx);
    }

    /// What entitles the node to the layers of a task.
    pub(super) fn entitlement(&self, task: &TaskId) -> Option<Arc<str>> {
        self.pulls.entitlement(task, self.object.present()?)
    }

    pub(super) fn end_task(&mut self, result: &TaskResult, fx: &mut NodeEffects<'_>) {
        self.pulls.end_task(result, self.writes.is_in_flight(), self.object.present(), fx);
    }

    /// A write of the NodeImage has ended; the object that it returned is observed next.
    pub(super) fn end_write(&mut self, written: &WrittenNodeImage, fx: &mut NodeEffects<'_>) {
        if matches!(written, WrittenNodeImage::TooLarge) && self.requests.is_one_in_flight() {
            // Of several requests each is tried alone first. A tag that its job had before stays until the job is gone.
            for refused in self.requests.end_write(true) {
                self.answer_full(&refused, fx);
            }
        }
        for written in self.requests.end_write(matches!(written, WrittenNodeImage::Done(_))) {
            self.reported.forget(&written.request);
        }
        self.writes.end_write(written, fx.now);
    }

    /// Drives the node towards its NodeImage's spec, and the NodeImage towards what the node and the jobs want.
    pub(super) fn reconcile(&mut self, context: &mut Context<'_>, fx: &mut NodeEffects<'_>) {
        self.check_return(context.selector, fx);
        self.sync_pulls(fx);
        if let Some(object) = self.object.present() {
            self.pulls.give_up(object, context, fx);
            if self.session.is_some() {
                self.pulls.dispatch_waiting(object, context, fx);
            }
        }
        self.write_if_needed(context, fx);
    }

    fn sync_pulls(&mut self, fx: &mut NodeEffects<'_>) {
        if self.is_synced {
            return;
        }
        if let Some(object) = self.object.present() {
            self.pulls.sync(object, fx);
            self.is_synced = true;
        }
    }
}
