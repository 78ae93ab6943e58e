//! The registry credentials that an image is pulled with, from the Secrets that are named for it.
//!
//! Each message about a Secret has two texts. The text that travels with the key is visible to everyone who may read
//! the job, so without the owner's consent it must not reveal whether the Secret exists. The other text, for the log
//! and for `plan`, has the exact mistake, and the registries in the Secret. Neither has a credential.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Secret;
use prepull_api::abbreviate::abbreviate;
use prepull_api::credentials::{
    ALLOW_HOSTS, Consent, ConsentRefusal, Lookup, RegistryConfig, RegistryCredential, SecretError, SecretUser,
};
use prepull_api::image::NormalizedReference;
use prepull_api::overriders::SecretRef;
use prepull_api::wire::{PullKey, truncate_reason};

mod signatures;

pub use signatures::{ResolvedVerification, resolve_verification};

/// The result of reading a Secret. Cheap to clone: a Secret is parsed once, however many nodes need it.
#[derive(Clone)]
pub enum SecretLookup {
    /// The Secret exists; it may hold no usable credentials.
    Found(Arc<FoundSecret>),
    /// There is no such Secret.
    Missing,
    /// cloudcore may not read it, for this reason of the API server.
    Forbidden(String),
    /// It could not be read, for this reason of the client.
    Error(String),
}

/// A Secret that exists.
pub struct FoundSecret {
    config: Result<RegistryConfig, SecretError>,
    /// The public keys in its data, by name.
    public_keys: BTreeMap<String, Result<String, &'static str>>,
    consent: Consent,
}

impl SecretLookup {
    /// Reads a secret's type, data and annotations.
    pub fn found(
        type_: &str,
        data: &BTreeMap<String, Vec<u8>>,
        annotations: &BTreeMap<String, String>,
    ) -> Self {
        let config = RegistryConfig::from_secret(type_, data);
        let consent = Consent::from_annotations(annotations);
        Self::Found(Arc::new(FoundSecret { config, public_keys: signatures::public_keys(data), consent }))
    }

    /// Reads a Secret object. `stringData`, which only a file can have, wins over `data`, as in the API server.
    pub fn from_secret(secret: &Secret) -> Self {
        let mut data: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        data.extend(secret.data.iter().flatten().map(|(key, value)| (key.clone(), value.0.clone())));
        data.extend(
            secret.string_data.iter().flatten().map(|(key, text)| (key.clone(), text.clone().into_bytes())),
        );
        let annotations = secret.metadata.annotations.clone().unwrap_or_default();
        // The API server's default for a secret without a type.
        Self::found(secret.type_.as_deref().unwrap_or("Opaque"), &data, &annotations)
    }

    /// Whether the Secret is there, and its owner lets this one use it.
    pub fn is_allowed_to(&self, user: SecretUser<'_>) -> bool {
        matches!(self, Self::Found(found) if found.consent.check(user).is_ok())
    }
}

/// Shows the registries only: credentials must not get into a log.
impl fmt::Debug for SecretLookup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Found(found) => match &found.config {
                Ok(config) => f.debug_tuple("Found").field(&config.registries()).finish(),
                Err(error) => f.debug_tuple("Found").field(error).finish(),
            },
            Self::Missing => f.write_str("Missing"),
            Self::Forbidden(reason) => f.debug_tuple("Forbidden").field(reason).finish(),
            Self::Error(reason) => f.debug_tuple("Error").field(reason).finish(),
        }
    }
}

/// What an image is pulled with.
#[derive(Clone, Debug, PartialEq)]
pub struct ResolvedKey {
    /// What its node is sent.
    pub key: PullKey,
    /// What is wrong with the secrets, in detail, where the image gets nothing from any: for the log, and not for the
    /// status.
    pub details: Vec<String>,
    /// The secrets without their owners' consent, if the image gets no credential from any secret.
    pub withheld: Vec<SecretRef>,
}

struct SecretProblem {
    /// For everyone who may read the job.
    text: String,
    /// For cloudcore's log.
    detail: String,
    /// Whether it is for its owner to allow the use.
    is_withheld: bool,
}

impl SecretProblem {
    /// One that anybody may know.
    fn for_everyone(text: String) -> Self {
        Self { detail: text.clone(), text, is_withheld: false }
    }
}

