//! The contents of a registry secret, or of Docker's config.json.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde_json::{Map, Value};
use zeroize::Zeroize;

use super::pattern::RegistryPattern;
use super::{RegistryCredential, Sensitive};
use crate::image::{NormalizedReference, shown};

/// The types that the kubelet takes, each with its key.
const TYPES: [(&str, &str); 2] =
    [("kubernetes.io/dockerconfigjson", ".dockerconfigjson"), ("kubernetes.io/dockercfg", ".dockercfg")];

/// The entries of one secret. An entry that is malformed is kept as such: it fails the images that need it and
/// no others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegistryConfig {
    entries: Vec<Entry>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    /// As the secret has it.
    key: String,
    pattern: RegistryPattern,
    credential: Result<RegistryCredential, EntryProblem>,
}

/// What a config has for one image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lookup {
    /// To be tried in this order: the most specific first.
    pub credentials: Vec<RegistryCredential>,
    /// Entries that match and cannot be used.
    pub broken: Vec<SecretError>,
}

/// What is wrong with a secret. Never quotes its contents, apart from the names of registries.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    /// Of a type that holds no registry credentials.
    #[error(
        "type {0:?} holds no registry credentials: it must be kubernetes.io/dockerconfigjson or kubernetes.io/dockercfg (kubectl create secret docker-registry makes one)"
    )]
    Type(String),
    /// The type's key is absent.
    #[error("the key {0} is missing")]
    Key(&'static str),
    /// The value is no JSON.
    #[error("{key} is not JSON: {problem} at line {line} column {column}")]
    Json {
        /// The key in the secret, or the kind of file.
        key: &'static str,
        /// In serde's words, without the text.
        problem: &'static str,
        /// From 1.
        line: usize,
        /// From 1.
        column: usize,
    },
    /// The value is JSON of another shape.
    #[error("{key} must be a JSON object{within}")]
    Shape {
        /// The key in the secret, or the kind of file.
        key: &'static str,
        /// Which object is meant.
        within: &'static str,
    },
    /// One entry cannot be used.
    #[error("the entry for {registry} {problem}")]
    Entry {
        /// The entry's key.
        registry: String,
        /// What is wrong with it.
        problem: EntryProblem,
    },
}

/// Why one entry cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EntryProblem {
    /// Not an object of texts.
    #[error("must be a JSON object whose fields are strings")]
    Shape,
    /// `auth` cannot be decoded.
    #[error("has an auth that is not base64")]
    NotBase64,
    /// `auth` decodes to bytes that are no text.
    #[error("has an auth that is not UTF-8 once decoded")]
    NotText,
    /// `auth` decodes to a text without a colon.
    #[error("has an auth without a colon between user and password once decoded")]
    NoColon,
    /// There is a password without a user.
    #[error("has a password and no username")]
    NoUser,
    /// Neither user nor password, where there can be nothing else.
    #[error("has neither username nor password")]
    NoLogin,
    /// Neither user and password nor a token: as Docker leaves it when a credential helper has them.
    #[error(
        "has neither auth, nor username and password, nor a token (what a credential helper stores is not read)"
    )]
    Empty,
}

impl RegistryConfig {
    /// Reads a Secret of one of the two registry types.
    pub fn from_secret(type_: &str, data: &BTreeMap<String, Vec<u8>>) -> Result<Self, SecretError> {
        let Some((_, key)) = TYPES.into_iter().find(|(known, _)| *known == type_) else {
            return Err(SecretError::Type(shown(type_)));
        };
        let bytes = data.get(key).ok_or(SecretError::Key(key))?;
        let object = json_object(key, bytes)?;
        if key == ".dockercfg" { Ok(Self::from_entries(object)) } else { Self::from_auths(key, object) }
    }

    /// Reads Docker's `config.json`.
    pub fn from_docker_config(bytes: &[u8]) -> Result<Self, SecretError> {
        let key = "config.json";
        Self::from_auths(key, json_object(key, bytes)?)
    }

