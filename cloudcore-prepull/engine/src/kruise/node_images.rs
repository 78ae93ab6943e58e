//! The NodeImages: created for nodes, written by jobs and by hand, carried out over the tunnel. Pure.
//!
//! ```text
//!  Node ─▶ Create, labels, Delete                         session, free slot
//!  TagRequest ─▶ spec_edit ─▶ spec (written) ─▶ observed ─▶ TagPull: Waiting ───▶ OnNode ─▶ Ended ─▶ status (written)
//!  TTL passed, owner deleted ─▶ spec_edit                            ▲── lost ──┘                 ─▶ ack, NodeImageUpdate
//! ```
//!
//! The order that makes a crash harmless: only what the API server has in a spec is sent to a node, and a result is
//! acknowledged once the API server has it in the status.

mod compact;
mod effects;
mod events;
mod io;
mod node;
mod object;
mod owners;
mod pulls;
mod reported;
mod requests;
mod shared_parts;
mod shares;
mod spec_edit;
mod status;
mod tag_pull;
#[cfg(test)]
mod tests;
mod write_room;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use jiff::Timestamp;
use prepull_api::selector::Selector;
use prepull_api::task::{JobUid, NodeName, TaskId};
use prepull_api::wire::{CloudMessage, EdgeMessage};

use super::{Liveness, TagRequest};
use crate::fleet::event::FleetEvent;
use crate::fleet::node_view::NodeView;
use crate::fleet::session::SessionEvent;
use crate::shared::delay_queue::DelayQueue;
use crate::shared::objects::Unreadable;
use crate::shared::pacing::TokenBucket;
pub use compact::CompactNodeImage;
use effects::NodeEffects;
pub use io::{Action, Input, NodeImageWrite, TagDispatch, WrittenNodeImage};
use node::TrackedNode;
pub use shared_parts::SharedParts;
pub use tag_pull::is_of_node_image;
use write_room::WriteRoom;

/// What a job requests; `None` if it isn't running, or what it requests isn't known.
type RequestOf<'a> = &'a dyn Fn(&JobUid) -> Option<Arc<TagRequest>>;

struct Context<'a> {
    selector: &'a Selector,
    liveness: &'a dyn Fn(&JobUid) -> Liveness,
    request_of: RequestOf<'a>,
    /// Takes a task slot of the node, if one is free.
    take_slot: &'a mut dyn FnMut(&NodeName) -> bool,
    progress_budget: &'a mut TokenBucket<Timestamp>,
    has_write_room: bool,
    /// Most bytes of the NodeImage.
    most_stored: usize,
}

/// Writes of statuses that tell of nothing but progress, over all nodes: 20 a second. Ten thousand nodes that pull at
/// once must not keep etcd busy with percentages.
fn progress_budget() -> TokenBucket<Timestamp> {
    TokenBucket::new(20.0, 20.0)
}

/// All nodes with their NodeImages.
#[derive(Debug)]
pub struct NodeImageTracker {
    selector: Selector,
    nodes: BTreeMap<NodeName, TrackedNode>,
    /// How many of the nodes have a NodeImage.
    objects: usize,
    parts: SharedParts,
    /// Jobs that have another liveness since the last flush.
    changed_jobs: HashSet<JobUid>,
    /// Nodes with NodeImages created since the current list began. That list may lack them; the watch after it has
    /// them.
    created: BTreeSet<NodeName>,
    dirty: BTreeSet<NodeName>,
    /// When to reconcile a node even without an input.
    wakeups: DelayQueue<NodeName>,
    progress_budget: TokenBucket<Timestamp>,
    writes: WriteRoom,
    actions: Vec<Action>,
    slot_changes: Vec<(NodeName, bool)>,
}

impl NodeImageTracker {
    pub(crate) fn new(selector: Selector) -> Self {
        Self {
            selector,
            nodes: BTreeMap::new(),
            objects: 0,
            parts: SharedParts::default(),
            changed_jobs: HashSet::new(),
            created: BTreeSet::new(),
            dirty: BTreeSet::new(),
            wakeups: DelayQueue::default(),
            progress_budget: progress_budget(),
            writes: WriteRoom::default(),
            actions: Vec::new(),
            slot_changes: Vec::new(),
        }
    }

    /// Takes an input in. The actions that follow from it come out of [`Self::flush`].
    /// Of a session's messages only those about tasks of NodeImages.
    pub(crate) fn note_fleet_event(&mut self, event: FleetEvent, now: Timestamp) {
        match event {
            FleetEvent::Nodes(nodes) => self.replace_nodes(nodes, now),
            FleetEvent::Node(node) => self.observe_node(node),
            FleetEvent::NodeGone(name) => self.remove_node(&name, now),
            FleetEvent::Session(event) => self.observe_session(event, now),
        }
    }

