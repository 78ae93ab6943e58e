//! Registries that do not keep to the protocol fail their image, and nothing else.

use std::time::Duration;

use prepull_registry::manifest::{Descriptor, OCI_MANIFEST};
use prepull_registry::{ErrorKind, RegistryError, digest::sha256};

use crate::server::{Reply, Seen, Server, at, drain, reply};

const CONTENT: &[u8] = b"0123456789";

fn blob() -> Descriptor {
    Descriptor { digest: sha256(CONTENT), size: CONTENT.len() as u64, ..Descriptor::default() }
}

/// What arrives of a blob from byte 4 on: where it begins, its bytes, and the error.
async fn fetch(
    answer: impl Fn(&Seen) -> Reply + Send + Sync + 'static,
) -> Result<(u64, Vec<u8>, Option<RegistryError>), RegistryError> {
    let server = Server::start(answer).await;
    let stream = at(&server).fetch_blob(&blob(), 4, &[]).await?;
    let offset = stream.offset();
    let (bytes, error) = drain(stream).await;
    Ok((offset, bytes, error))
}

fn with_range(range: &'static str, body: &'static str) -> impl Fn(&Seen) -> Reply {
    move |seen| match seen.header("range") {
        "" => reply(200, &[], CONTENT),
        _ if range.is_empty() => reply(206, &[], body),
        _ => reply(206, &[("Content-Range", range)], body),
    }
}

#[tokio::test]
async fn a_wrong_range_is_retried_without_range() {
    for range in ["", "bytes 0-5/10", "bytes 4-9/11", "bytes 5-9/10", "nonsense", "bytes 4-99/*"] {
        let (offset, bytes, error) = fetch(with_range(range, "456789")).await.unwrap();
        assert_eq!((offset, bytes.as_slice(), error), (0, CONTENT, None), "{range:?}");
    }
    let refuses_ranges = |seen: &Seen| match seen.header("range") {
        "" => reply(200, &[], CONTENT),
        _ => reply(416, &[], ""),
    };
    assert_eq!(fetch(refuses_ranges).await.unwrap(), (0, CONTENT.to_vec(), None));
}

#[tokio::test]
async fn a_short_range_is_delivered_then_fails() {
    let (offset, bytes, error) = fetch(with_range("bytes 4-6/10", "456")).await.unwrap();
    assert_eq!((offset, bytes.as_slice()), (4, &b"456"[..]));
    let error = error.unwrap();
    assert_eq!(error.kind, ErrorKind::Unreachable);
    assert!(error.message.contains("3 bytes before its end"), "{error}");
}

#[tokio::test]
async fn a_wrong_length_is_refused_at_once() {
    for length in ["9", "11", "18446744073709551615"] {
        let error = fetch(move |_| reply(200, &[("Content-Length", length)], CONTENT)).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Protocol, "{length}: {error}");
    }
    // More than its range announces.
    let more = |seen: &Seen| match seen.header("range") {
        "" => reply(200, &[("Content-Length", "11")], CONTENT),
        _ => reply(206, &[("Content-Range", "bytes 4-9/10"), ("Content-Length", "7")], "4567890"),
    };
    assert_eq!(fetch(more).await.unwrap_err().kind, ErrorKind::Protocol);
}

