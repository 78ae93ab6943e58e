//! Settings of nodes: which `ImagePrePullSettings` choose a node, what they set together, and whether it's in force.
//!
//! ```text
//!  objects ─▶ parse ─┐
//!  labels of nodes ──┴▶ wanted ─▶ Action::Configure ═▶ node ═▶ Configured ─▶ informed ─▶ Action::WriteStatus
//! ```
//! Where several choose a node, those that are later by name override earlier ones, setting by setting. While an object is
//! invalid, the nodes that it chooses keep what they have: a typing error must not lift a cap. A node that has nothing yet gets
//! what the others set.

mod parse;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use prepull_api::crd::settings::{ImagePrePullSettings, ImagePrePullSettingsStatus};
use prepull_api::download::{MAX_WINDOWS, MAX_ZONE_NAME, Weekday, Window, Zone};
use prepull_api::settings::NodeSettings;
use prepull_api::task::{JobUid, NodeName};
use prepull_api::wire::EdgeMessage;
use serde::{Deserialize, Serialize};

use crate::fleet::node_view::NodeView;
use crate::fleet::session::{SessionEvent, SessionId};
use crate::prepull::aggregate::conditions::{Fact, merge_conditions};
use crate::shared::objects::ObjectId;
use crate::shared::pacing::Moment as _;
use parse::{Parsed, parse_spec};

/// Most objects that count, so that a look over 10,000 nodes takes milliseconds; a fleet has a few groups of nodes. The oldest
/// ones count: a new one must not take another out of force.
pub const MAX_SETTINGS: usize = 100;
/// Shortest time between two looks at the statuses: each counts the nodes of every object.
const STATUS_PERIOD: Duration = Duration::from_secs(5);
/// How long a written status may take to come back by the watch before it's written again.
const WRITE_PATIENCE: Duration = Duration::from_secs(60);
/// Nodes of each state that a message names.
const NAMED: usize = 3;
const READY: &str = "Ready";

/// What happened to the objects.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Input {
    /// All that exist.
    All(Vec<ImagePrePullSettings>),
    /// One is new or has changed.
    One(Box<ImagePrePullSettings>),
    /// The one of this name doesn't exist any more.
    Gone(String),
}

/// What the shell is asked for.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Send a node its settings.
    Configure(NodeName, NodeSettings),
    /// Replace the status of an object.
    WriteStatus(ObjectId, Box<ImagePrePullSettingsStatus>),
}

/// The settings of all nodes.
#[derive(Debug, Default)]
pub struct FleetSettings {
    /// By name, which is their precedence.
    objects: BTreeMap<String, SettingsEntry>,
    /// Whether all objects are known.
    listed: bool,
    agents: BTreeMap<NodeName, ConnectedAgent>,
    /// Nodes that may need other settings, and whether all of them may.
    changed: BTreeSet<NodeName>,
    all_changed: bool,
    /// Most nodes have no settings, and share these.
    none: Arc<NodeSettings>,
    /// Whether a status may be another one, and when they were looked at.
    statuses_due: bool,
    looked: Option<Timestamp>,
}

#[derive(Debug)]
struct SettingsEntry {
    id: ObjectId,
    generation: i64,
    parsed: Parsed,
    /// The status as the API server has it.
    status: ImagePrePullSettingsStatus,
    created: Option<Timestamp>,
    /// Whether there are [`MAX_SETTINGS`] older ones.
    is_beyond: bool,
    /// The status that was written last, and when.
    written: Option<(ImagePrePullSettingsStatus, Timestamp)>,
}

/// The agent of a connected node.
#[derive(Debug)]
struct ConnectedAgent {
    session: SessionId,
    /// What's in force on it. None for an agent that can't take settings.
    has: Option<Arc<NodeSettings>>,
    /// What was sent in this session.
    sent: Option<Arc<NodeSettings>>,
    /// Whether it has confirmed something since then.
    has_answered: bool,
}

