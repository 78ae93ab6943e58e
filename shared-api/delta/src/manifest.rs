//! The manifest of a delta, and its offer in a list of referrers.

#[cfg(feature = "make")]
mod draft;

use std::collections::{BTreeMap, HashSet};

use prepull_api::delta::EMPTY_TYPE;
use prepull_api::sites::is_digest;
use serde::Deserialize;

#[cfg(feature = "make")]
pub use draft::{Draft, DraftBlob, EMPTY_CONFIG, EMPTY_CONFIG_DIGEST, MANIFEST_TYPE, Reused};
pub use prepull_api::delta::{ARTIFACT_TYPE, DOWNLOAD_SIZE, SOURCE_CONFIG, TARGET};

/// Media type of a layer that must be applied to the files of the old image.
pub const TAR_DIFF: &str = "application/vnd.tar-diff";

/// Digest of the manifest of the old image.
pub const SOURCE: &str = "io.github.containers.delta.source";
/// JSON list of the layers that both images have.
pub const REUSED: &str = "io.github.containers.delta.reused";
/// JSON list of their diff IDs.
pub const REUSED_DIFF_ID: &str = "io.github.containers.delta.reused-diff-id";
/// The role of a layer of the delta, such as [`IMAGE_LAYER`].
pub const CONTENT: &str = "io.github.containers.delta.content";
/// Digest of the compressed layer of the new image that a layer of the delta stands for.
pub const TO: &str = "io.github.containers.delta.to";
/// [`CONTENT`] of the manifest of the new image.
pub const IMAGE_MANIFEST: &str = "image-manifest";
/// [`CONTENT`] of its configuration.
pub const IMAGE_CONFIG: &str = "image-config";
/// [`CONTENT`] of a changed layer.
pub const IMAGE_LAYER: &str = "image-layer";

/// Our own annotation on a layer: the size of the tar that applying it gives.
pub const UNCOMPRESSED_SIZE: &str = "prepull.kubeedge.io/uncompressed-size";

/// Largest manifest: [`MAX_LAYERS`] take half of it. Small entries take ten times as much once they're read.
pub const MAX_MANIFEST: usize = 1 << 20;
/// Least download that a delta is looked for: below it, the requests cost as much as they save.
pub const WORTHWHILE: u64 = 1 << 20;
/// Most manifests of deltas to read for an image. A publisher makes deltas from the last few versions, and a node has one or
/// two of them.
pub const MAX_OFFERS: usize = 4;
/// Most layers of a delta, and of an image. containerd's overlay mounts at most 500, and signatures may follow.
pub const MAX_LAYERS: usize = 1024;

/// Largest blob, and largest tar. No layer of an image comes near to it, and sums of sizes don't overflow.
const MAX_SIZE: u64 = 1 << 40;

/// The first thing that is wrong with a manifest or an offer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct ManifestError {
    /// The field, as a path: `layers[2].digest`.
    pub field: String,
    /// The problem with it.
    pub problem: String,
}

/// A delta in the list of an image's referrers. The list copies the annotations of the manifest, so one request shows which
/// deltas there are, and from which images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Digest of the delta's manifest.
    pub digest: String,
    /// Length of that manifest.
    pub size: u64,
    /// Digest of the configuration of the image that it starts from.
    pub source_config: String,
    /// Digest of the manifest of the image that it leads to.
    pub target: String,
    /// Bytes of its layers, if its producer announces them.
    pub download: Option<u64>,
}

impl Offer {
    /// Reads a descriptor from a list of referrers. `None` if it's another kind of artifact. `prepull_registry` keeps only
    /// such types and annotations of a list.
    pub fn of_referrer(
        digest: &str,
        size: u64,
        artifact_type: Option<&str>,
        annotations: &BTreeMap<String, String>,
    ) -> Result<Option<Self>, ManifestError> {
        // Registries that don't know the type of an artifact report that of its empty configuration.
        let is_delta = artifact_type == Some(ARTIFACT_TYPE)
            || (artifact_type == Some(EMPTY_TYPE) && annotations.contains_key(SOURCE_CONFIG));
        if !is_delta {
            return Ok(None);
        }
        let size = check_size("size", size)?;
        if size > MAX_MANIFEST as u64 {
            return Err(field_error("size", format!("{size} bytes, of at most {MAX_MANIFEST}")));
        }
        Ok(Some(Self {
            digest: check_digest("digest", digest)?,
            size,
            source_config: required_digest(annotations, "annotations", SOURCE_CONFIG)?,
            target: required_digest(annotations, "annotations", TARGET)?,
            download: read_size(annotations, "annotations", DOWNLOAD_SIZE)?,
        }))
    }
}

/// The manifest of a delta.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeltaManifest {
    /// Digest of the manifest of the image that it leads to.
    pub target: String,
    /// Digest of the manifest of the image that it starts from, if given.
    pub source: Option<String>,
    /// Digest of the configuration of that image.
    pub source_config: String,
    /// The layers that changed. Those of the image that are not here are taken as they are.
    pub layers: Vec<DeltaLayer>,
}

/// A changed layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeltaLayer {
    /// Digest of the compressed layer in the manifest of the new image.
    pub to: String,
    /// Digest of the blob.
    pub digest: String,
    /// Length of the blob.
    pub size: u64,
    /// [`TAR_DIFF`], or the type of the original layer where a diff would be larger.
    pub media_type: String,
    /// Length of the tar, if its producer announces it.
    pub uncompressed: Option<u64>,
}

impl DeltaLayer {
    /// Whether it must be applied to the files of the old image.
    pub fn is_diff(&self) -> bool {
        self.media_type == TAR_DIFF
    }
}

