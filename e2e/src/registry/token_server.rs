//! A token server for registries with OAuth2: <https://distribution.github.io/distribution/spec/auth/oauth/>.
//!
//! It has one user and accepts only that user's refresh token, which a Docker config calls `identitytoken`, and a
//! password if one is given. It rejects anonymous requests.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use rcgen::{CertificateParams, KeyPair};
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::place::Place;

const ISSUER: &str = "e2e-tokens";
const SERVICE: &str = "e2e-registry";
/// Lifetime of an access token, longer than any test.
const LIFE_SECONDS: i64 = 600;

/// A request for a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenGrant {
    /// Grant type, `refresh_token` or `password`; empty for a GET.
    pub grant_type: String,
    /// Scope of the request, such as `repository:team/app:pull`.
    pub scope: String,
    /// Whether the server issued a token.
    pub given: bool,
}

/// A token server. Ends when dropped.
pub struct TokenServer {
    signer: Arc<TokenSigner>,
    addr: SocketAddr,
    certificate: PathBuf,
    grants: Arc<Mutex<Vec<TokenGrant>>>,
    serving: JoinHandle<()>,
    /// Keeps the file of the certificate.
    _place: Arc<Place>,
}

/// The issuer of tokens.
struct TokenSigner {
    user: String,
    refresh_token: String,
    password: Option<String>,
    key: EcdsaKeyPair,
    /// Certificate of the key in DER.
    certificate: Vec<u8>,
}

impl TokenServer {
    /// Starts a server for one user with this refresh token.
    pub async fn start(user: &str, refresh_token: &str) -> Result<Self> {
        Self::start_for(user, refresh_token, None).await
    }

    /// Starts a server that accepts a password of the user as well.
    pub async fn with_password(user: &str, refresh_token: &str, password: &str) -> Result<Self> {
        Self::start_for(user, refresh_token, Some(password)).await
    }

    async fn start_for(user: &str, refresh_token: &str, password: Option<&str>) -> Result<Self> {
        let place = Place::here()?;
        let pair = KeyPair::generate()?;
        let certificate = CertificateParams::new(Vec::new())?.self_signed(&pair)?;
        let file = place.new_dir("tokens")?.join("issuer.crt");
        std::fs::write(&file, certificate.pem())?;
        let random = SystemRandom::new();
        let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &pair.serialize_der(), &random);
        let key = key.ok().context("ring does not take rcgen's key")?;
        let signer = Arc::new(TokenSigner {
            user: user.to_owned(),
            refresh_token: refresh_token.to_owned(),
            password: password.map(str::to_owned),
            key,
            certificate: certificate.der().to_vec(),
        });

        let grants: Arc<Mutex<Vec<TokenGrant>>> = Arc::default();
        let answer = {
            let (signer, grants) = (Arc::clone(&signer), Arc::clone(&grants));
            move |form: String| {
                let (grant, answer) = signer.answer(&form);
                grants.lock().unwrap_or_else(PoisonError::into_inner).push(grant);
                std::future::ready(answer)
            }
        };
        let router = Router::new().route("/token", get(answer.clone()).post(answer));
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await?;
        let addr = listener.local_addr()?;
        let serving = tokio::spawn(async move {
            // Runs until it is aborted.
            let _ = axum::serve(listener, router).await;
        });
        Ok(Self { signer, addr, certificate: file, grants, serving, _place: place })
    }

    /// A token for pulling from a repository such as `team/app`, obtained for another client.
    pub fn pull_token(&self, repository: &str) -> Result<String> {
        self.signer.sign_token(&format!("repository:{repository}:pull")).context("cannot sign a token")
    }

    /// All requests so far.
    pub fn grants(&self) -> Vec<TokenGrant> {
        self.grants.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The `auth` section of the configuration of a registry that uses this server.
    pub(super) fn registry_auth(&self) -> Value {
        json!({"token": {
            "realm": format!("http://{}/token", self.addr),
            "service": SERVICE,
            "issuer": ISSUER,
            "rootcertbundle": self.certificate,
        }})
    }
}

impl Drop for TokenServer {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl TokenSigner {
    fn answer(&self, form: &str) -> (TokenGrant, (StatusCode, String)) {
        let form = fields(form);
        let field = |name: &str| form.get(name).cloned().unwrap_or_default();
        let (grant_type, scope) = (field("grant_type"), field("scope"));
        let knows = match grant_type.as_str() {
            "refresh_token" => field("refresh_token") == self.refresh_token,
            "password" => field("username") == self.user && Some(field("password")) == self.password,
            _ => false,
        };
        let token = if knows { self.sign_token(&scope) } else { None };
        let grant = TokenGrant { grant_type, scope, given: token.is_some() };
        let answer = match token {
            Some(token) => {
                let body = json!({"access_token": token, "scope": grant.scope, "expires_in": LIFE_SECONDS});
                (StatusCode::OK, body.to_string())
            }
            None => (StatusCode::UNAUTHORIZED, json!({"error": "invalid_grant"}).to_string()),
        };
        (grant, answer)
    }

    /// Creates a JWT: <https://distribution.github.io/distribution/spec/auth/jwt/>.
    fn sign_token(&self, scope: &str) -> Option<String> {
        let (kind, rest) = scope.split_once(':')?;
        let (name, actions) = rest.rsplit_once(':')?;
        let now = jiff::Timestamp::now().as_second();
        let header = json!({"typ": "JWT", "alg": "ES256", "x5c": [STANDARD.encode(&self.certificate)]});
        let claims = json!({
            "iss": ISSUER, "aud": SERVICE, "sub": self.user, "jti": format!("{now}"),
            "iat": now, "nbf": now - 60, "exp": now + LIFE_SECONDS,
            "access": [{"type": kind, "name": name, "actions": actions.split(',').collect::<Vec<_>>()}],
        });
        let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let signed = format!("{}.{}", part(&header), part(&claims));
        let signature = self.key.sign(&SystemRandom::new(), signed.as_bytes()).ok()?;
        Some(format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature)))
    }
}

/// Parses `application/x-www-form-urlencoded`.
fn fields(form: &str) -> HashMap<String, String> {
    form.split('&')
        .filter_map(|pair| pair.split_once('='))
        .map(|(k, v)| (percent_decode(k), percent_decode(v)))
        .collect()
}

fn percent_decode(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let hex = tail.get(..2).filter(|_| *first == b'%').and_then(|hex| std::str::from_utf8(hex).ok());
        let escaped = hex.and_then(|hex| u8::from_str_radix(hex, 16).ok());
        bytes.push(escaped.unwrap_or(if *first == b'+' { b' ' } else { *first }));
        rest = if escaped.is_some() { &tail[2..] } else { tail };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_form_is_decoded() {
        let fields = fields("scope=repository%3Ateam%2Fapp%3Apull&x=a+b%&grant_type=refresh_token");
        assert_eq!(fields["scope"], "repository:team/app:pull");
        assert_eq!(fields["x"], "a b%");
        assert_eq!(fields.len(), 3);
    }
}
