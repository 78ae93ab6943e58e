//! What is known of each edge since this process leads, for people who look: nothing is decided by it, and nothing of it is
//! stored. A session tells of itself here; the Nodes and the ends of certificates come from those who know them anyway.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_admission::records::record::Recorded;
use prepull_api::edges::{Edge, EdgeList, EdgeQuery};
use prepull_api::task::{NodeName, TaskId};
use prepull_api::text::to_plain_line;
use prepull_api::wire::{EdgeMessage, Filesystem, Hello, MAX_OPEN_TASKS, NodeState, OpenPhase};
use prepull_engine::shared::node_view::NodeView;
use prepull_engine::shared::session::SessionId;

/// The most characters that are kept of what an edge says in a word or two: a message may have a million.
const MAX_WORD: usize = 128;

/// What is known of the edges of this term.
#[derive(Debug, Default)]
pub(crate) struct Directory {
    /// Those that were connected, and whose Node has not gone since.
    known: Mutex<HashMap<NodeName, Known>>,
}

/// What is known of one edge.
#[derive(Debug)]
struct Known {
    session: SessionId,
    is_connected: bool,
    /// When the session began or, once it has ended, when that was.
    since: Timestamp,
    certificate_until: SystemTime,
    /// Of the last `Hello`, without what may be long.
    hello: Hello,
    /// The tasks that it has accepted and not finished.
    open: HashSet<TaskId>,
    /// Whether the Node has gone: then the end of the session ends this as well.
    is_nodeless: bool,
}

impl Directory {
    /// Notes a session that has begun. It replaces an earlier one of the node.
    pub(crate) fn connect(
        &self,
        node: &NodeName,
        session: SessionId,
        hello: &Hello,
        certificate_until: SystemTime,
        now: Timestamp,
    ) {
        let open = hello.open.iter().filter(|open| open.phase != OpenPhase::Finished);
        let open = open.map(|open| open.task.clone()).collect();
        let state = state(hello.runtime.as_deref(), hello.image_filesystem.as_ref());
        let hello = Hello {
            version: word(&hello.version),
            os: word(&hello.os),
            arch: word(&hello.arch),
            runtime: state.runtime,
            image_filesystem: state.image_filesystem,
            max_tasks: hello.max_tasks,
            ..Hello::default()
        };
        let known = Known {
            session,
            is_connected: true,
            since: now,
            certificate_until,
            hello,
            open,
            is_nodeless: false,
        };
        self.lock().insert(node.clone(), known);
    }

    /// Takes over what a message of the session says.
    pub(crate) fn hear(&self, node: &NodeName, session: SessionId, message: &EdgeMessage) {
        if !matches!(message, EdgeMessage::Accepted { .. } | EdgeMessage::Result(_) | EdgeMessage::State(_)) {
            return;
        }
        let mut known = self.lock();
        let Some(known) = known.get_mut(node).filter(|known| known.session == session) else { return };
        match message {
            // As many as an honest edge has.
            EdgeMessage::Accepted { task } if known.open.len() < MAX_OPEN_TASKS => {
                known.open.insert(task.clone());
            }
            EdgeMessage::Result(result) => _ = known.open.remove(&result.task),
            EdgeMessage::State(NodeState { runtime, image_filesystem }) => {
                let state = state(runtime.as_deref(), image_filesystem.as_ref());
                known.hello.runtime = state.runtime;
                known.hello.image_filesystem = state.image_filesystem;
            }
            _ => {}
        }
    }

    /// Notes that a session has ended, unless a newer one of the node has begun.
    pub(crate) fn disconnect(&self, node: &NodeName, session: SessionId, now: Timestamp) {
        let mut all = self.lock();
        let Some(known) = all.get_mut(node).filter(|known| known.session == session) else { return };
        if known.is_nodeless {
            all.remove(node);
        } else {
            known.is_connected = false;
            known.since = now;
        }
    }

