//! Memory is bounded, regardless of the answers of a registry.

use peak_alloc::PeakAlloc;
use prepull_registry::manifest::{Descriptor, Index, Manifest, OCI_INDEX, OCI_MANIFEST, Platform};
use prepull_registry::{ErrorKind, SIGNATURE_TYPES, digest::sha256};
use tokio::sync::Mutex;

use crate::server::{Reply, Server, at, drain, reply};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// What the tests beside this one have at the same time, and the server itself.
const BESIDE: usize = 24 << 20;
/// Held by a test that measures its memory, which the others of them would add to.
static MEASURED: Mutex<()> = Mutex::const_new(());

#[tokio::test]
async fn endless_answers_take_bounded_memory() {
    let _alone = MEASURED.lock().await;
    let blob = Descriptor { digest: sha256(b"x"), size: 64 << 20, ..Descriptor::default() };
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();

    let endless = |head: &'static str| Server::start(move |_| Reply::Endless(head.as_bytes().to_vec()));
    // A manifest without end, with any head.
    let server = endless("HTTP/1.1 200 OK\r\n\r\n").await;
    let beside = at(&server);
    let error = beside.referrer_places()[0].resolve_tag("x").await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Protocol, "{error}");
    assert_eq!(
        beside.referrer_places()[0].referrers(&sha256(b"x")).await.unwrap_err().kind,
        ErrorKind::Protocol
    );
    let small = Descriptor { digest: sha256(b"x"), size: 5, ..Descriptor::default() };
    assert_eq!(at(&server).small_blob(&small, 100).await.unwrap_err().kind, ErrorKind::Protocol);
    assert_eq!(at(&server).small_blob(&blob, 100).await.unwrap_err().kind, ErrorKind::Protocol);
    // An error message without end.
    let server = endless("HTTP/1.1 500 Oh\r\n\r\n").await;
    assert_eq!(
        at(&server).fetch_blob(&blob, 0, &[]).await.unwrap_err().kind,
        ErrorKind::Server { retry_after: None }
    );
    // A head without end.
    let server = endless("HTTP/1.1 200 OK\r\nX-Long: ").await;
    assert_eq!(at(&server).fetch_blob(&blob, 0, &[]).await.unwrap_err().kind, ErrorKind::Protocol);
    // A blob of 64 MiB that isn't kept.
    let server = endless("HTTP/1.1 200 OK\r\n\r\n").await;
    let mut stream = at(&server).fetch_blob(&blob, 0, &[]).await.unwrap();
    let mut bytes = 0;
    while let Some(chunk) = stream.next().await {
        bytes += chunk.unwrap().len() as u64;
    }
    assert_eq!(bytes, blob.size);

    let peak = MEMORY.peak_usage().saturating_sub(before);
    assert!(peak < BESIDE, "{} KiB", peak >> 10);
}

