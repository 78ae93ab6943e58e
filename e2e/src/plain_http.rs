//! Plain requests, for metrics endpoints and health checks.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Timeout of a request; no endpoint takes longer.
const LIMIT: Duration = Duration::from_secs(5);
/// Timeout of writes to etcd, on a busy disk.
const STORED: Duration = Duration::from_secs(60);

/// Gets a path and returns status and body. Speaks HTTP/1.0, so that the body is not chunked and ends with the
/// connection.
pub async fn get(addr: SocketAddr, path: &str) -> Result<(u16, String)> {
    let request = format!("GET {path} HTTP/1.0\r\nHost: {addr}\r\n\r\n");
    exchange(addr, &format!("GET {addr}{path}"), &request, LIMIT).await
}

/// Posts JSON to etcd, and returns status and body.
pub async fn post_json(addr: SocketAddr, path: &str, json: &str) -> Result<(u16, String)> {
    let length = json.len();
    let request = format!("POST {path} HTTP/1.0\r\nHost: {addr}\r\nContent-Length: {length}\r\n\r\n{json}");
    exchange(addr, &format!("POST {addr}{path}"), &request, STORED).await
}

async fn exchange(addr: SocketAddr, what: &str, request: &str, limit: Duration) -> Result<(u16, String)> {
    let exchange = async {
        let mut stream = TcpStream::connect(addr).await?;
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        anyhow::Ok(String::from_utf8_lossy(&answer).into_owned())
    };
    let answer = tokio::time::timeout(limit, exchange)
        .await
        .with_context(|| format!("{what}: no answer within {limit:?}"))?;
    let answer = answer.with_context(|| what.to_owned())?;
    let (head, body) = answer.split_once("\r\n\r\n").with_context(|| format!("{what}: no HTTP answer"))?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok((status.with_context(|| format!("{what}: no status in {head:?}"))?, body.to_owned()))
}
