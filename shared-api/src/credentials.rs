//! The contents of a registry secret, and the entries that match an image.

mod config;
mod credential;
mod pattern;
#[cfg(test)]
mod tests;

pub use config::{EntryProblem, Lookup, RegistryConfig, SecretError};
pub use credential::{RegistryCredential, Sensitive};
pub use pattern::{PatternError, RegistryPattern};
