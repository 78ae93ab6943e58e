//! One request to one endpoint: with what it wants to be shown, and with its refusals put into words.

use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Method};
use prepull_api::credentials::Sensitive;
use serde::Deserialize;

use super::Repository;
use crate::auth::{self, Demand, RegistryToken, Scheme, TokenKey};
use crate::blob::HostId;
use crate::body;
use crate::error::{ErrorKind, RegistryError};
use crate::hosts::RegistryEndpoint;
use crate::retry_after::retry_after;
use crate::transport::{EndpointRequest, RegistryAnswer};

/// Most bytes of an error answer that are read for its message.
const MAX_ERROR: usize = 8 << 10;
/// Longest message of a registry that is passed on.
const MAX_WORDS: usize = 200;

impl RegistryEndpoint {
    pub(crate) fn host_id(&self) -> HostId {
        HostId(format!("{}{}", self.authority, self.path.strip_suffix("/v2").unwrap_or(&self.path)))
    }
}

impl Repository {
    /// Path and query of an object. For mirrors the query names the registry that the content belongs to.
    pub(super) fn object_path(&self, endpoint: &RegistryEndpoint, kind: &str, object: &str) -> String {
        let registry = self.reference.registry();
        let is_own = self.is_own(&endpoint.authority);
        let namespace = if is_own { String::new() } else { format!("?ns={}", registry.replace(':', "%3A")) };
        format!("/{}/{kind}/{object}{namespace}", self.reference.repository())
    }

    /// Whether this is the registry itself, and no mirror.
    fn is_own(&self, authority: &str) -> bool {
        let registry = self.reference.registry();
        registry == authority || (registry == "docker.io" && authority == "registry-1.docker.io")
    }

    /// Asks an endpoint, and shows it what it wants to see. The answer may be a refusal.
    pub(super) async fn ask_endpoint(
        &self,
        endpoint: &RegistryEndpoint,
        method: Method,
        path: &str,
        headers: HeaderMap,
    ) -> Result<RegistryAnswer, RegistryError> {
        let shown = self.first_authorization(endpoint);
        let mut ask = EndpointRequest {
            endpoint,
            method,
            path,
            headers,
            authorization: shown.clone(),
            named: &self.named,
            receive_ahead: self.receive_ahead,
        };
        let answer = self.shared.transport.ask_endpoint(&ask).await?;
        let Some(authorization) =
            self.answer_challenge(endpoint, &ask.method, &answer, shown.as_ref()).await?
        else {
            return Ok(answer);
        };
        ask.authorization = Some(authorization);
        self.shared.transport.ask_endpoint(&ask).await
    }

    fn token_key(&self, endpoint: &RegistryEndpoint) -> TokenKey {
        TokenKey {
            origin: format!("{}://{}", endpoint.scheme, endpoint.authority),
            repository: self.reference.repository().to_owned(),
            credential: self.fingerprint,
        }
    }

    /// The token of the credential itself, if it has one.
    fn given_token(&self) -> Option<&Sensitive> {
        self.credential
            .as_ref()
            .map(|credential| &credential.registry_token)
            .filter(|token| !token.is_empty())
    }

    /// The authorization to begin with.
    pub(super) fn first_authorization(&self, endpoint: &RegistryEndpoint) -> Option<HeaderValue> {
        match self.given_token() {
            Some(token) => auth::bearer_auth(token),
            None => self.shared.tokens.get(&self.token_key(endpoint)),
        }
    }

