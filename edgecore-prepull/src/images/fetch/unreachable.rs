//! Registries that the agent can't connect to. The runtime may reach them through a proxy or with a CA that the agent
//! doesn't see.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Time for which only the agent tries a registry that the runtime can't reach either: a box that's offline for a night
/// shouldn't try everything twice.
const FORGET: Duration = Duration::from_secs(600);
/// Most registries that we remember.
const MAX_REGISTRIES: usize = 64;

/// Registries that the runtime could not connect to, either.
#[derive(Debug, Default)]
pub(super) struct Unreachable(Mutex<HashMap<String, Instant>>);

impl Unreachable {
    pub(super) fn is_known(&self, registry: &str) -> bool {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(registry).is_some_and(|since| since.elapsed() < FORGET)
    }

    pub(super) fn remember(&self, registry: &str) {
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
