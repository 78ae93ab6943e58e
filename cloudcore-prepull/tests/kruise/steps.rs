//! What may happen at any moment.

use std::time::Duration;

use prepull_api::task::{ImageOutcome, NodeName, TaskId};
use prepull_api::wire::{Assign, CloudMessage, Hello, Key};
use prepull_engine::kruise::node_images::{self, Written};
use prepull_engine::kruise::{Input, jobs};
use prepull_engine::shared::outcomes::{DispatchOutcome, WriteOutcome};
use prepull_engine::shared::session::{SessionEvent, SessionId};

use crate::world::{NODES, Pending, World};

impl World {
    /// One thing happens.
    pub(crate) fn step(&mut self) {
        match self.rng.below(100) {
            0..20 => self.deliver(),
            20..42 => self.do_pending(),
            42..60 => self.messages(),
            60..72 => self.work(),
            72..80 => {
                let seconds = self.rng.pick(&[0, 1, 1, 2, 5, 30, 61, 400]);
                self.pass(Duration::from_secs(seconds) + Duration::from_millis(350));
            }
            80..86 => self.link(),
            86..88 => {
                let node = self.node();
                self.tell(|| format!("{node} restarts"));
                self.down(&node);
                self.edges.get_mut(&node).unwrap().restart();
            }
            88..90 => {
                self.kill();
                self.start();
            }
            _ => self.user(),
        }
    }

    pub(crate) fn node(&mut self) -> NodeName {
        NodeName::from(self.rng.pick(&NODES))
    }

    /// The watch tells of something.
    pub(crate) fn deliver(&mut self) {
        if let Some(input) = self.watch.pop_front() {
            self.hear(input);
        }
    }

    /// Something that was begun ends, one way or another.
    pub(crate) fn do_pending(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        let at = self.rng.below(self.pending.len());
        let (fails, unheard) =
            if self.calm { (false, false) } else { (self.rng.chance(8), self.rng.chance(8)) };
        match self.pending.remove(at) {
            Pending::NodeImage(node, write) => {
                self.tell(|| format!("write of {node}: {write:?}"));
                let written = if fails { Written::Failed } else { self.write_node_image(&node, write) };
                self.tell(|| format!("  {}", if fails { "failed" } else { "answered" }));
                let written = if unheard { Written::Failed } else { written };
                self.hear(Input::Node(node_images::Input::Written(node, written)));
            }
            Pending::Job(action) => {
                self.tell(|| format!("write {action:?}"));
                let object = action.written_object().unwrap();
                let outcome = if fails { WriteOutcome::Failed } else { self.write_job(action).1 };
                self.tell(|| format!("  {outcome:?}"));
                let outcome = if unheard { WriteOutcome::Failed } else { outcome };
                self.hear(Input::Job(jobs::Input::Written { object, outcome }));
            }
            Pending::Dispatch(order) => {
                let (node, task) = (order.node.clone(), order.task.id.clone());
                let edge = self.edges.get_mut(&node).unwrap();
                let outcome = match edge.session {
                    Some(session) => {
                        let (remaining, keys) = (order.remaining, vec![Key::anonymous()]);
                        edge.downward.push_back(CloudMessage::Assign(Assign {
                            task: order.task,
                            remaining,
                            keys,
                        }));
                        DispatchOutcome::Sent(SessionId(session))
                    }
                    None => DispatchOutcome::Offline,
                };
                self.tell(|| format!("dispatch to {node} of {task}: {outcome:?}"));
                self.hear(Input::Node(node_images::Input::Dispatched { node, task, outcome }));
            }
        }
    }

    /// Messages arrive.
    pub(crate) fn messages(&mut self) {
        let node = self.node();
        let edge = self.edges.get_mut(&node).unwrap();
        if let Some(message) = edge.downward.pop_front() {
            edge.takes(message);
        }
        let Some(session) = edge.session.map(SessionId) else { return };
        if let Some(message) = edge.upward.pop_front() {
            self.tell(|| format!("from {node}: {message:?}"));
            let message = SessionEvent::Message { node, session, message };
            self.hear(Input::Node(node_images::Input::Session(message)));
        }
    }

    /// An edge works.
    pub(crate) fn work(&mut self) {
        let node = self.node();
        let running = self.edges[&node].running();
        if running.is_empty() {
            return;
        }
        let task: TaskId = running[self.rng.below(running.len())].clone();
        let outcome = if self.rng.chance(25) { ImageOutcome::Failed } else { ImageOutcome::Pulled };
        self.tell(|| format!("{node} ends {task}: {outcome:?}"));
        self.edges.get_mut(&node).unwrap().end(&task, outcome);
    }

    fn link(&mut self) {
        let node = self.node();
        if self.edges[&node].session.is_some() {
            self.tell(|| format!("{node} is cut off"));
            self.down(&node);
        } else {
            self.up(&node);
        }
    }

    pub(crate) fn down(&mut self, node: &NodeName) {
        let edge = self.edges.get_mut(node).unwrap();
        let Some(session) = edge.session.map(SessionId) else { return };
        edge.cut();
        let event = SessionEvent::Down { node: node.clone(), session };
        self.hear(Input::Node(node_images::Input::Session(event)));
    }

    pub(crate) fn up(&mut self, node: &NodeName) {
        if self.cloud.is_none() {
            return;
        }
        self.session += 1;
        let session = self.session;
        let edge = self.edges.get_mut(node).unwrap();
        let hello = Hello { open: edge.open(), ..Hello::default() };
        edge.connect(session);
        self.tell(|| format!("{node} is connected: {:?}", hello.open));
        let event = SessionEvent::Up { node: node.clone(), session: SessionId(session), hello };
        self.hear(Input::Node(node_images::Input::Session(event)));
    }
}
