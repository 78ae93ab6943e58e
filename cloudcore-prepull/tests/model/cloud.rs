//! One process of cloudcore: the controller, and what the program around it does, one step at a time. Everything that
//! depends on the controller's interface is in this file.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use prepull_api::crd::job::ImagePrePullJobSpec;
use prepull_api::crd::report::ReportBody;
use prepull_api::crd::status::ImagePrePullJobStatus;
use prepull_api::task::{JobUid, NodeName, PullPolicy};
use prepull_api::wire::{Assign, CloudMessage, EdgeMessage, PullKey};
use prepull_engine::engine::Input;
use prepull_engine::fleet::event::FleetEvent;
use prepull_engine::fleet::node_view::NodeView;
use prepull_engine::fleet::session::{SessionEvent, SessionId};
use prepull_engine::prepull::controller::{
    Action, Content, Controller, Dispatch, Input as JobInput, JobObject, StatusOrReport, drop_unread_fields,
    rest_of,
};
use prepull_engine::shared::outcomes::{DispatchOutcome, WriteOutcome};

use crate::api::Refused;
use crate::trace::{brief, shown, told};
use crate::world::{World, at};

/// How a write ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Answered,
    /// The API server has not received it.
    Lost,
    /// The API server has made it, and its answer was lost.
    AnswerLost,
}

/// How a dispatch ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DispatchFate {
    /// The task goes to the node's session, if there is one.
    Sent,
    /// A secret cannot be read for now.
    Postponed,
    /// The task can never be sent.
    Unsendable,
}

/// How far cloudcore has started: what it reads next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Boot {
    Nodes,
    Jobs,
    /// The jobs that go on, one by one.
    Recalls,
    Up,
}

/// How long a secret is tried, in milliseconds.
const SECRET_TRIED_FOR: u64 = 5_000;

/// A write that is under way.
pub(crate) struct Write {
    pub(crate) job: JobUid,
    pub(crate) version: u64,
    /// The version of the object that it replaces.
    pub(crate) expected: Option<u64>,
    pub(crate) content: Content,
    /// The value of [`Cloud::stirred`] when the write began.
    pub(crate) stirred: u64,
}

/// A job that is read: first itself, then its reports.
pub(crate) struct Recall {
    job: JobUid,
    is_read: bool,
    /// What was read, unless it was gone.
    object: Option<JobObject>,
    /// The newest that the watch has said of it since.
    newest: Option<Seen>,
}

pub(crate) enum Watched {
    Job(JobObject),
    JobGone(JobUid),
    Node(NodeView),
    NodeGone(NodeName),
}

pub(crate) struct Cloud {
    pub(crate) controller: Controller,
    pub(crate) boot: Boot,
    pub(crate) inputs: VecDeque<Input>,
    /// Events that the watches have not delivered yet: of jobs, and of nodes.
    pub(crate) watches: [VecDeque<Watched>; 2],
    pub(crate) writes: Vec<Write>,
    /// Deletions under way, each of a generation.
    pub(crate) deletes: Vec<(JobUid, i64)>,
    /// The dispatches under way, and when each began.
    pub(crate) dispatches: Vec<(Dispatch, u64)>,
    pub(crate) recalls: VecDeque<Recall>,
    /// The generation of each job that the controller knows.
    generations: HashMap<JobUid, i64>,
    /// The current connection of each node, as the registry of sessions has it.
    pub(crate) registry: BTreeMap<NodeName, u64>,
    pub(crate) sessions: u64,
    /// The Nodes that the controller knows.
    pub(crate) nodes: BTreeSet<NodeName>,
    /// Nodes reported gone since the last flush: the effects of earlier inputs come out of the next one.
    nodes_gone: BTreeSet<NodeName>,
    /// What this process has written last of each object, if it knows that the write succeeded.
    pub(crate) wrote: HashMap<(JobUid, StatusOrReport), (Content, u64)>,
    /// How many inputs may have changed something, perhaps only to change it back: a repeated write is then no fault.
    pub(crate) stirred: u64,
}

