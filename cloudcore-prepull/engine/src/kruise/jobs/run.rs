//! The nodes and deadlines of an ImagePullJob, once it has had a valid spec.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use prepull_api::task::NodeName;

use super::fleet::{FleetNode, KruiseFleet, Presence};
use super::pods::{self, PodCounts, Pods};
use super::roster::NodeRoster;
use super::status::PullJobEnd;
use super::{Action, EarlyTagStates, Effects, Pod, tag_requests};
use crate::kruise::rules::{Completion, NodeChoice, ValidPullJob};
use crate::kruise::{TagKey, TagRequest, TagState};
use crate::shared::objects::ObjectId;

#[derive(Debug)]
pub(super) struct PullJobRun {
    /// The last valid spec.
    job: ValidPullJob,
    request: Arc<TagRequest>,
    roster: NodeRoster,
    /// Where matching pods run; empty without a podSelector.
    pods: PodCounts,
    /// Since when only nodes are left that are [`Presence::Offline`].
    stalled: Option<Timestamp>,
}

impl PullJobRun {
    pub(super) fn new(id: &ObjectId, job: ValidPullJob) -> Self {
        Self {
            request: Arc::new(tag_requests::tag_request(id, &job)),
            job,
            roster: NodeRoster::new(id.uid.clone()),
            pods: PodCounts::default(),
            stalled: None,
        }
    }

    pub(super) fn selects_by_pods(&self) -> bool {
        matches!(self.job.template.nodes, NodeChoice::Pods(_))
    }

    pub(super) fn request(&self) -> &Arc<TagRequest> {
        &self.request
    }

    pub(super) fn change_job(&mut self, id: &ObjectId, job: ValidPullJob) {
        let request = tag_requests::tag_request(id, &job);
        if self.request.key != request.key {
            self.roster.restart_nodes();
        } else if *self.request != request {
            self.roster.mark_requests_outdated();
        }
        if *self.request != request {
            self.request = Arc::new(request);
        }
        (self.job, self.stalled) = (job, None);
    }

    /// Selects the nodes again, and takes over the states of tags that arrived before the spec was valid.
    pub(super) fn reselect_nodes(
        &mut self,
        namespace: &str,
        fleet: &KruiseFleet,
        pods: &Pods,
        early_states: EarlyTagStates,
    ) {
        self.roster.set_never(self.job.template.completion == Completion::Never);
        self.pods = match &self.job.template.nodes {
            NodeChoice::Pods(selector) => pods.count_matching(namespace, selector),
            _ => PodCounts::default(),
        };
        for node in fleet.all() {
            self.observe_node(node);
        }
        for ((node, key), state) in early_states {
            if let Some(node) = fleet.get(&node) {
                self.set_tag_state(node, &key, state);
            }
        }
    }

    pub(super) fn roster(&self) -> &NodeRoster {
        &self.roster
    }

    pub(super) fn parallelism(&self) -> u32 {
        self.job.template.parallelism
    }

    fn selects(&self, node: &FleetNode) -> bool {
        match &self.job.template.nodes {
            NodeChoice::All => true,
            NodeChoice::Names(names) => names.contains(&*node.name),
            NodeChoice::Labels(selector) => selector.matches(&node.labels),
            NodeChoice::Pods(_) => self.pods.contains(&node.name),
        }
    }

    /// Reacts to a node that is new, or has other labels or pods. Returns whether that changes something.
    pub(super) fn observe_node(&mut self, node: &FleetNode) -> bool {
        let is_selected = self.selects(node);
        self.roster.set_selected(node, is_selected)
    }

    pub(super) fn remove_node(&mut self, node: &NodeName) -> bool {
        self.roster.remove(node)
    }

    pub(super) fn set_presence(&mut self, node: &NodeName, presence: Presence) -> bool {
        self.roster.set_presence(node, presence)
    }

    pub(super) fn observe_pod(&mut self, old: Option<&Pod>, new: Option<&Pod>, fleet: &KruiseFleet) -> bool {
        let NodeChoice::Pods(selector) = &self.job.template.nodes else { return false };
        let [old, new] = [old, new].map(|pod| pod.and_then(|pod| pods::matching_node(pod, selector)));
        if old == new {
            return false;
        }
        let mut has_changed = false;
        for (node, matches) in [(old, false), (new, true)] {
            let Some(node) = node else { continue };
            self.pods.count_pod(node, matches);
            has_changed |= fleet.get(node).is_some_and(|node| self.observe_node(node));
        }
        has_changed
    }

    pub(super) fn set_tag_state(&mut self, node: &FleetNode, key: &TagKey, state: TagState) -> bool {
        *key == self.request.key && self.roster.set_tag_state(node, state)
    }

    /// Requests the tag of the node if the job wants to. Returns whether it did.
    pub(super) fn request_tag(&mut self, node: &NodeName, fx: &mut Effects<'_>) -> bool {
        let is_wanted = self.roster.wanted_nodes().contains(node);
        if is_wanted {
            let new_round = self.roster.mark_requested(node);
            fx.emit(Action::RequestTag { node: node.clone(), request: self.request.clone(), new_round });
        }
        is_wanted
    }

    /// Begins the rounds that are due, and replaces the requests that are outdated.
    pub(super) fn advance(&mut self, fx: &mut Effects<'_>) {
        self.roster.begin_rounds(fx.now);
        while let Some(node) = self.roster.pop_outdated() {
            fx.emit(Action::RequestTag { node, request: self.request.clone(), new_round: false });
        }
    }

    /// Why the job ends now, if it does.
    pub(super) fn check_end(
        &mut self,
        start: Timestamp,
        is_paused: bool,
        now: Timestamp,
    ) -> Option<PullJobEnd> {
        let Completion::Always { .. } = self.job.template.completion else { return None };
        let counts = self.roster.counts();
        if counts.succeeded + counts.failed == counts.desired {
            return Some(PullJobEnd::Completed);
        }
        if self.deadline(start).is_some_and(|at| at <= now) {
            return Some(PullJobEnd::Deadline);
        }
        let is_stalled = self.roster.busy_nodes().is_empty()
            && self.roster.wanted_nodes().is_empty()
            && counts.wanted_offline == 0
            && !is_paused;
        self.stalled = is_stalled.then(|| self.stalled.unwrap_or(now));
        self.offline_deadline().is_some_and(|at| at <= now).then_some(PullJobEnd::Unresponsive)
    }

    fn deadline(&self, start: Timestamp) -> Option<Timestamp> {
        match self.job.template.completion {
            Completion::Always { deadline: Some(deadline), .. } => start.checked_add(deadline).ok(),
            _ => None,
        }
    }

    /// When the job stops waiting for offline nodes: after the time that their own tries could take.
    fn offline_deadline(&self) -> Option<Timestamp> {
        let template = &self.job.template;
        let tries = u64::from(template.backoff_limit) + 1;
        let patience = Duration::from_secs(u64::from(template.timeout) * tries);
        self.stalled.and_then(|since| since.checked_add(patience).ok())
    }

    pub(super) fn next_wakeup(&self, start: Timestamp) -> Option<Timestamp> {
        [self.deadline(start), self.offline_deadline(), self.roster.next_round()].into_iter().flatten().min()
    }
}
