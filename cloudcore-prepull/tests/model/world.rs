//! The world: an API server, one cloudcore at a time, edges, and what is on its way between them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use edgecore_prepull::tasks::agent::{AgentEffect, AgentEvent};
use jiff::Timestamp;
use prepull_api::task::{JobUid, NodeName};
use prepull_api::wire::{Assign, CloudMessage, EdgeMessage, Hello, Welcome};
use prepull_engine::prepull::controller::{Action, Input, Object};
use prepull_engine::shared::outcomes::{DispatchOutcome, WriteOutcome};
use prepull_engine::shared::session::{SessionEvent, SessionId};

use crate::api::{Api, Refused};
use crate::check::Check;
use crate::cloud::{self, Boot, Cloud, Watched, Write};
use crate::edge::{Edge, Exec, Record};
use crate::rng::Rng;

/// A connection, from the edge's dial to the moment when both sides know that it is over.
pub(crate) struct Conn {
    pub(crate) edge: usize,
    /// What the edge said, until the cloud has welcomed it.
    pub(crate) hello: Option<Hello>,
    pub(crate) session: SessionId,
    pub(crate) to_edge: VecDeque<CloudMessage>,
    pub(crate) to_cloud: VecDeque<EdgeMessage>,
    /// What the edge was sent last.
    pub(crate) assigned: Option<Assign>,
    /// Nothing gets through any more.
    pub(crate) cut: bool,
    pub(crate) edge_open: bool,
    pub(crate) cloud_open: bool,
}

/// What became of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Answered,
    /// The API server never saw it.
    Lost,
    /// The API server took it, and nobody heard.
    AnswerLost,
}

/// What happens to a dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DispatchFate {
    /// The task goes to the node's session, if there is one.
    Sent,
    /// A secret cannot be read for now.
    Postponed,
    /// The task can never be sent.
    Unsendable,
}

pub(crate) struct World {
    pub(crate) rng: Rng,
    /// Milliseconds since the beginning.
    pub(crate) now: u64,
    pub(crate) base: Instant,
    pub(crate) api: Api,
    pub(crate) cloud: Cloud,
    /// Nodes in a report.
    report: Option<usize>,
    /// Writes of an earlier life that may still land.
    pub(crate) ghosts: Vec<Write>,
    pub(crate) edges: Vec<Edge>,
    pub(crate) conns: BTreeMap<u64, Conn>,
    next_conn: u64,
    pub(crate) check: Check,
    /// Messages may arrive twice.
    pub(crate) duplicates: bool,
    pub(crate) calm: bool,
    trace: Option<VecDeque<String>>,
    pub(crate) names: usize,
    /// Nodes that were deleted at some time.
    pub(crate) deleted: BTreeSet<NodeName>,
    /// What each job began with.
    pub(crate) first_images: BTreeMap<JobUid, Vec<String>>,
}

const TRACE: usize = 80;

impl World {
    pub(crate) fn new(seed: u64, trace: bool) -> Self {
        let mut rng = Rng::new(seed);
        let edges = 1 + rng.below(6);
        let names = 1 + rng.below(3);
        let duplicates = rng.chance(30);
        let report = rng.pick(&[None, Some(1), Some(2), Some(3)]);
        let mut world = Self {
            now: 0,
            base: Instant::now(),
            api: Api::default(),
            cloud: Cloud::new(report),
            report,
            ghosts: Vec::new(),
            edges: Vec::new(),
            conns: BTreeMap::new(),
            next_conn: 0,
            check: Check::new(duplicates),
            duplicates,
            calm: false,
            trace: trace.then(VecDeque::new),
            names,
            deleted: BTreeSet::new(),
            first_images: BTreeMap::new(),
            rng,
        };
        for n in 0..edges {
            let (max_tasks, skew) = (world.rng.pick(&[1, 1, 2]), world.rng.pick(&[0, 0, 300_000]));
            world.edges.push(Edge::new(NodeName(format!("n{n}")), max_tasks, skew));
            world.put_node(n, true, true);
            world.on_edge(n, AgentEvent::Loaded(Vec::new()));
        }
        world
    }

    pub(crate) fn log(&mut self, line: impl FnOnce() -> String) {
        let now = self.now;
        if let Some(trace) = &mut self.trace {
            if trace.len() == TRACE {
                trace.pop_front();
            }
            trace.push_back(format!("{:>5}.{:03}s {}", now / 1000, now % 1000, line()));
        }
    }

