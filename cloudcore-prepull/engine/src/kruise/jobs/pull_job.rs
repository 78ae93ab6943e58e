//! One ImagePullJob that has not finished, or whose final status is not written yet.

mod run;

use std::collections::HashMap;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::crd::kruise::{ImagePullJob, ImagePullJobStatus};
use prepull_api::overriders::SecretRef;
use prepull_api::task::{JobUid, NodeName};

use super::fleet::{Fleet, FleetNode, Presence};
use super::kind::{self, Object};
use super::lifecycle::Lifecycle;
use super::pods::Pods;
use super::registry::Running;
use super::slot_group::SlotGroup;
use super::{Action, Effects, Pod, metadata, status};
use crate::kruise::rules::{self, ValidPullJob};
use crate::kruise::{TagKey, TagState};
use crate::shared::objects::ObjectId;
use run::Run;

/// States of tags whose job cannot be read yet.
pub(super) type EarlyTagStates = HashMap<(NodeName, TagKey), TagState>;

#[derive(Debug)]
pub(super) struct PullJob {
    lifecycle: Lifecycle<ImagePullJob>,
    /// The group whose slots it takes: its list, or itself.
    pub(super) group: JobUid,
    /// Since the spec was valid for the first time, until the job ends.
    run: Option<Run>,
    /// States of tags that arrived before the spec was valid.
    early_states: EarlyTagStates,
}

impl Running for PullJob {
    type Kind = ImagePullJob;

    fn lifecycle(&mut self) -> &mut Lifecycle<ImagePullJob> {
        &mut self.lifecycle
    }
}

impl PullJob {
    pub(super) fn new(object: &Object<ImagePullJob>, early_states: EarlyTagStates) -> Self {
        Self {
            lifecycle: Lifecycle::new(object),
            group: kind::slot_group_of(object),
            run: None,
            early_states,
        }
    }

    pub(super) fn id(&self) -> &ObjectId {
        self.lifecycle.id()
    }

    /// Whether the job selects its nodes by pods.
    pub(super) fn selects_by_pods(&self) -> bool {
        self.valid_run().is_some_and(Run::selects_by_pods)
    }

    /// Whether the job is in the namespace of this secret, and names it.
    pub(super) fn names_secret(&self, secret: &SecretRef) -> bool {
        secret.namespace() == self.id().namespace
            && self.run.as_ref().is_some_and(|run| run.names_secret(secret.name()))
    }

    /// Takes over the object. Returns whether the job has to react.
    pub(super) fn observe(
        &mut self,
        object: Object<ImagePullJob>,
        fleet: &Fleet,
        pods: &Pods,
        group: &mut SlotGroup,
        fx: &mut Effects<'_>,
    ) -> bool {
        let Some(spec) = self.lifecycle.observe(object) else { return false };
        match spec.and_then(rules::pull_job) {
            Ok(valid) => self.accept(valid, fleet, pods, group),
            Err(reason) => {
                self.lifecycle.refuse(reason, fx);
                self.leave(group);
            }
        }
        true
    }

    fn accept(&mut self, job: ValidPullJob, fleet: &Fleet, pods: &Pods, group: &mut SlotGroup) {
        self.lifecycle.accept();
        let id = self.lifecycle.id();
        let run = match &mut self.run {
            Some(run) => {
                run.change_job(id, job, group);
                run
            }
            none => none.insert(Run::new(id, job)),
        };
        let early_states = std::mem::take(&mut self.early_states);
        run.restart(&id.namespace, fleet, pods, early_states, group);
    }

    /// Takes the job's nodes out of the group's slots.
    pub(super) fn leave(&mut self, group: &mut SlotGroup) {
        if let Some(run) = &mut self.run {
            run.stop_counting(group);
        }
    }

    /// Counts the job's nodes in the group's slots.
    pub(super) fn join(&mut self, group: &mut SlotGroup) {
        if let Some(run) = self.run.as_mut().filter(|_| !self.lifecycle.is_refused()) {
            run.start_counting(group);
        }
    }

