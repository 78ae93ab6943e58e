//! Rules for jobs that remove images.

use prepull_api::crd::job::ImagePrePullJobSpec;
use prepull_api::crd::remove::RemovalStatus;
use prepull_api::crd::status::{ImagePrePullJobStatus, NodePhase, NodeStatus};
use prepull_api::failure::FailureCode;
use prepull_api::task::{JobUid, NodeName, TaskId};
use prepull_engine::prepull::controller::Dispatch;

use super::Check;
use crate::api::Api;

impl Check {
    pub(crate) fn too_old(&mut self, node: &NodeName, job: &JobUid, attempt: u32) {
        self.unsendable(node, job, attempt);
        self.too_old.insert((node.clone(), TaskId { job: job.clone(), attempt }));
    }

    /// A job pulls or removes, as it began; never both.
    pub(super) fn removes(&self, order: &Dispatch) {
        let (job, node, removes) = (&order.job.uid, &order.node, order.plan.removal.is_some());
        assert!(!removes || order.plan.images.is_empty(), "{job} removes, and pulls on {node}");
        let beginning = self.beginnings.get(job);
        let is_asked = beginning.is_some_and(|spec| spec.image_pre_pull_template.remove.is_some());
        assert_eq!(removes, is_asked, "{job} removes on {node}, or it should");
    }

    /// The record of a node has what its agent has removed, in this attempt and in those before.
    pub(super) fn is_removal(&self, record: &NodeStatus, node: &NodeName, task: &TaskId) {
        let key = (node.clone(), task.clone());
        if record.code == Some(FailureCode::AgentTooOld) {
            assert!(self.too_old.contains(&key), "{node} is not too old for {task}");
            assert!(record.removal.as_ref().is_none_or(|removal| removal.removed == 0), "{node} removed");
        }
        let Some(removal) = &record.removal else { return };
        let has_ended = matches!(record.phase, NodePhase::Successful | NodePhase::Failure);
        if let Some(said) = self.removals.get(&key).filter(|_| has_ended) {
            let counts = (removal.removed, removal.kept, removal.freed_bytes);
            let is_said = said.iter().any(|said| (said.removed, said.kept, said.freed_bytes) == counts);
            assert!(is_said, "{node} said {said:?} of {task}, and its record has {removal:?}");
        }
        let earlier = self
            .removals
            .iter()
            .filter(|((of, other), _)| of == node && other.job == task.job && other.attempt < task.attempt);
        let most: u32 = earlier.filter_map(|(_, said)| said.iter().map(|said| said.removed).max()).sum();
        let before = removal.removed_before;
        assert!(before <= most, "{node} has removed {before} before {task}, and said {most}");
    }

    /// `status.removal` is the sum of all nodes, and only jobs that remove have one.
    pub(super) fn removals_add_up(api: &Api, job: &JobUid, status: &ImagePrePullJobStatus) {
        let carried_out: ImagePrePullJobSpec = serde_json::from_str(&status.started_spec).unwrap();
        let expected = carried_out.image_pre_pull_template.remove.map(|_| {
            let mut sum = RemovalStatus::default();
            let (mut removed, mut kept, mut freed) = (0, 0, 0);
            for node in api.records(job).filter_map(|record| record.removal.as_ref()) {
                removed += node.removed_before + node.removed;
                kept += node.kept;
                freed += node.freed_before + node.freed_bytes;
                sum.nodes += u32::from(node.removed_before + node.removed > 0);
            }
            (sum.removed, sum.kept, sum.freed_bytes) = (removed, kept, freed);
            sum
        });
        assert_eq!(status.removal, expected, "(8) what {job} has removed does not add up");
    }
}
