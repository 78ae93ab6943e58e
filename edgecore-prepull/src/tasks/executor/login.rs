//! As whom an image is pulled: with the credentials of its key, in their order; where they are refused, or there are
//! none, with what the node's credential providers have; and as nobody only where there is no credential at all.

use std::sync::atomic::{AtomicBool, Ordering};

use prepull_api::credentials::RegistryCredential;
use prepull_api::image::Reference;
use prepull_api::task::ImageTask;
use prepull_api::wire::Key;

use super::Executor;
use crate::images::providers::Answer;
use crate::images::puller::{ErrorClass, ProgressSink, PullError, PullRequest, Pulled, Puller};

/// The pulls of one try.
struct Tries<'a, P> {
    puller: &'a P,
    image: &'a ImageTask,
    progress: ProgressSink<'a>,
    credentials: Vec<&'a RegistryCredential>,
    of_providers: Vec<RegistryCredential>,
    refusal: Option<PullError>,
}

impl<P: Puller> Tries<'_, P> {
    /// None where the registry refused; another credential may do.
    async fn pull(&mut self, credential: Option<&RegistryCredential>) -> Result<Option<Pulled>, PullError> {
        let Self { puller, image, progress, .. } = self;
        let sandbox = image.sandbox.as_ref();
        let request = PullRequest { reference: &image.reference, credential, sandbox };
        match puller.pull(request, *progress).await {
            Ok(pulled) => Ok(Some(pulled)),
            // A registry that says "not found" has let us in, or hides what it has: it says more than a refusal,
            // whichever came last.
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

    fn was_tried(&self, new: &RegistryCredential) -> bool {
        let login = |credential: &RegistryCredential| {
            let RegistryCredential { server: _, username, password, identity_token, registry_token } =
                credential;
            [username, password, identity_token, registry_token].map(Clone::clone)
        };
        let of_key = self.credentials.iter().copied();
        of_key.chain(&self.of_providers).any(|credential| login(credential) == login(new))
    }

    fn all_refused(&self) -> bool {
        self.refusal.as_ref().is_some_and(|refusal| refusal.class == ErrorClass::Auth)
    }
}

impl<P: Puller> Executor<P> {
    /// One try: with each credential, until the registry accepts one. `asking` tells whether it waits for a
    /// credential provider.
    pub(super) async fn with_key(
        &self,
        image: &ImageTask,
        key: &Key,
        asking: &AtomicBool,
        progress: ProgressSink<'_>,
    ) -> Result<Pulled, PullError> {
        let mut tries = Tries {
            puller: &*self.puller,
            image,
            progress,
            credentials: match key {
                Key::Credentials { credentials } => credentials.iter().collect(),
                Key::Anonymous { .. } | Key::Unavailable { .. } => Vec::new(),
            },
            of_providers: Vec::new(),
            refusal: None,
        };
        for credential in tries.credentials.clone() {
            if let Some(pulled) = tries.pull(Some(credential)).await? {
                return Ok(pulled);
            }
        }
        let mut answer = Answer::default();
        if let Some(pulled) = self.with_providers(&mut tries, &mut answer, asking).await? {
            return Ok(pulled);
        }
        let has_credential = matches!(key, Key::Credentials { .. }) || !tries.of_providers.is_empty();
        if !has_credential && let Some(pulled) = tries.pull(None).await? {
            return Ok(pulled);
        }
        Err(explained(&tries, key, &answer))
    }

    async fn with_providers(
        &self,
        tries: &mut Tries<'_, P>,
        answer: &mut Answer,
        asking: &AtomicBool,
    ) -> Result<Option<Pulled>, PullError> {
        let Ok(reference) = Reference::parse(&tries.image.reference) else { return Ok(None) };
        let reference = reference.normalized();
        if !self.providers.any_match(&reference) {
            return Ok(None);
        }
        // Twice, since what was known from before may have lost its force before its time.
        for _ in 0..2 {
            asking.store(true, Ordering::Relaxed);
            *answer = self.providers.ask(&reference).await;
            asking.store(false, Ordering::Relaxed);
            for credential in &answer.credentials {
                if tries.was_tried(credential) {
                    continue;
                }
                let pulled = tries.pull(Some(credential)).await?;
                if pulled.is_some() {
                    return Ok(pulled);
                }
                tries.of_providers.push(credential.clone());
            }
            if !answer.cached || !tries.all_refused() {
                break;
            }
            self.providers.forget(&reference);
        }
        Ok(None)
    }
}

/// The refusal, with what was tried and what could not be.
fn explained<P>(tries: &Tries<'_, P>, key: &Key, answer: &Answer) -> PullError {
    let Tries { credentials, of_providers, refusal, .. } = tries;
    let Some(PullError { class, message }) = refusal else {
        let message = "the secret of the image has no credential for its registry";
        return PullError::new(ErrorClass::Permanent, message);
    };
    let refused = *class == ErrorClass::Auth;
    let mut notes = Vec::new();
    match (credentials.len(), of_providers.len()) {
        (0 | 1, 0) => {}
        (of_key, 0) => notes.push(format!("{of_key} credentials were tried")),
        (of_key, of_providers) => {
            let of_key = if of_key == 0 { String::new() } else { format!("{of_key} of the secret and ") };
            let names = answer.given_by.join(", ");
            notes.push(format!("credentials tried: {of_key}{of_providers} of credential provider {names}"));
        }
    }
    if let (Key::Anonymous { note }, true) = (key, refused) {
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
    // A plugin that did not answer may have had the right credential.
    let class = if refused && answer.failed { ErrorClass::Transient } else { *class };
    if notes.is_empty() {
        return PullError::new(class, message);
    }
    PullError::new(class, format!("{message} ({})", notes.join("; ")))
}
