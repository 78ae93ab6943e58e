//! What must be true of the jobs, by what they were told and what they did. Simple, and without any index.

use std::collections::{BTreeMap, BTreeSet};

use super::super::super::*;
use super::world::World;
use crate::kruise::Standing;
use crate::kruise::rules::{self, Completion, NodeChoice, ValidPullJob};

/// How a node stands for a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    Waiting,
    /// The image was changed, and the node was not asked since.
    Anew,
    Open,
    Ended(bool, Timestamp),
}

#[derive(Debug, Default)]
pub(super) struct Book {
    pub(super) valid: Option<ValidPullJob>,
    pub(super) refused: bool,
    /// It said that it is over.
    pub(super) ended: bool,
    pub(super) gave_up: bool,
    /// Of the nodes that it has, and of those that it was told of.
    pub(super) marks: BTreeMap<String, Mark>,
    /// What it was told before it was understood.
    pub(super) early: BTreeMap<(String, (String, String)), Standing>,
}

impl Book {
    pub(super) fn told_spec(&mut self, spec: &prepull_api::crd::kruise::ImagePullJobSpec) {
        if self.ended {
            return;
        }
        let Ok(valid) = rules::pull_job(spec) else {
            self.refused = true;
            return;
        };
        if self.valid.as_ref().is_some_and(|known| known.image != valid.image) {
            self.marks.values_mut().for_each(|mark| *mark = Mark::Anew);
        }
        (self.refused, self.valid) = (false, Some(valid));
        for ((node, key), standing) in std::mem::take(&mut self.early) {
            self.told(&node, &key, standing);
        }
    }

    pub(super) fn is_never(&self) -> bool {
        self.valid.as_ref().is_some_and(|valid| valid.template.completion == Completion::Never)
    }

    pub(super) fn mark(&self, node: &str) -> Mark {
        self.marks.get(node).copied().unwrap_or(Mark::Waiting)
    }

    pub(super) fn told(&mut self, node: &str, key: &(String, String), standing: Standing) {
        match &self.valid {
            None => {
                self.early.insert((node.to_owned(), key.clone()), standing);
                return;
            }
            Some(valid) if valid.image != *key => return,
            Some(_) => {}
        }
        let never = self.is_never();
        let mark = match (self.mark(node), standing) {
            (mark @ Mark::Anew, _) => mark,
            (mark @ Mark::Ended(..), Standing::Absent | Standing::Open) if !never => mark,
            (mark @ Mark::Ended(true, _), Standing::Failed(_)) if !never => mark,
            (_, Standing::Absent) => Mark::Waiting,
            (_, Standing::Open) => Mark::Open,
            (_, Standing::Succeeded(at)) => Mark::Ended(true, at),
            (_, Standing::Failed(at)) => Mark::Ended(false, at),
        };
        self.marks.insert(node.to_owned(), mark);
    }
}

impl World {
    /// Who has become a node of a job, and who is none any more.
    pub(super) fn sync(&mut self) {
        for job in self.api.keys().cloned().collect::<Vec<_>>() {
            if !self.books.contains_key(&job) {
                continue;
            }
            let selected = self.selected(&job);
            let marks = &mut self.books.get_mut(&job).unwrap().marks;
            marks.retain(|node, mark| *mark != Mark::Waiting || selected.contains(node));
            for node in selected {
                marks.entry(node).or_insert(Mark::Waiting);
            }
        }
    }

    /// The job's nodes.
    pub(super) fn selected(&self, job: &JobUid) -> BTreeSet<String> {
        let Some(valid) = &self.books[job].valid else { return BTreeSet::new() };
        let selects = |node: &str| match &valid.template.nodes {
            NodeChoice::All => true,
            NodeChoice::Names(names) => names.contains(&NodeName::from(node)),
            NodeChoice::Labels(selector) => selector.matches(&self.labels(node)),
            NodeChoice::Pods(selector) => self
                .pods
                .values()
                .any(|pod| pod.node.as_ref().is_some_and(|at| at.0 == node) && selector.matches(&pod.labels)),
        };
        self.nodes.keys().filter(|node| selects(node)).cloned().collect()
    }

    /// Whether the node holds a slot for the job.
    pub(super) fn holds_slot(&self, job: &JobUid, node: &str) -> bool {
        let (book, at) = (&self.books[job], &self.nodes[node]);
        let near = at.online || self.now.duration_since(at.since).as_secs() < 60;
        !book.ended && !book.refused && book.mark(node) == Mark::Open && near
    }

    /// The nodes that are busy with any job of the group.
    pub(super) fn busy(&self, group: &JobUid) -> BTreeSet<String> {
        let members = self.api.iter().filter(|(_, job)| &super::world::group(job) == group);
        let busy = members.flat_map(|(uid, _)| {
            self.selected(uid).into_iter().filter(move |node| self.holds_slot(uid, node))
        });
        busy.collect()
    }

    /// Nodes at a time.
    pub(super) fn parallelism(&self, group: &JobUid) -> u32 {
        if let Some(valid) = self.list_books.get(group).and_then(Option::as_ref) {
            return valid.template.parallelism;
        }
        let members = self.api.iter().filter(|(_, job)| &super::world::group(job) == group);
        let books = members.map(|(uid, _)| &self.books[uid]).filter(|book| !book.refused && !book.ended);
        books.filter_map(|book| Some(book.valid.as_ref()?.template.parallelism)).min().unwrap_or(0)
    }

    /// desired, active, succeeded, and those that failed.
    pub(super) fn counts(&self, job: &JobUid) -> (i32, i32, i32, Vec<String>) {
        let book = &self.books[job];
        let nodes = self.selected(job);
        let count = |what: &dyn Fn(&String) -> bool| {
            i32::try_from(nodes.iter().filter(|node| what(node)).count()).unwrap()
        };
        let succeeded = count(&|node| matches!(book.mark(node), Mark::Ended(true, _)));
        let failed = nodes.iter().filter(|node| matches!(book.mark(node), Mark::Ended(false, _)));
        let active = count(&|node| self.holds_slot(job, node));
        (count(&|_| true), active, succeeded, failed.cloned().collect())
    }
}
