#![allow(clippy::unwrap_used)]

use super::*;
use crate::digest::sha256;

fn platform(text: &str) -> Platform {
    let mut parts = text.split('/').map(str::to_owned);
    let mut part = || parts.next().unwrap_or_default();
    Platform { os: part(), architecture: part(), variant: part() }
}

fn index(platforms: &[&str]) -> Index {
    let entry = |(number, name): (usize, &&str)| Descriptor {
        media_type: OCI_MANIFEST.to_owned(),
        digest: sha256(&[u8::try_from(number).unwrap()]),
        size: number as u64,
        platform: (!name.is_empty()).then(|| platform(name)),
        ..Descriptor::default()
    };
    Index { media_type: OCI_INDEX.to_owned(), manifests: platforms.iter().enumerate().map(entry).collect() }
}

#[test]
fn the_platform_is_chosen_as_containerd_does() {
    for (offered, node, chosen) in [
        (&["linux/arm64", "linux/amd64"][..], "linux/amd64", Some(1)),
        (&["linux/386", "linux/amd64"], "linux/amd64", Some(1)),
        (&["linux/386"], "linux/amd64", Some(0)),
        (&["linux/amd64/v2", "linux/amd64"], "linux/amd64", Some(1)),
        (&["linux/amd64/v2", "linux/amd64/v3"], "linux/amd64/v3", Some(1)),
        (&["linux/amd64/v3"], "linux/amd64", None),
        (&["linux/arm/v7", "linux/arm64/v8"], "linux/arm64", Some(1)),
        (&["linux/arm/v6", "linux/arm/v7"], "linux/arm64", Some(1)),
        (&["linux/arm/v6", "linux/arm/v5"], "linux/arm/v7", Some(0)),
        (&["linux/arm"], "linux/arm/v7", Some(0)),
        (&["linux/arm/v8"], "linux/arm/v7", None),
        (&["windows/amd64", "unknown/unknown"], "linux/amd64", None),
        (&["linux/x86_64"], "linux/amd64", Some(0)),
        (&["", "linux/amd64"], "linux/amd64", Some(1)),
        (&[""], "linux/amd64", Some(0)),
        (&["linux/amd64", "linux/amd64"], "linux/amd64", Some(0)),
        (&[], "linux/amd64", None),
    ] {
        let found = index(offered).select(&platform(node)).map(|entry| entry.size);
        assert_eq!(found, chosen, "{offered:?} on {node}");
    }
}

#[test]
fn other_manifests_are_never_chosen() {
    let mut index = index(&["linux/amd64"]);
    index.manifests[0].media_type = "application/vnd.example+json".to_owned();
    assert_eq!(index.select(&platform("linux/amd64")), None);
}

#[test]
fn digests_of_a_manifest_are_checked() {
    for digest in ["", "sha256:", "sha256:../../x", "md5:d41d8cd98f00b204e9800998ecf8427e"] {
        let entry = format!(r#"{{"mediaType":"x","digest":"{digest}","size":1}}"#);
        let manifest = format!(r#"{{"schemaVersion":2,"config":{entry}}}"#);
        assert_eq!(Manifest::parse(manifest.as_bytes()).unwrap_err().kind, ErrorKind::Protocol);
        let index = format!(r#"{{"schemaVersion":2,"manifests":[{entry}]}}"#);
        assert_eq!(Index::parse(index.as_bytes()).unwrap_err().kind, ErrorKind::Protocol);
    }
}

#[test]
fn sizes_are_no_negative_numbers_and_lists_may_be_null() {
    let config = format!(r#"{{"mediaType":"x","digest":"{}","size":-1}}"#, sha256(b""));
    let manifest = format!(r#"{{"schemaVersion":2,"config":{config},"layers":null}}"#);
    assert!(Manifest::parse(manifest.as_bytes()).is_err());
    assert_eq!(Manifest::parse(manifest.replace("-1", "1").as_bytes()).unwrap().layers, []);
    assert_eq!(Index::parse(br#"{"manifests":null}"#).unwrap().manifests, []);
}

#[test]
fn a_manifest_without_media_type_shows_it_by_its_fields() {
    for (content, expected) in [
        (r#"{"schemaVersion":2,"config":{}}"#, Some(OCI_MANIFEST)),
        (r#"{"schemaVersion":2,"manifests":[]}"#, Some(OCI_INDEX)),
        (
            r#"{"schemaVersion":2,"mediaType":"application/vnd.docker.distribution.manifest.v2+json"}"#,
            Some(DOCKER_MANIFEST),
        ),
        (r#"{"schemaVersion":1}"#, None),
        ("[]", None),
    ] {
        assert_eq!(own_media_type(content.as_bytes()).as_deref(), expected, "{content}");
    }
}
