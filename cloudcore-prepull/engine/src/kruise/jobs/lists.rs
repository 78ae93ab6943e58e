//! ImageListPullJobs: each has an ImagePullJob per image, its children. What it says of them, it reads from them.

use std::collections::{BTreeMap, HashMap, HashSet};

use jiff::Timestamp;
use prepull_api::crd::kruise::ImagePullJob;
use prepull_api::task::JobUid;

use super::Action;
use super::objects::{self, ListJobObject};
use super::over::Over;
use crate::shared::agenda::Agenda;
use crate::shared::outcomes::WriteOutcome;

mod child;
mod list;
mod work;

use child::{Child, Children};
use list::List;

#[derive(Debug, Default)]
pub(super) struct Lists {
    /// Those that are not over.
    running: HashMap<JobUid, List>,
    /// Never in `running` as well.
    over: HashMap<JobUid, Over>,
    /// By list: also of those that have not come yet.
    children: HashMap<JobUid, Children>,
    /// The list of each child.
    list_of: BTreeMap<JobUid, JobUid>,
    /// Lists that a write did not find. The watch may still tell of their last changes.
    gone: HashSet<JobUid>,
    agenda: Agenda,
}

impl Lists {
    /// All that are known.
    pub(super) fn children(&self) -> impl Iterator<Item = &JobUid> {
        self.list_of.keys()
    }

    /// The known lists that are not among these.
    pub(super) fn not_among(&self, lists: &[ListJobObject]) -> Vec<JobUid> {
        let listed: HashSet<JobUid> = lists.iter().map(|list| objects::list_job_id(list).uid).collect();
        let known = self.running.keys().chain(self.over.keys()).chain(&self.gone);
        known.filter(|uid| !listed.contains(uid)).cloned().collect()
    }

    /// Nodes at a time, in all children together; `None` where the list is not known.
    pub(super) fn parallelism(&self, list: &JobUid) -> Option<u32> {
        self.running.get(list)?.parallelism()
    }

    /// The list as it is now.
    pub(super) fn changed(&mut self, object: ListJobObject, now: Timestamp, actions: &mut Vec<Action>) {
        let uid = objects::list_job_id(&object).uid;
        if self.gone.contains(&uid) {
            return;
        }
        let metadata = object.as_ref().ok().map(|list| &list.metadata);
        if metadata.is_some_and(objects::is_being_deleted) {
            return self.forget(&uid);
        }
        if let Some(over) = self.over.get_mut(&uid) {
            if let Ok(list) = &object {
                over.keep_for(list.spec.template.completion_policy.ttl_seconds_after_finished);
                self.agenda.mark(&uid);
            }
            return;
        }
        if !self.running.contains_key(&uid) {
            self.agenda.add(&uid, objects::created(metadata, now));
        }
        if let Some(over) = object.as_ref().ok().and_then(|list| Over::of_list(list)) {
            return self.park(&uid, over);
        }
        let list = self.running.entry(uid.clone()).or_insert_with(|| List::new(&object));
        if list.changed(object, actions) {
            self.agenda.mark(&uid);
        }
    }

    /// The list is gone. The API server collects its children.
    pub(super) fn gone(&mut self, list: &JobUid) {
        self.gone.remove(list);
        self.forget(list);
    }

    /// An ImagePullJob as it is now.
    pub(super) fn child(&mut self, job: &ImagePullJob) {
        let child = Child::of(job);
        let uid = child.id.uid.clone();
        let list = objects::list_of(job);
        if self.list_of.get(&uid) != list.as_ref() {
            self.child_gone(&uid);
        }
        // Of a list that is over nobody asks for its children.
        let Some(list) = list.filter(|list| !self.over.contains_key(list)) else { return };
        self.list_of.insert(uid, list.clone());
        if let Some(known) = self.running.get_mut(&list) {
            known.child_is_there(&child.image);
        }
        self.children.entry(list.clone()).or_default().put(child);
        self.agenda.mark(&list);
    }

    pub(super) fn child_gone(&mut self, uid: &JobUid) {
        let Some(list) = self.list_of.remove(uid) else { return };
        let Some(children) = self.children.get_mut(&list) else { return };
        let child = children.remove(uid);
        if children.is_empty() {
            self.children.remove(&list);
        }
        if let Some((known, child)) = self.running.get_mut(&list).zip(child) {
            known.child_is_gone(&child.image);
        }
        self.agenda.mark(&list);
    }

    pub(super) fn flush(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        self.agenda.wake_up(now);
        let none = Children::default();
        while let Some(uid) = self.agenda.next() {
            if let Some(over) = self.over.get_mut(&uid) {
                if over.delete(now) {
                    actions.push(Action::DeleteListJob(over.id.clone()));
                }
                self.agenda.wake(&uid, over.due());
            } else if let Some(list) = self.running.get_mut(&uid) {
                let children = self.children.get(&uid).unwrap_or(&none);
                list.advance(children, now, actions);
                self.agenda.wake(&uid, list.next_wakeup());
            }
        }
    }

    pub(super) fn wakeup(&self) -> Option<Timestamp> {
        self.agenda.wakeup()
    }

    /// A write of the status, or the deletion, ended.
    pub(super) fn written(&mut self, list: &JobUid, outcome: WriteOutcome, now: Timestamp) {
        if outcome == WriteOutcome::Gone {
            self.gone.insert(list.clone());
            return self.forget(list);
        }
        self.agenda.mark(list);
        if let Some(over) = self.over.get_mut(list) {
            over.written();
        } else if let Some(over) = self.running.get_mut(list).and_then(|list| list.written(outcome, now)) {
            self.park(list, over);
        }
    }

    pub(super) fn child_written(
        &mut self,
        list: &JobUid,
        image: &str,
        outcome: WriteOutcome,
        now: Timestamp,
        actions: &mut Vec<Action>,
    ) {
        if let Some(list) = self.running.get_mut(list) {
            list.child_written(image, outcome, now, actions);
        }
        self.agenda.mark(list);
    }

    fn park(&mut self, uid: &JobUid, mut over: Over) {
        if self.running.remove(uid).is_some_and(|list| list.is_being_written()) {
            over.wait_for_status();
        }
        if let Some(children) = self.children.remove(uid) {
            children.uids().for_each(|child| {
                self.list_of.remove(child);
            });
        }
        self.over.insert(uid.clone(), over);
        self.agenda.mark(uid);
    }

    fn forget(&mut self, uid: &JobUid) {
        self.agenda.remove(uid);
        self.running.remove(uid);
        self.over.remove(uid);
    }
}
