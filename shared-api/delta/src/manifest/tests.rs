#![allow(clippy::unwrap_used)]

use serde_json::{Value, json};

use super::*;

fn digest(of: &str) -> String {
    format!("sha256:{}", of.repeat(64))
}

fn manifest() -> Value {
    json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "artifactType": ARTIFACT_TYPE,
        "config": {"mediaType": "application/vnd.oci.empty.v1+json", "digest": digest("4"), "size": 2},
        "layers": [
            {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest("a"), "size": 715,
                "annotations": {CONTENT: IMAGE_MANIFEST}},
            {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest("b"), "size": 299,
                "annotations": {CONTENT: IMAGE_CONFIG}},
            {"mediaType": TAR_DIFF, "digest": digest("c"), "size": 674,
                "annotations": {CONTENT: IMAGE_LAYER, TO: digest("d"), UNCOMPRESSED_SIZE: "4096"}},
            {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": digest("e"), "size": 99,
                "annotations": {CONTENT: IMAGE_LAYER, TO: digest("e")}},
            {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest("f"), "size": 9822,
                "annotations": {CONTENT: "cosign-signature"}},
        ],
        "subject": {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest("a"), "size": 715},
        "annotations": {TARGET: digest("a"), SOURCE: digest("1"), SOURCE_CONFIG: digest("2"), REUSED: "[]"},
    })
}

fn parse(manifest: &Value) -> Result<DeltaManifest, ManifestError> {
    DeltaManifest::parse(&serde_json::to_vec(manifest).unwrap())
}

#[test]
fn a_manifest_has_its_layers() {
    let parsed = parse(&manifest()).unwrap();
    assert_eq!(parsed.target, digest("a"));
    assert_eq!(parsed.source, Some(digest("1")));
    assert_eq!(parsed.source_config, digest("2"));
    assert_eq!(parsed.layers.len(), 2);
    let diff = parsed.layer(&digest("d")).unwrap();
    assert_eq!((diff.digest.as_str(), diff.size, diff.uncompressed), (digest("c").as_str(), 674, Some(4096)));
    assert!(diff.is_diff());
    let whole = parsed.layer(&digest("e")).unwrap();
    assert_eq!((whole.is_diff(), whole.uncompressed), (false, None));
    assert_eq!(parsed.layer(&digest("c")), None);
}

#[test]
fn absent_and_null_fields_are_allowed() {
    let mut manifest = manifest();
    let fields = manifest.as_object_mut().unwrap();
    fields.remove("subject");
    fields.remove("config");
    fields["annotations"].as_object_mut().unwrap().remove(SOURCE);
    fields["layers"] = json!([{"digest": digest("a"), "size": 1, "annotations": {CONTENT: IMAGE_MANIFEST}},
        {"digest": "sha512:later", "size": 1, "annotations": null}]);
    let parsed = parse(&manifest).unwrap();
    assert_eq!((parsed.source, parsed.layers.len()), (None, 0));
}

/// Sets the field at a pointer, or removes it.
fn change(pointer: &str, value: Value) -> Value {
    let mut manifest = manifest();
    let (parent, name) = pointer.rsplit_once('/').unwrap();
    let name = name.replace("~1", "/");
    match (manifest.pointer_mut(parent).unwrap(), value) {
        (Value::Object(fields), Value::Null) => drop(fields.remove(&name)),
        (Value::Object(fields), value) => drop(fields.insert(name, value)),
        (Value::Array(items), value) => items[name.parse::<usize>().unwrap()] = value,
        (other, _) => panic!("{other}"),
    }
    manifest
}