    /// What to show after a refusal. `None` if it is none, or if there is nothing.
    pub(super) async fn answer_challenge(
        &self,
        endpoint: &RegistryEndpoint,
        method: &Method,
        answer: &RegistryAnswer,
        shown: Option<&HeaderValue>,
    ) -> Result<Option<HeaderValue>, RegistryError> {
        if answer.response.status() != 401 || answer.redirected || self.given_token().is_some() {
            return Ok(None);
        }
        let key = self.token_key(endpoint);
        let _one_at_a_time = self.asking.lock().await;
        // Another request may have got a new one while we waited.
        if let Some(token) = self.shared.tokens.get(&key)
            && Some(&token) != shown
        {
            return Ok(Some(token));
        }
        let Some(challenge) = auth::parse(answer.response.headers()) else { return Ok(None) };
        let token = match challenge.scheme {
            Scheme::Basic => {
                let value = self.credential.as_ref().and_then(auth::basic_auth);
                value.map(|authorization| RegistryToken { authorization, until: None })
            }
            Scheme::Bearer => {
                let actions =
                    if matches!(*method, Method::GET | Method::HEAD) { "pull" } else { "pull,push" };
                let own = format!("repository:{}:{actions}", self.reference.repository());
                let scope = match challenge.scope.as_str() {
                    "" => own,
                    asked if asked.split(' ').any(|scope| scope == own) => asked.to_owned(),
                    asked => format!("{asked} {own}"),
                };
                let credential = self.credential.as_ref();
                let at = &answer.uri;
                let demand = Demand { endpoint, at, challenge: &challenge, scope: &scope, credential };
                Some(
                    auth::fetch_token(&self.shared.transport, demand, &self.named, answer.on_loopback)
                        .await?,
                )
            }
        };
        // One that was just refused would be refused again.
        let token = token.filter(|token| Some(&token.authorization) != shown);
        if let Some(token) = &token {
            self.shared.tokens.put(key, token.clone());
        }
        Ok(token.map(|token| token.authorization))
    }

    /// The answer, if it is no refusal.
    pub(super) async fn check_answer(&self, answer: RegistryAnswer) -> Result<RegistryAnswer, RegistryError> {
        let status = answer.response.status();
        if status.is_success() && is_html(&answer) {
            let message = format!("{} answered with HTML: a captive portal?", answer.from);
            return Err(RegistryError::new(ErrorKind::Unreachable, message));
        }
        if status.is_success() {
            return Ok(answer);
        }
        let RegistryAnswer { response, from, redirected, .. } = answer;
        let retry_after = retry_after(response.headers());
        let kind = match status.as_u16() {
            429 => ErrorKind::RateLimited { retry_after },
            // Of storage it means an expired URL, about which a new request to the registry helps.
            401 | 403 | 404 if redirected => ErrorKind::Server { retry_after: None },
            401 | 403 => ErrorKind::Unauthorized,
            404 | 410 => ErrorKind::NotFound,
            _ => ErrorKind::Server { retry_after },
        };
        let words =
            body::read_body(response, MAX_ERROR).await.ok().and_then(|content| refusal_message(&content));
        let words = words.map(|words| format!(": {words}")).unwrap_or_default();
        // No need to name the image: callers put it beside the reason.
        let message = match kind {
            ErrorKind::NotFound if self.is_own(&from) => format!("not found{words}"),
            ErrorKind::NotFound => format!("not found at {from}{words}"),
            _ => format!("{from} answers {status}{}{words}", kind.asked_wait()),
        };
        Err(RegistryError::new(kind, message))
    }

    /// Reads the body of an answer, of at most `limit` bytes.
    pub(super) async fn read_answer(
        &self,
        answer: RegistryAnswer,
        limit: u64,
    ) -> Result<Vec<u8>, RegistryError> {
        let RegistryAnswer { response, from, .. } = answer;
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let read = body::read_body(response, limit).await;
        read.map_err(|error| RegistryError::new(error.kind, format!("{from}: {error}")))
    }
}

/// Whether it's a page for people. A registry has none at these paths; a network that wants its users to log in first answers
/// every request with one.
fn is_html(answer: &RegistryAnswer) -> bool {
    let media_type = answer.response.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let media_type = media_type.and_then(|text| text.split(';').next()).unwrap_or_default();
    ["text/html", "application/xhtml+xml"].iter().any(|html| media_type.trim().eq_ignore_ascii_case(html))
}

/// The registry's own message about its refusal, by the distribution specification.
fn refusal_message(content: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Errors {
        errors: Vec<One>,
    }
    #[derive(Deserialize)]
    struct One {
        #[serde(default)]
        code: String,
        #[serde(default)]
        message: String,
    }
    let Errors { errors } = serde_json::from_slice(content).ok()?;
    let One { code, message } = errors.into_iter().next()?;
    let text = format!("{code} {message}");
    // A URL in it might be a signed one.
    let safe = text.split_whitespace().filter(|word| !word.contains("://") && !word.contains('?'));
    let text = safe.collect::<Vec<_>>().join(" ");
    Some(text.chars().take(MAX_WORDS).collect()).filter(|text: &String| !text.is_empty())
}
