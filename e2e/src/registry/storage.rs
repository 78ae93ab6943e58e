//! Writes an image into the storage of a docker-registry, in its layout:
//! <https://github.com/distribution/distribution/blob/v2.8.2/registry/storage/paths.go>.

use std::path::Path;

use anyhow::{Context, Result};

use crate::images::delta::Delta;
use crate::images::{Image, sha256};

/// Writes an image into the storage; `path` is a repository and a tag.
pub(super) fn seed(storage: &Path, image: &Image, path: &str) -> Result<()> {
    let (repository, tag) = path.rsplit_once(':').with_context(|| format!("{path} has no tag"))?;
    let root = storage.join("docker/registry/v2");
    let repository = root.join("repositories").join(repository);
    for digest in image.manifests().iter().chain(image.blobs()) {
        let hex = digest.trim_start_matches("sha256:");
        let dir = root.join("blobs/sha256").join(&hex[..2]).join(hex);
        std::fs::create_dir_all(&dir)?;
        let (from, to) = (image.blob_file(digest), dir.join("data"));
        if !to.exists() {
            // A hard link, if the cache is on the same file system: the registry never changes a blob.
            std::fs::hard_link(&from, &to).or_else(|_| std::fs::copy(&from, &to).map(drop))?;
        }
    }
    for digest in image.blobs() {
        write_link(&repository.join("_layers").join(digest.replace(':', "/")), digest)?;
    }
    for digest in image.manifests() {
        write_link(&repository.join("_manifests/revisions").join(digest.replace(':', "/")), digest)?;
    }
    let tag = repository.join("_manifests/tags").join(tag);
    write_link(&tag.join("index").join(image.digest().replace(':', "/")), image.digest())?;
    write_link(&tag.join("current"), image.digest())
}

/// Writes a delta into a repository, as `kubectl prepull delta` pushes it to a registry without an API for referrers.
pub(super) fn seed_delta(storage: &Path, repository: &str, delta: &Delta) -> Result<()> {
    let root = storage.join("docker/registry/v2");
    let repository = root.join("repositories").join(repository);
    let write = |content: &[u8]| {
        let digest = sha256(content);
        let hex = digest.trim_start_matches("sha256:");
        let dir = root.join("blobs/sha256").join(&hex[..2]).join(hex);
        std::fs::create_dir_all(&dir)?;
        std::fs::write(dir.join("data"), content)?;
        Ok::<_, anyhow::Error>(digest)
    };
    for (_, blob) in &delta.blobs {
        let digest = write(blob)?;
        write_link(&repository.join("_layers").join(digest.replace(':', "/")), &digest)?;
    }
    let tag = repository.join("_manifests/tags").join(delta.tag());
    let index = listed_before(&root, &tag, &delta.index())?;
    for manifest in [&delta.manifest, &index] {
        let digest = write(manifest)?;
        write_link(&repository.join("_manifests/revisions").join(digest.replace(':', "/")), &digest)?;
    }
    let digest = sha256(&index);
    write_link(&tag.join("index").join(digest.replace(':', "/")), &digest)?;
    write_link(&tag.join("current"), &digest)
}

/// This list of referrers, with those that the tag has already.
fn listed_before(root: &Path, tag: &Path, index: &[u8]) -> Result<Vec<u8>> {
    let Ok(current) = std::fs::read_to_string(tag.join("current/link")) else { return Ok(index.to_vec()) };
    let hex = current.trim_start_matches("sha256:");
    let before = std::fs::read(root.join("blobs/sha256").join(&hex[..2]).join(hex).join("data"))?;
    let [before, mut index] = [&*before, index].map(serde_json::from_slice::<serde_json::Value>);
    let list = index.as_mut().ok().and_then(|index| index["manifests"].as_array_mut()).context("no list")?;
    list.extend(before?["manifests"].as_array().cloned().unwrap_or_default());
    Ok(serde_json::to_vec(&index?)?)
}

fn write_link(dir: &Path, digest: &str) -> Result<()> {
    std::fs::create_dir_all(dir)?;
    Ok(std::fs::write(dir.join("link"), digest)?)
}

/// Points a tag of a repository to the image of another tag.
pub(super) fn retag(storage: &Path, repository: &str, from: &str, to: &str) -> Result<()> {
    let tags = storage.join("docker/registry/v2/repositories").join(repository).join("_manifests/tags");
    let digest = std::fs::read_to_string(tags.join(from).join("current/link"));
    let digest = digest.with_context(|| format!("{repository} has no tag {from}"))?;
    write_link(&tags.join(to).join("index").join(digest.replace(':', "/")), &digest)?;
    write_link(&tags.join(to).join("current"), &digest)
}
