//! Images that are on a node and that its kubelet still asks the registry for.

use kube::ResourceExt;
use prepull_api::crd::status::{JobImageStatus, Tristate};
use prepull_api::task::KubeletRecord;

use super::super::facts::OfJob;
use crate::amounts::format_count;
use crate::checklist::Point;

/// One point for each kind of reason that the node gives: a job may have 256 images.
pub(super) fn points(of: &OfJob, node: &str) -> Vec<Point> {
    let images = of.record.iter().flat_map(|record| &record.image_status);
    let mut found: Vec<(KubeletRecord, &JobImageStatus, u64)> = Vec::new();
    for image in images.filter(|image| image.status == Tristate::True) {
        let Some(kind) = image.facts.kubelet_record else { continue };
        match found.iter_mut().find(|(other, ..)| *other == kind) {
            Some((_, _, images)) => *images += 1,
            None => found.push((kind, image, 1)),
        }
    }
    let job = of.job.name_any();
    found.into_iter().map(|(kind, first, images)| point(kind, first, images, &job, node)).collect()
}

fn point(kind: KubeletRecord, first: &JobImageStatus, images: u64, job: &str, node: &str) -> Point {
    let more = images - 1;
    let more = if more > 0 { format!(" and {}", format_count(more, "more image")) } else { String::new() };
    let reason = &first.facts.kubelet_record_reason;
    let point = Point::open(format!("job {job} has brought {}{more}: {reason}", first.image));
    let use_once = format!("have a pod on {node} use it once while the registry is in reach");
    match kind {
        // That's how it should be for a private image.
        KubeletRecord::SomeCredentials => point,
        // No policy helps here: the kubelet looks at its files first.
        KubeletRecord::Unreadable => point.with_remedy(use_once),
        KubeletRecord::Pulling => point.with_remedy(format!("see to the kubelet of {node}, and then {use_once}")),
        KubeletRecord::OtherRepository | KubeletRecord::NoCredentials | KubeletRecord::Other => point.with_remedy(format!(
            "{use_once}; for nodes that must start pods offline set the kubelet's policy NeverVerifyAllowlistedImages, with the \
             repository in preloadedImagesVerificationAllowlist"
        )),
    }
}
