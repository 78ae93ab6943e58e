//! One ImagePullJob that is not over, or whose end is not written yet.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::crd::kruise::{ImagePullJob, ImagePullJobSpec, ImagePullJobStatus};
use prepull_api::task::{JobUid, NodeName};

use super::fleet::{Fleet, Known, Presence};
use super::group::Group;
use super::objects::{self, PullJobObject};
use super::over::Over;
use super::pods::{self, PodCounts, Pods};
use super::roster::Roster;
use super::status::{self, End};
use super::writing::Writing;
use super::{Action, Pod, wishes};
use crate::kruise::rules::{self, Completion, NodeChoice, ValidPullJob};
use crate::kruise::{Standing, Wish};
use crate::shared::events::ObjectKind;
use crate::shared::objects::ObjectId;
use crate::shared::outcomes::WriteOutcome;
use crate::shared::writes::Pace;

/// How the tags of a job stand that cannot be read yet: by node, image and tag.
pub(super) type Early = HashMap<(NodeName, String, String), Standing>;

/// What is known of a job that has been valid once.
#[derive(Debug)]
struct Run {
    job: ValidPullJob,
    wish: Arc<Wish>,
    roster: Roster,
    /// Where matching pods run; empty without a podSelector.
    pods: PodCounts,
    /// Since when only nodes are left that have been offline for longer than an edge's longest wait.
    stalled: Option<Timestamp>,
}

#[derive(Debug)]
pub(super) struct Job {
    pub(super) id: ObjectId,
    /// Whose slots it takes: its list's, or its own.
    pub(super) group: JobUid,
    spec: Option<ImagePullJobSpec>,
    /// Why the spec is refused.
    refusal: Option<String>,
    start: Option<Timestamp>,
    run: Option<Run>,
    /// How it ended, for the API server.
    end: Option<ImagePullJobStatus>,
    /// Standings that came before the job could be read.
    early: Early,
    writing: Writing<ImagePullJobStatus>,
}

impl Job {
    pub(super) fn new(object: &PullJobObject, early: Early) -> Self {
        let status = object.as_ref().ok().and_then(|job| job.status.clone());
        Self {
            id: objects::pull_job_id(object),
            group: objects::group(object),
            spec: None,
            refusal: None,
            start: status.as_ref().and_then(|status| status.start_time.as_ref()).map(|time| time.0),
            run: None,
            end: None,
            early,
            writing: Writing::new(status),
        }
    }

    /// The object as it is now. Says whether that is news.
    pub(super) fn changed(
        &mut self,
        object: PullJobObject,
        fleet: &Fleet,
        pods: &Pods,
        group: &mut Group,
        actions: &mut Vec<Action>,
    ) -> bool {
        if self.end.is_some() {
            // Its time to live may still be changed.
            if let Ok(job) = object {
                self.spec = Some(job.spec);
            }
            return false;
        }
        let spec = match object {
            Ok(job) if self.spec.as_ref() == Some(&job.spec) => return false,
            Ok(job) => {
                let ImagePullJob { spec, .. } = *job;
                Ok(self.spec.insert(spec))
            }
            Err(unreadable) => {
                self.spec = None;
                Err(unreadable.error)
            }
        };
        match spec.and_then(|spec| rules::pull_job(spec)) {
            Ok(valid) => {
                self.refusal = None;
                self.accept(valid, fleet, pods, group);
            }
            Err(words) => {
                let words = status::cut(words);
                let known = self.refusal.as_deref().or(self.writing.stored().map(|s| s.message.as_str()));
                if known != Some(&*words) {
                    actions.push(status::invalid(ObjectKind::ImagePullJob, &self.id, &words));
                }
                self.refusal = Some(words);
                if let Some(run) = &mut self.run {
                    run.roster.halt(group);
                }
            }
        }
        true
    }

