//! Requests and their redirects.
//!
//! Redirects are followed here and not by a library: each hop is checked, credentials and headers of hosts.toml go to the
//! endpoint alone, and what leads elsewhere may not lead to the node itself.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, AUTHORIZATION, LOCATION, PROXY_AUTHORIZATION, USER_AGENT};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::time_provider::TimeProvider;
use tokio::time::timeout;

use crate::address::Reach;
use crate::connect::{Connector, Peer};
use crate::connect_error::ConnectError;
use crate::error::{ErrorKind, RegistryError, error_chain};
use crate::hosts::RegistryEndpoint;
use crate::location::{self, HostPort};
use crate::proxy::Proxies;
use crate::tls::{Tls, TlsKey};

/// As many as Go's client follows.
const MAX_REDIRECTS: usize = 10;
/// Limit from the request to the end of the response's head, with the connection.
pub(crate) const HEAD: Duration = Duration::from_secs(60);
/// Most bytes of a response's head, and of a body that are read at once. Signed URLs in `Location` have up to 4 KiB.
const MAX_HEAD: usize = 64 << 10;
/// Bytes that are read at once where a reader is slow on purpose. A response's head has to fit.
const SMALL_READ: usize = 16 << 10;
/// A registry closes idle connections itself, after a minute or so.
const IDLE: Duration = Duration::from_secs(30);
/// Idle connections to one host. A pull uses a few at a time.
const MAX_IDLE: usize = 4;
/// Kinds of connections that are kept: each is a TLS configuration and how far it reaches. A node has a handful.
const MAX_CLIENTS: usize = 64;

/// The body of a request. Only pushes have one that streams.
pub(crate) type RequestBody = UnsyncBoxBody<Bytes, std::io::Error>;
type HttpClient = Client<Connector, RequestBody>;

/// Sends requests; shared by all registries.
pub(crate) struct Transport {
    clients: Mutex<HashMap<(TlsKey, ConnectionOptions), HttpClient>>,
    proxies: Arc<Proxies>,
    user_agent: HeaderValue,
    time: Arc<dyn TimeProvider>,
}

/// Properties of a connection besides its TLS.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ConnectionOptions {
    pub(crate) reach: Reach,
    /// Limit on the time to connect.
    pub(crate) dial: Duration,
    /// As in [`EndpointRequest`].
    pub(crate) receive_ahead: Option<usize>,
}

/// A response, and where it is from.
pub(crate) struct RegistryAnswer {
    pub(crate) response: Response<Incoming>,
    /// The URL that was asked last.
    pub(crate) uri: Uri,
    /// Host and port that answered, for messages.
    pub(crate) from: String,
    /// Whether another host than the endpoint answered.
    pub(crate) redirected: bool,
    /// Whether the endpoint itself is on a loopback address.
    pub(crate) on_loopback: bool,
}

/// A request to an endpoint; redirects are followed.
pub(crate) struct EndpointRequest<'a> {
    pub(crate) endpoint: &'a RegistryEndpoint,
    pub(crate) method: Method,
    /// Path, beginning with the repository, and query.
    pub(crate) path: &'a str,
    /// Headers for every hop.
    pub(crate) headers: HeaderMap,
    /// Of the endpoint alone.
    pub(crate) authorization: Option<HeaderValue>,
    /// Hosts with their ports that a person has written, in the reference or in hosts.toml.
    pub(crate) named: &'a [HostPort],
    /// Bytes that its connection may receive ahead of the reader; `None` for what the kernel thinks best.
    pub(crate) receive_ahead: Option<usize>,
}

impl Transport {
    pub(crate) fn new(proxies: Proxies, user_agent: &str, time: Arc<dyn TimeProvider>) -> Self {
        let user_agent = HeaderValue::from_str(user_agent);
        let user_agent = user_agent.unwrap_or(HeaderValue::from_static("prepull"));
        Self { clients: Mutex::default(), proxies: Arc::new(proxies), user_agent, time }
    }

    /// Asks an endpoint, with the scheme that it has, and follows where it redirects.
    pub(crate) async fn ask_endpoint(
        &self,
        ask: &EndpointRequest<'_>,
    ) -> Result<RegistryAnswer, RegistryError> {
        let endpoint = ask.endpoint;
        let first = self.follow_redirects(ask, &endpoint.scheme).await;
        match first {
            Err(NoResponse::NotTls) if endpoint.may_fall_back => self.follow_redirects(ask, "http").await,
            other => other,
        }
        .map_err(|failed| failed.into_error(endpoint.name()))
    }

