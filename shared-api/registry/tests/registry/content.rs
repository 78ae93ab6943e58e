//! Requests to a registry that follows the protocol, and our reading of its answers.

use std::collections::BTreeMap;
use std::sync::Mutex;

use prepull_registry::manifest::{Descriptor, OCI_INDEX, OCI_MANIFEST, Platform};
use prepull_registry::{ErrorKind, SIGNATURE_TYPES, digest::sha256};

use crate::server::{Reply, Seen, Server, at, drain, is_send, reply};

const CONTENT: &[u8] = b"0123456789";

fn blob() -> Descriptor {
    Descriptor { digest: sha256(CONTENT), size: CONTENT.len() as u64, ..Descriptor::default() }
}

fn serve_ranges(seen: &Seen) -> Reply {
    match seen.header("range").strip_prefix("bytes=").and_then(|range| range.strip_suffix('-')) {
        Some(from) => {
            let from: usize = from.parse().unwrap();
            reply(206, &[("Content-Range", &format!("bytes {from}-9/10"))], &CONTENT[from..])
        }
        None => reply(200, &[], CONTENT),
    }
}

#[tokio::test]
async fn a_request_without_an_answer_is_sent_once_more() {
    for (silent, sent, comes) in [(1, 2, true), (2, 2, false)] {
        let asked = Mutex::new(0);
        let server = Server::start(move |_| {
            let mut asked = asked.lock().unwrap();
            *asked += 1;
            if *asked > silent { reply(200, &[], CONTENT) } else { Reply::Raw(Vec::new()) }
        })
        .await;
        let answer = at(&server).fetch_blob(&blob(), 0, &[]).await;
        assert_eq!((server.seen().len(), answer.is_ok()), (sent, comes), "{silent}");
        if let Err(error) = answer {
            assert_eq!(error.kind, ErrorKind::Unreachable, "{error}");
        }
    }
}

#[tokio::test]
async fn a_tag_is_resolved_by_one_head() {
    let digest = sha256(b"manifest");
    let server = Server::start({
        let digest = digest.clone();
        move |_| {
            reply(
                200,
                &[
                    ("Docker-Content-Digest", &digest),
                    ("Content-Type", OCI_MANIFEST),
                    ("Content-Length", "8"),
                ],
                "",
            )
        }
    })
    .await;
    let resolved = is_send(at(&server).resolve()).await.unwrap();
    assert_eq!((resolved.descriptor.digest, resolved.descriptor.size, resolved.manifest), (digest, 8, None));
    let seen = server.seen();
    assert_eq!(seen.len(), 1);
    assert_eq!(
        (seen[0].method.as_str(), seen[0].target.as_str()),
        ("HEAD", "/v2/team/app/manifests/v1?ns=r.example")
    );
    assert_eq!(seen[0].header("user-agent"), "test/1");
    assert_eq!(seen[0].header("accept-encoding"), "identity");
    assert!(seen[0].header("accept").contains(OCI_INDEX));
}

#[tokio::test]
async fn missing_digest_or_length_costs_a_get() {
    let content = br#"{"schemaVersion":2,"config":{"mediaType":"x","digest":"x","size":1}}"#;
    for head in [
        vec![("Content-Type", OCI_MANIFEST)],
        vec![("Content-Type", "text/plain"), ("Docker-Content-Digest", "")],
        vec![],
    ] {
        let server = Server::start(move |seen| match seen.method.as_str() {
            "HEAD" => {
                let head: Vec<_> = head.iter().filter(|(_, value)| !value.is_empty()).copied().collect();
                reply(200, &head, "")
            }
            _ => reply(200, &[], content),
        })
        .await;
        let resolved = at(&server).resolve().await.unwrap();
        assert_eq!(resolved.descriptor.digest, sha256(content));
        assert_eq!(resolved.descriptor.media_type, OCI_MANIFEST);
        assert_eq!(resolved.manifest.as_deref(), Some(&content[..]));
    }
}

#[tokio::test]
async fn a_blob_goes_on_where_it_was_left() {
    let server = Server::start(serve_ranges).await;
    let repository = at(&server);
    for offset in [0, 4, 9] {
        let mut stream = is_send(repository.fetch_blob(&blob(), offset, &[])).await.unwrap();
        assert_eq!(stream.offset(), offset);
        assert!(is_send(stream.next()).await.unwrap().is_ok());
        let stream = repository.fetch_blob(&blob(), offset, &[]).await.unwrap();
        assert_eq!(drain(stream).await, (CONTENT[usize::try_from(offset).unwrap()..].to_vec(), None));
    }
    assert_eq!(server.seen()[0].header("range"), "", "a whole blob needs no range");
}

#[tokio::test]
async fn a_registry_without_ranges_begins_at_the_beginning() {
    let server = Server::start(|_| reply(200, &[], CONTENT)).await;
    let stream = at(&server).fetch_blob(&blob(), 4, &[]).await.unwrap();
    assert_eq!(stream.offset(), 0);
    assert_eq!(drain(stream).await, (CONTENT.to_vec(), None));
}

#[tokio::test]
async fn the_last_bytes_of_a_layer_tell_its_unpacked_size() {
    let server = Server::start(serve_ranges).await;
    let layer = Descriptor { media_type: format!("{OCI_MANIFEST}+gzip"), ..blob() };
    let told = u64::from(u32::from_le_bytes(*b"6789"));
    assert_eq!(at(&server).unpacked_size(&layer).await, Ok(Some(told)));
    assert_eq!(server.seen().last().unwrap().header("range"), "bytes=6-");
    assert_eq!(at(&server).unpacked_size(&blob()).await, Ok(None), "not compressed");
    assert_eq!(server.seen().len(), 1, "it is not asked for");
    let without_ranges = Server::start(|_| reply(200, &[], CONTENT)).await;
    assert_eq!(at(&without_ranges).unpacked_size(&layer).await, Ok(None));
    let failing = Server::start(|_| reply(500, &[], "")).await;
    assert_eq!(
        at(&failing).unpacked_size(&layer).await.unwrap_err().kind,
        ErrorKind::Server { retry_after: None }
    );
}

