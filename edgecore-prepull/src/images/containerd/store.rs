//! Read access to containerd's content store and image store.
//!
//! Most errors become `None`: they only describe a pull, and a missing description must not fail a pull.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use containerd_client::services::v1::content_client::ContentClient;
use containerd_client::services::v1::images_client::ImagesClient;
use containerd_client::services::v1::snapshots::snapshots_client::SnapshotsClient;
use containerd_client::services::v1::snapshots::{Kind as SnapshotKind, StatSnapshotRequest};
use containerd_client::services::v1::{
    GetImageRequest, Info, InfoRequest, ListContentRequest, ListStatusesRequest, ReadContentRequest,
};
use prepull_api::task::ByteProgress;
use prepull_registry::manifest::{Descriptor, Index, Manifest};
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::labels::{CONFIG_LABEL, REBUILT_LABEL, SNAPSHOT_LABEL};
use super::namespace::{LIST_PATIENCE, MAX_MESSAGE, list_images, namespaced, unless_missing};
use super::source::fetched_from;
use super::unpack::UNCOMPRESSED_LABEL;
use super::writer::PEER_REF;
use super::{to_size, to_wire_size};

/// Largest manifest to read: the OCI distribution specification asks registries to accept manifests up to this size.
const MAX_MANIFEST: usize = 4 * 1024 * 1024;
/// Longest wait for the description of an image that's already there.
const DESCRIBE_TIMEOUT: Duration = Duration::from_secs(5);

/// A blob that is being written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ingest {
    /// Bytes written so far.
    pub(crate) offset: u64,
    /// Time of the last write. `None` if containerd doesn't report it.
    pub(crate) last_write: Option<SystemTime>,
}

/// A complete blob.
#[derive(Debug)]
pub(crate) struct FoundBlob {
    pub(crate) size: u64,
    /// The repository that the agent has fetched it from. `None`: the runtime has fetched it.
    pub(crate) fetched_from: Option<String>,
}

/// Reader of containerd's content and image services.
#[derive(Debug)]
pub(crate) struct ContentStore {
    content: ContentClient<Channel>,
    images: ImagesClient<Channel>,
    snapshots: SnapshotsClient<Channel>,
    /// Set once the runtime has answered that it doesn't have these services.
    unsupported: AtomicBool,
}

