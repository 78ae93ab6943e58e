//! Labels of content. containerd's garbage collection uses them to find the parts of an image, and its client to find
//! the source of a blob.

use std::collections::BTreeSet;
use std::time::Duration;

use containerd_client::services::v1::content_client::ContentClient;
use containerd_client::services::v1::{Info, InfoRequest, UpdateRequest};
use prost_types::FieldMask;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::namespace::{answer_within, namespaced};
pub(crate) use super::source::Labels;
use super::source::SourceRepository;

/// Label of a manifest with the digest of its configuration.
pub(super) const CONFIG_LABEL: &str = "containerd.io/gc.ref.content.config";
/// Label of an index with the digest of one of its manifests; a number follows.
const CHILD_LABEL: &str = "containerd.io/gc.ref.content.m.";
/// Label of a manifest with the digest of one of its layers; a number follows.
const LAYER_LABEL: &str = "containerd.io/gc.ref.content.l.";
/// Label of a configuration with the snapshot of the highest layer; the name of the snapshotter follows.
pub(super) const SNAPSHOT_LABEL: &str = "containerd.io/gc.ref.snapshot.";
/// Label of the configuration of an image with layers that were rebuilt from deltas, and have no blobs.
pub(super) const REBUILT_LABEL: &str = "prepull.kubeedge.io/rebuilt";
/// Longest wait for one answer, which takes one write into containerd's database.
const PATIENCE: Duration = Duration::from_secs(30);

/// The labels of a manifest with this configuration and these layers, in its order.
pub(crate) fn of_manifest(config: &str, layers: &[String]) -> Labels {
    numbered(LAYER_LABEL, layers).chain([(CONFIG_LABEL.to_owned(), config.to_owned())]).collect()
}

/// The labels of an index of these manifests, in its order, including those for other platforms.
pub(crate) fn of_index(manifests: &[String]) -> Labels {
    numbered(CHILD_LABEL, manifests).collect()
}

/// The label of the configuration of an image with its highest layer unpacked under this name.
pub(crate) fn of_unpacked(snapshotter: &str, chain_id: &str) -> Labels {
    Labels::from([(format!("{SNAPSHOT_LABEL}{snapshotter}"), chain_id.to_owned())])
}

/// The label of the configuration of an image with unpacked layers that have no blobs, because they came as deltas.
pub(crate) fn of_rebuilt() -> Labels {
    Labels::from([(REBUILT_LABEL.to_owned(), "true".to_owned())])
}

fn numbered(label: &str, digests: &[String]) -> impl Iterator<Item = (String, String)> {
    digests.iter().enumerate().map(move |(number, digest)| (format!("{label}{number}"), digest.clone()))
}

/// Writer of labels of content.
#[derive(Clone, Debug)]
pub(crate) struct ContentLabels {
    content: ContentClient<Channel>,
}

impl ContentLabels {
    pub(crate) fn new(channel: Channel) -> Self {
        Self { content: ContentClient::new(channel) }
    }

    /// Adds labels to a blob, and one more source repository. Other labels of the blob are kept.
    ///
    /// # Errors
    ///
    /// `NotFound` if the blob is not in the store.
    pub(crate) async fn add(
        &self,
        digest: &str,
        source: &SourceRepository,
        labels: &Labels,
    ) -> Result<(), Status> {
        let request = namespaced(InfoRequest { digest: digest.to_owned() });
        let answer = answer_within(PATIENCE, self.content.clone().info(request)).await?;
        let Some(info) = answer.info else { return Err(Status::new(Code::NotFound, "no such content")) };
        let changes = label_changes(&info.labels, source, labels);
        if changes.is_empty() {
            return Ok(());
        }
        let paths = changes.keys().map(|label| format!("labels.{label}")).collect();
        let request = UpdateRequest {
            info: Some(Info { digest: digest.to_owned(), labels: changes, ..Info::default() }),
            update_mask: Some(FieldMask { paths }),
        };
        answer_within(PATIENCE, self.content.clone().update(namespaced(request))).await.map(drop)
    }
}

/// The changes to the labels of a blob.
fn label_changes(has: &Labels, source: &SourceRepository, labels: &Labels) -> Labels {
    let (label, repository) = source.label();
    let found = has.get(&label).map(String::as_str).unwrap_or_default();
    let repositories: BTreeSet<&str> =
        found.split(',').filter(|found| !found.is_empty()).chain([repository.as_str()]).collect();
    let repositories = repositories.into_iter().collect::<Vec<_>>().join(",");
    let wanted = labels.clone().into_iter().chain([(label, repositories)]);
    wanted.filter(|(label, value)| has.get(label) != Some(value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(labels: &[(&str, &str)]) -> Labels {
        labels.iter().map(|(label, value)| ((*label).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn labels_match_containerds_client() {
        assert_eq!(
            of_manifest("sha256:c", &["sha256:a", "sha256:b", "sha256:a"].map(str::to_owned)),
            labels(&[
                ("containerd.io/gc.ref.content.config", "sha256:c"),
                ("containerd.io/gc.ref.content.l.0", "sha256:a"),
                ("containerd.io/gc.ref.content.l.1", "sha256:b"),
                ("containerd.io/gc.ref.content.l.2", "sha256:a"),
            ])
        );
        assert_eq!(
            of_index(&["sha256:m", "sha256:n"].map(str::to_owned)),
            labels(&[
                ("containerd.io/gc.ref.content.m.0", "sha256:m"),
                ("containerd.io/gc.ref.content.m.1", "sha256:n")
            ])
        );
        let of_config = labels(&[("containerd.io/gc.ref.snapshot.overlayfs", "sha256:chain")]);
        assert_eq!(of_unpacked("overlayfs", "sha256:chain"), of_config);
    }

    #[test]
    fn a_source_is_added_once() {
        let source = SourceRepository::of_reference("r.io/team/b:1");
        let label = "containerd.io/distribution.source.r.io";
        let (kept, wanted) = (("other", "x"), labels(&[("wanted", "y")]));
        for (found, expected) in [("", "team/b"), ("team/c,team/a", "team/a,team/b,team/c")] {
            let has = labels(&[(label, found), kept]);
            assert_eq!(label_changes(&has, &source, &wanted), labels(&[(label, expected), ("wanted", "y")]));
        }
        let has = labels(&[(label, "team/a,team/b"), kept, ("wanted", "y")]);
        assert_eq!(label_changes(&has, &source, &wanted), Labels::new());
    }
}