impl Cloud {
    /// `report`: the most nodes in a report, if a job is to have several reports.
    pub(crate) fn new(report: Option<usize>) -> Self {
        Self {
            controller: report.map_or_else(Controller::default, Controller::with_report_capacity),
            boot: Boot::Nodes,
            inputs: VecDeque::new(),
            watches: [VecDeque::new(), VecDeque::new()],
            writes: Vec::new(),
            deletes: Vec::new(),
            dispatches: Vec::new(),
            recalls: VecDeque::new(),
            generations: HashMap::new(),
            registry: BTreeMap::new(),
            sessions: 0,
            nodes: BTreeSet::new(),
            nodes_gone: BTreeSet::new(),
            wrote: HashMap::new(),
            stirred: 0,
        }
    }

    pub(crate) fn push(&mut self, input: impl Into<Input>) {
        self.inputs.push_back(input.into());
    }

    pub(crate) fn stir(&mut self, input: &Input, news: bool) {
        let still = match input {
            Input::Tick => true,
            // A job that is gone gives its slots back, for which others wait.
            Input::Prepull(JobInput::Written { outcome, .. }) => *outcome != WriteOutcome::Gone,
            Input::Prepull(JobInput::Job(_)) => !news,
            Input::Fleet(FleetEvent::Session(SessionEvent::Message { message, .. })) => {
                matches!(message, EdgeMessage::Accepted { .. })
            }
            Input::Prepull(JobInput::Dispatched { outcome, .. }) => {
                matches!(outcome, DispatchOutcome::Sent(_) | DispatchOutcome::SentWithoutKeys(_))
            }
            _ => false,
        };
        self.stirred += u64::from(!still);
    }

    pub(crate) fn watched(&mut self, event: Watched) {
        // A watch begins with the list.
        match event {
            Watched::Job(_) | Watched::JobGone(_) if matches!(self.boot, Boot::Recalls | Boot::Up) => {
                self.watches[0].push_back(event);
            }
            Watched::Node(_) | Watched::NodeGone(_) if self.boot != Boot::Nodes => {
                self.watches[1].push_back(event);
            }
            _ => {}
        }
    }

    /// Delivers one event of a watch. Returns whether there was one.
    pub(crate) fn read_watch(&mut self, kind: usize) -> bool {
        let Some(event) = self.watches[kind].pop_front() else { return false };
        self.inputs.push_back(match event {
            Watched::Job(job) => JobInput::Job(job).into(),
            Watched::JobGone(uid) => JobInput::JobGone(uid).into(),
            Watched::Node(node) => FleetEvent::Node(node).into(),
            Watched::NodeGone(name) => FleetEvent::NodeGone(name).into(),
        });
        true
    }
}

impl World {
    /// Gives the controller up to this many of the inputs that wait for it, and begins what follows from them.
    pub(crate) fn run_cloud(&mut self, inputs: usize) {
        match self.cloud.boot {
            Boot::Nodes => {
                let nodes = self.api.nodes.values().cloned().collect();
                self.give(FleetEvent::Nodes(nodes));
                self.flush();
                self.cloud.boot = Boot::Jobs;
            }
            Boot::Jobs => {
                self.api.overtaken.clear();
                self.api.overtaken_runs.clear();
                self.give(JobInput::Jobs(self.api.list()));
                self.flush();
                self.cloud.boot = Boot::Recalls;
                self.come_up();
            }
            Boot::Recalls | Boot::Up => {
                for _ in 0..inputs {
                    let Some(input) = self.cloud.inputs.pop_front() else { break };
                    self.give(input);
                }
                self.go_on_reading();
                self.give(Input::Tick);
                self.flush();
                self.come_up();
            }
        }
    }

    /// Sessions begin once all jobs are known that go on.
    fn come_up(&mut self) {
        if self.cloud.boot == Boot::Recalls && !self.cloud.controller.is_loading() {
            self.cloud.boot = Boot::Up;
            self.log(|| "cloud: up".to_owned());
        }
    }

