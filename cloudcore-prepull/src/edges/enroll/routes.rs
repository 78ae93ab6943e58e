//! The routes of the enrolment endpoint.

use std::error::Error as _;
use std::fmt::Display;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Body, Bytes};
use hyper::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{Method, Request, Response, StatusCode};
use prepull_api::abbreviate::abbreviate;
use prepull_api::enroll::{
    CA_PATH, ENROLL_PATH, EnrollRequest, ErrorBody, IssuedCertificate, MAX_BODY, RENEW_PATH, RenewRequest,
    SubjectForm,
};
use prepull_api::task::NodeName;
use prepull_api::text::to_plain_line;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use super::EnrollSettings;
use super::issue_rate::{IssueRate, TooOften};
use crate::edges::log_rate::{LogRate, NodeLogRate};
use crate::edges::pki::peer::{PeerError, PeerIdentity};
use crate::edges::pki::{KeyHash, PkiError, ServerIdentity, VerifiedCsr};
use crate::edges::roster::{HeldKey, JoinScope, NodeRefusal, Roster};
use crate::edges::tokens::{RedeemError, Scope, TokenError, Tokens};

pub(super) struct Routes {
    pub(super) identity: Arc<ServerIdentity>,
    pub(super) tokens: Tokens,
    pub(super) roster: Roster,
    pub(super) settings: EnrollSettings,
    pub(super) refusal_log: LogRate,
    pub(super) node_log: NodeLogRate,
    pub(super) issue_rate: IssueRate,
}

/// A refused request. The text is for the operator of the edge.
#[derive(Debug)]
struct Denial {
    status: StatusCode,
    error: String,
    /// When to ask again, where that is known.
    retry_after: Option<Duration>,
}

impl Denial {
    fn new(status: StatusCode, error: impl Display) -> Self {
        Self { status, error: format!("{error}"), retry_after: None }
    }
}

impl From<PkiError> for Denial {
    fn from(error: PkiError) -> Self {
        match error {
            PkiError::Csr(_) => Self::new(StatusCode::BAD_REQUEST, error),
            error => {
                let cause = error.source().map(ToString::to_string);
                tracing::error!(%error, cause, "a certificate was not signed");
                Self::new(
                    StatusCode::INTERNAL_SERVER_ERROR,
                    "cloudcore could not sign the certificate: see cloudcore's log",
                )
            }
        }
    }
}

impl Routes {
    pub(super) async fn handle(
        &self,
        request: Request<Bytes>,
        peer: &Result<PeerIdentity, PeerError>,
        address: IpAddr,
    ) -> Response<Full<Bytes>> {
        let method = match request.uri().path() {
            CA_PATH => Method::GET,
            ENROLL_PATH | RENEW_PATH => Method::POST,
            _ => {
                return error_response(Denial::new(
                    StatusCode::NOT_FOUND,
                    "no such path; is the agent of another version?",
                ));
            }
        };
        if *request.method() != method {
            return error_response(Denial::new(
                StatusCode::METHOD_NOT_ALLOWED,
                format!("only {method} is allowed here"),
            ));
        }
        if method == Method::GET {
            let mut response = Response::new(Full::from(self.identity.cas().bundle()));
            response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/x-pem-file"));
            return response;
        }
        let issued = if request.uri().path() == ENROLL_PATH {
            self.enroll(request.body(), address).await
        } else {
            self.renew(request.body(), peer).await
        };
        match issued {
            Ok(issued) => json_response(StatusCode::OK, &issued),
            Err(denial) => error_response(denial),
        }
    }

