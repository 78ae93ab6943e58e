//! Layers that may be damaged, because their disk has refused a flush.
//!
//! An attempt that fails for that is given up with its content. But another image or another pull may hold a layer, which the
//! next attempt would find unpacked and not write again.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use super::deltas::Goal;
use super::fetcher::Fetcher;
use super::image::ImageParts;
use super::unpacked::{Diff, parse_diffs};
use crate::images::puller::{ErrorClass, PullError};

/// Names of the snapshots of such layers, each with the error.
#[derive(Debug, Default)]
pub(super) struct RefusedChains(Mutex<HashMap<String, PullError>>);

impl Fetcher {
    /// Notes that the layers of an image may be damaged: any that is unpacked by now.
    pub(super) async fn refuse_layers(&self, image: &ImageParts, error: &PullError) {
        let config = self.store.read(&image.config.digest).await.unwrap_or_default();
        self.refuse_chains(parse_diffs(&config), error);
    }

    fn refuse_chains(&self, diffs: Vec<Diff>, error: &PullError) {
        let mut refused = self.refused_chains.0.lock().unwrap_or_else(PoisonError::into_inner);
        refused.extend(diffs.into_iter().map(|diff| (diff.chain_id, error.clone())));
    }

    /// Fails if a layer of the image is still the one that was refused.
    pub(super) async fn check_layers(
        &self,
        Goal { repository, image, facts, reference, .. }: &Goal<'_>,
    ) -> Result<(), PullError> {
        if self.refused_chains.0.lock().unwrap_or_else(PoisonError::into_inner).is_empty() {
            return Ok(());
        }
        let Some(config) = self.read_config(repository, image).await else {
            let message = format!("cannot find out whether the disk has refused layers of {reference}");
            return Err(PullError::new(ErrorClass::Transient, message));
        };
        self.check_chains(&facts.snapshotter, parse_diffs(&config)).await
    }

    async fn check_chains(&self, snapshotter: &str, diffs: Vec<Diff>) -> Result<(), PullError> {
        let refused = || self.refused_chains.0.lock().unwrap_or_else(PoisonError::into_inner);
        for Diff { chain_id, .. } in diffs {
            let Some(error) = refused().get(&chain_id).cloned() else { continue };
            if self.store.is_unpacked(snapshotter, &chain_id).await {
                return Err(error);
            }
            // It's gone, and will be written again.
            refused().remove(&chain_id);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::convert::Infallible;
    use std::future::{Ready, ready};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Context, Poll};

    use tonic::Status;
    use tonic::body::Body;
    use tonic::codegen::{Service, http};
    use tonic::server::NamedService;

    use super::*;
    use crate::images::fetch::FetchSettings;
    use crate::images::puller::cri::CriPuller;
    use crate::images::runtime::fake::{answer_with, serve};

    /// A snapshotter that has each snapshot, or none.
    #[derive(Clone)]
    struct FakeSnapshots(Arc<AtomicBool>);

    impl NamedService for FakeSnapshots {
        const NAME: &'static str = "containerd.services.snapshots.v1.Snapshots";
    }

    impl<B> Service<http::Request<B>> for FakeSnapshots {
        type Response = http::Response<Body>;
        type Error = Infallible;
        type Future = Ready<Result<Self::Response, Infallible>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: http::Request<B>) -> Self::Future {
            // An Info whose kind is Committed.
            let committed = [0x0a, 2, 0x18, 3];
            let has_all = self.0.load(Ordering::Relaxed);
            ready(Ok(if has_all {
                answer_with(&committed)
            } else {
                Status::not_found("snapshot").into_http()
            }))
        }
    }

    #[tokio::test]
    async fn a_refused_layer_is_refused_until_it_goes() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("containerd.sock");
        let has_all = Arc::new(AtomicBool::new(true));
        let _server = serve(&socket, FakeSnapshots(Arc::clone(&has_all)));
        let endpoint = format!("unix://{}", socket.display()).parse().unwrap();
        let fetcher = Fetcher::new(CriPuller::new(endpoint).containerd(), FetchSettings::default());
        let diffs =
            |layers: &str| parse_diffs(format!(r#"{{"rootfs":{{"diff_ids":[{layers}]}}}}"#).as_bytes());
        let check = async |layers| fetcher.check_chains("overlayfs", diffs(layers)).await;
        let error = PullError::new(ErrorClass::Transient, "lost");
        fetcher.refuse_chains(diffs(r#""sha256:a""#), &error);
        let shares = r#""sha256:a","sha256:b""#;
        assert_eq!((check(shares).await, check(r#""sha256:b""#).await), (Err(error), Ok(())));
        has_all.store(false, Ordering::Relaxed);
        check(shares).await.unwrap();
        has_all.store(true, Ordering::Relaxed);
        check(shares).await.unwrap();
    }
}
