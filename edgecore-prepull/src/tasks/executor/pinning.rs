//! Pins of images that are on the node, if the task asks for them.

use std::time::Duration;

use prepull_api::task::{ImageResult, ImageTask};
use tokio::time::sleep;

use super::context::TaskContext;
use crate::images::puller::{ErrorClass, Puller};

/// Waits before further attempts while the runtime doesn't answer: it may be restarting. The image is on the node, and
/// a pin isn't worth more of the node's time.
const RETRIES: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(4), Duration::from_secs(10)];

/// Pins the image of a result for its task, and records whether the runtime reports the pin. A missing pin doesn't fail
/// the image.
pub(super) async fn pin_image<P: Puller>(
    puller: &P,
    context: &TaskContext<'_>,
    image: &ImageTask,
    result: &mut ImageResult,
) {
    let is_wanted = || context.control.borrow().terms.download.pin;
    if !result.outcome.is_on_node() {
        return;
    }
    let mut waits = RETRIES.into_iter();
    // The job may be edited or deleted in between.
    while is_wanted() {
        let error = match puller.pin(&image.reference, result.id.as_deref(), &context.task.job).await {
            Ok(is_pinned) => {
                result.pinned = Some(is_pinned);
                if !is_pinned {
                    tracing::warn!(image = %image.reference, "the image is labelled as pinned, and the container runtime does not report it as such: the kubelet may remove it (containerd reports pins since 1.6.25 and 1.7.10)");
                }
                return;
            }
            Err(error) => error,
        };
        let may_pass = matches!(error.class, ErrorClass::RuntimeDown | ErrorClass::RuntimeLost);
        let Some(wait) = waits.next().filter(|_| may_pass) else {
            tracing::warn!(image = %image.reference, %error, "the image cannot be pinned: the kubelet may remove it");
            result.pinned = Some(false);
            return;
        };
        sleep(wait).await;
    }
}
