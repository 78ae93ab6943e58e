//! Pushes of artifacts: the uploads, the token that they need, and the list of referrers.

use std::io::Read;

use prepull_api::credentials::{RegistryCredential, Sensitive};
use prepull_registry::ErrorKind;
use prepull_registry::digest::sha256;
use prepull_registry::manifest::{Descriptor, OCI_INDEX, OCI_MANIFEST};
use serde_json::{Value, json};

use crate::server::{Reply, Seen, Server, at, at_with, reply};

const CONTENT: &str = "0123456789";

fn blob() -> Descriptor {
    Descriptor { digest: sha256(CONTENT.as_bytes()), size: CONTENT.len() as u64, ..Descriptor::default() }
}

#[expect(clippy::unnecessary_wraps, reason = "a file may be unreadable")]
fn open() -> std::io::Result<Box<dyn Read + Send>> {
    Ok(Box::new(CONTENT.as_bytes()))
}

/// Takes an upload, at a relative location.
fn take_upload(seen: &Seen) -> Reply {
    match seen.method.as_str() {
        "HEAD" => reply(404, &[], ""),
        "POST" => reply(202, &[("Location", "/v2/team/app/blobs/uploads/1?state=x")], ""),
        _ => reply(201, &[], ""),
    }
}

#[tokio::test]
async fn a_blob_is_pushed_once() {
    let server = Server::start(take_upload).await;
    assert_eq!(at(&server).push_blob(&blob(), &open).await, Ok(true));
    let seen = server.seen();
    let methods: Vec<&str> = seen.iter().map(|one| one.method.as_str()).collect();
    assert_eq!(methods, ["HEAD", "POST", "PUT"]);
    let digest = blob().digest.replace(':', "%3A");
    assert_eq!(seen[2].target, format!("/v2/team/app/blobs/uploads/1?state=x&digest={digest}"));
    assert_eq!((seen[2].body.as_str(), seen[2].header("content-length")), (CONTENT, "10"));

    let server = Server::start(|_| reply(200, &[], "")).await;
    assert_eq!(at(&server).push_blob(&blob(), &open).await, Ok(false));
    assert_eq!(server.seen().len(), 1);
}

#[tokio::test]
async fn a_push_asks_for_its_own_token() {
    let server = Server::start(|seen| {
        let challenge = |scope: &str| {
            let realm = format!("http://{}/token", seen.header("host"));
            reply(401, &[("WWW-Authenticate", &format!("Bearer realm=\"{realm}\",scope=\"{scope}\""))], "")
        };
        match (seen.method.as_str(), seen.header("authorization")) {
            _ if seen.target.starts_with("/token") => {
                let both = seen.body.contains("pull%2Cpush");
                reply(200, &[], format!("{{\"token\": \"{}\"}}", if both { "push" } else { "pull" }))
            }
            ("HEAD", "") => challenge("repository:team/app:pull"),
            ("HEAD", _) | ("POST" | "PUT", "Bearer push") => take_upload(seen),
            _ => challenge("repository:team/app:pull,push"),
        }
    })
    .await;
    let credential = RegistryCredential {
        username: Sensitive::new("u"),
        password: Sensitive::new("p"),
        ..RegistryCredential::default()
    };
    let repository = at_with(&server, Some(&credential));
    assert_eq!(repository.push_blob(&blob(), &open).await, Ok(true));
    let uploads = server.seen().into_iter().filter(|one| one.method == "PUT");
    assert_eq!(uploads.map(|one| one.body).collect::<Vec<_>>(), [CONTENT]);
    // A manifest may be the first thing that is pushed, with a token that only pulls.
    let repository = at_with(&server, Some(&credential));
    assert_eq!(repository.push_manifest("v1", OCI_MANIFEST, b"{}").await, Ok(false));
}

#[tokio::test]
async fn a_refused_push_is_an_error() {
    let server = Server::start(|seen| match seen.method.as_str() {
        "POST" => reply(403, &[], "{\"errors\": [{\"code\": \"DENIED\", \"message\": \"read only\"}]}"),
        _ => reply(404, &[], ""),
    })
    .await;
    let error = at(&server).push_blob(&blob(), &open).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unauthorized);
    assert!(error.message.contains("DENIED read only"), "{error}");
}

#[tokio::test]
async fn referrers_are_listed_by_api_or_tag() {
    let known = json!({"mediaType": OCI_MANIFEST, "digest": sha256(b"other"), "size": 1});
    let index = json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [known]}).to_string();
    let server = Server::start(move |seen| match (seen.method.as_str(), seen.target.contains("/sha256-")) {
        ("PUT", false) => reply(201, &[("OCI-Subject", &sha256(b"subject"))], ""),
        ("PUT", true) => reply(201, &[], ""),
        (_, true) => {
            let (digest, length) = (sha256(index.as_bytes()), index.len().to_string());
            let headers = [
                ("Content-Type", OCI_INDEX),
                ("Docker-Content-Digest", &digest),
                ("Content-Length", &length),
            ];
            reply(200, &headers, "")
        }
        // The index by its digest.
        ("GET", _) => reply(200, &[("Content-Type", OCI_INDEX)], &index),
        _ => reply(404, &[], ""),
    })
    .await;
    let repository = at(&server);
    let referrer = Descriptor {
        media_type: OCI_MANIFEST.to_owned(),
        artifact_type: Some("application/x".to_owned()),
        ..blob()
    };
    assert_eq!(repository.push_manifest(&referrer.digest, OCI_MANIFEST, b"{}").await, Ok(true));
    // Twice, as when a pipeline runs again.
    for _ in 0..2 {
        repository.attach_by_tag(&sha256(b"subject"), &referrer).await.unwrap();
    }
    let seen = server.seen();
    let last = seen.last().unwrap();
    assert!(
        last.target.contains(&format!("/manifests/{}", sha256(b"subject").replace(':', "-"))),
        "{last:?}"
    );
    assert_eq!(last.header("content-type"), OCI_INDEX);
    let written: Value = serde_json::from_str(&last.body).unwrap();
    let listed = written["manifests"].as_array().unwrap();
    assert_eq!((listed.len(), &listed[1]["artifactType"]), (2, &json!("application/x")));
}