    fn accept(&mut self, job: ValidPullJob, fleet: &Fleet, pods: &Pods, group: &mut Group) {
        let wish = wishes::wish(&self.id, &job);
        let run = match &mut self.run {
            Some(run) => {
                if (&run.wish.image, &run.wish.tag) != (&wish.image, &wish.tag) {
                    run.roster.begin_anew(group);
                } else if *run.wish != wish {
                    run.roster.wish_changed(group);
                }
                if *run.wish != wish {
                    run.wish = Arc::new(wish);
                }
                (run.job, run.stalled) = (job, None);
                run
            }
            none => none.insert(Run {
                job,
                wish: Arc::new(wish),
                roster: Roster::new(self.id.uid.clone()),
                pods: PodCounts::default(),
                stalled: None,
            }),
        };
        run.roster.halt(group);
        run.pods = match &run.job.template.nodes {
            NodeChoice::Pods(selector) => pods.counts(&self.id.namespace, selector),
            _ => PodCounts::default(),
        };
        for known in fleet.all() {
            run.roster.select(known, run.selects(known), group);
        }
        for ((node, image, tag), standing) in std::mem::take(&mut self.early) {
            if let Some(known) = fleet.get(&node) {
                run.standing(known, standing, &(image, tag), group);
            }
        }
        run.roster.go_live(run.job.template.completion == Completion::Never, group);
    }

    /// It takes slots elsewhere from now on.
    pub(super) fn leave(&mut self, group: &mut Group) {
        if let Some(run) = &mut self.run {
            run.roster.halt(group);
        }
    }

    /// The opposite of [`Self::leave`].
    pub(super) fn join(&mut self, group: &mut Group) {
        if let Some(run) = self.run.as_mut().filter(|_| self.refusal.is_none()) {
            run.roster.go_live(run.job.template.completion == Completion::Never, group);
        }
    }

    /// A node is new, or its labels are others. Says whether that changes something.
    pub(super) fn node(&mut self, known: &Known, group: &mut Group) -> bool {
        self.run.as_mut().is_some_and(|run| run.node(known, group))
    }

    pub(super) fn presence(&mut self, node: &NodeName, presence: Presence, group: &mut Group) -> bool {
        self.run.as_mut().is_some_and(|run| run.roster.presence(node, presence, group))
    }

    /// A pod of the job's namespace is another one. Says whether that changes something.
    pub(super) fn pod(
        &mut self,
        old: Option<&Pod>,
        new: Option<&Pod>,
        fleet: &Fleet,
        group: &mut Group,
    ) -> bool {
        let Some(run) = &mut self.run else { return false };
        let NodeChoice::Pods(selector) = &run.job.template.nodes else { return false };
        let [old, new] = [old, new].map(|pod| pod.and_then(|pod| pods::matching(pod, selector)));
        if old == new {
            return false;
        }
        let mut changed = false;
        for (node, matches) in [(old, false), (new, true)] {
            let Some(node) = node else { continue };
            run.pods.change(node, matches);
            changed |= fleet.get(node).is_some_and(|known| run.node(known, group));
        }
        changed
    }

    /// How a tag stands that names the job as an owner. Says whether that changes something.
    pub(super) fn standing(
        &mut self,
        known: &Known,
        standing: Standing,
        about: (String, String),
        group: &mut Group,
    ) -> bool {
        let Some(run) = &mut self.run else {
            self.early.insert(((*known.name).clone(), about.0, about.1), standing);
            return false;
        };
        run.standing(known, standing, &about, group)
    }

    /// The node is gone. Says whether that changes something.
    pub(super) fn node_gone(&mut self, node: &NodeName, group: &mut Group) -> bool {
        self.early.retain(|(early, ..), _| early != node);
        self.run.as_mut().is_some_and(|run| run.roster.remove(node, group))
    }

    /// Nodes at a time, by the job's own word.
    pub(super) fn parallelism(&self) -> Option<u32> {
        self.running().map(|run| run.job.template.parallelism)
    }

    fn running(&self) -> Option<&Run> {
        self.run.as_ref().filter(|_| self.refusal.is_none())
    }

    /// Asks the node, where the job wants to.
    pub(super) fn ask(&mut self, node: &NodeName, group: &mut Group, actions: &mut Vec<Action>) -> bool {
        let Some(run) = self.run.as_mut().filter(|run| run.roster.wants(node)) else { return false };
        let again = run.roster.ask(node, group);
        actions.push(Action::Ask { node: node.clone(), wish: run.wish.clone(), again });
        true
    }

    /// Goes on as far as it can without slots.
    pub(super) fn advance(
        &mut self,
        group: &mut Group,
        paused: bool,
        now: Timestamp,
        actions: &mut Vec<Action>,
    ) {
        if self.refusal.is_some() || self.end.is_some() {
            return;
        }
        let Some(run) = &mut self.run else { return };
        let start = *self.start.get_or_insert_with(|| objects::whole_seconds(now));
        run.roster.begin_rounds(now, group);
        while let Some(node) = run.roster.next_stale(group) {
            actions.push(Action::Ask { node, wish: run.wish.clone(), again: false });
        }
        if let Some(end) = run.end(start, paused, now) {
            let ended = Time(objects::whole_seconds(now));
            let status = status::ended(&run.roster, start, ended, end);
            actions.extend(status::ended_events(&self.id, &status, &run.roster, end));
            run.roster.halt(group);
            (self.end, self.run) = (Some(status), None);
        }
    }

