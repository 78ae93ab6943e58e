//! Unpacking a layer with containerd's own Snapshots and Diff services, as its client does.
//!
//! ```text
//!  Prepare (key, parent) ─▶ mounts ─▶ Apply (layer, mounts) ─▶ digest ─▶ flushed to the disk ─▶ Commit (chain)
//! ```
//!
//! containerd mounts and unpacks, so we do neither here. A committed snapshot counts as present, and containerd flushes
//! that record immediately. So the files must be on disk before the commit: a power cut in between would leave a
//! snapshot with empty files, which no later pull would replace.

use std::collections::HashMap;
use std::mem;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use containerd_client::services::v1::content_client::ContentClient;
use containerd_client::services::v1::diff_client::DiffClient;
use containerd_client::services::v1::snapshots::snapshots_client::SnapshotsClient;
use containerd_client::services::v1::snapshots::{
    CommitSnapshotRequest, PrepareSnapshotRequest, RemoveSnapshotRequest, ViewSnapshotRequest,
};
use containerd_client::services::v1::{ApplyRequest, Info, UpdateRequest};
use containerd_client::types::Mount;
use prepull_registry::manifest::Descriptor;
use prost_types::FieldMask;
use ring::rand::{SecureRandom, SystemRandom};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::namespace::{answer_within, leased, namespaced};
use super::to_wire;

/// Prefix of the names of snapshots that are being unpacked.
const EXTRACTION: &str = "extract-";
/// Label of a snapshot with its own name, which containerd's client sets.
const SNAPSHOT_LABEL: &str = "containerd.io/snapshot.ref";
/// Prefix of the annotations of a layer that become labels of its snapshot.
const INHERITED: &str = "containerd.io/snapshot/";
/// Label of a layer with the digest of its uncompressed content, which containerd's client sets.
pub(super) const UNCOMPRESSED_LABEL: &str = "containerd.io/uncompressed";
/// Longest wait for a write into containerd's database.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longest wait for a layer to be unpacked: some GiB on a slow SD card.
const APPLY_PATIENCE: Duration = Duration::from_secs(1800);

/// A layer, its snapshot, and the lease of both.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unpack<'a> {
    pub(crate) snapshotter: &'a str,
    /// The layer, which must be in the content store.
    pub(crate) layer: &'a Descriptor,
    /// Name of the snapshot below. `None` for the lowest layer.
    pub(crate) parent: Option<&'a str>,
    /// Digest of its uncompressed content.
    pub(crate) diff_id: &'a str,
    /// Name of its snapshot.
    pub(crate) chain_id: &'a str,
    /// The lease that keeps it.
    pub(crate) lease: &'a MetadataValue<Ascii>,
}

/// A read-only view of the files of a snapshot. It makes the snapshot count as used, so it's closed when this is dropped: the
/// lease would keep it until the next attempt, or for a day.
#[derive(Debug)]
pub(crate) struct OpenView {
    unpacker: Unpacker,
    snapshotter: String,
    key: String,
    lease: MetadataValue<Ascii>,
}

impl OpenView {
    /// Closes it, and waits until it's closed.
    pub(crate) async fn close(mut self) {
        if let Some(closing) = self.begin_closing() {
            let _ = closing.await;
        }
    }

    /// Has it closed, unless it is. If that fails, it goes with the lease.
    fn begin_closing(&mut self) -> Option<JoinHandle<()>> {
        let key = Some(mem::take(&mut self.key)).filter(|key| !key.is_empty())?;
        let (unpacker, snapshotter, lease) =
            (self.unpacker.clone(), self.snapshotter.clone(), self.lease.clone());
        // Without a runtime, the program ends.
        let runtime = Handle::try_current().ok()?;
        Some(runtime.spawn(async move {
            let _ = unpacker.remove_snapshot(&snapshotter, &key, &lease).await;
        }))
    }
}

impl Drop for OpenView {
    fn drop(&mut self) {
        self.begin_closing();
    }
}

