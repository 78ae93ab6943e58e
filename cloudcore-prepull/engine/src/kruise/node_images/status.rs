//! The status that a NodeImage should have, and how urgent its difference from the stored one is.

use jiff::Timestamp;
use prepull_api::crd::kruise::{ImageStatus, ImageTagStatus, NodeImageSpec, NodeImageStatus, PullPhase};

use crate::kruise::TagKey;
use crate::kruise::stored_text::truncate_stored;

/// Most bytes of a tag's message in etcd. A registry may answer with what takes six bytes for one, and a NodeImage of a
/// thousand tags that have all failed so must still fit into the API server's 1.5 MiB.
const MAX_MESSAGE: usize = 768;

/// How the status that should be stored differs from the one that is, the most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Difference {
    /// A tag has ended: its edge waits for the acknowledgement, and its jobs for a free slot.
    Ended,
    /// Tags have been removed from the spec, or the status was never written.
    Removed,
    /// The progress of a tag has changed, and will change again.
    Progress,
}

/// The status for a spec. `current` is the status of a tag that has not ended in the stored one.
pub(super) fn desired_status(
    spec: &NodeImageSpec,
    stored: &NodeImageStatus,
    current: impl Fn(&TagKey) -> Option<ImageTagStatus>,
) -> NodeImageStatus {
    let mut desired = NodeImageStatus::default();
    for (name, image) in &spec.images {
        let mut tags = Vec::with_capacity(image.tags.len());
        for tag in &image.tags {
            if tags.iter().any(|known: &ImageTagStatus| known.tag == tag.tag) {
                continue;
            }
            let ended = find_tag_status(stored, name, &tag.tag).filter(|known| known.has_ended(tag.version));
            let current = || current(&TagKey::new(name, &tag.tag)).map(bound_message);
            let status = ended.cloned().or_else(current).unwrap_or_else(|| ImageTagStatus {
                tag: tag.tag.clone(),
                version: tag.version,
                ..ImageTagStatus::default()
            });
            match status.phase {
                PullPhase::Waiting => desired.waiting += 1,
                PullPhase::Pulling => desired.pulling += 1,
                PullPhase::Succeeded => desired.succeeded += 1,
                PullPhase::Failed => desired.failed += 1,
            }
            desired.desired += 1;
            tags.push(status);
        }
        if !tags.is_empty() {
            desired.image_statuses.insert(name.clone(), ImageStatus { tags });
        }
    }
    desired
}

fn bound_message(status: ImageTagStatus) -> ImageTagStatus {
    ImageTagStatus { message: truncate_stored(status.message, MAX_MESSAGE), ..status }
}

/// How the two differ, if they do.
pub(super) fn compare_statuses(
    desired: &NodeImageStatus,
    stored: Option<&NodeImageStatus>,
) -> Option<Difference> {
    let Some(stored) = stored else { return Some(Difference::Removed) };
    if desired == stored {
        return None;
    }
    let has_ended = |image: &str, tag: &ImageTagStatus| {
        tag.completion_time.is_some() && find_tag_status(stored, image, &tag.tag) != Some(tag)
    };
    if any_tag(desired, has_ended) {
        return Some(Difference::Ended);
    }
    let has_removed = any_tag(stored, |image, tag| find_tag_status(desired, image, &tag.tag).is_none());
    Some(if has_removed { Difference::Removed } else { Difference::Progress })
}

fn any_tag(status: &NodeImageStatus, is: impl Fn(&str, &ImageTagStatus) -> bool) -> bool {
    let mut images = status.image_statuses.iter();
    images.any(|(name, image)| image.tags.iter().any(|tag| is(name, tag)))
}

/// When a tag succeeded or failed in this version.
pub(super) fn ended_at(status: &NodeImageStatus, image: &str, tag: &str, version: i64) -> Option<Timestamp> {
    let found = find_tag_status(status, image, tag).filter(|found| found.has_ended(version))?;
    found.completion_time.as_ref().map(|time| time.0)
}

/// The status of a tag, of any version.
pub(super) fn find_tag_status<'a>(
    status: &'a NodeImageStatus,
    image: &str,
    tag: &str,
) -> Option<&'a ImageTagStatus> {
    status.image_statuses.get(image)?.tags.iter().find(|found| found.tag == tag)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kruise::node_images::tests::add_manual_tag;
    use crate::kruise::stored_text::stored_len;

    #[test]
    fn messages_are_bounded_as_they_are_stored() {
        let mut spec = NodeImageSpec::default();
        add_manual_tag(&mut spec, "a", "1");
        let current = |key: &TagKey| {
            let (tag, message) = (key.tag.clone(), "<".repeat(1024));
            Some(ImageTagStatus { tag, message, ..ImageTagStatus::default() })
        };
        let status = desired_status(&spec, &NodeImageStatus::default(), current);
        let message = &find_tag_status(&status, "a", "1").unwrap().message;
        assert!((760..=768).contains(&stored_len(message)), "{message}");
        assert_eq!(compare_statuses(&desired_status(&spec, &status, current), Some(&status)), None);
    }

    #[test]
    fn each_tag_counts_once_and_starts_waiting() {
        let mut spec = NodeImageSpec::default();
        for tag in ["1", "2", "1"] {
            add_manual_tag(&mut spec, "a", tag);
        }
        spec.images.get_mut("a").unwrap().tags[1].version = 4;
        spec.images.entry("empty".to_owned()).or_default();
        let current = |key: &TagKey| {
            let pulling = ImageTagStatus {
                tag: key.tag.clone(),
                phase: PullPhase::Pulling,
                ..ImageTagStatus::default()
            };
            (key.tag == "1").then_some(pulling)
        };
        let status = desired_status(&spec, &NodeImageStatus::default(), current);
        assert_eq!((status.desired, status.pulling, status.waiting), (2, 1, 1));
        assert_eq!(status.image_statuses.keys().collect::<Vec<_>>(), ["a"]);
        let waiting = find_tag_status(&status, "a", "2").unwrap();
        assert_eq!((waiting.phase, waiting.version, waiting.tag.as_str()), (PullPhase::Waiting, 4, "2"));
    }
}
