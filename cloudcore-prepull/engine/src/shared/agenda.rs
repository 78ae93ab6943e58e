//! The work queue of a controller: the jobs to reconcile now, and when to reconcile others. Of a thousand jobs only those
//! are touched that something happened to.

use std::collections::{BTreeMap, HashMap};

use jiff::Timestamp;
use prepull_api::task::JobUid;

use crate::shared::delay_queue::DelayQueue;

/// The creation time of a job, and a count of arrivals for jobs that were created in the same second.
type Age = (Timestamp, u64);

#[derive(Debug, Default)]
pub(crate) struct Agenda {
    ages: HashMap<JobUid, Age>,
    arrivals: u64,
    marked: BTreeMap<Age, JobUid>,
    wakeups: DelayQueue<JobUid>,
}

impl Agenda {
    pub(crate) fn add(&mut self, job: &JobUid, created: Timestamp) {
        self.arrivals += 1;
        self.ages.insert(job.clone(), (created, self.arrivals));
        self.mark(job);
    }

    pub(crate) fn remove(&mut self, job: &JobUid) {
        self.wake_at(job, None);
        if let Some(age) = self.ages.remove(job) {
            self.marked.remove(&age);
        }
    }

    /// Marks a job: something happened to it.
    pub(crate) fn mark(&mut self, job: &JobUid) {
        if let Some(age) = self.ages.get(job) {
            self.marked.insert(*age, job.clone());
        }
    }

    /// Sets when to mark the job even without an event.
    pub(crate) fn wake_at(&mut self, job: &JobUid, at: Option<Timestamp>) {
        self.wakeups.set(job, at);
    }

    /// Marks the jobs that are due.
    pub(crate) fn wake_up(&mut self, now: Timestamp) {
        while let Some(job) = self.wakeups.pop_due(now) {
            self.mark(&job);
        }
    }

    /// Takes the oldest of the marked jobs, and unmarks it.
    pub(crate) fn next(&mut self) -> Option<JobUid> {
        self.marked.pop_first().map(|(_, job)| job)
    }

    /// When [`Self::wake_up`] has something to mark.
    pub(crate) fn next_wakeup(&self) -> Option<Timestamp> {
        self.wakeups.next_due()
    }
}
