//! Read access to containerd's content store and image store.
//!
//! Every error is a `None`: what is read here describes a pull, and no pull may fail for want of a description.

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
use prepull_api::task::Bytes;
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::labels::{CHILD_LABEL, CONFIG_LABEL, LAYER_LABEL};
use super::manifest::{Document, Layer, deduplicate};
use super::namespace::namespaced;
use super::source::SOURCE_LABEL;
use super::unpack::UNCOMPRESSED_LABEL;
use super::writer::PEER_REF;
use super::{to_size, to_wire_size};

/// Largest manifest to read: the OCI distribution specification asks registries to accept manifests up to this size.
const MAX_MANIFEST: usize = 4 * 1024 * 1024;
/// Largest gRPC message, which is containerd's own limit. Lists of blobs arrive in several messages.
const MAX_MESSAGE: usize = 16 * 1024 * 1024;
/// Longest wait for the description of an image that is already there.
const DESCRIBE_TIMEOUT: Duration = Duration::from_secs(5);

/// A blob that is being written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ingest {
    /// Bytes written so far.
    pub(crate) offset: u64,
    /// Time of the last write. `None` if containerd does not tell it.
    pub(crate) last_write: Option<SystemTime>,
}

/// A manifest or index that is in the store as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StoredManifest {
    /// Its own digest, `sha256:…`.
    pub(crate) digest: String,
    /// Digests of the manifests that an index lists. Empty for a manifest.
    pub(crate) children: Vec<String>,
}

/// What the store has of a repository.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Candidates {
    /// Manifests and indexes that a pull may be about.
    pub(crate) manifests: Vec<StoredManifest>,
    /// Whether there is any manifest or index of the repository, however old.
    pub(crate) has_content: bool,
}

/// Reader of containerd's content and image services.
#[derive(Debug)]
pub(crate) struct ContentStore {
    content: ContentClient<Channel>,
    images: ImagesClient<Channel>,
    snapshots: SnapshotsClient<Channel>,
    /// Set once the runtime has answered that it has no such services.
    unsupported: AtomicBool,
}

