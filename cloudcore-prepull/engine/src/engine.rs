//! Both engines and the tracker of sites behind one door, on the same nodes: inputs are routed to whom they concern, and a
//! node works on no more tasks of both than it takes.

mod sharing;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use prepull_api::crd::status::{JobPhase, Summary};
use prepull_api::selector::Selector;
use prepull_api::task::{NodeName, TaskId};
use prepull_api::wire::{EdgeMessage, Hello};
use serde::{Deserialize, Serialize};

use crate::fleet::event::FleetEvent;
use crate::fleet::in_hand::TaskInHand;
use crate::fleet::node_view::NodeView;
use crate::fleet::session::SessionEvent;
use crate::kruise::node_images::{self, is_of_node_image};
use crate::kruise::{self, Kruise};
use crate::prepull::controller::{self, Controller};
use crate::settings::{self, FleetSettings};
use crate::sites::{Directions, SiteEvent, SiteReport, SiteSettings, Sites};

/// What happened.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Input {
    /// To nodes and sessions, which concerns every part.
    Fleet(FleetEvent),
    /// To ImagePrePullJobs.
    Prepull(controller::Input),
    /// To one of Kruise's objects.
    Kruise(kruise::Input),
    /// To the settings of nodes.
    Settings(settings::Input),
    /// Nothing but that time has passed.
    Tick,
}

impl From<FleetEvent> for Input {
    fn from(event: FleetEvent) -> Self {
        Self::Fleet(event)
    }
}

impl From<controller::Input> for Input {
    fn from(input: controller::Input) -> Self {
        Self::Prepull(input)
    }
}

impl From<kruise::Input> for Input {
    fn from(input: kruise::Input) -> Self {
        Self::Kruise(input)
    }
}

impl From<settings::Input> for Input {
    fn from(input: settings::Input) -> Self {
        Self::Settings(input)
    }
}

/// An effect that the engine asks for.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// For an ImagePrePullJob.
    Prepull(controller::Action),
    /// For one of Kruise's objects.
    Kruise(kruise::Action),
    /// Tell a node where to get blobs from.
    Direct(Directions),
    /// For the settings of nodes.
    Settings(settings::Action),
}

impl Action {
    /// The kind of this action in one word, as a recording keeps it.
    pub fn kind(&self) -> &'static str {
        use controller::Action as Prepull;
        use kruise::Action as Kruise;
        match self {
            Self::Prepull(Prepull::Dispatch(_)) | Self::Kruise(Kruise::Dispatch(_)) => "dispatch",
            Self::Prepull(Prepull::Send(..)) | Self::Kruise(Kruise::Send(..)) => "send",
            Self::Prepull(Prepull::Event(_)) | Self::Kruise(Kruise::Event(_)) => "event",
            Self::Prepull(Prepull::Write { .. }) => "write",
            Self::Prepull(Prepull::Delete { .. }) => "delete",
            Self::Prepull(Prepull::Forget(_)) => "forget",
            Self::Prepull(Prepull::Recall { .. }) => "recall",
            Self::Kruise(Kruise::NodeImage(..)) => "writeNodeImage",
            Self::Kruise(Kruise::Job(_)) => "writeKruiseJob",
            Self::Direct(_) => "direct",
            Self::Settings(settings::Action::Configure(..)) => "configure",
            Self::Settings(settings::Action::WriteStatus(..)) => "writeSettings",
        }
    }
}

/// Which of the first lists have arrived. Before that an engine does not know all that there is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FirstLists {
    /// The Nodes.
    pub nodes: bool,
    /// The ImagePrePullJobs, with the reports of those that go on.
    pub jobs: bool,
    /// Kruise's objects; never where Kruise's API is not served.
    pub kruise: bool,
}

/// The engines of both APIs. Inputs go in by [`Self::handle`], actions come out of [`Self::flush`].
#[derive(Debug, Default)]
pub struct Engine {
    prepull: Controller,
    kruise: Option<Kruise>,
    sites: Sites,
    settings: FleetSettings,
    /// The fingerprint of the credentials that were given last for each entitlement of jobs that share.
    last_keys: BTreeMap<Arc<str>, u64>,
    listed: FirstLists,
    /// Whether the list of the ImagePrePullJobs has arrived. Some of them may still be read.
    has_jobs: bool,
}

impl Engine {
    /// An engine that serves Kruise's API as well, with a NodeImage for each node that the selector selects.
    pub fn with_kruise(selector: Selector) -> Self {
        Self { kruise: Some(Kruise::new(selector)), ..Self::default() }
    }

    /// Groups nodes into sites like this.
    #[must_use]
    pub fn with_sites(mut self, settings: SiteSettings) -> Self {
        self.sites = Sites::new(settings);
        self
    }