impl DeltaManifest {
    /// Reads a manifest, and checks it.
    ///
    /// # Errors
    /// It's too large, or of another kind, or a field that we use is missing or malformed.
    pub fn parse(content: &[u8]) -> Result<Self, ManifestError> {
        if content.len() > MAX_MANIFEST {
            return Err(field_error(
                "manifest",
                format!("{} bytes, of at most {MAX_MANIFEST}", content.len()),
            ));
        }
        let mut json = serde_json::Deserializer::from_slice(content);
        let raw: RawManifest = serde_path_to_error::deserialize(&mut json)
            .map_err(|error| field_error(&error.path().to_string(), error.inner().to_string()))?;
        json.end().map_err(|error| field_error("manifest", error.to_string()))?;
        let RawManifest { artifact_type, subject, layers, annotations } = raw;
        match artifact_type.as_deref() {
            Some(ARTIFACT_TYPE) => {}
            None => return Err(field_error("artifactType", "is missing".to_owned())),
            Some(other) => {
                return Err(field_error("artifactType", format!("{other:.100?}, not {ARTIFACT_TYPE}")));
            }
        }
        let annotations = annotations.unwrap_or_default();
        let target = required_digest(&annotations, "annotations", TARGET)?;
        if let Some(subject) = subject.filter(|subject| subject.digest != target) {
            let problem = format!("{:.100?}, not the target {target}", subject.digest);
            return Err(field_error("subject.digest", problem));
        }
        Ok(Self {
            source_config: required_digest(&annotations, "annotations", SOURCE_CONFIG)?,
            source: read_digest(&annotations, "annotations", SOURCE)?,
            layers: read_layers(&layers.unwrap_or_default(), &target)?,
            target,
        })
    }

    /// The layer that stands for one of the new image.
    pub fn layer(&self, to: &str) -> Option<&DeltaLayer> {
        self.layers.iter().find(|layer| layer.to == to)
    }

    /// The diff to download in place of a layer, if it's smaller than what is missing of that: `missing` bytes.
    pub fn diff_for(&self, layer: &str, missing: u64) -> Option<&DeltaLayer> {
        self.layer(layer).filter(|found| found.is_diff() && found.size < missing)
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawManifest {
    artifact_type: Option<String>,
    subject: Option<RawDescriptor>,
    layers: Option<Vec<RawDescriptor>>,
    annotations: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawDescriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: u64,
    annotations: Option<BTreeMap<String, String>>,
}

fn read_layers(raw: &[RawDescriptor], target: &str) -> Result<Vec<DeltaLayer>, ManifestError> {
    if raw.len() > MAX_LAYERS {
        return Err(field_error("layers", format!("{} layers, of at most {MAX_LAYERS}", raw.len())));
    }
    let none = BTreeMap::new();
    let (mut layers, mut seen, mut has_manifest) = (Vec::new(), HashSet::new(), false);
    for (index, RawDescriptor { media_type, digest, size, annotations }) in raw.iter().enumerate() {
        let at = |name: &str| format!("layers[{index}].{name}");
        let annotations = annotations.as_ref().unwrap_or(&none);
        match annotations.get(CONTENT).map(String::as_str) {
            Some(IMAGE_MANIFEST) if digest != target => {
                return Err(field_error(&at("digest"), format!("{digest:.100?}, not the target {target}")));
            }
            Some(IMAGE_MANIFEST) => has_manifest = true,
            Some(IMAGE_LAYER) => {
                let layer = DeltaLayer {
                    to: required_digest(annotations, &at("annotations"), TO)?,
                    digest: check_digest(&at("digest"), digest)?,
                    size: check_size(&at("size"), *size)?,
                    media_type: media_type.clone(),
                    uncompressed: read_size(annotations, &at("annotations"), UNCOMPRESSED_SIZE)?,
                };
                if !seen.insert(layer.to.clone()) {
                    return Err(field_error(&at(&format!("annotations.{TO}")), "stands twice".to_owned()));
                }
                layers.push(layer);
            }
            // The configuration comes from the registry as of any image; signatures and newer roles aren't ours.
            _ => {}
        }
    }
    if has_manifest { Ok(layers) } else { Err(field_error("layers", format!("no {IMAGE_MANIFEST}"))) }
}

fn required_digest(
    annotations: &BTreeMap<String, String>,
    at: &str,
    name: &str,
) -> Result<String, ManifestError> {
    let missing = || field_error(&format!("{at}.{name}"), "is missing".to_owned());
    read_digest(annotations, at, name)?.ok_or_else(missing)
}

fn read_digest(
    annotations: &BTreeMap<String, String>,
    at: &str,
    name: &str,
) -> Result<Option<String>, ManifestError> {
    annotations.get(name).map(|digest| check_digest(&format!("{at}.{name}"), digest)).transpose()
}

fn check_digest(field: &str, digest: &str) -> Result<String, ManifestError> {
    if is_digest(digest) {
        Ok(digest.to_owned())
    } else {
        Err(field_error(field, format!("{digest:.100?} is no digest of SHA-256")))
    }
}

fn read_size(
    annotations: &BTreeMap<String, String>,
    at: &str,
    name: &str,
) -> Result<Option<u64>, ManifestError> {
    let Some(text) = annotations.get(name) else { return Ok(None) };
    let field = format!("{at}.{name}");
    let size =
        text.parse().map_err(|_| field_error(&field, format!("{text:.100?} is no number of bytes")))?;
    check_size(&field, size).map(Some)
}

fn check_size(field: &str, size: u64) -> Result<u64, ManifestError> {
    if size <= MAX_SIZE {
        Ok(size)
    } else {
        Err(field_error(field, format!("{size} bytes, of at most {MAX_SIZE}")))
    }
}

fn field_error(field: &str, problem: String) -> ManifestError {
    ManifestError { field: field.to_owned(), problem }
}

#[cfg(test)]
mod tests;
