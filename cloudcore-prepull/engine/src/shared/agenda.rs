//! Which jobs are to be looked at, and when: a controller with a thousand jobs touches the one that something
//! happened to.

use std::collections::{BTreeMap, HashMap};

use jiff::Timestamp;
use prepull_api::task::JobUid;

use crate::shared::delay_queue::DelayQueue;

/// By age, so that an older job is looked at before a younger one; of those that were made in the same second, by
/// arrival.
type Age = (Timestamp, u64);

#[derive(Debug, Default)]
pub(crate) struct Agenda {
    ages: HashMap<JobUid, Age>,
    arrivals: u64,
    marked: BTreeMap<Age, JobUid>,
    wakeups: DelayQueue<JobUid>,
}

impl Agenda {
    /// A new job, to be looked at.
    pub(crate) fn add(&mut self, job: &JobUid, created: Timestamp) {
        self.arrivals += 1;
        self.ages.insert(job.clone(), (created, self.arrivals));
        self.mark(job);
    }

    pub(crate) fn remove(&mut self, job: &JobUid) {
        self.wake(job, None);
        if let Some(age) = self.ages.remove(job) {
            self.marked.remove(&age);
        }
    }

    /// Something happened to the job.
    pub(crate) fn mark(&mut self, job: &JobUid) {
        if let Some(age) = self.ages.get(job) {
            self.marked.insert(*age, job.clone());
        }
    }

    /// When the job is to be looked at although nothing happened to it.
    pub(crate) fn wake(&mut self, job: &JobUid, at: Option<Timestamp>) {
        self.wakeups.set(job, at);
    }

    /// Marks the jobs whose time has come.
    pub(crate) fn wake_up(&mut self, now: Timestamp) {
        while let Some(job) = self.wakeups.pop_due(now) {
            self.mark(&job);
        }
    }

    /// The oldest of the marked jobs; it is not marked any more.
    pub(crate) fn next(&mut self) -> Option<JobUid> {
        self.marked.pop_first().map(|(_, job)| job)
    }

    /// When [`Self::wake_up`] has something to mark.
    pub(crate) fn wakeup(&self) -> Option<Timestamp> {
        self.wakeups.next_due()
    }
}