    /// Forgets the edges of Nodes that are not there any more.
    pub(crate) fn keep_nodes(&self, is_there: impl Fn(&NodeName) -> bool) {
        self.lock().retain(|node, known| {
            known.is_nodeless = !is_there(node);
            known.is_connected || !known.is_nodeless
        });
    }

    /// Notes whether there is this Node.
    pub(crate) fn note_node(&self, node: &NodeName, is_there: bool) {
        let mut all = self.lock();
        let Some(known) = all.get_mut(node) else { return };
        known.is_nodeless = !is_there;
        if !is_there && !known.is_connected {
            all.remove(node);
        }
    }

    /// The edges that are asked for, of these Nodes, which come in the order of their names: those that are edge nodes, and
    /// those that were connected. `site_label` is the label of their sites, unless the query names another one.
    pub(crate) fn list<'a>(
        &self,
        nodes: impl Iterator<Item = &'a NodeView>,
        is_edge: impl Fn(&NodeView) -> bool,
        recorded: impl Fn(&NodeName) -> Recorded,
        query: &EdgeQuery,
        known_since: Timestamp,
        site_label: &str,
    ) -> EdgeList {
        let site_label = query.site_label.as_deref().unwrap_or(site_label);
        let mut list = EdgeList {
            items: Vec::new(),
            total: 0,
            connected: 0,
            next: None,
            known_since: Time(known_since),
            site_label: Some(site_label.to_owned()),
        };
        let all = self.lock();
        for node in nodes {
            let known = all.get(&node.name);
            let is_connected = known.is_some_and(|known| known.is_connected);
            let is_shown = (known.is_some() || is_edge(node))
                && query.wants(&node.name, is_connected)
                && query.selector.matches(&node.labels);
            if !is_shown {
                continue;
            }
            list.total += 1;
            list.connected += usize::from(is_connected);
            if query.after.as_ref().is_some_and(|after| node.name <= *after) || list.next.is_some() {
                continue;
            }
            if list.items.len() == query.limit() {
                list.next = list.items.last().map(|last: &Edge| last.name.clone());
                continue;
            }
            list.items.push(describe(node, known, recorded(&node.name), site_label));
        }
        list
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<NodeName, Known>> {
        // Nothing that holds the lock can leave the table half changed.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn describe(node: &NodeView, known: Option<&Known>, recorded: Recorded, site_label: &str) -> Edge {
    let edge = Edge {
        name: node.name.clone(),
        ready: node.ready,
        site: node.labels.get(site_label).cloned(),
        certificate_until: recorded.certificate_until.and_then(time),
        revoked: recorded.is_revoked,
        ..Edge::default()
    };
    let Some(known) = known else { return edge };
    let Hello { version, os, arch, runtime, image_filesystem, max_tasks, .. } = known.hello.clone();
    let said = |text: String| Some(text).filter(|text| !text.is_empty());
    // A key that was renewed to is recorded before the edge has it; one that has just joined may not be recorded yet.
    let until = recorded.certificate_until.max(Some(known.certificate_until));
    Edge {
        connected: known.is_connected,
        connected_since: known.is_connected.then_some(Time(known.since)),
        last_seen: (!known.is_connected).then_some(Time(known.since)),
        version: said(version),
        os: said(os),
        arch: said(arch),
        runtime,
        disk: image_filesystem,
        certificate_until: until.and_then(time),
        tasks: u32::try_from(known.open.len()).ok(),
        max_tasks: Some(max_tasks.unwrap_or(1)),
        ..edge
    }
}

fn time(time: SystemTime) -> Option<Time> {
    Timestamp::try_from(time).ok().map(Time)
}

fn word(text: &str) -> String {
    to_plain_line(text, MAX_WORD)
}

fn state(runtime: Option<&str>, filesystem: Option<&Filesystem>) -> NodeState {
    let bounded = |disk: &Filesystem| Filesystem { mountpoint: word(&disk.mountpoint), ..disk.clone() };
    NodeState { runtime: runtime.map(word), image_filesystem: filesystem.map(bounded) }
}

#[cfg(test)]
mod tests;