    pub(crate) fn traced(&self) -> impl Iterator<Item = &String> {
        self.trace.iter().flatten()
    }

    pub(crate) fn time(&self) -> Timestamp {
        at(self.now)
    }

    // ---- the cloud

    /// The controller takes in some of what waits for it, and what follows is begun.
    pub(crate) fn run_cloud(&mut self, inputs: usize) {
        match self.cloud.boot {
            Boot::Nodes => {
                let nodes = self.api.nodes.values().cloned().collect();
                self.give(Input::Nodes(nodes));
                self.flush();
                self.cloud.boot = Boot::Reports;
            }
            Boot::Reports => {
                for ((job, index), stored) in &self.api.reports {
                    self.cloud.versions.insert((job.clone(), Object::Report(*index)), stored.version);
                }
                let reports = self.api.list_reports();
                self.give(Input::Reports(reports));
                self.cloud.boot = Boot::Jobs;
            }
            Boot::Jobs => {
                self.give(Input::Jobs(self.api.list()));
                self.flush();
                self.cloud.boot = Boot::Up;
                self.log(|| "cloud: up".to_owned());
            }
            Boot::Up => {
                for _ in 0..inputs {
                    let Some(input) = self.cloud.inputs.pop_front() else { break };
                    self.give(input);
                }
                self.give(Input::Tick);
                self.flush();
            }
        }
    }

    fn give(&mut self, input: Input) {
        if !matches!(input, Input::Tick) {
            self.log(|| format!("cloud ◀ {}", brief(&input)));
        }
        let mut news = false;
        for (job, version, generation, spec) in cloud::jobs(&input) {
            // The version that the first write of a status is to replace.
            self.cloud.versions.entry((job.clone(), Object::Status)).or_insert(version);
            news |= self.check.delivered(&job, generation, spec, self.now);
        }
        self.cloud.stir(&input, news);
        self.cloud.controller.handle(input, at(self.now));
    }

