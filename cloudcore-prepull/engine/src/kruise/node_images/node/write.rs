//! The write that a node's NodeImage needs: at most one at a time, and the most urgent one first.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use prepull_api::crd::kruise::{NodeImageSpec, NodeImageStatus};

use super::TrackedNode;
use crate::kruise::node_images::compact::CompactNodeImage;
use crate::kruise::node_images::effects::NodeEffects;
use crate::kruise::node_images::events::full_event;
use crate::kruise::node_images::object::ObjectState;
use crate::kruise::node_images::owners;
use crate::kruise::node_images::reported::ReportedStates;
use crate::kruise::node_images::requests::QueuedRequest;
use crate::kruise::node_images::shares::{self, make_room};
use crate::kruise::node_images::spec_edit::{self, EditOutcome, StoredTags};
use crate::kruise::node_images::status::{Difference, compare_statuses, desired_status};
use crate::kruise::node_images::{Context, NodeImageWrite, WrittenNodeImage};
use crate::kruise::{Liveness, TagKey};
use crate::shared::pacing::{Backoff, Moment};

/// The wait after a write that failed, or had no effect.
const WRITE_RETRY: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(30));
/// Between two writes of one status when tags have ended: those that end at the same time share a write.
const END_GAP: Duration = Duration::from_millis(300);
/// Between two writes of one status for progress.
const PROGRESS_GAP: Duration = Duration::from_secs(5);
/// Before the first of them: a pull that ends before needs one write less.
const PROGRESS_DELAY: Duration = Duration::from_secs(3);
/// Before a write for progress is tried again that the fleet's [budget](super::super::progress_budget) did not allow.
const PROGRESS_RETRY: Duration = Duration::from_secs(1);

/// The course of the writes of one NodeImage. Jobs have their own, though both pace and retry: spec and status
/// of a NodeImage share one version, and its progress may wait, while each status of a job is urgent.
///
/// Each part has a pace of its own: a policy may refuse the spec or the labels, or set others each time, and the results of
/// the node are in the status.
#[derive(Debug, Default)]
pub(super) struct NodeImageWrites {
    in_flight: Option<InFlight>,
    /// Of the spec, and of the object as a whole.
    of_spec: WritePace,
    of_labels: WritePace,
    of_status: WritePace,
    status_written: Option<Timestamp>,
    /// Since when there is progress that is not written.
    progress_since: Option<Timestamp>,
}

#[derive(Debug)]
struct InFlight {
    /// metadata.resourceVersion of the object that the write replaces; `None` for a creation.
    replaces: Option<String>,
    part: WrittenPart,
}

#[derive(Debug)]
enum WrittenPart {
    SpecOrWhole,
    Labels(Arc<BTreeMap<String, String>>),
    Status,
}

/// When the next write may begin.
#[derive(Debug)]
struct WritePace {
    backoff: Backoff,
    not_before: Option<Timestamp>,
}

impl Default for WritePace {
    fn default() -> Self {
        Self { backoff: WRITE_RETRY, not_before: None }
    }
}

impl WritePace {
    /// The end of the wait, if there is one.
    fn wait_end(&self, now: Timestamp) -> Option<Timestamp> {
        self.not_before.filter(|not_before| *not_before > now)
    }

    fn end_write(&mut self, succeeded: bool, now: Timestamp) {
        if succeeded {
            *self = Self::default();
        } else {
            self.not_before = now.checked_add(self.backoff.next_wait()).ok();
        }
    }
}

impl NodeImageWrites {
    pub(super) fn is_in_flight(&self) -> bool {
        self.in_flight.is_some()
    }

    /// Whether the last write of the object or of its spec failed.
    pub(super) fn have_failed(&self) -> bool {
        self.of_spec.backoff.has_failed()
    }

    fn begin_write(&mut self, object: Option<&CompactNodeImage>, part: WrittenPart) {
        let replaces = object.map(|object| object.version.to_string());
        self.in_flight = Some(InFlight { replaces, part });
    }

