//! A cache of registry secrets: for a few seconds, because the nodes of one wave need the same ones.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Secret;
use kube::api::Api;
use kube::{Client, Error};
use prepull_api::credentials::SecretUser;
use prepull_api::overriders::SecretRef;
use prepull_engine::prepull::plan::SecretLookup;
use prepull_engine::shared::pacing::Backoff;
use prepull_program::errors::with_causes;
use tokio::sync::{Mutex, Semaphore};
use tracing::warn;

use crate::kube_api::refusal::{FailureLog, is_unserved};
use crate::kube_api::withheld::Withheld;

/// How long a secret is cached: a changed password is used by the next wave, and 10,000 nodes that start together cost
/// one request.
const FOUND_TTL: Duration = Duration::from_secs(5);
/// How long it is cached that a secret cannot be read: one that was just created must not be reported as missing.
const ABSENT_TTL: Duration = Duration::from_secs(1);
/// Requests under way. One secret takes one of them at most, however many nodes wait for it.
const REQUESTS: usize = 64;
/// The time for all tries to read one secret. A dispatch that waits for it holds the slot of a node; after that the
/// engine tries again, and less and less often.
const READ_LIMIT: Duration = Duration::from_secs(5);
/// The waits between two tries.
const RETRY: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(1));

/// The registry secrets that jobs refer to.
#[derive(Clone)]
pub(crate) struct Secrets {
    client: Client,
    recent: Arc<Mutex<HashMap<SecretRef, SecretSlot>>>,
    requests: Arc<Semaphore>,
    log: Arc<FailureLog>,
    requires_consent: bool,
    withheld: Arc<Withheld>,
}

/// One secret: callers that ask while it is read wait for the same answer.
type SecretSlot = Arc<Mutex<Option<(Instant, SecretLookup)>>>;

impl Secrets {
    /// Reads secrets with the rights of this client. `requires_consent`: a secret serves only those whom its owner allows.
    pub(crate) fn new(client: Client, requires_consent: bool) -> Self {
        Self {
            client,
            recent: Arc::default(),
            requests: Arc::new(Semaphore::new(REQUESTS)),
            log: Arc::default(),
            requires_consent,
            withheld: Arc::default(),
        }
    }