    fn flush(&mut self) {
        let before = self.cloud.stirred;
        for action in self.cloud.controller.flush(at(self.now)) {
            self.act(action);
        }
        // Also after a write of the same flush.
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
                // What happens to one job may hold another one up for a moment.
                self.cloud.stirred += 1;
                self.log(|| format!("  event {} {}", event.reason, event.note));
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
                Check::dispatched(&self.api, &order);
                self.cloud.dispatches.push((order, self.now));
            }
            Action::Write { job, version, content, .. } => {
                self.log(|| format!("  write {job} {}", shown(&content)));
                let object = content.object();
                let under_way = |write: &Write| write.job == job && write.content.object() == object;
                assert!(
                    !self.cloud.writes.iter().any(under_way),
                    "two writes of {object:?} of {job} at a time"
                );
                self.check.emitted(&job, &content, self.now);
                let expected = self.cloud.versions.get(&(job.clone(), object)).copied();
                let stirred = self.cloud.stirred;
                self.cloud.writes.push(Write { job, version, expected, content, stirred });
            }
            Action::Delete { job, .. } => {
                self.log(|| format!("  delete {job}"));
                self.check.expires(&self.api, &job, self.now);
                self.cloud.deletes.push(job);
            }
            Action::Forget(job) => self.cloud.versions.retain(|(known, _), _| *known != job),
            Action::Recall { job, .. } => {
                let of_job = |report: &prepull_api::crd::report::ImagePrePullReport| {
                    report.metadata.owner_references.iter().flatten().any(|owner| owner.uid == job.0)
                };
                let reports: Vec<_> = self.api.list_reports().into_iter().filter(of_job).collect();
                for report in &reports {
                    let key = (job.clone(), Object::Report(report.body.index));
                    if let Some(version) = self.api.version(&key) {
                        self.cloud.versions.insert(key, version);
                    }
                }
                let object = self.api.read(&job).map(Ok);
                self.give(Input::Recalled(job, reports, object));
            }
        }
    }

    /// One write comes to its end.
    pub(crate) fn finish_write(&mut self, which: usize, fate: Fate) {
        if which >= self.cloud.writes.len() {
            return;
        }
        let Write { job, version, expected, content, stirred } = self.cloud.writes.remove(which);
        let (object, key) = (content.object(), (job.clone(), content.object()));
        let outcome = if fate == Fate::Lost {
            self.cloud.wrote.remove(&key);
            WriteOutcome::Failed
        } else {
            let mut landed = self.land(&job, expected, &content, false);
            if landed == Err(Refused::Conflict) {
                // The writer reads which version there is, and makes the write once more.
                let current = self.api.version(&key);
                landed = self.land(&job, current, &content, false);
            }
            match landed {
                Ok(version) if fate == Fate::Answered => {
                    let now = (content, stirred);
                    let known = self.cloud.wrote.get(&key);
                    assert!(known != Some(&now), "written although nothing changed: {job} {object:?}");
                    self.cloud.versions.insert(key.clone(), version);
                    self.cloud.wrote.insert(key, now);
                    WriteOutcome::Done
                }
                Ok(_) => {
                    self.cloud.wrote.remove(&key);
                    WriteOutcome::Failed
                }
                Err(Refused::Gone) => {
                    self.cloud.versions.retain(|(known, _), _| *known != job);
                    WriteOutcome::Gone
                }
                Err(Refused::Conflict) => unreachable!("made once more"),
            }
        };
        self.log(|| format!("api: {object:?} of {job}: {fate:?}, {outcome:?}"));
        self.cloud.inputs.push_back(Input::Written { job, object, version, outcome });
    }

    /// The API server takes a write, or does not.
    pub(crate) fn land(
        &mut self,
        job: &JobUid,
        expected: Option<u64>,
        content: &prepull_engine::prepull::controller::Content,
        ghost: bool,
    ) -> Result<u64, Refused> {
        let version = self.api.write(job, expected, content)?;
        // What the leader read before it could not see.
        let read = match content.object() {
            Object::Status => self.cloud.boot == Boot::Up,
            Object::Report(_) => matches!(self.cloud.boot, Boot::Jobs | Boot::Up),
        };
        self.check.landed(&self.api, job, content, ghost && read, self.now);
        if content.object() == Object::Status
            && let Some(object) = self.api.read(job)
        {
            self.cloud.watched(Watched::Job(Ok(object)));
        }
        Ok(version)
    }

    /// The keys of a dispatch are there, or will never be.
    pub(crate) fn finish_dispatch(&mut self, which: usize, fate: DispatchFate) {
        if which >= self.cloud.dispatches.len() {
            return;
        }
        let (order, begun) = self.cloud.dispatches.remove(which);
        let (job, node, attempt) = (order.job.uid.clone(), order.node.clone(), order.attempt);
        let outcome = if fate == DispatchFate::Unsendable {
            self.check.unsendable(&node, &job, attempt);
            DispatchOutcome::Unsendable("the task is too large".to_owned())
        } else if fate == DispatchFate::Postponed {
            // Where no time is left to wait, that is a failure.
            self.check.unsendable(&node, &job, attempt);
            self.check.unreached(&node, &job, attempt, self.now);
            DispatchOutcome::Postponed("the secret cannot be read".to_owned())
        } else {
            let elapsed = Duration::from_millis(self.now - begun);
            let assign = cloud::assign(&order, order.remaining.saturating_sub(elapsed));
            let session = self.send(&node, CloudMessage::Assign(assign));
            if session.is_none() {
                self.check.unreached(&node, &job, attempt, self.now);
            }
            session.map_or(DispatchOutcome::Offline, DispatchOutcome::Sent)
        };
        self.log(|| format!("cloud: dispatch of {job}/{attempt} to {node}: {outcome:?}"));
        self.cloud.inputs.push_back(Input::Dispatched { job, node, attempt, outcome });
    }

    /// As the registry does: into the node's session, whether or not that still leads anywhere.
    fn send(&mut self, node: &NodeName, message: CloudMessage) -> Option<SessionId> {
        let conn = self.conns.get_mut(self.cloud.registry.get(node)?)?;
        if !conn.cut {
            conn.to_edge.push_back(message);
        }
        Some(conn.session)
    }

    /// Killed, and started anew. What was being written may still land.
    pub(crate) fn restart_cloud(&mut self) {
        self.log(|| "cloud: killed".to_owned());
        let old = std::mem::replace(&mut self.cloud, Cloud::new(self.report));
        self.ghosts.extend(old.writes);
        for conn in self.conns.values_mut() {
            (conn.cut, conn.cloud_open) = (true, false);
            conn.to_edge.clear();
            conn.to_cloud.clear();
        }
        self.bury();
    }

    // ---- connections

    pub(crate) fn dial(&mut self, edge: usize) {
        if self.edges[edge].conn.is_some() {
            return;
        }
        self.next_conn += 1;
        let hello = Hello {
            max_tasks: Some(self.edges[edge].max_tasks),
            open: self.edges[edge].agent.open_tasks(),
            ..Hello::default()
        };
        self.log(|| {
            format!(
                "n{edge}: dials, open {:?}",
                hello.open.iter().map(|o| (o.task.to_string(), o.phase)).collect::<Vec<_>>()
            )
        });
        let conn = Conn {
            edge,
            hello: Some(hello),
            session: SessionId(0),
            to_edge: VecDeque::new(),
            to_cloud: VecDeque::new(),
            assigned: None,
            cut: false,
            edge_open: true,
            cloud_open: true,
        };
        self.conns.insert(self.next_conn, conn);
        self.edges[edge].conn = Some(self.next_conn);
    }

    /// The cloud welcomes a session, which replaces an earlier one of the node.
    pub(crate) fn welcome(&mut self, id: u64) {
        if self.cloud.boot != Boot::Up {
            return;
        }
        let Some(conn) = self.conns.get_mut(&id).filter(|conn| !conn.cut) else { return };
        let Some(hello) = conn.hello.take() else { return };
        self.cloud.sessions += 1;
        conn.session = SessionId(self.cloud.sessions);
        let (session, node) = (conn.session, self.edges[conn.edge].node.clone());
        conn.to_edge.push_back(CloudMessage::Welcome(Welcome {
            session: session.to_string(),
            heartbeat: Duration::from_secs(15),
            progress_interval: Duration::from_secs(1),
        }));
        self.cloud.registry.insert(node.clone(), id);
        self.log(|| format!("cloud: welcomes {node} as session {session}"));
        self.cloud.inputs.push_back(Input::Session(SessionEvent::Up { node, session, hello }));
    }

    pub(crate) fn cut(&mut self, id: u64) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.cut = true;
        conn.to_edge.clear();
        conn.to_cloud.clear();
        let edge = conn.edge;
        self.log(|| format!("net: session of n{edge} is cut"));
    }

    /// One side of a connection that leads nowhere finds out.
    pub(crate) fn notice(&mut self, id: u64, edge_side: bool) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let edge = conn.edge;
        let node = self.edges[edge].node.clone();
        let replaced = conn.hello.is_none() && self.cloud.registry.get(&node) != Some(&id);
        let over = conn.cut || !conn.edge_open || !conn.cloud_open || replaced;
        if !over {
            return;
        }
        if edge_side && conn.edge_open {
            conn.edge_open = false;
            self.edges[edge].conn = None;
            self.log(|| format!("n{edge}: disconnected"));
            self.on_edge(edge, AgentEvent::Disconnected);
        } else if !edge_side && conn.cloud_open {
            conn.cloud_open = false;
            if conn.hello.is_none() {
                let session = conn.session;
                if !replaced {
                    self.cloud.registry.remove(&node);
                }
                self.cloud.inputs.push_back(Input::Session(SessionEvent::Down { node, session }));
            }
        }
        self.bury();
    }

    fn bury(&mut self) {
        self.conns.retain(|_, conn| conn.edge_open || conn.cloud_open);
    }

    pub(crate) fn reach_cloud(&mut self, id: u64) -> bool {
        let again = self.duplicates && !self.calm && self.rng.chance(10);
        let Some(conn) = self.conns.get_mut(&id) else { return false };
        if conn.hello.is_some() || !conn.cloud_open {
            return false;
        }
        let Some(message) = conn.to_cloud.pop_front() else { return false };
        if again {
            conn.to_cloud.push_back(message.clone());
        }
        let (node, session) = (self.edges[conn.edge].node.clone(), conn.session);
        self.cloud.inputs.push_back(Input::Session(SessionEvent::Message { node, session, message }));
        true
    }

    pub(crate) fn reach_edge(&mut self, id: u64) -> bool {
        let again = self.duplicates && !self.calm && self.rng.chance(10);
        let Some(conn) = self.conns.get_mut(&id) else { return false };
        if !conn.edge_open {
            return false;
        }
        let Some(message) = conn.to_edge.pop_front() else { return false };
        if again && !matches!(message, CloudMessage::Welcome(_)) {
            conn.to_edge.push_back(message.clone());
        }
        if let CloudMessage::Assign(assign) = &message {
            conn.assigned = Some(assign.clone());
        }
        let edge = conn.edge;
        self.log(|| format!("n{edge} ◀ {}", told(&message)));
        self.on_edge(
            edge,
            match message {
                CloudMessage::Welcome(_) => AgentEvent::Connected,
                CloudMessage::Assign(assign) => AgentEvent::Assign(assign),
                CloudMessage::ResultAck { task } => AgentEvent::ResultAck(task),
                CloudMessage::Cancel { task, reason } => AgentEvent::Cancel { task, reason },
                CloudMessage::Goaway { .. } => return true,
            },
        );
        true
    }

    // ---- edges

    pub(crate) fn on_edge(&mut self, at: usize, event: AgentEvent) {
        let acked = matches!(event, AgentEvent::ResultAck(_));
        let edge = &mut self.edges[at];
        let now = edge.now(self.base, self.now);
        for effect in edge.agent.handle(event, now) {
            self.perform(at, effect, acked);
        }
    }

    fn perform(&mut self, at: usize, effect: AgentEffect, acked: bool) {
        let edge = &mut self.edges[at];
        match effect {
            AgentEffect::Persist(record) => {
                let same = |write: &Record| matches!(write, Record::Save(other) if other.id() == record.id());
                assert!(!edge.writes.iter().any(same), "two writes of a record at a time");
                edge.writes.push_back(Record::Save(record));
            }
            AgentEffect::Forget(task) => {
                if acked {
                    self.check.forgotten(&self.api, edge, &task, self.now);
                } else {
                    let removed = |write: &Record| matches!(write, Record::Remove(other) if *other == task);
                    let stored = edge.disk.contains_key(&task) && !edge.writes.iter().any(removed);
                    assert!(!stored, "(2) {} forgets {task}, which nobody acknowledged", edge.node);
                    edge.refused.insert(task.clone());
                }
                edge.writes.push_back(Record::Remove(task));
            }
            AgentEffect::Start(work) => {
                let task = work.task.id.clone();
                self.check.started(&self.api, edge, &work, self.now);
                let exec = Exec { checked: false, stop: None, pulling: None, work };
                assert!(edge.execs.insert(task.clone(), exec).is_none(), "two executors for {task}");
                self.log(|| format!("n{at}: begins {task}"));
            }
            AgentEffect::Renew(task, terms) => {
                edge.execs.get_mut(&task).expect("an executor to renew").work.terms = terms;
            }
            AgentEffect::Stop { task, reason } => {
                edge.execs.get_mut(&task).expect("an executor to stop").stop = Some(reason);
            }
            AgentEffect::Send(message) => {
                self.check.said(edge, &message);
                let conn = edge.conn.and_then(|id| self.conns.get_mut(&id)).expect("sent into the void");
                if !conn.cut {
                    conn.to_cloud.push_back(message.clone());
                }
                self.log(|| format!("n{at} ▶ {}", said(&message)));
            }
        }
    }

    /// The first write of the ledger is done, or fails.
    pub(crate) fn write_record(&mut self, at: usize, works: bool) -> bool {
        let edge = &mut self.edges[at];
        match edge.writes.front() {
            None => return false,
            Some(Record::Save(_)) if !works => {
                let Some(Record::Save(record)) = edge.writes.pop_front() else { return false };
                let task = record.id().clone();
                self.log(|| format!("n{at}: disk full, {task}"));
                self.on_edge(at, AgentEvent::PersistFailed { task, reason: "disk full".to_owned() });
            }
            Some(_) => {
                if let Some(task) = self.write_only(at) {
                    self.on_edge(at, AgentEvent::Persisted(task));
                }
            }
        }
        true
    }

    fn write_only(&mut self, at: usize) -> Option<prepull_api::task::TaskId> {
        let edge = &mut self.edges[at];
        match edge.writes.pop_front()? {
            Record::Save(record) => {
                let task = record.id().clone();
                edge.disk.insert(task.clone(), *record);
                Some(task)
            }
            Record::Remove(task) => {
                edge.disk.remove(&task);
                None
            }
        }
    }

    /// Killed: of the writes under way so many were done.
    pub(crate) fn restart_edge(&mut self, at: usize, written: usize) {
        self.log(|| format!("n{at}: killed"));
        for _ in 0..written {
            self.write_only(at);
        }
        let edge = &mut self.edges[at];
        if let Some(conn) = edge.conn.and_then(|id| self.conns.get_mut(&id)) {
            (conn.cut, conn.edge_open) = (true, false);
            conn.to_edge.clear();
            conn.to_cloud.clear();
        }
        edge.restart();
        self.check.stopped_all(&edge.node);
        let records = edge.disk.values().cloned().collect();
        self.bury();
        self.on_edge(at, AgentEvent::Loaded(records));
    }
}

