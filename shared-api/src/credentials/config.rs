//! The entries of a registry secret, or of Docker's `config.json`.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde_json::{Map, Value};
use zeroize::Zeroize;

use super::credential::{RegistryCredential, Sensitive};
use super::pattern::RegistryPattern;
use crate::abbreviate::abbreviate;
use crate::image::NormalizedReference;

/// The types of Secret that the kubelet accepts, each with the key that holds the credentials.
const SECRET_TYPES: [(&str, &str); 2] =
    [("kubernetes.io/dockerconfigjson", ".dockerconfigjson"), ("kubernetes.io/dockercfg", ".dockercfg")];

/// The most bytes of a Secret's credentials that are parsed: a thousand logins with the tokens of clouds. A Secret may have
/// 1 MiB, whose smallest entries take 40 MiB once parsed, and each job may name 16 of them.
const MAX_BYTES: usize = 256 * 1024;
/// The most entries of a Secret: each dispatch to a node compares its images with all of them.
const MAX_ENTRIES: usize = 1024;

/// The entries of one or more registry secrets. A malformed entry is kept as such, so that it fails only the images
/// that need it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegistryConfig {
    entries: Vec<SecretEntry>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct SecretEntry {
    /// Key of the entry, as written in the secret.
    key: String,
    pattern: RegistryPattern,
    credential: Result<RegistryCredential, EntryProblem>,
}

/// The entries of a [`RegistryConfig`] that match one image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lookup {
    /// Usable credentials, in the order to try them: the most specific first.
    pub credentials: Vec<RegistryCredential>,
    /// Matching entries that cannot be used.
    pub broken: Vec<SecretError>,
}

/// Why a secret or one of its entries cannot be used. Quotes only names of registries from it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    /// The Secret has a type that holds no registry credentials.
    #[error(
        "type {0:?} holds no registry credentials: it must be kubernetes.io/dockerconfigjson or kubernetes.io/dockercfg (kubectl create secret docker-registry makes one)"
    )]
    Type(String),
    /// The key that the type requires is missing.
    #[error("the key {0} is missing")]
    Key(&'static str),
    /// The value is not JSON.
    #[error("{key} is not JSON: {problem} at line {line} column {column}")]
    Json {
        /// The key in the secret, or the kind of file.
        key: &'static str,
        /// Kind of the syntax error, without any of the text.
        problem: &'static str,
        /// Line of the error, counted from 1.
        line: usize,
        /// Column of the error, counted from 1; 0 in an empty line.
        column: usize,
    },
    /// The value is JSON, but not an object of the required shape.
    #[error("{key} must be a JSON object{within}")]
    Shape {
        /// The key in the secret, or the kind of file.
        key: &'static str,
        /// What is required of the object, as the end of the sentence.
        within: &'static str,
    },
    /// The value is larger than any that registries need.
    #[error("{key} has {count} {what}; at most {most} are accepted: split it into several Secrets")]
    TooLarge {
        /// The key in the secret.
        key: &'static str,
        /// What there is too much of.
        what: &'static str,
        /// How much there is of it.
        count: usize,
        /// How much there may be.
        most: usize,
    },
    /// One entry cannot be used.
    #[error("the entry for {registry} {problem}")]
    Entry {
        /// Key of the entry.
        registry: String,
        /// Why the entry cannot be used.
        problem: EntryProblem,
    },
}

/// Why one entry cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EntryProblem {
    /// The entry is not an object of strings.
    #[error("must be a JSON object whose fields are strings")]
    Shape,
    /// `auth` cannot be decoded.
    #[error("has an auth that is not base64")]
    NotBase64,
    /// `auth` decodes to bytes that are not UTF-8.
    #[error("has an auth that is not UTF-8 once decoded")]
    NotText,
    /// `auth` decodes to a text without a colon.
    #[error("has an auth without a colon between user and password once decoded")]
    NoColon,
    /// The entry has a password and no username.
    #[error("has a password and no username")]
    NoUser,
    /// The entry has neither username nor password, and its source cannot provide a token.
    #[error("has neither username nor password")]
    NoLogin,
    /// The entry has no credential at all. Docker leaves it so if a credential helper stores the credential.
    #[error(
        "has neither auth, nor username and password, nor a token (what a credential helper stores is not read)"
    )]
    Empty,
}

