//! skeleton
use prepull_api::task::NodeName;
use std::path::Path;
use tokio_util::sync::CancellationToken;
/// DIR/connection.json
#[derive(Clone, Debug)]
pub struct Connection {
    /// wss://
    pub tunnel_url: String,
    /// https://
    pub enroll_url: String,
    /// Who this edge is
    pub node_name: NodeName,
}
impl Connection {
    /// Reads it.
    pub fn load(_state_dir: &Path) -> Result<Self, IdentityError> {
        todo!()
    }
}
/// Why.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {}
/// Certificate, key and CA.
#[derive(Clone)]
pub struct Identity {}
impl Identity {
    /// Reads DIR/pki.
    pub fn load(_state_dir: &Path) -> Result<Self, IdentityError> {
        todo!()
    }
    /// Who this edge is.
    pub fn node(&self) -> NodeName {
        todo!()
    }
    /// Renews until `shutdown`.
    pub async fn keep_renewed(self, _enroll_url: String, _shutdown: CancellationToken) {
        todo!()
    }
}
