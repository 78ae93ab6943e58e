//! Events of nodes and of their sessions, which concern every part of the engine.

use prepull_api::task::NodeName;
use serde::{Deserialize, Serialize};

use super::node_view::NodeView;
use super::session::SessionEvent;

/// What happened to nodes or to a session.
#[derive(Debug, Serialize, Deserialize)]
pub enum FleetEvent {
    /// The whole list of Nodes, after which those that are not in it are gone.
    Nodes(Vec<NodeView>),
    /// A Node is new or changed.
    Node(NodeView),
    /// A Node was deleted.
    NodeGone(NodeName),
    /// A session began, brought a message, or ended.
    Session(SessionEvent),
}