    pub(crate) fn handle(&mut self, input: Input, now: Timestamp) {
        match input {
            Input::NodeImagesListing => self.created.clear(),
            Input::NodeImages(objects) => self.replace_node_images(objects, now),
            Input::NodeImage(object) => self.observe_object(object, now),
            Input::NodeImageGone { name, uid } => {
                if self.nodes.get_mut(&name).is_some_and(|node| node.note_deleted(uid)) {
                    self.observe_node_image(&name, None, now);
                }
            }
            Input::Dispatched { node, task, outcome, keys } => {
                self.update_node(&node, now, |node, fx| {
                    node.pulls.note_keys(&task, keys);
                    node.end_dispatch(&task, outcome, fx);
                });
            }
            Input::Written(node, written) => {
                self.writes.end_write();
                if matches!(written, WrittenNodeImage::Done(Some(_)))
                    && self.nodes.get(&node).is_some_and(TrackedNode::is_without_object)
                {
                    self.created.insert(node.clone());
                }
                self.update_node(&node, now, |node, fx| node.end_write(&written, fx));
                match written {
                    WrittenNodeImage::Done(object) | WrittenNodeImage::Refused(object) => {
                        let object = object.map(|mut object| {
                            object.share(&mut self.parts);
                            *object
                        });
                        self.observe_node_image(&node, object, now);
                    }
                    WrittenNodeImage::Failed | WrittenNodeImage::TooLarge => {}
                }
            }
            Input::SlotFreed(node) => {
                if self.nodes.get(&node).is_some_and(|node| node.pulls.has_waiting()) {
                    self.dirty.insert(node);
                }
            }
            Input::LivenessChanged(job) => _ = self.changed_jobs.insert(job),
        }
    }

    /// A job requests a tag on a node. With `new_round` a tag that has ended is pulled once more.
    pub(crate) fn request_tag(&mut self, node: &NodeName, request: Arc<TagRequest>, new_round: bool) {
        if let Some(tracked) = self.nodes.get_mut(node) {
            tracked.requests.push(request, new_round);
            self.dirty.insert(node.clone());
        }
    }

    /// Reconciles the nodes that an input or the time has changed.
    pub(crate) fn flush(
        &mut self,
        now: Timestamp,
        liveness: &dyn Fn(&JobUid) -> Liveness,
        request_of: RequestOf<'_>,
        take_slot: &mut dyn FnMut(&NodeName) -> bool,
    ) -> Vec<Action> {
        while let Some(name) = self.wakeups.pop_due(now) {
            self.dirty.insert(name);
        }
        let changed_jobs = std::mem::take(&mut self.changed_jobs);
        if !changed_jobs.is_empty() {
            let is_owned = |node: &TrackedNode| node.is_owned_by_any(|job| changed_jobs.contains(job));
            let owned = self.nodes.iter().filter(|(_, node)| is_owned(node));
            self.dirty.extend(owned.map(|(name, _)| name.clone()));
        }
        let mut dirty = std::mem::take(&mut self.dirty);
        loop {
            // Those that wait for room come first: of the others there may be more again and again.
            let next = self.writes.pop().inspect(|name| _ = dirty.remove(name));
            let Some(name) = next.or_else(|| dirty.pop_first()) else { break };
            let Some(node) = self.nodes.get_mut(&name) else { continue };
            let mut context = Context {
                selector: &self.selector,
                liveness,
                request_of,
                take_slot,
                progress_budget: &mut self.progress_budget,
                has_write_room: self.writes.has_room(),
                most_stored: shares::most_stored(self.objects),
            };
            let mut fx = NodeEffects::new(&name, now, &mut self.actions, &mut self.slot_changes);
            let was_writing = node.is_writing();
            node.reconcile(&mut context, &mut fx);
            if node.is_writing() && !was_writing {
                self.writes.begin_write();
            }
            if fx.waits_to_write() {
                self.writes.queue_node(&name);
            }
            self.wakeups.set(&name, fx.wakeup());
            if node.is_empty() {
                self.nodes.remove(&name);
            }
        }
        std::mem::take(&mut self.actions)
    }

    /// The task slots that nodes have taken (`true`) or freed since the last call.
    pub(crate) fn take_slot_changes(&mut self) -> Vec<(NodeName, bool)> {
        std::mem::take(&mut self.slot_changes)
    }

    /// When [`Self::flush`] must run next even without an input.
    pub(crate) fn next_wakeup(&self) -> Option<Timestamp> {
        self.wakeups.next_due()
    }

    /// Whether each node that should have a NodeImage has one, or its creation has failed.
    pub(crate) fn has_created_all(&self) -> bool {
        !self.nodes.values().any(|node| node.needs_creation(&self.selector) && !node.has_failed_writes())
    }

    fn replace_nodes(&mut self, nodes: Vec<NodeView>, now: Timestamp) {
        let existing: BTreeSet<NodeName> = nodes.iter().map(|node| node.name.clone()).collect();
        let known = self.nodes.iter().filter(|(_, node)| node.node.is_some());
        let gone = known.map(|(name, _)| name).filter(|name| !existing.contains(*name));
        for name in gone.cloned().collect::<Vec<_>>() {
            self.remove_node(&name, now);
        }
        for node in nodes {
            self.observe_node(node);
        }
    }

