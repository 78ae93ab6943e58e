//! The list of edges, for people: nothing depends on it, and it isn't stored. It begins when this process becomes the
//! leader. Sessions report themselves; Nodes and recorded keys come with each query.

mod downloads;
mod words;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use parking_lot::Mutex;
use prepull_admission::records::record::Recorded;
use prepull_api::edges::{EdgeList, EdgeQuery, ListedEdge};
use prepull_api::task::{NodeName, TaskId};
use prepull_api::wire::{EdgeMessage, Filesystem, Hello, MAX_OPEN_TASKS, NodeState, OpenPhase};
use prepull_engine::fleet::node_view::NodeView;
use prepull_engine::fleet::session::SessionId;

use crate::edges::pki::peer::PeerIdentity;
use downloads::TaskDownloads;
use words::Words;

/// What is known of the edges of this term.
#[derive(Debug, Default)]
pub(crate) struct Directory {
    all: Mutex<All>,
}

#[derive(Debug, Default)]
struct All {
    /// Edges that have been connected and still have a Node.
    // Boxed, because a large table has up to as much room again for what is to come.
    known: HashMap<NodeName, Box<KnownEdge>>,
    words: Words,
}

/// What is known of one edge.
#[derive(Debug)]
struct KnownEdge {
    session: SessionId,
    is_connected: bool,
    /// When the session began or, once it has ended, when that was.
    since: Timestamp,
    certificate_until: SystemTime,
    version: Arc<str>,
    os: Arc<str>,
    arch: Arc<str>,
    max_tasks: u32,
    state: ReportedState,
    /// The tasks that it has accepted and not finished, a handful mostly.
    open: Vec<TaskId>,
    downloads: TaskDownloads,
    /// Whether the Node has gone: then the end of the session ends this as well.
    is_nodeless: bool,
}

/// State that an edge reports while its session lasts.
#[derive(Debug)]
struct ReportedState {
    runtime: Option<Arc<str>>,
    disk: Option<EdgeDisk>,
}

#[derive(Debug)]
struct EdgeDisk {
    mountpoint: Arc<str>,
    available: u64,
    capacity: u64,
}

impl Directory {
    /// Notes a session that has begun. It replaces an earlier one of the node, and a later one that has been noted already stays.
    pub(crate) fn note_connected(
        &self,
        peer: &PeerIdentity,
        session: SessionId,
        hello: &Hello,
        now: Timestamp,
    ) {
        let open = hello.open.iter().filter(|open| open.phase != OpenPhase::Finished);
        let open = open.map(|open| open.task.clone()).collect();
        let mut all = self.all.lock();
        let All { known, words } = &mut *all;
        if known.get(&peer.node).is_some_and(|known| known.session > session) {
            return;
        }
        let now_known = KnownEdge {
            session,
            is_connected: true,
            since: now,
            certificate_until: peer.not_after,
            version: words.intern_line(&hello.version),
            os: words.intern_line(&hello.os),
            arch: words.intern_line(&hello.arch),
            max_tasks: hello.max_tasks.unwrap_or(1),
            state: words.keep_state(hello.runtime.as_deref(), hello.image_filesystem.as_ref()),
            open,
            downloads: TaskDownloads::default(),
            is_nodeless: false,
        };
        known.insert(peer.node.clone(), Box::new(now_known));
    }

