//! One ImageListPullJob that is not over, or whose end is not written yet.

use std::collections::{BTreeMap, HashMap};

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::crd::kruise::{
    FailedImageStatus, ImageListPullJobSpec, ImageListPullJobStatus, ImagePullJobSpec, PullJobTemplate,
};

use super::child::{Child, Children, Fingerprint};
use super::work::{Deed, Work};
use crate::kruise::jobs::objects::{self, ListJobObject};
use crate::kruise::jobs::over::Over;
use crate::kruise::jobs::status;
use crate::kruise::jobs::writing::Writing;
use crate::kruise::jobs::{Action, wishes};
use crate::kruise::rules::{self, Completion, ValidListJob};
use crate::shared::events::{ObjectEvent, ObjectKind};
use crate::shared::objects::ObjectId;
use crate::shared::outcomes::WriteOutcome;
use crate::shared::reasons;
use crate::shared::writes::Pace;

/// What the spec came to.
#[derive(Debug)]
struct Plan {
    list: ValidListJob,
    /// Of the children.
    template: PullJobTemplate,
    fingerprint: Fingerprint,
}

#[derive(Debug)]
pub(super) struct List {
    id: ObjectId,
    spec: Option<ImageListPullJobSpec>,
    refusal: Option<String>,
    /// Of the last spec that was not refused.
    plan: Option<Plan>,
    /// By image.
    work: BTreeMap<String, Work>,
    start: Option<Timestamp>,
    /// How it ended, for the API server.
    end: Option<ImageListPullJobStatus>,
    /// Whether there are children to be deleted: those that are made anew are not through, and those of images that
    /// the list has no more go first.
    deletes: bool,
    /// When a child may be written.
    wakeup: Option<Timestamp>,
    writing: Writing<ImageListPullJobStatus>,
}

impl List {
    pub(super) fn new(object: &ListJobObject) -> Self {
        let status = object.as_ref().ok().and_then(|list| list.status.clone());
        Self {
            id: objects::list_job_id(object),
            spec: None,
            refusal: None,
            plan: None,
            work: BTreeMap::new(),
            start: status.as_ref().and_then(|status| status.start_time.as_ref()).map(|time| time.0),
            end: None,
            deletes: false,
            wakeup: None,
            writing: Writing::new(status),
        }
    }

    /// The object as it is now. Says whether that is news.
    pub(super) fn changed(&mut self, object: ListJobObject, actions: &mut Vec<Action>) -> bool {
        let spec = match object {
            Ok(list) if self.spec.as_ref() == Some(&list.spec) => return false,
            Ok(list) => Ok(self.spec.insert(list.spec)),
            Err(unreadable) => {
                self.spec = None;
                Err(unreadable.error)
            }
        };
        if self.end.is_some() {
            return false;
        }
        match spec.and_then(|spec| rules::list_job(spec).map(|list| (list, spec.template.clone()))) {
            Ok((list, mut template)) => {
                // The list's own deletion takes them along.
                template.completion_policy.ttl_seconds_after_finished = None;
                let fingerprint = Fingerprint::of(&template);
                (self.refusal, self.plan) = (None, Some(Plan { list, template, fingerprint }));
            }
            Err(words) => {
                let words = status::cut(words);
                let known = self.refusal.as_deref().or(self.writing.stored().map(|s| s.message.as_str()));
                if known != Some(&*words) {
                    actions.push(status::invalid(ObjectKind::ImageListPullJob, &self.id, &words));
                }
                self.refusal = Some(words);
            }
        }
        true
    }

    pub(super) fn parallelism(&self) -> Option<u32> {
        self.plan.as_ref().map(|plan| plan.list.template.parallelism)
    }

    pub(super) fn child_is_there(&mut self, image: &str) {
        if let Some(work) = self.work.get_mut(image) {
            work.had_effect(Deed::Make);
        }
    }

    pub(super) fn child_is_gone(&mut self, image: &str) {
        if let Some(work) = self.work.get_mut(image) {
            work.had_effect(Deed::Delete);
        }
    }