    pub(super) fn end_write(&mut self, written: &WrittenNodeImage, now: Timestamp) {
        let Some(InFlight { replaces, part }) = self.in_flight.take() else { return };
        let (is_done, object) = match written {
            WrittenNodeImage::Done(object) => (true, object.as_deref()),
            WrittenNodeImage::Refused(object) => (false, object.as_deref()),
            WrittenNodeImage::Failed | WrittenNodeImage::TooLarge => (false, None),
        };
        let version = object.map(|object| &*object.version);
        // A write that changes nothing would be repeated at once, for ever. On a newer version it's repeated at once.
        let is_news = version != replaces.as_deref() || (is_done && version.is_none());
        let has_failed = matches!(written, WrittenNodeImage::Failed | WrittenNodeImage::TooLarge);
        let succeeded = is_news && !has_failed;
        match part {
            WrittenPart::SpecOrWhole => self.of_spec.end_write(succeeded, now),
            WrittenPart::Labels(labels) => {
                let has_labels = object.is_some_and(|object| object.labels == labels);
                self.of_labels.end_write(succeeded && has_labels, now);
            }
            WrittenPart::Status => self.of_status.end_write(succeeded, now),
        }
    }
}

impl TrackedNode {
    /// Makes the write that the NodeImage needs, if there is one and none is in flight.
    pub(super) fn write_if_needed(&mut self, context: &mut Context<'_>, fx: &mut NodeEffects<'_>) {
        if self.writes.is_in_flight() {
            return;
        }
        if let ObjectState::Unreadable | ObjectState::Terminating = self.object {
            return;
        }
        if !context.has_write_room {
            return fx.wait_to_write();
        }
        if let (Some(_), Some(object)) = (&self.node, self.object.present()) {
            let (spec, stored) = (object.restore_spec(), object.restore_status());
            return self.write_present(spec, stored.as_ref(), context, fx);
        }
        if let Some(wait_end) = self.writes.of_spec.wait_end(fx.now) {
            return fx.wake_at(wait_end);
        }
        if let Some(object) = self.object.present() {
            fx.request_write(NodeImageWrite::Delete { uid: object.uid().to_owned() });
            self.writes.begin_write(Some(object), WrittenPart::SpecOrWhole);
        } else if let Some(node) = self.node.as_ref().filter(|_| self.needs_creation(context.selector)) {
            fx.request_write(NodeImageWrite::Create(Arc::new(node.labels.clone())));
            self.writes.begin_write(None, WrittenPart::SpecOrWhole);
        }
    }

    /// Writes the first part that has to change and needn't wait: the spec, the labels, or the status.
    fn write_present(
        &mut self,
        mut spec: NodeImageSpec,
        stored: Option<&NodeImageStatus>,
        context: &mut Context<'_>,
        fx: &mut NodeEffects<'_>,
    ) {
        if let Some(wait_end) = self.writes.of_spec.wait_end(fx.now) {
            fx.wake_at(wait_end);
        } else {
            self.write_spec(&mut spec, stored, context, fx);
        }
        if !self.writes.is_in_flight() {
            self.write_labels(fx);
        }
        if !self.writes.is_in_flight() {
            self.write_status(&spec, stored, context, fx);
        }
    }

    /// Writes the labels if they have to change.
    fn write_labels(&mut self, fx: &mut NodeEffects<'_>) {
        let (Some(node), Some(object)) = (&self.node, self.object.present()) else { return };
        if *object.labels == node.labels {
            return;
        }
        if let Some(wait_end) = self.writes.of_labels.wait_end(fx.now) {
            return fx.wake_at(wait_end);
        }
        let (uid, version) = (object.uid().to_owned(), object.version.to_string());
        let labels = Arc::new(node.labels.clone());
        fx.request_write(NodeImageWrite::Labels { uid, version, labels: Arc::clone(&labels) });
        self.writes.begin_write(Some(object), WrittenPart::Labels(labels));
    }

