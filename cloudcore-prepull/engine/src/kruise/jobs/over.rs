//! A job that is over: nothing is left but to delete it when its time to live is. Jobs pile up in a cluster, so little
//! is kept of one.

use std::time::Duration;

use jiff::Timestamp;
use prepull_api::crd::kruise::{ImageListPullJob, ImagePullJob};

use super::objects;
use crate::shared::objects::ObjectId;

/// After this a deletion that had no effect is asked for again.
const DELETE_RETRY: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(super) struct Over {
    pub(super) id: ObjectId,
    ended: Timestamp,
    /// In seconds.
    ttl: Option<i32>,
    /// When a deletion was asked for last.
    asked: Option<Timestamp>,
    in_flight: bool,
}

impl Over {
    /// A job that was over before this life of cloudcore.
    pub(super) fn of(job: &ImagePullJob) -> Option<Self> {
        let ended = job.status.as_ref()?.completion_time.as_ref()?.0;
        Some(Self::new(
            objects::id(&job.metadata),
            ended,
            job.spec.template.completion_policy.ttl_seconds_after_finished,
        ))
    }

    /// The same for a list.
    pub(super) fn of_list(list: &ImageListPullJob) -> Option<Self> {
        let ended = list.status.as_ref()?.completion_time.as_ref()?.0;
        Some(Self::new(
            objects::id(&list.metadata),
            ended,
            list.spec.template.completion_policy.ttl_seconds_after_finished,
        ))
    }

    pub(super) fn new(id: ObjectId, ended: Timestamp, ttl: Option<i32>) -> Self {
        Self { id, ended, ttl, asked: None, in_flight: false }
    }

    /// `ttlSecondsAfterFinished` may be changed after the end.
    pub(super) fn keep_for(&mut self, ttl: Option<i32>) {
        self.ttl = ttl;
    }

    /// When it is to be deleted.
    pub(super) fn due(&self) -> Option<Timestamp> {
        if self.in_flight {
            return None;
        }
        // A negative one is refused at the start; written later, it is none.
        let ttl = self.ttl.and_then(|ttl| u64::try_from(ttl).ok()).map(Duration::from_secs)?;
        let due = self.ended.checked_add(ttl).ok()?;
        let again = self.asked.and_then(|asked| asked.checked_add(DELETE_RETRY).ok());
        Some(again.map_or(due, |again| again.max(due)))
    }

    /// Whether it is to be deleted now, which is then under way.
    pub(super) fn delete(&mut self, now: Timestamp) -> bool {
        let due = self.due().is_some_and(|due| due <= now);
        if due {
            (self.asked, self.in_flight) = (Some(now), true);
        }
        due
    }

    /// The last write of its status is still under way: a deletion waits for it.
    pub(super) fn wait_for_status(&mut self) {
        self.in_flight = true;
    }

    /// A deletion ended, or the last write of the status.
    pub(super) fn written(&mut self) {
        self.in_flight = false;
    }
}
