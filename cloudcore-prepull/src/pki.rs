//! skeleton
use std::{path::Path, sync::Arc};
use tokio_util::sync::CancellationToken;
/// Why there is no CA or no certificate.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {}
/// The CA.
pub struct Authority {}
impl Authority {
    /// From the Secret `prepull-ca`, made there first where it does not exist.
    pub async fn in_cluster(_client: kube::Client, _namespace: &str) -> Result<Self, PkiError> {
        todo!()
    }
    /// From files.
    pub fn from_files(_certificate: &Path, _key: &Path) -> Result<Self, PkiError> {
        todo!()
    }
}
/// cloudcore's own certificate.
pub struct ServerIdentity {}
impl ServerIdentity {
    /// For `localhost`, loopback and these names or addresses.
    pub fn new(_authority: Arc<Authority>, _advertise: &[String]) -> Result<Arc<Self>, PkiError> {
        todo!()
    }
    /// For port 10000.
    pub fn tunnel_tls(self: &Arc<Self>) -> Result<Arc<rustls::ServerConfig>, PkiError> {
        todo!()
    }
    /// For port 10002.
    pub fn enroll_tls(self: &Arc<Self>) -> Result<Arc<rustls::ServerConfig>, PkiError> {
        todo!()
    }
    /// Renews it until `shutdown`.
    pub async fn keep_renewed(self: Arc<Self>, _shutdown: CancellationToken) {
        todo!()
    }
}
