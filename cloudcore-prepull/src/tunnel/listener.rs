//! Accepts connections.
use super::{SessionEvent, registry::Sessions};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Bounds and timing of the tunnel's cloud side.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `--heartbeat`.
    pub heartbeat: Duration,
}
impl Default for Settings {
    fn default() -> Self {
        todo!()
    }
}
/// Listens.
pub fn bind(_address: std::net::SocketAddr) -> std::io::Result<TcpListener> {
    todo!()
}
/// Serves until `shutdown`, then drains.
pub async fn serve(
    _listener: TcpListener,
    _tls: Arc<rustls::ServerConfig>,
    _sessions: Sessions,
    _events: mpsc::Sender<SessionEvent>,
    _settings: Settings,
    _shutdown: CancellationToken,
) {
    todo!()
}
