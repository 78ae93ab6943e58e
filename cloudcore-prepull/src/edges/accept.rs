//! Accepting TCP connections without giving up on errors.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};

/// The wait after a failed accept. It usually fails because no file descriptor is left, and would fail again at
/// once.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Waits for the next connection. Failures are logged and retried. Cancel-safe.
pub(super) async fn accept_connection(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok(connection) => return connection,
            Err(error) => {
                tracing::warn!(%error, "accept failed; is the limit of open files (ulimit -n) too low?");
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        }
    }
}
