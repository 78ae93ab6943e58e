//! The number of jobs per phase, and the running ones. The metrics read this after every batch, and ended jobs pile up,
//! so it follows each change instead of counting again.

use std::collections::{BTreeSet, HashMap};

use prepull_api::crd::status::JobPhase;
use prepull_api::task::JobUid;

#[derive(Debug, Default)]
pub(super) struct Census {
    phases: HashMap<JobUid, JobPhase>,
    running: BTreeSet<JobUid>,
    counts: [usize; 4],
}

impl Census {
    pub(super) fn note_phase(&mut self, job: &JobUid, phase: JobPhase) {
        if self.phases.get(job) == Some(&phase) {
            return;
        }
        self.forget(job);
        self.phases.insert(job.clone(), phase);
        self.counts[phase as usize] += 1;
        if phase == JobPhase::InProgress {
            self.running.insert(job.clone());
        }
    }

    pub(super) fn forget(&mut self, job: &JobUid) {
        if let Some(phase) = self.phases.remove(job) {
            self.counts[phase as usize] -= 1;
            self.running.remove(job);
        }
    }

    pub(super) fn counts(&self) -> [(JobPhase, usize); 4] {
        PHASES.map(|phase| (phase, self.counts[phase as usize]))
    }

    pub(super) fn running(&self) -> impl Iterator<Item = &JobUid> {
        self.running.iter()
    }
}

const PHASES: [JobPhase; 4] = [JobPhase::Init, JobPhase::InProgress, JobPhase::Completed, JobPhase::Failure];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_job_counts_in_its_last_phase() {
        let mut census = Census::default();
        let [one, two] = ["one", "two"].map(|job| JobUid(job.to_owned()));
        for phase in [JobPhase::Init, JobPhase::InProgress, JobPhase::InProgress] {
            census.note_phase(&one, phase);
            census.note_phase(&two, phase);
        }
        census.note_phase(&two, JobPhase::Failure);
        assert_eq!(
            census.counts(),
            [
                (JobPhase::Init, 0),
                (JobPhase::InProgress, 1),
                (JobPhase::Completed, 0),
                (JobPhase::Failure, 1)
            ]
        );
        assert_eq!(census.running().collect::<Vec<_>>(), [&one]);
        census.forget(&one);
        census.forget(&one);
        assert_eq!((census.counts()[1].1, census.running().count()), (0, 0));
    }
}
