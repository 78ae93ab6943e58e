//! The nodes of a job: the state of each, and the images that it must pull.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use jiff::Timestamp;
use prepull_api::crd::status::{NodePhase, NodeStatus, SkippedNode};
use prepull_api::failure::FailureCode;
use prepull_api::task::{NodeName, TaskResult};
use prepull_api::wire::TaskProgress;

use super::super::Dispatch;
use super::NodeViews;
use crate::fleet::node_view::NodeView;
use crate::prepull::plan::{self, NodePlan};
use crate::prepull::rollout::{self, Rollout, RolloutSettings};
use crate::prepull::validate::{DownloadPolicy, ValidatedJob};
use crate::shared::access::{KeysSent, LayerAccess};
use crate::sites::BlobSharing;

const NOTHING_TO_SEND: &str =
    "there is nothing to send: the Node is gone, or its overriders have become impossible";

/// Why a node that was chosen is skipped.
const LEFT: &str = "the Node was deleted before it started";

/// The nodes that a job has chosen, and those that it has left out.
#[derive(Debug)]
pub(super) struct Members {
    /// The accepted spec. `None` before the job begins, for a job that ended before this run of cloudcore, and for a
    /// job with an unknown accepted spec: nothing starts.
    job: Option<Arc<ValidatedJob>>,
    /// What each node pulls. A node that is gone, or for which the overriders have become impossible, has no plan.
    plans: HashMap<NodeName, Arc<NodePlan>>,
    rollout: Rollout,
    /// The keys that nodes got with their tasks since this process leads, where their images name secrets.
    keys: HashMap<NodeName, KeysSent>,
    skipped: Vec<SkippedNode>,
    /// All nodes that were left out: after a restart more than `skipped` holds.
    skipped_total: u32,
}

/// What comes of an attempt to dispatch the task of a node.
#[derive(Debug)]
pub(super) enum PreparedDispatch {
    Dispatch(Dispatch),
    /// There is no time left for it, or nothing is known of it now.
    Nothing,
    /// The task cannot be made any more, for this reason; the node has ended.
    Impossible(&'static str),
}

impl Members {
    /// No node: the job has not begun.
    pub(super) fn without_nodes() -> Self {
        Self {
            job: None,
            plans: HashMap::new(),
            keys: HashMap::new(),
            rollout: Rollout::new(RolloutSettings::default(), Vec::new()),
            skipped: Vec::new(),
            skipped_total: 0,
        }
    }

    /// Nodes are chosen, or known from an earlier run of cloudcore.
    pub(super) fn set_nodes(
        &mut self,
        job: Option<Arc<ValidatedJob>>,
        plans: HashMap<NodeName, Arc<NodePlan>>,
        rollout: Rollout,
    ) {
        (self.job, self.plans, self.rollout) = (job, plans, rollout);
    }

    /// These nodes were left out; `total` may be more than are named.
    pub(super) fn set_skipped(&mut self, skipped: Vec<SkippedNode>, total: u32) {
        (self.skipped, self.skipped_total) = (skipped, total);
    }

    /// Another leader had left these nodes out. Those that have joined the job since are left out no more.
    pub(super) fn resume_skipped(&mut self, mut skipped: Vec<SkippedNode>, total: u32) {
        let before = skipped.len();
        skipped.retain(|node| self.rollout.record(&NodeName(node.node_name.clone())).is_none());
        let joined = u32::try_from(before - skipped.len()).unwrap_or(u32::MAX);
        self.set_skipped(skipped, total.saturating_sub(joined));
    }

    /// These nodes were left out, and no others.
    pub(super) fn skip_all(&mut self, skipped: Vec<SkippedNode>) {
        let total = u32::try_from(skipped.len()).unwrap_or(u32::MAX);
        self.set_skipped(skipped, total);
    }

    pub(super) fn skipped(&self) -> &[SkippedNode] {
        &self.skipped
    }

    pub(super) fn skipped_total(&self) -> u32 {
        self.skipped_total
    }

    pub(super) fn accepted_job(&self) -> Option<&ValidatedJob> {
        self.job.as_deref()
    }

    pub(super) fn rollout(&self) -> &Rollout {
        &self.rollout
    }

    pub(super) fn rollout_mut(&mut self) -> &mut Rollout {
        &mut self.rollout
    }

