//! What a NodeImage's status is to be, and how much it matters that it is not.

use prepull_api::crd::kruise::{
    ImageStatus, ImageTagSpec, ImageTagStatus, NodeImageSpec, NodeImageStatus, PullPhase,
};

/// How a status that is to be written differs from what the API server has, the most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Difference {
    /// A tag has ended: its edge waits for the acknowledgement, and its jobs for a free slot.
    Ended,
    /// Tags are not in the spec any more, or the status was never written.
    Gone,
    /// A tag is on its way: it will change again.
    Progress,
}

/// The status of a spec, where `live` tells of the tags that have not ended in what the API server has.
pub(super) fn desired(
    spec: &NodeImageSpec,
    observed: &NodeImageStatus,
    live: impl Fn(&str, &ImageTagSpec) -> Option<ImageTagStatus>,
) -> NodeImageStatus {
    let mut status = NodeImageStatus::default();
    for (name, image) in &spec.images {
        let mut tags = Vec::with_capacity(image.tags.len());
        for tag in &image.tags {
            if tags.iter().any(|known: &ImageTagStatus| known.tag == tag.tag) {
                continue;
            }
            let known =
                super::edit::find(observed, name, &tag.tag).filter(|known| known.has_ended(tag.version));
            let of_tag = known.cloned().or_else(|| live(name, tag)).unwrap_or_else(|| ImageTagStatus {
                tag: tag.tag.clone(),
                version: tag.version,
                ..ImageTagStatus::default()
            });
            match of_tag.phase {
                PullPhase::Waiting => status.waiting += 1,
                PullPhase::Pulling => status.pulling += 1,
                PullPhase::Succeeded => status.succeeded += 1,
                PullPhase::Failed => status.failed += 1,
            }
            status.desired += 1;
            tags.push(of_tag);
        }
        if !tags.is_empty() {
            status.image_statuses.insert(name.clone(), ImageStatus { tags });
        }
    }
    status
}

/// How the two differ, if they do.
pub(super) fn difference(
    desired: &NodeImageStatus,
    observed: Option<&NodeImageStatus>,
) -> Option<Difference> {
    let Some(observed) = observed else { return Some(Difference::Gone) };
    if desired == observed {
        return None;
    }
    let news = desired.image_statuses.iter().any(|(name, image)| {
        image.tags.iter().any(|tag| {
            tag.completion_time.is_some() && super::edit::find(observed, name, &tag.tag) != Some(tag)
        })
    });
    if news {
        return Some(Difference::Ended);
    }
    let gone = observed.image_statuses.iter().any(|(name, image)| {
        image.tags.iter().any(|tag| super::edit::find(desired, name, &tag.tag).is_none())
    });
    Some(if gone { Difference::Gone } else { Difference::Progress })
}