impl FleetSettings {
    /// Takes in a change of the objects.
    pub fn handle(&mut self, input: Input) {
        let mut is_same = false;
        match input {
            Input::All(objects) => {
                let mut before = std::mem::take(&mut self.objects);
                for object in objects {
                    let known = object.metadata.name.as_ref().and_then(|name| before.remove(name));
                    self.put_object(&object, known);
                }
                self.listed = true;
            }
            Input::One(object) => {
                let known = object.metadata.name.as_ref().and_then(|name| self.objects.remove(name));
                is_same = self.put_object(&object, known);
            }
            Input::Gone(name) => _ = self.objects.remove(&name),
        }
        self.count_oldest();
        // A status may be one that we've written before another, and that was late.
        self.statuses_due = true;
        // With our own status nothing else changes.
        self.all_changed |= !is_same;
    }

    /// Marks the objects that don't count.
    fn count_oldest(&mut self) {
        let mut by_age: Vec<_> = self.objects.values_mut().collect();
        by_age.sort_by_key(|entry| entry.created);
        for (index, entry) in by_age.into_iter().enumerate() {
            entry.is_beyond = index >= MAX_SETTINGS;
        }
    }

    /// Returns whether the object was known with this spec.
    fn put_object(&mut self, object: &ImagePrePullSettings, known: Option<SettingsEntry>) -> bool {
        let meta = &object.metadata;
        let id = ObjectId {
            namespace: String::new(),
            name: meta.name.clone().unwrap_or_default(),
            uid: JobUid(meta.uid.clone().unwrap_or_default()),
        };
        let generation = meta.generation.unwrap_or(0);
        let known = known.filter(|known| known.id == id);
        let is_same = known.as_ref().is_some_and(|known| known.generation == generation);
        let entry = SettingsEntry {
            generation,
            parsed: parse_spec(&object.spec),
            status: object.status.clone().unwrap_or_default(),
            created: meta.creation_timestamp.as_ref().map(|created| created.0),
            is_beyond: false,
            written: known.and_then(|known| known.written),
            id,
        };
        self.objects.insert(entry.id.name.clone(), entry);
        is_same
    }

    /// All nodes may have other labels.
    pub(crate) fn relabel_all(&mut self) {
        self.all_changed = true;
        self.statuses_due = true;
    }

    /// The node is new, or has other labels, or is gone.
    pub(crate) fn relabel(&mut self, node: &NodeName) {
        self.changed.insert(node.clone());
        self.statuses_due = true;
    }

    /// A session has begun or ended, or its node has said something.
    pub(crate) fn note_session_event(&mut self, event: &SessionEvent) {
        match event {
            SessionEvent::Up { node, session, hello } => {
                if self.agents.get(node).is_some_and(|agent| agent.session > *session) {
                    return;
                }
                let has = hello.settings.as_ref().map(|settings| self.claimed_settings(settings));
                self.agents.insert(
                    node.clone(),
                    ConnectedAgent { session: *session, has, sent: None, has_answered: false },
                );
                self.changed.insert(node.clone());
            }
            SessionEvent::Down { node, session } => {
                if self.agents.get(node).is_none_or(|agent| agent.session != *session) {
                    return;
                }
                self.agents.remove(node);
            }
            SessionEvent::Message { node, session, message: EdgeMessage::Configured { settings, .. } } => {
                let has = self.claimed_settings(settings);
                let Some(agent) = self.agents.get_mut(node).filter(|agent| agent.session == *session) else {
                    return;
                };
                agent.has = Some(has);
                agent.has_answered = true;
                // It may answer to an earlier message of two.
                self.changed.insert(node.clone());
            }
            SessionEvent::Message { .. } => return,
        }
        self.statuses_due = true;
    }

    /// Sends nodes the settings that they lack, and writes the statuses that have changed.
    pub fn flush(&mut self, nodes: &BTreeMap<NodeName, NodeView>, now: Timestamp) -> Vec<Action> {
        if !self.listed {
            return Vec::new();
        }
        let mut actions = Vec::new();
        let mut changed = std::mem::take(&mut self.changed);
        if std::mem::take(&mut self.all_changed) {
            changed = self.agents.keys().cloned().collect();
        }
        for node in changed.iter().filter_map(|name| nodes.get(name)) {
            self.configure(node, &mut actions);
        }
        if self.next_wakeup().is_some_and(|due| due <= now) {
            self.write_statuses(nodes, now, &mut actions);
        }
        actions
    }