impl RegistryConfig {
    /// Reads a Secret of type `kubernetes.io/dockerconfigjson` or `kubernetes.io/dockercfg`.
    pub fn from_secret(type_: &str, data: &BTreeMap<String, Vec<u8>>) -> Result<Self, SecretError> {
        let Some((_, key)) = SECRET_TYPES.into_iter().find(|(known, _)| *known == type_) else {
            return Err(SecretError::Type(abbreviate(type_)));
        };
        let bytes = data.get(key).ok_or(SecretError::Key(key))?;
        check_size(key, "bytes", bytes.len(), MAX_BYTES)?;
        let object = json_object(key, bytes)?;
        let config =
            if key == ".dockercfg" { Self::from_entries(object) } else { Self::from_auths(key, object)? };
        check_size(key, "entries", config.entries.len(), MAX_ENTRIES)?;
        Ok(config)
    }

    /// Reads Docker's `config.json`.
    pub fn from_docker_config(bytes: &[u8]) -> Result<Self, SecretError> {
        let key = "config.json";
        Self::from_auths(key, json_object(key, bytes)?)
    }

    /// Builds a config from registry, username and password each, as the kubelet's credential providers return them.
    /// A registry that is not a pattern is left out.
    pub fn from_logins(logins: impl IntoIterator<Item = (String, Sensitive, Sensitive)>) -> Self {
        let mut config = Self { entries: Vec::new() };
        for (key, username, password) in logins {
            let Ok(pattern) = RegistryPattern::parse(&key) else { continue };
            let credential = match (username.is_empty(), password.is_empty()) {
                (true, true) => Err(EntryProblem::NoLogin),
                (true, false) => Err(EntryProblem::NoUser),
                (false, _) => {
                    Ok(RegistryCredential { server: key.clone(), username, password, ..Default::default() })
                }
            };
            config.entries.push(SecretEntry { key, pattern, credential });
        }
        config
    }

    /// Adds the entries of another config. Of two equally specific entries, the one that was there first stays first.
    pub fn extend(&mut self, other: Self) {
        self.entries.extend(other.entries);
    }

    fn from_auths(key: &'static str, mut object: Map<String, Value>) -> Result<Self, SecretError> {
        match remove_field(&mut object, "auths") {
            Some(Value::Object(auths)) => Ok(Self::from_entries(auths)),
            _ => Err(SecretError::Shape { key, within: " with an object named auths in it" }),
        }
    }

    fn from_entries(entries: Map<String, Value>) -> Self {
        let entries = entries.into_iter().filter_map(|(key, value)| {
            // The kubelet ignores a key that is not a registry as well.
            let pattern = RegistryPattern::parse(&key).ok()?;
            let credential = parse_entry(&key, value);
            Some(SecretEntry { key, pattern, credential })
        });
        Self { entries: entries.collect() }
    }

    /// Usable credentials for an image, in the order of [`RegistryPattern::select`].
    pub fn credentials_for(&self, reference: &NormalizedReference) -> Vec<RegistryCredential> {
        self.lookup(reference).credentials
    }

    /// Usable credentials for an image, as [`Self::credentials_for`], and the matching entries that cannot be used.
    pub fn lookup(&self, reference: &NormalizedReference) -> Lookup {
        Self::lookup_among(&self.entries.iter().collect::<Vec<_>>(), reference)
    }

    /// The same without the entries for wildcard hosts.
    pub fn lookup_exact(&self, reference: &NormalizedReference) -> Lookup {
        let exact = self.entries.iter().filter(|entry| !entry.pattern.has_wildcard());
        Self::lookup_among(&exact.collect::<Vec<_>>(), reference)
    }

    fn lookup_among(entries: &[&SecretEntry], reference: &NormalizedReference) -> Lookup {
        let mut lookup = Lookup::default();
        let found = RegistryPattern::select(entries, |entry| &entry.pattern, reference);
        for SecretEntry { key, pattern: _, credential } in found {
            match credential {
                Ok(credential) => lookup.credentials.push(credential.clone()),
                Err(problem) => {
                    lookup.broken.push(SecretError::Entry { registry: abbreviate(key), problem: *problem });
                }
            }
        }
        lookup
    }

    /// Keys of all entries as written in the secret, sorted.
    pub fn registries(&self) -> Vec<&str> {
        let mut keys: Vec<_> = self.entries.iter().map(|entry| entry.key.as_str()).collect();
        keys.sort_unstable();
        keys
    }
}

