//! Leaves a pull to the runtime, where the agent can't download and the task allows it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use prepull_api::download::{Deltas, VerificationMode};
use prepull_api::failure::FailureCode;
use prepull_api::task::ByteProgress;
use prepull_api::wire::truncate_note;
use tokio::time::sleep;

use super::buckets::PullBuckets;
use super::{FetchMode, Fetching};
use crate::images::puller::{ErrorClass, ProgressSink, PullError, PullRequest, Pulled, Puller};

/// Interval of checking whether a pull by the runtime has got a limit. Limits hold within seconds.
const LOOK_AT_LIMITS: Duration = Duration::from_secs(1);

impl<P: Puller> Fetching<P> {
    /// Leaves a pull to the runtime, unless the task requires something that only the agent can do. `None`: it was ended, since
    /// it got a limit before everything had arrived.
    pub(super) async fn step_back(
        &self,
        why: &str,
        request: PullRequest<'_>,
        progress: ProgressSink<'_>,
    ) -> Result<Option<Pulled>, PullError> {
        let refuse = |because: &str| {
            let message = format!("the agent cannot fetch the image ({why}), and {because}");
            Err(PullError::new(ErrorClass::Permanent, message).with_code(FailureCode::Other))
        };
        if self.fetcher.settings.mode == FetchMode::Agent {
            return refuse("--fetch=agent keeps the container runtime from pulling it");
        }
        if request.terms.deltas == Deltas::Require {
            return refuse("spec.download.deltas is Require, which the container runtime can't do")
                .map_err(|error| error.with_code(FailureCode::NoDelta));
        }
        if request.terms.verification.is_some_and(|wanted| wanted.mode == VerificationMode::Enforce) {
            return refuse("it needs a signature, which the container runtime would not verify: have the agent download (--fetch=auto, over containerd)")
                .map_err(|error| error.with_code(FailureCode::SignatureInvalid));
        }
        let buckets = PullBuckets::new(&self.fetcher.bucket, &request.terms);
        if buckets.are_limited() {
            return refuse("a pull by the container runtime keeps no limit of bytes a second");
        }
        tracing::debug!(image = request.reference, why, "left to the container runtime");
        let has_arrived = AtomicBool::new(false);
        let watched = |bytes: ByteProgress| {
            has_arrived.store(bytes.total > 0 && bytes.done >= bytes.total, Ordering::Relaxed);
            progress(bytes);
        };
        let limited = async {
            while has_arrived.load(Ordering::Relaxed) || !buckets.are_limited() {
                sleep(LOOK_AT_LIMITS).await;
            }
        };
        tokio::select! {
            biased;
            pulled = self.inner.pull(request, &watched) => {
                let mut pulled = pulled?;
                pulled.facts.pulled_by_reason = truncate_note(why);
                Ok(Some(pulled))
            }
            () = limited => Ok(None),
        }
    }

    /// Leaves an image to the runtime because the agent can't connect to its registry (`error`), unless the runtime has
    /// failed in the same way a moment ago.
    pub(super) async fn step_back_unreachable(
        &self,
        registry: &str,
        error: PullError,
        request: PullRequest<'_>,
        progress: ProgressSink<'_>,
    ) -> Result<Option<Pulled>, PullError> {
        let terms = &request.terms;
        let buckets = PullBuckets::new(&self.fetcher.bucket, terms);
        let needs_agent = self.fetcher.settings.mode != FetchMode::Auto
            || buckets.are_limited()
            || terms.verification.is_some()
            || terms.shared_for.is_some();
        if needs_agent || self.fetcher.unreachable.is_known(registry) {
            return Err(error);
        }
        let why = format!("the agent cannot connect: {}", error.message);
        match self.step_back(&why, request, progress).await {
            Err(of_runtime) if adds_nothing(&of_runtime) => {
                self.fetcher.unreachable.remember(registry);
                Err(error)
            }
            ended => ended,
        }
    }
}

/// Whether the runtime's failure has no more information than the agent's.
fn adds_nothing(error: &PullError) -> bool {
    error.code == FailureCode::Unreachable || error.class == ErrorClass::Permanent
}
