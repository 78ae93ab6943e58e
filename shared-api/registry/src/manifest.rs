//! Manifests and indexes, in the formats of OCI and of Docker, and the choice of a platform.

mod bounded;
mod platform;

use std::collections::{BTreeMap, HashSet};

use serde::{Deserialize, Serialize};

use crate::digest::is_digest;
use crate::error::{ErrorKind, RegistryError};

pub(crate) use bounded::{Annotations, annotations_of};
use bounded::{MAX_ENTRIES, few_annotations, few_entries};
pub use platform::Platform;

/// Manifest of an image, by OCI.
pub const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// Index of manifests, by OCI.
pub const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// Manifest of an image, by Docker.
pub const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
/// Index of manifests, by Docker.
pub const DOCKER_INDEX: &str = "application/vnd.docker.distribution.manifest.list.v2+json";

/// Largest manifest or index, as in containerd.
pub const MAX_MANIFEST: u64 = 4 << 20;

/// Factor from a compressed layer to the unpacked one where nothing better is known.
const UNPACKED: u64 = 3;

/// A reference to content by its digest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// Format of the content.
    #[serde(default)]
    pub media_type: String,
    /// `sha256:…`
    pub digest: String,
    /// Length of the content in bytes.
    pub size: u64,
    /// What an entry of an index is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
    /// What a referrer is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    /// What the author has written beside it, as far as that is a few dozen texts.
    #[serde(default, deserialize_with = "few_annotations", skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

impl Descriptor {
    /// Whether it refers to an index.
    pub fn is_index(&self) -> bool {
        matches!(self.media_type.as_str(), OCI_INDEX | DOCKER_INDEX)
    }

    /// Whether it refers to a manifest of an image.
    pub fn is_manifest(&self) -> bool {
        matches!(self.media_type.as_str(), OCI_MANIFEST | DOCKER_MANIFEST)
    }

    /// Whether it refers to a layer that is compressed with gzip. The last bytes of such a layer hold its unpacked size.
    pub fn is_gzip(&self) -> bool {
        self.media_type.contains("gzip")
    }

    /// The size of an unpacked layer, guessed: of most layers it is less.
    pub fn guess_unpacked(&self) -> u64 {
        let is_compressed = self.is_gzip() || self.media_type.contains("zstd");
        if is_compressed { self.size.saturating_mul(UNPACKED) } else { self.size }
    }

    /// Whether it refers to a layer that is not in the registry but at a URL of its own, as those of Windows once were.
    pub fn is_foreign(&self) -> bool {
        self.media_type.contains("nondistributable") || self.media_type.contains(".foreign.")
    }
}

/// The manifest of an image for one platform, or of an artifact.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// Format of the manifest, if given.
    #[serde(default)]
    pub media_type: String,
    /// What the artifact is, if it is no image.
    #[serde(default)]
    pub artifact_type: Option<String>,
    /// Configuration of the image.
    pub config: Descriptor,
    /// Layers, the lowest one first. Of more than 1,025, the first ones: such an image is refused by its count.
    #[serde(default, deserialize_with = "few_entries")]
    pub layers: Vec<Descriptor>,
    /// What the artifact is about.
    #[serde(default)]
    pub subject: Option<Descriptor>,
    /// What the author has written beside it, as far as that is a few dozen texts.
    #[serde(default, deserialize_with = "few_annotations")]
    pub annotations: BTreeMap<String, String>,
}

/// A list of manifests, one for each platform, or of referrers.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Index {
    /// Format of the index, if given.
    #[serde(default)]
    pub media_type: String,
    /// The manifests.
    #[serde(default, deserialize_with = "few_entries")]
    pub manifests: Vec<Descriptor>,
}

impl Manifest {
    /// Reads a manifest, and checks the digests in it.
    pub fn parse(content: &[u8]) -> Result<Self, RegistryError> {
        let manifest: Self = parse_json(content, "manifest")?;
        let Self { config, layers, subject, .. } = &manifest;
        check_digests(layers.iter().chain([config]).chain(subject), "manifest")?;
        Ok(manifest)
    }

    /// The layers, each once: the same one may be there several times.
    pub fn distinct_layers(&self) -> Vec<Descriptor> {
        let mut seen = HashSet::new();
        self.layers.iter().filter(|layer| seen.insert(layer.digest.as_str())).cloned().collect()
    }
}

impl Index {
    /// Reads an index, and checks the digests in it.
    pub fn parse(content: &[u8]) -> Result<Self, RegistryError> {
        let index: Self = parse_json(content, "index")?;
        if index.manifests.len() > MAX_ENTRIES {
            // containerd has no such bound, so this is left to it.
            let message = format!("the index has more than {MAX_ENTRIES} manifests");
            return Err(RegistryError::new(ErrorKind::Unsupported, message));
        }
        check_digests(index.manifests.iter(), "index")?;
        Ok(index)
    }

    /// The manifest for a platform: of those that run there, the one that containerd takes.
    pub fn select(&self, platform: &Platform) -> Option<&Descriptor> {
        let fits = |entry: &&Descriptor| entry.is_manifest() || entry.is_index();
        let ranked = self.manifests.iter().filter(fits).filter_map(|entry| {
            let rank = match &entry.platform {
                Some(offered) => platform.rank(offered)?,
                // Only its configuration names the platform. Entries that name it here come first.
                None => usize::MAX,
            };
            Some((rank, entry))
        });
        // The first of equals, as min_by_key takes it.
        ranked.min_by_key(|(rank, _)| *rank).map(|(_, entry)| entry)
    }
}

/// The media type that a manifest or index gives itself, or that its fields show.
pub(crate) fn own_media_type(content: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Outline {
        #[serde(default)]
        media_type: String,
        #[serde(default)]
        schema_version: u32,
        config: Option<serde::de::IgnoredAny>,
        manifests: Option<serde::de::IgnoredAny>,
    }
    let outline: Outline = serde_json::from_slice(content).ok()?;
    if !outline.media_type.is_empty() {
        return Some(outline.media_type);
    }
    match (outline.schema_version, outline.config, outline.manifests) {
        (2, Some(_), _) => Some(OCI_MANIFEST.to_owned()),
        (2, None, Some(_)) => Some(OCI_INDEX.to_owned()),
        _ => None,
    }
}

pub(crate) fn parse_json<'a, T: Deserialize<'a>>(content: &'a [u8], what: &str) -> Result<T, RegistryError> {
    if content.len() as u64 > MAX_MANIFEST {
        return Err(RegistryError::new(
            ErrorKind::Protocol,
            format!("the {what} is larger than {MAX_MANIFEST} bytes"),
        ));
    }
    let malformed =
        |error| RegistryError::new(ErrorKind::Protocol, format!("the {what} is malformed: {error}"));
    serde_json::from_slice(content).map_err(malformed)
}

fn check_digests<'a>(
    descriptors: impl Iterator<Item = &'a Descriptor>,
    what: &str,
) -> Result<(), RegistryError> {
    match descriptors.into_iter().find(|descriptor| !is_digest(&descriptor.digest)) {
        None => Ok(()),
        Some(Descriptor { digest, .. }) => {
            let digest: String = digest.chars().take(100).collect();
            Err(RegistryError::new(
                ErrorKind::Protocol,
                format!("the {what} names {digest:?}, which is no digest"),
            ))
        }
    }
}

#[cfg(test)]
mod tests;
