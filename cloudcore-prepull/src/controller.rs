//! All jobs, all nodes, all sessions: what happened goes in, what is to be done comes out. Pure.
//!
//! The order that makes a crash harmless: *write, then act*. A node is recorded as in progress before its task
//! is sent, and a result is recorded before it is acknowledged. So whatever the API server says was never sent
//! was never sent, and whatever an edge has forgotten is in the API server.
//!
//! ```text
//!  Input ─▶ handle ─▶ rollout (per job) ─▶ flush ─▶ Action::Write ─▶ Input::Written ─▶ Action::{Dispatch, Send}
//! ```

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::status::ImagePrePullJobStatus;
use prepull_api::task::{JobUid, NodeName, TaskId};
use prepull_api::wire::{CloudMessage, EdgeMessage, Hello, OpenPhase};

use crate::plan::{NodePlan, NodeView};
use crate::tunnel::{SessionEvent, SessionId};
use crate::validate::ValidatedJob;

mod job;
#[cfg(test)]
mod tests;
mod writes;

use job::Job;

/// What happened.
#[derive(Debug)]
pub enum Input {
    /// All nodes that there are.
    Nodes(Vec<NodeView>),
    /// A node is new or changed.
    Node(NodeView),
    /// A node is gone.
    NodeGone(NodeName),
    /// All jobs that there are.
    Jobs(Vec<JobObject>),
    /// A job is new or changed.
    Job(JobObject),
    /// A job is gone.
    JobGone(JobUid),
    /// A session came, spoke or went.
    Session(SessionEvent),
    /// A dispatch ended.
    Dispatched {
        /// Of this job,
        job: JobUid,
        /// to this node,
        node: NodeName,
        /// the task of this attempt:
        attempt: u32,
        /// how.
        outcome: DispatchOutcome,
    },
    /// A write of a job's status ended.
    Written {
        /// Whose.
        job: JobUid,
        /// As given in [`Action::Write`].
        version: u64,
        /// How.
        outcome: WriteOutcome,
    },
    /// Nothing but time.
    Tick,
}

/// A job as the API server has it, or what is known of one that cannot be read.
pub type JobObject = Result<Box<ImagePrePullJob>, UnreadableJob>;

/// A job object with a field of the wrong kind: written before its definition was, or past it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadableJob {
    /// metadata.uid
    pub uid: JobUid,
    /// metadata.name
    pub name: String,
    /// metadata.generation
    pub generation: i64,
    /// What cannot be read.
    pub error: String,
}

/// How a dispatch ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DispatchOutcome {
    /// Handed to this session.
    Sent(SessionId),
    /// There was no session that would take it.
    Offline,
    /// No session could ever take it.
    Unsendable(String),
}

/// How a write ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WriteOutcome {
    /// The API server has it.
    Done,
    /// The object is gone, or is another one by now.
    Gone,
    /// Not now: to be tried again, with whatever is true then.
    Failed,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Resolve the keys, and send the task.
    Dispatch(Dispatch),
    /// Hand a message to a node's session, if there is one.
    Send(NodeName, CloudMessage),
    /// Write the status of a job. At most one such write per job is under way.
    Write {
        /// Whose.
        job: JobUid,
        /// Its name.
        name: String,
        /// To come back in [`Input::Written`].
        version: u64,
        /// The whole status.
        status: Box<ImagePrePullJobStatus>,
    },
    /// Tell people.
    Event(JobEvent),
}

/// A task that is to go out.
#[derive(Clone, Debug, PartialEq)]
pub struct Dispatch {
    /// Of this job,
    pub job: Arc<ValidatedJob>,
    /// to this node,
    pub node: NodeName,
    /// this attempt,
    pub attempt: u32,
    /// these images,
    pub plan: Arc<NodePlan>,
    /// within this time.
    pub remaining: Duration,
}

/// An event on a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobEvent {
    /// Whose.
    pub job: JobUid,
    /// Its name.
    pub name: String,
    /// Warning rather than Normal.
    pub warning: bool,
    /// One CamelCase word.
    pub reason: &'static str,
    /// One sentence, at most 1,024 bytes (the API server's limit).
    pub note: String,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Controller {
    nodes: BTreeMap<NodeName, NodeView>,
    sessions: HashMap<NodeName, SessionId>,
    jobs: HashMap<JobUid, Job>,
    actions: Vec<Action>,
}

impl Controller {
    /// Takes in what happened. What follows from it comes out of [`Self::flush`], so that a burst of inputs
    /// makes one write.
    pub fn handle(&mut self, input: Input, now: Timestamp) {
        match input {
            Input::Nodes(nodes) => {
                let gone: Vec<NodeName> = {
                    let listed: std::collections::HashSet<&NodeName> =
                        nodes.iter().map(|node| &node.name).collect();
                    self.nodes.keys().filter(|name| !listed.contains(name)).cloned().collect()
                };
                for name in gone {
                    self.node_gone(&name);
                }
                self.nodes.extend(nodes.into_iter().map(|node| (node.name.clone(), node)));
            }
            Input::Node(node) => {
                self.nodes.insert(node.name.clone(), node);
            }
            Input::NodeGone(name) => self.node_gone(&name),
            Input::Jobs(jobs) => {
                let gone: Vec<JobUid> = {
                    let listed: std::collections::HashSet<JobUid> = jobs.iter().map(job::uid_of).collect();
                    self.jobs.keys().filter(|uid| !listed.contains(uid)).cloned().collect()
                };
                for uid in gone {
                    self.job_gone(&uid);
                }
                for job in jobs {
                    self.job(job, now);
                }
            }
            Input::Job(job) => self.job(job, now),
            Input::JobGone(uid) => self.job_gone(&uid),
            Input::Session(event) => self.session(event, now),
            Input::Dispatched { job, node, attempt, outcome } => {
                self.dispatched(&job, &node, attempt, &outcome, now);
            }
            Input::Written { job, version, outcome } => {
                if outcome == WriteOutcome::Gone {
                    self.job_gone(&job);
                } else if let Some(state) = self.jobs.get_mut(&job) {
                    state.written(version, outcome == WriteOutcome::Done, now, &mut self.actions);
                }
            }
            Input::Tick => {}
        }
    }