    /// Reads the next job, or the reports of the one that was read last.
    fn go_on_reading(&mut self) {
        let Some(recall) = self.cloud.recalls.front_mut() else { return };
        let job = recall.job.clone();
        if !recall.is_read {
            self.api.overtaken_runs.remove(&job);
            (recall.is_read, recall.object) = (true, self.api.read(&job));
            return;
        }
        let reports = self.api.read_reports(&job);
        self.api.overtaken.retain(|(of, _), _| *of != job);
        let Some(Recall { object, newest, .. }) = self.cloud.recalls.pop_front() else { return };
        let newest = newest.filter(|_| object.is_some());
        self.give(JobInput::Recalled(job, reports, object));
        if let Some(newest) = newest {
            self.tell_of(newest, false);
        }
    }

    /// Whether the leader has read the object.
    fn has_read(&self, job: &JobUid, object: StatusOrReport) -> bool {
        let recall = self.cloud.recalls.iter().find(|recall| recall.job == *job);
        let is_read = recall.is_none_or(|recall| object == StatusOrReport::Status && recall.is_read);
        is_read && matches!(self.cloud.boot, Boot::Recalls | Boot::Up)
    }

    fn give(&mut self, input: impl Into<Input>) {
        let mut input = input.into();
        if !matches!(input, Input::Tick) {
            self.log(|| format!("cloud ◀ {}", brief(&input)));
        }
        let news = self.tell_check(&input);
        match &mut input {
            Input::Prepull(JobInput::Job(job)) => drop_unread_fields(job, at(self.now)),
            Input::Prepull(JobInput::Jobs(jobs)) => {
                for job in jobs {
                    drop_unread_fields(job, at(self.now));
                }
            }
            _ => {}
        }
        self.cloud.stir(&input, news);
        match input {
            Input::Fleet(event) => self.cloud.controller.note_fleet_event(event, at(self.now)),
            Input::Prepull(input) => self.cloud.controller.handle(input, at(self.now)),
            _ => {}
        }
    }

    /// Notes what the controller gets to know. Returns whether a spec in it is new.
    fn tell_check(&mut self, input: &Input) -> bool {
        let loads = self.cloud.boot == Boot::Jobs || matches!(input, Input::Prepull(JobInput::Recalled(..)));
        let mut news = false;
        for seen in jobs(input) {
            news |= self.tell_of(seen, loads);
        }
        match input {
            Input::Fleet(FleetEvent::Nodes(nodes)) => {
                let listed = nodes.iter().map(|node| node.name.clone()).collect();
                let before = std::mem::replace(&mut self.cloud.nodes, listed);
                self.cloud.nodes_gone.extend(before);
                self.check.may_exceed_again();
            }
            Input::Fleet(FleetEvent::Node(node)) => {
                self.cloud.nodes.insert(node.name.clone());
                self.check.may_exceed_again();
            }
            Input::Fleet(FleetEvent::NodeGone(node)) => {
                self.cloud.nodes.remove(node);
                self.cloud.nodes_gone.insert(node.clone());
                self.check.may_exceed_again();
            }
            Input::Prepull(JobInput::ReportGone { job, index }) if !self.is_kept(job) => {
                // The leader does not have the job in memory any more, so what was in the report is lost.
                self.api.deleted_reports.remove(&(job.clone(), *index));
                self.delete_job(job);
            }
            Input::Fleet(FleetEvent::Session(SessionEvent::Message {
                message: EdgeMessage::Result(_),
                ..
            })) => {
                self.check.may_exceed_again();
            }
            _ => {}
        }
        news
    }

    /// Notes a job that the controller gets to know. Returns whether its spec is new.
    fn tell_of(&mut self, seen: Seen, loads: bool) -> bool {
        let recall = self.cloud.recalls.iter_mut().find(|recall| recall.job == seen.job);
        if let Some(recall) = recall.filter(|_| !loads) {
            // It counts once the job is read.
            recall.newest = Some(seen);
            return true;
        }
        let Seen { job, status, generation, spec } = seen;
        let known = self.cloud.generations.entry(job.clone()).or_insert(generation);
        if !loads && generation < *known {
            // The watch is behind.
            return false;
        }
        *known = generation;
        let loaded = loads.then(|| status.unwrap_or_default());
        self.check.delivered(&job, generation, spec, loaded.as_ref(), self.now)
    }

