//! Deltas between two images of the tests, and lies in their place.

use std::fs::File;
use std::io::{Cursor, Read, Write};
use std::num::NonZeroUsize;
use std::path::Path;

use anyhow::{Context, Result};
use prepull_delta::make::{Resources, Root, Tar, make_diff, unpack};
use prepull_delta::manifest as names;
use serde_json::{Value, json};

use super::{Image, layout};

/// A delta with all its blobs.
#[derive(Clone, Debug)]
pub struct Delta {
    /// Digest of the image that it leads to.
    target: String,
    config: String,
    /// Blobs by digest; the manifest isn't one of them.
    pub(crate) blobs: Vec<(String, Vec<u8>)>,
    pub(crate) manifest: Vec<u8>,
}

impl Delta {
    /// The delta between two images, as `kubectl prepull delta` makes it.
    pub fn between(from: &Image, to: &Image) -> Result<Self> {
        Self::with(from, to, |layer, new| {
            kept(&format!("{}-{layer}", from.digest()), || {
                let old: Vec<Vec<u8>> =
                    layers(from).iter().map(|digest| tar(from, digest)).collect::<Result<_>>()?;
                let root = Root::read(old.iter().map(|tar| tar as &dyn Tar).collect())?;
                let mut out = Cursor::new(Vec::new());
                let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
                make_diff(&root, new, &mut out, &Resources { threads, memory: 256 << 20 }, &mut |_| {})?;
                Ok(out.into_inner())
            })
        })
    }

    /// A delta with another diff in place of each of its own.
    pub fn lying(from: &Image, to: &Image, lie: &[u8]) -> Result<Self> {
        Self::with(from, to, |_, _| Ok(lie.to_vec()))
    }

    /// The same delta, without the sizes of the layers' tars.
    pub fn without_sizes(self) -> Result<Self> {
        let mut manifest: Value = serde_json::from_slice(&self.manifest)?;
        for entry in manifest["layers"].as_array_mut().context("no layers")? {
            entry["annotations"].as_object_mut().context("no annotations")?.remove(names::UNCOMPRESSED_SIZE);
        }
        Ok(Self { manifest: manifest.to_string().into_bytes(), ..self })
    }

    fn with(from: &Image, to: &Image, make: impl Fn(&str, &dyn Tar) -> Result<Vec<u8>>) -> Result<Self> {
        let manifest = std::fs::read(to.blob_file(to.digest()))?;
        let (mut blobs, mut entries) = (Vec::new(), Vec::new());
        entries.push(json!({
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": to.digest(), "size": manifest.len(),
            "annotations": { names::CONTENT: names::IMAGE_MANIFEST },
        }));
        for layer in layers(to).iter().filter(|layer| !layers(from).contains(layer)) {
            let new = tar(to, layer)?;
            let diff = make(layer, &new)?;
            let digest = layout::sha256(&diff);
            entries.push(json!({
                "mediaType": names::TAR_DIFF, "digest": digest, "size": diff.len(),
                "annotations": {
                    names::CONTENT: names::IMAGE_LAYER,
                    names::TO: layer,
                    names::UNCOMPRESSED_SIZE: new.len().to_string(),
                },
            }));
            blobs.push((digest, diff));
        }
        blobs.push((layout::sha256(b"{}"), b"{}".to_vec()));
        let config = from.blobs().first().context("an image without a configuration")?;
        let annotations = json!({ names::TARGET: to.digest(), names::SOURCE_CONFIG: config });
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "artifactType": names::ARTIFACT_TYPE,
            "config": { "mediaType": "application/vnd.oci.empty.v1+json", "digest": layout::sha256(b"{}"), "size": 2 },
            "subject": { "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": to.digest(), "size": manifest.len() },
            "layers": entries,
            "annotations": annotations,
        });
        let (target, config) = (to.digest().to_owned(), config.clone());
        Ok(Self { target, config, blobs, manifest: manifest.to_string().into_bytes() })
    }

    /// Bytes of its diffs.
    pub fn size(&self) -> u64 {
        self.blobs.iter().map(|(_, blob)| blob.len() as u64).sum::<u64>() - 2
    }

    /// Digest of its manifest.
    pub fn manifest_digest(&self) -> String {
        layout::sha256(&self.manifest)
    }

    /// Digests of its diffs.
    pub fn digests(&self) -> impl Iterator<Item = &str> {
        self.blobs.iter().map(|(digest, _)| digest.as_str())
    }

    /// The tag that lists the referrers of an image, in a registry without an API for them.
    pub(crate) fn tag(&self) -> String {
        self.target.replace(':', "-")
    }

    /// What this tag points to.
    pub(crate) fn index(&self) -> Vec<u8> {
        let entry: Value = json!({
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "artifactType": names::ARTIFACT_TYPE,
            "digest": self.manifest_digest(), "size": self.manifest.len(),
            "annotations": { names::TARGET: self.target, names::SOURCE_CONFIG: self.config },
        });
        let index = json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [entry],
        });
        index.to_string().into_bytes()
    }
}

/// What `make` returns, kept under this name for the other tests of this run: their deltas cost seconds of processor time.
/// The next run makes them again, with the code that it tests.
fn kept(name: &str, make: impl FnOnce() -> Result<Vec<u8>>) -> Result<Vec<u8>> {
    let Some(pool) = std::env::var_os("PREPULL_E2E_POOL") else { return make() };
    let dir = Path::new(&pool).join("deltas");
    std::fs::create_dir_all(&dir)?;
    let file = dir.join(name);
    let lock = File::create(file.with_added_extension("lock"))?;
    lock.lock()?;
    if let Ok(kept) = std::fs::read(&file) {
        return Ok(kept);
    }
    let made = make()?;
    let mut scratch = tempfile::NamedTempFile::new_in(&dir)?;
    scratch.write_all(&made)?;
    scratch.persist(&file)?;
    Ok(made)
}

fn layers(image: &Image) -> &[String] {
    image.blobs().get(1..).unwrap_or_default()
}

fn tar(image: &Image, layer: &str) -> Result<Vec<u8>> {
    let mut tar = Vec::new();
    unpack(File::open(image.blob_file(layer))?)?.read_to_end(&mut tar)?;
    Ok(tar)
}

/// A diff of these operations, each with its number and its argument.
pub fn diff_of(operations: &[(u8, &[u8])]) -> Result<Vec<u8>> {
    let mut plain = Vec::new();
    for (operation, argument) in operations {
        plain.push(*operation);
        let mut size = argument.len();
        while size > 127 {
            plain.push(u8::try_from(size % 128)? | 128);
            size /= 128;
        }
        plain.push(u8::try_from(size)?);
        plain.extend_from_slice(argument);
    }
    let mut diff = b"tardf1\n\0".to_vec();
    diff.extend(zstd::encode_all(&plain[..], 3)?);
    Ok(diff)
}
