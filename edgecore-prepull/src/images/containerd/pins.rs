//! Pins: labels that keep an image from the kubelet's garbage collection for as long as a job wants it.
//!
//! containerd's CRI reports an image as pinned if one of its records has the label `io.cri-containerd.pinned`, and the
//! kubelet leaves pinned images alone. An image has a record for each name and one for its id. A pull replaces the labels
//! of the name's record and keeps those of the id's, so both get them.
//!
//! A label for each job beside it records which jobs want the pin. So pin and reason are stored together, whatever
//! happens to the agent, its state directory or the image, and an image that another tool has pinned stays pinned.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use containerd_client::services::v1::images_client::ImagesClient;
use containerd_client::services::v1::{GetImageRequest, Image, UpdateImageRequest};
use prepull_api::task::JobUid;
use prepull_api::wire::MAX_PINNING_JOBS;
use prost_types::FieldMask;
use tokio::sync::Mutex;
use tonic::Status;
use tonic::transport::Channel;

use super::namespace::{answer_within, list_images, namespaced, unless_missing};

/// The label that containerd's CRI reads, and its only value.
const PINNED: (&str, &str) = ("io.cri-containerd.pinned", "pinned");
/// Label of every image that a job of ours wants pinned. It records who has set [`PINNED`].
const PINNED_BY: &str = "operations.kubeedge.io/pinned-by";
/// Value of [`PINNED_BY`] if we have set the pin, and will remove it.
const US: &str = "edgecore-prepull";
/// Value of [`PINNED_BY`] if the image was pinned before.
const OTHERS: &str = "others";
/// Prefix of the label for each job that wants the pin; the UID of the job follows.
const PINNED_FOR: &str = "operations.kubeedge.io/pinned-for.";
/// Most jobs that may pin one image. Each adds a label to its records, and containerd always reads a whole record.
const MAX_JOBS_OF_IMAGE: usize = 256;
/// Longest wait for one answer of the image service.
const PATIENCE: Duration = Duration::from_secs(10);

/// The pins of one containerd.
#[derive(Debug)]
pub(crate) struct Pins {
    images: ImagesClient<Channel>,
    /// Serialises changes: labels are read and then written.
    writing: Mutex<()>,
}

impl Pins {
    pub(crate) fn new(channel: Channel) -> Self {
        Self { images: ImagesClient::new(channel), writing: Mutex::default() }
    }

    /// Pins the image with these names for the job: the pulled name and the id. Skips a name that the runtime doesn't
    /// know.
    pub(crate) async fn pin(&self, names: &[&str], job: &JobUid) -> Result<(), Status> {
        let _writing = self.writing.lock().await;
        for name in names {
            let request = namespaced(GetImageRequest { name: (*name).to_owned() });
            let found = answer_within(PATIENCE, self.images.clone().get(request)).await;
            if let Some(image) = unless_missing(found)?.and_then(|answer| answer.image) {
                let changes = changes_to_pin(&image.labels, job)?;
                self.relabel(image, changes).await?;
            }
        }
        Ok(())
    }

    /// Lists jobs that want images pinned, at most [`MAX_PINNING_JOBS`] and different ones each time. `None` if the
    /// runtime has no such labels, or doesn't answer.
    pub(crate) async fn pinning_jobs(&self) -> Option<Vec<JobUid>> {
        let images = self.pinned_images().await.ok()?;
        let jobs: HashSet<JobUid> = images.iter().flat_map(|image| jobs_of(&image.labels)).collect();
        Some(jobs.into_iter().take(MAX_PINNING_JOBS).collect())
    }

    /// Removes the pins of these jobs. An image that another job wants stays pinned.
    pub(crate) async fn unpin(&self, is_over: impl Fn(&JobUid) -> bool) -> Result<(), Status> {
        let _writing = self.writing.lock().await;
        for image in self.pinned_images().await? {
            let changes = changes_to_unpin(&image.labels, &is_over);
            self.relabel(image, changes).await?;
        }
        Ok(())
    }

    async fn pinned_images(&self) -> Result<Vec<Image>, Status> {
        let filters = vec![format!("labels.\"{PINNED_BY}\"")];
        list_images(&self.images, filters, PATIENCE).await
    }

    /// Changes the labels of one record in one request. An empty value removes the label.
    async fn relabel(&self, image: Image, changes: BTreeMap<String, String>) -> Result<(), Status> {
        if changes.is_empty() {
            return Ok(());
        }
        let paths = changes.keys().map(|label| format!("labels.{label}")).collect();
        let request = UpdateImageRequest {
            image: Some(Image { labels: changes.into_iter().collect(), ..image }),
            update_mask: Some(FieldMask { paths }),
            ..UpdateImageRequest::default()
        };
        // It may have been removed in between.
        unless_missing(answer_within(PATIENCE, self.images.clone().update(namespaced(request))).await)
            .map(drop)
    }
}

type RecordLabels = HashMap<String, String>;

/// Whether this record's image is pinned. Releases of containerd before 1.6.25 don't report that, so we look at the
/// labels.
pub(super) fn is_pinned(labels: &RecordLabels) -> bool {
    labels.get(PINNED.0).is_some_and(|value| value == PINNED.1) || labels.contains_key(PINNED_BY)
}

