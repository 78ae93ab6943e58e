//! The HTTP server for Prometheus and the kubelet's probes. It serves no secrets; with `--metrics-secure` it serves the
//! metrics over TLS to those who may read them, and the probes to everybody.

mod access;
mod certificate;
pub(super) mod edges;

use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hyper::body::Incoming;
use hyper::header::AUTHORIZATION;
use hyper::{HeaderMap, Request, StatusCode};
use kube::Client;
use parking_lot::Mutex;
use prepull_program::http::{self, HttpAnswer, TEXT, answer_metrics, answer_request};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::kube_api::leader::Leadership;
use crate::kube_api::leader_label::LeaderLabel;
use crate::run::metrics::Metrics;
use access::MetricsAccess;
pub(crate) use certificate::CertificateFiles;

/// Connections at a time, of probes, collectors, and any other client in the network.
const CONNECTIONS: usize = 256;

/// The outcome of the check of definitions, rights and KubeEdge, which leader and standby make before they are of use.
#[derive(Debug, Default)]
enum PreflightState {
    /// The first check has no outcome yet.
    #[default]
    Pending,
    /// This was in the way at the last check. It is checked again.
    Obstructed(String),
    /// Nothing was in the way. This replica doesn't check again in this role.
    Passed,
}

/// The readiness of cloudcore: it leads, jobs and nodes have been listed, and the tunnel listens.
#[derive(Debug)]
pub(crate) struct Readiness {
    leadership: Leadership,
    label: LeaderLabel,
    serving: AtomicBool,
    preflight: Mutex<PreflightState>,
    /// What is not served although it is asked for, and why; the rest is.
    lack: Mutex<Option<String>>,
}

impl Readiness {
    /// The readiness at the start: not ready.
    pub(crate) fn new(leadership: Leadership, label: LeaderLabel) -> Self {
        Self {
            leadership,
            label,
            serving: AtomicBool::new(false),
            preflight: Mutex::default(),
            lack: Mutex::default(),
        }
    }

    pub(crate) fn set_serving(&self, serving: bool) {
        self.serving.store(serving, Ordering::Relaxed);
    }

    /// Sets what keeps it from serving, or from taking over, for the answers of /readyz and /availablez.
    pub(crate) fn set_obstacle(&self, obstacle: String) {
        *self.preflight.lock() = PreflightState::Obstructed(obstacle);
    }

    /// Records that nothing is in the way of serving, or of taking over.
    pub(crate) fn pass_preflight(&self) {
        *self.preflight.lock() = PreflightState::Passed;
    }

    /// Sets what is not served although it is asked for, for the answer of /readyz.
    pub(crate) fn set_lack(&self, lack: Option<String>) {
        *self.lack.lock() = lack;
    }

    /// The answer of /availablez: whether this replica does its part, as the leader or as a standby that could take over,
    /// and its pod is marked for what it is.
    fn availability(&self) -> (StatusCode, String) {
        let (status, text) = match self.leadership.leader() {
            Some(leader) => standby_answer(&leader, &self.preflight.lock()),
            None => self.answer(),
        };
        match self.label.problem().filter(|_| status == StatusCode::OK) {
            Some(problem) => {
                let reason = format!("the pod does not show whether it leads: {problem}\n");
                (StatusCode::SERVICE_UNAVAILABLE, reason)
            }
            None => (status, text),
        }
    }

    fn answer(&self) -> (StatusCode, String) {
        let reason = match self.leadership.why_not() {
            Some(why) => format!("not the leader: {why}\n"),
            None if self.serving.load(Ordering::Relaxed) => {
                let lack = self.lack.lock();
                let lack = lack.as_ref().map(|lack| format!("{lack}\n")).unwrap_or_default();
                return (StatusCode::OK, format!("ok\n{lack}"));
            }
            None => match &*self.preflight.lock() {
                PreflightState::Obstructed(obstacle) => format!("waiting for the API server: {obstacle}\n"),
                PreflightState::Pending | PreflightState::Passed => {
                    "waiting for the API server to list jobs and nodes\n".to_owned()
                }
            },
        };
        (StatusCode::SERVICE_UNAVAILABLE, reason)
    }
}

/// The answer of /availablez on a standby: whether it could take over from this leader.
fn standby_answer(leader: &str, preflight: &PreflightState) -> (StatusCode, String) {
    match preflight {
        PreflightState::Passed => (StatusCode::OK, format!("standing by: {leader} leads\n")),
        PreflightState::Pending => (
            StatusCode::SERVICE_UNAVAILABLE,
            format!("{leader} leads; whether this replica could take over is being checked\n"),
        ),
        PreflightState::Obstructed(obstacle) => (
            StatusCode::SERVICE_UNAVAILABLE,
            format!("{leader} leads, and this replica could not take over: {obstacle}\n"),
        ),
    }
}