pub(crate) fn at(millis: u64) -> Timestamp {
    Timestamp::from_millisecond(1_000_000_000_000 + i64::try_from(millis).unwrap()).unwrap()
}

pub(crate) fn millis(time: Timestamp) -> u64 {
    u64::try_from(time.as_millisecond() - 1_000_000_000_000).unwrap()
}

fn told(message: &CloudMessage) -> String {
    match message {
        CloudMessage::Assign(assign) => format!("Assign {} for {:?}", assign.task.id, assign.remaining),
        CloudMessage::ResultAck { task } => format!("ResultAck {task}"),
        CloudMessage::Cancel { task, reason } => format!("Cancel {task}: {reason}"),
        CloudMessage::Welcome(_) => "Welcome".to_owned(),
        CloudMessage::Goaway { .. } => "Goaway".to_owned(),
    }
}

fn said(message: &EdgeMessage) -> String {
    match message {
        EdgeMessage::Hello(_) => "Hello".to_owned(),
        EdgeMessage::Accepted { task } => format!("Accepted {task}"),
        EdgeMessage::Progress(progress) => format!("Progress {}", progress.task),
        EdgeMessage::Result(result) => {
            format!("Result {} {:?} {}", result.task, result.outcome, result.reason)
        }
    }
}

fn shown(content: &prepull_engine::prepull::controller::Content) -> String {
    use prepull_engine::prepull::controller::Content;
    match content {
        Content::Status(status) => {
            format!("status {:?} {:?} {}", status.phase, status.summary, status.reason)
        }
        Content::Report(report) => {
            let node = |node: &prepull_api::crd::status::NodeStatus| {
                format!("{} {:?}/{}", node.node_name, node.phase, node.attempt)
            };
            format!(
                "report {}: {}",
                report.index,
                report.node_status.iter().map(node).collect::<Vec<_>>().join(", ")
            )
        }
    }
}

