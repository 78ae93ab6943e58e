//! The status of a job, made from its parts.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::crd::remove::RemovalStatus;
use prepull_api::crd::status::{ImagePrePullJobStatus, MAX_NODES_IN_STATUS, NodeStatus, Summary};
use prepull_api::task::NodeName;
use prepull_api::wire::truncate_reason;

use super::PrepullJob;
use super::course::reason_with_refusal;
use super::start::chosen_again;
use crate::prepull::aggregate::{self, OtherSpec, Situation};
use crate::prepull::plan;

impl PrepullJob {
    /// What the job has removed so far. `None` for a job that pulls.
    pub(super) fn removal_status(&self) -> Option<RemovalStatus> {
        self.spec.accepted()?.image_pre_pull_template.remove.as_ref()?;
        let mut sum = RemovalStatus::default();
        let of_nodes = self.members.rollout().records().filter_map(|record| record.removal.as_ref());
        of_nodes.for_each(|node| sum.add_node(node));
        Some(sum)
    }

    /// Counts the nodes of a held job that reports are lost of. Returns those that its status has shown.
    fn count_lost_nodes(&self, summary: &mut Summary) -> Vec<NodeStatus> {
        let kept = self.course.lost_reports_status().filter(|kept| kept.completion_time.is_none());
        let Some(kept) = kept else { return Vec::new() };
        let rollout = self.members.rollout();
        let is_lost = |node: &&NodeStatus| rollout.position(&NodeName(node.node_name.clone())).is_none();
        let shown: Vec<_> = kept.node_status.iter().filter(is_lost).map(chosen_again).collect();
        for node in &shown {
            summary.desired += 1;
            *aggregate::in_phase(summary, node.phase) += 1;
        }
        let others = kept.summary.desired.saturating_sub(summary.desired);
        summary.desired += others;
        summary.pending += others;
        shown
    }

    pub(super) fn status(&self, now: Timestamp) -> ImagePrePullJobStatus {
        let (course, rollout) = (&self.course, self.members.rollout());
        let mut summary = rollout.summary().clone();
        summary.skipped = self.members.skipped_total();
        let lost = self.count_lost_nodes(&mut summary);
        let warning = self.members.accepted_job().and_then(plan::self_assigned_labels);
        let warning = warning.as_deref().map(truncate_reason);
        let is_other = course.has_begun() && !course.ended_as_cancelled() && self.spec.is_other();
        let situation = Situation {
            phase: course.phase(),
            started: course.has_begun(),
            suspended: course.policy().suspend,
            paused: course.policy().paused,
            ended_as: course.failed_as(),
            refusal: self.spec.refusal(),
            other: is_other.then_some(if self.next.is_some() { OtherSpec::Next } else { OtherSpec::Refused }),
            warning: warning.as_deref(),
            reason: course.reason(),
        };
        let generation = Some(self.spec.generation());
        let status = ImagePrePullJobStatus {
            observed_generation: generation,
            phase: course.phase(),
            reason: reason_with_refusal(course.reason(), self.spec.refusal().filter(|_| course.has_begun())),
            start_time: course.start_time().map(Time),
            completion_time: course.end_time().map(Time),
            active_since: course.active_since().map(Time),
            summary,
            failures_by_code: rollout.failures(),
            removal: self.removal_status(),
            rollout: rollout.waves(),
            retry: course.retry_rounds(),
            recheck: course.recheck_status(rollout.rechecked()),
            first_attempt: aggregate::stored_first_attempt(course.first_attempt()),
            spec_hash: self.spec.hash().to_owned(),
            started_spec: self.spec.stored().to_owned(),
            conditions: aggregate::conditions(&situation, self.output.conditions(), generation, now),
            node_status: aggregate::shown_nodes(rollout.records().chain(&lost)),
            skipped_nodes: self.members.skipped().iter().take(MAX_NODES_IN_STATUS).cloned().collect(),
        };
        let kept = course.lost_reports_status().filter(|kept| kept.completion_time.is_some());
        let Some(ended) = kept.cloned() else { return status };
        ImagePrePullJobStatus {
            summary: ended.summary,
            failures_by_code: ended.failures_by_code,
            removal: ended.removal,
            rollout: ended.rollout,
            recheck: ended.recheck,
            node_status: ended.node_status,
            ..status
        }
    }
}
