//! One HTTPS request with a JSON body and a JSON answer.

use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::{CONNECTION, CONTENT_TYPE, HOST};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use prepull_api::enroll::{ErrorBody, MAX_BODY};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::{CONNECT_DEADLINE, Endpoint, Trouble, printable};

/// For TLS, the request and the answer. The server looks a token up at its API server meanwhile.
const DEADLINE: Duration = Duration::from_secs(30);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// There is no connection.
    #[error("{authority}: {trouble}")]
    Connection {
        /// Host and port.
        authority: String,
        /// What is wrong, and the remedy.
        trouble: Trouble,
    },
    /// It did not answer in time.
    #[error("{0}: no answer within {DEADLINE:?}: try again")]
    TooSlow(String),
    /// It does not speak HTTP, or broke off.
    #[error("{authority}: {reason}: is this cloudcore's enrolment port (10002)?")]
    Http {
        /// Host and port.
        authority: String,
        /// In hyper's words.
        reason: String,
    },
    /// It said no.
    #[error("{authority} refused: {reason} (HTTP {})", .status.as_u16())]
    Refused {
        /// Host and port.
        authority: String,
        /// As HTTP has it.
        status: StatusCode,
        /// In the server's words.
        reason: String,
    },
    /// None of several addresses has an answer.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    NoneOf(Vec<RequestError>),
}

impl RequestError {
    /// Whether another server is to be asked: this one did not answer, or could not. What it refused, all of them
    /// would refuse.
    fn is_of_this_server(&self) -> bool {
        match self {
            Self::Connection { .. } | Self::TooSlow(_) | Self::Http { .. } | Self::NoneOf(_) => true,
            Self::Refused { status, .. } => status.is_server_error(),
        }
    }
}

/// [`post`] to the first of the endpoints that has an answer, be it a refusal. The request must be one that may
/// arrive twice.
pub(crate) async fn post_to_any<T: DeserializeOwned>(
    endpoints: &[Endpoint],
    path: &str,
    tls: Arc<rustls::ClientConfig>,
    body: &impl Serialize,
) -> Result<T, RequestError> {
    let mut errors = Vec::new();
    for endpoint in endpoints {
        match post(endpoint, path, tls.clone(), body).await {
            Err(error) if error.is_of_this_server() => errors.push(error),
            answer => return answer,
        }
    }
    Err(if errors.len() == 1 { errors.remove(0) } else { RequestError::NoneOf(errors) })
}

/// Sends `body` to `path` of the endpoint. The connection is verified as `tls` says before a byte of it goes
/// out.
async fn post<T: DeserializeOwned>(
    endpoint: &Endpoint,
    path: &str,
    tls: Arc<rustls::ClientConfig>,
    body: &impl Serialize,
) -> Result<T, RequestError> {
    let authority = endpoint.authority();
    let connection = |trouble| RequestError::Connection { authority: endpoint.authority(), trouble };
    let http = |reason: String| RequestError::Http { authority: endpoint.authority(), reason };
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
            let response = sender.send_request(request).await.map_err(|error| http(of_hyper(&error)))?;
            let status = response.status();
            let body = Limited::new(response.into_body(), MAX_BODY).collect().await;
            Ok((status, body.map_err(|error| http(error.to_string()))?.to_bytes()))
        };
        // The driver carries the bytes; its end without an answer shows in `answer`.
        let (answer, _) = tokio::join!(answer, driver);
        answer
    };
    let (status, body) =
        timeout(DEADLINE, exchange).await.map_err(|_| RequestError::TooSlow(authority.clone()))??;
    if !status.is_success() {
        let reason =
            serde_json::from_slice::<ErrorBody>(&body).map_or_else(|_| String::new(), |body| body.error);
        return Err(RequestError::Refused { authority, status, reason: printable(&reason) });
    }
    serde_json::from_slice(&body).map_err(|_| http("the answer is not what was asked for".to_owned()))
}

/// hyper says `connection error`; the reason, such as a TLS alert, is beneath.
fn of_hyper(error: &hyper::Error) -> String {
    match std::error::Error::source(error).and_then(|source| source.downcast_ref::<std::io::Error>()) {
        Some(io) => io.to_string(),
        None => error.to_string(),
    }
}
