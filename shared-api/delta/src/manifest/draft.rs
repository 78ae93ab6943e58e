//! The manifest of a delta that was made, as its producer publishes it.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{
    ARTIFACT_TYPE, CONTENT, DOWNLOAD_SIZE, DeltaLayer, IMAGE_CONFIG, IMAGE_LAYER, IMAGE_MANIFEST, REUSED,
    REUSED_DIFF_ID, SOURCE, SOURCE_CONFIG, TARGET, TO, UNCOMPRESSED_SIZE,
};

/// Media type of the delta's own manifest.
pub const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
/// The configuration of a delta: it has none.
pub const EMPTY_CONFIG: &[u8] = b"{}";
/// Digest of [`EMPTY_CONFIG`].
pub const EMPTY_CONFIG_DIGEST: &str =
    "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a";

/// A blob or manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftBlob {
    /// Format of the content.
    pub media_type: String,
    /// `sha256:…`
    pub digest: String,
    /// Length of the content.
    pub size: u64,
}

/// A layer that both images have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reused {
    /// Digest of the compressed layer in the new image.
    pub digest: String,
    /// Digest of its tar.
    pub diff_id: String,
}

/// All parts of a manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Draft {
    /// Manifest of the new image.
    pub target: DraftBlob,
    /// Its configuration.
    pub config: DraftBlob,
    /// Digest of the manifest of the old image.
    pub source: String,
    /// Digest of its configuration.
    pub source_config: String,
    /// The layers that don't change.
    pub reused: Vec<Reused>,
    /// The others.
    pub layers: Vec<DeltaLayer>,
}

impl Draft {
    /// The annotations of the manifest, which a list of referrers repeats.
    pub fn annotations(&self) -> BTreeMap<String, String> {
        let list = |of: fn(&Reused) -> &str| self.reused.iter().map(of).collect::<Value>().to_string();
        let download: u64 = self.layers.iter().map(|layer| layer.size).sum();
        let annotations = [
            (TARGET, self.target.digest.clone()),
            (SOURCE, self.source.clone()),
            (SOURCE_CONFIG, self.source_config.clone()),
            (REUSED, list(|layer| &layer.digest)),
            (REUSED_DIFF_ID, list(|layer| &layer.diff_id)),
            (DOWNLOAD_SIZE, download.to_string()),
        ];
        annotations.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }

    /// The manifest. The same parts always give the same bytes.
    pub fn to_json(&self) -> Vec<u8> {
        let descriptor = |content: &DraftBlob| json!({"mediaType": content.media_type, "digest": content.digest, "size": content.size});
        let with_role = |content: &DraftBlob, role: &str| {
            let mut descriptor = descriptor(content);
            descriptor["annotations"] = json!({CONTENT: role});
            descriptor
        };
        let layers = self.layers.iter().map(|layer| {
            let DeltaLayer { to, digest, size, media_type, uncompressed } = layer;
            let mut annotations = json!({CONTENT: IMAGE_LAYER, TO: to});
            if let Some(uncompressed) = uncompressed {
                annotations[UNCOMPRESSED_SIZE] = uncompressed.to_string().into();
            }
            json!({"mediaType": media_type, "digest": digest, "size": size, "annotations": annotations})
        });
        let image = [with_role(&self.target, IMAGE_MANIFEST), with_role(&self.config, IMAGE_CONFIG)];
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": ARTIFACT_TYPE,
            "config": {
                "mediaType": super::EMPTY_TYPE,
                "digest": EMPTY_CONFIG_DIGEST,
                "size": EMPTY_CONFIG.len(),
            },
            "layers": image.into_iter().chain(layers).collect::<Value>(),
            "subject": descriptor(&self.target),
            "annotations": self.annotations(),
        });
        manifest.to_string().into_bytes()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::manifest::{DeltaManifest, Offer, TAR_DIFF};

    #[test]
    fn a_written_manifest_can_be_read() {
        let digest = |of: &str| format!("sha256:{}", of.repeat(64));
        let content =
            |of: &str| DraftBlob { media_type: MANIFEST_TYPE.to_owned(), digest: digest(of), size: 7 };
        let layer = |to: &str, uncompressed| DeltaLayer {
            to: digest(to),
            digest: digest("9"),
            size: 50,
            media_type: TAR_DIFF.to_owned(),
            uncompressed,
        };
        let draft = Draft {
            target: content("a"),
            config: content("b"),
            source: digest("1"),
            source_config: digest("2"),
            reused: vec![Reused { digest: digest("3"), diff_id: digest("4") }],
            layers: vec![layer("c", Some(1024)), layer("d", None)],
        };
        let json = draft.to_json();
        let read = DeltaManifest::parse(&json).unwrap();
        assert_eq!(read.layers, draft.layers);
        assert_eq!(
            (read.target, read.source, read.source_config),
            (digest("a"), Some(digest("1")), digest("2"))
        );
        let value: Value = serde_json::from_slice(&json).unwrap();
        assert_eq!(value["annotations"][REUSED], format!("[\"{}\"]", digest("3")));
        assert_eq!(value["subject"]["digest"], digest("a"));
        let offer = Offer::of_referrer(&digest("e"), 1, Some(ARTIFACT_TYPE), &draft.annotations());
        assert_eq!(offer.unwrap().unwrap().download, Some(100));
    }
}
