//! The NodeImages: made for nodes, filled by jobs and by hand, carried out over the tunnel. Pure.
//!
//! ```text
//!  Node ─▶ made, labelled, deleted                       session, free place
//!  Wish ─▶ edit ─▶ spec (written) ─▶ observed ─▶ work: Waiting ──────▶ Sent ─▶ Ended ─▶ status (written) ─▶ ack, News
//!  TTL, owner gone ─▶ edit                              ▲─── lost, restarted ──┘
//! ```
//!
//! The order that makes a crash harmless: only what the API server has in a spec is sent to a node, and a result is
//! acknowledged once the API server has it in the status.

mod edit;
mod held;
mod status;
#[cfg(test)]
mod tests;
mod work;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use prepull_api::crd::kruise::{NodeImage, NodeImageSpec, NodeImageStatus};
use prepull_api::image::NormalizedReference;
use prepull_api::overriders::SecretRef;
use prepull_api::selector::Selector;
use prepull_api::task::{JobUid, NodeName, Task, TaskId};
use prepull_api::wire::{CloudMessage, EdgeMessage};
use serde::{Deserialize, Serialize};

use super::{Liveness, News, Wish};
use crate::shared::delay_queue::DelayQueue;
use crate::shared::events::ObjectEvent;
use crate::shared::node_view::NodeView;
use crate::shared::objects::Unreadable;
use crate::shared::outcomes::DispatchOutcome;
use crate::shared::pacing::TokenBucket;
use crate::shared::session::SessionEvent;
use held::Held;
pub use work::{full_name, is_of_node_image};

/// What happened.
#[derive(Debug, Serialize, Deserialize)]
pub enum Input {
    /// All nodes that there are.
    Nodes(Vec<NodeView>),
    /// A node is new or changed.
    Node(NodeView),
    /// A node is gone.
    NodeGone(NodeName),
    /// All NodeImages that there are.
    NodeImages(Vec<Result<Box<NodeImage>, Unreadable>>),
    /// One is new or changed.
    NodeImage(Result<Box<NodeImage>, Unreadable>),
    /// One is gone.
    NodeImageGone {
        /// metadata.name
        name: NodeName,
        /// metadata.uid
        uid: String,
    },
    /// A session came, spoke of one of our tasks, or went.
    Session(SessionEvent),
    /// A dispatch ended.
    Dispatched {
        /// To this node,
        node: NodeName,
        /// of this task:
        task: TaskId,
        /// how.
        outcome: DispatchOutcome,
    },
    /// A write ended.
    Written(NodeName, Written),
    /// A place on the node is free again.
    Free(NodeName),
    /// A job is over, or gone.
    Liveness(JobUid),
}

/// How a write ended.
#[derive(Debug, Serialize, Deserialize)]
pub enum Written {
    /// It was made; this is the object now, or there is none.
    Done(Option<Box<NodeImage>>),
    /// It was not, for this is the object now, or there is none.
    Refused(Option<Box<NodeImage>>),
    /// Not now: to be tried again, with whatever is true then.
    Failed,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Resolve the key, and send the task.
    Dispatch(Box<Order>),
    /// Hand a message to a node's session, if there is one.
    Send(NodeName, CloudMessage),
    /// Write. At most one write of each NodeImage is under way.
    Write(NodeName, Write),
    /// Tell the jobs.
    News(News),
    /// Tell people.
    Event(ObjectEvent),
}

/// A task that is to go out.
#[derive(Clone, Debug, PartialEq)]
pub struct Order {
    /// To this node,
    pub node: NodeName,
    /// all but the key,
    pub task: Task,
    /// for this reference,
    pub reference: NormalizedReference,
    /// whose key is in one of these,
    pub secrets: Vec<SecretRef>,
    /// within this time.
    pub remaining: Duration,
}

/// What is written of a NodeImage.
#[derive(Clone, Debug, PartialEq)]
pub enum Write {
    /// Make it, empty.
    Create(Arc<BTreeMap<String, String>>),
    /// Delete it, and no other one of its name.
    Delete {
        /// metadata.uid
        uid: String,
    },
    /// Replace labels and spec of this version.
    Spec {
        /// metadata.uid
        uid: String,
        /// metadata.resourceVersion
        version: String,
        /// All labels.
        labels: Arc<BTreeMap<String, String>>,
        /// The whole spec.
        spec: Box<NodeImageSpec>,
    },
    /// Replace the status of this version.
    Status {
        /// metadata.uid
        uid: String,
        /// metadata.resourceVersion
        version: String,
        /// The whole status.
        status: Box<NodeImageStatus>,
    },
}

/// What a settlement is made with.
pub(crate) struct Around<'a> {
    /// The time.
    pub now: Timestamp,
    /// Whether tags stay for the sake of a job.
    pub liveness: &'a dyn Fn(&JobUid) -> Liveness,
    /// Takes a place on the node, if one is free.
    pub take: &'a mut dyn FnMut(&NodeName) -> bool,
}

