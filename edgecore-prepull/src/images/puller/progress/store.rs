//! The few questions to containerd's own API.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use containerd_client::services::v1::content_client::ContentClient;
use containerd_client::services::v1::images_client::ImagesClient;
use containerd_client::services::v1::{
    GetImageRequest, Info, InfoRequest, ListContentRequest, ListStatusesRequest, ReadContentRequest,
};
use serde::Deserialize;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::claims::Candidate;
use crate::images::puller::namespaced;

/// The size up to which the OCI distribution specification wants registries to take a manifest.
const MAX_MANIFEST: usize = 4 * 1024 * 1024;
/// containerd's own limit for a message. A list of blobs comes in parts.
const MAX_ANSWER: usize = 16 * 1024 * 1024;
/// containerd's labels: where a blob came from, and what it refers to.
const SOURCE_LABEL: &str = "containerd.io/distribution.source";
const CONFIG_LABEL: &str = "containerd.io/gc.ref.content.config";
const CHILD_LABEL: &str = "containerd.io/gc.ref.content.m.";
const LAYER_LABEL: &str = "containerd.io/gc.ref.content.l.";

/// A blob that is being written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Written {
    /// Bytes that are there.
    pub(super) offset: u64,
    /// The last write.
    pub(super) last: Option<SystemTime>,
}

/// A layer of a manifest.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(super) struct Layer {
    pub(super) digest: String,
    pub(super) size: u64,
}

/// A manifest or an index.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Document {
    /// Its layers.
    Manifest(Vec<Layer>),
    /// The digests of its manifests.
    Index(Vec<String>),
}

/// containerd's services for content and images. Every error is a `None`: nobody pulls worse for it.
#[derive(Debug)]
pub(super) struct ContentStore {
    content: ContentClient<Channel>,
    images: ImagesClient<Channel>,
    absent: AtomicBool,
}

impl ContentStore {
    pub(super) fn new(channel: Channel) -> Self {
        Self {
            content: ContentClient::new(channel.clone()).max_decoding_message_size(MAX_ANSWER),
            images: ImagesClient::new(channel),
            absent: AtomicBool::new(false),
        }
    }

    /// Whether the runtime has answered that it has no such services.
    pub(super) fn is_absent(&self) -> bool {
        self.absent.load(Ordering::Relaxed)
    }

    fn ok<T>(&self, answer: Result<T, Status>) -> Option<T> {
        match answer {
            Ok(answer) => Some(answer),
            Err(status) => {
                if status.code() == Code::Unimplemented {
                    self.absent.store(true, Ordering::Relaxed);
                }
                None
            }
        }
    }

    /// What the image store has under a name.
    pub(super) async fn image_target(&self, name: &str) -> Option<String> {
        if self.is_absent() {
            return None;
        }
        let answer = self.images.clone().get(namespaced(GetImageRequest { name: name.to_owned() })).await;
        Some(self.ok(answer)?.into_inner().image?.target?.digest)
    }

