//! The records, blobs and snapshots of containerd, and the references between them that its garbage collection follows.
//!
//! A record points to a manifest or an index. Labels lead from there to the blobs below, and from a configuration to
//! the snapshot of the highest layer, and its parents are the layers below. Content that no record, lease or container
//! leads to is removed.

use std::collections::{BTreeSet, HashMap};
use std::time::SystemTime;

use containerd_client::services::v1::content_client::ContentClient;
use containerd_client::services::v1::images_client::ImagesClient;
use containerd_client::services::v1::snapshots::snapshots_client::SnapshotsClient;
use containerd_client::services::v1::snapshots::{Kind as SnapshotKind, ListSnapshotsRequest, UsageRequest};
use containerd_client::services::v1::{Image, ListContentRequest};
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Response, Status};

use super::labels::SNAPSHOT_LABEL;
use super::namespace::{LIST_PATIENCE, MAX_MESSAGE, answer_within, list_images, namespaced};
use super::pins::{is_pinned, is_pinned_by_job};
use super::to_size;
use crate::clock::ClockReading;

/// Prefix of all labels that lead from one blob to another.
const BLOB_LABELS: &str = "containerd.io/gc.ref.content.";

/// The content of containerd at one moment.
#[derive(Debug, Default)]
pub(crate) struct Holdings {
    pub(crate) records: Vec<ImageRecord>,
    pub(crate) blobs: HashMap<String, StoredBlob>,
    pub(crate) snapshots: HashMap<String, Snapshot>,
}

/// A name of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ImageRecord {
    pub(crate) name: String,
    /// Digest of the manifest or index that it points to.
    pub(crate) target: String,
    pub(crate) is_pinned: bool,
    /// Whether a job of ours wants the pin.
    pub(crate) is_pinned_by_job: bool,
    /// Creation time of the name, by the clock of now. `None` if containerd doesn't report it.
    pub(crate) created: Option<SystemTime>,
}

/// A complete blob in the store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StoredBlob {
    pub(crate) size: u64,
    /// Digests of the blobs that it refers to.
    pub(crate) keeps: Vec<String>,
    /// Name of the snapshot that it refers to.
    pub(crate) snapshot: Option<String>,
}

/// A snapshot of the snapshotter in use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Snapshot {
    /// Name of the snapshot below; empty for the lowest one.
    pub(crate) parent: String,
    /// Whether it belongs to a container or is being unpacked, and isn't a layer of an image.
    pub(crate) is_active: bool,
}

impl Holdings {
    /// The blobs and snapshots that a manifest or index leads to, including itself.
    pub(crate) fn reachable_from(&self, target: &str) -> (BTreeSet<&str>, BTreeSet<&str>) {
        let (mut blobs, mut snapshots) = (BTreeSet::new(), BTreeSet::new());
        let mut open = vec![target];
        while let Some(digest) = open.pop() {
            // An index also lists manifests of other platforms, which aren't in the store.
            let Some((digest, blob)) = self.blobs.get_key_value(digest) else { continue };
            if blobs.insert(digest.as_str()) {
                open.extend(blob.keeps.iter().map(String::as_str));
                snapshots.extend(blob.snapshot.iter().flat_map(|top| self.chain(top)));
            }
        }
        (blobs, snapshots)
    }

    /// The committed snapshots below containers.
    pub(crate) fn used_snapshots(&self) -> BTreeSet<&str> {
        let active = self.snapshots.values().filter(|snapshot| snapshot.is_active);
        active.flat_map(|snapshot| self.chain(&snapshot.parent)).collect()
    }

    /// The direct parents of the snapshots of containers and of layers that are being unpacked.
    pub(crate) fn parents_of_active(&self) -> BTreeSet<&str> {
        let active = self.snapshots.values().filter(|snapshot| snapshot.is_active);
        active.map(|snapshot| snapshot.parent.as_str()).collect()
    }

    /// A snapshot and its ancestors.
    fn chain<'a>(&'a self, top: &str) -> impl Iterator<Item = &'a str> {
        let first = self.snapshots.get_key_value(top);
        std::iter::successors(first, |(_, snapshot)| self.snapshots.get_key_value(&snapshot.parent))
            .map(|(name, _)| name.as_str())
    }
}

/// Reader of the content of containerd.
#[derive(Clone, Debug)]
pub(crate) struct HoldingsReader {
    images: ImagesClient<Channel>,
    content: ContentClient<Channel>,
    snapshots: SnapshotsClient<Channel>,
    /// The clock at the start of the agent, which may have been set since.
    started: ClockReading,
}

impl ImageRecord {
    fn from_containerd(image: Image, started: ClockReading, now: ClockReading) -> Self {
        let created = image.created_at.and_then(|at| SystemTime::try_from(at).ok());
        Self {
            name: image.name,
            target: image.target.map(|target| target.digest).unwrap_or_default(),
            is_pinned: is_pinned(&image.labels),
            is_pinned_by_job: is_pinned_by_job(&image.labels),
            created: created.map(|created| started.correct_date(created, now)),
        }
    }
}