/// Unpacks layers through containerd.
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

    /// Unpacks a layer on top of its parent, and adds it to the lease. `flush` is called if containerd doesn't flush by
    /// itself: the layer is committed only after its files are on disk. It's no error if another process was faster.
    pub(crate) async fn unpack(
        &self,
        unpack: Unpack<'_>,
        flush: impl Future<Output = Result<(), Status>>,
    ) -> Result<(), Status> {
        let key = extraction_key(unpack.chain_id);
        let Some(mounts) = self.prepare(unpack, &key).await? else { return Ok(()) };
        let unpacked = self.apply_and_commit(unpack, &key, mounts, flush).await;
        if unpacked.is_err() {
            let _ = self.remove_snapshot(unpack.snapshotter, &key, unpack.lease).await;
        }
        unpacked
    }

    /// Mounts to unpack into. `None` if the snapshot already exists.
    async fn prepare(&self, unpack: Unpack<'_>, key: &str) -> Result<Option<Vec<Mount>>, Status> {
        let request = PrepareSnapshotRequest {
            snapshotter: unpack.snapshotter.to_owned(),
            key: key.to_owned(),
            parent: unpack.parent.unwrap_or_default().to_owned(),
            labels: snapshot_labels(unpack),
        };
        match answer_within(PATIENCE, self.snapshots.clone().prepare(leased(request, unpack.lease))).await {
            Ok(answer) => Ok(Some(answer.mounts)),
            // This is about the snapshot of the chain, because the key is new.
            Err(status) if status.code() == Code::AlreadyExists => Ok(None),
            Err(status) => Err(status),
        }
    }

    async fn apply_and_commit(
        &self,
        unpack: Unpack<'_>,
        key: &str,
        mounts: Vec<Mount>,
        flush: impl Future<Output = Result<(), Status>>,
    ) -> Result<(), Status> {
        let diff = Some(to_wire(unpack.layer));
        // Releases before 2.0 ignore `sync_fs`.
        let request = ApplyRequest { diff, mounts, sync_fs: true, ..ApplyRequest::default() };
        let answer =
            answer_within(APPLY_PATIENCE, self.diff.clone().apply(leased(request, unpack.lease))).await?;
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
            labels: snapshot_labels(unpack),
        };
        match answer_within(PATIENCE, self.snapshots.clone().commit(leased(request, unpack.lease))).await {
            Err(status) if status.code() == Code::AlreadyExists => {
                self.remove_snapshot(unpack.snapshotter, key, unpack.lease).await?;
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

    /// Opens the files of a snapshot for reading, as a part of the lease. Returns the view, and the directories of the layers,
    /// the highest first. Our lease removes the view of a process that was killed.
    ///
    /// # Errors
    /// The snapshotter keeps its files elsewhere than in directories.
    pub(crate) async fn open_view(
        &self,
        snapshotter: &str,
        chain_id: &str,
        lease: &MetadataValue<Ascii>,
    ) -> Result<(OpenView, Vec<PathBuf>), Status> {
        let key = extraction_key(chain_id);
        let request = ViewSnapshotRequest {
            snapshotter: snapshotter.to_owned(),
            key: key.clone(),
            parent: chain_id.to_owned(),
            labels: HashMap::new(),
        };
        let answer = answer_within(PATIENCE, self.snapshots.clone().view(leased(request, lease))).await?;
        let (unpacker, snapshotter, lease) = (self.clone(), snapshotter.to_owned(), lease.clone());
        let view = OpenView { unpacker, snapshotter, key, lease };
        let none = || {
            let snapshotter = &view.snapshotter;
            let message =
                format!("snapshotter {snapshotter} has no directories with the files of its images");
            Status::unimplemented(message)
        };
        let directories = layer_directories(&answer.mounts).ok_or_else(none)?;
        Ok((view, directories))
    }

    /// Removes a half unpacked snapshot, or a view, also from the lease.
    pub(crate) async fn remove_snapshot(
        &self,
        snapshotter: &str,
        key: &str,
        lease: &MetadataValue<Ascii>,
    ) -> Result<(), Status> {
        let request = RemoveSnapshotRequest { snapshotter: snapshotter.to_owned(), key: key.to_owned() };
        answer_within(PATIENCE, self.snapshots.clone().remove(leased(request, lease))).await.map(drop)
    }
}

/// A name for a layer during its unpacking, in the style of containerd's client. Another process may unpack the same
/// chain: with a common name, each would remove or commit the other's unfinished snapshot. The lease removes the
/// snapshot of a killed process.
fn extraction_key(chain_id: &str) -> String {
    let mut random = [0; 4];
    // Without random bytes from the system, we rely on the time.
    let _ = SystemRandom::new().fill(&mut random);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{EXTRACTION}{}-{:08x} {chain_id}", now.subsec_nanos(), u32::from_le_bytes(random))
}

/// The directories of a read-only mount, the highest first: overlay's lower ones, or the only one, which is bound.
fn layer_directories(mounts: &[Mount]) -> Option<Vec<PathBuf>> {
    let [mount] = mounts else { return None };
    match mount.r#type.as_str() {
        "bind" => Some(vec![PathBuf::from(&mount.source)]),
        "overlay" => {
            let lower = mount.options.iter().find_map(|option| option.strip_prefix("lowerdir="))?;
            Some(lower.split(':').map(PathBuf::from).collect())
        }
        _ => None,
    }
}