/// Resolves the key for one image of an ImagePrePullJob. It is anonymous only if no secret is named. `user`: needs the
/// consent of the secrets' owners; `None` if no consent is needed.
///
/// With several secrets (an overrider added one), what those hold that can be used is tried in their order; the image
/// fails only if none is usable, and then the reason names the mistake in each.
pub fn resolve_key(
    secrets: &[SecretRef],
    reference: &NormalizedReference,
    user: Option<SecretUser<'_>>,
    lookup: impl Fn(&SecretRef) -> SecretLookup,
) -> ResolvedKey {
    resolve(
        secrets,
        reference,
        |_| user,
        lookup,
        |problems| match problems {
            "" => PullKey::anonymous(),
            reason => PullKey::Unavailable { reason: truncate_reason(reason) },
        },
    )
}

/// The key for one image of a NodeImage. Its `pullSecrets` work like a pod's `imagePullSecrets`: one list for all of
/// its images. Secrets without an entry for this image are skipped, and we try the pull anyway; if the registry refuses
/// it, the reason names their mistakes. `user`: needs the consent of a secret's owner.
pub fn resolve_pull_secrets<'a>(
    secrets: &[SecretRef],
    reference: &NormalizedReference,
    user: impl Fn(&SecretRef) -> Option<SecretUser<'a>>,
    lookup: impl Fn(&SecretRef) -> SecretLookup,
) -> ResolvedKey {
    resolve(secrets, reference, user, lookup, |problems| PullKey::Anonymous {
        note: truncate_reason(problems),
    })
}

/// `otherwise`: the key if no secret is usable, with their mistakes.
fn resolve<'a>(
    secrets: &[SecretRef],
    reference: &NormalizedReference,
    user: impl Fn(&SecretRef) -> Option<SecretUser<'a>>,
    lookup: impl Fn(&SecretRef) -> SecretLookup,
    otherwise: impl Fn(&str) -> PullKey,
) -> ResolvedKey {
    let mut credentials = Vec::new();
    let mut problems = Vec::new();
    for secret in secrets {
        match usable_credentials(secret, reference, user(secret), lookup(secret)) {
            Ok(found) => credentials.extend(found),
            Err(problem) => problems.push((secret, problem)),
        }
    }
    if credentials.is_empty() {
        let texts: Vec<_> = problems.iter().map(|(_, problem)| problem.text.as_str()).collect();
        let withheld = problems.iter().filter(|(_, problem)| problem.is_withheld);
        return ResolvedKey {
            key: otherwise(&texts.join("; ")),
            withheld: withheld.map(|(secret, _)| (*secret).clone()).collect(),
            details: problems.into_iter().map(|(_, problem)| problem.detail).collect(),
        };
    }
    let mut seen = std::collections::HashSet::new();
    credentials.retain(|credential| seen.insert(credential.clone()));
    ResolvedKey { key: PullKey::Credentials { credentials }, details: Vec::new(), withheld: Vec::new() }
}

/// What one secret has for the image, never empty; or why it has nothing.
fn usable_credentials(
    secret: &SecretRef,
    reference: &NormalizedReference,
    user: Option<SecretUser<'_>>,
    found: SecretLookup,
) -> Result<Vec<RegistryCredential>, SecretProblem> {
    let found = allowed_secret(secret, user, found)?;
    let config = found
        .config
        .as_ref()
        .map_err(|error| SecretProblem::for_everyone(format!("secret {secret}: {error}")))?;
    let wildcards = match user {
        Some(_) => found.consent.check_wildcards(reference),
        None => Ok(true),
    };
    let allowed =
        if wildcards == Ok(true) { config.lookup(reference) } else { config.lookup_exact(reference) };
    let Lookup { credentials, broken } = allowed;
    if !credentials.is_empty() {
        return Ok(credentials);
    }
    if let Some(error) = broken.first() {
        return Err(SecretProblem {
            // The key of the entry may be a pattern, which is more helpful than the image's own registry.
            text: match error {
                SecretError::Entry { problem, .. } => {
                    format!("secret {secret}: the entry for {} {problem}", reference.registry())
                }
                other => format!("secret {secret}: {other}"),
            },
            detail: format!("secret {secret}: {error}"),
            is_withheld: false,
        });
    }
    let text = format!("secret {secret} has no entry for {}", reference.name());
    let mut detail = format!("{text}; it has {}", list_registries(&config.registries()));
    if user.is_none() {
        return Err(SecretProblem { text, detail, is_withheld: false });
    }
    match wildcards {
        Err(error) => detail = format!("{detail}; {error}"),
        Ok(false) if config.lookup(reference) != Lookup::default() => {
            let command = format!("kubectl prepull allow {secret} --host {}", reference.registry());
            detail = format!("{detail}; entries with * serve only the hosts that its owner names: {command}");
        }
        Ok(_) => {}
    }
    // The same whether or not a wildcard would match, so that hosts cannot be tried out.
    let text =
        format!("{text}; one with * in its host serves only the hosts in its annotation {ALLOW_HOSTS}");
    Err(SecretProblem { text, detail, is_withheld: false })
}