impl HoldingsReader {
    pub(crate) fn new(channel: Channel) -> Self {
        Self {
            images: ImagesClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE),
            content: ContentClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE),
            snapshots: SnapshotsClient::new(channel).max_decoding_message_size(MAX_MESSAGE),
            started: ClockReading::now(),
        }
    }

    /// Reads records, blobs, and the snapshots of this snapshotter.
    pub(crate) async fn read(&self, snapshotter: &str) -> Result<Holdings, Status> {
        let late = |_| Status::deadline_exceeded("containerd takes too long to list what it has");
        let (records, blobs, snapshots) = tokio::try_join!(
            self.records(),
            async { timeout(LIST_PATIENCE, self.blobs(snapshotter)).await.map_err(late)? },
            async { timeout(LIST_PATIENCE, self.snapshots(snapshotter)).await.map_err(late)? },
        )?;
        Ok(Holdings { records, blobs, snapshots })
    }

    /// Reads only the records, with which pins are known, and the ages of images.
    pub(crate) async fn read_records(&self) -> Result<Holdings, Status> {
        Ok(Holdings { records: self.records().await?, ..Holdings::default() })
    }

    async fn records(&self) -> Result<Vec<ImageRecord>, Status> {
        let images = list_images(&self.images, Vec::new(), LIST_PATIENCE).await?;
        let now = ClockReading::now();
        Ok(images.into_iter().map(|image| ImageRecord::from_containerd(image, self.started, now)).collect())
    }

    async fn blobs(&self, snapshotter: &str) -> Result<HashMap<String, StoredBlob>, Status> {
        let of_snapshot = format!("{SNAPSHOT_LABEL}{snapshotter}");
        let request = namespaced(ListContentRequest { filters: Vec::new() });
        let mut parts = self.content.clone().list(request).await.map(Response::into_inner)?;
        let mut blobs = HashMap::new();
        while let Some(part) = parts.message().await? {
            for mut info in part.info {
                let snapshot = info.labels.remove(&of_snapshot);
                let keeps = info.labels.into_iter().filter(|(label, _)| label.starts_with(BLOB_LABELS));
                let keeps = keeps.map(|(_, digest)| digest).collect();
                blobs.insert(info.digest, StoredBlob { size: to_size(info.size), keeps, snapshot });
            }
        }
        Ok(blobs)
    }

    async fn snapshots(&self, snapshotter: &str) -> Result<HashMap<String, Snapshot>, Status> {
        let request = ListSnapshotsRequest { snapshotter: snapshotter.to_owned(), filters: Vec::new() };
        let mut parts = self.snapshots.clone().list(namespaced(request)).await.map(Response::into_inner)?;
        let mut snapshots = HashMap::new();
        while let Some(part) = parts.message().await? {
            for info in part.info {
                let is_active = info.kind != i32::from(SnapshotKind::Committed);
                snapshots.insert(info.name, Snapshot { parent: info.parent, is_active });
            }
        }
        Ok(snapshots)
    }

    /// Bytes and inodes of an unpacked layer.
    pub(crate) async fn usage(&self, snapshotter: &str, name: &str) -> Result<(u64, u64), Status> {
        let request = UsageRequest { snapshotter: snapshotter.to_owned(), key: name.to_owned() };
        let usage = answer_within(LIST_PATIENCE, self.snapshots.clone().usage(namespaced(request))).await?;
        Ok((to_size(usage.size), to_size(usage.inodes)))
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;
    use crate::boot::BootTime;

    fn blob(keeps: &[&str], snapshot: Option<&str>) -> StoredBlob {
        let keeps = keeps.iter().map(|digest| (*digest).to_owned()).collect();
        StoredBlob { size: 1, keeps, snapshot: snapshot.map(str::to_owned) }
    }

    fn snapshot(parent: &str, is_active: bool) -> Snapshot {
        Snapshot { parent: parent.to_owned(), is_active }
    }

    #[test]
    fn a_set_clock_ages_no_image() {
        let seconds = Duration::from_secs;
        let at = |wall, millis| ClockReading { wall, boot: Some(BootTime { id: 1, millis }) };
        let (booted, today) = (UNIX_EPOCH + seconds(1_700_000_000), UNIX_EPOCH + seconds(1_800_000_000));
        let image = Image { created_at: Some((booted + seconds(30)).into()), ..Image::default() };
        let record = ImageRecord::from_containerd(image, at(booted, 60_000), at(today, 120_000));
        assert_eq!(record.created, Some(today - seconds(30)));
    }

    #[test]
    fn an_image_holds_content_behind_its_labels() {
        let blobs = [
            ("index", blob(&["manifest", "other-platform"], None)),
            ("manifest", blob(&["config", "layer"], None)),
            ("config", blob(&[], Some("top"))),
            ("layer", blob(&[], None)),
            ("stranger", blob(&["layer"], None)),
        ];
        let snapshots = [
            ("base", snapshot("", false)),
            ("top", snapshot("base", false)),
            ("side", snapshot("base", false)),
            ("container", snapshot("side", true)),
        ];
        let holdings = Holdings {
            records: Vec::new(),
            blobs: blobs.map(|(digest, blob)| (digest.to_owned(), blob)).into(),
            snapshots: snapshots.map(|(name, snapshot)| (name.to_owned(), snapshot)).into(),
        };
        let (blobs, snapshots) = holdings.reachable_from("index");
        assert_eq!(blobs, BTreeSet::from(["config", "index", "layer", "manifest"]));
        assert_eq!(snapshots, BTreeSet::from(["base", "top"]));
        assert_eq!(holdings.used_snapshots(), BTreeSet::from(["base", "side"]));
        assert_eq!(holdings.reachable_from("gone"), (BTreeSet::new(), BTreeSet::new()));
    }
}
