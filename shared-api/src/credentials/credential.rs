//! A registry credential, and texts that must not be printed.

use std::fmt;

use serde::{Deserialize, Serialize};
use zeroize::{Zeroize, ZeroizeOnDrop};

/// A text that `Debug` never prints, and that wipes its own memory when dropped. That doesn't reach copies by other code: the JSON of a message, the strings of a gRPC call, TLS. It is serialised only in a message to the
/// node that needs it.
#[derive(Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize, Zeroize, ZeroizeOnDrop)]
#[serde(transparent)]
pub struct Sensitive(String);

impl Sensitive {
    /// Wraps a text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The plain text, for the call that needs it.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Whether the text is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Debug for Sensitive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "\"\"" } else { "<redacted>" })
    }
}

/// A credential for one registry, with the fields of CRI's `AuthConfig`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RegistryCredential {
    /// Key of the entry in the secret, such as `harbor.example/team`.
    pub server: String,
    /// User name. Empty if there is a token.
    #[serde(default, skip_serializing_if = "Sensitive::is_empty")]
    pub username: Sensitive,
    /// Password. Empty if there is a token.
    #[serde(default, skip_serializing_if = "Sensitive::is_empty")]
    pub password: Sensitive,
    /// OAuth2 refresh token, as `docker login` stores it.
    #[serde(default, skip_serializing_if = "Sensitive::is_empty")]
    pub identity_token: Sensitive,
    /// Bearer token for the registry itself.
    #[serde(default, skip_serializing_if = "Sensitive::is_empty")]
    pub registry_token: Sensitive,
}
