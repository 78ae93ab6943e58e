//! The contents of a registry secret, the entries that match an image, and who may use them.

mod config;
mod consent;
mod credential;
mod pattern;
#[cfg(test)]
mod tests;

pub use config::{EntryProblem, Lookup, RegistryConfig, SecretError};
pub use consent::{ALLOW, ALLOW_HOSTS, Consent, ConsentError, ConsentRefusal, SecretUser};
pub use credential::{RegistryCredential, Sensitive};
pub use pattern::{PatternError, RegistryPattern};
