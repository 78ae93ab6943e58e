//! Forwards HTTP/1.1 with one request per connection: both sides get `Connection: close`, so that a response ends with
//! the connection and we don't parse bodies.

use std::sync::atomic::Ordering;

use anyhow::{Context, Result, bail};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{Authorizations, ProxiedRequest, ProxyContext, Signatures, lock, relay};

/// Longest head of a request or response, in bytes. Tokens of a few KiB are the longest fields in practice.
const MAX_HEAD: usize = 64 * 1024;

/// The page of a captive portal.
const PORTAL: &str = "<!DOCTYPE html><html><body>Welcome to the guest network. Please log in.</body></html>";
/// Path of the referrers of a digest, and the prefix of its fallback tag.
const REFERRERS: &str = "/referrers/sha256:";
const STANDING_IN: &str = "/manifests/sha256-";
/// An empty list of referrers.
const NO_REFERRERS: &str =
    r#"{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[]}"#;
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

pub(super) async fn forward_request(mut client: TcpStream, shared: &ProxyContext) -> Result<()> {
    let Some((head, body)) = read_head(&mut client).await? else { return Ok(()) };
    let mut record = parse_head(&head)?;
    let own_answer = shared.answer_to(&head, &record.path);
    let is_damaged = lock(&shared.damaged).iter().any(|on| record.path.contains(on));
    (record.injected, record.status) =
        (own_answer.is_some(), own_answer.as_ref().map_or(0, |answer| answer.status));
    let number = {
        let mut records = lock(&shared.records);
        records.push(record);
        records.len() - 1
    };
    if let Some(own_answer) = own_answer {
        return own_answer.send(&mut client, shared).await;
    }

    let mut server = TcpStream::connect(shared.target).await?;
    let without_range = shared.ignores_ranges.load(Ordering::SeqCst);
    let asked = if without_range { without_header(&head, "range:") } else { head };
    let asked = if shared.has_expired(&asked) { without_header(&asked, "authorization:") } else { asked };
    let is_of_referrers = shared.lists_referrers.load(Ordering::SeqCst) && asked.contains(REFERRERS);
    let asked = if is_of_referrers { asked.replacen(REFERRERS, STANDING_IN, 1) } else { asked };
    server.write_all(with_connection_close(&asked).as_bytes()).await?;
    server.write_all(&body).await?;
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let up = async {
        // The rest of the request's body. A client that has sent everything keeps its side open. If the client closes
        // it, it's gone, and further bytes for it cross no link.
        let mut rest = vec![0; relay::PIECE];
        while let Ok(length @ 1..) = from_client.read(&mut rest).await {
            if to_server.write_all(&rest[..length]).await.is_err() {
                return std::future::pending().await;
            }
        }
    };
    let down = async {
        let (head, mut start) =
            read_head(&mut from_server).await?.context("the server closed without an answer")?;
        if is_damaged {
            if start.is_empty() {
                from_server.read_buf(&mut start).await?;
            }
            start.first_mut().into_iter().for_each(|byte| *byte ^= 1);
        }
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        if is_of_referrers && status == 404 {
            lock(&shared.records)[number].status = 200;
            return InjectedAnswer {
                media_type: INDEX,
                body: NO_REFERRERS,
                ..InjectedAnswer::for_status(200)
            }
            .send(&mut to_client, shared)
            .await;
        }
        lock(&shared.records)[number].status = status;
        let count = |bytes: usize| lock(&shared.records)[number].bytes += bytes as u64;
        relay::send_down(&mut to_client, with_connection_close(&head).as_bytes(), shared).await?;
        if !start.is_empty() {
            relay::send_down(&mut to_client, &start, shared).await?;
            count(start.len());
        }
        relay::forward_down(&mut from_server, &mut to_client, shared, count).await?;
        anyhow::Ok(to_client.shutdown().await?)
    };
    tokio::select! {
        () = up => Ok(()),
        result = down => result,
    }
}

/// Connects a client with `CONNECT`.
pub(super) async fn connect_client(mut client: TcpStream, shared: &ProxyContext) -> Result<()> {
    let Some((head, _)) = read_head(&mut client).await? else { return Ok(()) };
    let mut record = parse_head(&head)?;
    let may = record.method == "CONNECT";
    record.status = if may { 200 } else { 405 };
    lock(&shared.records).push(record);
    if !may {
        return InjectedAnswer::for_status(405).send(&mut client, shared).await;
    }
    // The client sends nothing before the answer.
    let server = TcpStream::connect(shared.target).await?;
    client.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await?;
    relay::both_ways(client, server, shared).await
}

/// Reads a head with its blank line, and returns the bytes after it as well. `None` if the connection was closed before
/// the first byte.
async fn read_head(stream: &mut (impl AsyncReadExt + Unpin)) -> Result<Option<(String, Vec<u8>)>> {
    const END: &[u8] = b"\r\n\r\n";
    let mut bytes = Vec::new();
    loop {
        if let Some(end) = bytes.windows(END.len()).position(|window| window == END) {
            let rest = bytes.split_off(end + END.len());
            return Ok(Some((String::from_utf8_lossy(&bytes).into_owned(), rest)));
        }
        if bytes.len() > MAX_HEAD {
            bail!("a head of more than {MAX_HEAD} bytes");
        }
        if stream.read_buf(&mut bytes).await? == 0 {
            return if bytes.is_empty() {
                Ok(None)
            } else {
                bail!("the connection was closed in the middle of a head")
            };
        }
    }
}