    fn flush(&mut self) {
        let before = self.cloud.stirred;
        for action in self.cloud.controller.flush(at(self.now)) {
            self.act(action);
        }
        self.cloud.nodes_gone.clear();
        self.check.flushed();
        // A write of this flush may still be made before that.
        self.cloud.stirred += u64::from(self.cloud.stirred != before);
        let due = self.cloud.controller.next_wakeup();
        assert!(
            due.is_none_or(|due| due > at(self.now)),
            "busy: after a flush at {} {due:?} is due",
            self.now
        );
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Event(event) => {
                // A change of one job may make another one wait for a moment.
                self.cloud.stirred += 1;
                self.log(|| format!("  event {} {}", event.reason, event.note));
                let known = self.cloud.nodes.union(&self.cloud.nodes_gone).cloned().collect();
                self.check.announced(&known, &event, self.now);
            }
            Action::Send(node, message) => {
                self.log(|| format!("  send {node} {}", told(&message)));
                if let CloudMessage::Cancel { task, .. } = &message {
                    self.check.cancelled(&node, task);
                }
                self.send(&node, message);
            }
            Action::Dispatch(order) => {
                self.log(|| format!("  dispatch {}/{} to {}", order.job.uid, order.attempt, order.node));
                self.check.dispatched(&self.api, &order);
                self.cloud.dispatches.push((order, self.now));
            }
            Action::Write { job, version, replaces, content, .. } => {
                self.log(|| format!("  write {job} {}", shown(&content)));
                let object = content.object();
                let under_way = |write: &Write| write.job == job && write.content.object() == object;
                assert!(
                    !self.cloud.writes.iter().any(under_way),
                    "two writes of {object:?} of {job} at a time"
                );
                self.check.emitted(&job, &content, self.now);
                let expected = replaces.and_then(|version| version.parse().ok());
                let stirred = self.cloud.stirred;
                self.cloud.writes.push(Write { job, version, expected, content, stirred });
            }
            Action::Delete { job, generation, .. } => {
                self.log(|| format!("  delete {job}"));
                self.check.expires(&self.api, &job, self.now);
                self.cloud.deletes.push((job, generation));
            }
            Action::Forget(_) => {}
            Action::Recall { job, .. } => {
                self.cloud.recalls.push_back(Recall { job, is_read: false, object: None, newest: None });
            }
        }
    }

    /// Ends one write.
    pub(crate) fn finish_write(&mut self, which: usize, fate: Fate) {
        if which >= self.cloud.writes.len() {
            return;
        }
        let Write { job, version, expected, content, stirred } = self.cloud.writes.remove(which);
        let (object, key) = (content.object(), (job.clone(), content.object()));
        let mut edited = None;
        let (outcome, stored) = if fate == Fate::Lost || self.is_refused(object) {
            self.cloud.wrote.remove(&key);
            (WriteOutcome::Failed, None)
        } else {
            let mut landed = self.land(&job, expected, &content, false);
            if landed == Err(Refused::Conflict) {
                // The writer reads the current version, and makes the write once more.
                let current = self.api.version(&key);
                let generation = |job: &JobObject| rest_of(job).metadata.generation;
                if let Content::Status(status) = &content {
                    edited = self.api.read(&job);
                    edited = edited.filter(|job| generation(job) != status.observed_generation);
                }
                landed = self.land(&job, current, &content, false);
            }
            match landed {
                Ok(version) if fate == Fate::Answered => {
                    if let Content::Status(status) = &content {
                        self.check.confirm_run(&job, status);
                    }
                    let now = (content, stirred);
                    let known = self.cloud.wrote.get(&key);
                    assert!(known != Some(&now), "written although nothing changed: {job} {object:?}");
                    self.cloud.wrote.insert(key, now);
                    (WriteOutcome::Done, Some(version.to_string()))
                }
                Ok(_) => {
                    self.cloud.wrote.remove(&key);
                    (WriteOutcome::Failed, None)
                }
                Err(Refused::Gone) => (WriteOutcome::Gone, None),
                Err(Refused::Conflict) => unreachable!("made once more"),
            }
        };
        self.log(|| format!("api: {object:?} of {job}: {fate:?}, {outcome:?}"));
        self.cloud.push(JobInput::Written { job, object, version, outcome, stored });
        self.cloud.inputs.extend(edited.map(|job| JobInput::Job(job).into()));
    }

    /// Whether the API server refuses writes of such objects at the moment.
    fn is_refused(&self, object: StatusOrReport) -> bool {
        !self.calm && self.now < self.reports_refused_until && matches!(object, StatusOrReport::Report(_))
    }

    /// The API server makes a write, or refuses it. `ghost`: a killed cloudcore had sent it.
    pub(crate) fn land(
        &mut self,
        job: &JobUid,
        expected: Option<u64>,
        content: &Content,
        ghost: bool,
    ) -> Result<u64, Refused> {
        let before = match content {
            Content::Report(report) => Some(self.known_report(job, report.index)),
            Content::Status(_) => None,
        };
        let run = self.api.first_attempt(job);
        let version = self.api.write(job, expected, content)?;
        // Without this write.
        let read = self.has_read(job, content.object());
        if let (StatusOrReport::Report(index), Some(before)) =
            (content.object(), before.filter(|_| ghost && read))
        {
            self.api.overtaken.insert((job.clone(), index), before);
        }
        if ghost && read && content.object() == StatusOrReport::Status {
            self.api.overtaken_runs.insert(job.clone(), run);
        }
        self.check.landed(&self.api, job, content, ghost && read);
        if content.object() == StatusOrReport::Status
            && let Some(object) = self.api.read(job)
        {
            self.cloud.watched(Watched::Job(object));
        }
        Ok(version)
    }

    /// What the leader knows of a report.
    fn known_report(&self, job: &JobUid, index: u32) -> Option<ReportBody> {
        let key = (job.clone(), index);
        let overtaken = self.api.overtaken.get(&key).cloned();
        overtaken.unwrap_or_else(|| self.api.reports.get(&key).map(|stored| stored.object.clone()))
    }

    /// Ends one dispatch. One with an unreadable secret ends after some seconds.
    pub(crate) fn finish_dispatch(&mut self, which: usize, fate: DispatchFate) {
        let Some((order, begun)) = self.cloud.dispatches.get(which) else { return };
        let hangs = self.secrets_hang_until.get(&order.job.uid).is_some_and(|until| self.now < *until);
        let fate = if hangs && !self.calm { DispatchFate::Postponed } else { fate };
        // A look needs no secret, nor does a removal.
        let needs_secret = !order.only_look && order.plan.removal.is_none();
        let hangs = hangs && needs_secret;
        if hangs && !self.calm && self.now - begun < SECRET_TRIED_FOR {
            return;
        }
        let (order, begun) = self.cloud.dispatches.remove(which);
        let is_too_old = order.plan.removal.is_some() && self.is_too_old(&order.node);
        let (job, node, attempt) = (order.job.uid.clone(), order.node.clone(), order.attempt);
        let fate = if !needs_secret && fate == DispatchFate::Postponed { DispatchFate::Sent } else { fate };
        let outcome = if is_too_old {
            self.check.too_old(&node, &job, attempt);
            DispatchOutcome::TooOld("its edgecore-prepull is too old to remove images".to_owned())
        } else if fate == DispatchFate::Unsendable {
            self.check.unsendable(&node, &job, attempt);
            DispatchOutcome::Unsendable("the task is too large".to_owned())
        } else if fate == DispatchFate::Postponed && order.asks_first && !self.now.is_multiple_of(3) {
            let key = PullKey::Unavailable { reason: "its owner has not allowed this".to_owned() };
            let assign = assign(&order, &key, order.remaining);
            let task = assign.task.clone();
            let session = self.send(&node, CloudMessage::Assign(assign));
            if session.is_some() {
                self.check.sent(&node, &task);
            }
            session.map_or(DispatchOutcome::Offline, DispatchOutcome::SentWithoutKeys)
        } else if fate == DispatchFate::Postponed {
            // Where no time is left to wait, that is a failure.
            self.check.postponed(&node, &job, attempt);
            // The hour decides, so that no seed leads elsewhere by that.
            if order.may_wait && self.now.is_multiple_of(2) {
                let secrets = vec!["default/registry".to_owned()];
                DispatchOutcome::Withheld { secrets, reason: "its owner has not allowed this".to_owned() }
            } else {
                DispatchOutcome::Postponed("the secret cannot be read".to_owned())
            }
        } else {
            let elapsed = Duration::from_millis(self.now - begun);
            let assign = assign(&order, &PullKey::anonymous(), order.remaining.saturating_sub(elapsed));
            let task = assign.task.clone();
            let looks = task.images.iter().all(|image| image.policy == PullPolicy::Never);
            let waits = !assign.download.windows.is_empty();
            assert!(!order.only_look || looks && !waits, "{} for {node} should only look", task.id);
            let session = self.send(&node, CloudMessage::Assign(assign));
            if session.is_some() {
                self.check.sent(&node, &task);
            }
            session.map_or(DispatchOutcome::Offline, DispatchOutcome::Sent)
        };
        self.log(|| format!("cloud: dispatch of {job}/{attempt} to {node}: {outcome:?}"));
        let is_allowed_at_once =
            matches!(outcome, DispatchOutcome::Withheld { .. }) && self.now.is_multiple_of(3);
        self.cloud.push(JobInput::Dispatched { job: job.clone(), node, attempt, outcome, keys: None });
        if is_allowed_at_once {
            let secret = "default/registry".to_owned();
            self.cloud.push(JobInput::SecretAllowed { job, secret });
        }
    }

    /// Whether the node has a session with an agent that doesn't know removals.
    fn is_too_old(&self, node: &NodeName) -> bool {
        let conn = self.cloud.registry.get(node).and_then(|id| self.conns.get(id));
        conn.is_some_and(|conn| !conn.removes)
    }

    /// Sends a message in the node's session, as the registry does: whether or not the link still works.
    fn send(&mut self, node: &NodeName, message: CloudMessage) -> Option<SessionId> {
        let conn = self.conns.get_mut(self.cloud.registry.get(node)?)?;
        if !conn.cut {
            conn.to_edge.push_back(message);
        }
        Some(conn.session)
    }

    /// Kills cloudcore and restarts it. Its writes that were under way may still reach the API server.
    pub(crate) fn restart_cloud(&mut self) {
        // What was in a deleted report is lost with the leader that knew it: nothing can be said of the job any more.
        let lost: Vec<JobUid> = self.api.lost_reports().cloned().collect();
        for job in &lost {
            self.delete_job(job);
        }
        self.log(|| "cloud: killed".to_owned());
        self.check.killed(&self.api);
        let old = std::mem::replace(&mut self.cloud, Cloud::new(self.report));
        self.ghosts.extend(old.writes);
        self.check.restarted();
        for conn in self.conns.values_mut() {
            (conn.cut, conn.cloud_open) = (true, false);
            conn.to_edge.clear();
            conn.to_cloud.clear();
        }
        self.bury();
    }
}

