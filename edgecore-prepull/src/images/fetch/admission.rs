//! The decision how an image is downloaded: by deltas if they fit onto the disk, and otherwise by whole layers.
//!
//! Images are removed for whole layers, not for deltas: those take more room, by the word of their publisher.
//!
//! A layer that is rebuilt lies on the disk as a tar before it's unpacked, which may take more room than a compressed layer.

use std::sync::Arc;

use prepull_api::download::Deltas as Rule;
use prepull_api::task::NoDelta;

use super::delta::{LayerDeltas, UnusedDelta};
use super::deltas::Goal;
use super::downloads::{DownloadGuard, Layer};
use super::fetcher::Fetcher;
use super::make_room::Applicant;
use super::stop::FetchStop;
use crate::images::puller::{PullError, PullRequest};

/// An image that fits.
pub(super) struct Admitted<'f> {
    pub(super) layers: Arc<[Layer]>,
    pub(super) watched: DownloadGuard<'f>,
    pub(super) deltas: Option<LayerDeltas>,
    /// Why deltas that the registry has aren't used.
    pub(super) no_delta: Option<UnusedDelta>,
}

impl Fetcher {
    /// Decides how an image is downloaded.
    ///
    /// # Errors
    /// It doesn't fit, or the task requires deltas and there are none.
    pub(super) async fn admit(
        &self,
        request: &PullRequest<'_>,
        goal: &Goal<'_>,
    ) -> Result<Admitted<'_>, FetchStop> {
        let Goal { repository, image, facts, is_shared, .. } = *goal;
        let whole = self.layers(repository, image, facts, is_shared).await;
        let (deltas, mut no_delta) = self.deltas_for(request, goal, &whole).await?;
        if let Some(deltas) = deltas {
            let mut layers = whole.clone();
            self.put_deltas(&mut layers, &deltas, is_shared).await;
            let is_required = request.terms.deltas == Rule::Require;
            let refusal = match self.begin_if_fits(request, goal, layers, is_required).await {
                Ok((layers, watched)) => {
                    return Ok(Admitted { layers, watched, deltas: Some(deltas), no_delta });
                }
                Err(refusal) => refusal,
            };
            if let Some(old_files) = deltas.old.view {
                old_files.close().await;
            }
            if is_required {
                return Err(refusal.into());
            }
            no_delta =
                Some(UnusedDelta::new(NoDelta::NoRoom, format!("by deltas there is {}", refusal.message)));
        }
        let (layers, watched) = self.begin_if_fits(request, goal, whole, true).await?;
        Ok(Admitted { layers, watched, deltas: None, no_delta })
    }

    /// Begins a download, if it fits.
    async fn begin_if_fits(
        &self,
        request: &PullRequest<'_>,
        goal: &Goal<'_>,
        layers: Vec<Layer>,
        may_remove: bool,
    ) -> Result<(Arc<[Layer]>, DownloadGuard<'_>), PullError> {
        let Goal { repository, image, facts, lease, .. } = *goal;
        let layers: Arc<[_]> = layers.into();
        let watched = self.downloads.register_download(request.reference, Arc::clone(&layers));
        let terms = &request.terms;
        let applicant = Applicant {
            reference: request.reference,
            repository,
            image,
            layers: &layers,
            facts,
            lease,
            terms,
            may_remove,
        };
        self.check_room(&applicant).await?;
        Ok((layers, watched))
    }
}
