//! References to Secrets.

use std::fmt;

use crate::abbreviate::abbreviate;
use crate::dns_name::{is_dns_label, is_dns_subdomain};

/// Namespace and name of a Secret, valid by Kubernetes' rules for names.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SecretRef {
    pub(super) namespace: String,
    pub(super) name: String,
}

/// Why a text is not the name of a Secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretRefError {
    /// The text does not have two parts.
    #[error("{0:?} is not a secret: write {{namespace}}/{{name}}")]
    Form(String),
    /// The part before the slash is not the name of a namespace.
    #[error(
        "{0:?} is not a namespace: it takes at most 63 lowercase letters, digits and dashes, a letter or digit at both ends"
    )]
    Namespace(String),
    /// The part after the slash is not the name of a Secret.
    #[error(
        "{0:?} is not the name of a secret: it takes at most 253 lowercase letters, digits, dashes and dots, a letter or digit at both ends of each part"
    )]
    Name(String),
}

impl SecretRef {
    /// Checks both parts against Kubernetes' rules for names.
    pub fn new(namespace: &str, name: &str) -> Result<Self, SecretRefError> {
        if !is_dns_label(namespace) {
            return Err(SecretRefError::Namespace(abbreviate(namespace)));
        }
        if !is_dns_subdomain(name) {
            return Err(SecretRefError::Name(abbreviate(name)));
        }
        Ok(Self { namespace: namespace.to_owned(), name: name.to_owned() })
    }

    /// Parses `{namespace}/{name}`.
    pub fn parse(text: &str) -> Result<Self, SecretRefError> {
        let (namespace, name) = text.split_once('/').ok_or_else(|| SecretRefError::Form(abbreviate(text)))?;
        Self::new(namespace, name)
    }

    /// Namespace of the Secret.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Name of the Secret within its namespace.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Display for SecretRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}