    async fn follow_redirects(
        &self,
        ask: &EndpointRequest<'_>,
        scheme: &str,
    ) -> Result<RegistryAnswer, NoResponse> {
        let endpoint = ask.endpoint;
        let mut uri = endpoint.uri(scheme, ask.path)?;
        let origin = uri.clone();
        let mut on_loopback = false;
        for hop in 0..=MAX_REDIRECTS {
            let own = location::same_origin(&uri, &origin);
            let mut headers = if own { endpoint.headers.clone() } else { HeaderMap::new() };
            headers.extend(ask.headers.clone());
            if own && let Some(authorization) = &ask.authorization {
                headers.insert(AUTHORIZATION, authorization.clone());
            }
            let reach = Reach::toward(&uri, ask.named, on_loopback);
            let mut request = Request::new(Full::default());
            *request.method_mut() = ask.method.clone();
            *request.uri_mut() = uri.clone();
            *request.headers_mut() = headers;
            let link = ConnectionOptions { reach, dial: endpoint.dial, receive_ahead: ask.receive_ahead };
            let response = self.send(&endpoint.tls, link, request).await;
            let response = response.map_err(|failed| if own { failed } else { failed.of_redirect(&uri) })?;
            if hop == 0 {
                on_loopback = is_on_loopback(&response);
            }
            if !is_redirect(response.status()) {
                let from = uri.authority().map(ToString::to_string).unwrap_or_default();
                return Ok(RegistryAnswer { response, uri, from, redirected: !own, on_loopback });
            }
            uri = next_hop(&uri, &response).map_err(|(kind, what)| {
                RegistryError::new(kind, format!("{} redirects {what}", endpoint.name()))
            })?;
        }
        let message = format!("{} redirects more than {MAX_REDIRECTS} times", endpoint.name());
        Err(RegistryError::new(ErrorKind::Protocol, message).into())
    }

    /// Sends one request, and returns its response with any status.
    ///
    /// The other end may close an idle connection while we send on it: proxies do so without a word. So a request that
    /// changes nothing is sent once more, as Go's client does.
    pub(crate) async fn send(
        &self,
        tls: &Tls,
        link: ConnectionOptions,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, NoResponse> {
        let body = |body: Full<Bytes>| body.map_err(|never| match never {}).boxed_unsync();
        let again = request.method().is_safe().then(|| request.clone());
        match (self.send_body(tls, link, request.map(body), HEAD).await, again) {
            (Err(NoResponse::Closed(_)), Some(request)) => {
                self.send_body(tls, link, request.map(body), HEAD).await
            }
            (answer, _) => answer,
        }
    }

    /// The same with a body that may stream. `limit` includes the time to send it.
    pub(crate) async fn send_body(
        &self,
        tls: &Tls,
        link: ConnectionOptions,
        mut request: Request<RequestBody>,
        limit: Duration,
    ) -> Result<Response<Incoming>, NoResponse> {
        let headers = request.headers_mut();
        headers.entry(USER_AGENT).or_insert(self.user_agent.clone());
        // A compressed body differs from its announced length, and may be a bomb.
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        if request.uri().scheme_str() == Some("http")
            && let Some(authorization) =
                self.proxies.for_uri(request.uri()).and_then(|proxy| proxy.authorization.clone())
        {
            request.headers_mut().insert(PROXY_AUTHORIZATION, authorization);
        }
        let client = self.client(tls, link)?;
        match timeout(limit, client.request(request)).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) => Err(NoResponse::from_client_error(&error)),
            Err(_) => Err(RegistryError::new(
                ErrorKind::Unreachable,
                format!("no answer within {} s", limit.as_secs()),
            )
            .into()),
        }
    }

    fn client(&self, tls: &Tls, link: ConnectionOptions) -> Result<HttpClient, RegistryError> {
        let ConnectionOptions { reach, dial, receive_ahead } = link;
        let key = (tls.cache_key(), link);
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = clients.get(&key) {
            return Ok(client.clone());
        }
        let proxies = Arc::clone(&self.proxies);
        let tls = tls.client_config(Arc::clone(&self.time))?;
        let connector = Connector::new(tls, proxies, reach, dial, receive_ahead);
        let mut builder = Client::builder(TokioExecutor::new());
        builder.pool_timer(TokioTimer::new()).pool_idle_timeout(IDLE).pool_max_idle_per_host(MAX_IDLE);
        match receive_ahead {
            None => builder.http1_max_buf_size(MAX_HEAD),
            Some(_) => builder.http1_read_buf_exact_size(SMALL_READ),
        };
        let client = builder.build(connector);
        if clients.len() >= MAX_CLIENTS {
            clients.clear();
        }
        clients.insert(key, client.clone());
        Ok(client)
    }
}