impl ContentStore {
    pub(crate) fn new(channel: Channel) -> Self {
        Self {
            content: ContentClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE),
            images: ImagesClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE),
            snapshots: SnapshotsClient::new(channel),
            unsupported: AtomicBool::new(false),
        }
    }

    /// Whether the runtime has answered that it doesn't have these services, as CRI-O does.
    pub(crate) fn is_unsupported(&self) -> bool {
        self.unsupported.load(Ordering::Relaxed)
    }

    fn answer_or_none<T>(&self, answer: Result<T, Status>) -> Option<T> {
        match answer {
            Ok(answer) => Some(answer),
            Err(status) => {
                if status.code() == Code::Unimplemented {
                    self.unsupported.store(true, Ordering::Relaxed);
                }
                None
            }
        }
    }

    /// Looks up the digest that the image store has under a name.
    pub(crate) async fn image_digest(&self, name: &str) -> Option<String> {
        if self.is_unsupported() {
            return None;
        }
        let request = namespaced(GetImageRequest { name: name.to_owned() });
        let mut images = self.images.clone();
        let answer = timeout(DESCRIBE_TIMEOUT, images.get(request)).await.ok()?;
        Some(self.answer_or_none(answer)?.into_inner().image?.target?.digest)
    }

    /// Adds up the compressed layers of a pulled image.
    pub(crate) async fn image_size(&self, digest: &str) -> Option<ByteProgress> {
        let layers = timeout(DESCRIBE_TIMEOUT, self.layers(digest)).await.ok().flatten()?;
        let total = layers.iter().map(|layer| layer.size).sum();
        Some(ByteProgress { done: total, total })
    }

    /// Lists the layers below a manifest or an index, each once. `None` while the manifest is not in the store.
    pub(crate) async fn layers(&self, digest: &str) -> Option<Vec<Descriptor>> {
        let text = self.read(digest).await?;
        let manifest = match Index::parse(&text).ok()?.manifests {
            none if none.is_empty() => Manifest::parse(&text).ok()?,
            manifests => {
                // Only the manifest for this platform was fetched, so it's the one in the store.
                let mut found = None;
                for manifest in manifests {
                    let text = self.read(&manifest.digest).await;
                    found = text.and_then(|text| Manifest::parse(&text).ok());
                    if found.is_some() {
                        break;
                    }
                }
                found?
            }
        };
        let layers = manifest.distinct_layers();
        (!layers.is_empty()).then_some(layers)
    }

    /// Lists the blobs that are being written, by digest. Includes leftovers of abandoned pulls, and not what neighbours have
    /// sent.
    pub(crate) async fn ingests(&self) -> Option<HashMap<String, Ingest>> {
        let ingests = self.all_ingests().await?;
        Some(
            ingests
                .filter(|(kind, ..)| kind != PEER_REF)
                .map(|(_, digest, ingest)| (digest, ingest))
                .collect(),
        )
    }

    /// Bytes of the blobs that are being written, by digest: of the larger part where neighbours have sent one as well.
    pub(crate) async fn begun_bytes(&self, with_neighbours: bool) -> HashMap<String, u64> {
        let ingests = self.all_ingests().await.into_iter().flatten();
        larger_parts(ingests.map(|(kind, digest, ingest)| (kind, digest, ingest.offset)), with_neighbours)
    }

    /// The kind, the digest and the state of each blob that is being written.
    async fn all_ingests(&self) -> Option<impl Iterator<Item = (String, String, Ingest)>> {
        let request = namespaced(ListStatusesRequest { filters: Vec::new() });
        let statuses =
            self.answer_or_none(self.content.clone().list_statuses(request).await)?.into_inner().statuses;
        Some(statuses.into_iter().filter_map(|status| {
            let last_write = to_time(status.updated_at.map(|time| (time.seconds, time.nanos)));
            let (kind, digest) = split_ref(&status.r#ref)?;
            Some((kind, digest, Ingest { offset: to_size(status.offset), last_write }))
        }))
    }

    /// Asks what is known of a complete blob. Without one the answer is [`Code::NotFound`].
    async fn ask_info(&self, digest: &str) -> Result<Option<Info>, Status> {
        let request = namespaced(InfoRequest { digest: digest.to_owned() });
        Ok(self.content.clone().info(request).await?.into_inner().info)
    }

    async fn info(&self, digest: &str) -> Option<Info> {
        self.answer_or_none(self.ask_info(digest).await)?
    }

    /// Whether the store has the complete blob.
    pub(crate) async fn has_blob(&self, digest: &str) -> bool {
        self.answer_or_none(self.ask_info(digest).await).is_some()
    }

    /// The same, or the error of a runtime that doesn't answer.
    pub(crate) async fn find_blob(&self, digest: &str) -> Result<bool, Status> {
        Ok(unless_missing(self.ask_info(digest).await)?.is_some())
    }

    /// Finds the manifest among these blobs. If there are several, takes the newest: a tag may have moved since an
    /// earlier attempt. `Some(None)` if there is none, and `None` without an answer.
    pub(crate) async fn find_manifest(&self, digests: &[String]) -> Option<Option<String>> {
        if digests.is_empty() {
            return Some(None);
        }
        let filter = |digest: &String| format!("digest=={digest},labels.\"{CONFIG_LABEL}\"");
        let filters = digests.iter().map(filter).collect();
        let answer = self.content.clone().list(namespaced(ListContentRequest { filters })).await;
        let mut parts = self.answer_or_none(answer)?.into_inner();
        let mut newest: Option<(Option<SystemTime>, String)> = None;
        while let Some(part) = self.answer_or_none(parts.message().await)? {
            let found = part.info.into_iter();
            let found =
                found.map(|info| (to_time(info.created_at.map(|at| (at.seconds, at.nanos))), info.digest));
            newest = found.chain(newest).max();
        }
        Some(newest.map(|(_, digest)| digest))
    }

    /// Reads a manifest, an index or a configuration. `None` if it isn't in the store, or too large.
    pub(crate) async fn read(&self, digest: &str) -> Option<Vec<u8>> {
        let read = ReadContentRequest { digest: digest.to_owned(), offset: 0, size: 0 };
        let length = self.info(digest).await?.size;
        if to_size(length) > MAX_MANIFEST as u64 {
            return None;
        }
        let mut parts = self.answer_or_none(self.content.clone().read(namespaced(read)).await)?.into_inner();
        let mut text = Vec::new();
        while let Some(part) = self.answer_or_none(parts.message().await)? {
            text.extend(part.data);
        }
        Some(text)
    }

    /// The names of all images.
    pub(crate) async fn image_names(&self) -> Result<Vec<String>, Status> {
        let images = list_images(&self.images, Vec::new(), LIST_PATIENCE).await?;
        Ok(images.into_iter().map(|image| image.name).collect())
    }

    /// Whether an image here has layers that were rebuilt from deltas, and have no blobs.
    pub(crate) async fn has_rebuilt(&self) -> bool {
        let filters = vec![format!("labels.\"{REBUILT_LABEL}\"")];
        let answer = self.content.clone().list(namespaced(ListContentRequest { filters })).await;
        let Some(answer) = self.answer_or_none(answer) else { return false };
        let first = answer.into_inner().message().await;
        self.answer_or_none(first).flatten().is_some_and(|first| !first.info.is_empty())
    }

    /// The snapshot of the highest layer of an image, by the digest of its configuration. `None` if the image isn't here,
    /// or was never unpacked.
    pub(crate) async fn snapshot_of(
        &self,
        config: &str,
        snapshotter: &str,
    ) -> Result<Option<String>, Status> {
        let info = unless_missing(self.ask_info(config).await)?.flatten();
        Ok(info.and_then(|mut info| info.labels.remove(&format!("{SNAPSHOT_LABEL}{snapshotter}"))))
    }

    /// Finds a complete blob.
    pub(crate) async fn look_up_blob(&self, digest: &str) -> Option<FoundBlob> {
        let info = self.info(digest).await?;
        Some(FoundBlob { size: to_size(info.size), fetched_from: fetched_from(info.labels) })
    }

    /// Reads `size` bytes of a blob, from an offset.
    pub(crate) async fn read_piece(&self, digest: &str, offset: u64, size: u64) -> Option<Vec<u8>> {
        let (offset, size) = (to_wire_size(offset), to_wire_size(size));
        let read = ReadContentRequest { digest: digest.to_owned(), offset, size };
        let mut parts = self.answer_or_none(self.content.clone().read(namespaced(read)).await)?.into_inner();
        let mut piece = Vec::new();
        while let Some(part) = self.answer_or_none(parts.message().await)? {
            piece.extend(part.data);
        }
        Some(piece)
    }

    /// Whether a layer has been unpacked, on top of any layers.
    pub(crate) async fn was_unpacked(&self, digest: &str) -> bool {
        self.info(digest).await.is_some_and(|info| info.labels.contains_key(UNCOMPRESSED_LABEL))
    }

    /// Whether a layer and all layers below it are unpacked. The chain id is derived from all their digests.
    pub(crate) async fn is_unpacked(&self, snapshotter: &str, chain: &str) -> bool {
        self.answer_or_none(self.find_unpacked(snapshotter, chain).await).unwrap_or_default()
    }

    /// The same, or the error of a runtime that doesn't answer.
    pub(crate) async fn find_unpacked(&self, snapshotter: &str, chain: &str) -> Result<bool, Status> {
        let request = StatSnapshotRequest { snapshotter: snapshotter.to_owned(), key: chain.to_owned() };
        let answer = unless_missing(self.snapshots.clone().stat(namespaced(request)).await)?;
        let kind = answer.and_then(|answer| Some(answer.into_inner().info?.kind));
        Ok(kind == Some(SnapshotKind::Committed.into()))
    }
}

