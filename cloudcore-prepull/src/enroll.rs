//! skeleton
use crate::{pki::Authority, tokens::Tokens};
use std::{sync::Arc, time::Duration};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
/// Bounds.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `--edge-cert-ttl`
    pub certificate_ttl: Duration,
}
impl Default for Settings {
    fn default() -> Self {
        todo!()
    }
}
/// Serves until `shutdown`.
pub async fn serve(
    _listener: TcpListener,
    _tls: Arc<rustls::ServerConfig>,
    _authority: Arc<Authority>,
    _tokens: Tokens,
    _settings: Settings,
    _shutdown: CancellationToken,
) {
    todo!()
}