#[tokio::test]
async fn an_endless_body_is_cut_at_its_size() {
    let endless =
        |_: &Seen| Reply::Endless(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n0123456789".to_vec());
    assert_eq!(fetch(endless).await.unwrap(), (0, CONTENT.to_vec(), None));
}

#[tokio::test]
async fn a_short_body_is_delivered_then_fails() {
    for head in ["Content-Length: 10\r\n", "", "Transfer-Encoding: chunked\r\n"] {
        let body = if head.starts_with('T') { "3\r\n012\r\n" } else { "012" };
        let raw = format!("HTTP/1.1 200 OK\r\nConnection: close\r\n{head}\r\n{body}").into_bytes();
        let (offset, bytes, error) = fetch(move |_| Reply::Raw(raw.clone())).await.unwrap();
        assert_eq!((offset, bytes.as_slice()), (0, &b"012"[..]), "{head}");
        assert_eq!(error.unwrap().kind, ErrorKind::Unreachable, "{head}");
    }
}

#[tokio::test]
async fn what_is_compressed_unasked_is_refused() {
    for encoding in ["gzip", "br", "zstd", "gzip, gzip"] {
        let server = Server::start(move |_| reply(200, &[("Content-Encoding", encoding)], CONTENT)).await;
        let repository = at(&server);
        for error in [
            repository.fetch_blob(&blob(), 0, &[]).await.unwrap_err(),
            repository.fetch_manifest(&blob()).await.unwrap_err(),
            repository.small_blob(&blob(), 100).await.unwrap_err(),
        ] {
            assert_eq!(error.kind, ErrorKind::Protocol);
            assert!(error.message.contains("compressed"), "{error}");
        }
    }
}

#[tokio::test]
async fn content_counts_by_its_digest_alone() {
    let server = Server::start(|_| reply(200, &[("Content-Type", OCI_MANIFEST)], "012345678X")).await;
    let repository = at(&server);
    assert_eq!(repository.fetch_manifest(&blob()).await.unwrap_err().kind, ErrorKind::DigestMismatch);
    assert_eq!(repository.small_blob(&blob(), 100).await.unwrap_err().kind, ErrorKind::DigestMismatch);
    // A manifest that is resolved by its content, under a header that names another.
    let claimed = sha256(CONTENT);
    let server = Server::start(move |seen| match seen.method.as_str() {
        "HEAD" => reply(200, &[("Transfer-Encoding", "chunked")], ""),
        _ => reply(200, &[("Docker-Content-Digest", &claimed)], "012345678X"),
    })
    .await;
    assert_eq!(at(&server).resolve().await.unwrap_err().kind, ErrorKind::DigestMismatch);
}

#[tokio::test]
async fn invalid_digests_are_refused_everywhere() {
    let server = Server::start(|_| {
        let headers = [
            ("Docker-Content-Digest", "sha256:../../etc"),
            ("Content-Type", OCI_MANIFEST),
            ("Content-Length", "2"),
        ];
        reply(200, &headers, "")
    })
    .await;
    assert_eq!(at(&server).resolve().await.unwrap_err().kind, ErrorKind::Protocol);
    let bad = Descriptor { digest: "sha256:../../etc".to_owned(), size: 1, ..Descriptor::default() };
    assert_eq!(at(&server).fetch_blob(&bad, 0, &[]).await.unwrap_err().kind, ErrorKind::Protocol);
    assert_eq!(at(&server).fetch_blob(&blob(), 11, &[]).await.unwrap_err().kind, ErrorKind::Protocol);
}

#[tokio::test]
async fn refusals_have_their_kind_and_the_words_of_the_registry() {
    let minute = Some(Duration::from_secs(60));
    for (status, headers, kind) in [
        (401, &[][..], ErrorKind::Unauthorized),
        (403, &[], ErrorKind::Unauthorized),
        (404, &[], ErrorKind::NotFound),
        (429, &[("Retry-After", "60")], ErrorKind::RateLimited { retry_after: minute }),
        (429, &[], ErrorKind::RateLimited { retry_after: None }),
        (400, &[], ErrorKind::Server { retry_after: None }),
        (500, &[], ErrorKind::Server { retry_after: None }),
        (503, &[], ErrorKind::Server { retry_after: None }),
        (503, &[("Retry-After", "60")], ErrorKind::Server { retry_after: minute }),
    ] {
        let body = "{\"errors\":[{\"code\":\"C\",\"message\":\"said\\nso https://s3/x?sig=1\"}]}";
        let server = Server::start(move |_| reply(status, headers, body)).await;
        let error = at(&server).fetch_blob(&blob(), 0, &[]).await.unwrap_err();
        assert_eq!(error.kind, kind, "{status}");
        assert!(error.message.ends_with(": C said so"), "{error}");
        let own = server.at.to_string();
        let begins = if kind == ErrorKind::NotFound { "not found" } else { own.as_str() };
        assert!(error.message.starts_with(begins), "{error}");
        let asks = error.message.contains(" and asks to wait 60 s");
        assert_eq!((kind.retry_after(), asks), (minute.filter(|_| asks), !headers.is_empty()), "{error}");
    }
}

#[tokio::test]
async fn hanging_up_is_no_protocol_error() {
    let server = Server::start(|_| Reply::Raw(b"SSH-2.0-OpenSSH_9.2\r\n\r\n".to_vec())).await;
    assert_eq!(at(&server).resolve().await.unwrap_err().kind, ErrorKind::Protocol);
    let server = Server::start(|_| Reply::Raw(Vec::new())).await;
    assert_eq!(at(&server).resolve().await.unwrap_err().kind, ErrorKind::Unreachable);
    let gone = Server::start(|_| Reply::Raw(Vec::new())).await;
    let repository = at(&gone);
    drop(gone);
    assert_eq!(repository.resolve().await.unwrap_err().kind, ErrorKind::NoConnection);
}

#[tokio::test]
async fn a_page_is_a_captive_portal() {
    let page = "<html>Log in to the guest network</html>";
    for media_type in ["text/html", "text/html; charset=utf-8", "Text/HTML"] {
        let server = Server::start(move |_| reply(200, &[("Content-Type", media_type)], page)).await;
        let repository = at(&server);
        let place = repository.referrer_places()[0];
        for error in [
            repository.resolve().await.unwrap_err(),
            repository.fetch_blob(&blob(), 0, &[]).await.unwrap_err(),
            place.referrers(&sha256(b"image")).await.unwrap_err(),
        ] {
            assert_eq!(error.kind, ErrorKind::Unreachable, "it may go away: {error}");
            assert_eq!(error.message, format!("{} answered with HTML: a captive portal?", server.at));
        }
    }
}
