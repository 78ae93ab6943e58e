//! Images for the tests, generated once and kept in a cache.
//!
//! Each is an OCI layout. The same name gives the same bytes on every machine, so that digests can be compared.

pub mod delta;
mod layout;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
pub(crate) use layout::sha256;
use layout::{Layout, Platform};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::parts;
use crate::place::Place;

/// Bytes of a mebibyte.
pub const MIB: u64 = 1024 * 1024;
/// Version of the generated images. Increase it with each change of their generation.
const RECIPE: &str = "images-2";
/// File that is written last: a directory without it is incomplete.
const SUMMARY: &str = "summary.json";

/// An image on disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Image {
    /// Digest that a tag points to: that of the manifest or of the index.
    digest: String,
    /// Digests of all manifests, the index included.
    manifests: Vec<String>,
    /// Digests of configurations and layers.
    blobs: Vec<String>,
    /// Compressed bytes of the layers for this machine's platform.
    size: u64,
    #[serde(skip)]
    dir: PathBuf,
}

impl Image {
    /// An image for the containers that hold the namespaces of a pod: it sleeps.
    pub(crate) fn sandbox() -> Result<Self> {
        cached("sandbox", |layout| {
            let layers = [layout.busybox_layer()?];
            let start = json!({"Env": ["PATH=/bin"], "Entrypoint": ["/bin/sleep", "1000000000"]});
            layout.image_with(&Platform::here(), &layers, &start)
        })
    }

    /// An image of one of our programs as `make dist` lays it out, with the program that the tests use. It's made once for
    /// each run, since the program changes.
    pub(crate) fn of_program(name: &str) -> Result<Self> {
        let pool = std::env::var_os("PREPULL_E2E_POOL").map(PathBuf::from);
        let cache = pool.map_or_else(|| Place::here()?.new_dir("images"), |pool| Ok(pool.join("images")))?;
        cached_in(&cache, name, |layout| {
            let layers =
                [layout.program_layer(&parts::program_path(name)?, &format!("usr/local/bin/{name}"))?];
            let start = json!({"Env": ["PATH=/usr/local/bin"], "Entrypoint": [name]});
            layout.image_with(&Platform::here(), &layers, &start)
        })
    }

    /// An image of a program with this content, as `make dist` lays it out.
    pub fn of_executable(program: &str, content: &[u8]) -> Result<Self> {
        // By what is in it: two tests may take the same version for different programs.
        let digest = sha256(content);
        cached(&format!("program-{program}-{}", digest.trim_start_matches("sha256:")), |layout| {
            let layers = [layout.file_layer(&format!("usr/local/bin/{program}"), content)?];
            layout.image(&Platform::here(), &layers)
        })
    }

    /// An image with busybox and one small layer: images of different names share only the busybox layer.
    pub fn small(name: &str) -> Result<Self> {
        cached(&format!("small-{name}"), |layout| {
            let layers =
                [layout.busybox_layer()?, layout.file_layer("etc/app", format!("{name}\n").as_bytes())?];
            layout.image(&Platform::here(), &layers)
        })
    }

    /// An image with layers of random bytes, of these sizes. Images of different names share nothing.
    pub fn of_layers(name: &str, sizes: &[u64]) -> Result<Self> {
        let listed: Vec<_> = sizes.iter().map(ToString::to_string).collect();
        cached(&format!("{name}-{}", listed.join("-")), |layout| {
            let layers = sizes.iter().enumerate();
            let layers = layers.map(|(index, size)| layout.random_layer(&format!("{name}/{index}"), *size));
            let layers: Vec<_> = layers.collect::<Result<_>>()?;
            layout.image(&Platform::here(), &layers)
        })
    }

    /// An image that runs by itself, with a layer of `size` random bytes besides busybox.
    pub fn running(name: &str, size: u64) -> Result<Self> {
        cached(&format!("running-{name}-{size}"), |layout| {
            let layers = [layout.busybox_layer()?, layout.random_layer(name, size)?];
            let start = json!({"Env": ["PATH=/bin"], "Entrypoint": ["/bin/sleep", "1000000000"]});
            layout.image_with(&Platform::here(), &layers, &start)
        })
    }

    /// An image with layers of random bytes. All images on the same base share the lower ones.
    pub fn on_base(base: &str, sizes: &[u64], name: &str, size: u64) -> Result<Self> {
        let listed: Vec<_> = sizes.iter().map(ToString::to_string).collect();
        cached(&format!("{base}-{}-{name}-{size}", listed.join("-")), |layout| {
            let lower = sizes.iter().enumerate();
            let lower = lower.map(|(index, size)| layout.random_layer(&format!("{base}/{index}"), *size));
            let upper = std::iter::once_with(|| layout.random_layer(name, size));
            let layers: Vec<_> = lower.chain(upper).collect::<Result<_>>()?;
            layout.image(&Platform::here(), &layers)
        })
    }

    /// A version of an application: busybox, which all versions share, a layer with a library and a program of 8 MiB, with
    /// 64 KiB that each version changes, and a small layer with the release notes of this `edition`. Tests with the same
    /// name share the deltas between its versions.
    pub fn version(name: &str, version: u64, edition: u64) -> Result<Self> {
        Self::version_of_size(name, version, edition, 0, None)
    }

    /// A version with this many zeros in its layer as well. They compress to nearly nothing.
    pub fn version_with_zeros(name: &str, version: u64, zeros: u64) -> Result<Self> {
        Self::version_of_size(name, version, 1, zeros, None)
    }