fn check_size(key: &'static str, what: &'static str, count: usize, most: usize) -> Result<(), SecretError> {
    if count <= most { Ok(()) } else { Err(SecretError::TooLarge { key, what, count, most }) }
}

fn json_object(key: &'static str, bytes: &[u8]) -> Result<Map<String, Value>, SecretError> {
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(mut other) => {
            wipe(&mut other);
            Err(SecretError::Shape { key, within: "" })
        }
        Err(error) => Err(SecretError::Json {
            key,
            // The error's own text may quote a part of the secret.
            problem: if error.is_eof() { "it ends too early" } else { "a syntax error" },
            line: error.line(),
            column: error.column(),
        }),
    }
}

/// Removes a field by its name in any case: the kubelet and Docker read it with Go's JSON, which ignores case.
fn remove_field(object: &mut Map<String, Value>, field: &str) -> Option<Value> {
    let key = object.keys().find(|key| key.eq_ignore_ascii_case(field))?.clone();
    object.remove(&key)
}

fn parse_entry(server: &str, mut value: Value) -> Result<RegistryCredential, EntryProblem> {
    let credential = match &mut value {
        Value::Object(object) => parse_entry_fields(server, object),
        _ => Err(EntryProblem::Shape),
    };
    wipe(&mut value);
    credential
}

fn parse_entry_fields(
    server: &str,
    object: &mut Map<String, Value>,
) -> Result<RegistryCredential, EntryProblem> {
    let mut text = |field| match remove_field(object, field) {
        Some(Value::String(text)) => Ok(Sensitive::new(text)),
        None | Some(Value::Null) => Ok(Sensitive::default()),
        Some(mut other) => {
            wipe(&mut other);
            Err(EntryProblem::Shape)
        }
    };
    let (mut username, mut password) = (text("username")?, text("password")?);
    let (auth, identity_token, registry_token) =
        (text("auth")?, text("identitytoken")?, text("registrytoken")?);
    if !identity_token.is_empty() {
        // As in Docker, the token replaces the password. `auth` then has only a user, and a runtime that saw the user
        // would send it with an empty password.
        (username, password) = (Sensitive::default(), Sensitive::default());
    } else if !auth.is_empty() {
        // As in the kubelet, `auth` takes precedence over the two fields.
        (username, password) = decode_auth(&auth)?;
    }
    if username.is_empty() && !password.is_empty() {
        return Err(EntryProblem::NoUser);
    }
    if username.is_empty() && identity_token.is_empty() && registry_token.is_empty() {
        return Err(EntryProblem::Empty);
    }
    Ok(RegistryCredential { server: server.to_owned(), username, password, identity_token, registry_token })
}

/// Decodes base64 of `user:password`, padded or not; skips line breaks and no other white space, as Go does. Accepts the
/// URL-safe alphabet as well, which the kubelet refuses: it is not ambiguous.
fn decode_auth(auth: &Sensitive) -> Result<(Sensitive, Sensitive), EntryProblem> {
    const LENIENT: GeneralPurposeConfig = GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true);
    const STANDARD: GeneralPurpose = GeneralPurpose::new(&base64::alphabet::STANDARD, LENIENT);

    let mut compact: String = auth
        .expose()
        .chars()
        .filter(|c| !matches!(c, '\r' | '\n'))
        .map(|c| match c {
            '-' => '+',
            '_' => '/',
            c => c,
        })
        .collect();
    let decoded = STANDARD.decode(&compact);
    compact.zeroize();
    let decoded = decoded.map_err(|_| EntryProblem::NotBase64)?;
    let text = match String::from_utf8(decoded) {
        Ok(text) => Sensitive::new(text),
        Err(error) => {
            error.into_bytes().zeroize();
            return Err(EntryProblem::NotText);
        }
    };
    let (username, password) = text.expose().split_once(':').ok_or(EntryProblem::NoColon)?;
    Ok((Sensitive::new(username), Sensitive::new(password)))
}

/// Wipes the strings of a JSON value that is about to be dropped.
fn wipe(value: &mut Value) {
    match value {
        Value::String(text) => text.zeroize(),
        Value::Array(values) => values.iter_mut().for_each(wipe),
        Value::Object(object) => object.values_mut().for_each(wipe),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}
