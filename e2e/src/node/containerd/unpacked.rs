//! Compares unpacked layers with the layers of the image.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use containerd_client::services::v1::snapshots::snapshots_client::SnapshotsClient;
use containerd_client::services::v1::snapshots::{
    PrepareSnapshotRequest, RemoveSnapshotRequest, ViewSnapshotRequest,
};
use flate2::read::GzDecoder;
use serde_json::Value;
use tonic::Request;

use super::{Containerd, NAMESPACE};
use crate::images::{Image, sha256};

/// A temporary snapshot for looking.
const LOOK: &str = "prepull-e2e-look";

/// Names of the snapshots of an image's layers, the lowest first.
fn chains(image: &Image) -> Result<Vec<String>> {
    let config = image.blobs().first().context("no configuration")?;
    let config: Value = serde_json::from_slice(&std::fs::read(image.blob_file(config))?)?;
    let diffs = config["rootfs"]["diff_ids"].as_array().context("no diff IDs")?;
    let mut chains: Vec<String> = Vec::new();
    for diff in diffs.iter().filter_map(Value::as_str) {
        chains.push(match chains.last() {
            None => diff.to_owned(),
            Some(below) => sha256(format!("{below} {diff}").as_bytes()),
        });
    }
    Ok(chains)
}

/// Compares a layer with the directory that it was unpacked into.
fn compare(layer: &Path, unpacked: &Path) -> Result<()> {
    let mut archive = tar::Archive::new(GzDecoder::new(BufReader::new(File::open(layer)?)));
    let mut expected = BTreeSet::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        let file = unpacked.join(entry.path()?).components().collect::<PathBuf>();
        let same = match entry.link_name()? {
            Some(target) => std::fs::read_link(&file).ok().as_deref() == Some(&target),
            None if entry.header().entry_type().is_dir() => file.is_dir(),
            None => same_bytes(&mut entry, &file)?,
        };
        ensure!(same, "{} differs", file.display());
        expected.insert(file);
    }
    let mut directories = vec![unpacked.to_owned()];
    while let Some(directory) = directories.pop() {
        for found in std::fs::read_dir(directory)? {
            let found = found?;
            ensure!(expected.contains(&found.path()), "{} is not in the layer", found.path().display());
            directories.extend(found.file_type()?.is_dir().then(|| found.path()));
        }
    }
    Ok(())
}

fn same_bytes(expected: &mut impl Read, file: &Path) -> Result<bool> {
    let Ok(mut file) = File::open(file) else { return Ok(false) };
    let (mut ours, mut theirs) = (vec![0; 256 * 1024], vec![0; 256 * 1024]);
    loop {
        let length = expected.read(&mut ours)?;
        if length == 0 {
            return Ok(file.read(&mut theirs)? == 0);
        }
        if file.read_exact(&mut theirs[..length]).is_err() || ours[..length] != theirs[..length] {
            return Ok(false);
        }
    }
}

impl Containerd {
    /// Compares each unpacked layer of the image with the layer, file by file, and returns their number.
    pub async fn check_unpacked(&self, image: &Image) -> Result<usize> {
        let manifest: Value = serde_json::from_slice(&std::fs::read(image.blob_file(image.digest()))?)?;
        let (snapshots, chains) = (self.snapshots().await?, chains(image)?);
        let unpacked: Vec<_> = chains.iter().take_while(|name| snapshots.contains_key(*name)).collect();
        for (index, name) in unpacked.iter().enumerate() {
            let digest = manifest["layers"][index]["digest"].as_str().context("too few layers")?;
            let (layer, files) = (image.blob_file(digest), self.files_of(name).await?);
            let compared = tokio::task::spawn_blocking(move || compare(&layer, &files)).await?;
            compared.with_context(|| format!("layer {index} is not what is unpacked of it"))?;
        }
        Ok(unpacked.len())
    }

    /// Uses the image as a container does: a writable snapshot on its layers.
    pub async fn hold_image(&self, image: &Image) -> Result<()> {
        let parent = chains(image)?.pop().context("no layers")?;
        let prepare = PrepareSnapshotRequest {
            snapshotter: "overlayfs".to_owned(),
            key: format!("prepull-e2e-container-{}", &image.digest()[7..19]),
            parent,
            labels: [("containerd.io/gc.root".to_owned(), "container".to_owned())].into(),
        };
        SnapshotsClient::new(self.channel().await?).prepare(in_namespace(prepare)?).await?;
        Ok(())
    }

    /// The directory of an unpacked layer.
    async fn files_of(&self, snapshot: &str) -> Result<PathBuf> {
        let mut snapshots = SnapshotsClient::new(self.channel().await?);
        let (snapshotter, key) = ("overlayfs".to_owned(), LOOK.to_owned());
        let view = ViewSnapshotRequest {
            snapshotter: snapshotter.clone(),
            key: key.clone(),
            parent: snapshot.to_owned(),
            // Without it, garbage collection would remove the view immediately.
            labels: [("containerd.io/gc.root".to_owned(), "look".to_owned())].into(),
        };
        let mounts = snapshots.view(in_namespace(view)?).await?.into_inner().mounts;
        snapshots.remove(in_namespace(RemoveSnapshotRequest { snapshotter, key })?).await?;
        let mount = mounts.first().context("a view without a mount")?;
        let lower = mount.options.iter().find_map(|option| option.strip_prefix("lowerdir="));
        let top = lower.and_then(|lower| lower.split(':').next()).unwrap_or(&mount.source);
        Ok(Path::new(top).to_owned())
    }
}

pub(super) fn in_namespace<T>(message: T) -> Result<Request<T>> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("containerd-namespace", NAMESPACE.parse()?);
    Ok(request)
}
