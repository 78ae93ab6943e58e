//! The check that all of an image is on the node before the runtime finishes it.

use std::collections::HashSet;

use futures::stream::{self, StreamExt, TryStreamExt};
use tonic::Status;

use super::fetcher::{AHEAD, Fetcher};
use super::image::ImageParts;
use super::unpacked::parse_diffs;
use crate::images::puller::cri::to_pull_error;
use crate::images::puller::{ErrorClass, PullError};

impl Fetcher {
    /// Checks that the runtime has to download nothing of an image. It would keep to no rate and to no window.
    ///
    /// # Errors
    /// A blob is gone, as after the end of its lease: the next attempt downloads it, under its terms. Or the runtime doesn't
    /// answer.
    pub(super) async fn check_whole(
        &self,
        reference: &str,
        image: &ImageParts,
        snapshotter: &str,
    ) -> Result<(), PullError> {
        match self.is_whole(image, snapshotter).await {
            Ok(true) => Ok(()),
            Ok(false) => {
                let message = format!(
                    "a part of {reference} is gone from the content store of the runtime, and is downloaded again"
                );
                Err(PullError::new(ErrorClass::Transient, message))
            }
            Err(status) => Err(to_pull_error(&status, reference, &self.endpoint)),
        }
    }

    /// Whether the store has the configuration, and the blob of each layer that isn't unpacked.
    async fn is_whole(&self, image: &ImageParts, snapshotter: &str) -> Result<bool, Status> {
        if !self.store.find_blob(&image.config.digest).await? {
            return Ok(false);
        }
        let find = |index: usize| async move {
            let digest = image.layers[index].digest.as_str();
            Ok::<_, Status>((!self.store.find_blob(digest).await?).then_some(digest))
        };
        let lacking: HashSet<&str> = stream::iter((0..image.layers.len()).map(find))
            .buffered(AHEAD)
            .try_filter_map(|lacking| std::future::ready(Ok(lacking)))
            .try_collect()
            .await?;
        let stacked = image.stacked_layers().enumerate();
        let is_lacking = stacked.filter(|(_, layer)| lacking.contains(layer.digest.as_str()));
        let Some((highest, _)) = is_lacking.last() else { return Ok(true) };
        let config = self.store.read(&image.config.digest).await.unwrap_or_default();
        // Its snapshot has all layers below it as well.
        match parse_diffs(&config).get(highest) {
            Some(diff) => Ok(self.store.is_unpacked(snapshotter, &diff.chain_id).await),
            None => Ok(false),
        }
    }
}
