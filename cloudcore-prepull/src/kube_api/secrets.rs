//! Registry secrets from the API server, kept for a few seconds: the nodes of one wave ask for the same ones.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Secret;
use kube::api::Api;
use kube::{Client, Error};
use prepull_api::overriders::SecretRef;
use prepull_engine::prepull::plan::SecretLookup;
use tokio::sync::Mutex;

use crate::kube_api::cluster::persistently;
use crate::kube_api::refusal::explain;

/// How old an answer may be: a changed password is used by the next wave, and 10,000 nodes that start together
/// ask the API server once.
const FRESH: Duration = Duration::from_secs(5);
/// The same for a secret that is not there: whoever has just made it must not be told that it is missing.
const ABSENT: Duration = Duration::from_secs(1);

/// The secrets that jobs name.
#[derive(Clone)]
pub struct Secrets {
    client: Client,
    recent: Arc<Mutex<HashMap<SecretRef, Slot>>>,
}

/// One secret: whoever comes second waits for the first one's answer.
type Slot = Arc<Mutex<Option<(Instant, SecretLookup)>>>;

impl Secrets {
    /// Reads with this client's rights.
    pub fn new(client: Client) -> Self {
        Self { client, recent: Arc::default() }
    }

    /// The secret, or the final reason why there is none. Waits while the API server is away: give it a
    /// deadline. Dropping the future loses nothing.
    pub async fn get(&self, secret: &SecretRef) -> SecretLookup {
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
        forget_stale(&mut recent);
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
        persistently(&format!("secret {secret}"), explain::<Secret>, read).await
    }

    /// Drops what is kept when it has served, for ever: the last secret that was asked for, too, is in memory no
    /// longer than twice [`FRESH`].
    pub async fn forget_in_time(self) {
        loop {
            tokio::time::sleep(FRESH).await;
            forget_stale(&mut *self.recent.lock().await);
        }
    }
}

fn is_fresh((at, lookup): &(Instant, SecretLookup)) -> bool {
    at.elapsed() < if matches!(lookup, SecretLookup::Found(_)) { FRESH } else { ABSENT }
}

/// Keeps what is fresh, and slots that are being filled: those are locked.
fn forget_stale(recent: &mut HashMap<SecretRef, Slot>) {
    recent.retain(|_, slot| slot.try_lock().map_or(true, |answer| answer.as_ref().is_some_and(is_fresh)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_served_is_forgotten_and_what_is_being_read_is_not() {
        let secret = |name| SecretRef::new("default", name).unwrap();
        let old = Instant::now().checked_sub(FRESH).unwrap();
        let filled = |at| Arc::new(Mutex::new(Some((at, SecretLookup::Missing))));
        let reading: Slot = Arc::default();
        let guard = reading.try_lock();
        let mut recent = HashMap::from([
            (secret("old"), filled(old)),
            (secret("fresh"), filled(Instant::now())),
            (secret("absent"), filled(Instant::now().checked_sub(ABSENT).unwrap())),
            (secret("being-read"), reading.clone()),
        ]);
        forget_stale(&mut recent);
        assert!(!recent.contains_key(&secret("old")));
        assert_eq!(recent.len(), 2);
        drop(guard);
    }
}