    /// Lets every job go on as far as it can, and returns what is to be done.
    pub fn flush(&mut self, now: Timestamp) -> Vec<Action> {
        for job in self.jobs.values_mut() {
            job.advance(now, &mut self.actions);
            job.write_if_due(now, &mut self.actions);
        }
        std::mem::take(&mut self.actions)
    }

    /// When [`Self::flush`] is to be called although nothing happened.
    pub fn next_wakeup(&self) -> Option<Timestamp> {
        self.jobs.values().filter_map(Job::next_wakeup).min()
    }

    /// Jobs by phase, for the metrics.
    pub fn phases(&self) -> impl Iterator<Item = prepull_api::crd::status::JobPhase> {
        self.jobs.values().map(Job::phase)
    }

    fn node_gone(&mut self, name: &NodeName) {
        self.nodes.remove(name);
        for job in self.jobs.values_mut() {
            job.node_deleted(name);
        }
    }

    fn job(&mut self, object: JobObject, now: Timestamp) {
        let uid = job::uid_of(&object);
        if matches!(&object, Ok(job) if job.metadata.deletion_timestamp.is_some()) {
            return self.job_gone(&uid);
        }
        if let Some(known) = self.jobs.get_mut(&uid) {
            known.changed(object, &self.nodes, now, &mut self.actions);
        } else {
            self.jobs.insert(uid.clone(), Job::load(object, &self.nodes, now, &mut self.actions));
        }
        if let Some(job) = self.jobs.get_mut(&uid) {
            job.attach_sessions(&self.sessions, now);
        }
    }

    fn job_gone(&mut self, uid: &JobUid) {
        if let Some(job) = self.jobs.remove(uid) {
            for (node, attempt) in job.running() {
                self.actions.push(cancel(&node, TaskId { job: uid.clone(), attempt }, DELETED));
            }
        }
    }

    fn session(&mut self, event: SessionEvent, now: Timestamp) {
        match event {
            SessionEvent::Up { node, session, hello } => self.up(&node, session, &hello, now),
            SessionEvent::Down { node, session } => {
                if self.sessions.get(&node) == Some(&session) {
                    self.sessions.remove(&node);
                    for job in self.jobs.values_mut() {
                        job.offline(&node, session);
                    }
                }
            }
            SessionEvent::Message { node, session: _, message } => self.message(&node, message, now),
        }
    }

    fn up(&mut self, node: &NodeName, session: SessionId, hello: &Hello, now: Timestamp) {
        if self.sessions.get(node).is_some_and(|current| *current > session) {
            return;
        }
        self.sessions.insert(node.clone(), session);
        for (uid, job) in &mut self.jobs {
            // The latest attempt is the one that counts; an earlier one is told to stop below.
            let open =
                hello.open.iter().filter(|open| open.task.job == *uid).max_by_key(|open| open.task.attempt);
            job.online(
                node,
                session,
                open.map(|open| (open.task.attempt, open.phase)),
                now,
                &mut self.actions,
            );
        }
        for open in hello.open.iter().filter(|open| open.phase != OpenPhase::Finished) {
            let job = self.jobs.get(&open.task.job);
            if !job.is_some_and(|job| job.wants(node, open.task.attempt)) {
                let reason = if job.is_some() { OVER } else { DELETED };
                self.actions.push(cancel(node, open.task.clone(), reason));
            }
        }
    }

    fn message(&mut self, node: &NodeName, message: EdgeMessage, now: Timestamp) {
        match message {
            // The session layer takes the Hello and refuses a second one.
            EdgeMessage::Hello(_) => {}
            EdgeMessage::Accepted { task } => match self.jobs.get_mut(&task.job) {
                Some(job) => job.accepted(node, task.attempt),
                None => self.actions.push(cancel(node, task, DELETED)),
            },
            EdgeMessage::Progress(progress) => match self.jobs.get_mut(&progress.task.job) {
                Some(job) => job.progress(node, &progress, now),
                None => self.actions.push(cancel(node, progress.task, DELETED)),
            },
            EdgeMessage::Result(result) => match self.jobs.get_mut(&result.task.job) {
                Some(job) => job.result(node, &result, now, &mut self.actions),
                // Nobody is left to tell.
                None => self
                    .actions
                    .push(Action::Send(node.clone(), CloudMessage::ResultAck { task: result.task })),
            },
        }
    }

    fn dispatched(
        &mut self,
        uid: &JobUid,
        node: &NodeName,
        attempt: u32,
        outcome: &DispatchOutcome,
        now: Timestamp,
    ) {
        match (self.jobs.get_mut(uid), outcome) {
            (Some(job), _) => job.dispatched(node, attempt, outcome, now, &mut self.actions),
            // Deleted while the keys were being resolved.
            (None, DispatchOutcome::Sent(_)) => {
                self.actions.push(cancel(node, TaskId { job: uid.clone(), attempt }, DELETED));
            }
            (None, DispatchOutcome::Offline | DispatchOutcome::Unsendable(_)) => {}
        }
    }
}

const DELETED: &str = "the job was deleted";
const OVER: &str = "the job does not wait for this task any more";

fn cancel(node: &NodeName, task: TaskId, reason: &str) -> Action {
    Action::Send(node.clone(), CloudMessage::Cancel { task, reason: reason.to_owned() })
}