    pub(super) fn child_written(
        &mut self,
        image: &str,
        outcome: WriteOutcome,
        now: Timestamp,
        actions: &mut Vec<Action>,
    ) {
        let Some(work) = self.work.get_mut(image) else { return };
        if work.ended(outcome, now) {
            let note = taken(&wishes::child_name(&self.id.name, image), image);
            actions.push(Action::Event(status::event(
                ObjectKind::ImageListPullJob,
                &self.id,
                reasons::NAME_TAKEN,
                note,
            )));
        }
    }

    /// Goes on as far as it can.
    pub(super) fn advance(&mut self, children: &Children, now: Timestamp, actions: &mut Vec<Action>) {
        self.wakeup = None;
        if self.end.is_none() && self.refusal.is_none() && self.plan.is_some() {
            self.start.get_or_insert_with(|| objects::whole_seconds(now));
            self.work_on(children, now, actions);
        }
        let mut status = self.status(children);
        if self.end.is_none() && self.has_ended(children) {
            status.completion_time = Some(Time(objects::whole_seconds(now)));
            actions.push(Action::Event(self.ended_event(&status)));
            self.end = Some(status.clone());
        }
        self.writing.touch(if self.end.is_some() { Pace::AtOnce } else { Pace::Now });
        if self.writing.is_due(now)
            && let Some(status) = self.writing.begin(status, now)
        {
            actions.push(Action::ListJobStatus(self.id.clone(), Box::new(status)));
        }
    }

    fn has_ended(&self, children: &Children) -> bool {
        let Some(plan) = self.plan.as_ref().filter(|_| self.refusal.is_none() && !self.deletes) else {
            return false;
        };
        let of_image = self.of_images(children);
        let over = |image: &String| of_image.get(image.as_str()).is_some_and(|child| child.over);
        // A child that is being made for an image that the list has no more is still to be deleted.
        let quiet = !self.work.values().any(Work::is_under_way);
        quiet && plan.list.template.completion != Completion::Never && plan.list.images.iter().all(over)
    }

    fn ended_event(&self, status: &ImageListPullJobStatus) -> ObjectEvent {
        let good = status.succeeded == status.desired;
        let note =
            format!("job has completed: {} of {} images are on all nodes", status.succeeded, status.desired);
        let event = status::event(
            ObjectKind::ImageListPullJob,
            &self.id,
            if good { reasons::COMPLETED } else { reasons::FAILED },
            note,
        );
        ObjectEvent { warning: !good, ..event }
    }

    /// Makes, changes and deletes children where that is due.
    fn work_on(&mut self, children: &Children, now: Timestamp, actions: &mut Vec<Action>) {
        let Some(plan) = &self.plan else { return };
        let of_image = self.of_images(children);
        let leaving: Vec<&ObjectId> =
            children.all().filter(|child| child.deleting).map(|child| &child.id).collect();
        let mut deeds: Vec<(&str, Deed, Option<&ObjectId>)> = Vec::new();
        for image in &plan.list.images {
            let Some(child) = of_image.get(image.as_str()) else {
                let name = wishes::child_name(&self.id.name, image);
                // One that is being deleted has the name still.
                if !leaving.iter().any(|leaving| leaving.name == name) {
                    deeds.push((image, Deed::Make, None));
                }
                continue;
            };
            if child.template.secrets != plan.fingerprint.secrets {
                deeds.push((image, Deed::Delete, Some(&child.id)));
            } else if child.template.whole != plan.fingerprint.whole {
                deeds.push((image, Deed::Change(plan.fingerprint.whole), Some(&child.id)));
            }
        }
        let removed = of_image.values().filter(|child| !plan.list.images.contains(&child.image));
        let removed = removed.map(|child| (child.image.as_str(), Deed::Delete, Some(&child.id)));
        let mut removed: Vec<_> = removed.collect();
        removed.sort_unstable_by_key(|(image, ..)| *image);
        deeds.extend(removed);
        self.work.retain(|image, work| {
            let known = plan.list.images.contains(image) || of_image.contains_key(image.as_str());
            known || work.is_under_way()
        });
        self.deletes = deeds.iter().any(|(_, deed, _)| *deed == Deed::Delete);
        for (image, deed, child) in deeds {
            let work = self.work.entry(image.to_owned()).or_default();
            let Some(due) = work.due(deed) else { continue };
            if due > now {
                self.wakeup = Some(self.wakeup.map_or(due, |wakeup| wakeup.min(due)));
                continue;
            }
            work.begin(deed);
            let list = self.id.clone();
            let spec =
                || Box::new(ImagePullJobSpec { image: image.to_owned(), template: plan.template.clone() });
            actions.push(match (deed, child.cloned()) {
                (Deed::Delete, Some(child)) => Action::DeleteChild { list, child, image: image.to_owned() },
                (_, Some(child)) => Action::ChangeChild { list, child, spec: spec() },
                (_, None) => {
                    let name = wishes::child_name(&list.name, image);
                    Action::MakeChild { list, name, spec: spec() }
                }
            });
        }
    }