    /// A version on a base that has got this update: its upper layers are the same.
    pub fn version_on(name: &str, version: u64, update: &str) -> Result<Self> {
        Self::version_of_size(name, version, 1, 0, Some(update))
    }

    /// A version with one program of `size` bytes, whose first `changed` bytes are its own.
    pub fn release(name: &str, version: u64, size: u64, changed: u64) -> Result<Self> {
        cached(&format!("program-{name}-{version}-{size}-{changed}"), |layout| {
            let mut program = random(&format!("{name}/{version}"), changed);
            program.extend(random(&format!("{name}/program"), size.saturating_sub(changed)));
            let layers = [layout.busybox_layer()?, layout.file_layer("app/program", &program)?];
            layout.image(&Platform::here(), &layers)
        })
    }

    fn version_of_size(
        name: &str,
        version: u64,
        edition: u64,
        zeros: u64,
        update: Option<&str>,
    ) -> Result<Self> {
        let on = update.unwrap_or("first");
        cached(&format!("release-{name}-{version}-{edition}-{zeros}-{on}"), |layout| {
            let changed = usize::try_from(version)? * 128 * 1024;
            let mut program = random(&format!("{name}/program"), 8 * MIB);
            program[changed..changed + 64 * 1024]
                .copy_from_slice(&random(&format!("{name}/{version}"), 64 * 1024));
            let library = random(&format!("{name}/library"), 4 * MIB);
            let zeros = vec![0; usize::try_from(zeros)?];
            let files: [(&str, &[u8]); 3] =
                [("app/bin/program", &program), ("app/lib/library", &library), ("app/zeros", &zeros)];
            let notes = format!("{name} {version}.{edition}\n");
            let mut layers = vec![layout.busybox_layer()?];
            if let Some(update) = update {
                layers.push(layout.file_layer("etc/update", update.as_bytes())?);
            }
            layers.push(layout.files_layer(&files)?);
            layers.push(layout.file_layer("app/notes", notes.as_bytes())?);
            layout.image(&Platform::here(), &layers)
        })
    }

    /// An image with a wrong uncompressed digest in its configuration.
    pub fn of_wrong_diff_ids(name: &str) -> Result<Self> {
        cached(&format!("wrong-diff-ids-{name}"), |layout| {
            let mut layer = layout.random_layer(name, MIB)?;
            layer.diff_id = format!("sha256:{}", "0".repeat(64));
            layout.image(&Platform::here(), &[layer])
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

    /// Digest that a tag points to, `sha256:…`, and that a node has after the pull.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Compressed bytes of the layers for this machine's platform.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Digests of all manifests, the index included.
    pub fn manifests(&self) -> &[String] {
        &self.manifests
    }

    /// Digests of configurations and layers.
    pub fn blobs(&self) -> &[String] {
        &self.blobs
    }

    /// Directory of the OCI layout.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// File of a manifest or blob.
    pub fn blob_file(&self, digest: &str) -> PathBuf {
        layout::blob_file(&self.dir, digest)
    }
}

/// Incompressible bytes, which depend only on the seed.
fn random(seed: &str, size: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    layout::write_random(&mut bytes, seed, size).map(|()| bytes).unwrap_or_default()
}

/// Reads an image from the cache, or generates it. Of several processes that need it, the first generates it.
fn cached(name: &str, make: impl FnOnce(&Layout) -> Result<layout::Manifest>) -> Result<Image> {
    cached_in(&parts::cache_dir().join(RECIPE), name, make)
}

fn cached_in(
    cache: &Path,
    name: &str,
    make: impl FnOnce(&Layout) -> Result<layout::Manifest>,
) -> Result<Image> {
    // skopeo would read the text after a colon as a tag.
    let dir = cache.join(name.replace(['/', ':'], "_"));
    if let Some(image) = read(&dir) {
        return Ok(image);
    }
    std::fs::create_dir_all(cache).with_context(|| format!("cannot create {}", cache.display()))?;
    let lock = std::fs::File::create(dir.with_added_extension("lock"))?;
    lock.lock()?;
    if let Some(image) = read(&dir) {
        return Ok(image);
    }
    let scratch = tempfile::tempdir_in(cache)?;
    let layout = Layout::new(scratch.path())?;
    let top = make(&layout).with_context(|| format!("cannot make image {name}"))?;
    layout.finish(&top)?;
    let layout::Manifest { digest, manifests, blobs, size, .. } = top;
    let image = Image { digest, manifests, blobs, size, dir: dir.clone() };
    std::fs::write(scratch.path().join(SUMMARY), serde_json::to_vec(&image)?)?;
    if std::fs::rename(scratch.path(), &dir).is_ok() {
        let _ = scratch.keep(); // renamed: there is nothing left to remove
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
    fn images_are_reproducible() {
        let image = Image::multi_arch("harness").unwrap();
        assert_eq!(image.digest(), Image::multi_arch("harness").unwrap().digest());
        assert_eq!(image.manifests().len(), 3, "an index and two manifests");
        for digest in image.manifests().iter().chain(image.blobs()) {
            let bytes = std::fs::read(image.blob_file(digest)).unwrap();
            assert_eq!(&layout::sha256(&bytes), digest);
        }
    }

    #[test]
    fn small_images_share_only_their_base_layer() {
        let (one, two) = (Image::small("one").unwrap(), Image::small("two").unwrap());
        let common = one.blobs().iter().filter(|blob| two.blobs().contains(blob)).count();
        assert_eq!((one.blobs().len(), two.blobs().len(), common), (3, 3, 1));
    }
}