    /// When [`Self::flush`] has something to do even without an input.
    pub fn next_wakeup(&self) -> Option<Timestamp> {
        let due = self.looked.map_or(Timestamp::MIN, |looked| looked.later_by(STATUS_PERIOD));
        (self.listed && self.statuses_due && !self.objects.is_empty()).then_some(due)
    }

    fn configure(&mut self, node: &NodeView, actions: &mut Vec<Action>) {
        let chosen = self.objects_choosing(node);
        let (is_valid, wanted) =
            (chosen.iter().all(|entry| entry.1.parsed.settings.is_ok()), merge_settings(&chosen));
        let Some(agent) = self.agents.get_mut(&node.name) else { return };
        let Some(has) = &agent.has else { return };
        let last = agent.sent.as_ref().unwrap_or(has);
        if last.as_ref() != &wanted && (is_valid || last.is_empty()) {
            agent.sent = Some(Arc::new(wanted.clone()));
            agent.has_answered = false;
            actions.push(Action::Configure(node.name.clone(), wanted));
        }
    }

    /// The objects that choose a node, each with its place, in their precedence.
    fn objects_choosing(&self, node: &NodeView) -> Vec<(usize, &SettingsEntry)> {
        let all = self.objects.values().enumerate().filter(|(_, entry)| !entry.is_beyond);
        all.filter(|(_, entry)| node.is_edge() && entry.parsed.chooses(node)).collect()
    }

    /// What a node claims to have, in bounds that hold for all that a cloud sends. A lie counts as no settings: a stolen box
    /// must not fill our memory.
    fn claimed_settings(&self, settings: &NodeSettings) -> Arc<NodeSettings> {
        let has_long_zone =
            |window: &Window| matches!(&window.time_zone, Zone::Named(name) if name.len() > MAX_ZONE_NAME);
        let windows = &settings.windows;
        let is_lie = windows.len() > MAX_WINDOWS
            || windows.iter().any(|window| window.days.len() > Weekday::ALL.len() || has_long_zone(window));
        if is_lie || settings.is_empty() { self.none.clone() } else { Arc::new(settings.clone()) }
    }

    fn write_statuses(
        &mut self,
        nodes: &BTreeMap<NodeName, NodeView>,
        now: Timestamp,
        actions: &mut Vec<Action>,
    ) {
        self.looked = Some(now);
        self.statuses_due = false;
        let mut tallies = vec![SettingsTally::default(); self.objects.len()];
        for node in nodes.values() {
            let chosen = self.objects_choosing(node);
            let valid = || chosen.iter().filter(|(_, entry)| entry.parsed.settings.is_ok());
            if valid().next().is_some() {
                let state = self.state_of(&node.name, &merge_settings(&chosen));
                valid().for_each(|(index, _)| tallies[*index].count(&node.name, state));
            }
        }
        for (entry, tally) in self.objects.values_mut().zip(tallies) {
            let status = entry.status_with(&tally, now);
            if status == entry.status {
                entry.written = None;
                continue;
            }
            // Until the watch has it, or the write has failed.
            self.statuses_due = true;
            let is_written = |(written, at): &(ImagePrePullSettingsStatus, Timestamp)| {
                *written == status && now < at.later_by(WRITE_PATIENCE)
            };
            if !entry.written.as_ref().is_some_and(is_written) {
                entry.written = Some((status.clone(), now));
                actions.push(Action::WriteStatus(entry.id.clone(), Box::new(status)));
            }
        }
    }

    fn state_of(&self, node: &NodeName, wanted: &NodeSettings) -> SettingsState {
        let Some(agent) = self.agents.get(node) else { return SettingsState::Offline };
        match agent.has.as_deref() {
            None => SettingsState::TooOld,
            Some(has) if has == wanted => SettingsState::Informed,
            // It confirms what it can read.
            Some(has)
                if agent.has_answered && agent.sent.as_deref() == Some(wanted) && has.is_part_of(wanted) =>
            {
                SettingsState::TooOld
            }
            Some(_) => SettingsState::Waiting,
        }
    }
}