/// A job in an input.
pub(crate) struct Seen {
    pub(crate) job: JobUid,
    status: Option<ImagePrePullJobStatus>,
    pub(crate) generation: i64,
    /// `None` for a job that cannot be read.
    pub(crate) spec: Option<ImagePrePullJobSpec>,
}

/// The jobs in an input.
pub(crate) fn jobs(input: &Input) -> Vec<Seen> {
    let seen = |object: &JobObject| {
        let metadata = &rest_of(object).metadata;
        Some(Seen {
            job: JobUid(metadata.uid.clone()?),
            status: rest_of(object).status.clone(),
            generation: metadata.generation?,
            spec: object.as_ref().ok().map(|job| job.spec.clone()),
        })
    };
    match input {
        Input::Prepull(JobInput::Job(job) | JobInput::Recalled(_, _, Some(job))) => {
            seen(job).into_iter().collect()
        }
        Input::Prepull(JobInput::Jobs(jobs)) => jobs.iter().filter_map(seen).collect(),
        _ => Vec::new(),
    }
}

/// Builds the message for a task, as the dispatcher does once it has all secrets.
pub(crate) fn assign(order: &Dispatch, key: &PullKey, remaining: Duration) -> Assign {
    let keys = std::iter::repeat(key.clone());
    cloudcore_prepull::edges::dispatch::build_assign(order, keys, None, remaining, false)
}