    /// This user, if it needs the consent of the owners.
    pub(crate) fn consent_for<'a>(&self, user: SecretUser<'a>) -> Option<SecretUser<'a>> {
        self.requires_consent.then_some(user)
    }

    /// Secrets that are of no use for now.
    pub(crate) fn withheld(&self) -> &Withheld {
        &self.withheld
    }

    /// Reads the secret once, past the cache; `None` if the API server fails. [`Self::get`] returns the result next.
    pub(crate) async fn look_again(&self, secret: &SecretRef) -> Option<SecretLookup> {
        let slot = self.slot(secret).await;
        let mut answer = slot.lock().await;
        let lookup = tokio::time::timeout(READ_LIMIT, self.try_read(secret)).await.ok()?.ok()?;
        *answer = Some((Instant::now(), lookup.clone()));
        Some(lookup)
    }

    /// The secret, or the reason why there is none. That is final unless it is [`SecretLookup::Error`]: then the
    /// API server has failed for some seconds. An API server that has just started refuses what it allows once it knows
    /// the roles, so a refusal is final only after [`READ_LIMIT`]. Dropping the future loses nothing.
    ///
    /// `user` needs the consent of the secret's owner. We remember a missing consent as briefly as a missing secret.
    pub(crate) async fn get(&self, secret: &SecretRef, user: Option<SecretUser<'_>>) -> SecretLookup {
        let slot = self.slot(secret).await;
        let mut answer = slot.lock().await;
        if let Some(answer) = &*answer
            && is_fresh(answer, user)
        {
            return answer.1.clone();
        }
        let lookup = self.read_with_retries(secret).await;
        *answer = Some((Instant::now(), lookup.clone()));
        lookup
    }

    async fn slot(&self, secret: &SecretRef) -> SecretSlot {
        let mut recent = self.recent.lock().await;
        drop_expired(&mut recent);
        recent.entry(secret.clone()).or_default().clone()
    }

    async fn read_with_retries(&self, secret: &SecretRef) -> SecretLookup {
        let (mut last, mut backoff) = (None, RETRY);
        let read = async {
            loop {
                match self.try_read(secret).await {
                    Ok(lookup) => return lookup,
                    Err(error) => last = Some(error),
                }
                tokio::time::sleep(backoff.next_wait()).await;
            }
        };
        if let Ok(lookup) = tokio::time::timeout(READ_LIMIT, read).await {
            return lookup;
        }
        let reason = match last {
            Some(Error::Api(answer)) if answer.code == 403 => {
                return SecretLookup::Forbidden(answer.message);
            }
            Some(error) => with_causes(&error),
            None => format!("the API server has not answered within {READ_LIMIT:?}"),
        };
        // Once a minute: it is tried again for as long as a node needs it.
        if self.log.is_due("read a secret", &reason, Instant::now()) {
            warn!(%secret, reason, "this secret cannot be read, and maybe others; the nodes that need it wait");
        }
        SecretLookup::Error(reason)
    }

    async fn try_read(&self, secret: &SecretRef) -> Result<SecretLookup, Error> {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), secret.namespace());
        // For the request alone, and not for the waits between two of them. The semaphore is never closed.
        let _permit = self.requests.acquire().await;
        match api.get(secret.name()).await {
            Ok(found) => Ok(SecretLookup::from_secret(&found)),
            Err(Error::Api(answer)) if answer.code == 404 && !is_unserved(&answer) => {
                Ok(SecretLookup::Missing)
            }
            Err(error) => Err(error),
        }
    }

    /// Drops expired secrets, for ever, so that even the last one is in memory no longer than twice [`FOUND_TTL`].
    pub(crate) async fn drop_expired_forever(self) {
        loop {
            tokio::time::sleep(FOUND_TTL).await;
            drop_expired(&mut *self.recent.lock().await);
        }
    }
}

fn is_fresh((at, lookup): &(Instant, SecretLookup), user: Option<SecretUser<'_>>) -> bool {
    let serves = match (lookup, user) {
        (SecretLookup::Found(_), None) => true,
        (lookup, Some(user)) => lookup.is_allowed_to(user),
        (_, None) => false,
    };
    at.elapsed() < if serves { FOUND_TTL } else { ABSENT_TTL }
}