/// What these objects set together. An invalid one sets nothing.
fn merge_settings(chosen: &[(usize, &SettingsEntry)]) -> NodeSettings {
    let mut merged = NodeSettings::default();
    for settings in chosen.iter().filter_map(|(_, entry)| entry.parsed.settings.as_ref().ok()) {
        merged.override_with(settings);
    }
    merged
}

#[derive(Clone, Copy)]
enum SettingsState {
    Informed,
    Waiting,
    TooOld,
    Offline,
}

/// The nodes that an object chooses, by their state.
#[derive(Clone, Default)]
struct SettingsTally {
    informed: NodesInState,
    waiting: NodesInState,
    too_old: NodesInState,
    offline: NodesInState,
}

/// A number of nodes, and the names of the first ones.
#[derive(Clone, Default)]
struct NodesInState {
    count: u32,
    names: Vec<NodeName>,
}

impl NodesInState {
    /// As "2 nodes {verb} …: edge-1, edge-2", if there are any.
    fn describe(&self, one: &str, several: &str) -> Option<String> {
        let names: Vec<_> = self.names.iter().map(NodeName::as_str).collect();
        let more = if self.count as usize > names.len() { ", …" } else { "" };
        let subject = match self.count {
            0 => return None,
            1 => format!("1 node {one}"),
            count => format!("{count} nodes {several}"),
        };
        Some(format!("{subject}: {}{more}", names.join(", ")))
    }
}

impl SettingsTally {
    fn count(&mut self, node: &NodeName, state: SettingsState) {
        let group = match state {
            SettingsState::Informed => &mut self.informed,
            SettingsState::Waiting => &mut self.waiting,
            SettingsState::TooOld => &mut self.too_old,
            SettingsState::Offline => &mut self.offline,
        };
        group.count += 1;
        if group.names.len() < NAMED {
            group.names.push(node.clone());
        }
    }

    fn node_count(&self) -> u32 {
        let Self { informed, waiting, too_old, offline } = self;
        informed.count + waiting.count + too_old.count + offline.count
    }

    fn ready_fact(&self) -> Fact {
        let fact = |status, reason, message| Fact { type_: READY, status: Some(status), reason, message };
        let Self { informed: _, waiting, too_old, offline } = self;
        if self.node_count() == 0 {
            return fact(true, "NoNodes", "no edge node is chosen".to_owned());
        }
        let old = "an agent that doesn't know all of these settings (update edgecore-prepull)";
        let parts = [
            waiting.describe("has not confirmed it yet", "have not confirmed it yet"),
            too_old.describe(&format!("has {old}"), &format!("have {old}")),
            offline.describe("is not connected, and gets it then", "are not connected, and get it then"),
        ];
        let message = parts.into_iter().flatten().collect::<Vec<_>>().join("; ");
        match (too_old.count, waiting.count) {
            (0, 0) => fact(true, "InForce", message),
            (0, _) => fact(false, "Waiting", message),
            _ => fact(false, "AgentTooOld", message),
        }
    }
}

impl SettingsEntry {
    fn status_with(&self, tally: &SettingsTally, now: Timestamp) -> ImagePrePullSettingsStatus {
        let bad = |reason, message| Fact { type_: READY, status: Some(false), reason, message };
        let ready = match &self.parsed.settings {
            Err(refusal) => bad("Invalid", format!("{refusal}; the nodes keep what they have")),
            Ok(_) if self.is_beyond => {
                bad("TooMany", format!("there are {MAX_SETTINGS} older ones, and no more count"))
            }
            Ok(_) => tally.ready_fact(),
        };
        // A condition has its time from the first write, whether that has come back or not.
        let before = self.written.as_ref().map_or(&self.status, |(written, _)| written);
        ImagePrePullSettingsStatus {
            observed_generation: self.generation,
            nodes: tally.node_count(),
            informed: tally.informed.count,
            conditions: merge_conditions(&before.conditions, vec![ready], Some(self.generation), now),
        }
    }
}