    /// Takes in what happened. What follows from it comes out of [`Self::flush`], so that a burst of inputs makes one
    /// write.
    pub fn handle(&mut self, input: Input, now: Timestamp) {
        match input {
            Input::Fleet(FleetEvent::Session(SessionEvent::Message {
                node,
                message: EdgeMessage::Blobs(blobs),
                ..
            })) => self.note_blobs(&node, blobs, now),
            Input::Fleet(event) => {
                self.tell_sites(&event, now);
                self.tell_settings(&event);
                self.listed.nodes |= matches!(event, FleetEvent::Nodes(_));
                if let Some(event) = self.share_with_kruise(event, now) {
                    self.prepull.note_fleet_event(event, now);
                }
                self.limit_sites(now);
            }
            Input::Prepull(input) => {
                let sent = sharing::sent_task(&input);
                self.has_jobs |= matches!(input, controller::Input::Jobs(_));
                self.prepull.handle(input, now);
                if let Some((node, task)) = sent {
                    self.note_keys(&node, &task);
                }
                self.listed.jobs |= self.has_jobs && !self.prepull.is_loading();
                self.limit_sites(now);
            }
            Input::Tick => {}
            Input::Settings(input) => self.settings.handle(input),
            Input::Kruise(input) => {
                if let Some(kruise) = &mut self.kruise {
                    kruise.handle(input, now);
                    self.listed.kruise |= kruise.is_ready();
                }
            }
        }
    }

    /// Advances every object as far as possible, and returns the actions in the order to carry them out.
    pub fn flush(&mut self, now: Timestamp) -> Vec<Action> {
        // A slot that a NodeImage gave back may serve a job, and the NodeImages may take the slots that the jobs
        // leave.
        self.move_slots();
        let mut actions: Vec<_> = self.prepull.flush(now).into_iter().map(Action::Prepull).collect();
        loop {
            let freed = self.prepull.take_freed();
            let Some(kruise) = &mut self.kruise else { break };
            for node in freed {
                kruise.handle(kruise::Input::Node(node_images::Input::SlotFreed(node)), now);
            }
            let prepull = &mut self.prepull;
            let more = kruise.flush(now, &mut |node| prepull.take_place(node));
            // What is cancelled gives its slot back, and another task takes it.
            self.move_slots();
            if more.is_empty() {
                break;
            }
            actions.extend(more.into_iter().map(Action::Kruise));
        }
        self.end_cancelled(&actions, now);
        actions.extend(self.sites.flush(now).into_iter().map(Action::Direct));
        if self.listed.nodes {
            let settings = self.settings.flush(self.prepull.nodes_by_name(), now);
            actions.extend(settings.into_iter().map(Action::Settings));
        }
        actions
    }

    /// When [`Self::flush`] must run next even without an input.
    pub fn next_wakeup(&self) -> Option<Timestamp> {
        let kruise = self.kruise.as_ref().and_then(Kruise::next_wakeup);
        let settings = self.settings.next_wakeup().filter(|_| self.listed.nodes);
        [self.prepull.next_wakeup(), kruise, self.sites.next_wakeup(), settings].into_iter().flatten().min()
    }

    /// Which of the first lists have arrived.
    pub fn listed(&self) -> FirstLists {
        self.listed
    }