    /// Writes the spec if it has to change, and takes it. Otherwise it stays as the API server has it.
    fn write_spec(
        &mut self,
        spec: &mut NodeImageSpec,
        stored: Option<&NodeImageStatus>,
        context: &mut Context<'_>,
        fx: &mut NodeEffects<'_>,
    ) {
        let Some(object) = self.object.present() else { return };
        let none = NodeImageStatus::default();
        let status = stored.unwrap_or(&none);
        let (mut has_changed, next_expiry) = spec_edit::prune_tags(spec, status, context.liveness, fx.now);
        if let Some(next_expiry) = next_expiry {
            fx.wake_at(next_expiry);
        }
        let (mut carried, mut unchanged, mut full, mut deferred) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        // A job may have finished, or been deleted, before its request could be written.
        let mut queued = self.requests.take();
        queued.retain(|queued| is_active(queued, context));
        let pulls = &self.pulls;
        let has_begun = |key: &TagKey| pulls.has_begun(key);
        let stored_tags = StoredTags { object, status, has_begun: &has_begun, now: fx.now };
        // One of them may be why the last write was refused.
        let one_at_a_time = self.writes.have_failed();
        let mut edits = apply_requests(queued, one_at_a_time, |queued| {
            spec_edit::apply_request(spec, stored_tags, queued)
        });
        spec_edit::drop_left_secrets(spec, object, context);
        if shares::stored_bytes(spec) > context.most_stored {
            // Without those that don't fit: the API server would refuse the others with them.
            *spec = object.restore_spec();
            spec_edit::prune_tags(spec, status, context.liveness, fx.now);
            spec_edit::drop_left_secrets(spec, object, context);
            edits = apply_requests(edits.into_requests(), one_at_a_time, |queued| {
                apply_if_it_fits(spec, stored_tags, queued, context.most_stored)
            });
            spec_edit::drop_left_secrets(spec, object, context);
        }
        for (queued, edit) in edits.applied {
            match edit {
                // It gave its room to a later one.
                EditOutcome::Changed if !spec_edit::is_requested(spec, &queued.request) => full.push(queued),
                EditOutcome::Changed => carried.push(queued),
                EditOutcome::Unchanged => unchanged.push(queued),
                EditOutcome::Deferred { has_disowned } => {
                    has_changed |= has_disowned;
                    deferred.push(queued);
                }
                EditOutcome::Full { has_disowned } => {
                    has_changed |= has_disowned;
                    full.push(queued);
                }
            }
        }
        has_changed |= !carried.is_empty();
        if has_changed {
            let uid = object.uid().to_owned();
            let (version, spec) = (object.version.to_string(), Box::new(std::mem::take(spec)));
            fx.request_write(NodeImageWrite::Spec { uid, version, spec });
            self.writes.begin_write(Some(object), WrittenPart::SpecOrWhole);
            self.requests.begin_write(carried);
        }
        self.requests.put_back(edits.rest);
        self.requests.put_back(deferred);
        for queued in unchanged {
            self.reported.answer(&queued.request, fx);
        }
        for queued in full {
            self.answer_full(&queued, fx);
        }
    }

    /// There is no room for a request: the job must not wait for room that may never come.
    pub(super) fn answer_full(&self, queued: &QueuedRequest, fx: &mut NodeEffects<'_>) {
        if let Some(object) = self.object.present() {
            full_event(object.uid(), &queued.request.key.image, fx);
        }
        ReportedStates::answer_failed(&queued.request, fx);
    }

    /// Writes the status if it is not the one that is stored. `spec` is what the API server has.
    fn write_status(
        &mut self,
        spec: &NodeImageSpec,
        stored: Option<&NodeImageStatus>,
        context: &mut Context<'_>,
        fx: &mut NodeEffects<'_>,
    ) {
        let Some(object) = self.object.present() else { return };
        if let Some(wait_end) = self.writes.of_status.wait_end(fx.now) {
            return fx.wake_at(wait_end);
        }
        let none = NodeImageStatus::default();
        let current = |key: &_| self.pulls.status_of(key);
        let status = desired_status(spec, stored.unwrap_or(&none), current);
        let Some(difference) = compare_statuses(&status, stored) else {
            self.writes.progress_since = None;
            return;
        };
        let after = |since: Option<Timestamp>, gap: Duration| {
            since.and_then(|since| since.checked_add(gap).ok()).unwrap_or(Timestamp::MIN)
        };
        let last = self.writes.status_written;
        let due = match difference {
            Difference::Ended | Difference::Removed => after(last, END_GAP),
            Difference::Progress => {
                let since = *self.writes.progress_since.get_or_insert(fx.now);
                after(last, PROGRESS_GAP).max(after(Some(since), PROGRESS_DELAY))
            }
        };
        if due > fx.now {
            return fx.wake_at(due);
        }
        if difference == Difference::Progress && context.progress_budget.try_take(1.0, fx.now).is_err() {
            return fx.wake_at(fx.now.later_by(PROGRESS_RETRY));
        }
        let (uid, version) = (object.uid().to_owned(), object.version.to_string());
        fx.request_write(NodeImageWrite::Status { uid, version, status: Box::new(status) });
        self.writes.begin_write(Some(object), WrittenPart::Status);
        (self.writes.status_written, self.writes.progress_since) = (Some(fx.now), None);
    }
}