fn brief(input: &Input) -> String {
    match input {
        Input::Nodes(nodes) => format!("{} nodes", nodes.len()),
        Input::Node(node) => format!("node {} ready {}", node.name, node.ready),
        Input::NodeGone(node) => format!("node {node} gone"),
        Input::Reports(reports) => format!("{} reports", reports.len()),
        Input::Recalled(job, reports, _) => format!("{} reports of {job}", reports.len()),
        Input::Jobs(jobs) => format!("{} jobs", jobs.len()),
        Input::Job(Ok(job)) => format!(
            "job {} generation {}",
            job.metadata.uid.as_deref().unwrap_or_default(),
            job.metadata.generation.unwrap_or_default()
        ),
        Input::Job(Err(job)) => format!("unreadable job {:?}", job.rest.metadata.uid),
        Input::JobGone(job) => format!("job {job} gone"),
        Input::Session(SessionEvent::Up { node, session, .. }) => format!("{node} up, session {session}"),
        Input::Session(SessionEvent::Down { node, session }) => format!("{node} down, session {session}"),
        Input::Session(SessionEvent::Message { node, session, message }) => {
            format!("{node} (session {session}) says {}", said(message))
        }
        Input::Dispatched { job, node, attempt, outcome } => {
            format!("dispatched {job}/{attempt} to {node}: {outcome:?}")
        }
        Input::Written { job, object, version, outcome } => {
            format!("written {object:?} of {job} v{version}: {outcome:?}")
        }
        Input::Tick => "tick".to_owned(),
    }
}
