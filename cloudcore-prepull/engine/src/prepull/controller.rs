//! The controller of all ImagePrePullJobs: events go in, actions come out. Pure.
//!
//! The order that makes a crash harmless: *write, then act*. A node is recorded as in progress before its task is
//! sent, and a result is recorded before it is acknowledged. So a task that the API server doesn't have as started
//! was never sent, and everything that an edge has forgotten is in the API server.
//!
//! ```text
//!  Input ─▶ handle ─▶ rollout (per job) ─▶ flush ─▶ Action::Write ─▶ Input::Written ─▶ Action::{Dispatch, Send}
//! ```
//!
//! A flush looks only at jobs with a new event or an expired timer: see [`Agenda`].

use std::collections::{BTreeMap, HashMap, HashSet};
use std::num::NonZeroU64;
use std::time::Duration;

use jiff::Timestamp;
use prepull_api::crd::report::ImagePrePullReport;
use prepull_api::crd::status::{JobPhase, NodeClock, Summary};
use prepull_api::task::{JobUid, NodeName, TaskId};
use prepull_api::wire::CloudMessage;

use crate::fleet::event::FleetEvent;
use crate::fleet::node_view::NodeView;
use crate::fleet::session::SessionId;

mod census;
mod io;
mod job;
mod parked;
mod pins;
mod places;
mod sessions;
#[cfg(test)]
mod tests;

use crate::fleet::slots::NodeSlots;
use crate::shared::agenda::Agenda;
use crate::shared::outcomes::WriteOutcome;
use census::Census;
use io::WriteEnd;
pub use io::{Action, Content, Dispatch, Input, JobObject, StatusOrReport, UnreadableJob, rest_of};
use job::PrepullJob;
pub use parked::{PARK_AFTER, drop_unread_fields};
use parked::{Parked, is_settled};
use pins::UnpinReason;

/// See the module.
#[derive(Debug, Default)]
pub struct Controller {
    nodes: BTreeMap<NodeName, NodeView>,
    sessions: HashMap<NodeName, SessionId>,
    /// The clocks that the edges of these sessions count their time by.
    clocks: HashMap<NodeName, NodeClock>,
    /// Nodes with edges that can pin images, and whether one may have done so. All of them have a session. Ordered, so
    /// that a run can be repeated.
    pinning: BTreeMap<NodeName, bool>,
    /// Jobs that gave up their pins since the last flush.
    unpinned: BTreeMap<JobUid, UnpinReason>,
    jobs: HashMap<JobUid, PrepullJob>,
    /// Jobs that have been over for long, or are being read. None of them is in `jobs` as well.
    parked: HashMap<JobUid, Parked>,
    /// The jobs of [`Action::Recall`] that no [`Input::Recalled`] has answered yet.
    recalling: HashSet<JobUid>,
    agenda: Agenda,
    /// The phases of `jobs` and `parked`, as of the last flush.
    census: Census,
    slots: NodeSlots,
    /// Jobs that are over or gone, and leave `slots` with the next flush: one pass for all of them.
    leaving: HashSet<JobUid>,
    /// Jobs that a write did not find. The watch may still deliver their last changes, which are ignored.
    gone: HashSet<JobUid>,
    /// The jobs that are registered in `slots`: those that are not over.
    attached: HashSet<JobUid>,
    /// Nodes that have a free slot again, since [`Self::take_freed`].
    freed: Vec<NodeName>,
    /// What sites have another limit for, since [`Self::take_new_rates`].
    new_rates: Vec<(JobUid, Option<NonZeroU64>)>,
    /// Nodes in a report, where the rule of [`crate::prepull::aggregate::nodes_in_report`] would allow more.
    report_capacity: Option<usize>,
    /// The time of the current [`Self::handle`] or [`Self::flush`].
    now: Timestamp,
    actions: Vec<Action>,
}

/// The context of a job's step: the time, and the sink for its actions.
type Effects<'a> = crate::shared::effects::Effects<'a, Action>;

impl Controller {
    /// A controller that puts at most this many nodes into a report, so that a test needs no hundreds of nodes to have
    /// several reports.
    pub fn with_report_capacity(nodes: usize) -> Self {
        Self { report_capacity: Some(nodes), ..Self::default() }
    }

