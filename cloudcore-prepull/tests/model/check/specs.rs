//! Which spec was in force when.

use prepull_api::crd::job::ImagePrePullJobSpec;
use prepull_api::task::JobUid;

use super::Check;

/// A spec, and when the controller received it.
pub(super) struct Delivered {
    pub(super) at: u64,
    pub(super) generation: i64,
    pub(super) spec: ImagePrePullJobSpec,
}

impl Check {
    pub(crate) fn delivered(
        &mut self,
        job: &JobUid,
        generation: i64,
        spec: ImagePrePullJobSpec,
        at: u64,
    ) -> bool {
        let known = self.delivered.entry(job.clone()).or_default();
        let new = known.last().is_none_or(|last| last.generation != generation);
        if new {
            known.push(Delivered { at, generation, spec });
        }
        new
    }

    /// The specs that may have been in force at a moment: more than one if an edit arrived at that very moment.
    pub(super) fn in_force(&self, job: &JobUid, at: u64) -> impl Iterator<Item = &ImagePrePullJobSpec> {
        self.in_force_since(job, at, at)
    }

    pub(super) fn in_force_since(
        &self,
        job: &JobUid,
        since: u64,
        at: u64,
    ) -> impl Iterator<Item = &ImagePrePullJobSpec> {
        let known = self.delivered.get(job).map(Vec::as_slice).unwrap_or_default();
        let before = known.iter().rposition(|delivered| delivered.at < since);
        let until = known.iter().rposition(|delivered| delivered.at <= at).map_or(0, |last| last + 1);
        known.get(before.unwrap_or(0)..until).unwrap_or_default().iter().map(|delivered| &delivered.spec)
    }
}