#[tokio::test]
async fn empty_ranges_are_no_error() {
    let server = Server::start(|_| reply(200, &[], "")).await;
    let empty = Descriptor { digest: sha256(b""), size: 0, ..Descriptor::default() };
    let stream = at(&server).fetch_blob(&empty, 0, &[]).await.unwrap();
    assert_eq!(drain(stream).await, (vec![], None));
}

#[tokio::test]
async fn the_manifest_of_the_platform_is_found_through_nested_indexes() {
    let manifest = br#"{"schemaVersion":2}"#.to_vec();
    let entry = |content: &[u8], media_type: &str| {
        let (digest, size) = (sha256(content), content.len());
        let platform = r#"{"os":"linux","architecture":"amd64"}"#;
        format!(r#"{{"mediaType":"{media_type}","digest":"{digest}","size":{size},"platform":{platform}}}"#)
    };
    let inner = format!(r#"{{"manifests":[{}]}}"#, entry(&manifest, OCI_MANIFEST)).into_bytes();
    let outer = format!(r#"{{"manifests":[{}]}}"#, entry(&inner, OCI_INDEX)).into_bytes();
    let all = [manifest.clone(), inner.clone(), outer.clone()];
    let server = Server::start(move |seen| {
        let content = all.iter().find(|content| seen.target.contains(&sha256(content))).unwrap_or(&all[2]);
        reply(200, &[("Content-Type", OCI_INDEX)], content)
    })
    .await;
    let repository = at(&server);
    let resolved = repository.resolve().await.unwrap();
    let node = Platform { os: "linux".to_owned(), architecture: "amd64".to_owned(), variant: String::new() };
    let chosen = is_send(repository.choose(resolved.clone(), &node, &())).await.unwrap();
    let indexes: Vec<_> = chosen.indexes.iter().map(|(_, content)| content.clone()).collect();
    assert_eq!((indexes, &chosen.manifest.1), (vec![outer, inner], &manifest));

    // What is at hand is not asked for.
    let indexes = chosen.indexes.iter().map(|(of, content)| (of.digest.clone(), content.clone()));
    let at_hand = Mutex::new(indexes.collect::<BTreeMap<_, _>>());
    let before = server.seen().len();
    assert_eq!(repository.choose(resolved.clone(), &node, &at_hand).await.unwrap(), chosen);
    assert_eq!(server.seen().len() - before, 1, "the manifest alone");
    assert_eq!(repository.choose(resolved.clone(), &node, &at_hand).await.unwrap(), chosen);
    assert_eq!(server.seen().len() - before, 1, "which is at hand since then");

    let other =
        Platform { os: "linux".to_owned(), architecture: "riscv64".to_owned(), variant: String::new() };
    let error = repository.choose(resolved, &other, &()).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::PlatformMismatch);
    assert!(error.message.contains("linux/riscv64"), "{error}");
}

#[tokio::test]
async fn referrers_are_found_by_api_or_tag() {
    let kind = SIGNATURE_TYPES[0];
    let (name, value) = ("dev.sigstore.bundle.predicateType", "https://sigstore.dev/cosign/sign/v1");
    let entry = format!(
        r#"{{"mediaType":"{OCI_MANIFEST}","digest":"{}","size":1,"artifactType":"{kind}","annotations":{{"{name}":"{value}","k":"v"}}}}"#,
        sha256(b"x")
    );
    let index = format!(r#"{{"schemaVersion":2,"mediaType":"{OCI_INDEX}","manifests":[{entry}]}}"#);
    for by_api in [true, false] {
        let index = index.clone();
        let server = Server::start(move |seen| {
            let subject = sha256(b"image");
            if seen.target.contains("/referrers/") {
                assert!(seen.target.ends_with(&format!("/referrers/{subject}?ns=r.example")));
                return if by_api { reply(200, &[], &index) } else { reply(404, &[], "") };
            }
            assert!(seen.target.contains(&format!("/manifests/{}", subject.replace(':', "-"))));
            reply(200, &[("Content-Type", OCI_INDEX)], &index)
        })
        .await;
        let repository = at(&server);
        let referrers = is_send(repository.referrer_places()[0].referrers(&sha256(b"image"))).await.unwrap();
        assert_eq!(referrers.len(), 1, "by API: {by_api}");
        assert_eq!(referrers[0].artifact_type.as_deref(), Some(kind));
        assert_eq!(referrers[0].annotations, [(name.to_owned(), value.to_owned())].into());
    }
    // A list in parts that never ends.
    let server = Server::start(move |seen| {
        let part = seen.target.matches("n=1").count();
        assert_eq!(part, usize::from(seen.target.ends_with("?ns=r.example&n=1&last=x")), "{}", seen.target);
        reply(200, &[("Link", "</v2/other/referrers/y?n=1&last=x>; rel=\"next\"")], &index)
    })
    .await;
    let referrers = at(&server).referrer_places()[0].referrers(&sha256(b"image")).await.unwrap();
    assert_eq!((referrers.len(), server.seen().len()), (8, 8));
    let none = Server::start(|_| reply(404, &[], "")).await;
    assert_eq!(at(&none).referrer_places()[0].referrers(&sha256(b"image")).await.unwrap().len(), 0);
}