/// Writes of statuses that tell of nothing but progress, over all nodes: 20 a second. Ten thousand nodes that pull at
/// once must not keep etcd busy with percentages.
fn progress_budget() -> TokenBucket<Timestamp> {
    TokenBucket::new(20.0, 20.0)
}

/// See the module.
#[derive(Debug)]
pub struct NodeImages {
    /// The nodes that get one.
    selector: Selector,
    held: BTreeMap<NodeName, Held>,
    owned: HashMap<JobUid, BTreeSet<NodeName>>,
    dirty: BTreeSet<NodeName>,
    /// When a node is to be looked at again although nothing happened to it.
    wakeups: DelayQueue<NodeName>,
    /// See [`progress_budget`].
    progress_budget: TokenBucket<Timestamp>,
    actions: Vec<Action>,
    moves: Vec<(NodeName, bool)>,
}

impl NodeImages {
    /// For the nodes that the selector selects.
    pub fn new(selector: Selector) -> Self {
        Self {
            selector,
            held: BTreeMap::new(),
            owned: HashMap::new(),
            dirty: BTreeSet::new(),
            wakeups: DelayQueue::default(),
            progress_budget: progress_budget(),
            actions: Vec::new(),
            moves: Vec::new(),
        }
    }

    /// Takes in what happened. What follows from it comes out of [`Self::flush`].
    pub fn handle(&mut self, input: Input, now: Timestamp) {
        match input {
            Input::Nodes(nodes) => {
                let listed: BTreeSet<NodeName> = nodes.iter().map(|node| node.name.clone()).collect();
                let gone =
                    self.held.iter().filter(|(name, held)| held.node.is_some() && !listed.contains(*name));
                let gone: Vec<_> = gone.map(|(name, _)| name.clone()).collect();
                for name in gone {
                    self.node_gone(&name);
                }
                for node in nodes {
                    self.node(node);
                }
            }
            Input::Node(node) => self.node(node),
            Input::NodeGone(name) => self.node_gone(&name),
            Input::NodeImages(objects) => {
                let name = |object: &Result<Box<NodeImage>, Unreadable>| match object {
                    Ok(object) => NodeName(object.metadata.name.clone().unwrap_or_default()),
                    Err(unreadable) => NodeName(unreadable.id.name.clone()),
                };
                let listed: BTreeSet<NodeName> = objects.iter().map(name).collect();
                let gone: Vec<_> = self.held.keys().filter(|name| !listed.contains(name)).cloned().collect();
                for name in gone {
                    self.observe(&name, None);
                }
                for object in objects {
                    self.object(object);
                }
            }
            Input::NodeImage(object) => self.object(object),
            Input::NodeImageGone { name, uid } => {
                if self.held.get(&name).is_some_and(|held| held.is(&uid)) {
                    self.observe(&name, None);
                }
            }
            Input::Session(event) => self.session(event, now),
            Input::Dispatched { node, task, outcome } => {
                self.with(&node, |held, out| held.dispatched(&task, outcome, now, out));
            }
            Input::Written(node, written) => {
                self.with(&node, |held, _| held.written(&written, now));
                match written {
                    Written::Done(object) | Written::Refused(object) => self.observe(&node, object),
                    Written::Failed => {}
                }
            }
            Input::Free(node) => {
                if self.held.get(&node).is_some_and(Held::has_waiting) {
                    self.dirty.insert(node);
                }
            }
            Input::Liveness(job) => {
                self.dirty.extend(self.owned.get(&job).into_iter().flatten().cloned());
            }
        }
    }

    /// A job wants something on a node.
    pub fn ask(&mut self, node: &NodeName, wish: Arc<Wish>, again: bool) {
        self.with(node, |held, _| held.ask(wish, again));
    }

    /// Lets every node go on as far as it can.
    pub fn flush(
        &mut self,
        now: Timestamp,
        liveness: &dyn Fn(&JobUid) -> Liveness,
        take: &mut dyn FnMut(&NodeName) -> bool,
    ) -> Vec<Action> {
        self.dirty.extend(std::iter::from_fn(|| self.wakeups.pop_due(now)));
        let mut around = Around { now, liveness, take };
        for name in std::mem::take(&mut self.dirty) {
            let Some(held) = self.held.get_mut(&name) else { continue };
            let mut out = Out::new(&name, &mut self.actions, &mut self.moves);
            let wakeup = held.settle(&self.selector, &mut self.progress_budget, &mut around, &mut out);
            self.wakeups.set(&name, wakeup);
            if held.is_empty() {
                self.held.remove(&name);
            }
        }
        std::mem::take(&mut self.actions)
    }

    /// Places that were taken (true) or given back on nodes, since this was asked last.
    pub fn take_moves(&mut self) -> Vec<(NodeName, bool)> {
        std::mem::take(&mut self.moves)
    }