/// Whether a job of ours wants this record's image pinned.
pub(super) fn is_pinned_by_job(labels: &RecordLabels) -> bool {
    labels.contains_key(PINNED_BY)
}

fn changes_to_pin(labels: &RecordLabels, job: &JobUid) -> Result<BTreeMap<String, String>, Status> {
    let wanted_by = format!("{PINNED_FOR}{job}");
    let mut changes = BTreeMap::new();
    if !labels.contains_key(&wanted_by) {
        if jobs_of(labels).count() >= MAX_JOBS_OF_IMAGE {
            return Err(Status::resource_exhausted(format!("{MAX_JOBS_OF_IMAGE} jobs pin it already")));
        }
        // Any value but the empty one, which removes a label.
        changes.insert(wanted_by, "true".to_owned());
    }
    let is_pinned = labels.get(PINNED.0).is_some_and(|value| value == PINNED.1);
    if !labels.contains_key(PINNED_BY) {
        changes.insert(PINNED_BY.to_owned(), if is_pinned { OTHERS } else { US }.to_owned());
    }
    if !is_pinned {
        changes.insert(PINNED.0.to_owned(), PINNED.1.to_owned());
    }
    Ok(changes)
}

fn changes_to_unpin(labels: &RecordLabels, is_over: impl Fn(&JobUid) -> bool) -> BTreeMap<String, String> {
    let (over, wanted): (Vec<_>, Vec<_>) = jobs_of(labels).partition(&is_over);
    let mut changes: Vec<_> = over.iter().map(|job| format!("{PINNED_FOR}{job}")).collect();
    // Also if there's no job left: its label may have been removed by hand.
    if wanted.is_empty() {
        changes.push(PINNED_BY.to_owned());
        if labels.get(PINNED_BY).is_some_and(|by| by == US) {
            changes.push(PINNED.0.to_owned());
        }
    }
    changes.into_iter().map(|label| (label, String::new())).collect()
}

fn jobs_of(labels: &RecordLabels) -> impl Iterator<Item = JobUid> {
    labels.keys().filter_map(|label| label.strip_prefix(PINNED_FOR)).map(|uid| JobUid(uid.to_owned()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn job(uid: &str) -> JobUid {
        JobUid(uid.to_owned())
    }

    /// Applies changes as containerd does.
    fn apply(labels: &mut RecordLabels, changes: BTreeMap<String, String>) {
        labels.extend(changes);
        labels.retain(|_, value| !value.is_empty());
    }

    fn pin(labels: &mut RecordLabels, uid: &str) {
        let changes = changes_to_pin(labels, &job(uid)).unwrap();
        apply(labels, changes);
    }

    fn unpin(labels: &mut RecordLabels, uids: &[&str]) {
        let changes = changes_to_unpin(labels, |over| uids.contains(&over.0.as_str()));
        apply(labels, changes);
    }

    fn is_pinned(labels: &RecordLabels) -> bool {
        labels.get(PINNED.0).is_some_and(|value| value == PINNED.1)
    }

    fn managed() -> RecordLabels {
        HashMap::from([("io.cri-containerd.image".to_owned(), "managed".to_owned())])
    }

    #[test]
    fn a_pin_lasts_until_its_last_job() {
        let mut labels = managed();
        pin(&mut labels, "a");
        assert!(is_pinned(&labels));
        assert_eq!(changes_to_pin(&labels, &job("a")).unwrap(), BTreeMap::new(), "nothing is written twice");
        pin(&mut labels, "b");
        assert_eq!(jobs_of(&labels).collect::<HashSet<_>>(), HashSet::from([job("a"), job("b")]));
        unpin(&mut labels, &["a", "c"]);
        assert!(is_pinned(&labels), "b wants it");
        unpin(&mut labels, &["b"]);
        assert_eq!(labels, managed(), "nothing of ours is left");
    }

    #[test]
    fn foreign_pins_stay() {
        let mut others = managed();
        others.insert(PINNED.0.to_owned(), PINNED.1.to_owned());
        let mut labels = others.clone();
        pin(&mut labels, "a");
        unpin(&mut labels, &["a"]);
        assert_eq!(labels, others);
    }

    #[test]
    fn a_removed_pin_is_set_again() {
        let mut labels = managed();
        pin(&mut labels, "a");
        labels.remove(PINNED.0);
        pin(&mut labels, "a");
        assert!(is_pinned(&labels));
        labels.remove(&format!("{PINNED_FOR}a"));
        unpin(&mut labels, &[]);
        assert_eq!(labels, managed(), "a pin without a job is removed");
    }

    #[test]
    fn the_jobs_of_a_pin_are_bounded() {
        let mut labels = managed();
        for uid in 0..MAX_JOBS_OF_IMAGE {
            pin(&mut labels, &uid.to_string());
        }
        assert_eq!(changes_to_pin(&labels, &job("0")).unwrap(), BTreeMap::new());
        assert_eq!(
            changes_to_pin(&labels, &job("one more")).unwrap_err().code(),
            tonic::Code::ResourceExhausted
        );
    }
}