    /// Takes in what happened to nodes and sessions, as [`Self::handle`] does.
    pub fn note_fleet_event(&mut self, event: FleetEvent, now: Timestamp) {
        self.now = now;
        match event {
            FleetEvent::Nodes(nodes) => {
                let listed: HashSet<&NodeName> = nodes.iter().map(|node| &node.name).collect();
                let gone: Vec<_> = self.nodes.keys().filter(|name| !listed.contains(name)).cloned().collect();
                for name in gone {
                    self.remove_node(&name);
                }
                for node in nodes {
                    self.apply_node(node);
                }
            }
            FleetEvent::Node(node) => self.apply_node(node),
            FleetEvent::NodeGone(name) => self.remove_node(&name),
            FleetEvent::Session(event) => self.apply_session(event),
        }
    }

    /// Takes in what happened. What follows from it comes out of [`Self::flush`], so that a burst of inputs
    /// makes one write.
    pub fn handle(&mut self, input: Input, now: Timestamp) {
        self.now = now;
        match input {
            Input::ReportsListed(listed) => {
                let listed: HashSet<(JobUid, u32)> = listed.into_iter().collect();
                for uid in self.jobs.keys().cloned().collect::<Vec<_>>() {
                    let is_gone = |index| !listed.contains(&(uid.clone(), index));
                    self.change_job(&uid, |job, _| job.rewrite_reports(is_gone));
                }
            }
            Input::ReportGone { job, index } => {
                self.change_job(&job, |job, _| job.rewrite_reports(|gone| gone == index));
            }
            Input::Recalled(uid, reports, object) => {
                self.recalling.remove(&uid);
                let Some(object) = object.filter(|object| !is_being_deleted(object)) else {
                    // The watch reports that soon, or has done so before a write returned an older version.
                    return self.remove_job(&uid);
                };
                if let Some(parked) = self.parked.remove(&uid) {
                    self.agenda.remove(&uid);
                    self.load(&uid, &object, reports);
                    self.unpin_unless_wanted(&uid, parked.pins);
                    if let Some(newest) = parked.recalled {
                        self.apply_job(&newest);
                    }
                }
            }
            Input::Jobs(jobs) => {
                let listed: HashSet<JobUid> = jobs.iter().map(job::uid_of).collect();
                let known = self.jobs.keys().chain(self.parked.keys());
                let gone: Vec<_> = known.filter(|uid| !listed.contains(uid)).cloned().collect();
                for uid in gone {
                    self.remove_job(&uid);
                }
                for job in &jobs {
                    self.apply_job(job);
                }
                self.gone.retain(|uid| listed.contains(uid));
            }
            Input::Job(job) => self.apply_job(&job),
            Input::JobGone(uid) => {
                self.gone.remove(&uid);
                self.remove_job(&uid);
            }
            Input::Dispatched { job, node, attempt, outcome, keys } => {
                self.finish_dispatch(&node, TaskId { job, attempt }, &outcome, keys);
            }
            Input::SecretAllowed { job, secret } => {
                self.change_job(&job, |job, effects| job.end_waits_for(&secret, effects.now));
            }
            Input::Written { job, object, version, outcome, stored } => match (object, outcome) {
                (StatusOrReport::Status, WriteOutcome::Gone) => {
                    // If it isn't known any more, the watch has reported that, and reports nothing more.
                    if self.jobs.contains_key(&job) || self.parked.contains_key(&job) {
                        self.remove_job(&job);
                        self.gone.insert(job);
                    }
                }
                (_, outcome) => {
                    let done = outcome == WriteOutcome::Done;
                    let end = WriteEnd { object, version, stored, done };
                    let finish =
                        |job: &mut PrepullJob, effects: &mut Effects<'_>| job.finish_write(end, effects);
                    if !self.change_job(&job, finish) {
                        // The write was in flight when the job was deleted.
                        self.actions.push(Action::Forget(job));
                    }
                }
            },
        }
    }