/// Splits the ref of an ingest, such as `layer-sha256:…`, into its kind and the digest.
fn split_ref(name: &str) -> Option<(String, String)> {
    let (kind, digest) = name.split_once('-')?;
    digest.contains(':').then(|| (kind.to_owned(), digest.to_owned()))
}

fn larger_parts(
    parts: impl Iterator<Item = (String, String, u64)>,
    with_neighbours: bool,
) -> HashMap<String, u64> {
    let mut larger = HashMap::new();
    for (_, digest, bytes) in parts.filter(|(kind, ..)| with_neighbours || kind != PEER_REF) {
        let known = larger.entry(digest).or_default();
        *known = bytes.max(*known);
    }
    larger
}

fn to_time(since_1970: Option<(i64, i32)>) -> Option<SystemTime> {
    let (seconds, nanos) = since_1970?;
    // containerd 1.6 leaves the update time of a blob at the year 1: treat that as unknown.
    Some(UNIX_EPOCH + Duration::new(u64::try_from(seconds).ok()?, u32::try_from(nanos).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ref_contains_the_digest() {
        let split = |name| split_ref(name).map(|(kind, digest)| format!("{kind} {digest}"));
        assert_eq!(split("layer-sha256:aa").as_deref(), Some("layer sha256:aa"));
        assert_eq!(split("upload"), None);
    }

    #[test]
    fn what_neighbours_have_sent_counts_where_it_is_used() {
        let parts = [("layer", "sha256:a", 3), ("peer", "sha256:a", 7), ("peer", "sha256:b", 5)];
        for (with_neighbours, expected) in
            [(false, &[("sha256:a", 3)][..]), (true, &[("sha256:a", 7), ("sha256:b", 5)])]
        {
            let parts =
                parts.iter().map(|(kind, digest, bytes)| ((*kind).to_owned(), (*digest).to_owned(), *bytes));
            let expected = expected.iter().map(|(digest, bytes)| ((*digest).to_owned(), *bytes)).collect();
            assert_eq!(larger_parts(parts, with_neighbours), expected);
        }
    }
}