/// Why there is no response.
pub(crate) enum NoResponse {
    /// The other end speaks, and does not speak TLS.
    NotTls,
    /// The other end closed the connection before it answered.
    Closed(RegistryError),
    Error(RegistryError),
}

impl From<RegistryError> for NoResponse {
    fn from(error: RegistryError) -> Self {
        Self::Error(error)
    }
}

impl NoResponse {
    fn from_client_error(error: &hyper_util::client::legacy::Error) -> Self {
        let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
        while let Some(cause) = next {
            if let Some(cause) = cause.downcast_ref::<ConnectError>() {
                return Self::of_connect(cause);
            }
            if let Some(cause) = cause.downcast_ref::<hyper::Error>()
                && cause.is_parse()
            {
                return RegistryError::new(
                    ErrorKind::Protocol,
                    format!("no valid HTTP: {}", error_chain(cause)),
                )
                .into();
            }
            if let Some(cause) = cause.downcast_ref::<hyper::Error>()
                && cause.is_incomplete_message()
            {
                return Self::Closed(RegistryError::new(ErrorKind::Unreachable, error_chain(error)));
            }
            // With TLS 1.3 a server refuses the client's certificate after the handshake.
            if let Some(rustls::Error::AlertReceived(_)) = find_tls(cause) {
                return RegistryError::new(ErrorKind::NoConnection, error_chain(error)).into();
            }
            next = cause.source();
        }
        RegistryError::new(ErrorKind::Unreachable, error_chain(error)).into()
    }

    fn of_connect(error: &ConnectError) -> Self {
        let kind = match error {
            ConnectError::Refused { .. } => ErrorKind::Protocol,
            ConnectError::ProxyScheme(_) => ErrorKind::Unsupported,
            ConnectError::Tls(cause) => match find_tls(cause) {
                Some(rustls::Error::InvalidMessage(_)) => return Self::NotTls,
                // A certificate that rustls cannot read, or a self-signed one given as CA: Go's TLS takes more.
                Some(rustls::Error::InvalidCertificate(
                    rustls::CertificateError::BadEncoding | rustls::CertificateError::Other(_),
                )) => ErrorKind::Unsupported,
                _ => ErrorKind::NoConnection,
            },
            _ => ErrorKind::NoConnection,
        };
        RegistryError::new(kind, error_chain(error)).into()
    }

    fn of_redirect(self, to: &Uri) -> Self {
        let error = self.into_error(to.host().unwrap_or_default());
        RegistryError::new(error.kind, format!("redirected: {}", error.message)).into()
    }

    pub(crate) fn into_error(self, host: &str) -> RegistryError {
        match self {
            Self::NotTls => {
                RegistryError::new(ErrorKind::NoConnection, format!("{host}: answers without TLS"))
            }
            Self::Closed(error) | Self::Error(error) if error.message.contains(host) => error,
            Self::Closed(error) | Self::Error(error) => {
                RegistryError::new(error.kind, format!("{host}: {}", error.message))
            }
        }
    }
}

/// The error of TLS in an error of a connection.
fn find_tls<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a rustls::Error> {
    error.downcast_ref::<std::io::Error>()?.get_ref()?.downcast_ref()
}

pub(crate) fn is_on_loopback(response: &Response<Incoming>) -> bool {
    let peer = response.extensions().get::<Peer>().and_then(|peer| peer.address);
    peer.is_some_and(|address| address.to_canonical().is_loopback())
}

fn is_redirect(status: StatusCode) -> bool {
    matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308)
}

fn next_hop(from: &Uri, response: &Response<Incoming>) -> Result<Uri, (ErrorKind, &'static str)> {
    let location = response.headers().get(LOCATION).and_then(|location| location.to_str().ok());
    let location = location.ok_or((ErrorKind::Protocol, "without a location that can be read"))?;
    let next =
        location::join_url(from, location).ok_or((ErrorKind::Protocol, "to what is no URL of HTTP"))?;
    if from.scheme_str() == Some("https") && next.scheme_str() == Some("http") {
        return Err((
            ErrorKind::Unsupported,
            "from TLS to plain HTTP, which is left to the container runtime",
        ));
    }
    Ok(next)
}