    async fn enroll(&self, body: &[u8], address: IpAddr) -> Result<IssuedCertificate, Denial> {
        let EnrollRequest { node, token, csr, organisation } = read_json(body)?;
        let form = self.accepted_form(organisation.as_deref())?;
        // Before anything that takes time: anybody can send a wrong token.
        let recognised = self.tokens.recognise(token.expose(), Instant::now().into_std());
        recognised.map_err(|error| self.refuse_token(error, address, &node))?;
        self.issue_rate.check_join(&node, Instant::now()).map_err(|refusal| self.postpone(&refusal))?;
        let csr = VerifiedCsr::from_pem(&csr)?;
        let now = SystemTime::now();
        let redeemed = self.tokens.redeem(token.expose(), &node, csr.key_fingerprint(), now).await;
        let (scope, after_revocation) = redeemed.map_err(|error| self.refuse_token(error, address, &node))?;
        let by = match scope {
            Scope::Fleet => JoinScope::Fleet,
            Scope::Node(_) => JoinScope::Node { after_revocation },
        };
        let (issued, key) = self.sign_certificate(&csr, &node, form, now)?;
        // Record the key before we send the certificate: an unrecorded key looks like a stolen one.
        self.roster.join(&node, by, key).await.map_err(|refusal| self.deny_node(&node, refusal))?;
        self.issue_rate.count_join(&node, Instant::now());
        if self.node_log.allows(&node, Instant::now()) {
            tracing::info!(%address, %node, not_after = issued.not_after, "a node has joined");
        }
        Ok(issued)
    }

    fn refuse_token(&self, error: TokenError, address: IpAddr, node: &NodeName) -> Denial {
        let is_logged = self.refusal_log.allows(Instant::now());
        let node = to_plain_line(node.as_str(), NodeName::MAX);
        match error {
            TokenError::Refused(refusal) => {
                if is_logged {
                    tracing::warn!(%address, node, reason = abbreviate(&refusal.to_string()), "a token was refused");
                }
                let status = match refusal {
                    RedeemError::Malformed | RedeemError::NotANode(_) => StatusCode::BAD_REQUEST,
                    RedeemError::Unknown => StatusCode::UNAUTHORIZED,
                    RedeemError::Expired(_) | RedeemError::OtherNode(_) | RedeemError::UsedByOtherKey => {
                        StatusCode::FORBIDDEN
                    }
                };
                Denial::new(status, refusal)
            }
            TokenError::TooManyUnknown => {
                if is_logged {
                    tracing::warn!(%address, node, %error, "a token was not looked up");
                }
                Denial::new(StatusCode::SERVICE_UNAVAILABLE, error)
            }
            error => {
                if is_logged {
                    let cause = error.source().map(ToString::to_string);
                    tracing::error!(node, %error, cause, "a token was not redeemed");
                }
                let error = "cloudcore could not check the token at the API server: try again, or see cloudcore's log";
                Denial::new(StatusCode::SERVICE_UNAVAILABLE, error)
            }
        }
    }

    async fn renew(
        &self,
        body: &[u8],
        peer: &Result<PeerIdentity, PeerError>,
    ) -> Result<IssuedCertificate, Denial> {
        // The old subject is that of kubelets: one who is not let in must not get a certificate that is.
        let peer = peer.as_ref().map_err(|error| Denial::new(StatusCode::FORBIDDEN, error))?;
        peer.check_subject(self.settings.accept_system_nodes)
            .map_err(|error| Denial::new(StatusCode::FORBIDDEN, error))?;
        self.issue_rate
            .check_renewal(&peer.node, Instant::now())
            .map_err(|refusal| self.postpone(&refusal))?;
        let RenewRequest { csr, organisation } = read_json(body)?;
        let form = self.accepted_form(organisation.as_deref())?;
        let now = SystemTime::now();
        let (issued, key) = self.sign_certificate(&VerifiedCsr::from_pem(&csr)?, &peer.node, form, now)?;
        self.roster.renew(peer, key, now).await.map_err(|refusal| self.deny_node(&peer.node, refusal))?;
        self.issue_rate.count_renewal(&peer.node, Instant::now());
        if self.node_log.allows(&peer.node, Instant::now()) {
            tracing::info!(node = %peer.node, not_after = issued.not_after, "a node's certificate was renewed");
        }
        Ok(issued)
    }