    /// Updates the edge from a message of its session.
    pub(crate) fn apply_message(
        &self,
        node: &NodeName,
        session: SessionId,
        message: &EdgeMessage,
        now: Timestamp,
    ) {
        if matches!(message, EdgeMessage::Hello(_) | EdgeMessage::Trusts { .. } | EdgeMessage::Other) {
            return;
        }
        let mut all = self.all.lock();
        let All { known, words } = &mut *all;
        let Some(known) = known.get_mut(node).filter(|known| known.session == session) else { return };
        match message {
            // As many as an honest edge has.
            EdgeMessage::Accepted { task }
                if known.open.len() < MAX_OPEN_TASKS && !known.open.contains(task) =>
            {
                known.open.push(task.clone());
            }
            EdgeMessage::Result(result) => {
                known.open.retain(|task| *task != result.task);
                known.open.shrink_to_fit();
                known.downloads.forget_task(&result.task);
            }
            EdgeMessage::Progress(progress) => known.downloads.note_progress(progress, now),
            EdgeMessage::Blobs(blobs) => known.downloads.mark_shared(&blobs.task, now),
            EdgeMessage::State(NodeState { runtime, image_filesystem }) => {
                known.state = words.keep_state(runtime.as_deref(), image_filesystem.as_ref());
            }
            _ => {}
        }
    }

    /// Notes that a session has ended, unless a newer one of the node has begun.
    pub(crate) fn note_disconnected(&self, node: &NodeName, session: SessionId, now: Timestamp) {
        let all = &mut self.all.lock().known;
        let Some(known) = all.get_mut(node).filter(|known| known.session == session) else { return };
        if known.is_nodeless {
            all.remove(node);
        } else {
            known.is_connected = false;
            known.since = now;
            known.downloads = TaskDownloads::default();
        }
    }

    /// Forgets the edges of Nodes that are not there any more.
    pub(crate) fn keep_nodes(&self, is_there: impl Fn(&NodeName) -> bool) {
        self.all.lock().known.retain(|node, known| {
            known.is_nodeless = !is_there(node);
            known.is_connected || !known.is_nodeless
        });
    }

    /// Notes whether there is this Node.
    pub(crate) fn note_node(&self, node: &NodeName, is_there: bool) {
        let all = &mut self.all.lock().known;
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
        (known_since, now): (Timestamp, Timestamp),
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
            version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        };
        let all = self.all.lock();
        for node in nodes {
            let known = all.known.get(&node.name).map(Box::as_ref);
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
                list.next = list.items.last().map(|last: &ListedEdge| last.name.clone());
                continue;
            }
            let edge = describe_edge(node, known, recorded(&node.name), site_label);
            let downloads = known.map(|known| known.downloads.rates(now)).unwrap_or_default();
            list.items.push(ListedEdge { downloads, ..edge });
        }
        list
    }
}

fn describe_edge(
    node: &NodeView,
    known: Option<&KnownEdge>,
    recorded: Recorded,
    site_label: &str,
) -> ListedEdge {
    let edge = ListedEdge {
        name: node.name.clone(),
        ready: node.ready,
        site: node.labels.get(site_label).cloned(),
        certificate_until: recorded.certificate_until.and_then(to_api_time),
        revoked: recorded.is_revoked,
        ..ListedEdge::default()
    };
    let Some(known) = known else { return edge };
    let said = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
    let disk = known.state.disk.as_ref().map(|disk| Filesystem {
        mountpoint: disk.mountpoint.to_string(),
        available: disk.available,
        capacity: disk.capacity,
    });
    // A key that was renewed to is recorded before the edge has it; one that has just joined may not be recorded yet.
    let until = recorded.certificate_until.max(Some(known.certificate_until));
    ListedEdge {
        connected: known.is_connected,
        connected_since: known.is_connected.then_some(Time(known.since)),
        last_seen: (!known.is_connected).then_some(Time(known.since)),
        version: said(&known.version),
        os: said(&known.os),
        arch: said(&known.arch),
        runtime: known.state.runtime.as_deref().map(str::to_owned),
        disk,
        certificate_until: until.and_then(to_api_time),
        tasks: u32::try_from(known.open.len()).ok(),
        max_tasks: Some(known.max_tasks),
        ..edge
    }
}

fn to_api_time(time: SystemTime) -> Option<Time> {
    Timestamp::try_from(time).ok().map(Time)
}

#[cfg(test)]
mod tests;