    /// What the API server is to have, sooner or later.
    fn status(&self) -> ImagePullJobStatus {
        let start = self.start.map(Time);
        match (&self.end, &self.refusal, &self.run) {
            (Some(end), ..) => end.clone(),
            (None, Some(words), _) => status::refused(start, words),
            (None, None, Some(run)) => status::running(&run.roster, start),
            (None, None, None) => ImagePullJobStatus::default(),
        }
    }

    pub(super) fn write_if_due(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        self.writing.touch(if self.end.is_some() { Pace::AtOnce } else { Pace::Now });
        if self.writing.is_due(now)
            && let Some(status) = self.writing.begin(self.status(), now)
        {
            actions.push(Action::PullJobStatus(self.id.clone(), Box::new(status)));
        }
    }

    /// Says what is left of the job, where its end is written.
    pub(super) fn written(&mut self, outcome: WriteOutcome, now: Timestamp) -> Option<Over> {
        self.writing.ended(outcome == WriteOutcome::Done, now);
        let end = self.end.as_ref().filter(|end| self.writing.stored() == Some(*end))?;
        let ended = end.completion_time.as_ref().map(|time| time.0)?;
        let ttl =
            self.spec.as_ref().and_then(|spec| spec.template.completion_policy.ttl_seconds_after_finished);
        Some(Over::new(self.id.clone(), ended, ttl))
    }

    pub(super) fn is_being_written(&self) -> bool {
        self.writing.is_under_way()
    }

    pub(super) fn next_wakeup(&self) -> Option<Timestamp> {
        let run = self.running().zip(self.start);
        let course = run.and_then(|(run, start)| run.next_wakeup(start));
        [course, self.writing.due()].into_iter().flatten().min()
    }
}

impl Run {
    fn selects(&self, known: &Known) -> bool {
        match &self.job.template.nodes {
            NodeChoice::All => true,
            NodeChoice::Names(names) => names.contains(&*known.name),
            NodeChoice::Labels(selector) => selector.matches(&known.labels),
            NodeChoice::Pods(_) => self.pods.contains(&known.name),
        }
    }

    /// The node is new, or its labels or pods are others. Says whether that changes something.
    fn node(&mut self, known: &Known, group: &mut Group) -> bool {
        let selected = self.selects(known);
        self.roster.select(known, selected, group)
    }

    fn standing(
        &mut self,
        known: &Known,
        standing: Standing,
        (image, tag): &(String, String),
        group: &mut Group,
    ) -> bool {
        (image, tag) == (&self.wish.image, &self.wish.tag) && self.roster.standing(known, standing, group)
    }

    /// How the job ends now, if it does.
    fn end(&mut self, start: Timestamp, paused: bool, now: Timestamp) -> Option<End> {
        let Completion::Always { .. } = self.job.template.completion else { return None };
        let counts = self.roster.counts();
        if counts.succeeded + counts.failed == counts.desired {
            return Some(End::Completed);
        }
        if self.deadline(start).is_some_and(|at| at <= now) {
            return Some(End::Deadline);
        }
        let stalled = counts.active + counts.wanted + counts.fading == 0 && !paused;
        self.stalled = stalled.then(|| self.stalled.unwrap_or(now));
        self.gives_up().is_some_and(|at| at <= now).then_some(End::Unresponsive)
    }

    fn deadline(&self, start: Timestamp) -> Option<Timestamp> {
        match self.job.template.completion {
            Completion::Always { deadline: Some(deadline), .. } => start.checked_add(deadline).ok(),
            _ => None,
        }
    }

    /// When nodes that are offline are waited for no longer: after the time that their own tries could take.
    fn gives_up(&self) -> Option<Timestamp> {
        let template = &self.job.template;
        let tries = u64::from(template.backoff_limit) + 1;
        let patience = Duration::from_secs(u64::from(template.timeout) * tries);
        self.stalled.and_then(|since| since.checked_add(patience).ok())
    }

    fn next_wakeup(&self, start: Timestamp) -> Option<Timestamp> {
        [self.deadline(start), self.gives_up(), self.roster.next_round()].into_iter().flatten().min()
    }
}
