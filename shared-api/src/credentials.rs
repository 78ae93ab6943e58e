//! What a registry secret holds, and which entries match a reference.

use std::fmt;

use serde::{Deserialize, Serialize};
use zeroize::{Zeroize, ZeroizeOnDrop};

mod config;
mod pattern;
#[cfg(test)]
mod tests;

pub use config::{EntryProblem, Lookup, RegistryConfig, SecretError};
pub use pattern::{PatternError, RegistryPattern, Specificity};

/// A text that is wiped when dropped and never printed. It is serialised only as part of a message to the
/// node that needs it.
#[derive(Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize, Zeroize, ZeroizeOnDrop)]
#[serde(transparent)]
pub struct Sensitive(String);

impl Sensitive {
    /// Takes a text into custody.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text itself, for the one call that needs it.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Debug for Sensitive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "\"\"" } else { "<redacted>" })
    }
}

/// One entry of a registry secret, in the form of CRI's AuthConfig.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RegistryCredential {
    /// The entry's key in the secret, such as `harbor.example/team`.
    pub server: String,
    /// Empty with a token.
    #[serde(default, skip_serializing_if = "Sensitive::is_empty")]
    pub username: Sensitive,
    /// Empty with a token.
    #[serde(default, skip_serializing_if = "Sensitive::is_empty")]
    pub password: Sensitive,
    /// An OAuth2 refresh token, as `docker login` stores it.
    #[serde(default, skip_serializing_if = "Sensitive::is_empty")]
    pub identity_token: Sensitive,
    /// A bearer token for the registry itself.
    #[serde(default, skip_serializing_if = "Sensitive::is_empty")]
    pub registry_token: Sensitive,
}