#[test]
fn errors_name_the_field() {
    let source_config = "/annotations/io.github.containers.delta.source-config";
    let target = "/annotations/io.github.containers.delta.target";
    let to = "/layers/2/annotations/io.github.containers.delta.to";
    let same = "/layers/3/annotations/io.github.containers.delta.to";
    let size = "/layers/2/annotations/prepull.kubeedge.io~1uncompressed-size";
    for (pointer, value, expected) in [
        ("/artifactType", Value::Null, "artifactType: is missing"),
        ("/artifactType", json!("application/other"), "artifactType: \"application/other\", not"),
        ("/subject/digest", json!(digest("0")), "subject.digest: "),
        (source_config, Value::Null, "annotations.io.github.containers.delta.source-config: is missing"),
        (
            source_config,
            json!("sha256:x"),
            "annotations.io.github.containers.delta.source-config: \"sha256:x\" is",
        ),
        (target, Value::Null, "annotations.io.github.containers.delta.target: is missing"),
        ("/layers/0/digest", json!(digest("9")), "layers[0].digest: "),
        ("/layers/0/annotations", json!({}), "layers: no image-manifest"),
        ("/layers/2/digest", json!("sha256:"), "layers[2].digest: \"sha256:\" is no digest"),
        ("/layers/2/digest", json!(5), "layers[2].digest: invalid type"),
        ("/layers/2/size", json!(-1), "layers[2].size: invalid value"),
        ("/layers/2/size", json!(1_u64 << 41), "layers[2].size: 2199023255552 bytes, of at most"),
        (to, Value::Null, "layers[2].annotations.io.github.containers.delta.to: is missing"),
        (same, json!(digest("d")), "layers[3].annotations.io.github.containers.delta.to: stands twice"),
        (
            size,
            json!("4 KiB"),
            "layers[2].annotations.prepull.kubeedge.io/uncompressed-size: \"4 KiB\" is no number",
        ),
        (
            "/layers",
            json!(vec![json!({"digest": digest("a"), "size": 1}); 1025]),
            "layers: 1025 layers, of at most",
        ),
    ] {
        let error = parse(&change(pointer, value)).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{pointer}: {error}");
    }
    for content in [vec![b' '; MAX_MANIFEST + 1], b"[]".to_vec(), b"{} {}".to_vec(), b"{".to_vec()] {
        assert!(DeltaManifest::parse(&content).is_err());
    }
}

#[test]
fn offers_are_read_from_referrers() {
    let annotations = |fields: Value| -> BTreeMap<String, String> { serde_json::from_value(fields).unwrap() };
    let whole = annotations(
        json!({TARGET: digest("a"), SOURCE_CONFIG: digest("2"), DOWNLOAD_SIZE: "773", REUSED: "[]"}),
    );
    let read = |artifact_type, size, annotations: &_| {
        Offer::of_referrer(&digest("5"), size, artifact_type, annotations)
    };
    let offer = Offer {
        digest: digest("5"),
        size: 2000,
        source_config: digest("2"),
        target: digest("a"),
        download: Some(773),
    };
    assert_eq!(read(Some(ARTIFACT_TYPE), 2000, &whole), Ok(Some(offer.clone())));
    assert_eq!(
        read(Some(EMPTY_TYPE), 2000, &whole),
        Ok(Some(offer)),
        "of a registry that doesn't know the type"
    );
    assert_eq!(read(Some(EMPTY_TYPE), 2000, &annotations(json!({}))), Ok(None));
    assert_eq!(read(Some("application/other"), 2000, &whole), Ok(None));
    assert_eq!(read(None, 2000, &whole), Ok(None));
    let error = read(Some(ARTIFACT_TYPE), 5 << 20, &whole).unwrap_err();
    assert_eq!(error.field, "size");
    let error = read(Some(ARTIFACT_TYPE), 2000, &annotations(json!({TARGET: digest("a")}))).unwrap_err();
    assert_eq!(error.to_string(), format!("annotations.{SOURCE_CONFIG}: is missing"));
    let error = Offer::of_referrer("latest", 1, Some(ARTIFACT_TYPE), &whole).unwrap_err();
    assert_eq!(error.field, "digest");
}