/// Keeps what is fresh, and the slots that are being read: those are locked.
fn drop_expired(recent: &mut HashMap<SecretRef, SecretSlot>) {
    recent.retain(|_, slot| {
        slot.try_lock().map_or(true, |answer| answer.as_ref().is_some_and(|answer| is_fresh(answer, None)))
    });
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::future::join_all;
    use hyper::{Request, Response};
    use kube::client::Body;
    use serde_json::json;

    use super::*;

    fn secret(name: &str) -> SecretRef {
        SecretRef::new("default", name).unwrap()
    }

    #[test]
    fn expired_secrets_are_dropped_unless_being_read() {
        let old = Instant::now().checked_sub(FOUND_TTL).unwrap();
        let filled = |at| Arc::new(Mutex::new(Some((at, SecretLookup::Missing))));
        let reading: SecretSlot = Arc::default();
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

    #[test]
    fn consents_are_cached_longer_than_refusals() {
        let annotations = [(prepull_api::credentials::ALLOW.to_owned(), "release".to_owned())].into();
        let lookup = SecretLookup::found("Opaque", &[].into(), &annotations);
        let ago = |age| (Instant::now().checked_sub(age).unwrap(), lookup.clone());
        for (user, is_remembered) in [("release", true), ("other", false)] {
            let user = Some(SecretUser::Job(user));
            assert_eq!(is_fresh(&ago(ABSENT_TTL), user), is_remembered);
            assert!(is_fresh(&ago(Duration::ZERO), user) && !is_fresh(&ago(FOUND_TTL), user));
        }
        assert!(is_fresh(&ago(ABSENT_TTL), None));
    }

    /// An API server that answers 500 for the secret `lost`, 401 for `unknown-user`, 403 for `forbidden`, 403 twice and then
    /// the secret for `late`, 404 for `missing`, a 404 that names no secret for `unserved`, and never for others. Counts
    /// requests.
    fn failing_api_server() -> (Secrets, Arc<AtomicUsize>) {
        let requests = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&requests);
        let serve = move |request: Request<Body>| {
            let earlier = count.fetch_add(1, Ordering::Relaxed);
            async move {
                let name = request.uri().path().rsplit('/').next().unwrap_or_default();
                let code = match name {
                    "lost" => 500,
                    "unknown-user" => 401,
                    "late" if earlier >= 2 => 200,
                    "forbidden" | "late" => 403,
                    "missing" | "unserved" => 404,
                    _ => std::future::pending().await,
                };
                let details = json!({ "name": name, "kind": "secrets" });
                let status = json!({
                    "kind": "Status", "apiVersion": "v1", "message": "no key", "code": code, "details": details
                });
                let text = match code {
                    200 => json!({ "metadata": { "name": name } }).to_string(),
                    _ if name == "unserved" => "404 page not found".to_owned(),
                    _ => status.to_string(),
                };
                let body = Body::from(text.into_bytes());
                Ok::<_, Infallible>(Response::builder().status(code).body(body).unwrap())
            }
        };
        (Secrets::new(Client::new(tower::service_fn(serve), "default"), false), requests)
    }

    #[tokio::test(start_paused = true)]
    async fn all_waiters_give_up_an_unreadable_secret() {
        let (secrets, requests) = failing_api_server();
        let (begun, lost) = (tokio::time::Instant::now(), secret("lost"));
        for lookup in join_all((0..500).map(|_| secrets.get(&lost, None))).await {
            assert!(
                matches!(&lookup, SecretLookup::Error(reason) if reason.contains("no key")),
                "{lookup:?}"
            );
        }
        assert_eq!(begun.elapsed().as_secs(), READ_LIMIT.as_secs());
        let requests = requests.load(Ordering::Relaxed);
        assert!((3..10).contains(&requests), "{requests}");
    }

    #[tokio::test(start_paused = true)]
    async fn only_answers_about_the_secret_are_final() {
        let (secrets, _) = failing_api_server();
        for (name, is_final) in
            [("missing", true), ("forbidden", true), ("unknown-user", false), ("unserved", false)]
        {
            let lookup = secrets.get(&secret(name), None).await;
            assert_eq!(!matches!(lookup, SecretLookup::Error(_)), is_final, "{name}: {lookup:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn only_lasting_refusals_count() {
        let (secrets, _) = failing_api_server();
        let late = secret("late");
        assert!(secrets.look_again(&late).await.is_none(), "the cache takes over no refusal");
        let lookup = secrets.get(&late, None).await;
        assert!(matches!(lookup, SecretLookup::Found(_)), "{lookup:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn retries_do_not_block_other_secrets() {
        let (secrets, _) = failing_api_server();
        let lost = SecretRef::new("default", "lost").unwrap();
        let others: Vec<_> = (0..REQUESTS - 1).map(|n| secret(&format!("slow-{n}"))).collect();
        let slow = join_all(others.iter().map(|name| secrets.get(name, None)));
        let begun = tokio::time::Instant::now();
        let missing = secret("missing");
        let found = async {
            tokio::time::sleep(Duration::from_millis(10)).await;
            let found = secrets.get(&missing, None).await;
            (found, begun.elapsed())
        };
        let (_, _, (found, waited)) = futures::join!(slow, secrets.get(&lost, None), found);
        assert!(matches!(found, SecretLookup::Missing), "{found:?}");
        assert!(waited < Duration::from_secs(1), "{waited:?}");
        assert_eq!(begun.elapsed().as_secs(), READ_LIMIT.as_secs(), "none of them is waited for any longer");
    }
}
