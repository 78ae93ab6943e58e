//! The invariants: what must hold of each action, and at the end.

use std::collections::BTreeMap;

use prepull_api::crd::kruise::ImagePullJobStatus;

use super::super::super::*;
use super::expected::ExpectedState;
use super::world::{World, group};
use crate::kruise::TagRequest;
use crate::shared::events::ObjectEvent;

impl World {
    /// A request goes to a selected, online node that wants it, and holds a slot.
    pub(super) fn check_request(&self, node: &str, request: &TagRequest, new_round: bool) {
        let job = JobUid(request.owner.uid.clone().unwrap());
        let job_state = &self.expected[&job];
        assert!(!job_state.refused && !job_state.ended, "{job} asks {node}, and is refused or has ended");
        assert!(self.nodes.get(node).is_some_and(|node| node.online), "{job} asks {node}, which is offline");
        assert!(self.selected(&job).contains(node), "{job} asks {node}, which is none of its nodes");
        let valid = job_state.valid.as_ref().unwrap();
        assert_eq!(request.key, valid.image);
        assert_eq!(request.limits.timeout_seconds, Some(i32::try_from(valid.template.timeout).unwrap()));
        match job_state.state(node) {
            // The request has changed.
            ExpectedState::Pending => return assert!(!new_round),
            ExpectedState::Waiting => assert!(!new_round),
            ExpectedState::Reset => assert!(new_round),
            ExpectedState::Ended(_, at) => {
                let passed = self.now.duration_since(at).as_secs();
                assert!(
                    new_round && job_state.is_never() && passed >= 24 * 3600 - 600,
                    "{job} asks {node} too soon"
                );
            }
        }
        let id = group(&self.api[&job]);
        let (busy, slots) = (self.busy(&id), self.parallelism(&id));
        assert!(slots > 0, "{job} is paused");
        assert!(
            busy.contains(node) || busy.len() < usize::try_from(slots).unwrap(),
            "{job} asks {node}: {busy:?} are busy, of {slots}"
        );
    }

    /// A status that is written differs from the stored one, and its numbers are right.
    pub(super) fn check_status(&self, job: &JobUid, status: &ImagePullJobStatus) {
        let stored = self.api[job].status.as_ref();
        let object = WriteTarget::PullJob(job.clone());
        assert!(
            stored != Some(status) || self.unsure.contains(&object),
            "{job} says nothing new: {status:?}"
        );
        let was_over = stored.is_some_and(|stored| stored.completion_time.is_some());
        assert!(!was_over || self.unsure.contains(&object), "{job} is over, and says {status:?}");
        assert_eq!(usize::try_from(status.failed).unwrap(), status.failed_nodes.len());
        assert!(status.failed_nodes.is_sorted());
        let job_state = &self.expected[job];
        assert_eq!(status.completion_time.is_some(), job_state.ended, "{job}: {status:?}");
        if job_state.refused {
            assert_eq!((status.desired, status.active, status.succeeded, status.failed), (0, 0, 0, 0));
            return;
        }
        assert!(status.succeeded + status.failed + status.active <= status.desired);
        if job_state.ended {
            assert!(status.active == 0 && status.succeeded + status.failed == status.desired);
            return;
        }
        let (desired, active, succeeded, failed) = self.counts(job);
        assert_eq!(
            (status.desired, status.active, status.succeeded, &status.failed_nodes),
            (desired, active, succeeded, &failed),
            "{job}"
        );
    }

    /// A job ends only if its nodes have, or its deadline has passed, or it gave up its offline nodes.
    pub(super) fn check_end(&self, event: &ObjectEvent) {
        let job = &event.object.uid;
        let job_state = &self.expected[job];
        let (desired, _, succeeded, failed) = self.counts(job);
        let all = desired == succeeded + i32::try_from(failed.len()).unwrap();
        let by_deadline = event.note.starts_with("job exceeds activeDeadlineSeconds");
        assert!(!job_state.is_never() && !job_state.refused && !job_state.ended, "{job} ends");
        assert!(all || by_deadline || job_state.gave_up, "{job} ends before its nodes do: {}", event.note);
        assert_eq!(event.warning, event.reason == "Failed");
    }

    /// Once every node has answered, every job that can end has ended.
    pub(super) fn check_all_ended(&self) {
        for (uid, job) in &self.api {
            let status = job.status.clone().unwrap_or_default();
            let all = status.desired == status.succeeded + status.failed;
            let over = status.completion_time.is_some() || self.expected[uid].is_never();
            assert!(all && over && status.active == 0, "{uid} has not ended: {status:?} {:?}", job.spec);
        }
        for (uid, list) in &self.lists {
            let status = list.status.clone().unwrap_or_default();
            let never = self.expected_lists[uid]
                .as_ref()
                .is_some_and(|list| list.template.completion == crate::kruise::rules::Completion::Never);
            assert!(status.completion_time.is_some() || never, "{uid} has not ended: {status:?}");
            assert_eq!(status.completed, status.desired, "{uid}");
        }
    }

    /// The ends of jobs with answers from all nodes.
    pub(super) fn ends(&self) -> BTreeMap<String, (i32, Vec<String>)> {
        let by_nodes = |uid: &JobUid, status: &ImagePullJobStatus| {
            !self.expected[uid].gave_up && status.message == "job has completed"
        };
        let ends = self.api.iter().filter_map(|(uid, job)| {
            let status = job.status.clone().filter(|status| by_nodes(uid, status))?;
            Some((job.metadata.name.clone()?, (status.succeeded, status.failed_nodes)))
        });
        ends.collect()
    }
}