    pub(super) fn phase_of(&self, node: &NodeName) -> Option<NodePhase> {
        self.rollout.record(node).map(|record| record.phase)
    }

    /// The attempt that the node makes, or would make first.
    pub(super) fn attempt(&self, node: &NodeName) -> u32 {
        self.rollout.record(node).map_or(1, |record| record.attempt)
    }

    /// Whether the node is to go on with this attempt.
    pub(super) fn is_in_progress(&self, node: &NodeName, attempt: u32) -> bool {
        let record = self.rollout.record(node);
        record.is_some_and(|record| record.phase == NodePhase::InProgress && record.attempt == attempt)
    }

    /// What the node's task shares, if the job shares layers within sites and the task is in progress or has succeeded.
    pub(super) fn shared_by(
        &self,
        node: &NodeName,
        attempt: u32,
        by_default: bool,
    ) -> Option<(BlobSharing, LayerAccess)> {
        let job = self.job.as_ref().filter(|job| job.download.share.unwrap_or(by_default))?;
        let record = self.rollout.record(node).filter(|record| record.attempt == attempt)?;
        let has_succeeded = record.phase == NodePhase::Successful;
        if !has_succeeded && record.phase != NodePhase::InProgress {
            return None;
        }
        let plan = self.plans.get(node)?;
        let (access, has_keys) = match self.keys.get(node) {
            _ if !plan.names_secrets() => (LayerAccess::Open, true),
            Some(KeysSent::All(keys)) => (LayerAccess::Keys(*keys), true),
            Some(KeysSent::Missing) => (LayerAccess::Open, false),
            None if has_succeeded => (LayerAccess::Ended, true),
            None => (LayerAccess::Awaited, true),
        };
        let (entitlement, max_rate) = (plan.entitlement(has_keys), job.download.max_site_rate);
        Some((BlobSharing { entitlement, max_rate, has_succeeded }, access))
    }

    /// Notes the keys of the present task of the node. A task that only looks brings none.
    pub(super) fn note_keys(&mut self, node: &NodeName, keys: Option<KeysSent>) {
        if let Some(keys) = keys {
            self.keys.insert(node.clone(), keys);
        }
    }

    pub(super) fn has_plan(&self, node: &NodeName) -> bool {
        self.plans.contains_key(node)
    }

    /// Whether the node's images name secrets, and an earlier leader sent the task.
    pub(super) fn has_unknown_keys(&self, node: &NodeName) -> bool {
        let names_secrets = self.plans.get(node).is_some_and(|plan| plan.names_secrets());
        names_secrets && !self.keys.contains_key(node)
    }

    /// The references of a task that the node has not ended, and when the node started.
    pub(super) fn in_hand(&self, node: &NodeName, attempt: u32) -> Option<(Vec<String>, Option<Timestamp>)> {
        let record = self.rollout.record(node)?;
        let has_ended = matches!(record.phase, NodePhase::Successful | NodePhase::Failure);
        if has_ended || self.rollout.attempt_of(record) != attempt {
            return None;
        }
        let images = self.plans.get(node)?.images.iter().map(|image| image.pull.to_string());
        Some((images.collect(), record.start_time.as_ref().map(|time| time.0)))
    }

    /// Replaces the accepted spec and the plans.
    pub(super) fn replan(&mut self, job: Arc<ValidatedJob>, nodes: &NodeViews) {
        self.plans = plan_nodes(&job, self.rollout.records(), nodes);
        self.job = Some(job);
    }

    /// Takes over the secrets of a job that is equal but for them: for nodes that have not started, and for further rounds.
    pub(super) fn take_secrets(&mut self, job: &ValidatedJob, nodes: &NodeViews) {
        fn secrets(job: &ValidatedJob) -> impl PartialEq + '_ {
            (&job.images, &job.overriders, &job.registry_secrets, &job.fallback_secret)
        }
        if self.job.as_deref().is_none_or(|now| secrets(now) == secrets(job)) {
            return;
        }
        let waiting = self.rollout.records().filter(|record| record.phase == NodePhase::Pending);
        self.plans.extend(plan_nodes(job, waiting, nodes));
        self.job = Some(Arc::new(job.clone()));
    }