/// Requests, with what has become of them.
struct AppliedRequests {
    applied: Vec<(QueuedRequest, EditOutcome)>,
    /// Those that wait for the end of the write.
    rest: Vec<QueuedRequest>,
}

impl AppliedRequests {
    fn into_requests(self) -> Vec<QueuedRequest> {
        self.applied.into_iter().map(|(queued, _)| queued).chain(self.rest).collect()
    }
}

/// Applies requests to a spec, all of them or until the first one that changes it.
fn apply_requests(
    queued: Vec<QueuedRequest>,
    one_at_a_time: bool,
    mut apply: impl FnMut(&QueuedRequest) -> EditOutcome,
) -> AppliedRequests {
    let (mut applied, mut rest, mut has_changed) = (Vec::new(), Vec::new(), false);
    for queued in queued {
        if one_at_a_time && has_changed {
            rest.push(queued);
        } else {
            let edit = apply(&queued);
            has_changed |= edit == EditOutcome::Changed;
            applied.push((queued, edit));
        }
    }
    AppliedRequests { applied, rest }
}

/// Applies a request, but one that makes the NodeImage too large finds no room.
fn apply_if_it_fits(
    spec: &mut NodeImageSpec,
    stored: StoredTags<'_>,
    queued: &QueuedRequest,
    most: usize,
) -> EditOutcome {
    let before = spec.clone();
    let edit = spec_edit::apply_request(spec, stored, queued);
    // It may have been filled when there were fewer NodeImages.
    let most = most.max(shares::stored_bytes(&before));
    let fits = |spec: &NodeImageSpec| shares::stored_bytes(spec) <= most;
    if edit == EditOutcome::Changed
        && !make_room(spec, stored.has_begun, owners::namespace(&queued.request.owner), fits)
    {
        *spec = before;
        return EditOutcome::Full { has_disowned: false };
    }
    edit
}

fn is_active(queued: &QueuedRequest, context: &Context<'_>) -> bool {
    queued.job().is_some_and(|job| (context.liveness)(&job) == Liveness::Active)
}

#[cfg(test)]
mod tests {
    use prepull_api::crd::kruise::{NodeImage, NodeImageSpec};

    use super::*;

    #[test]
    fn an_ineffective_write_is_not_repeated_immediately() {
        let object = |version: &str| {
            let mut object = NodeImage::new("edge-1", NodeImageSpec::default());
            object.metadata.resource_version = Some(version.to_owned());
            Some(Box::new(object.into()))
        };
        let now = Timestamp::UNIX_EPOCH;
        let waits = |replaces: Option<&str>, written: &WrittenNodeImage| {
            let in_flight =
                Some(InFlight { replaces: replaces.map(str::to_owned), part: WrittenPart::SpecOrWhole });
            let mut writes = NodeImageWrites { in_flight, ..NodeImageWrites::default() };
            writes.end_write(written, now);
            assert!(!writes.is_in_flight());
            assert_eq!(writes.of_spec.not_before.is_some(), writes.have_failed());
            writes.have_failed()
        };
        assert!(waits(Some("1"), &WrittenNodeImage::Failed) && waits(Some("1"), &WrittenNodeImage::TooLarge));
        assert!(waits(Some("1"), &WrittenNodeImage::Done(object("1"))), "it changed nothing");
        assert!(waits(Some("1"), &WrittenNodeImage::Refused(object("1"))), "it will be refused again");
        assert!(waits(None, &WrittenNodeImage::Refused(None)), "there is none, and none may be made");
        assert!(!waits(Some("1"), &WrittenNodeImage::Done(object("2"))));
        assert!(
            !waits(Some("1"), &WrittenNodeImage::Refused(object("2"))),
            "the write is repeated on the newer one"
        );
        assert!(!waits(None, &WrittenNodeImage::Done(object("1"))));
        assert!(!waits(Some("1"), &WrittenNodeImage::Done(None)), "it was deleted");
        assert!(!waits(Some("1"), &WrittenNodeImage::Refused(None)), "it's gone, and may be created");
        assert!(!waits(None, &WrittenNodeImage::Done(None)));
    }
}