    /// Advances every job as far as possible, and returns the actions.
    pub fn flush(&mut self, now: Timestamp) -> Vec<Action> {
        self.now = now;
        // The oldest job first: if two want the same node, it gets it. A slot that is given back lets other jobs start,
        // which marks them again.
        self.agenda.wake_up(now);
        while let Some(uid) = self.agenda.next() {
            let Some(job) = self.jobs.get_mut(&uid) else {
                self.delete_parked(&uid);
                continue;
            };
            if let Some(parked) = job.park(now) {
                self.park(&uid, parked);
                continue;
            }
            let mut effects = Effects::new(now, &mut self.actions);
            let (run, pinned) = (job.run(), job.wants_pins());
            // Before anything starts. A withdrawal is written, and the flush after that write comes here again.
            let left = job.remove_nodeless(&self.nodes);
            job.advance(&self.nodes, &mut effects);
            let goes_on = job.begin_what_waited(&self.nodes, &mut effects);
            job.write_if_due(&mut effects);
            let (wakeup, is_over, begins) = (job.next_wakeup(), job.is_over(), job.run() != run);
            self.census.note_phase(&uid, job.phase());
            self.apply_moves(&uid);
            for node in left {
                self.slots.detach_from(&node, &uid);
                self.forget_slots_unless_there(&node);
            }
            self.agenda.wake_at(&uid, wakeup);
            if goes_on {
                // As a job that is edited after its end.
                self.leaving.insert(uid.clone());
                self.attach_all(&uid);
            }
            if begins {
                self.attach_all(&uid);
                if pinned && run.is_some() {
                    // The images of the run before; those of this one are pinned when they have been pulled.
                    self.unpin_replaced(&uid);
                }
            }
            if is_over && self.attached.remove(&uid) {
                self.leaving.insert(uid);
            }
        }
        self.detach_leaving();
        self.tell_unpinned();
        std::mem::take(&mut self.actions)
    }

    /// When [`Self::flush`] must run next even without an input.
    pub fn next_wakeup(&self) -> Option<Timestamp> {
        self.agenda.next_wakeup()
    }

    /// Whether jobs that go on are still being read.
    pub fn is_loading(&self) -> bool {
        !self.recalling.is_empty()
    }

