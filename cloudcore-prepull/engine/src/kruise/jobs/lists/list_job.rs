//! One ImageListPullJob, until its final status is written.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::crd::kruise::{
    FailedImageStatus, ImageListPullJob, ImageListPullJobStatus, PullJobTemplate,
};

use super::child::{Children, ListChild, SpecFingerprint};
use super::child_writes::{ChildWrite, ChildWrites};
use crate::kruise::jobs::kind::KruiseJobObject;
use crate::kruise::jobs::lifecycle::Lifecycle;
use crate::kruise::jobs::registry::RunningJob;
use crate::kruise::jobs::tag_requests::child_name;
use crate::kruise::jobs::{Action, ChildSpec, Effects, JobWrite, metadata, status};
use crate::kruise::rules::{self, Completion, ValidListJob};
use crate::shared::events::ObjectKind;
use crate::shared::objects::ObjectId;
use crate::shared::outcomes::WriteOutcome;
use crate::shared::reasons;

const KIND: ObjectKind = ObjectKind::ImageListPullJob;

#[derive(Debug)]
struct ListPlan {
    list: ValidListJob,
    template: Arc<PullJobTemplate>,
    fingerprint: SpecFingerprint,
}

#[derive(Debug)]
pub(super) struct RunningListJob {
    lifecycle: Lifecycle<ImageListPullJob>,
    plan: Option<ListPlan>,
    /// The writes of the children, by image.
    writes: BTreeMap<String, ChildWrites>,
    /// Whether a child must be deleted first. The list can't end before that: children to re-create haven't finished,
    /// and children of removed images must go.
    has_children_to_delete: bool,
    /// When a child may be written next.
    child_write_due: Option<Timestamp>,
}

impl RunningJob for RunningListJob {
    type Kind = ImageListPullJob;

    fn lifecycle(&mut self) -> &mut Lifecycle<ImageListPullJob> {
        &mut self.lifecycle
    }
}

impl RunningListJob {
    pub(super) fn new(object: &KruiseJobObject<ImageListPullJob>) -> Self {
        Self {
            lifecycle: Lifecycle::new(object),
            plan: None,
            writes: BTreeMap::new(),
            has_children_to_delete: false,
            child_write_due: None,
        }
    }

    pub(super) fn id(&self) -> &ObjectId {
        self.lifecycle.id()
    }

    /// Takes over the object. Returns whether the list has to react.
    pub(super) fn observe(
        &mut self,
        object: KruiseJobObject<ImageListPullJob>,
        fx: &mut Effects<'_>,
    ) -> bool {
        let Some(spec) = self.lifecycle.take_object(object) else { return false };
        match spec.and_then(|spec| rules::list_job(spec).map(|list| (list, spec.template.clone()))) {
            Ok((list, mut template)) => {
                // The children have no time to live of their own: they are deleted with the list.
                template.completion_policy.ttl_seconds_after_finished = None;
                let fingerprint = SpecFingerprint::of_template(&template);
                self.lifecycle.clear_refusal();
                self.plan = Some(ListPlan { list, template: Arc::new(template), fingerprint });
            }
            // Unlike those of a job that is refused, the children go on by the last valid spec.
            Err(reason) => self.lifecycle.refuse(reason, fx),
        }
        true
    }

    /// `parallelism` of the last valid spec.
    pub(super) fn parallelism(&self) -> Option<u32> {
        self.plan.as_ref().map(|plan| plan.list.template.parallelism)
    }

    /// The child of the image exists now (`Create`), or not any more (`Delete`).
    pub(super) fn confirm_child_write(&mut self, image: &str, write: ChildWrite) {
        if let Some(writes) = self.writes.get_mut(image) {
            writes.confirm(write);
        }
    }

    /// Has the children created at once that wait for this name; for any name if it is not known which is free. Returns
    /// whether there are any.
    pub(super) fn retry_names(&mut self, freed: Option<&ObjectId>) -> bool {
        let list = self.lifecycle.id();
        let is_freed = |image: &str| {
            freed.is_none_or(|freed| {
                freed.namespace == list.namespace && freed.name == child_name(&list.name, image)
            })
        };
        let waiting = self.writes.iter_mut().filter(|(_, writes)| writes.waits_for_name());
        waiting.filter(|(image, _)| is_freed(image)).map(|(_, writes)| writes.retry()).count() > 0
    }

