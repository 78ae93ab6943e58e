//! The hashes of all tokens, in memory. A wrong token is refused without a request to the API server, however many
//! come. For any other we read its Secret, which decides.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use futures::StreamExt;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{Event, watcher};
use parking_lot::{Mutex, RwLock};
use prepull_admission::tokens::{SecretHash, TOKEN_LABEL, hash_of, id_of};
use prepull_engine::shared::pacing::TokenBucket;

use crate::kube_api::refusal::FailureLog;
use crate::kube_api::watch::{self, lasting_problem};

/// Reads of tokens that the watch has not shown, per second and at once. A token that was created a moment ago may be
/// one of them, but nearly all are wrong: each costs a read from the API server.
const LOOKUPS: (f64, f64) = (20.0, 100.0);
/// The most tokens that are kept, some 100 bytes each. Those beyond are looked up, like unknown ones.
const MAX_KNOWN: usize = 100_000;

/// What the watch has shown. All clones share it.
#[derive(Clone, Debug)]
pub(super) struct KnownTokens {
    hashes: Arc<RwLock<HashMap<String, SecretHash>>>,
    lookups: Arc<Mutex<TokenBucket<Instant>>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Recognised {
    /// It may be good: its Secret is to be read.
    Perhaps,
    /// Its id is known, and its secret is another one.
    Wrong,
    /// Its id is not known, and too many such tokens were looked up in the last second.
    TooMany,
}

impl Default for KnownTokens {
    fn default() -> Self {
        let (per_second, burst) = LOOKUPS;
        Self { hashes: Arc::default(), lookups: Arc::new(Mutex::new(TokenBucket::new(per_second, burst))) }
    }
}

impl KnownTokens {
    pub(super) fn recognise(&self, id: &str, secret: &str, now: Instant) -> Recognised {
        let known = self.hashes.read();
        match known.get(id) {
            Some(hash) if hash.is_of(secret) => Recognised::Perhaps,
            Some(_) => Recognised::Wrong,
            None => {
                let mut lookups = self.lookups.lock();
                let is_allowed = lookups.try_take(1.0, now).is_ok();
                if is_allowed { Recognised::Perhaps } else { Recognised::TooMany }
            }
        }
    }

    /// Follows the tokens for ever. What has been shown stays known while the watch is broken.
    pub(super) async fn follow_secrets(self, secrets: Api<Secret>) {
        let config = watch::watcher_config().labels(TOKEN_LABEL);
        let mut events = std::pin::pin!(watcher(secrets, config).default_backoff());
        let (mut listed, log) = (HashMap::new(), FailureLog::default());
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Init) => listed.clear(),
                Ok(Event::InitApply(secret)) => insert_token(&mut listed, &secret),
                Ok(Event::InitDone) => *self.hashes.write() = std::mem::take(&mut listed),
                Ok(Event::Apply(secret)) => insert_token(&mut self.hashes.write(), &secret),
                Ok(Event::Delete(secret)) => {
                    if let Some(id) = id_of(&secret) {
                        self.hashes.write().remove(id);
                    }
                }
                Err(error) => {
                    log.record("watch", "Secret", lasting_problem::<Secret>(&error).as_deref(), &error);
                }
            }
        }
    }
}

/// Notes a token. We skip a malformed Secret: `redeem` refuses its token.
fn insert_token(known: &mut HashMap<String, SecretHash>, secret: &Secret) {
    if let Some((id, hash)) = hash_of(secret)
        && (known.len() < MAX_KNOWN || known.contains_key(id))
    {
        known.insert(id.to_owned(), hash);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn wrong_tokens_cost_no_requests() {
        let (known, now) = (KnownTokens::default(), Instant::now());
        known.hashes.write().insert("a".to_owned(), SecretHash::from_secret("good"));
        for _ in 0..1000 {
            assert_eq!(known.recognise("a", "bad", now), Recognised::Wrong);
        }
        let looked_up = (0..1000).filter(|_| known.recognise("b", "bad", now) == Recognised::Perhaps).count();
        assert_eq!(looked_up, 100);
        assert_eq!(known.recognise("a", "good", now), Recognised::Perhaps, "whatever else has come");
        let later = now + Duration::from_secs(1);
        assert_eq!(known.recognise("b", "good", later), Recognised::Perhaps);
    }
}
