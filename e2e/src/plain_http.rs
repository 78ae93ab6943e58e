//! Plain GET requests, for metrics endpoints and health checks.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Timeout of a request; no endpoint takes longer.
const LIMIT: Duration = Duration::from_secs(5);

/// Gets a path and returns status and body. Speaks HTTP/1.0, so that the body is not chunked and ends with the
/// connection.
pub async fn get(addr: SocketAddr, path: &str) -> Result<(u16, String)> {
    let exchange = async {
        let mut stream = TcpStream::connect(addr).await?;
        stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: {addr}\r\n\r\n").as_bytes()).await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        anyhow::Ok(String::from_utf8_lossy(&answer).into_owned())
    };
    let answer = tokio::time::timeout(LIMIT, exchange)
        .await
        .with_context(|| format!("GET {addr}{path}: no answer within {LIMIT:?}"))?;
    let answer = answer.with_context(|| format!("GET {addr}{path}"))?;
    let (head, body) =
        answer.split_once("\r\n\r\n").with_context(|| format!("GET {addr}{path}: no HTTP answer"))?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok((status.with_context(|| format!("GET {addr}{path}: no status in {head:?}"))?, body.to_owned()))
}