    /// All Nodes, by their names.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeView> {
        self.nodes.values()
    }

    pub(crate) fn nodes_by_name(&self) -> &BTreeMap<NodeName, NodeView> {
        &self.nodes
    }

    /// The jobs that run, each by its name with the counts of its nodes, for the metrics.
    pub fn running_jobs(&self) -> impl Iterator<Item = (&str, &Summary)> {
        self.census.running().filter_map(|uid| self.jobs.get(uid)).map(PrepullJob::name_and_summary)
    }

    /// The number of jobs in each phase, for the metrics.
    pub fn phases(&self) -> [(JobPhase, usize); 4] {
        self.census.counts()
    }

    fn detach_leaving(&mut self) {
        if !self.leaving.is_empty() {
            self.slots.detach(&std::mem::take(&mut self.leaving));
        }
    }

    fn park(&mut self, uid: &JobUid, parked: Parked) {
        self.jobs.remove(uid);
        self.actions.push(Action::Forget(uid.clone()));
        self.census.note_phase(uid, parked.phase);
        self.parked.insert(uid.clone(), parked);
        self.delete_parked(uid);
    }

    fn delete_parked(&mut self, uid: &JobUid) {
        let Some(parked) = self.parked.get_mut(uid).filter(|parked| parked.recalled.is_none()) else {
            return;
        };
        if parked.delete_at.is_some_and(|due| due <= self.now) {
            parked.delete_at = self.now.checked_add(DELETE_RETRY).ok();
            let (job, name, generation) = (uid.clone(), parked.name.clone(), parked.generation);
            self.actions.push(Action::Delete { job, name, generation });
        }
        let due = parked.delete_at;
        self.agenda.wake_at(uid, due);
    }

    /// Changes a job, which the next flush then looks at. Returns whether there is such a job.
    fn change_job(&mut self, uid: &JobUid, change: impl FnOnce(&mut PrepullJob, &mut Effects<'_>)) -> bool {
        let Some(job) = self.jobs.get_mut(uid) else { return false };
        change(job, &mut Effects::new(self.now, &mut self.actions));
        self.agenda.mark(uid);
        self.apply_moves(uid);
        true
    }

    /// Takes over which nodes of a job took or gave back a slot, and updates the other jobs of those nodes.
    fn apply_moves(&mut self, uid: &JobUid) {
        let moves = self.jobs.get_mut(uid).map(PrepullJob::take_moves).unwrap_or_default();
        for (node, took) in moves {
            self.place_moved(&node, took);
        }
    }

    fn announce_busy(&mut self, node: &NodeName, busy: bool) {
        if !busy {
            self.freed.push(node.clone());
        }
        for uid in self.slots.jobs(node) {
            if let Some(job) = self.jobs.get_mut(&uid) {
                job.set_busy(node, busy);
                self.agenda.mark(&uid);
            }
        }
    }

    fn apply_node(&mut self, node: NodeView) {
        let joined: Vec<JobUid> = self
            .jobs
            .iter_mut()
            .filter_map(|(uid, job)| job.add_if_chosen(&node).then(|| uid.clone()))
            .collect();
        let relabelled = self.nodes.get(&node.name).filter(|known| known.labels != node.labels);
        for (uid, job) in &self.jobs {
            if job.waits_for(&node) || relabelled.is_some_and(|known| job.waits_with(known)) {
                self.agenda.mark(uid);
            }
        }
        let name = node.name.clone();
        if relabelled.is_some() {
            for uid in self.slots.jobs(&name) {
                if let Some(job) = self.jobs.get_mut(&uid) {
                    job.replan_waiting(&node);
                }
            }
        }
        self.nodes.insert(name.clone(), node);
        for uid in joined {
            // It may be attached already: a name without a Node is.
            self.agenda.mark(&uid);
            self.attach_to_node(&uid, &name);
        }
    }

    fn remove_node(&mut self, name: &NodeName) {
        if let Some(gone) = self.nodes.remove(name) {
            for (uid, _) in self.jobs.iter().filter(|(_, job)| job.waits_with(&gone)) {
                self.agenda.mark(uid);
            }
        }
        for uid in self.slots.jobs(name) {
            let mut has_left = false;
            self.change_job(&uid, |job, _| has_left = job.remove_node(name));
            if has_left {
                // A job that the node rejoins gets the node's session of that time.
                self.slots.detach_from(name, &uid);
            }
        }
        self.forget_slots_unless_there(name);
    }

    /// Forgets the slots of a node that has neither a Node nor a session.
    fn forget_slots_unless_there(&mut self, name: &NodeName) {
        if !self.nodes.contains_key(name) && !self.sessions.contains_key(name) {
            self.slots.forget_idle(name);
        }
    }

    fn apply_job(&mut self, object: &JobObject) {
        let uid = job::uid_of(object);
        if self.gone.contains(&uid) {
            return;
        }
        if is_being_deleted(object) {
            return self.remove_job(&uid);
        }
        if let Some(parked) = self.parked.get_mut(&uid) {
            // The watch may be behind the status that this job ended with.
            let newest = parked.recalled.as_ref().map(job::generation_of);
            if newest.is_some_and(|newest| newest < job::generation_of(object)) {
                parked.recalled = Some(object.clone());
            } else if newest.is_none() && parked.is_edited(object) {
                parked.recalled = Some(object.clone());
                self.recall(uid);
            } else if object.is_err() {
                // It asks for nothing, and its TTL counts on.
                parked.generation = job::generation_of(object);
            }
            return;
        }
        if let Some(known) = self.jobs.get_mut(&uid) {
            let (pinned, rate) = (known.wants_pins(), known.site_rate());
            if known.apply_change(object, &self.nodes, &mut Effects::new(self.now, &mut self.actions)) {
                self.agenda.mark(&uid);
                if known.site_rate() != rate {
                    self.new_rates.push((uid.clone(), known.site_rate()));
                }
                self.attach_all(&uid);
                self.unpin_unless_wanted(&uid, pinned);
            }
            return;
        }
        let Some(parked) = Parked::from_begun(object) else { return self.load(&uid, object, Vec::new()) };
        self.agenda.add(&uid, creation_time(object, self.now));
        self.census.note_phase(&uid, parked.phase);
        if is_settled(object, self.now) {
            self.parked.insert(uid, parked);
        } else {
            self.parked.insert(uid.clone(), Parked { recalled: Some(object.clone()), ..parked });
            self.recall(uid);
        }
    }

    /// Asks for a parked job, which is to go on.
    fn recall(&mut self, uid: JobUid) {
        let Some(Parked { name, .. }) = self.parked.get(&uid) else { return };
        self.actions.push(Action::Recall { job: uid.clone(), name: name.clone() });
        self.recalling.insert(uid);
    }

    /// Loads a job that is not in memory, with all reports that the API server has of it.
    fn load(&mut self, uid: &JobUid, object: &JobObject, reports: Vec<ImagePrePullReport>) {
        self.agenda.add(uid, creation_time(object, self.now));
        let capacity = self.report_capacity.unwrap_or(usize::MAX);
        let mut effects = Effects::new(self.now, &mut self.actions);
        let job = PrepullJob::load(object, reports, &self.nodes, capacity, &mut effects);
        self.jobs.insert(uid.clone(), job);
        self.attach_all(uid);
    }

    /// Registers a job for the slots of all its nodes.
    fn attach_all(&mut self, uid: &JobUid) {
        let nodes: Vec<NodeName> = self.jobs.get(uid).map(|job| job.nodes().collect()).unwrap_or_default();
        for node in nodes {
            self.attach_to_node(uid, &node);
        }
        self.apply_moves(uid);
    }

    /// Registers a job for the slots of a node, and passes it the node's session and slot state.
    fn attach_to_node(&mut self, uid: &JobUid, node: &NodeName) {
        if self.leaving.contains(uid) {
            self.detach_leaving();
        }
        self.attached.insert(uid.clone());
        if !self.slots.attach(node, uid) {
            return;
        }
        let (session, busy) = (self.sessions.get(node).copied(), self.slots.is_busy(node));
        let clock = self.clocks.get(node).cloned().unwrap_or_default();
        self.change_job(uid, |job, effects| {
            job.set_busy(node, busy);
            if let Some(session) = session {
                // The session is older than this job is here, so no task of the job can be open on it.
                job.mark_online(node, session, &clock, None, effects);
            }
        });
    }

    fn remove_job(&mut self, uid: &JobUid) {
        let pinned = self.wants_pins(uid);
        self.census.forget(uid);
        if self.parked.remove(uid).is_some() {
            self.agenda.remove(uid);
            self.actions.push(Action::Forget(uid.clone()));
        }
        let removed = self.jobs.remove(uid);
        self.unpin_unless_wanted(uid, pinned);
        let Some(mut job) = removed else { return };
        job.abandon(&mut Effects::new(self.now, &mut self.actions));
        self.actions.push(Action::Forget(uid.clone()));
        self.agenda.remove(uid);
        if self.attached.remove(uid) {
            self.leaving.insert(uid.clone());
        }
        for (node, attempt) in job.tasks_in_progress() {
            self.actions.push(cancel_message(&node, TaskId { job: uid.clone(), attempt }, DELETED));
            self.place_moved(&node, false);
        }
    }
}

/// After this a deletion that had no effect is asked for again.
const DELETE_RETRY: Duration = Duration::from_secs(30);
fn is_being_deleted(object: &JobObject) -> bool {
    rest_of(object).metadata.deletion_timestamp.is_some()
}

/// When a job was made; now, for one that does not say.
fn creation_time(object: &JobObject, now: Timestamp) -> Timestamp {
    rest_of(object).metadata.creation_timestamp.as_ref().map_or(now, |time| time.0)
}

const DELETED: &str = "the job was deleted, or has been over for long";
const OVER: &str = "the job does not wait for this task any more";

fn cancel_message(node: &NodeName, task: TaskId, reason: &str) -> Action {
    Action::Send(node.clone(), CloudMessage::Cancel { task, reason: reason.to_owned() })
}