    /// Whether the job has any download settings.
    pub(super) fn limits_downloads(&self) -> bool {
        self.job.as_ref().is_some_and(|job| job.download != DownloadPolicy::default())
    }

    /// Takes over the download settings. Returns whether the edges need a message about them.
    pub(super) fn take_download(&mut self, job: &ValidatedJob) -> bool {
        let Some(now) = self.job.as_ref().filter(|now| now.download != job.download) else { return false };
        let download = job.download.clone();
        self.job = Some(Arc::new(ValidatedJob { download, ..ValidatedJob::clone(now) }));
        true
    }

    /// Makes all plans again, also for nodes that were gone and have returned.
    pub(super) fn refresh_plans(&mut self, nodes: &NodeViews) {
        if let Some(job) = &self.job {
            self.plans = plan_nodes(job, self.rollout.records(), nodes);
        }
    }

    /// Makes the plan of a node that waits again. A look checks the images that it has pulled.
    pub(super) fn replan_waiting(&mut self, node: &NodeView) {
        let Some(job) = &self.job else { return };
        let waits =
            |record: &NodeStatus| record.phase == NodePhase::Pending && !rollout::is_rechecking(record);
        if !self.rollout.record(&node.name).is_some_and(waits) {
            return;
        }
        match plan::plan_one(job, node) {
            Ok(plan) => _ = self.plans.insert(node.name.clone(), plan),
            // As in `plan_nodes`: nothing is sent to it.
            Err(_) => _ = self.plans.remove(&node.name),
        }
    }

    /// Whether a further round could start a node: one that has not succeeded, with a Node and a plan.
    pub(super) fn can_begin_round(&self, nodes: &NodeViews) -> bool {
        let Some(job) = &self.job else { return false };
        let mut shared = plan::SharedPlans::default();
        let mut tried_again = self.rollout.records().filter(|record| record.phase != NodePhase::Successful);
        tried_again.any(|record| {
            let node = nodes.get(&NodeName(record.node_name.clone()));
            node.is_some_and(|node| shared.plan_one(job, node).is_ok())
        })
    }

    /// Whether a re-check could ask a node: one that has succeeded, and still has a Node.
    pub(super) fn can_begin_recheck(&self, nodes: &NodeViews) -> bool {
        let mut succeeded = self.rollout.records().filter(|record| record.phase == NodePhase::Successful);
        succeeded.any(|record| nodes.contains_key(&NodeName(record.node_name.clone())))
    }

    /// Replaces the accepted spec, and leaves the plans as they are.
    pub(super) fn set_job(&mut self, job: Arc<ValidatedJob>) {
        self.job = Some(job);
    }

    /// Adds the node if the job chooses it and can plan for it. Returns whether it was added.
    pub(super) fn add_if_chosen(&mut self, node: &NodeView) -> bool {
        let Some(job) = &self.job else { return false };
        let record = self.rollout.record(&node.name);
        let was_missing = record.is_some_and(rollout::is_missing);
        if (record.is_some() && !was_missing) || !plan::chooses_node(job, node) {
            return false;
        }
        // What an overrider makes impossible for this node does not concern the others.
        let Ok(plan) = plan::plan_one(job, node) else { return false };
        if was_missing {
            self.rollout.mark_found(&node.name);
        } else {
            self.rollout.add(fresh_record(&node.name));
        }
        self.plans.insert(node.name.clone(), plan);
        let skipped = self.skipped.len();
        self.skipped.retain(|skipped| skipped.node_name != node.name.0);
        self.skipped_total = self.skipped_total.saturating_sub(u32::from(self.skipped.len() < skipped));
        true
    }

    /// The Node object was deleted. Returns whether the node has left the job, which had not started.
    pub(super) fn remove_node(&mut self, node: &NodeName) -> bool {
        let has_left = self.rollout.remove_node(node);
        if has_left {
            self.skip(node);
        }
        has_left
    }

    /// Looks again at the nodes in progress with deleted Node objects. Returns those that have left.
    pub(super) fn remove_nodeless(&mut self, nodes: &NodeViews) -> Vec<NodeName> {
        let left = self.rollout.remove_nodeless(nodes);
        for node in &left {
            self.skip(node);
        }
        left
    }

