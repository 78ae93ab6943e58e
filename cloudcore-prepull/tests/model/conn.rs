//! The connections between edges and the cloud, and what arrives through them.

use std::collections::VecDeque;
use std::time::Duration;

use edgecore_prepull::tasks::agent::AgentEvent;
use prepull_api::crd::status::NodePhase;
use prepull_api::task::TaskId;
use prepull_api::wire::{Assign, CloudMessage, EdgeMessage, Hello, OpenPhase, OpenTask, Welcome};
use prepull_engine::fleet::event::FleetEvent;
use prepull_engine::fleet::session::{SessionEvent, SessionId};

use crate::cloud::Boot;
use crate::edge::Edge;
use crate::trace::told;
use crate::world::World;

/// A connection, from the edge's dial until both sides know that it has ended.
#[allow(clippy::struct_excessive_bools, reason = "each changes by itself")]
pub(crate) struct Conn {
    pub(crate) edge: usize,
    /// The edge's first message, until the cloud has answered it.
    pub(crate) hello: Option<Hello>,
    /// Whether the edge knows removals, by its hello.
    pub(crate) removes: bool,
    pub(crate) session: SessionId,
    pub(crate) to_edge: VecDeque<CloudMessage>,
    pub(crate) to_cloud: VecDeque<EdgeMessage>,
    /// The task that the edge has received last.
    pub(crate) assigned: Option<Assign>,
    /// Whether the link is cut, so that nothing arrives any more.
    pub(crate) cut: bool,
    pub(crate) edge_open: bool,
    pub(crate) cloud_open: bool,
}

impl World {
    pub(crate) fn dial(&mut self, edge: usize) {
        if self.edges[edge].conn.is_some() {
            return;
        }
        self.next_conn += 1;
        let mut open = self.edges[edge].agent.open_tasks();
        if !self.calm && self.rng.chance(4) {
            open.extend(self.forge_task(edge));
        }
        let pins = Edge::can_pin(edge).then(|| self.edges[edge].pins.iter().cloned().collect());
        let (max_tasks, removes) = (Some(self.edges[edge].max_tasks), self.edges[edge].removes);
        let hello = Hello { max_tasks, open, pins, removes, ..Hello::default() };
        self.log(|| {
            format!(
                "n{edge}: dials, open {:?}",
                hello.open.iter().map(|o| (o.task.to_string(), o.phase)).collect::<Vec<_>>()
            )
        });
        let conn = Conn {
            edge,
            hello: Some(hello),
            removes,
            session: SessionId(0),
            to_edge: VecDeque::new(),
            to_cloud: VecDeque::new(),
            assigned: None,
            cut: false,
            edge_open: true,
            cloud_open: true,
        };
        self.conns.insert(self.next_conn, conn);
        self.edges[edge].conn = Some(self.next_conn);
    }

    /// (4) A task that the edge claims to have, and that its node has not started.
    fn forge_task(&mut self, edge: usize) -> Option<OpenTask> {
        let job = self.any_job()?;
        let record = self.api.record(&job, &self.edges[edge].node)?;
        let attempt = record.attempt.max(self.api.first_attempt(&job));
        let task = TaskId { job, attempt };
        let phase = self.rng.pick(&[OpenPhase::Running, OpenPhase::NeedsKeys]);
        (record.phase == NodePhase::Pending).then_some(OpenTask { task, phase, limited: false })
    }

    /// The cloud accepts a session, which replaces an earlier one of the node.
    pub(crate) fn welcome(&mut self, id: u64) {
        if self.cloud.boot != Boot::Up {
            return;
        }
        let Some(conn) = self.conns.get_mut(&id).filter(|conn| !conn.cut) else { return };
        let Some(hello) = conn.hello.take() else { return };
        self.cloud.sessions += 1;
        conn.session = SessionId(self.cloud.sessions);
        let (session, node) = (conn.session, self.edges[conn.edge].node.clone());
        conn.to_edge.push_back(CloudMessage::Welcome(Welcome {
            session: session.to_string(),
            heartbeat: Duration::from_secs(15),
            progress_interval: Duration::from_secs(1),
            state_interval: None,
            tickets: None,
        }));
        self.cloud.registry.insert(node.clone(), id);
        self.log(|| format!("cloud: welcomes {node} as session {session}"));
        self.cloud.push(FleetEvent::Session(SessionEvent::Up { node, session, hello: Box::new(hello) }));
    }