    /// Reacts to a node that is new or has other labels. Returns whether that changes something.
    pub(super) fn observe_node(&mut self, node: &FleetNode, group: &mut SlotGroup) -> bool {
        self.run.as_mut().is_some_and(|run| run.observe_node(node, group))
    }

    pub(super) fn set_presence(
        &mut self,
        node: &NodeName,
        presence: Presence,
        group: &mut SlotGroup,
    ) -> bool {
        self.run.as_mut().is_some_and(|run| run.set_presence(node, presence, group))
    }

    /// Reacts to a changed pod of the job's namespace. Returns whether that changes something.
    pub(super) fn observe_pod(
        &mut self,
        old: Option<&Pod>,
        new: Option<&Pod>,
        fleet: &Fleet,
        group: &mut SlotGroup,
    ) -> bool {
        self.run.as_mut().is_some_and(|run| run.observe_pod(old, new, fleet, group))
    }

    /// Reacts to the state of a tag that the job owns. Returns whether that changes something.
    pub(super) fn set_tag_state(
        &mut self,
        node: &FleetNode,
        key: TagKey,
        state: TagState,
        group: &mut SlotGroup,
    ) -> bool {
        let Some(run) = &mut self.run else {
            self.early_states.insert(((*node.name).clone(), key), state);
            return false;
        };
        run.set_tag_state(node, &key, state, group)
    }

    /// Forgets a node. Returns whether that changes something.
    pub(super) fn remove_node(&mut self, node: &NodeName, group: &mut SlotGroup) -> bool {
        self.early_states.retain(|(known, _), _| known != node);
        self.run.as_mut().is_some_and(|run| run.remove_node(node, group))
    }

    /// The job's own `parallelism`; `None` if the job is refused.
    pub(super) fn parallelism(&self) -> Option<u32> {
        self.valid_run().map(Run::parallelism)
    }

    fn valid_run(&self) -> Option<&Run> {
        self.run.as_ref().filter(|_| !self.lifecycle.is_refused())
    }

    /// Requests the tag of the node if the job wants to. Returns whether it did.
    pub(super) fn request_tag(
        &mut self,
        node: &NodeName,
        group: &mut SlotGroup,
        fx: &mut Effects<'_>,
    ) -> bool {
        self.run.as_mut().is_some_and(|run| run.request_tag(node, group, fx))
    }

    /// Does what needs no free slot: starts the job, begins rounds, replaces outdated requests, ends the job.
    pub(super) fn advance(&mut self, group: &mut SlotGroup, is_paused: bool, fx: &mut Effects<'_>) {
        if self.lifecycle.is_refused() || self.lifecycle.has_ended() {
            return;
        }
        let Some(run) = &mut self.run else { return };
        let start = self.lifecycle.start(fx.now);
        run.advance(group, fx);
        if let Some(end) = run.check_end(start, is_paused, fx.now) {
            let completed = Time(metadata::whole_seconds(fx.now));
            let status = status::ended(run.roster(), start, completed, end);
            status::end_events(self.lifecycle.id(), &status, run.roster(), end).for_each(|e| fx.emit(e));
            run.stop_counting(group);
            self.lifecycle.end(status);
            self.run = None;
        }
    }

    /// The status that the API server should have.
    fn status(&self) -> ImagePullJobStatus {
        let running = || {
            let start = self.lifecycle.start_time().map(Time);
            self.run.as_ref().map(|run| status::running(run.roster(), start)).unwrap_or_default()
        };
        self.lifecycle.fixed_status().unwrap_or_else(running)
    }

    pub(super) fn write_status_if_due(&mut self, fx: &mut Effects<'_>) {
        if self.lifecycle.is_write_due(fx.now) {
            let status = self.status();
            self.lifecycle.write(status, fx);
        }
    }

    pub(super) fn next_wakeup(&self) -> Option<Timestamp> {
        let run = self.valid_run().zip(self.lifecycle.start_time());
        let advance = run.and_then(|(run, start)| run.next_wakeup(start));
        [advance, self.lifecycle.write_due()].into_iter().flatten().min()
    }
}
