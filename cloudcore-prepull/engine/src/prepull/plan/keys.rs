//! The registry credentials that an image is pulled with, from the Secrets that are named for it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Secret;
use prepull_api::credentials::{Lookup, RegistryConfig, RegistryCredential, SecretError};
use prepull_api::image::NormalizedReference;
use prepull_api::overriders::SecretRef;
use prepull_api::wire::{Key, truncate_reason};

/// The result of reading a Secret. Cheap to clone: a Secret is parsed once, however many nodes need it.
#[derive(Clone)]
pub enum SecretLookup {
    /// The Secret exists; it may hold no usable credentials.
    Found(Arc<Result<RegistryConfig, SecretError>>),
    /// There is no such Secret.
    Missing,
    /// cloudcore may not read it, for this reason of the API server.
    Forbidden(String),
    /// It could not be read, for this reason of the client.
    Error(String),
}

impl SecretLookup {
    /// Reads a secret's type and data.
    pub fn found(type_: &str, data: &BTreeMap<String, Vec<u8>>) -> Self {
        Self::Found(Arc::new(RegistryConfig::from_secret(type_, data)))
    }

    /// Reads a Secret object. `stringData`, which only a file can have, wins over `data`, as in the API server.
    pub fn from_secret(secret: &Secret) -> Self {
        let mut data: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        data.extend(secret.data.iter().flatten().map(|(key, value)| (key.clone(), value.0.clone())));
        data.extend(
            secret.string_data.iter().flatten().map(|(key, text)| (key.clone(), text.clone().into_bytes())),
        );
        // The API server's default for a secret without a type.
        Self::found(secret.type_.as_deref().unwrap_or("Opaque"), &data)
    }
}

/// Shows the registries only: credentials must not get into a log.
impl fmt::Debug for SecretLookup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Found(config) => match config.as_ref() {
                Ok(config) => f.debug_tuple("Found").field(&config.registries()).finish(),
                Err(error) => f.debug_tuple("Found").field(error).finish(),
            },
            Self::Missing => f.write_str("Missing"),
            Self::Forbidden(reason) => f.debug_tuple("Forbidden").field(reason).finish(),
            Self::Error(reason) => f.debug_tuple("Error").field(reason).finish(),
        }
    }
}

/// Resolves the key for one image of an ImagePrePullJob. It is anonymous only if no secret is named.
///
/// With several secrets (an overrider added one), what those hold that can be used is tried in their order; the
/// image fails only where none has anything, and then the reason says what is wrong with each.
pub fn resolve_key(
    secrets: &[SecretRef],
    reference: &NormalizedReference,
    lookup: impl Fn(&SecretRef) -> SecretLookup,
) -> Key {
    match collect(secrets, reference, lookup) {
        Ok(credentials) => Key::Credentials { credentials },
        Err(reasons) if reasons.is_empty() => Key::anonymous(),
        Err(reasons) => Key::Unavailable { reason: truncate_reason(&reasons.join("; ")) },
    }
}

/// The key for one image of a NodeImage, whose `pullSecrets` are what a pod's `imagePullSecrets` are: a list for all of
/// its images. Those that have nothing for this one are passed over, and the pull is tried all the same; what is wrong
/// with them is said should the registry refuse.
pub fn resolve_pull_secrets(
    secrets: &[SecretRef],
    reference: &NormalizedReference,
    lookup: impl Fn(&SecretRef) -> SecretLookup,
) -> Key {
    match collect(secrets, reference, lookup) {
        Ok(credentials) => Key::Credentials { credentials },
        Err(reasons) => Key::Anonymous { note: truncate_reason(&reasons.join("; ")) },
    }
}

/// What the secrets have for the image, never empty; or what is wrong with each.
fn collect(
    secrets: &[SecretRef],
    reference: &NormalizedReference,
    lookup: impl Fn(&SecretRef) -> SecretLookup,
) -> Result<Vec<RegistryCredential>, Vec<String>> {
    let mut credentials = Vec::new();
    let mut reasons = Vec::new();
    for secret in secrets {
        match usable(secret, reference, lookup(secret)) {
            Ok(found) => credentials.extend(found),
            Err(reason) => reasons.push(reason),
        }
    }
    if credentials.is_empty() {
        return Err(reasons);
    }
    let mut seen = std::collections::HashSet::new();
    credentials.retain(|credential| seen.insert(credential.clone()));
    Ok(credentials)
}

/// What one secret has for the image, never empty; or why it has nothing.
fn usable(
    secret: &SecretRef,
    reference: &NormalizedReference,
    found: SecretLookup,
) -> Result<Vec<RegistryCredential>, String> {
    let config = match found {
        SecretLookup::Found(config) => config,
        SecretLookup::Missing => return Err(format!("secret {secret} does not exist")),
        SecretLookup::Forbidden(reason) => {
            return Err(format!("secret {secret} may not be read by cloudcore-prepull: {reason}"));
        }
        SecretLookup::Error(reason) => return Err(format!("secret {secret} could not be read: {reason}")),
    };
    let config = config.as_ref().as_ref().map_err(|error| format!("secret {secret}: {error}"))?;
    let Lookup { credentials, broken } = config.lookup(reference);
    if !credentials.is_empty() {
        return Ok(credentials);
    }
    if let Some(error) = broken.first() {
        return Err(format!("secret {secret}: {error}"));
    }
    Err(format!(
        "secret {secret} has no entry for {}; it has {}",
        reference.name(),
        listed(&config.registries())
    ))
}

/// The registries of a secret, as many as a person reads.
fn listed(registries: &[String]) -> String {
    const LISTED: usize = 10;
    match registries.len() {
        0 => "none at all".to_owned(),
        1..=LISTED => registries.join(", "),
        count => format!("{} and {} more", registries[..LISTED].join(", "), count - LISTED),
    }
}