    /// All Nodes, by their names.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeView> {
        self.prepull.nodes()
    }

    /// The ImagePrePullJobs that run, each by its name with the counts of its nodes, for the metrics.
    pub fn running_jobs(&self) -> impl Iterator<Item = (&str, &Summary)> {
        self.prepull.running_jobs()
    }

    /// The number of ImagePrePullJobs in each phase, for the metrics.
    pub fn phases(&self) -> [(JobPhase, usize); 4] {
        self.prepull.phases()
    }

    /// Whether the shell must watch pods, for a job that selects its nodes by them.
    pub fn needs_pods(&self) -> bool {
        self.kruise.as_ref().is_some_and(Kruise::needs_pods)
    }

    /// An open task of a node, for traces. Call it before the result is handled, so that a repeated result counts once.
    pub fn task_in_hand(&self, node: &NodeName, task: &TaskId) -> Option<TaskInHand> {
        if !is_of_node_image(task) {
            return self.prepull.in_hand(node, task);
        }
        let image = self.kruise.as_ref()?.image_of(node, task)?;
        Some(TaskInHand { job: None, images: vec![image], started: None })
    }

    /// Passes on the limits of jobs that have changed.
    fn limit_sites(&mut self, now: Timestamp) {
        for (job, max_rate) in self.prepull.take_new_rates() {
            self.sites.limit_job(&job, max_rate, now);
        }
    }

    fn tell_sites(&mut self, event: &FleetEvent, now: Timestamp) {
        match event {
            FleetEvent::Nodes(nodes) => self.sites.set_nodes(nodes, now),
            FleetEvent::Node(node) => self.sites.set_labels(&node.name, Some(&node.labels), now),
            FleetEvent::NodeGone(node) => self.sites.set_labels(node, None, now),
            // Those of a session that another one has replaced may come after the other one's.
            FleetEvent::Session(SessionEvent::Message {
                node, message: EdgeMessage::Result(result), ..
            }) => {
                self.note_success(node, result, now);
            }
            FleetEvent::Session(SessionEvent::Up { node, session, hello })
                if self.prepull.session(node).is_none_or(|current| current <= *session) =>
            {
                self.sites.connect(node, hello, now);
            }
            FleetEvent::Session(SessionEvent::Down { node, session })
                if self.prepull.session(node) == Some(*session) =>
            {
                self.sites.disconnect(node, now);
            }
            FleetEvent::Session(_) => {}
        }
    }

    fn tell_settings(&mut self, event: &FleetEvent) {
        match event {
            FleetEvent::Nodes(_) => self.settings.relabel_all(),
            // A Node changes every few minutes without another label.
            FleetEvent::Node(node) => {
                let known = self.prepull.nodes_by_name().get(&node.name);
                if known.is_none_or(|known| known.labels != node.labels) {
                    self.settings.relabel(&node.name);
                }
            }
            FleetEvent::NodeGone(node) => self.settings.relabel(node),
            FleetEvent::Session(event) => self.settings.note_session_event(event),
        }
    }

    /// What the sites with shared blobs do right now, the most active first.
    pub fn site_reports(&self, now: Timestamp) -> Vec<SiteReport> {
        self.sites.reports(now)
    }

    /// What one site does right now.
    pub fn site_report(&self, site: &str, now: Timestamp) -> Option<SiteReport> {
        self.sites.report_of(site, now)
    }

    /// What nodes of sites did that an operator may want to know, since the last call.
    pub fn take_site_events(&mut self) -> Vec<SiteEvent> {
        self.sites.take_events()
    }

    /// Bytes of memory that the tracker of sites takes, roughly.
    pub fn site_bytes(&self) -> usize {
        self.sites.bytes()
    }

    /// Passes Kruise's engine its part of the event. Returns the part for the other engine.
    fn share_with_kruise(&mut self, event: FleetEvent, now: Timestamp) -> Option<FleetEvent> {
        let Some(kruise) = &mut self.kruise else { return Some(event) };
        match &event {
            FleetEvent::Nodes(nodes) => kruise.note_fleet_event(FleetEvent::Nodes(nodes.clone()), now),
            FleetEvent::Node(node) => kruise.note_fleet_event(FleetEvent::Node(node.clone()), now),
            FleetEvent::NodeGone(node) => kruise.note_fleet_event(FleetEvent::NodeGone(node.clone()), now),
            FleetEvent::Session(_) => {}
        }
        let FleetEvent::Session(event) = event else { return Some(event) };
        let (of_node_images, of_jobs) = split_event(event);
        if let Some(event) = of_node_images {
            kruise.note_fleet_event(FleetEvent::Session(event), now);
        }
        of_jobs.map(FleetEvent::Session)
    }

    /// Updates the jobs on the slots that the NodeImages have taken or given back.
    fn move_slots(&mut self) {
        let moves = self.kruise.as_mut().map(Kruise::take_slot_changes).unwrap_or_default();
        for (node, taken) in moves {
            self.prepull.place_moved(&node, taken);
        }
    }
}

/// What of a session's event concerns tasks of NodeImages, and what those of jobs.
fn split_event(event: SessionEvent) -> (Option<SessionEvent>, Option<SessionEvent>) {
    match event {
        SessionEvent::Up { node, session, hello } => {
            let (of_node_images, of_jobs) =
                hello.open.iter().cloned().partition(|open| is_of_node_image(&open.task));
            let up = |open| SessionEvent::Up {
                node: node.clone(),
                session,
                hello: Box::new(Hello { open, ..(*hello).clone() }),
            };
            (Some(up(of_node_images)), Some(up(of_jobs)))
        }
        SessionEvent::Down { node, session } => (
            Some(SessionEvent::Down { node: node.clone(), session }),
            Some(SessionEvent::Down { node, session }),
        ),
        SessionEvent::Message { ref message, .. } => {
            let task = match message {
                EdgeMessage::Hello(_)
                | EdgeMessage::Trusts { .. }
                | EdgeMessage::State(_)
                | EdgeMessage::Configured { .. }
                | EdgeMessage::Other => None,
                EdgeMessage::Accepted { task } => Some(task),
                EdgeMessage::Progress(progress) => Some(&progress.task),
                EdgeMessage::Result(result) => Some(&result.task),
                // For the tracker of sites, which got it before.
                EdgeMessage::Blobs(blobs) => Some(&blobs.task),
            };
            if task.is_some_and(is_of_node_image) { (Some(event), None) } else { (None, Some(event)) }
        }
    }
}
