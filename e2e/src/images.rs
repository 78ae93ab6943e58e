//! Images for the tests: real ones, made here once and kept in the cache.
//!
//! Each is an OCI layout. The same name gives the same bytes on every machine, so that digests can be compared.

mod layout;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use layout::{Layout, Platform};
use serde::{Deserialize, Serialize};

use crate::parts;

/// A mebibyte.
pub const MIB: u64 = 1024 * 1024;
/// Counted up whenever the way in which images are made changes.
const RECIPE: &str = "images-1";
/// Written last: a directory without it is not finished.
const SUMMARY: &str = "summary.json";

/// An image on disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Image {
    /// The digest that a tag of it points to: of the manifest, or of the index.
    digest: String,
    /// Every manifest, the index included.
    manifests: Vec<String>,
    /// Configurations and layers.
    blobs: Vec<String>,
    /// Compressed bytes of the layers for this machine's platform.
    size: u64,
    #[serde(skip)]
    dir: PathBuf,
}

impl Image {
    /// busybox, runnable.
    pub fn busybox() -> Result<Self> {
        cached("busybox", |layout| {
            let layers = [layout.busybox_layer()?];
            layout.image(&Platform::here(), &layers)
        })
    }

    /// busybox and one small layer of its own: distinct for each name, with the base in common.
    pub fn small(name: &str) -> Result<Self> {
        cached(&format!("small-{name}"), |layout| {
            let layers =
                [layout.busybox_layer()?, layout.file_layer("etc/app", format!("{name}\n").as_bytes())?];
            layout.image(&Platform::here(), &layers)
        })
    }

    /// Layers of random bytes, of these sizes: nothing in common with an image of another name.
    pub fn of_layers(name: &str, sizes: &[u64]) -> Result<Self> {
        let listed: Vec<_> = sizes.iter().map(ToString::to_string).collect();
        cached(&format!("{name}-{}", listed.join("-")), |layout| {
            let layers = sizes.iter().enumerate();
            let layers = layers.map(|(index, size)| layout.random_layer(&format!("{name}/{index}"), *size));
            let layers: Vec<_> = layers.collect::<Result<_>>()?;
            layout.image(&Platform::here(), &layers)
        })
    }

    /// An index with an image for this machine and one for another architecture.
    pub fn multi_arch(name: &str) -> Result<Self> {
        cached(&format!("multi-arch-{name}"), |layout| {
            let platforms = [Platform::here(), Platform::other()];
            let images = platforms.map(|platform| {
                let layers = [
                    layout.busybox_layer()?,
                    layout.file_layer(
                        "etc/app",
                        format!("{name} for {}\n", platform.architecture).as_bytes(),
                    )?,
                ];
                Ok((layout.image(&platform, &layers)?, platform))
            });
            layout.index(&images.into_iter().collect::<Result<Vec<_>>>()?)
        })
    }

    /// What a tag of it points to, `sha256:…`: what a pull of it leaves on a node.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Compressed bytes of the layers, for this machine's platform.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Every manifest, the index included.
    pub fn manifests(&self) -> &[String] {
        &self.manifests
    }

    /// Configurations and layers.
    pub fn blobs(&self) -> &[String] {
        &self.blobs
    }

    /// The OCI layout.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The file of a manifest or blob.
    pub fn blob_file(&self, digest: &str) -> PathBuf {
        layout::blob_file(&self.dir, digest)
    }
}

/// Takes it from the cache, or makes it. Two processes may do so at the same time: one of them wins.
fn cached(name: &str, make: impl FnOnce(&Layout) -> Result<layout::Manifest>) -> Result<Image> {
    let cache = parts::cache_dir().join(RECIPE);
    // A colon would be the beginning of a tag for skopeo.
    let dir = cache.join(name.replace(['/', ':'], "_"));
    if let Some(image) = read(&dir) {
        return Ok(image);
    }
    std::fs::create_dir_all(&cache).with_context(|| format!("cannot create {}", cache.display()))?;
    let scratch = tempfile::tempdir_in(&cache)?;
    let layout = Layout::new(scratch.path())?;
    let top = make(&layout).with_context(|| format!("cannot make image {name}"))?;
    layout.finish(&top)?;
    let layout::Manifest { digest, manifests, blobs, size, .. } = top;
    let image = Image { digest, manifests, blobs, size, dir: dir.clone() };
    std::fs::write(scratch.path().join(SUMMARY), serde_json::to_vec(&image)?)?;
    if std::fs::rename(scratch.path(), &dir).is_ok() {
        let _ = scratch.keep(); // there is nothing under this name any more
    }
    read(&dir).with_context(|| format!("{} has no image in it: remove it", dir.display()))
}

fn read(dir: &Path) -> Option<Image> {
    let summary = std::fs::read(dir.join(SUMMARY)).ok()?;
    let image: Image = serde_json::from_slice(&summary).ok()?;
    Some(Image { dir: dir.to_owned(), ..image })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn an_image_is_made_once_and_is_what_its_digests_say() {
        let image = Image::multi_arch("harness").unwrap();
        assert_eq!(image.digest(), Image::multi_arch("harness").unwrap().digest());
        assert_eq!(image.manifests().len(), 3, "an index and two manifests");
        for digest in image.manifests().iter().chain(image.blobs()) {
            let bytes = std::fs::read(image.blob_file(digest)).unwrap();
            assert_eq!(&layout::sha256(&bytes), digest);
        }
    }

    #[test]
    fn small_images_share_their_base_and_nothing_else() {
        let (one, two) = (Image::small("one").unwrap(), Image::small("two").unwrap());
        let common = one.blobs().iter().filter(|blob| two.blobs().contains(blob)).count();
        assert_eq!((one.blobs().len(), two.blobs().len(), common), (3, 3, 1));
    }
}