    /// From users and passwords by registry, as a credential provider of the kubelet returns them.
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
            config.entries.push(Entry { key, pattern, credential });
        }
        config.sort();
        config
    }

    /// Has the entries of another one as well; of two that match an image equally well, the own one comes first.
    pub fn extend(&mut self, other: Self) {
        self.entries.extend(other.entries);
        self.sort();
    }

    fn from_auths(key: &'static str, mut object: Map<String, Value>) -> Result<Self, SecretError> {
        match take(&mut object, "auths") {
            Some(Value::Object(auths)) => Ok(Self::from_entries(auths)),
            _ => Err(SecretError::Shape { key, within: " with an object named auths in it" }),
        }
    }

    fn from_entries(entries: Map<String, Value>) -> Self {
        let entries = entries.into_iter().filter_map(|(key, value)| {
            // A key that is no URL is for no image; the kubelet ignores it as well.
            let pattern = RegistryPattern::parse(&key).ok()?;
            let credential = credential(&key, value);
            Some(Entry { key, pattern, credential })
        });
        let mut config = Self { entries: entries.collect() };
        config.sort();
        config
    }

    /// The sort is stable and JSON's keys come in their own order: the result does not depend on chance.
    fn sort(&mut self) {
        self.entries.sort_by_key(|entry| std::cmp::Reverse(entry.pattern.specificity()));
    }

    /// All credentials for an image, the most specific first. Only where no entry matches docker.io itself does
    /// Docker Hub's key of old, `https://index.docker.io/v1/`, count for it.
    pub fn matching(&self, reference: &NormalizedReference) -> Vec<RegistryCredential> {
        self.lookup(reference).credentials
    }

    /// All credentials for an image, as [`Self::matching`], and the matching entries that cannot be used.
    pub fn lookup(&self, reference: &NormalizedReference) -> Lookup {
        let mut found: Vec<&Entry> = self.entries.iter().filter(|e| e.pattern.matches(reference)).collect();
        if found.is_empty() && reference.registry() == "docker.io" {
            found = self.entries.iter().filter(|e| e.pattern.is_legacy_docker_hub()).collect();
        }
        let mut lookup = Lookup::default();
        for Entry { key, pattern: _, credential } in found {
            match credential {
                Ok(credential) => lookup.credentials.push(credential.clone()),
                Err(problem) => {
                    lookup.broken.push(SecretError::Entry { registry: shown(key), problem: *problem });
                }
            }
        }
        lookup
    }

    /// The keys of all entries, as the secret has them, in the order of the alphabet.
    pub fn registries(&self) -> Vec<String> {
        let mut keys: Vec<_> = self.entries.iter().map(|entry| entry.key.clone()).collect();
        keys.sort();
        keys
    }
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
            // Not the error's own text: it may quote a part of the secret.
            problem: if error.is_eof() { "it ends too early" } else { "a syntax error" },
            line: error.line(),
            column: error.column(),
        }),
    }
}

/// Go's JSON, which the kubelet and Docker read with, takes a field's name in any case.
fn take(object: &mut Map<String, Value>, field: &str) -> Option<Value> {
    let key = object.keys().find(|key| key.eq_ignore_ascii_case(field))?.clone();
    object.remove(&key)
}

fn credential(server: &str, value: Value) -> Result<RegistryCredential, EntryProblem> {
    let mut value = value;
    let credential = match &mut value {
        Value::Object(object) => read_entry(server, object),
        _ => Err(EntryProblem::Shape),
    };
    wipe(&mut value);
    credential
}

fn read_entry(server: &str, object: &mut Map<String, Value>) -> Result<RegistryCredential, EntryProblem> {
    let mut text = |field| match take(object, field) {
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
        // As in Docker, the token replaces the password; `auth` has only a user then, and a runtime that saw the
        // user would send it with an empty password.
        (username, password) = (Sensitive::default(), Sensitive::default());
    } else if !auth.is_empty() {
        // As in the kubelet, `auth` wins over the two fields.
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

/// base64(user:password), padded or not; line breaks are skipped, as Go does. The URL-safe alphabet, which the
/// kubelet refuses, is taken too: it has no second meaning.
fn decode_auth(auth: &Sensitive) -> Result<(Sensitive, Sensitive), EntryProblem> {
    const LENIENT: GeneralPurposeConfig = GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true);
    const STANDARD: GeneralPurpose = GeneralPurpose::new(&base64::alphabet::STANDARD, LENIENT);

    let mut compact: String = auth
        .expose()
        .chars()
        .filter(|c| !c.is_ascii_whitespace())
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

/// Wipes the texts of a JSON value that is about to be dropped.
fn wipe(value: &mut Value) {
    match value {
        Value::String(text) => text.zeroize(),
        Value::Array(values) => values.iter_mut().for_each(wipe),
        Value::Object(object) => object.values_mut().for_each(wipe),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}
