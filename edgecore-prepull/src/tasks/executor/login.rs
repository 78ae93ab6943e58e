//! Credentials of one pull attempt, in this order: those of the key; those of the node's credential providers, if the
//! registry refuses the key's or the key has none; and anonymous access only if there are no credentials at all.

use std::sync::atomic::{AtomicBool, Ordering};

use prepull_api::credentials::RegistryCredential;
use prepull_api::failure::FailureCode;
use prepull_api::image::Reference;
use prepull_api::task::ImageTask;
use prepull_api::wire::PullKey;

use crate::images::providers::{Providers, ProvidersAnswer};
use crate::images::puller::{ErrorClass, ProgressSink, PullError, PullRequest, PullTerms, Pulled, Puller};

/// One attempt at an image.
pub(super) struct PullAttempt<'a, P> {
    pub(super) puller: &'a P,
    pub(super) image: &'a ImageTask,
    pub(super) terms: PullTerms<'a>,
    pub(super) progress: ProgressSink<'a>,
}

/// Makes an attempt: pulls with each credential, until the registry accepts one. Sets `asking` while it waits
/// for a credential provider.
pub(super) async fn pull_with_key<P: Puller>(
    attempt: PullAttempt<'_, P>,
    providers: &Providers,
    key: &PullKey,
    asking: &AtomicBool,
) -> Result<Pulled, PullError> {
    let terms = attempt.terms;
    let mut logins = Logins {
        attempt,
        of_key: match key {
            PullKey::Credentials { credentials } => credentials.iter().collect(),
            PullKey::Anonymous { .. } | PullKey::Unavailable { .. } | PullKey::Other => Vec::new(),
        },
        of_providers: Vec::new(),
        refusal: None,
    };
    for credential in logins.of_key.clone() {
        if let Some(pulled) = logins.pull(Some(credential), terms).await? {
            return Ok(pulled);
        }
    }
    let mut answer = ProvidersAnswer::default();
    if let Some(pulled) = pull_with_providers(&mut logins, providers, &mut answer, asking).await? {
        return Ok(pulled);
    }
    let has_credential = matches!(key, PullKey::Credentials { .. }) || !logins.of_providers.is_empty();
    if !has_credential && let Some(pulled) = logins.pull(None, terms).await? {
        return Ok(pulled);
    }
    Err(explain_refusal(&logins, key, &answer))
}

/// The credentials that one attempt has tried, and the registry's answer.
struct Logins<'a, P> {
    attempt: PullAttempt<'a, P>,
    /// Credentials of the key.
    of_key: Vec<&'a RegistryCredential>,
    /// Credentials of providers that the registry has refused.
    of_providers: Vec<RegistryCredential>,
    /// The most informative refusal so far.
    refusal: Option<PullError>,
}

impl<P: Puller> Logins<'_, P> {
    /// Returns `None` if the registry refuses the credential: another one may be accepted.
    async fn pull(
        &mut self,
        credential: Option<&RegistryCredential>,
        terms: PullTerms<'_>,
    ) -> Result<Option<Pulled>, PullError> {
        let PullAttempt { puller, image, terms: _, progress } = &self.attempt;
        let sandbox = image.sandbox.as_ref();
        let request = PullRequest { credential, sandbox, terms, ..PullRequest::new(&image.reference) };
        match puller.pull(request, *progress).await {
            Ok(pulled) => Ok(Some(pulled)),
            // "Not found" replaces a refusal, whichever came first: the registry has accepted the credential, or hides
            // the image from it.
            Err(error) if error.class == ErrorClass::NotFound => {
                self.refusal = Some(error);
                Ok(None)
            }
            Err(error) if error.class == ErrorClass::Auth => {
                self.refusal = self.refusal.take().or(Some(error));
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn has_tried(&self, new: &RegistryCredential) -> bool {
        let login = |credential: &RegistryCredential| {
            let RegistryCredential { server: _, username, password, identity_token, registry_token } =
                credential;
            [username, password, identity_token, registry_token].map(Clone::clone)
        };
        let of_key = self.of_key.iter().copied();
        of_key.chain(&self.of_providers).any(|credential| login(credential) == login(new))
    }

    fn all_refused(&self) -> bool {
        self.refusal.as_ref().is_some_and(|refusal| refusal.class == ErrorClass::Auth)
    }
}

async fn pull_with_providers<P: Puller>(
    logins: &mut Logins<'_, P>,
    providers: &Providers,
    answer: &mut ProvidersAnswer,
    asking: &AtomicBool,
) -> Result<Option<Pulled>, PullError> {
    let Ok(reference) = Reference::parse(&logins.attempt.image.reference) else { return Ok(None) };
    let reference = reference.normalized();
    if !providers.any_match(&reference) {
        return Ok(None);
    }
    // The cloud lets a neighbour read what its own task and credentials allow. It doesn't know that this node has others.
    let terms = PullTerms { shared_for: None, ..logins.attempt.terms };
    // Twice, because a cached credential may have been revoked before it expired.
    for _ in 0..2 {
        asking.store(true, Ordering::Relaxed);
        *answer = providers.ask(&reference).await;
        asking.store(false, Ordering::Relaxed);
        for credential in &answer.credentials {
            if logins.has_tried(credential) {
                continue;
            }
            let pulled = logins.pull(Some(credential), terms).await?;
            if pulled.is_some() {
                return Ok(pulled);
            }
            logins.of_providers.push(credential.clone());
        }
        if !answer.cached || !logins.all_refused() {
            break;
        }
        providers.forget(&reference);
    }
    Ok(None)
}

/// Adds the tried credentials, and the providers without one, to the refusal.
fn explain_refusal<P>(logins: &Logins<'_, P>, key: &PullKey, answer: &ProvidersAnswer) -> PullError {
    let Logins { of_key, of_providers, refusal, .. } = logins;
    let Some(PullError { class, code, message, retry_after: _ }) = refusal else {
        let message = "the secret of the image has no credential for its registry";
        return PullError::new(ErrorClass::Permanent, message).with_code(FailureCode::SecretUnusable);
    };
    let refused = *class == ErrorClass::Auth;
    let mut notes = Vec::new();
    match (of_key.len(), of_providers.len()) {
        (0 | 1, 0) => {}
        (of_key, 0) => notes.push(format!("{of_key} credentials were tried")),
        (of_key, of_providers) => {
            let of_key = if of_key == 0 { String::new() } else { format!("{of_key} of the secret and ") };
            let names = answer.given_by.join(", ");
            notes.push(format!("credentials tried: {of_key}{of_providers} of credential provider {names}"));
        }
    }
    if let (PullKey::Anonymous { note }, true) = (key, refused) {
        match (of_providers.is_empty(), note.is_empty()) {
            (true, true) => notes.push("pulled anonymously: no secret is named for this image".to_owned()),
            (true, false) => notes.push(format!("pulled anonymously: {note}")),
            (false, true) => {}
            (false, false) => notes.push(note.clone()),
        }
    }
    if refused {
        notes.extend(answer.problems.iter().cloned());
    }
    // A provider that didn't answer may have the right credential, and an endpoint that didn't may have the image: the next
    // attempt asks them again.
    let may_pass = (refused && answer.failed) || *code == FailureCode::Unreachable;
    let class = if may_pass { ErrorClass::Transient } else { *class };
    let error = if notes.is_empty() {
        PullError::new(class, message)
    } else {
        PullError::new(class, format!("{message} ({})", notes.join("; ")))
    };
    error.with_code(*code)
}