    pub(super) fn end_child_write(&mut self, image: &str, outcome: WriteOutcome, fx: &mut Effects<'_>) {
        let Some(writes) = self.writes.get_mut(image) else { return };
        if writes.end_write(outcome, fx.now) {
            let id = self.lifecycle.id();
            fx.emit(status::warning_event(KIND, id, reasons::NAME_TAKEN, name_taken(id, image)));
        }
    }

    /// Writes the children and the status where that is due, and ends the list.
    pub(super) fn advance(&mut self, children: &Children, fx: &mut Effects<'_>) {
        self.child_write_due = None;
        if self.lifecycle.is_under_way() && self.plan.is_some() {
            self.lifecycle.start_once(fx.now);
            self.write_children(children, fx);
        }
        let mut status = self.desired_status(children);
        if !self.lifecycle.has_ended() && self.is_complete(children) {
            status.completion_time = Some(Time(metadata::whole_seconds(fx.now)));
            let (succeeded, desired) = (status.succeeded, status.desired);
            let note = format!("job has completed: {succeeded} of {desired} images are on all nodes");
            fx.emit(status::end_event(KIND, self.lifecycle.id(), succeeded == desired, note));
            self.lifecycle.end_with(status.clone());
        }
        if self.lifecycle.is_write_due(fx.now) {
            self.lifecycle.write_status(status, fx);
        }
    }

    fn is_complete(&self, children: &Children) -> bool {
        let Some(plan) = self.plan.as_ref().filter(|_| !self.lifecycle.is_refused()) else { return false };
        let by_image = self.by_image(children);
        let has_finished =
            |image: &String| by_image.get(image.as_str()).is_some_and(|child| child.has_finished);
        // A child that is being created for an image that the list does not have any more is still to be deleted.
        let is_writing = self.has_children_to_delete || self.writes.values().any(ChildWrites::is_in_flight);
        let is_never = plan.list.template.completion == Completion::Never;
        !is_writing && !is_never && plan.list.images.iter().all(has_finished)
    }

