//! The reasons of events and of conditions, each once. They are part of the API: scripts and alerts match on them.

/// A job has begun.
pub const STARTED: &str = "Started";
/// A wave of a job has begun.
pub const WAVE_STARTED: &str = "WaveStarted";
/// A wave of a job has ended, and the next one waits for its pause.
pub const WAVE_ENDED: &str = "WaveEnded";
/// A job begins a further round for the nodes that did not make it.
pub const RETRYING: &str = "Retrying";
/// A job asks the nodes that succeeded whether their images are still there.
pub const RECHECKING: &str = "Rechecking";
/// A re-check of a job has ended, and every node that answered has its images.
pub const IMAGES_PRESENT: &str = "ImagesPresent";
/// A re-check of a job has ended, and nodes lack images that they had.
pub const IMAGES_MISSING: &str = "ImagesMissing";
/// `spec.suspend` was set.
pub const SUSPENDED: &str = "Suspended";
/// A job is paused.
pub const PAUSED: &str = "Paused";
/// A job was paused, and isn't any more.
pub const NOT_PAUSED: &str = "NotPaused";
/// `spec.suspend` was removed.
pub const RESUMED: &str = "Resumed";
/// A job is not suspended.
pub const NOT_SUSPENDED: &str = "NotSuspended";
/// The nodes of a job are pulling.
pub const NODES_PULLING: &str = "NodesPulling";

/// A job has ended well.
pub const COMPLETED: &str = "Completed";
/// A job has ended badly.
pub const FAILED: &str = "Failed";
/// More nodes of a job have failed than it tolerates.
pub const TOLERANCE_EXCEEDED: &str = "ToleranceExceeded";
/// `activeDeadlineSeconds` of a job have passed.
pub const DEADLINE_EXCEEDED: &str = "DeadlineExceeded";
/// `spec.cancel` has ended a job.
pub const CANCELLED: &str = "Cancelled";
/// A job could not begin.
pub const NOT_STARTED: &str = "NotStarted";
/// Nodes of a job have been offline for too long and count as failed.
pub const UNRESPONSIVE: &str = "Unresponsive";

/// Nodes that a job asks for are left out.
pub const NODES_SKIPPED: &str = "NodesSkipped";
/// Names in nodeNames have no Node, and count as failed.
pub const NODES_MISSING: &str = "NodesMissing";
/// Nodes of a job wait for the consent of a secret's owner.
pub const SECRET_WITHHELD: &str = "SecretWithheld";
/// A node of a job has failed.
pub const NODE_FAILED: &str = "NodeFailed";
/// A node of a job did not report in time.
pub const NODE_UNKNOWN: &str = "NodeUnknown";
/// An image is on the node. The spelling is Kruise's.
pub const PULL_IMAGE_SUCCEED: &str = "PullImageSucceed";
/// An image could not be pulled.
pub const PULL_IMAGE_FAILED: &str = "PullImageFailed";

/// The spec was taken over.
pub const ACCEPTED: &str = "Accepted";
/// The spec, or its last change, was not taken over.
pub const REFUSED: &str = "Refused";
/// An `ImagePrePullJob` with an invalid spec.
pub const INVALID_SPEC: &str = "InvalidSpec";
/// One of Kruise's objects with an invalid spec.
pub const INVALID: &str = "Invalid";
/// No node that a job asks for can be used.
pub const NO_ELIGIBLE_NODES: &str = "NoEligibleNodes";
/// The present spec differs from the one that the job carries out, or has carried out.
pub const SPEC_CHANGED: &str = "SpecChanged";
/// A change of the spec that a running job cannot follow.
pub const SPEC_CHANGE_IGNORED: &str = "SpecChangeIgnored";
/// An object that does not belong to the list has the name of one of its children.
pub const NAME_TAKEN: &str = "NameTaken";
/// The API server refuses a write, and the job waits for it.
pub const NOT_WRITTEN: &str = "NotWritten";

/// A key of a node was presented that a newer one had superseded.
pub const SUPERSEDED_KEY: &str = "SupersededKey";
/// The certificate of a node was renewed after it had expired.
pub const RENEWED_AFTER_EXPIRY: &str = "RenewedAfterExpiry";

/// Whether an event with this reason is about one image on one node: there may be one for every node of a fleet.
pub fn is_of_one_image(reason: &str) -> bool {
    matches!(reason, PULL_IMAGE_SUCCEED | PULL_IMAGE_FAILED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_image_events_are_pull_events() {
        assert!(is_of_one_image(PULL_IMAGE_SUCCEED) && is_of_one_image(PULL_IMAGE_FAILED));
        assert!(!is_of_one_image(NO_ELIGIBLE_NODES));
    }
}
