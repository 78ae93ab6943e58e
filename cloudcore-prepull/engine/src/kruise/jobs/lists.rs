//! ImageListPullJobs. Each has an ImagePullJob per image, its children, from which its status is read.

use std::collections::{BTreeMap, HashMap, HashSet};

use jiff::Timestamp;
use prepull_api::crd::kruise::{ImageListPullJob, ImagePullJob};
use prepull_api::task::JobUid;

use super::kind::{self, KruiseJobObject};
use super::registry::{JobRegistry, RegistryVerdict};
use super::{Effects, metadata};
use crate::shared::objects::ObjectId;
use crate::shared::outcomes::WriteOutcome;

mod child;
mod child_writes;
mod list_job;

use child::{Children, ListChild};
use child_writes::ChildWrite;
use list_job::RunningListJob;

#[derive(Debug, Default)]
pub(super) struct Lists {
    registry: JobRegistry<RunningListJob>,
    /// The children by their list, also those of a list that the watch has not delivered yet; none of finished lists.
    children: HashMap<ObjectId, Children>,
    list_of: BTreeMap<JobUid, ObjectId>,
}

impl Lists {
    /// All known children of running lists.
    pub(super) fn children(&self) -> impl Iterator<Item = &JobUid> {
        self.list_of.keys()
    }

    /// The list's `parallelism`, which is for all children together; `None` if the list is unknown or has finished.
    pub(super) fn parallelism(&self, list: &ObjectId) -> Option<u32> {
        self.registry.running.get(&list.uid).filter(|known| known.id() == list)?.parallelism()
    }

    pub(super) fn replace(&mut self, objects: Vec<KruiseJobObject<ImageListPullJob>>, fx: &mut Effects<'_>) {
        let existing: HashSet<JobUid> = objects.iter().map(|list| kind::id_of(list).uid).collect();
        let gone: Vec<JobUid> =
            self.registry.known_uids().filter(|uid| !existing.contains(uid)).cloned().collect();
        for uid in &gone {
            self.remove(uid);
        }
        self.registry.retain_deleted(&existing);
        for object in objects {
            self.observe(object, fx);
        }
    }

    pub(super) fn observe(&mut self, object: KruiseJobObject<ImageListPullJob>, fx: &mut Effects<'_>) {
        let uid = kind::id_of(&object).uid;
        let verdict = self.registry.observe(&object, fx.now);
        if matches!(verdict, RegistryVerdict::Run) {
            let list =
                self.registry.running.entry(uid.clone()).or_insert_with(|| RunningListJob::new(&object));
            if list.observe(object, fx) {
                self.registry.agenda.mark(&uid);
            }
        }
        self.apply_verdict(&uid, verdict);
    }

    fn apply_verdict(&mut self, uid: &JobUid, verdict: RegistryVerdict) {
        match verdict {
            RegistryVerdict::Ignore | RegistryVerdict::Run => {}
            RegistryVerdict::Remove => _ = self.registry.remove(uid),
            RegistryVerdict::Finish(finished) => {
                let children = self.children.remove(finished.id());
                self.registry.finish(uid, finished);
                for child in children.iter().flat_map(Children::uids) {
                    self.list_of.remove(child);
                }
            }
        }
    }

    /// Forgets a list that is deleted. The API server collects its children.
    pub(super) fn remove(&mut self, list: &JobUid) {
        self.registry.forget_deleted(list);
        self.registry.remove(list);
    }

    /// Takes over an ImagePullJob that may be a child. Of one that can't be read, what is known of it stays.
    pub(super) fn observe_child(&mut self, object: &KruiseJobObject<ImagePullJob>) {
        let job = match object {
            Ok(job) => job,
            Err(unreadable) => {
                let list = self.list_of.get(&unreadable.id.uid);
                let children = list.and_then(|list| self.children.get_mut(list));
                return children.map_or((), |children| children.note_unreadable(&unreadable.id.uid));
            }
        };
        let child = ListChild::from_job(job);
        let uid = child.id.uid.clone();
        let list = metadata::list_of(job);
        if self.list_of.get(&uid) != list.as_ref() {
            self.remove_child(&uid);
        }
        // A finished list does not look at its children any more.
        let Some(list) = list.filter(|list| self.registry.finished_id(&list.uid) != Some(list)) else {
            return;
        };
        self.list_of.insert(uid, list.clone());
        self.confirm_child_write(&list, &child.image, ChildWrite::Create);
        self.children.entry(list).or_default().put(child);
    }

    /// Forgets an ImagePullJob that may be a child.
    pub(super) fn remove_child(&mut self, uid: &JobUid) {
        let Some(list) = self.list_of.remove(uid) else { return };
        let Some(children) = self.children.get_mut(&list) else { return };
        let child = children.remove(uid);
        if children.is_empty() {
            self.children.remove(&list);
        }
        if let Some(child) = child {
            self.confirm_child_write(&list, &child.image, ChildWrite::Delete);
        }
    }

    /// A child of the list has come or gone.
    fn confirm_child_write(&mut self, list: &ObjectId, image: &str, write: ChildWrite) {
        if let Some(known) = self.registry.running.get_mut(&list.uid).filter(|known| known.id() == list) {
            known.confirm_child_write(image, write);
            self.registry.agenda.mark(&list.uid);
        }
    }

    /// A job of this name is gone (`None`: its name is unknown by now). Lists that wait for the name try it at once.
    pub(super) fn retry_names(&mut self, freed: Option<&ObjectId>) {
        for (uid, list) in &mut self.registry.running {
            if list.retry_names(freed) {
                self.registry.agenda.mark(uid);
            }
        }
    }

    pub(super) fn flush(&mut self, fx: &mut Effects<'_>) {
        self.registry.agenda.wake_up(fx.now);
        let none = Children::default();
        while let Some(uid) = self.registry.agenda.next() {
            let Some(list) = self.registry.running.get_mut(&uid) else {
                self.registry.delete_if_due(&uid, fx);
                continue;
            };
            let children = self.children.get(list.id()).unwrap_or(&none);
            list.advance(children, fx);
            self.registry.agenda.wake_at(&uid, list.next_wakeup());
        }
    }

    pub(super) fn next_wakeup(&self) -> Option<Timestamp> {
        self.registry.agenda.next_wakeup()
    }

    pub(super) fn end_write(&mut self, list: &JobUid, outcome: WriteOutcome, now: Timestamp) {
        let verdict = self.registry.end_write(list, outcome, now);
        self.apply_verdict(list, verdict);
    }

    pub(super) fn end_child_write(
        &mut self,
        list: &JobUid,
        image: &str,
        outcome: WriteOutcome,
        fx: &mut Effects<'_>,
    ) {
        if let Some(known) = self.registry.running.get_mut(list) {
            known.end_child_write(image, outcome, fx);
        }
        self.registry.agenda.mark(list);
    }
}