fn parse_head(head: &str) -> Result<ProxiedRequest> {
    let mut request = head.lines().next().unwrap_or_default().split(' ');
    let (Some(method), Some(target)) = (request.next(), request.next()) else { bail!("no request line") };
    let mut record = ProxiedRequest {
        method: method.to_owned(),
        path: target.split('?').next().unwrap_or_default().to_owned(),
        ..ProxiedRequest::default()
    };
    record.range = header(head, "range").map(str::to_owned);
    record.authorized = header(head, "authorization").is_some();
    Ok(record)
}

/// The value of the header with this name, in lower case.
fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let mut headers = head.lines().skip(1).filter_map(|line| line.split_once(':'));
    headers.find(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
}

/// Replaces the Connection header by `Connection: close`.
fn with_connection_close(head: &str) -> String {
    let head = without_header(head, "connection:");
    format!("{}\r\nConnection: close\r\n\r\n", head.trim_end())
}

/// Whether a path is that of a fallback tag for the referrers API. Tags of cosign 2 signatures have a suffix.
fn stands_in(path: &str) -> bool {
    path.split_once(STANDING_IN).is_some_and(|(_, hex)| !hex.contains('.'))
}

/// Removes each header with this prefix, in lower case.
fn without_header(head: &str, beginning: &str) -> String {
    let mut lines = head.trim_end().split("\r\n");
    let first = lines.next().unwrap_or_default();
    let kept = lines.filter(|line| !line.to_ascii_lowercase().starts_with(beginning));
    let headers: Vec<_> = std::iter::once(first).chain(kept).chain(["", ""]).collect();
    headers.join("\r\n")
}

/// An answer of the proxy itself.
struct InjectedAnswer {
    status: u16,
    location: Option<String>,
    media_type: &'static str,
    body: &'static str,
}

impl InjectedAnswer {
    /// An error in the form of a registry.
    fn for_status(status: u16) -> Self {
        let body = r#"{"errors":[{"code":"UNKNOWN","message":"injected by the test"}]}"#;
        Self { status, location: None, media_type: "application/json", body }
    }

    async fn send(self, client: &mut (impl AsyncWriteExt + Unpin), shared: &ProxyContext) -> Result<()> {
        let Self { status, location, media_type, body } = self;
        let reason = http::StatusCode::from_u16(status).ok();
        let reason = reason.and_then(|status| status.canonical_reason()).unwrap_or("-");
        let location = location.map_or_else(String::new, |location| format!("Location: {location}\r\n"));
        let text = format!(
            "HTTP/1.1 {status} {reason}\r\n{location}Content-Type: {media_type}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len(),
        );
        relay::send_down(client, text.as_bytes(), shared).await?;
        Ok(client.shutdown().await?)
    }
}

impl ProxyContext {
    /// The proxy's own answer, if it has one.
    fn answer_to(&self, head: &str, path: &str) -> Option<InjectedAnswer> {
        if self.is_portal.load(Ordering::SeqCst) {
            return Some(InjectedAnswer {
                media_type: "text/html; charset=utf-8",
                body: PORTAL,
                ..InjectedAnswer::for_status(200)
            });
        }
        if let Some(status) = self.take_fault(path) {
            return Some(InjectedAnswer::for_status(status));
        }
        if self.lists_referrers.load(Ordering::SeqCst) && stands_in(path) {
            return Some(InjectedAnswer::for_status(404));
        }
        if !path.contains("/blobs/") {
            return None;
        }
        if let Some((storage, signatures)) = &*lock(&self.storage) {
            let number = signatures.issued.fetch_add(1, Ordering::SeqCst) + 1;
            let location = Some(format!("http://{storage}{path}?signature={number}"));
            return Some(InjectedAnswer { location, ..InjectedAnswer::for_status(307) });
        }
        let Signatures { issued, expired } = &*self.signatures;
        let signature = head.split(' ').nth(1).and_then(|target| target.split_once("?signature="));
        let number = signature.and_then(|(_, number)| number.parse().ok()).unwrap_or(0);
        let is_valid = expired.load(Ordering::SeqCst) < number || issued.load(Ordering::SeqCst) == 0;
        (!is_valid).then(|| InjectedAnswer::for_status(403))
    }

    /// Whether the request's credential has expired. Remembers it otherwise.
    fn has_expired(&self, head: &str) -> bool {
        let Some(shown) = header(head, "authorization") else { return false };
        let Authorizations { seen, expired } = &mut *lock(&self.authorizations);
        let has_expired = expired.contains(shown);
        if !has_expired {
            seen.insert(shown.to_owned());
        }
        has_expired
    }

    /// Takes the status to answer with, if the next request for this path should fail.
    fn take_fault(&self, path: &str) -> Option<u16> {
        let mut faults = lock(&self.faults);
        faults.retain(|fault| fault.times > 0);
        let fault = faults.iter_mut().find(|fault| path.contains(&fault.on))?;
        fault.times -= 1;
        Some(fault.status)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const REQUEST: &str = "GET /v2/a/blobs/sha256:00?ns=r.io HTTP/1.1\r\nHost: r\r\nconnection: keep-alive\r\nRange: bytes=5-\r\nAuthorization: Basic x\r\n\r\n";

    #[test]
    fn a_record_has_no_credential() {
        let record = parse_head(REQUEST).unwrap();
        let expected = ProxiedRequest {
            method: "GET".to_owned(),
            path: "/v2/a/blobs/sha256:00".to_owned(),
            range: Some("bytes=5-".to_owned()),
            authorized: true,
            ..ProxiedRequest::default()
        };
        assert_eq!(record, expected);
    }

    #[test]
    fn both_sides_must_close() {
        let head = with_connection_close(REQUEST);
        assert!(head.ends_with("Authorization: Basic x\r\nConnection: close\r\n\r\n"), "{head}");
        assert_eq!(head.to_lowercase().matches("connection:").count(), 1);
    }
}