    /// Every blob that is being written, by digest. Among them are torsos of pulls that were given up.
    pub(super) async fn being_written(&self) -> Option<HashMap<String, Written>> {
        let request = namespaced(ListStatusesRequest { filters: Vec::new() });
        let statuses = self.ok(self.content.clone().list_statuses(request).await)?.into_inner().statuses;
        let written = statuses.into_iter().filter_map(|status| {
            let last = time(status.updated_at.map(|time| (time.seconds, time.nanos)));
            Some((digest_of(&status.r#ref)?, Written { offset: size(status.offset), last }))
        });
        Some(written.collect())
    }

    /// Whether a blob is in the store as a whole.
    pub(super) async fn has(&self, digest: &str) -> bool {
        let answer = self.content.clone().info(namespaced(InfoRequest { digest: digest.to_owned() })).await;
        self.ok(answer).is_some()
    }

    /// Manifests and indexes of a repository that a pull which began at that moment may be about: those that
    /// are new; or, where it goes on with what an earlier try left, those whose layers are being written.
    pub(super) async fn candidates(
        &self,
        host: &str,
        path: &str,
        since: SystemTime,
        written: &HashMap<String, Written>,
    ) -> Option<Vec<Candidate>> {
        let source = format!("{SOURCE_LABEL}.{host}");
        // The list may have thousands of blobs: containerd shall pick those that can be meant.
        let filters = [CONFIG_LABEL, &format!("{CHILD_LABEL}0")]
            .map(|label| format!("labels.\"{source}\",labels.\"{label}\""))
            .to_vec();
        let answer = self.content.clone().list(namespaced(ListContentRequest { filters })).await;
        let mut parts = self.ok(answer)?.into_inner();
        let (mut new, mut resumed) = (Vec::new(), Vec::new());
        while let Some(part) = self.ok(parts.message().await)? {
            for info in part.info.into_iter().filter(|info| is_of(info, &source, path)) {
                if is_since(&info, since) {
                    new.push(candidate(info));
                } else if is_written_since(&info, since, written) {
                    resumed.push(candidate(info));
                }
            }
        }
        Some(if new.is_empty() { resumed } else { new })
    }

    /// Reads a manifest or an index.
    pub(super) async fn document(&self, digest: &str) -> Option<Document> {
        let read = ReadContentRequest { digest: digest.to_owned(), offset: 0, size: 0 };
        let info = self.content.clone().info(namespaced(InfoRequest { digest: digest.to_owned() })).await;
        let length = self.ok(info)?.into_inner().info?.size;
        if size(length) > MAX_MANIFEST as u64 {
            return None;
        }
        let mut parts = self.ok(self.content.clone().read(namespaced(read)).await)?.into_inner();
        let mut text = Vec::new();
        while let Some(part) = self.ok(parts.message().await)? {
            text.extend(part.data);
        }
        parse(&text)
    }
}

/// Blobs are written under names such as `layer-sha256:…`.
fn digest_of(name: &str) -> Option<String> {
    let (_kind, digest) = name.split_once('-')?;
    digest.contains(':').then(|| digest.to_owned())
}

fn size(size: i64) -> u64 {
    u64::try_from(size).unwrap_or(0)
}

fn time(since_1970: Option<(i64, i32)>) -> Option<SystemTime> {
    let (seconds, nanos) = since_1970?;
    // containerd 1.6 leaves the update of a blob at the year 1.
    Some(UNIX_EPOCH + Duration::new(u64::try_from(seconds).ok()?, u32::try_from(nanos).ok()?))
}

fn is_of(info: &Info, source: &str, path: &str) -> bool {
    // The label lists every repository of that host that the blob was found in.
    info.labels.get(source).is_some_and(|found| found.split(',').any(|repository| repository == path))
}

fn is_since(info: &Info, since: SystemTime) -> bool {
    let times = [&info.created_at, &info.updated_at];
    let mut times = times.into_iter().filter_map(|at| time(at.as_ref().map(|at| (at.seconds, at.nanos))));
    times.any(|at| at >= since)
}

fn is_written_since(info: &Info, since: SystemTime, written: &HashMap<String, Written>) -> bool {
    let layers = info.labels.iter().filter(|(label, _)| label.starts_with(LAYER_LABEL));
    let mut writes = layers.filter_map(|(_, digest)| written.get(digest)?.last);
    writes.any(|last| last >= since)
}

fn candidate(info: Info) -> Candidate {
    let children = info.labels.into_iter().filter(|(label, _)| label.starts_with(CHILD_LABEL));
    Candidate { digest: info.digest, children: children.map(|(_, digest)| digest).collect() }
}

fn parse(text: &[u8]) -> Option<Document> {
    #[derive(Deserialize)]
    struct Child {
        digest: String,
    }
    #[derive(Deserialize)]
    struct Either {
        #[serde(default)]
        layers: Vec<Layer>,
        #[serde(default)]
        manifests: Vec<Child>,
    }
    let Either { layers, manifests } = serde_json::from_slice(text).ok()?;
    Some(if manifests.is_empty() {
        Document::Manifest(layers)
    } else {
        Document::Index(manifests.into_iter().map(|child| child.digest).collect())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifests_and_indexes_are_told_apart() {
        let manifest = br#"{"schemaVersion":2,"config":{"digest":"sha256:c","size":1},
            "layers":[{"mediaType":"x","digest":"sha256:a","size":10}]}"#;
        let layers = vec![Layer { digest: "sha256:a".to_owned(), size: 10 }];
        assert_eq!(parse(manifest), Some(Document::Manifest(layers)));
        let index = br#"{"manifests":[{"digest":"sha256:m","size":1,"platform":{"os":"linux"}}]}"#;
        assert_eq!(parse(index), Some(Document::Index(vec!["sha256:m".to_owned()])));
        assert_eq!(parse(b"\xff"), None);
    }

    fn info(repositories: &str, created: i64) -> Info {
        let mut info = Info { digest: "sha256:m".to_owned(), ..Info::default() };
        info.labels.insert("source".to_owned(), repositories.to_owned());
        info.labels.insert(format!("{CHILD_LABEL}0"), "sha256:child".to_owned());
        info.labels.insert(format!("{LAYER_LABEL}0"), "sha256:layer".to_owned());
        info.created_at.get_or_insert_default().seconds = created;
        // As containerd 1.6 has it.
        info.updated_at.get_or_insert_default().seconds = -62_135_596_800;
        info
    }

    #[test]
    fn a_candidate_is_of_the_repository() {
        assert!(is_of(&info("other,team/app", 0), "source", "team/app"));
        assert!(!is_of(&info("team/app2", 0), "source", "team/app"));
        assert!(!is_of(&info("team/app", 0), "elsewhere", "team/app"));
        assert_eq!(candidate(info("team/app", 0)).children, ["sha256:child"]);
    }

    #[test]
    fn a_candidate_is_new_or_its_layers_are_being_written() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        assert!(is_since(&info("a", 100), at(100)));
        assert!(!is_since(&info("a", 99), at(100)));
        let written = |last| HashMap::from([("sha256:layer".to_owned(), Written { offset: 1, last })]);
        assert!(is_written_since(&info("a", 1), at(100), &written(Some(at(100)))));
        assert!(
            !is_written_since(&info("a", 1), at(100), &written(Some(at(99)))),
            "left by a pull that was given up"
        );
        assert!(!is_written_since(&info("a", 1), at(100), &HashMap::new()));
    }

    #[test]
    fn the_digest_is_in_the_name_of_the_write() {
        assert_eq!(digest_of("layer-sha256:aa").as_deref(), Some("sha256:aa"));
        assert_eq!(digest_of("upload"), None);
    }
}