/// A list that is as long as it may be, of this entry over and over; the last one is another.
fn full_list(entry: &str, last: &str) -> String {
    let room = (4 << 20) - r#"{"manifests":[]}"#.len() - last.len();
    format!(r#"{{"manifests":[{}{last}]}}"#, format!("{entry},").repeat(room / (entry.len() + 1)))
}

#[tokio::test]
async fn long_lists_of_referrers_take_bounded_memory() {
    let _alone = MEASURED.lock().await;
    let digest = sha256(b"x");
    let signature = |kind: &str| {
        format!(
            r#"{{"mediaType":"{OCI_MANIFEST}","digest":"{}","size":1,"artifactType":"{kind}"}}"#,
            sha256(b"signature")
        )
    };
    let annotated = format!(
        r#"{{"mediaType":"{OCI_MANIFEST}","digest":"{digest}","size":1,"annotations":{{"a":"","b":"","c":""}}}}"#
    );
    let unnamed = format!(r#"{{"digest":"{digest}","size":1}}"#);
    let attestation = annotated.replace(r#""a":"""#, r#""dev.sigstore.bundle.predicateType":"spdx""#);
    for (entry, found) in [
        // What is no manifest of a signature or a delta doesn't count.
        ([unnamed, signature("application/spdx+json"), attestation].join(","), 8),
        (annotated, 1024),
        (signature(SIGNATURE_TYPES[1]), 1024),
    ] {
        let list = full_list(&entry, &signature(SIGNATURE_TYPES[0]));
        let before = MEMORY.current_usage();
        MEMORY.reset_peak_usage();
        let next = ("Link", "</v2/other/referrers/y?n=1&last=x>; rel=\"next\"");
        let server = Server::start(move |_| reply(200, &[next], &list)).await;
        let repository = at(&server);
        let referrers = repository.referrer_places()[0].referrers(&digest).await.unwrap();
        let peak = MEMORY.peak_usage().saturating_sub(before);
        assert_eq!(referrers.len(), found, "{entry}");
        assert_eq!(server.seen().len(), if found == 8 { 8 } else { 1 });
        assert!(peak < BESIDE, "{} KiB for {entry}", peak >> 10);
    }
}

#[tokio::test]
async fn crowded_documents_take_bounded_memory() {
    let _alone = MEASURED.lock().await;
    let digest = sha256(b"x");
    let blob = format!(r#"{{"digest":"{digest}","size":1}}"#);
    let list = full_list(&blob, &blob);
    let annotations: Vec<_> = (0..350_000).map(|number| format!(r#""{number:x}":"""#)).collect();
    let crowded = blob.replace('}', &format!(r#","annotations":{{{}}}}}"#, annotations.join(",")));
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    let error = Index::parse(list.as_bytes()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unsupported, "left to the runtime");
    assert!(error.message.contains("more than 1024 manifests"), "{error}");
    let manifest = Manifest::parse(format!(r#"{{"config":{crowded}}}"#).as_bytes()).unwrap();
    assert!(manifest.config.annotations.len() < 100);
    let peak = MEMORY.peak_usage().saturating_sub(before);
    assert!(peak < BESIDE, "{} KiB", peak >> 10);
}

#[tokio::test]
async fn too_many_headers_are_refused() {
    let head = format!("HTTP/1.1 200 OK\r\n{}\r\n", "X-One: 1\r\n".repeat(5000)).into_bytes();
    let server = Server::start(move |_| Reply::Raw(head.clone())).await;
    assert_eq!(at(&server).resolve().await.unwrap_err().kind, ErrorKind::Protocol);
}

#[tokio::test]
async fn manifests_beyond_four_mebibytes_are_refused() {
    let server = Server::start(|_| {
        let digest = sha256(b"x");
        reply(
            200,
            &[
                ("Docker-Content-Digest", &digest),
                ("Content-Type", OCI_MANIFEST),
                ("Content-Length", "4194305"),
            ],
            "",
        )
    })
    .await;
    let error = at(&server).resolve().await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Protocol);
    assert_eq!(server.seen().len(), 1, "by its head");
}

#[tokio::test]
async fn endless_indexes_come_to_an_end() {
    // Each index names the next one; ten of them, from the innermost outwards.
    let mut all: Vec<Vec<u8>> = vec![b"{}".to_vec()];
    for _ in 0..10 {
        let inner = all.last().unwrap();
        let (digest, size) = (sha256(inner), inner.len());
        all.push(
            format!(r#"{{"manifests":[{{"mediaType":"{OCI_INDEX}","digest":"{digest}","size":{size}}}]}}"#)
                .into(),
        );
    }
    let outermost = all.last().unwrap().clone();
    assert!(Index::parse(&outermost).is_ok());
    let server = Server::start(move |seen| {
        let content = all.iter().find(|content| seen.target.contains(&sha256(content))).unwrap_or(&outermost);
        reply(200, &[("Content-Type", OCI_INDEX)], content)
    })
    .await;
    let repository = at(&server);
    let resolved = repository.resolve().await.unwrap();
    let error = repository.choose(resolved.clone(), &Platform::of_this_machine(), &()).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unsupported, "left to the runtime");
    assert!(error.message.contains("ever more"), "{error}");
    let stream = drain(repository.fetch_blob(&resolved.descriptor, 0, &[]).await.unwrap()).await;
    assert_eq!(stream.1, None);
}
