//! Authorization for a registry: a password, or a token that its token server gives for one.

mod challenge;
mod token;

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::HeaderValue;
use prepull_api::credentials::{RegistryCredential, Sensitive};
use ring::digest::{Context, SHA256};
use zeroize::Zeroizing;

pub(crate) use challenge::{Challenge, Scheme, parse};
pub(crate) use token::{Demand, fetch_token};

/// Most tokens that are kept, over all registries, repositories and credentials.
const MAX_TOKENS: usize = 512;
/// A token is replaced so long before its end, so that it does not end on the way.
const MARGIN: Duration = Duration::from_secs(10);

/// What a token is for. It is shown to the endpoint that asked for it, and to no other.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct TokenKey {
    /// Scheme, host and port.
    pub(crate) origin: String,
    pub(crate) repository: String,
    pub(crate) credential: [u8; 32],
}

/// Tokens that are still valid, in memory only.
#[derive(Default)]
pub(crate) struct TokenCache(Mutex<HashMap<TokenKey, RegistryToken>>);

#[derive(Clone)]
pub(crate) struct RegistryToken {
    /// The whole value of `Authorization`.
    pub(crate) authorization: HeaderValue,
    /// Without an end it is used until the registry refuses it.
    pub(crate) until: Option<Instant>,
}

impl TokenCache {
    pub(crate) fn get(&self, key: &TokenKey) -> Option<HeaderValue> {
        let tokens = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let token = tokens.get(key)?;
        let valid = token.until.is_none_or(|until| Instant::now() + MARGIN < until);
        valid.then(|| token.authorization.clone())
    }

    pub(crate) fn put(&self, key: TokenKey, token: RegistryToken) {
        let mut tokens = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if tokens.len() >= MAX_TOKENS {
            let now = Instant::now();
            tokens.retain(|_, token| token.until.is_some_and(|until| now < until));
        }
        if tokens.len() >= MAX_TOKENS {
            tokens.clear();
        }
        tokens.insert(key, token);
    }
}

/// Distinguishes credentials without keeping them.
pub(crate) fn fingerprint(credential: Option<&RegistryCredential>) -> [u8; 32] {
    let mut context = Context::new(&SHA256);
    if let Some(RegistryCredential { server: _, username, password, identity_token, registry_token }) =
        credential
    {
        for part in [username, password, identity_token, registry_token] {
            context.update(&part.expose().len().to_le_bytes());
            context.update(part.expose().as_bytes());
        }
    }
    let mut key = [0; 32];
    key.copy_from_slice(context.finish().as_ref());
    key
}

/// `Basic` with user and password. `None` if one of them is missing.
pub(crate) fn basic_auth(credential: &RegistryCredential) -> Option<HeaderValue> {
    let RegistryCredential { username, password, .. } = credential;
    if username.is_empty() || password.is_empty() {
        return None;
    }
    let plain = Zeroizing::new(format!("{}:{}", username.expose(), password.expose()));
    secret_header(&Zeroizing::new(format!("Basic {}", STANDARD.encode(plain.as_bytes()))))
}

/// `Bearer` with a token. `None` if it cannot be sent.
pub(crate) fn bearer_auth(token: &Sensitive) -> Option<HeaderValue> {
    secret_header(&Zeroizing::new(format!("Bearer {}", token.expose())))
}

fn secret_header(text: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(text).ok()?;
    value.set_sensitive(true);
    Some(value)
}