/// The secret, if it is there and its owner lets this one use it.
fn allowed_secret(
    secret: &SecretRef,
    user: Option<SecretUser<'_>>,
    found: SecretLookup,
) -> Result<Arc<FoundSecret>, SecretProblem> {
    let found = match (found, user) {
        (SecretLookup::Found(found), _) => found,
        (SecretLookup::Missing, None) => return Err(SecretProblem::for_everyone(missing_text(secret))),
        (SecretLookup::Missing, Some(user)) => {
            return Err(withheld_problem(secret, user, missing_text(secret)));
        }
        (SecretLookup::Forbidden(reason), _) => {
            // About the rights of cloudcore, whether or not there is such a Secret.
            let text = format!("secret {secret} may not be read by cloudcore-prepull: {reason}");
            return Err(SecretProblem::for_everyone(text));
        }
        (SecretLookup::Error(reason), user) => return Err(unreadable_problem(secret, user, &reason)),
    };
    if let Some(user) = user
        && let Err(refusal) = found.consent.check(user)
    {
        let remedy = match refusal {
            // The owner must correct the annotation first, as the refusal explains.
            ConsentRefusal::Malformed(_) => String::new(),
            ConsentRefusal::Unannotated | ConsentRefusal::Others(_) => {
                format!(": {}", allow_command(secret, user))
            }
        };
        return Err(withheld_problem(secret, user, format!("secret {secret}: {refusal}{remedy}")));
    }
    Ok(found)
}

fn missing_text(secret: &SecretRef) -> String {
    format!("secret {secret} does not exist")
}

/// One text for every mistake, for a reader who may not learn whether the Secret exists.
fn withheld_problem(secret: &SecretRef, user: SecretUser<'_>, detail: String) -> SecretProblem {
    let command = allow_command(secret, user);
    let text = format!("secret {secret} does not exist, or its owner has not allowed this use: {command}");
    SecretProblem { text, detail, is_withheld: true }
}

fn unreadable_problem(secret: &SecretRef, user: Option<SecretUser<'_>>, reason: &str) -> SecretProblem {
    let detail = format!("secret {secret} could not be read: {reason}");
    SecretProblem { text: unreadable_text(secret, user, reason), detail, is_withheld: false }
}

/// Why a secret could not be read, for everyone who may read the job. The API server's own error goes to the log,
/// since it may differ for a Secret that exists, such as one that it cannot decrypt.
pub fn unreadable_text(secret: &SecretRef, user: Option<SecretUser<'_>>, reason: &str) -> String {
    match user {
        None => format!("secret {secret} could not be read: {reason}"),
        Some(_) => {
            format!("secret {secret} could not be read; the reason is in the log of cloudcore-prepull")
        }
    }
}

/// The command with which the owner of a Secret allows its use, beside that of others.
fn allow_command(secret: &SecretRef, user: SecretUser<'_>) -> String {
    format!("kubectl prepull allow {secret} {user}")
}

/// The registries of a secret, as many as a person reads, and of each as much.
fn list_registries(registries: &[&str]) -> String {
    const LISTED: usize = 10;
    let listed = registries.iter().take(LISTED).map(|registry| abbreviate(registry)).collect::<Vec<_>>();
    let listed = listed.join(", ");
    match registries.len() {
        0 => "none at all".to_owned(),
        1..=LISTED => listed,
        count => format!("{listed} and {} more", count - LISTED),
    }
}
