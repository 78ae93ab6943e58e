//! Tokens of a token server, by Docker's protocol: <https://distribution.github.io/distribution/spec/auth/>.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, StatusCode, Uri};
use http_body_util::Full;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use prepull_api::credentials::{RegistryCredential, Sensitive};
use serde::Deserialize;
use zeroize::Zeroizing;

use super::{Challenge, RegistryToken, basic_auth, bearer_auth};
use crate::address::Reach;
use crate::body;
use crate::error::{ErrorKind, RegistryError};
use crate::hosts::RegistryEndpoint;
use crate::location::{self, HostPort};
use crate::retry_after::retry_after;
use crate::transport::{ConnectionOptions, Transport};

/// Largest answer of a token server. Tokens have some KiB; those that list what their user may do have tens.
const MAX_ANSWER: usize = 256 << 10;
/// Longest challenge that is answered, of its parts together.
const MAX_CHALLENGE: usize = 8 << 10;
/// Longest life of a token that is believed.
const MAX_LIFE: u64 = 24 * 3600;

/// All that is not unreserved in a URL.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

#[derive(Deserialize)]
struct TokenAnswer {
    #[serde(default)]
    token: Sensitive,
    #[serde(default)]
    access_token: Sensitive,
    #[serde(default)]
    expires_in: Option<u64>,
}

/// A token that an endpoint demands.
pub(crate) struct Demand<'a> {
    pub(crate) endpoint: &'a RegistryEndpoint,
    /// The URL at which it demanded it, with the scheme by which it's reached.
    pub(crate) at: &'a Uri,
    pub(crate) challenge: &'a Challenge,
    pub(crate) scope: &'a str,
    pub(crate) credential: Option<&'a RegistryCredential>,
}

/// Asks the token server that the challenge names, in the order in which containerd does: by POST with a credential, and
/// by GET where that is not known, or without a credential. A GET shows a user and a password alone. Without these it would
/// be anonymous, so it never follows another credential.
pub(crate) async fn fetch_token(
    transport: &Transport,
    Demand { endpoint, at, challenge, scope, credential }: Demand<'_>,
    named: &[HostPort],
    on_loopback: bool,
) -> Result<RegistryToken, RegistryError> {
    let refuse = |kind, what: &str| Err(RegistryError::new(kind, format!("{}: {what}", endpoint.name())));
    if challenge.realm.len() + challenge.service.len() + scope.len() > MAX_CHALLENGE {
        return refuse(ErrorKind::Protocol, "its demand for a token is too long");
    }
    let realm: Option<Uri> = challenge.realm.parse().ok();
    let realm = realm.filter(|realm| matches!(realm.scheme_str(), Some("http" | "https")));
    let realm = realm.filter(location::has_plain_host);
    let Some(realm) = realm else {
        return refuse(ErrorKind::Protocol, "it demands a token of a realm that is no URL of HTTP");
    };
    let password = credential.and_then(basic_auth);
    if password.is_none() && credential.is_some_and(|credential| credential.identity_token.is_empty()) {
        return refuse(
            ErrorKind::Unauthorized,
            "it demands a token, and the credential has no user with a password, and no identity token",
        );
    }
    if credential.is_some()
        && endpoint.scheme == "https"
        && realm.scheme_str() == Some("http")
        && !endpoint.may_fall_back
    {
        return refuse(
            ErrorKind::Unsupported,
            "its token server has no TLS, which is left to the container runtime",
        );
    }
    let reach = Reach::toward(&realm, named, on_loopback);
    let own = location::same_origin(&realm, at);
    let server = TokenRealm { transport, endpoint, realm: &realm, own, reach };
    let service = challenge.service.as_str();
    if let Some(credential) = credential {
        let said = server.send(&post(&realm, service, scope, credential)).await?;
        // Token servers that know only GET answer with one of these.
        let get_only = matches!(said.status.as_u16(), 400 | 401 | 404 | 405);
        if password.is_none() || !get_only {
            return server.read_token(&TokenReply { to_identity: password.is_none(), ..said });
        }
    }
    let said = server.send(&get(&realm, service, scope, password)?).await?;
    server.read_token(&said)
}

/// What a token server has answered.
struct TokenReply {
    status: StatusCode,
    /// The wait that it asks for.
    retry_after: Option<Duration>,
    body: Zeroizing<Vec<u8>>,
    /// Whether it was shown an identity token.
    to_identity: bool,
}

struct TokenRealm<'a> {
    transport: &'a Transport,
    endpoint: &'a RegistryEndpoint,
    realm: &'a Uri,
    /// Whether it has the origin of the endpoint.
    own: bool,
    reach: Reach,
}

