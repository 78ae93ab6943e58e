//! Unpacking a layer with containerd's own Snapshots and Diff services, as its client does.
//!
//! ```text
//!  Prepare (key, parent) ─▶ mounts ─▶ Apply (layer, mounts) ─▶ digest ─▶ flushed to the disk ─▶ Commit (chain)
//! ```
//!
//! containerd mounts and unpacks; nothing of it is done here. What is committed counts as present from then on, and
//! containerd flushes that record at once. So the files must be on the disk before: a power cut in between leaves a
//! snapshot with empty files, which no later pull would replace.

use std::collections::HashMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use containerd_client::services::v1::content_client::ContentClient;
use containerd_client::services::v1::diff_client::DiffClient;
use containerd_client::services::v1::snapshots::snapshots_client::SnapshotsClient;
use containerd_client::services::v1::snapshots::{
    CommitSnapshotRequest, PrepareSnapshotRequest, RemoveSnapshotRequest,
};
use containerd_client::services::v1::{ApplyRequest, Info, UpdateRequest};
use containerd_client::types::Mount;
use prepull_registry::manifest::Descriptor;
use prost_types::FieldMask;
use ring::rand::{SecureRandom, SystemRandom};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::leases::leased;
use super::namespace::{answer_within, namespaced};
use super::to_wire;

/// Names of snapshots that are being unpacked begin like this.
const EXTRACTION: &str = "extract-";
/// Label of a snapshot with its own name, which containerd's client sets.
const SNAPSHOT_LABEL: &str = "containerd.io/snapshot.ref";
/// Annotations of a layer that become labels of its snapshot begin like this.
const INHERITED: &str = "containerd.io/snapshot/";
/// Label of a layer with the digest of what it unpacks to, which containerd's client sets.
pub(super) const UNCOMPRESSED_LABEL: &str = "containerd.io/uncompressed";
/// Longest wait for a write into containerd's database.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longest wait for a layer to be unpacked: some GiB on a slow SD card.
const APPLY_PATIENCE: Duration = Duration::from_secs(1800);

/// A layer, and what it becomes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unpack<'a> {
    pub(crate) snapshotter: &'a str,
    /// The layer, which is in the content store.
    pub(crate) layer: &'a Descriptor,
    /// Name of the snapshot below, if there is one.
    pub(crate) parent: Option<&'a str>,
    /// Digest of what it unpacks to.
    pub(crate) diff_id: &'a str,
    /// Name of its snapshot.
    pub(crate) chain_id: &'a str,
}

/// Has containerd unpack layers.
#[derive(Clone, Debug)]
pub(crate) struct Unpacker {
    snapshots: SnapshotsClient<Channel>,
    diff: DiffClient<Channel>,
    content: ContentClient<Channel>,
}

impl Unpacker {
    pub(crate) fn new(channel: Channel) -> Self {
        Self {
            snapshots: SnapshotsClient::new(channel.clone()),
            diff: DiffClient::new(channel.clone()),
            content: ContentClient::new(channel),
        }
    }

    /// Unpacks a layer on top of its parent, and keeps it by the lease. `flush` is what containerd leaves to us: it brings
    /// what was unpacked to the disk, or the layer isn't committed. That another process was faster is no error.
    pub(crate) async fn unpack(
        &self,
        unpack: Unpack<'_>,
        lease: &MetadataValue<Ascii>,
        flush: impl Future<Output = Result<(), Status>>,
    ) -> Result<(), Status> {
        let key = extraction_key(unpack.chain_id);
        let Some(mounts) = self.prepare(unpack, &key, lease).await? else { return Ok(()) };
        let unpacked = self.apply_and_commit(unpack, &key, mounts, lease, flush).await;
        if unpacked.is_err() {
            let _ = self.remove(unpack.snapshotter, &key, lease).await;
        }
        unpacked
    }

