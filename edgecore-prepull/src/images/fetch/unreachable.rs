//! Registries that the agent can't connect to. The runtime may reach them through a proxy or with a CA that the agent
//! doesn't see.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use prepull_api::failure::FailureCode;
use tokio::time::Instant;

use super::buckets::PullBuckets;
use super::{FetchMode, Fetching};
use crate::images::puller::{ErrorClass, ProgressSink, PullError, PullRequest, Pulled, Puller};

/// Time for which only the agent tries a registry that the runtime can't reach either: a box that's offline for a night
/// shouldn't try everything twice.
const FORGET: Duration = Duration::from_secs(600);
/// Most registries that we remember.
const MAX_REGISTRIES: usize = 64;

/// Registries that the runtime could not connect to, either.
#[derive(Debug, Default)]
pub(super) struct Unreachable(Mutex<HashMap<String, Instant>>);

impl Unreachable {
    fn is_known(&self, registry: &str) -> bool {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(registry).is_some_and(|since| since.elapsed() < FORGET)
    }

    fn remember(&self, registry: &str) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MAX_REGISTRIES {
            known.retain(|_, since| since.elapsed() < FORGET);
        }
        if known.len() < MAX_REGISTRIES {
            known.insert(registry.to_owned(), Instant::now());
        }
    }

    /// Forgets a registry: the agent has reached it.
    pub(super) fn forget(&self, registry: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(registry);
    }
}

impl<P: Puller> Fetching<P> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_registry_is_remembered_for_a_while() {
        let registries = Unreachable::default();
        for number in 0..MAX_REGISTRIES {
            registries.remember(&number.to_string());
        }
        registries.remember("one too many");
        assert!(registries.is_known("0") && !registries.is_known("one too many"));
        registries.forget("0");
        assert!(!registries.is_known("0") && registries.is_known("1"));
        tokio::time::advance(FORGET).await;
        assert!(!registries.is_known("1"));
        registries.remember("room again");
        registries.remember("and more");
        assert!(registries.is_known("room again") && registries.is_known("and more"));
    }
}