pub(crate) struct Protection {
    access: MetricsAccess,
    tls: TlsAcceptor,
}

impl Protection {
    /// Metrics over TLS, for those whom the API server allows to read them. The files are read again until `shutdown`.
    pub(crate) fn new(
        files: Option<CertificateFiles>,
        client: Client,
        shutdown: CancellationToken,
    ) -> anyhow::Result<Self> {
        Ok(Self { access: MetricsAccess::new(client), tls: certificate::tls_config(files, shutdown)?.into() })
    }
}

/// Serves /healthz, /readyz, /availablez and /metrics until `shutdown`.
pub(crate) async fn serve(
    listener: TcpListener,
    metrics: Arc<Metrics>,
    readiness: Arc<Readiness>,
    protection: Option<Protection>,
    shutdown: CancellationToken,
) {
    let endpoint = Arc::new(HealthEndpoint { metrics, readiness, protection });
    let serve_one = |stream| {
        let endpoint = Arc::clone(&endpoint);
        async move { endpoint.serve_one(stream).await }
    };
    http::serve_connections(listener, CONNECTIONS, shutdown, serve_one).await;
}

struct HealthEndpoint {
    metrics: Arc<Metrics>,
    readiness: Arc<Readiness>,
    protection: Option<Protection>,
}

impl HealthEndpoint {
    /// Serves one connection. With protection, probes may come with or without TLS: the kubelet verifies no certificate,
    /// and what it learns is no secret.
    async fn serve_one(&self, stream: TcpStream) {
        match &self.protection {
            None => {
                let answer =
                    |request: &Request<Incoming>| self.answer(request.uri().path(), request.headers());
                answer_request(stream, |request| ready(answer(&request))).await;
            }
            Some(protection) if begins_with_tls(&stream).await => {
                let Ok(stream) = protection.tls.accept(stream).await else { return };
                answer_request(stream, |request| self.answer_permitted(request, &protection.access)).await;
            }
            Some(_) => {
                let answer = |request: Request<Incoming>| match request.uri().path() {
                    access::PATH => {
                        (StatusCode::FORBIDDEN, TEXT, "metrics are served over https\n".to_owned())
                    }
                    path => self.answer(path, request.headers()),
                };
                answer_request(stream, |request| ready(answer(request))).await;
            }
        }
    }

    async fn answer_permitted(&self, request: Request<Incoming>, access: &MetricsAccess) -> HttpAnswer {
        let path = request.uri().path();
        if path == access::PATH
            && let Err(refused) = access.check_bearer(request.headers().get(AUTHORIZATION)).await
        {
            return refused;
        }
        self.answer(path, request.headers())
    }

    fn answer(&self, path: &str, headers: &HeaderMap) -> HttpAnswer {
        match path {
            "/healthz" => (StatusCode::OK, TEXT, "ok\n".to_owned()),
            "/readyz" => {
                let (status, text) = self.readiness.answer();
                (status, TEXT, text)
            }
            "/availablez" => {
                let (status, text) = self.readiness.availability();
                (status, TEXT, text)
            }
            access::PATH => {
                self.metrics.set_leadership(&self.readiness.leadership);
                answer_metrics(headers, self.metrics.render())
            }
            _ => (
                StatusCode::NOT_FOUND,
                TEXT,
                "there are /metrics, /healthz, /readyz and /availablez\n".to_owned(),
            ),
        }
    }
}

/// Whether the client begins with a TLS record; waits for its first byte.
async fn begins_with_tls(stream: &TcpStream) -> bool {
    /// The content type of a handshake (RFC 8446, section 5.1). No HTTP method begins with it.
    const HANDSHAKE: u8 = 22;
    let mut first = [0];
    matches!(stream.peek(&mut first).await, Ok(1)) && first[0] == HANDSHAKE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_standby_that_could_not_lead_is_unavailable() {
        let lacks = PreflightState::Obstructed("the definition x is missing".to_owned());
        for (preflight, available, said) in [
            (PreflightState::Pending, false, "is being checked"),
            (lacks, false, "could not take over: the definition x is missing"),
            (PreflightState::Passed, true, "standing by: "),
        ] {
            let (status, text) = standby_answer("pod-a_1", &preflight);
            assert_eq!(status == StatusCode::OK, available, "{preflight:?}");
            assert!(text.contains("pod-a_1 leads") && text.contains(said), "{preflight:?}: {text}");
        }
    }
}