    /// The writes that bring the children in line with the list: those of its images in their order, then the deletions.
    fn wanted_writes<'a>(
        &self,
        plan: &'a ListPlan,
        children: &'a Children,
        by_image: &HashMap<&'a str, &'a ListChild>,
    ) -> Vec<(&'a str, ChildWrite, Option<&'a ListChild>)> {
        let list = &self.lifecycle.id().name;
        let SpecFingerprint { work, .. } = plan.fingerprint;
        let may_run_again =
            |image: &str| self.writes.get(image).is_none_or(|writes| writes.may_run_again(work));
        let is_in_use =
            |name: &str| children.all().any(|child| child.is_being_deleted && child.id.name == name);
        let find_named =
            |name: &str| children.all().find(|child| !child.is_being_deleted && child.id.name == name);
        let mut writes = Vec::new();
        for image in &plan.list.images {
            // A child that a user has edited to another image keeps the name of its own.
            let child = by_image.get(image.as_str()).copied();
            match child.or_else(|| find_named(&child_name(list, image))) {
                // A child that is being deleted still has the name.
                None if is_in_use(&child_name(list, image)) => {}
                None => writes.push((image.as_str(), ChildWrite::Create, None)),
                Some(child)
                    if child.template.secrets != plan.fingerprint.secrets
                        || (child.has_finished
                            && (child.template.work != work || child.image != *image)
                            && may_run_again(image)) =>
                {
                    writes.push((image, ChildWrite::Delete, Some(child)));
                }
                // With this image it would count as finished, though it has pulled another one.
                Some(child) if child.has_finished && child.image != *image => {}
                Some(child) if child.template.whole != plan.fingerprint.whole || child.image != *image => {
                    writes.push((image, ChildWrite::Update(plan.fingerprint.whole), Some(child)));
                }
                Some(_) => {}
            }
        }
        let is_written = |child: &ListChild| {
            writes.iter().any(|(.., known)| known.is_some_and(|known| known.id.uid == child.id.uid))
        };
        let removed =
            by_image.values().filter(|child| !plan.list.images.contains(&child.image) && !is_written(child));
        let mut removed: Vec<_> =
            removed.map(|child| (child.image.as_str(), ChildWrite::Delete, Some(*child))).collect();
        removed.sort_unstable_by_key(|(image, ..)| *image);
        writes.extend(removed);
        writes
    }

    fn write_children(&mut self, children: &Children, fx: &mut Effects<'_>) {
        let Some(plan) = &self.plan else { return };
        self.writes.values_mut().for_each(|writes| writes.want_work(plan.fingerprint.work));
        let list = self.lifecycle.id();
        let by_image = self.by_image(children);
        let wanted = self.wanted_writes(plan, children, &by_image);
        self.writes.retain(|image, writes| {
            let is_known = plan.list.images.contains(image) || by_image.contains_key(image.as_str());
            is_known || writes.is_in_flight()
        });
        self.has_children_to_delete = wanted.iter().any(|(_, write, _)| *write == ChildWrite::Delete);
        for (image, write, child) in wanted {
            let writes = self.writes.entry(image.to_owned()).or_default();
            let Some(due) = writes.due_at(write) else { continue };
            if due > fx.now {
                self.child_write_due = Some(self.child_write_due.map_or(due, |known| known.min(due)));
                continue;
            }
            writes.begin_write(write);
            if write == ChildWrite::Delete {
                writes.note_deletion(plan.fingerprint.work);
            }
            let (list, image) = (list.clone(), image.to_owned());
            let spec = || ChildSpec { image: image.clone(), template: plan.template.clone() };
            fx.emit(Action::Write(match (write, child.map(|child| (child.id.clone(), &child.version))) {
                (ChildWrite::Delete, Some((child, _))) => JobWrite::DeleteChild { list, child, image },
                (_, Some((child, version))) => {
                    JobWrite::UpdateChild { list, child, version: version.clone(), spec: spec() }
                }
                (_, None) => {
                    JobWrite::CreateChild { name: child_name(&list.name, &image), list, spec: spec() }
                }
            }));
        }
    }

    /// The child of each image; among several, the one with the name that this list would give it.
    fn by_image<'a>(&self, children: &'a Children) -> HashMap<&'a str, &'a ListChild> {
        let list = &self.lifecycle.id().name;
        let mut by_image: HashMap<&str, &ListChild> = HashMap::new();
        for child in children.all().filter(|child| !child.is_being_deleted) {
            let known = by_image.entry(&child.image).or_insert(child);
            if known.id.name != child_name(list, &child.image) {
                *known = child;
            }
        }
        by_image
    }

    /// The status that the API server should have.
    fn desired_status(&self, children: &Children) -> ImageListPullJobStatus {
        if let Some(fixed) = self.lifecycle.fixed_status() {
            return fixed;
        }
        let Some(plan) = &self.plan else { return ImageListPullJobStatus::default() };
        let by_image = self.by_image(children);
        let known = || plan.list.images.iter().filter_map(|image| by_image.get(image.as_str()));
        let count = |is_counted: fn(&ListChild) -> bool| {
            status::saturating_i32(
                u32::try_from(known().filter(|child| is_counted(child)).count()).unwrap_or(u32::MAX),
            )
        };
        let failed = known().filter(|child| child.is_failed).map(|child| FailedImageStatus {
            image_pull_job: child.id.name.clone(),
            name: child.image.clone(),
            message: format!(
                "for the nodes that failed: kubectl get imagepulljob {} -n {} -o yaml",
                child.id.name, child.id.namespace
            ),
        });
        let is_name_taken = |image: &&String| self.writes.get(*image).is_some_and(ChildWrites::is_name_taken);
        let waiting = plan.list.images.iter().find(is_name_taken);
        ImageListPullJobStatus {
            start_time: self.lifecycle.start_time().map(Time),
            completion_time: None,
            desired: status::saturating_i32(u32::try_from(plan.list.images.len()).unwrap_or(u32::MAX)),
            active: count(|child| child.is_active),
            completed: count(|child| child.is_completed),
            succeeded: count(|child| child.is_succeeded),
            message: waiting.map(|image| name_taken(self.lifecycle.id(), image)).unwrap_or_default(),
            failed_image_statuses: failed.collect(),
        }
    }

    pub(super) fn next_wakeup(&self) -> Option<Timestamp> {
        [self.child_write_due, self.lifecycle.write_due()].into_iter().flatten().min()
    }
}

/// Why an image of the list waits.
fn name_taken(list: &ObjectId, image: &str) -> String {
    format!(
        "image {image} waits: its ImagePullJob must have the name {}, and an ImagePullJob of this name exists that does not belong to the list; delete that one",
        child_name(&list.name, image)
    )
}
