//! A cache of registry secrets: for a few seconds, because the nodes of one wave need the same ones.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Secret;
use kube::api::Api;
use kube::{Client, Error};
use prepull_api::overriders::SecretRef;
use prepull_engine::prepull::plan::SecretLookup;
use tokio::sync::Mutex;

use crate::kube_api::cluster::read_with_retry;
use crate::kube_api::refusal::explain;

/// How long a secret is cached: a changed password is used by the next wave, and 10,000 nodes that start together cost
/// one request.
const FOUND_TTL: Duration = Duration::from_secs(5);
/// How long it is cached that a secret cannot be read: one that was just created must not be reported as missing.
const ABSENT_TTL: Duration = Duration::from_secs(1);

/// The registry secrets that jobs refer to.
#[derive(Clone)]
pub(crate) struct Secrets {
    client: Client,
    recent: Arc<Mutex<HashMap<SecretRef, Slot>>>,
}

/// One secret: whoever asks while it is read waits for the same answer.
type Slot = Arc<Mutex<Option<(Instant, SecretLookup)>>>;

impl Secrets {
    /// Reads secrets with the rights of this client.
    pub(crate) fn new(client: Client) -> Self {
        Self { client, recent: Arc::default() }
    }

    /// The secret, or the final reason why there is none. Waits while the API server is unavailable: give it a deadline.
    /// Dropping the future loses nothing.
    pub(crate) async fn get(&self, secret: &SecretRef) -> SecretLookup {
        let slot = self.slot(secret).await;
        let mut answer = slot.lock().await;
        if let Some(answer) = &*answer
            && is_fresh(answer)
        {
            return answer.1.clone();
        }
        let lookup = self.read(secret).await;
        *answer = Some((Instant::now(), lookup.clone()));
        lookup
    }

    async fn slot(&self, secret: &SecretRef) -> Slot {
        let mut recent = self.recent.lock().await;
        drop_expired(&mut recent);
        recent.entry(secret.clone()).or_default().clone()
    }

    async fn read(&self, secret: &SecretRef) -> SecretLookup {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), secret.namespace());
        let read = || async {
            match api.get(secret.name()).await {
                Ok(found) => Ok(SecretLookup::from_secret(&found)),
                Err(Error::Api(answer)) if answer.code == 404 => Ok(SecretLookup::Missing),
                Err(Error::Api(answer)) if matches!(answer.code, 401 | 403) => {
                    Ok(SecretLookup::Forbidden(answer.message.clone()))
                }
                Err(error) => Err(error),
            }
        };
        read_with_retry(&format!("secret {secret}"), explain::<Secret>, read).await
    }

    /// Drops expired secrets, for ever, so that even the last one is in memory no longer than twice [`FOUND_TTL`].
    pub(crate) async fn drop_expired_forever(self) {
        loop {
            tokio::time::sleep(FOUND_TTL).await;
            drop_expired(&mut *self.recent.lock().await);
        }
    }
}

fn is_fresh((at, lookup): &(Instant, SecretLookup)) -> bool {
    at.elapsed() < if matches!(lookup, SecretLookup::Found(_)) { FOUND_TTL } else { ABSENT_TTL }
}

/// Keeps what is fresh, and the slots that are being read: those are locked.
fn drop_expired(recent: &mut HashMap<SecretRef, Slot>) {
    recent.retain(|_, slot| slot.try_lock().map_or(true, |answer| answer.as_ref().is_some_and(is_fresh)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expired_secrets_are_dropped_except_those_being_read() {
        let secret = |name| SecretRef::new("default", name).unwrap();
        let old = Instant::now().checked_sub(FOUND_TTL).unwrap();
        let filled = |at| Arc::new(Mutex::new(Some((at, SecretLookup::Missing))));
        let reading: Slot = Arc::default();
        let guard = reading.try_lock();
        let mut recent = HashMap::from([
            (secret("old"), filled(old)),
            (secret("fresh"), filled(Instant::now())),
            (secret("absent"), filled(Instant::now().checked_sub(ABSENT_TTL).unwrap())),
            (secret("being-read"), reading.clone()),
        ]);
        drop_expired(&mut recent);
        assert!(!recent.contains_key(&secret("old")));
        assert_eq!(recent.len(), 2);
        drop(guard);
    }
}
