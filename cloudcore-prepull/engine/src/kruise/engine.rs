//! The two halves put together. Pure.

use jiff::Timestamp;
use prepull_api::selector::Selector;
use prepull_api::task::NodeName;
use prepull_api::wire::CloudMessage;
use serde::{Deserialize, Serialize};

use super::jobs::{self, Jobs};
use super::node_images::{self, NodeImages, Order, Write};
use crate::shared::events::ObjectEvent;

/// What happened, to either half.
#[derive(Debug, Serialize, Deserialize)]
pub enum Input {
    /// To nodes and NodeImages.
    Node(node_images::Input),
    /// To jobs and pods.
    Job(jobs::Input),
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Resolve the key, and send the task.
    Dispatch(Box<Order>),
    /// Hand a message to a node's session, if there is one.
    Send(NodeName, CloudMessage),
    /// Write a NodeImage.
    NodeImage(NodeName, Write),
    /// Write a job, or a child of one.
    Job(jobs::Action),
    /// Tell people.
    Event(ObjectEvent),
}

/// Which of the first lists have come.
#[derive(Clone, Copy, Debug, Default)]
#[allow(clippy::struct_excessive_bools, reason = "one for each list")]
struct Listed {
    nodes: bool,
    node_images: bool,
    pods: bool,
    pull_jobs: bool,
    list_jobs: bool,
}

impl Listed {
    fn all(self) -> bool {
        let Self { nodes, node_images, pods, pull_jobs, list_jobs } = self;
        nodes && node_images && pods && pull_jobs && list_jobs
    }
}

/// See the module.
#[derive(Debug)]
pub struct Kruise {
    node_images: NodeImages,
    jobs: Jobs,
    listed: Listed,
    /// Whether every node that is to have a NodeImage has had one, or could not get it. Before that a job would take a
    /// part of the nodes, or none, for all.
    is_made: bool,
}

/// Turns that the halves take with each other in one flush. An ask makes a write, and no news before that has come
/// back, so that two are enough; what is left over waits for the next flush.
const TURNS: usize = 4;

impl Kruise {
    /// With NodeImages for the nodes that the selector selects.
    pub fn new(selector: Selector) -> Self {
        Self {
            node_images: NodeImages::new(selector),
            jobs: Jobs::default(),
            listed: Listed::default(),
            is_made: false,
        }
    }

    /// Takes in what happened. What follows from it comes out of [`Self::flush`].
    pub fn handle(&mut self, input: Input, now: Timestamp) {
        match &input {
            Input::Node(node_images::Input::Nodes(_)) => self.listed.nodes = true,
            Input::Node(node_images::Input::NodeImages(_)) => self.listed.node_images = true,
            Input::Job(jobs::Input::Pods(_)) => self.listed.pods = true,
            Input::Job(jobs::Input::PullJobs(_)) => self.listed.pull_jobs = true,
            Input::Job(jobs::Input::ListJobs(_)) => self.listed.list_jobs = true,
            _ => {}
        }
        match input {
            Input::Node(input) => self.node_images.handle(input, now),
            Input::Job(input) => self.jobs.handle(input, now),
        }
    }

    /// Whether all is known that there is. Before that nothing is done.
    pub fn is_ready(&self) -> bool {
        self.listed.all()
    }

    /// Lets everything go on as far as it can. `take` takes a place on a node, if one is free.
    pub fn flush(&mut self, now: Timestamp, take: &mut dyn FnMut(&NodeName) -> bool) -> Vec<Action> {
        let mut actions = Vec::new();
        if !self.is_ready() {
            return actions;
        }
        for _ in 0..TURNS {
            let jobs = &self.jobs;
            for action in self.node_images.flush(now, &|job| jobs.liveness(job), take) {
                match action {
                    node_images::Action::News(news) => self.jobs.handle(jobs::Input::News(news), now),
                    node_images::Action::Dispatch(order) => actions.push(Action::Dispatch(order)),
                    node_images::Action::Send(node, message) => actions.push(Action::Send(node, message)),
                    node_images::Action::Write(node, write) => actions.push(Action::NodeImage(node, write)),
                    node_images::Action::Event(event) => actions.push(Action::Event(event)),
                }
            }
            self.is_made = self.is_made || self.node_images.are_made();
            if !self.is_made {
                break;
            }
            let mut asked = false;
            for action in self.jobs.flush(now) {
                match action {
                    jobs::Action::Ask { node, wish, again } => {
                        self.node_images.ask(&node, wish, again);
                        asked = true;
                    }
                    jobs::Action::Liveness(job) => {
                        self.node_images.handle(node_images::Input::Liveness(job), now);
                        asked = true;
                    }
                    jobs::Action::Event(event) => actions.push(Action::Event(event)),
                    write => actions.push(Action::Job(write)),
                }
            }
            if !asked {
                break;
            }
        }
        actions
    }

    /// Places that were taken (true) or given back on nodes, since this was asked last.
    pub fn take_moves(&mut self) -> Vec<(NodeName, bool)> {
        self.node_images.take_moves()
    }

    /// When [`Self::flush`] is to be called although nothing happened.
    pub fn next_wakeup(&self) -> Option<Timestamp> {
        if !self.is_ready() {
            return None;
        }
        [self.node_images.next_wakeup(), self.jobs.next_wakeup()].into_iter().flatten().min()
    }
}