    /// Removes the nodes with Node objects deleted while no cloudcore watched.
    pub(super) fn remove_missing(&mut self, nodes: &NodeViews) {
        let left = self.rollout.remove_missing(nodes);
        // An earlier run of cloudcore may have written so in the status, and not in the report.
        let known: HashSet<_> = self.skipped.iter().map(|skipped| skipped.node_name.clone()).collect();
        left.iter().filter(|node| !known.contains(&node.0)).for_each(|node| self.skip(node));
    }

    fn skip(&mut self, node: &NodeName) {
        self.skipped.push(SkippedNode { node_name: node.0.clone(), reason: LEFT.to_owned() });
        self.skipped_total = self.skipped_total.saturating_add(1);
        self.plans.remove(node);
    }

    pub(super) fn name_images(&mut self, node: &NodeName) {
        if let Some(plan) = self.plans.get(node) {
            self.rollout.name_images(node, plan);
        }
    }

    pub(super) fn record_progress(&mut self, node: &NodeName, progress: &TaskProgress, now: Timestamp) {
        if let Some(plan) = self.plans.get(node) {
            self.rollout.record_progress(node, plan, progress, now);
        }
    }

    /// Returns whether the result changed anything.
    pub(super) fn record_result(&mut self, node: &NodeName, result: &TaskResult, now: Timestamp) -> bool {
        self.rollout.record_result(node, self.plans.get(node).map(Arc::as_ref), result, now)
    }

    /// Makes the task of a node with a recorded start.
    pub(super) fn prepare_dispatch(&mut self, node: &NodeName, now: Timestamp) -> PreparedDispatch {
        let attempt = self.attempt(node);
        let Some(job) = &self.job else { return PreparedDispatch::Nothing };
        let Some(plan) = self.plans.get(node) else {
            self.rollout.mark_lost(node, NOTHING_TO_SEND, now);
            return PreparedDispatch::Impossible(NOTHING_TO_SEND);
        };
        let Some(remaining) = self.rollout.begin_dispatch(node, now) else {
            return PreparedDispatch::Nothing;
        };
        let may_wait = self.rollout.may_wait_for_consent(node);
        let asks_first = may_wait && !self.rollout.has_asked(node);
        let only_look = self.rollout.is_rechecking(node);
        let there = self.rollout.pulled_images(node);
        let (job, plan, node) = (job.clone(), plan.clone(), node.clone());
        PreparedDispatch::Dispatch(Dispatch {
            job,
            node,
            attempt,
            plan,
            only_look,
            there,
            remaining,
            may_wait,
            asks_first,
        })
    }
}

/// The record of a name without a Node, which counts as failed.
pub(super) fn missing_record(node: &NodeName) -> NodeStatus {
    NodeStatus {
        phase: NodePhase::Failure,
        reason: "there is no Node of this name".to_owned(),
        code: Some(FailureCode::NodeNotFound),
        ..fresh_record(node)
    }
}

pub(super) fn fresh_record(node: &NodeName) -> NodeStatus {
    NodeStatus { node_name: node.0.clone(), ..NodeStatus::default() }
}

/// What each node pulls. A node that is gone, or for which the overriders have become impossible, gets no plan: nothing
/// is sent to it any more.
pub(super) fn plan_nodes<'a>(
    job: &ValidatedJob,
    records: impl IntoIterator<Item = &'a NodeStatus>,
    nodes: &NodeViews,
) -> HashMap<NodeName, Arc<NodePlan>> {
    let (mut shared, mut plans, mut relabelled) = (plan::SharedPlans::default(), HashMap::new(), Vec::new());
    for record in records {
        let name = NodeName(record.node_name.clone());
        let Some(plan) = nodes.get(&name).and_then(|node| shared.plan_one(job, node).ok()) else { continue };
        // A look checks the pulled images, even after the node's labels have changed.
        let is_fixed = record.phase == NodePhase::InProgress || rollout::is_rechecking(record);
        if is_fixed && !plan.is_of(&record.image_status) {
            relabelled.push((name.clone(), &record.image_status));
        }
        plans.insert(name, plan);
    }
    // Its edge may have the task, which is the same one as long as the attempt is: it pulls what it was sent.
    for (name, images) in relabelled {
        if let Some(plan) = plans.get(&name).map(|plan| shared.plan_as_recorded(job, plan, images)) {
            plans.insert(name, plan);
        }
    }
    plans
}
