//! The name of a Secret, by Kubernetes' rules for names.

use std::fmt;

use crate::image::shown;

/// A Secret, `{namespace}/{name}`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SecretRef {
    pub(super) namespace: String,
    pub(super) name: String,
}

/// Why a text names no secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretRefError {
    /// Not two parts.
    #[error("{0:?} is not a secret: write {{namespace}}/{{name}}")]
    Form(String),
    /// The first part.
    #[error(
        "{0:?} is not a namespace: it takes at most 63 lowercase letters, digits and dashes, a letter or digit at both ends"
    )]
    Namespace(String),
    /// The second part.
    #[error(
        "{0:?} is not the name of a secret: it takes at most 253 lowercase letters, digits, dashes and dots, a letter or digit at both ends of each part"
    )]
    Name(String),
}

impl SecretRef {
    /// Both parts by Kubernetes' rules for names.
    pub fn new(namespace: &str, name: &str) -> Result<Self, SecretRefError> {
        if !is_dns_label(namespace) {
            return Err(SecretRefError::Namespace(shown(namespace)));
        }
        if !is_dns_subdomain(name) {
            return Err(SecretRefError::Name(shown(name)));
        }
        Ok(Self { namespace: namespace.to_owned(), name: name.to_owned() })
    }

    /// Reads `{namespace}/{name}`.
    pub fn parse(text: &str) -> Result<Self, SecretRefError> {
        let (namespace, name) = text.split_once('/').ok_or_else(|| SecretRefError::Form(shown(text)))?;
        Self::new(namespace, name)
    }

    /// The namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The name within the namespace.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Display for SecretRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl std::str::FromStr for SecretRef {
    type Err = SecretRefError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text)
    }
}

/// A namespace's name, RFC 1123: at most 63 lowercase letters, digits and dashes.
fn is_dns_label(text: &str) -> bool {
    let alnum = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    text.len() <= 63
        && alnum(text.bytes().next())
        && alnum(text.bytes().last())
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

/// An object's name, RFC 1123: labels joined by dots, at most 253 bytes. Kubernetes bounds the whole and not
/// each label.
pub(crate) fn is_dns_subdomain(text: &str) -> bool {
    let alnum = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    text.len() <= 253
        && text.split('.').all(|label| {
            alnum(label.bytes().next())
                && alnum(label.bytes().last())
                && label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        })
}