impl ContentStore {
    pub(crate) fn new(channel: Channel) -> Self {
        Self {
            content: ContentClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE),
            images: ImagesClient::new(channel.clone()),
            snapshots: SnapshotsClient::new(channel),
            unsupported: AtomicBool::new(false),
        }
    }

    /// Whether the runtime has answered that it has no such services, as CRI-O does.
    pub(crate) fn is_unsupported(&self) -> bool {
        self.unsupported.load(Ordering::Relaxed)
    }

    fn ok<T>(&self, answer: Result<T, Status>) -> Option<T> {
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
        Some(self.ok(answer)?.into_inner().image?.target?.digest)
    }

    /// Adds up the compressed layers of a pulled image.
    pub(crate) async fn image_size(&self, digest: &str) -> Option<Bytes> {
        let layers = timeout(DESCRIBE_TIMEOUT, self.layers(digest)).await.ok().flatten()?;
        let total = layers.iter().map(|layer| layer.size).sum();
        Some(Bytes { done: total, total })
    }

    /// Lists the layers below a manifest or an index, each once. `None` while the manifest is not in the store.
    pub(crate) async fn layers(&self, digest: &str) -> Option<Vec<Layer>> {
        let layers = match self.document(digest).await? {
            Document::Manifest(layers) => layers,
            Document::Index(manifests) => {
                // Of an index, only the manifest of this platform is fetched: it is the one in the store.
                let mut found = None;
                for manifest in manifests {
                    if let Some(Document::Manifest(layers)) = self.document(&manifest).await {
                        found = Some(layers);
                        break;
                    }
                }
                found?
            }
        };
        let layers = deduplicate(layers);
        (!layers.is_empty()).then_some(layers)
    }

    /// Lists the blobs that are being written, by digest. Includes leftovers of abandoned pulls.
    pub(crate) async fn ingests(&self) -> Option<HashMap<String, Ingest>> {
        let request = namespaced(ListStatusesRequest { filters: Vec::new() });
        let statuses = self.ok(self.content.clone().list_statuses(request).await)?.into_inner().statuses;
        let ingests = statuses.into_iter().filter_map(|status| {
            let last_write = to_time(status.updated_at.map(|time| (time.seconds, time.nanos)));
            Some((digest_of_ref(&status.r#ref)?, Ingest { offset: to_size(status.offset), last_write }))
        });
        Some(ingests.collect())
    }

    /// Whether a blob is in the store as a whole.
    pub(crate) async fn has_blob(&self, digest: &str) -> bool {
        let answer = self.content.clone().info(namespaced(InfoRequest { digest: digest.to_owned() })).await;
        self.ok(answer).is_some()
    }

    /// Lists the manifests and indexes of a repository that a pull begun at `since` may be about: those that are new;
    /// or, if the pull resumes an earlier one, those whose layers are being written.
    pub(crate) async fn candidates(
        &self,
        host: &str,
        path: &str,
        since: SystemTime,
        ingests: &HashMap<String, Ingest>,
    ) -> Option<Candidates> {
        let source = format!("{SOURCE_LABEL}.{host}");
        // The store may hold thousands of blobs: let containerd select the manifests and indexes of this host.
        let filters = [CONFIG_LABEL, &format!("{CHILD_LABEL}0")]
            .map(|label| format!("labels.\"{source}\",labels.\"{label}\""))
            .to_vec();
        let answer = self.content.clone().list(namespaced(ListContentRequest { filters })).await;
        let mut parts = self.ok(answer)?.into_inner();
        let (mut new, mut resumed, mut has_content) = (Vec::new(), Vec::new(), false);
        while let Some(part) = self.ok(parts.message().await)? {
            for info in part.info.into_iter().filter(|info| is_of_repository(info, &source, path)) {
                has_content = true;
                if is_new_since(&info, since) {
                    new.push(to_stored_manifest(info));
                } else if is_being_fetched_since(&info, since, ingests) {
                    resumed.push(to_stored_manifest(info));
                }
            }
        }
        Some(Candidates { manifests: if new.is_empty() { resumed } else { new }, has_content })
    }

    async fn document(&self, digest: &str) -> Option<Document> {
        Document::parse(&self.read(digest).await?)
    }

    /// Reads a manifest, an index or a configuration. `None` if it is not in the store, or too large.
    pub(crate) async fn read(&self, digest: &str) -> Option<Vec<u8>> {
        let read = ReadContentRequest { digest: digest.to_owned(), offset: 0, size: 0 };
        let info = self.content.clone().info(namespaced(InfoRequest { digest: digest.to_owned() })).await;
        let length = self.ok(info)?.into_inner().info?.size;
        if to_size(length) > MAX_MANIFEST as u64 {
            return None;
        }
        let mut parts = self.ok(self.content.clone().read(namespaced(read)).await)?.into_inner();
        let mut text = Vec::new();
        while let Some(part) = self.ok(parts.message().await)? {
            text.extend(part.data);
        }
        Some(text)
    }

    /// Size of a blob that is in the store as a whole.
    pub(crate) async fn blob_size(&self, digest: &str) -> Option<u64> {
        let answer = self.content.clone().info(namespaced(InfoRequest { digest: digest.to_owned() })).await;
        Some(to_size(self.ok(answer)?.into_inner().info?.size))
    }

    /// Reads so many bytes of a blob, from an offset on.
    pub(crate) async fn read_piece(&self, digest: &str, offset: u64, size: u64) -> Option<Vec<u8>> {
        let (offset, size) = (to_wire_size(offset), to_wire_size(size));
        let read = ReadContentRequest { digest: digest.to_owned(), offset, size };
        let mut parts = self.ok(self.content.clone().read(namespaced(read)).await)?.into_inner();
        let mut piece = Vec::new();
        while let Some(part) = self.ok(parts.message().await)? {
            piece.extend(part.data);
        }
        Some(piece)
    }

    /// Whether a layer has been unpacked, on whatever layers.
    pub(crate) async fn was_unpacked(&self, digest: &str) -> bool {
        let answer = self.content.clone().info(namespaced(InfoRequest { digest: digest.to_owned() })).await;
        let info = self.ok(answer).and_then(|answer| answer.into_inner().info);
        info.is_some_and(|info| info.labels.contains_key(UNCOMPRESSED_LABEL))
    }

    /// Whether a layer is unpacked, with all layers below it, whose digests the id of the chain is made of.
    pub(crate) async fn is_unpacked(&self, snapshotter: &str, chain: &str) -> bool {
        let request = StatSnapshotRequest { snapshotter: snapshotter.to_owned(), key: chain.to_owned() };
        let answer = self.snapshots.clone().stat(namespaced(request)).await;
        let kind = self.ok(answer).and_then(|answer| Some(answer.into_inner().info?.kind));
        kind == Some(SnapshotKind::Committed.into())
    }
}

/// Takes the digest from the ref of an ingest, such as `layer-sha256:…`. What comes from neighbours is no part of it.
fn digest_of_ref(name: &str) -> Option<String> {
    let (_kind, digest) = name.split_once('-').filter(|(kind, _)| *kind != PEER_REF)?;
    digest.contains(':').then(|| digest.to_owned())
}

fn to_time(since_1970: Option<(i64, i32)>) -> Option<SystemTime> {
    let (seconds, nanos) = since_1970?;
    // containerd 1.6 leaves the update time of a blob at the year 1: such a time counts as unknown.
    Some(UNIX_EPOCH + Duration::new(u64::try_from(seconds).ok()?, u32::try_from(nanos).ok()?))
}

fn is_of_repository(info: &Info, source: &str, path: &str) -> bool {
    // The label lists every repository of that host in which the blob was found.
    info.labels.get(source).is_some_and(|found| found.split(',').any(|repository| repository == path))
}

fn is_new_since(info: &Info, since: SystemTime) -> bool {
    let times = [&info.created_at, &info.updated_at];
    let mut times = times.into_iter().filter_map(|at| to_time(at.as_ref().map(|at| (at.seconds, at.nanos))));
    times.any(|at| at >= since)
}

fn is_being_fetched_since(info: &Info, since: SystemTime, ingests: &HashMap<String, Ingest>) -> bool {
    let layers = info.labels.iter().filter(|(label, _)| label.starts_with(LAYER_LABEL));
    let mut writes = layers.filter_map(|(_, digest)| ingests.get(digest)?.last_write);
    writes.any(|last| last >= since)
}

fn to_stored_manifest(info: Info) -> StoredManifest {
    let children = info.labels.into_iter().filter(|(label, _)| label.starts_with(CHILD_LABEL));
    StoredManifest { digest: info.digest, children: children.map(|(_, digest)| digest).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(repositories: &str, created: i64) -> Info {
        let mut info = Info { digest: "sha256:m".to_owned(), ..Info::default() };
        info.labels.insert("source".to_owned(), repositories.to_owned());
        info.labels.insert(format!("{CHILD_LABEL}0"), "sha256:child".to_owned());
        info.labels.insert(format!("{LAYER_LABEL}0"), "sha256:layer".to_owned());
        info.created_at.get_or_insert_default().seconds = created;
        // containerd 1.6 reports the year 1.
        info.updated_at.get_or_insert_default().seconds = -62_135_596_800;
        info
    }

    #[test]
    fn a_candidate_carries_the_repository_in_its_source_label() {
        assert!(is_of_repository(&info("other,team/app", 0), "source", "team/app"));
        assert!(!is_of_repository(&info("team/app2", 0), "source", "team/app"));
        assert!(!is_of_repository(&info("team/app", 0), "elsewhere", "team/app"));
        assert_eq!(to_stored_manifest(info("team/app", 0)).children, ["sha256:child"]);
    }

    #[test]
    fn a_candidate_is_new_or_its_layers_are_being_written() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        assert!(is_new_since(&info("a", 100), at(100)));
        assert!(!is_new_since(&info("a", 99), at(100)));
        let ingests =
            |last_write| HashMap::from([("sha256:layer".to_owned(), Ingest { offset: 1, last_write })]);
        assert!(is_being_fetched_since(&info("a", 1), at(100), &ingests(Some(at(100)))));
        assert!(
            !is_being_fetched_since(&info("a", 1), at(100), &ingests(Some(at(99)))),
            "the leftover of an abandoned pull"
        );
        assert!(!is_being_fetched_since(&info("a", 1), at(100), &HashMap::new()));
    }

    #[test]
    fn the_ref_of_an_ingest_contains_the_digest() {
        assert_eq!(digest_of_ref("layer-sha256:aa").as_deref(), Some("sha256:aa"));
        assert_eq!(digest_of_ref("upload"), None);
        assert_eq!(digest_of_ref("peer-sha256:aa"), None);
    }
}