    /// When [`Self::flush`] is to be called although nothing happened.
    pub fn next_wakeup(&self) -> Option<Timestamp> {
        self.wakeups.next_due()
    }

    /// Whether every node that is to have a NodeImage has one, or could not get it.
    pub(crate) fn are_made(&self) -> bool {
        !self.held.values().any(|held| held.is_to_be_made(&self.selector) && !held.has_tried())
    }

    fn node(&mut self, node: NodeView) {
        let name = node.name.clone();
        // Of a node that changes nothing but its heartbeat there is nothing to do.
        if self.held.get(&name).and_then(|held| held.node.as_ref()) == Some(&node) {
            return;
        }
        self.held.entry(name.clone()).or_insert_with(|| Held::new(&name)).node = Some(node);
        self.dirty.insert(name);
    }

    fn node_gone(&mut self, name: &NodeName) {
        self.with(name, |held, _| held.node = None);
    }

    fn object(&mut self, object: Result<Box<NodeImage>, Unreadable>) {
        match object {
            Ok(object) => {
                let name = NodeName(object.metadata.name.clone().unwrap_or_default());
                self.observe(&name, Some(object));
            }
            Err(unreadable) => {
                let name = NodeName(unreadable.id.name.clone());
                self.observe(&name, None);
                self.held.entry(name.clone()).or_insert_with(|| Held::new(&name));
                self.with(&name, |held, out| held.unreadable(unreadable, out));
            }
        }
    }

    /// The API server has this now.
    fn observe(&mut self, name: &NodeName, object: Option<Box<NodeImage>>) {
        if object.is_some() {
            self.held.entry(name.clone()).or_insert_with(|| Held::new(name));
        }
        let Some(held) = self.held.get_mut(name) else { return };
        let mut out = Out::new(name, &mut self.actions, &mut self.moves);
        let before = held.owners();
        held.observe(object, &mut out);
        let after = held.owners();
        for gone in before.difference(&after) {
            if let Some(nodes) = self.owned.get_mut(gone) {
                nodes.remove(name);
                if nodes.is_empty() {
                    self.owned.remove(gone);
                }
            }
        }
        for new in after.difference(&before) {
            self.owned.entry(new.clone()).or_default().insert(name.clone());
        }
        self.dirty.insert(name.clone());
    }

    fn with(&mut self, name: &NodeName, act: impl FnOnce(&mut Held, &mut Out<'_>)) {
        let Some(held) = self.held.get_mut(name) else { return };
        act(held, &mut Out::new(name, &mut self.actions, &mut self.moves));
        self.dirty.insert(name.clone());
    }

    fn session(&mut self, event: SessionEvent, now: Timestamp) {
        match event {
            SessionEvent::Up { node, session, hello } => {
                self.held.entry(node.clone()).or_insert_with(|| Held::new(&node));
                self.with(&node, |held, out| held.up(session, &hello.open, now, out));
            }
            SessionEvent::Down { node, session } => self.with(&node, |held, out| held.down(session, out)),
            SessionEvent::Message { node, session: _, message } => match message {
                EdgeMessage::Hello(_) => {}
                EdgeMessage::Accepted { task } => self.with(&node, |held, out| held.accepted(&task, out)),
                EdgeMessage::Progress(progress) => {
                    self.with(&node, |held, out| held.progress(&progress, now, out));
                }
                EdgeMessage::Result(result) => {
                    if self.held.contains_key(&node) {
                        self.with(&node, |held, out| held.result(&result, now, out));
                    } else {
                        let ack = CloudMessage::ResultAck { task: result.task };
                        self.actions.push(Action::Send(node, ack));
                    }
                }
            },
        }
    }
}

/// Where what follows goes.
struct Out<'a> {
    name: &'a NodeName,
    actions: &'a mut Vec<Action>,
    moves: &'a mut Vec<(NodeName, bool)>,
}

impl<'a> Out<'a> {
    fn new(name: &'a NodeName, actions: &'a mut Vec<Action>, moves: &'a mut Vec<(NodeName, bool)>) -> Self {
        Self { name, actions, moves }
    }

    fn act(&mut self, action: Action) {
        self.actions.push(action);
    }

    fn send(&mut self, message: CloudMessage) {
        self.actions.push(Action::Send(self.name.clone(), message));
    }

    fn cancel(&mut self, task: TaskId, reason: &str) {
        self.send(CloudMessage::Cancel { task, reason: reason.to_owned() });
    }

    fn ack(&mut self, task: TaskId) {
        self.send(CloudMessage::ResultAck { task });
    }

    fn write(&mut self, write: Write) {
        self.actions.push(Action::Write(self.name.clone(), write));
    }

    fn gave(&mut self) {
        self.moves.push((self.name.clone(), false));
    }

    fn took(&mut self) {
        self.moves.push((self.name.clone(), true));
    }
}