    /// The child of each image; of several the one that this list would have made.
    fn of_images<'a>(&self, children: &'a Children) -> HashMap<&'a str, &'a Child> {
        let mut of_image: HashMap<&str, &Child> = HashMap::new();
        for child in children.all().filter(|child| !child.deleting) {
            let known = of_image.entry(&child.image).or_insert(child);
            if known.id.name != wishes::child_name(&self.id.name, &child.image) {
                *known = child;
            }
        }
        of_image
    }

    /// What the API server is to have, sooner or later.
    fn status(&self, children: &Children) -> ImageListPullJobStatus {
        let start_time = self.start.map(Time);
        let plan = match (&self.end, &self.refusal, &self.plan) {
            (Some(end), ..) => return end.clone(),
            (None, None, Some(plan)) => plan,
            (None, refusal, _) => {
                let message = refusal.clone().unwrap_or_default();
                return ImageListPullJobStatus { start_time, message, ..ImageListPullJobStatus::default() };
            }
        };
        let of_image = self.of_images(children);
        let known = || plan.list.images.iter().filter_map(|image| of_image.get(image.as_str()));
        let count = |what: fn(&Child) -> bool| {
            status::int(u32::try_from(known().filter(|child| what(child)).count()).unwrap_or(u32::MAX))
        };
        let failed = known().filter(|child| child.failed).map(|child| FailedImageStatus {
            image_pull_job: child.id.name.clone(),
            name: child.image.clone(),
            message: format!(
                "for the nodes that failed: kubectl get imagepulljob {} -n {} -o yaml",
                child.id.name, child.id.namespace
            ),
        });
        let is_taken = |image: &&String| self.work.get(*image).is_some_and(|work| work.taken);
        let waits = plan.list.images.iter().find(is_taken);
        ImageListPullJobStatus {
            start_time,
            completion_time: None,
            desired: status::int(u32::try_from(plan.list.images.len()).unwrap_or(u32::MAX)),
            active: count(|child| child.active),
            completed: count(|child| child.completed),
            succeeded: count(|child| child.succeeded),
            message: waits
                .map(|image| taken(&wishes::child_name(&self.id.name, image), image))
                .unwrap_or_default(),
            failed_image_statuses: failed.collect(),
        }
    }

    /// Says what is left of the list, where its end is written.
    pub(super) fn written(&mut self, outcome: WriteOutcome, now: Timestamp) -> Option<Over> {
        self.writing.ended(outcome == WriteOutcome::Done, now);
        let end = self.end.as_ref().filter(|end| self.writing.stored() == Some(*end))?;
        let ended = end.completion_time.as_ref().map(|time| time.0)?;
        let ttl =
            self.spec.as_ref().and_then(|spec| spec.template.completion_policy.ttl_seconds_after_finished);
        Some(Over::new(self.id.clone(), ended, ttl))
    }

    pub(super) fn is_being_written(&self) -> bool {
        self.writing.is_under_way()
    }

    pub(super) fn next_wakeup(&self) -> Option<Timestamp> {
        [self.wakeup, self.writing.due()].into_iter().flatten().min()
    }
}

fn taken(name: &str, image: &str) -> String {
    format!(
        "image {image} waits: its ImagePullJob is to be named {name}, and one of this name is there that does not belong to the list; delete that one"
    )
}