    /// The form of the subject that an edge gets.
    fn accepted_form(&self, organisation: Option<&str>) -> Result<SubjectForm, Denial> {
        let form = SubjectForm::from_request(organisation);
        if form == SubjectForm::Own || self.settings.accept_system_nodes {
            return Ok(form);
        }
        let error = "this agent is of release 0.1, whose certificates cloudcore does not issue any more \
                     (--accept-system-nodes): upgrade it";
        Err(Denial::new(StatusCode::FORBIDDEN, error))
    }

    /// The answer to a refused node. Without a refusal, its key could not be recorded.
    fn deny_node(&self, node: &NodeName, refusal: Option<NodeRefusal>) -> Denial {
        let Some(refusal) = refusal else {
            let error =
                "cloudcore could not record the key at the API server: try again, or see cloudcore's log";
            return Denial::new(StatusCode::SERVICE_UNAVAILABLE, error);
        };
        if self.refusal_log.allows(Instant::now()) {
            tracing::warn!(%node, reason = %refusal, "a certificate was refused");
        }
        Denial::new(StatusCode::FORBIDDEN, refusal)
    }

    /// The answer to an edge that has to wait. An agent of any release tries again by itself, more and more seldom.
    fn postpone(&self, refusal: &TooOften) -> Denial {
        if self.refusal_log.allows(Instant::now()) {
            tracing::warn!(reason = %refusal, "a certificate was not issued now");
        }
        Denial {
            retry_after: Some(refusal.wait_time()),
            ..Denial::new(StatusCode::TOO_MANY_REQUESTS, refusal)
        }
    }

    /// Signs a certificate. The key is to be recorded before the certificate is sent.
    fn sign_certificate(
        &self,
        csr: &VerifiedCsr,
        node: &NodeName,
        form: SubjectForm,
        now: SystemTime,
    ) -> Result<(IssuedCertificate, HeldKey), Denial> {
        let cas = self.identity.cas();
        let signed = cas.signer().sign_client(csr, node, form, now..now + self.settings.certificate_ttl)?;
        let issued = IssuedCertificate {
            certificate: signed.pem,
            ca: cas.signer().pem(),
            not_after: humantime::format_rfc3339_seconds(signed.not_after).to_string(),
        };
        let key = HeldKey::new(KeyHash::new(csr.key_fingerprint()), signed.not_after);
        Ok((issued, key.with_certificate(Some(cas.signer().fingerprint().into()), form)))
    }
}

/// Reads the whole body of a request; the error is the answer to one that is incomplete or too long.
pub(super) async fn read_body<B>(request: Request<B>) -> Result<Request<Bytes>, Response<Full<Bytes>>>
where
    B: Body,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let (head, body) = request.into_parts();
    let Ok(body) = Limited::new(body, MAX_BODY).collect().await else {
        let error = format!("the body is incomplete or longer than {MAX_BODY} bytes");
        return Err(error_response(Denial::new(StatusCode::PAYLOAD_TOO_LARGE, error)));
    };
    Ok(Request::from_parts(head, body.to_bytes()))
}

fn read_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, Denial> {
    // The parser's error would quote the body, which contains the token.
    serde_json::from_slice(body)
        .map_err(|_| Denial::new(StatusCode::BAD_REQUEST, "the body is not the JSON that this path expects"))
}

fn json_response(status: StatusCode, body: &impl Serialize) -> Response<Full<Bytes>> {
    // Both bodies are structs of strings, which always serialize.
    let mut response = Response::new(Full::from(serde_json::to_vec(body).unwrap_or_default()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

fn error_response(denial: Denial) -> Response<Full<Bytes>> {
    let Denial { status, error, retry_after } = denial;
    let mut response = json_response(status, &ErrorBody { error });
    if let Some(wait) = retry_after {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(wait.as_secs()));
    }
    response
}

#[cfg(test)]
mod tests;