impl TokenRealm<'_> {
    /// Its redirects are not followed: they would carry a password along.
    async fn send(&self, request: &Request<Full<Bytes>>) -> Result<TokenReply, RegistryError> {
        let mut request = request.clone();
        // containerd sends the headers of hosts.toml to every token server. One of another origin gets none here, as with
        // redirects: they may be a password. The request's own take precedence.
        if self.own {
            let headers = std::mem::replace(request.headers_mut(), self.endpoint.headers.clone());
            request.headers_mut().extend(headers);
        }
        let RegistryEndpoint { tls, dial, .. } = self.endpoint;
        let link = ConnectionOptions { reach: self.reach, dial: *dial, receive_ahead: None };
        let response = self.transport.send(tls, link, request).await;
        let response = response.map_err(|failed| self.explain(&failed.into_error(self.name())))?;
        let (status, retry_after) = (response.status(), retry_after(response.headers()));
        let body = body::read_body(response, MAX_ANSWER).await.map_err(|error| self.explain(&error))?;
        Ok(TokenReply { status, retry_after, body: Zeroizing::new(body), to_identity: false })
    }

    fn read_token(&self, said: &TokenReply) -> Result<RegistryToken, RegistryError> {
        let TokenReply { status, retry_after, ref body, to_identity } = *said;
        let kind = match status.as_u16() {
            200..=299 => None,
            401 | 403 => Some(ErrorKind::Unauthorized),
            // RFC 6749 has it for a refresh token that has ended or was withdrawn (`invalid_grant`).
            400 if to_identity => Some(ErrorKind::Unauthorized),
            429 => Some(ErrorKind::RateLimited { retry_after }),
            300..=399 => Some(ErrorKind::Unsupported),
            _ => Some(ErrorKind::Server { retry_after }),
        };
        let error = |kind, what: &str| self.explain(&RegistryError::new(kind, what));
        if let Some(kind) = kind {
            return Err(error(kind, &format!("it answers {status}{}", kind.asked_wait())));
        }
        // Not the parser's own message: it may show the answer.
        let answer: TokenAnswer =
            serde_json::from_slice(body).map_err(|_| error(ErrorKind::Protocol, "its answer is no token"))?;
        let token = if answer.access_token.is_empty() { &answer.token } else { &answer.access_token };
        let authorization = Some(token).filter(|token| !token.is_empty()).and_then(bearer_auth);
        let authorization =
            authorization.ok_or_else(|| error(ErrorKind::Protocol, "its answer has no token"))?;
        let life = answer.expires_in.filter(|seconds| *seconds > 0);
        let until = life.map(|seconds| Instant::now() + Duration::from_secs(seconds.min(MAX_LIFE)));
        Ok(RegistryToken { authorization, until })
    }

    fn name(&self) -> &str {
        self.realm.authority().map(http::uri::Authority::as_str).unwrap_or_default()
    }

    fn explain(&self, error: &RegistryError) -> RegistryError {
        let RegistryError { kind, message, undecided: _ } = error;
        let (server, registry) = (self.name(), self.endpoint.name());
        RegistryError::new(*kind, format!("token server {server} of {registry}: {message}"))
    }
}

fn post(realm: &Uri, service: &str, scope: &str, credential: &RegistryCredential) -> Request<Full<Bytes>> {
    let mut form = vec![("scope", scope), ("service", service), ("client_id", "prepull")];
    let RegistryCredential { username, password, identity_token, .. } = credential;
    // containerd prefers the password where a secret has both.
    if username.is_empty() || password.is_empty() {
        form.extend([("grant_type", "refresh_token"), ("refresh_token", identity_token.expose())]);
    } else {
        form.extend([
            ("grant_type", "password"),
            ("username", username.expose()),
            ("password", password.expose()),
        ]);
    }
    let content = Bytes::from_owner(Zeroizing::new(encode_form(&form).into_bytes()));
    let mut request = Request::new(Full::new(content));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = realm.clone();
    let of_form = HeaderValue::from_static("application/x-www-form-urlencoded");
    request.headers_mut().insert(CONTENT_TYPE, of_form);
    request
}

fn get(
    realm: &Uri,
    service: &str,
    scope: &str,
    password: Option<HeaderValue>,
) -> Result<Request<Full<Bytes>>, RegistryError> {
    let mut query = vec![];
    if !service.is_empty() {
        query.push(("service", service));
    }
    query.extend(scope.split(' ').filter(|scope| !scope.is_empty()).map(|scope| ("scope", scope)));
    let joint = if realm.query().is_some_and(|query| !query.is_empty()) { "&" } else { "?" };
    let text = format!("{}{joint}{}", realm.to_string().trim_end_matches('?'), encode_form(&query));
    let bad = |_| RegistryError::new(ErrorKind::Protocol, "the realm of its tokens is no URL");
    let mut request = Request::new(Full::default());
    *request.uri_mut() = text.parse().map_err(bad)?;
    if let Some(authorization) = password {
        request.headers_mut().insert(AUTHORIZATION, authorization);
    }
    Ok(request)
}

fn encode_form(pairs: &[(&str, &str)]) -> String {
    let encode = |text| utf8_percent_encode(text, RESERVED);
    let pairs = pairs.iter().map(|(name, value)| format!("{}={}", encode(name), encode(value)));
    pairs.collect::<Vec<_>>().join("&")
}
