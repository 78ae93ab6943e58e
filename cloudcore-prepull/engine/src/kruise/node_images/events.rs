//! Events about tags that have ended, on the NodeImage and on the jobs.

use k8s_openapi::api::core::v1::ObjectReference;
use prepull_api::crd::kruise::{ImageTagStatus, PullPhase};
use prepull_api::task::{JobUid, NodeName};

use super::effects::NodeEffects;
use super::owners::round_jobs;
use crate::kruise::TagKey;
use crate::shared::events::{ObjectEvent, ObjectKind};
use crate::shared::objects::ObjectId;
use crate::shared::reasons;

/// Publishes how a tag ended: on the NodeImage, and if it failed on the jobs that it was pulled for.
pub(super) fn end_events(
    uid: &str,
    key: &TagKey,
    owners: &[ObjectReference],
    status: &ImageTagStatus,
    fx: &mut NodeEffects<'_>,
) {
    let node_image = node_image_id(fx.node, uid);
    if status.phase == PullPhase::Succeeded {
        let took = status.start_time.as_ref().zip(status.completion_time.as_ref());
        let took = took.map_or(0, |(start, end)| end.0.duration_since(start.0).as_secs());
        let note = format!("image {key} is on the node, after {took} s");
        let (kind, reason) = (ObjectKind::NodeImage, reasons::PULL_IMAGE_SUCCEED);
        return fx.emit_event(ObjectEvent { kind, object: node_image, warning: false, reason, note });
    }
    let message = &status.message;
    emit_failure(ObjectKind::NodeImage, node_image, format!("image {key}: {message}"), fx);
    for owner in round_jobs(owners) {
        let job = ObjectId {
            namespace: owner.namespace.clone().unwrap_or_default(),
            name: owner.name.clone().unwrap_or_default(),
            uid: JobUid(owner.uid.clone().unwrap_or_default()),
        };
        let note = format!("image {key} on node {}: {message}", fx.node);
        emit_failure(ObjectKind::ImagePullJob, job, note, fx);
    }
}

/// Publishes that the NodeImage has no room for a tag that a job requests.
pub(super) fn full_event(uid: &str, image: &str, fx: &mut NodeEffects<'_>) {
    let note = format!(
        "image {image}: the NodeImage has no room for it: it has 256 images, 256 tags of this one, or its share of the bytes that all NodeImages may have"
    );
    emit_failure(ObjectKind::NodeImage, node_image_id(fx.node, uid), note, fx);
}

fn emit_failure(kind: ObjectKind, object: ObjectId, note: String, fx: &mut NodeEffects<'_>) {
    fx.emit_event(ObjectEvent { kind, object, warning: true, reason: reasons::PULL_IMAGE_FAILED, note });
}

fn node_image_id(node: &NodeName, uid: &str) -> ObjectId {
    ObjectId { namespace: String::new(), name: node.0.clone(), uid: JobUid(uid.to_owned()) }
}