    fn observe_node(&mut self, node: NodeView) {
        let name = node.name.clone();
        let known = self.nodes.get(&name).and_then(|known| known.node.as_ref());
        // Most changes of a Node are heartbeats.
        if known == Some(&node) {
            return;
        }
        self.nodes.entry(name.clone()).or_default().node = Some(node);
        self.dirty.insert(name);
    }

    fn remove_node(&mut self, name: &NodeName, now: Timestamp) {
        self.update_node(name, now, |node, _| node.node = None);
    }

    fn replace_node_images(&mut self, objects: Vec<NodeImageObject>, now: Timestamp) {
        let existing: BTreeSet<NodeName> = objects.iter().map(name_of).collect();
        let created = std::mem::take(&mut self.created);
        let is_gone = |name: &&NodeName| !existing.contains(*name) && !created.contains(*name);
        let gone: Vec<_> = self.nodes.keys().filter(is_gone).cloned().collect();
        for name in gone {
            self.observe_node_image(&name, None, now);
        }
        for object in objects {
            self.observe_object(object, now);
        }
    }

    fn observe_object(&mut self, object: NodeImageObject, now: Timestamp) {
        let name = name_of(&object);
        match object {
            Ok(mut object) => {
                object.share(&mut self.parts);
                self.observe_node_image(&name, Some(*object), now);
            }
            Err(unreadable) => {
                let node = self.nodes.entry(name.clone()).or_default();
                self.objects += usize::from(node.is_without_object());
                self.update_node(&name, now, |node, fx| node.observe_unreadable(unreadable, fx));
            }
        }
    }

    /// The API server has this NodeImage for the node, or none.
    fn observe_node_image(&mut self, name: &NodeName, object: Option<CompactNodeImage>, now: Timestamp) {
        if object.is_some() {
            self.nodes.entry(name.clone()).or_default();
        }
        let Some(node) = self.nodes.get_mut(name) else { return };
        let mut fx = NodeEffects::new(name, now, &mut self.actions, &mut self.slot_changes);
        self.objects -= usize::from(!node.is_without_object());
        node.observe(object, &self.selector, &mut self.parts, &mut fx);
        self.objects += usize::from(!node.is_without_object());
        self.dirty.insert(name.clone());
    }

    /// The reference of the image of a task, if the node has the task.
    pub(crate) fn image_of(&self, node: &NodeName, task: &TaskId) -> Option<String> {
        self.nodes.get(node)?.pulls.image_of(task)
    }

    /// What entitles the node to the layers of the task.
    pub(crate) fn entitlement(&self, node: &NodeName, task: &TaskId) -> Option<Arc<str>> {
        self.nodes.get(node)?.entitlement(task)
    }

    /// Changes a node that is known, and has it reconciled.
    fn update_node(
        &mut self,
        name: &NodeName,
        now: Timestamp,
        change: impl FnOnce(&mut TrackedNode, &mut NodeEffects<'_>),
    ) {
        let Some(node) = self.nodes.get_mut(name) else { return };
        change(node, &mut NodeEffects::new(name, now, &mut self.actions, &mut self.slot_changes));
        self.dirty.insert(name.clone());
    }

    fn observe_session(&mut self, event: SessionEvent, now: Timestamp) {
        match event {
            SessionEvent::Up { node, session, hello } => {
                self.nodes.entry(node.clone()).or_default();
                self.update_node(&node, now, |node, fx| node.connect(session, &hello.open, fx));
            }
            SessionEvent::Down { node, session } => {
                self.update_node(&node, now, |node, fx| node.disconnect(session, fx));
            }
            SessionEvent::Message { node, session: _, message } => match message {
                EdgeMessage::Hello(_)
                | EdgeMessage::Trusts { .. }
                | EdgeMessage::State(_)
                | EdgeMessage::Blobs(_)
                | EdgeMessage::Configured { .. }
                | EdgeMessage::Other => {}
                EdgeMessage::Accepted { task } => {
                    self.update_node(&node, now, |node, fx| node.pulls.accept(&task, fx));
                }
                EdgeMessage::Progress(progress) => {
                    self.update_node(&node, now, |node, fx| node.pulls.progress(&progress, fx));
                }
                EdgeMessage::Result(result) if self.nodes.contains_key(&node) => {
                    self.update_node(&node, now, |node, fx| node.end_task(&result, fx));
                }
                // Nothing is known of the node: it must not keep the result for ever.
                EdgeMessage::Result(result) => {
                    self.actions.push(Action::Send(node, CloudMessage::ResultAck { task: result.task }));
                }
            },
        }
    }
}

type NodeImageObject = Result<Box<CompactNodeImage>, Unreadable>;

fn name_of(object: &NodeImageObject) -> NodeName {
    match object {
        Ok(object) => object.name(),
        Err(unreadable) => NodeName(unreadable.id.name.clone()),
    }
}
