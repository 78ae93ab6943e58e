//! HTTPS requests to cloudcore with a JSON body and a JSON answer.

use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::{CONNECTION, CONTENT_TYPE, HOST};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use prepull_api::enroll::{ErrorBody, MAX_BODY};
use prepull_registry::retry_after;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::explain::{ConnectTrouble, printable_start};
use super::url::{CONNECT_DEADLINE, CloudEndpoint};

/// Deadline for TLS handshake, request and answer together. Within it, the server also looks up the token in its API
/// server.
const DEADLINE: Duration = Duration::from_secs(30);

/// Why a request has no usable answer.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// No TLS connection could be established.
    #[error("{authority}: {trouble}")]
    Connection {
        /// The server's host and port, and the proxy on the way.
        authority: String,
        /// What is wrong, with the remedy.
        trouble: ConnectTrouble,
    },
    /// The server did not answer in time; the field is its host and port.
    #[error("{0}: no answer within {DEADLINE:?}: try again")]
    TooSlow(String),
    /// The server doesn't speak HTTP, broke off, or sent an unexpected answer.
    #[error("{authority}: {reason}: is this cloudcore's enrolment port (10002)?")]
    Http {
        /// The server's host and port, and the proxy on the way.
        authority: String,
        /// The error as hyper reports it.
        reason: String,
    },
    /// The server refused the request.
    #[error("{authority} refused: {reason} (HTTP {})", .status.as_u16())]
    Refused {
        /// The server's host and port, and the proxy on the way.
        authority: String,
        /// The HTTP status of the answer.
        status: StatusCode,
        /// The reason that the server gave.
        reason: String,
        /// How long the server wants us to wait before we ask again.
        retry_after: Option<Duration>,
    },
    /// None of several servers answered; one error for each.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    NoneOf(Vec<RequestError>),
}

impl RequestError {
    /// Whether another server may still answer. A refusal would be the same on all of them.
    fn is_worth_another_server(&self) -> bool {
        match self {
            Self::Connection { .. } | Self::TooSlow(_) | Self::Http { .. } | Self::NoneOf(_) => true,
            Self::Refused { status, .. } => status.is_server_error(),
        }
    }

    /// How long the servers want us to wait: the shortest wait, since any of them may answer next time.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused { retry_after, .. } => *retry_after,
            Self::NoneOf(errors) => errors.iter().filter_map(Self::retry_after).min(),
            Self::Connection { .. } | Self::TooSlow(_) | Self::Http { .. } => None,
        }
    }
}

/// Sends the request to one endpoint after the other until one answers, even if it refuses. The request must be
/// idempotent: if the answer was lost, the server may have carried it out.
pub(crate) async fn post_to_any<T: DeserializeOwned>(
    endpoints: &[CloudEndpoint],
    path: &str,
    tls: Arc<rustls::ClientConfig>,
    body: &impl Serialize,
) -> Result<T, RequestError> {
    let mut errors = Vec::new();
    for endpoint in endpoints {
        match post(endpoint, path, tls.clone(), body).await {
            Err(error) if error.is_worth_another_server() => errors.push(error),
            answer => return answer,
        }
    }
    Err(if errors.len() == 1 { errors.remove(0) } else { RequestError::NoneOf(errors) })
}

/// Sends `body` to `path` of the endpoint, after verifying the server with `tls`.
async fn post<T: DeserializeOwned>(
    endpoint: &CloudEndpoint,
    path: &str,
    tls: Arc<rustls::ClientConfig>,
    body: &impl Serialize,
) -> Result<T, RequestError> {
    let authority = endpoint.authority();
    let connection = |trouble| RequestError::Connection { authority: endpoint.to_string(), trouble };
    let http = |reason: String| RequestError::Http { authority: endpoint.to_string(), reason };
    let stream = endpoint.connect(CONNECT_DEADLINE).await.map_err(|error| connection(error.into()))?;
    let exchange = async {
        let name = endpoint.server_name().map_err(|error| connection(error.into()))?;
        let stream =
            TlsConnector::from(tls).connect(name, stream).await.map_err(|error| connection(error.into()))?;
        let body = serde_json::to_vec(body).map_err(|error| http(error.to_string()))?;
        let request = Request::post(path)
            .header(HOST, &authority)
            .header(CONTENT_TYPE, "application/json")
            .header(CONNECTION, "close")
            .body(Full::<Bytes>::from(body))
            .map_err(|error| http(error.to_string()))?;
        let (mut sender, driver) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|error| http(error.to_string()))?;
        let answer = async {
            let response = sender.send_request(request).await.map_err(|error| http(reason_of(&error)))?;
            let (status, wait) = (response.status(), retry_after(response.headers()));
            let body = Limited::new(response.into_body(), MAX_BODY).collect().await;
            Ok((status, wait, body.map_err(|error| http(error.to_string()))?.to_bytes()))
        };
        // The result of the driver, which moves the bytes, is ignored: without an answer `answer` fails as well.
        let (answer, _) = tokio::join!(answer, driver);
        answer
    };
    let (status, retry_after, body) =
        timeout(DEADLINE, exchange).await.map_err(|_| RequestError::TooSlow(endpoint.to_string()))??;
    if !status.is_success() {
        let reason =
            serde_json::from_slice::<ErrorBody>(&body).map_or_else(|_| String::new(), |body| body.error);
        return Err(RequestError::Refused {
            authority,
            status,
            reason: printable_start(&reason),
            retry_after,
        });
    }
    serde_json::from_slice(&body).map_err(|_| http("the answer is not what was asked for".to_owned()))
}

/// The cause below hyper's own `connection error`, such as a TLS alert.
fn reason_of(error: &hyper::Error) -> String {
    match std::error::Error::source(error).and_then(|source| source.downcast_ref::<std::io::Error>()) {
        Some(io) => io.to_string(),
        None => error.to_string(),
    }
}
