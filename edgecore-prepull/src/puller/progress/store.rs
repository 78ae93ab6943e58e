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
use tonic::metadata::MetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use super::claims::Candidate;

/// Where CRI keeps its images in containerd.
const NAMESPACE: &str = "k8s.io";
/// The size up to which the OCI distribution specification wants registries to take a manifest.
const MAX_MANIFEST: usize = 4 * 1024 * 1024;
/// containerd's own limit for a message. A list of blobs comes in parts.
const MAX_ANSWER: usize = 16 * 1024 * 1024;
/// containerd's labels: where a blob came from, and what it refers to.
const SOURCE_LABEL: &str = "containerd.io/distribution.source";
const CONFIG_LABEL: &str = "containerd.io/gc.ref.content.config";
const CHILD_LABEL: &str = "containerd.io/gc.ref.content.m.";

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
        let answer = self.images.clone().get(request(GetImageRequest { name: name.to_owned() })).await;
        Some(self.ok(answer)?.into_inner().image?.target?.digest)
    }

    /// Bytes that are there of every blob that is being written, by digest.
    pub(super) async fn being_written(&self) -> Option<HashMap<String, u64>> {
        let answer =
            self.content.clone().list_statuses(request(ListStatusesRequest { filters: Vec::new() })).await;
        let statuses = self.ok(answer)?.into_inner().statuses;
        Some(
            statuses
                .into_iter()
                .filter_map(|status| Some((digest_of(&status.r#ref)?, size(status.offset))))
                .collect(),
        )
    }

    /// Whether a blob is in the store as a whole.
    pub(super) async fn has(&self, digest: &str) -> bool {
        let answer = self.content.clone().info(request(InfoRequest { digest: digest.to_owned() })).await;
        self.ok(answer).is_some()
    }

    /// Manifests and indexes of a repository that were stored, or met again, since then.
    pub(super) async fn manifests_since(
        &self,
        host: &str,
        path: &str,
        since: SystemTime,
    ) -> Option<Vec<Candidate>> {
        let source = format!("{SOURCE_LABEL}.{host}");
        // The list may have thousands of blobs: containerd shall pick those that can be meant.
        let filters = [CONFIG_LABEL, &format!("{CHILD_LABEL}0")]
            .map(|label| format!("labels.\"{source}\",labels.\"{label}\""));
        let filters = filters.to_vec();
        let answer = self.content.clone().list(request(ListContentRequest { filters })).await;
        let mut parts = self.ok(answer)?.into_inner();
        let mut found = Vec::new();
        while let Some(part) = self.ok(parts.message().await)? {
            found.extend(part.info.into_iter().filter_map(|info| candidate(info, &source, path, since)));
        }
        Some(found)
    }

    /// Reads a manifest or an index.
    pub(super) async fn document(&self, digest: &str) -> Option<Document> {
        let read = ReadContentRequest { digest: digest.to_owned(), offset: 0, size: 0 };
        let info = self.content.clone().info(request(InfoRequest { digest: digest.to_owned() })).await;
        let length = self.ok(info)?.into_inner().info?.size;
        if size(length) > MAX_MANIFEST as u64 {
            return None;
        }
        let mut parts = self.ok(self.content.clone().read(request(read)).await)?.into_inner();
        let mut text = Vec::new();
        while let Some(part) = self.ok(parts.message().await)? {
            text.extend(part.data);
        }
        parse(&text)
    }
}

/// A request about what CRI has.
pub(in crate::puller) fn request<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("containerd-namespace", MetadataValue::from_static(NAMESPACE));
    request
}

/// Blobs are written under names such as `layer-sha256:…`.
fn digest_of(name: &str) -> Option<String> {
    let (_kind, digest) = name.split_once('-')?;
    digest.contains(':').then(|| digest.to_owned())
}

fn size(size: i64) -> u64 {
    u64::try_from(size).unwrap_or(0)
}

fn candidate(info: Info, source: &str, path: &str, since: SystemTime) -> Option<Candidate> {
    // The label lists every repository of that host that the blob was found in.
    if !info.labels.get(source)?.split(',').any(|repository| repository == path) {
        return None;
    }
    // A manifest that was there before is labelled anew when it is met again.
    let updated = info.updated_at?;
    let updated = Duration::new(u64::try_from(updated.seconds).ok()?, u32::try_from(updated.nanos).ok()?);
    if UNIX_EPOCH + updated < since {
        return None;
    }
    let children = info.labels.into_iter().filter(|(label, _)| label.starts_with(CHILD_LABEL));
    Some(Candidate { digest: info.digest, children: children.map(|(_, digest)| digest).collect() })
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

    #[test]
    fn a_candidate_is_of_the_repository_and_new() {
        let since = UNIX_EPOCH + Duration::from_secs(100);
        let info = |repositories: &str, seconds: i64| {
            let mut info = Info { digest: "sha256:m".to_owned(), ..Info::default() };
            info.labels.insert("source".to_owned(), repositories.to_owned());
            info.labels.insert(format!("{CHILD_LABEL}0"), "sha256:child".to_owned());
            let mut updated = info.updated_at.take().unwrap_or_default();
            updated.seconds = seconds;
            info.updated_at = Some(updated);
            info
        };
        let is = |info| candidate(info, "source", "team/app", since).is_some();
        assert!(is(info("team/app", 100)));
        assert!(is(info("other,team/app", 200)));
        assert!(!is(info("team/app", 99)));
        assert!(!is(info("team/app2", 100)));
        assert!(!candidate(info("team/app", 100), "elsewhere", "team/app", since).is_some());
        let found = candidate(info("team/app", 100), "source", "team/app", since);
        assert_eq!(found.map(|found| found.children), Some(vec!["sha256:child".to_owned()]));
    }

    #[test]
    fn the_digest_is_in_the_name_of_the_write() {
        assert_eq!(digest_of("layer-sha256:aa").as_deref(), Some("sha256:aa"));
        assert_eq!(digest_of("upload"), None);
    }
}
