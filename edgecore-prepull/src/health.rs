//! Asks the running agent on its metrics port whether it's connected and its runtime answers.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Deadline of one request; the agent answers within milliseconds.
const DEADLINE: Duration = Duration::from_secs(2);
/// Largest answer that we read; the agent's metrics have some ten KiB.
const MAX_ANSWER: u64 = 1 << 20;

/// The agent's own report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Health {
    /// The address of cloudcore with which it has a session.
    pub(crate) session: Option<String>,
    /// Whether the container runtime answers.
    pub(crate) is_runtime_up: bool,
}

/// Asks the agent; it listens on this address.
pub(crate) async fn fetch_health(listen: SocketAddr) -> io::Result<Health> {
    let metrics = get(listen, "/metrics").await?;
    let is_runtime_up = get(listen, "/readyz").await?.starts_with("HTTP/1.0 200 ");
    Ok(Health { session: find_session(&metrics), is_runtime_up })
}

fn find_session(metrics: &str) -> Option<String> {
    if !metrics.lines().any(|line| line == "edgecore_prepull_connected 1") {
        return None;
    }
    let address = |line: &str| {
        let (address, value) = line.strip_prefix("edgecore_prepull_session{address=\"")?.split_once("\"}")?;
        (value == " 1").then(|| address.to_owned())
    };
    // An agent may be connected and not name the address.
    Some(metrics.lines().find_map(address).unwrap_or_else(|| "cloudcore-prepull".to_owned()))
}

/// HTTP/1.0, so that the answer is not chunked and ends with the connection.
pub(crate) async fn get(listen: SocketAddr, path: &str) -> io::Result<String> {
    let exchange = async {
        let mut stream = TcpStream::connect(dial_address(listen)).await?;
        stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: {listen}\r\n\r\n").as_bytes()).await?;
        let mut answer = Vec::new();
        stream.take(MAX_ANSWER).read_to_end(&mut answer).await?;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    };
    timeout(DEADLINE, exchange).await?
}

/// A listener on all addresses also listens on loopback.
fn dial_address(listen: SocketAddr) -> SocketAddr {
    let ip = match listen {
        SocketAddr::V4(v4) if v4.ip().is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        SocketAddr::V6(v6) if v6.ip().is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        other => other.ip(),
    };
    SocketAddr::new(ip, listen.port())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::metrics::AgentMetrics;

    #[test]
    fn the_metrics_show_the_connection() {
        let metrics = AgentMetrics::default();
        let session = |metrics: &AgentMetrics| find_session(&metrics.render());
        assert_eq!(session(&metrics), None);
        metrics.set_connected(true);
        assert_eq!(session(&metrics).as_deref(), Some("cloudcore-prepull"));
        metrics.set_session(Some("wss://cloud.example:10000/v1/edge".to_owned()));
        assert_eq!(session(&metrics).as_deref(), Some("wss://cloud.example:10000/v1/edge"));
        metrics.set_connected(false);
        assert_eq!(session(&metrics), None);
    }

    #[test]
    fn a_wildcard_listener_is_asked_on_loopback() {
        let of = |text: &str| dial_address(text.parse().unwrap()).to_string();
        assert_eq!(of("0.0.0.0:1"), "127.0.0.1:1");
        assert_eq!(of("[::]:1"), "[::1]:1");
        assert_eq!(of("127.0.0.2:1"), "127.0.0.2:1");
    }
}