/// Whether this is the name of a snapshot that's being unpacked.
pub(super) fn is_extraction(name: &str) -> bool {
    name.starts_with(EXTRACTION)
}

/// The labels that containerd's client sets on a snapshot.
fn snapshot_labels(unpack: Unpack<'_>) -> HashMap<String, String> {
    let inherited = unpack.layer.annotations.iter().filter(|(name, _)| name.starts_with(INHERITED));
    let inherited = inherited.map(|(name, value)| (name.clone(), value.clone()));
    inherited.chain([(SNAPSHOT_LABEL.to_owned(), unpack.chain_id.to_owned())]).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use tokio::sync::mpsc;

    use super::*;
    use crate::images::runtime::RuntimeEndpoint;
    use crate::images::runtime::fake::{FakeAnswers, serve};

    /// A service that answers every call with this message, and reports its method.
    #[derive(Clone)]
    struct FakeSnapshots(&'static [u8], mpsc::UnboundedSender<String>);

    impl FakeAnswers for FakeSnapshots {
        const SERVICE: &'static str = "containerd.services.snapshots.v1.Snapshots";

        fn answer(&self, method: &str) -> Result<Vec<u8>, Status> {
            self.1.send(method.to_owned()).unwrap();
            Ok(self.0.to_vec())
        }
    }

    #[tokio::test]
    async fn a_dropped_view_is_closed() {
        // Field 1 of ViewSnapshotResponse is a mount; the first has `bind` as its type, which is its field 1.
        for (answer, has_directories) in [(&[10, 6, 10, 4, b'b', b'i', b'n', b'd'][..], true), (&[], false)] {
            let dir = tempfile::tempdir().unwrap();
            let socket = dir.path().join("containerd.sock");
            let (calls, mut called) = mpsc::unbounded_channel();
            let _server = serve(&socket, FakeSnapshots(answer, calls));
            let endpoint: RuntimeEndpoint = format!("unix://{}", socket.display()).parse().unwrap();
            let unpacker = Unpacker::new(endpoint.connect_lazily());
            let lease = MetadataValue::from_static("lease");
            let opened = unpacker.open_view("overlayfs", "sha256:c", &lease).await;
            assert_eq!((opened.is_ok(), called.recv().await.unwrap().as_str()), (has_directories, "View"));
            drop(opened);
            let closed = tokio::time::timeout(Duration::from_secs(10), called.recv()).await;
            assert_eq!(closed.unwrap().as_deref(), Some("Remove"));
        }
    }

    #[test]
    fn a_view_lists_its_directories() {
        let mount = |kind: &str, source: &str, options: &[&str]| Mount {
            r#type: kind.to_owned(),
            source: source.to_owned(),
            options: options.iter().map(|option| (*option).to_owned()).collect(),
            ..Mount::default()
        };
        let paths = |paths: &[&str]| Some(paths.iter().map(PathBuf::from).collect::<Vec<_>>());
        for (mounts, expected) in [
            (
                vec![mount("overlay", "overlay", &["index=off", "lowerdir=/b/fs:/a/fs"])],
                paths(&["/b/fs", "/a/fs"]),
            ),
            (vec![mount("bind", "/a/fs", &["ro", "rbind"])], paths(&["/a/fs"])),
            (vec![mount("ext4", "/dev/mapper/x", &[])], None),
            (vec![], None),
        ] {
            assert_eq!(layer_directories(&mounts), expected, "{mounts:?}");
        }
    }
}