    /// Mounts to unpack into. `None` if the snapshot is there.
    async fn prepare(
        &self,
        unpack: Unpack<'_>,
        key: &str,
        lease: &MetadataValue<Ascii>,
    ) -> Result<Option<Vec<Mount>>, Status> {
        let request = PrepareSnapshotRequest {
            snapshotter: unpack.snapshotter.to_owned(),
            key: key.to_owned(),
            parent: unpack.parent.unwrap_or_default().to_owned(),
            labels: labels(unpack),
        };
        match answer_within(PATIENCE, self.snapshots.clone().prepare(leased(request, lease))).await {
            Ok(answer) => Ok(Some(answer.mounts)),
            // Of the snapshot of the chain: the key is new.
            Err(status) if status.code() == Code::AlreadyExists => Ok(None),
            Err(status) => Err(status),
        }
    }

    async fn apply_and_commit(
        &self,
        unpack: Unpack<'_>,
        key: &str,
        mounts: Vec<Mount>,
        lease: &MetadataValue<Ascii>,
        flush: impl Future<Output = Result<(), Status>>,
    ) -> Result<(), Status> {
        let diff = Some(to_wire(unpack.layer));
        // Releases before 2.0 don't know `sync_fs`, and pass over it.
        let request = ApplyRequest { diff, mounts, sync_fs: true, ..ApplyRequest::default() };
        let answer = answer_within(APPLY_PATIENCE, self.diff.clone().apply(leased(request, lease))).await?;
        let digest = answer.applied.map(|applied| applied.digest).unwrap_or_default();
        if digest != unpack.diff_id {
            let Unpack { layer, diff_id, .. } = unpack;
            return Err(Status::data_loss(format!(
                "layer {} unpacks to {digest}, and its image says {diff_id}",
                layer.digest
            )));
        }
        flush.await?;
        let request = CommitSnapshotRequest {
            snapshotter: unpack.snapshotter.to_owned(),
            name: unpack.chain_id.to_owned(),
            key: key.to_owned(),
            labels: labels(unpack),
        };
        match answer_within(PATIENCE, self.snapshots.clone().commit(leased(request, lease))).await {
            Err(status) if status.code() == Code::AlreadyExists => {
                self.remove(unpack.snapshotter, key, lease).await?;
            }
            committed => drop(committed?),
        }
        let labels = HashMap::from([(UNCOMPRESSED_LABEL.to_owned(), digest)]);
        let request = UpdateRequest {
            info: Some(Info { digest: unpack.layer.digest.clone(), labels, ..Info::default() }),
            update_mask: Some(FieldMask { paths: vec![format!("labels.{UNCOMPRESSED_LABEL}")] }),
        };
        answer_within(PATIENCE, self.content.clone().update(namespaced(request))).await.map(drop)
    }

    /// Removes what is half unpacked, and takes it from the lease.
    pub(crate) async fn remove(
        &self,
        snapshotter: &str,
        key: &str,
        lease: &MetadataValue<Ascii>,
    ) -> Result<(), Status> {
        let request = RemoveSnapshotRequest { snapshotter: snapshotter.to_owned(), key: key.to_owned() };
        answer_within(PATIENCE, self.snapshots.clone().remove(leased(request, lease))).await.map(drop)
    }
}

/// A name for a layer while it's unpacked, as containerd's client makes one. Another process may unpack the same chain: with
/// one name for both, each would remove or commit what the other is still filling. What a killed process leaves goes with
/// its lease.
fn extraction_key(chain_id: &str) -> String {
    let mut random = [0; 4];
    // Where the system has no random bytes, the time has to do.
    let _ = SystemRandom::new().fill(&mut random);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{EXTRACTION}{}-{:08x} {chain_id}", now.subsec_nanos(), u32::from_le_bytes(random))
}

/// Whether a snapshot has such a name.
pub(super) fn is_extraction(name: &str) -> bool {
    name.starts_with(EXTRACTION)
}

/// The labels that containerd's client gives to a snapshot.
fn labels(unpack: Unpack<'_>) -> HashMap<String, String> {
    let inherited = unpack.layer.annotations.iter().filter(|(name, _)| name.starts_with(INHERITED));
    let inherited = inherited.map(|(name, value)| (name.clone(), value.clone()));
    inherited.chain([(SNAPSHOT_LABEL.to_owned(), unpack.chain_id.to_owned())]).collect()
}
