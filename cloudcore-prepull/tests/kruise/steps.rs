//! The random steps: what may happen at any moment.

use std::time::Duration;

use prepull_api::download::DownloadTerms;
use prepull_api::task::{ImageOutcome, NodeName, TaskId};
use prepull_api::wire::{Assign, CloudMessage, Hello, PullKey};
use prepull_engine::fleet::event::FleetEvent;
use prepull_engine::fleet::session::{SessionEvent, SessionId};
use prepull_engine::kruise::node_images::{self, WrittenNodeImage};
use prepull_engine::kruise::{Input, jobs};
use prepull_engine::shared::outcomes::{DispatchOutcome, WriteOutcome};

use crate::world::{NODES, Pending, World};

impl World {
    /// Makes one random step.
    pub(crate) fn step(&mut self) {
        match self.rng.below(100) {
            0..20 => self.deliver(),
            20..42 => self.end_pending(),
            42..60 => self.deliver_messages(),
            60..72 => self.end_task(),
            72..80 => {
                let seconds = self.rng.pick(&[0, 1, 1, 2, 5, 30, 61, 400]);
                self.advance_time(Duration::from_secs(seconds) + Duration::from_millis(350));
            }
            80..86 => self.toggle_link(),
            86..88 => {
                let node = self.node();
                self.log(|| format!("{node} restarts"));
                self.disconnect(&node);
                self.edges.get_mut(&node).unwrap().restart();
            }
            88..90 => {
                self.kill();
                self.start();
            }
            90..92 => self.collect_orphans(),
            _ => self.act_as_user(),
        }
    }

    pub(crate) fn node(&mut self) -> NodeName {
        NodeName::from(self.rng.pick(&NODES))
    }

    /// Has the watch deliver something.
    pub(crate) fn deliver(&mut self) {
        if let Some(input) = self.watch.pop_front() {
            self.input(input);
        }
    }

    /// Ends something that was begun: it may fail, or its answer may be lost.
    pub(crate) fn end_pending(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        let at = self.rng.below(self.pending.len());
        let (fails, is_answer_lost) =
            if self.calm { (false, false) } else { (self.rng.chance(8), self.rng.chance(8)) };
        match self.pending.remove(at) {
            Pending::NodeImage(node, write) => {
                self.log(|| format!("write of {node}: {write:?}"));
                let written =
                    if fails { WrittenNodeImage::Failed } else { self.write_node_image(&node, write) };
                self.log(|| format!("  {}", if fails { "failed" } else { "answered" }));
                let written = if is_answer_lost { WrittenNodeImage::Failed } else { written };
                if !self.calm && self.rng.chance(25) {
                    self.log(|| "  the answer is on its way".to_owned());
                    return self.pending.push(Pending::Answer(node, written));
                }
                self.input(Input::Node(node_images::Input::Written(node, written)));
            }
            Pending::Answer(node, written) => {
                self.log(|| format!("the answer to the write of {node} arrives"));
                self.input(Input::Node(node_images::Input::Written(node, written)));
            }
            Pending::Job(write) => {
                self.log(|| format!("write {write:?}"));
                let target = write.target();
                let outcome = if fails { WriteOutcome::Failed } else { self.write_job(write) };
                self.log(|| format!("  {outcome:?}"));
                let outcome = if is_answer_lost { WriteOutcome::Failed } else { outcome };
                if !self.calm && self.rng.chance(25) {
                    self.log(|| "  the answer is on its way".to_owned());
                    return self.pending.push(Pending::JobAnswer(target, outcome));
                }
                self.input(Input::Job(jobs::Input::Written { target, outcome }));
            }
            Pending::JobAnswer(target, outcome) => {
                self.log(|| format!("the answer to the write of {target:?} arrives: {outcome:?}"));
                self.input(Input::Job(jobs::Input::Written { target, outcome }));
            }
            Pending::Dispatch(dispatch) => {
                let (node, task) = (dispatch.node.clone(), dispatch.task.id.clone());
                let edge = self.edges.get_mut(&node).unwrap();
                let outcome = match edge.session {
                    _ if fails => DispatchOutcome::Postponed("the secret cannot be read".to_owned()),
                    Some(session) => {
                        let (remaining, keys) = (dispatch.remaining, vec![PullKey::anonymous()]);
                        edge.downward.push_back(CloudMessage::Assign(Assign {
                            task: dispatch.task,
                            remaining,
                            keys,
                            download: DownloadTerms::default(),
                        }));
                        DispatchOutcome::Sent(SessionId(session))
                    }
                    None => DispatchOutcome::Offline,
                };
                self.log(|| format!("dispatch to {node} of {task}: {outcome:?}"));
                self.input(Input::Node(node_images::Input::Dispatched { node, task, outcome, keys: None }));
            }
        }
    }

    /// Delivers a message in each direction.
    pub(crate) fn deliver_messages(&mut self) {
        let node = self.node();
        let edge = self.edges.get_mut(&node).unwrap();
        if let Some(message) = edge.downward.pop_front() {
            edge.receive(message);
        }
        let Some(session) = edge.session.map(SessionId) else { return };
        if let Some(message) = edge.upward.pop_front() {
            self.log(|| format!("from {node}: {message:?}"));
            let message = SessionEvent::Message { node, session, message };
            self.input(FleetEvent::Session(message));
        }
    }

    /// An edge ends a task.
    pub(crate) fn end_task(&mut self) {
        let node = self.node();
        let running = self.edges[&node].running();
        if running.is_empty() {
            return;
        }
        let task: TaskId = running[self.rng.below(running.len())].clone();
        let outcome = if self.rng.chance(25) { ImageOutcome::Failed } else { ImageOutcome::Pulled };
        self.log(|| format!("{node} ends {task}: {outcome:?}"));
        self.edges.get_mut(&node).unwrap().end(&task, outcome);
    }

    fn toggle_link(&mut self) {
        let node = self.node();
        if self.edges[&node].session.is_some() {
            self.log(|| format!("{node} is cut off"));
            self.disconnect(&node);
        } else {
            self.connect(&node);
        }
    }

    pub(crate) fn disconnect(&mut self, node: &NodeName) {
        let edge = self.edges.get_mut(node).unwrap();
        let Some(session) = edge.session.map(SessionId) else { return };
        edge.cut();
        let event = SessionEvent::Down { node: node.clone(), session };
        self.input(FleetEvent::Session(event));
    }

    pub(crate) fn connect(&mut self, node: &NodeName) {
        if self.cloud.is_none() {
            return;
        }
        self.session += 1;
        let session = self.session;
        let edge = self.edges.get_mut(node).unwrap();
        let hello = Hello { open: edge.open(), ..Hello::default() };
        edge.connect(session);
        self.log(|| format!("{node} is connected: {:?}", hello.open));
        let event =
            SessionEvent::Up { node: node.clone(), session: SessionId(session), hello: Box::new(hello) };
        self.input(FleetEvent::Session(event));
    }
}
