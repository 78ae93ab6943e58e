//! One ImagePullJob, until its final status is written.

use std::collections::HashMap;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::crd::kruise::{ImagePullJob, ImagePullJobStatus};
use prepull_api::task::{JobUid, NodeName};

use super::fleet::KruiseFleet;
use super::kind::{self, KruiseJobObject};
use super::lifecycle::Lifecycle;
use super::pods::Pods;
use super::registry::{JobRegistry, RunningJob};
use super::run::PullJobRun;
use super::{EarlyTagStates, Effects, metadata, status};
use crate::kruise::rules;
use crate::shared::objects::ObjectId;

#[derive(Debug)]
pub(super) struct RunningPullJob {
    lifecycle: Lifecycle<ImagePullJob>,
    /// The group that its slots are counted in: its list, or itself.
    pub(super) group: ObjectId,
    /// Since the spec was valid for the first time.
    pub(super) run: Option<PullJobRun>,
}

impl RunningJob for RunningPullJob {
    type Kind = ImagePullJob;

    fn lifecycle(&mut self) -> &mut Lifecycle<ImagePullJob> {
        &mut self.lifecycle
    }
}

impl JobRegistry<RunningPullJob> {
    /// Changes what runs of each job, and marks the jobs that it concerns.
    pub(super) fn change_runs(&mut self, change: impl Fn(&mut PullJobRun) -> bool) {
        for (uid, job) in &mut self.running {
            if job.run.as_mut().is_some_and(&change) {
                self.agenda.mark(uid);
            }
        }
    }
}

impl RunningPullJob {
    pub(super) fn new(object: &KruiseJobObject<ImagePullJob>) -> Self {
        Self { lifecycle: Lifecycle::new(object), group: kind::slot_group_of(object), run: None }
    }

    pub(super) fn id(&self) -> &ObjectId {
        self.lifecycle.id()
    }

    pub(super) fn selects_by_pods(&self) -> bool {
        self.valid_run().is_some_and(PullJobRun::selects_by_pods)
    }

    /// Takes over the object. Returns whether the job has to react. `early_states`: states of tags that arrived before
    /// the spec was valid.
    pub(super) fn observe(
        &mut self,
        object: KruiseJobObject<ImagePullJob>,
        fleet: &KruiseFleet,
        pods: &Pods,
        early_states: &mut HashMap<JobUid, EarlyTagStates>,
        fx: &mut Effects<'_>,
    ) -> bool {
        let Some(spec) = self.lifecycle.take_object(object) else { return false };
        let job = match spec.and_then(rules::pull_job) {
            Ok(job) => job,
            Err(reason) => {
                self.lifecycle.refuse(reason, fx);
                return true;
            }
        };
        self.lifecycle.clear_refusal();
        let id = self.lifecycle.id();
        let run = match &mut self.run {
            Some(run) => {
                run.change_job(id, job);
                run
            }
            none => none.insert(PullJobRun::new(id, job)),
        };
        run.reselect_nodes(&id.namespace, fleet, pods, early_states.remove(&id.uid).unwrap_or_default());
        true
    }

    /// The run, unless the job is refused or has ended: then it asks no node, and holds no slot.
    pub(super) fn valid_run(&self) -> Option<&PullJobRun> {
        self.run.as_ref().filter(|_| self.lifecycle.is_under_way())
    }

    /// Requests the tag of the node if the job wants to. Returns whether it did.
    pub(super) fn request_tag(&mut self, node: &NodeName, fx: &mut Effects<'_>) -> bool {
        let run = self.run.as_mut().filter(|_| self.lifecycle.is_under_way());
        run.is_some_and(|run| run.request_tag(node, fx))
    }

    /// Does what needs no free slot: starts the job, begins rounds, replaces outdated requests, ends the job.
    pub(super) fn advance(&mut self, is_paused: bool, fx: &mut Effects<'_>) {
        let Some(run) = self.run.as_mut().filter(|_| self.lifecycle.is_under_way()) else { return };
        let start = self.lifecycle.start_once(fx.now);
        run.advance(fx);
        if let Some(end) = run.check_end(start, is_paused, fx.now) {
            let completed = Time(metadata::whole_seconds(fx.now));
            let status = status::ended_status(run.roster(), start, completed, end);
            status::end_events(self.lifecycle.id(), &status, run.roster(), end).for_each(|e| fx.emit(e));
            self.lifecycle.end_with(status);
        }
    }

    /// The status that the API server should have.
    fn desired_status(&self) -> ImagePullJobStatus {
        let running = || {
            let start = self.lifecycle.start_time().map(Time);
            self.run.as_ref().map(|run| status::running_status(run.roster(), start)).unwrap_or_default()
        };
        self.lifecycle.fixed_status().unwrap_or_else(running)
    }

    pub(super) fn write_status_if_due(&mut self, fx: &mut Effects<'_>) {
        if self.lifecycle.is_write_due(fx.now) {
            let status = self.desired_status();
            self.lifecycle.write_status(status, fx);
        }
    }

    pub(super) fn next_wakeup(&self) -> Option<Timestamp> {
        let run = self.valid_run().zip(self.lifecycle.start_time());
        let advance = run.and_then(|(run, start)| run.next_wakeup(start));
        [advance, self.lifecycle.write_due()].into_iter().flatten().min()
    }
}