    pub(crate) fn cut(&mut self, id: u64) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.cut = true;
        conn.to_edge.clear();
        conn.to_cloud.clear();
        let edge = conn.edge;
        self.log(|| format!("net: session of n{edge} is cut"));
    }

    /// One side of a connection that has ended notices it.
    pub(crate) fn notice(&mut self, id: u64, edge_side: bool) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let edge = conn.edge;
        let node = self.edges[edge].node.clone();
        let replaced = conn.hello.is_none() && self.cloud.registry.get(&node) != Some(&id);
        let over = conn.cut || !conn.edge_open || !conn.cloud_open || replaced;
        if !over {
            return;
        }
        if edge_side && conn.edge_open {
            conn.edge_open = false;
            self.edges[edge].conn = None;
            self.log(|| format!("n{edge}: disconnected"));
            self.on_edge(edge, AgentEvent::Disconnected);
        } else if !edge_side && conn.cloud_open {
            conn.cloud_open = false;
            if conn.hello.is_none() {
                let session = conn.session;
                if !replaced {
                    self.cloud.registry.remove(&node);
                }
                self.cloud.push(FleetEvent::Session(SessionEvent::Down { node, session }));
            }
        }
        self.bury();
    }

    pub(crate) fn bury(&mut self) {
        self.conns.retain(|_, conn| conn.edge_open || conn.cloud_open);
    }

    pub(crate) fn reach_cloud(&mut self, id: u64) -> bool {
        let again = self.duplicates && !self.calm && self.rng.chance(10);
        let Some(conn) = self.conns.get_mut(&id) else { return false };
        if conn.hello.is_some() || !conn.cloud_open {
            return false;
        }
        let Some(message) = conn.to_cloud.pop_front() else { return false };
        if again {
            conn.to_cloud.push_back(message.clone());
        }
        let (node, session) = (self.edges[conn.edge].node.clone(), conn.session);
        self.cloud.push(FleetEvent::Session(SessionEvent::Message { node, session, message }));
        true
    }

    pub(crate) fn reach_edge(&mut self, id: u64) -> bool {
        let again = self.duplicates && !self.calm && self.rng.chance(10);
        let Some(conn) = self.conns.get_mut(&id) else { return false };
        if !conn.edge_open {
            return false;
        }
        let Some(message) = conn.to_edge.pop_front() else { return false };
        if again && !matches!(message, CloudMessage::Welcome(_)) {
            conn.to_edge.push_back(message.clone());
        }
        if let CloudMessage::Assign(assign) = &message {
            let is_known = conn.removes || assign.task.removal.is_none();
            assert!(is_known, "{} reaches an agent too old for it", assign.task.id);
            conn.assigned = Some(assign.clone());
        }
        let edge = conn.edge;
        self.log(|| format!("n{edge} ◀ {}", told(&message)));
        self.on_edge(
            edge,
            match message {
                CloudMessage::Welcome(_) => AgentEvent::Connected,
                CloudMessage::Assign(assign) => AgentEvent::Assign(assign),
                CloudMessage::ResultAck { task } => AgentEvent::ResultAck(task),
                CloudMessage::Cancel { task, reason } => AgentEvent::Cancel { task, reason },
                CloudMessage::Unpin { jobs } => {
                    self.edges[edge].unpin(&jobs);
                    return true;
                }
                CloudMessage::Sources(_)
                | CloudMessage::Settings(_)
                | CloudMessage::Trust(_)
                | CloudMessage::Goaway { .. }
                | CloudMessage::Other => {
                    return true;
                }
            },
        );
        true
    }
}
