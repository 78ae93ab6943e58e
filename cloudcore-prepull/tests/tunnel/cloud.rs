//! The cloud's end of the tunnel: both listeners, with tokens in memory.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use cloudcore_prepull::edges::pki::{Authority, CaSet, ServerIdentity, VerifiedCsr};
use cloudcore_prepull::edges::roster::Roster;
use cloudcore_prepull::edges::tokens::{Scope, Tokens};
use cloudcore_prepull::edges::tunnel::{ListenerSettings, Sessions, listener};
use cloudcore_prepull::edges::{PortTerms, enroll};
use cloudcore_prepull::run::metrics::Metrics;
use prepull_api::enroll::{JoinToken, SubjectForm};
use prepull_api::task::{JobUid, NodeName, TaskId};
use prepull_api::wire::{CloudMessage, EdgeMessage, Hello};
use prepull_engine::fleet::session::{SessionEvent, SessionId};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};

/// A deadline that no step of a test exceeds, even on a busy machine.
pub(crate) const SOON: Duration = Duration::from_secs(15);
pub(crate) const HOUR: Duration = Duration::from_secs(3600);

pub(crate) struct Cloud {
    pub(crate) identity: Arc<ServerIdentity>,
    /// The CA's key, PEM.
    pub(crate) authority_key: String,
    pub(crate) tokens: Tokens,
    pub(crate) sessions: Sessions,
    pub(crate) tunnel: std::net::SocketAddr,
    pub(crate) enroll: std::net::SocketAddr,
    events: mpsc::Receiver<SessionEvent>,
    pub(crate) metrics: Metrics,
    pub(crate) shutdown: CancellationToken,
    pub(crate) serving: JoinHandle<()>,
    _stop: DropGuard,
}

/// Settings with a short heartbeat, for tests that wait for silence.
pub(crate) fn fast() -> ListenerSettings {
    ListenerSettings { heartbeat: Duration::from_millis(200), ..ListenerSettings::default() }
}

impl Cloud {
    pub(crate) fn start() -> Self {
        Self::start_with(ListenerSettings::default())
    }

    pub(crate) fn start_with(settings: ListenerSettings) -> Self {
        let (authority, authority_key) = Authority::generate(SystemTime::now()).unwrap();
        let identity = ServerIdentity::new(authority, &["cloud.example".to_owned()]).unwrap();
        Self::of(identity, authority_key, settings)
    }

    /// Starts another replica with the same CA.
    pub(crate) fn beside(&self, settings: ListenerSettings) -> Self {
        Self::of(Arc::clone(&self.identity), self.authority_key.clone(), settings)
    }

    fn of(identity: Arc<ServerIdentity>, authority_key: String, settings: ListenerSettings) -> Self {
        let any = "127.0.0.1:0".parse().unwrap();
        let (tunnel, enroll) = (listener::bind(any).unwrap(), listener::bind(any).unwrap());
        let (tunnel_address, enroll_address) = (tunnel.local_addr().unwrap(), enroll.local_addr().unwrap());
        let (sender, events) = mpsc::channel(64);
        let (sessions, tokens, shutdown) =
            (Sessions::default(), Tokens::in_memory(), CancellationToken::new());
        let (metrics, roster) = (Metrics::default(), Roster::in_memory());
        let door = PortTerms {
            identity: Arc::clone(&identity),
            roster,
            metrics: metrics.edges(),
            shutdown: shutdown.clone(),
        };
        let enrolment =
            enroll::serve(enroll, door.clone(), tokens.clone(), enroll::EnrollSettings::default());
        tokio::spawn(enrolment);
        let serving = tokio::spawn(listener::serve(tunnel, door, sessions.clone(), sender, settings));
        Self {
            identity,
            authority_key,
            tokens,
            sessions,
            tunnel: tunnel_address,
            enroll: enroll_address,
            events,
            metrics,
            _stop: shutdown.clone().drop_guard(),
            shutdown,
            serving,
        }
    }

    /// The CA that signs.
    pub(crate) fn cas(&self) -> Arc<CaSet> {
        self.identity.cas()
    }

    pub(crate) fn tunnel_url(&self) -> String {
        format!("wss://{}/v1/edge", self.tunnel)
    }

    pub(crate) fn enroll_url(&self) -> String {
        format!("https://{}", self.enroll)
    }

    pub(crate) async fn token(&self, scope: Scope) -> JoinToken {
        self.tokens
            .stored()
            .create(self.cas().signer().fingerprint(), scope, HOUR, SystemTime::now())
            .await
            .unwrap()
    }

    /// Signs a certificate as enrolment would, for any validity.
    pub(crate) fn certificate(&self, csr: &str, node: &str, ttl: Duration, now: SystemTime) -> String {
        self.certificate_of_form(SubjectForm::Own, csr, node, now..now + ttl)
    }

    pub(crate) fn certificate_of_form(
        &self,
        form: SubjectForm,
        csr: &str,
        node: &str,
        validity: Range<SystemTime>,
    ) -> String {
        let csr = VerifiedCsr::from_pem(csr).unwrap();
        self.cas().signer().sign_client(&csr, &node.into(), form, validity).unwrap().pem
    }

    pub(crate) async fn event(&mut self) -> SessionEvent {
        timeout(SOON, self.events.recv()).await.expect("no event came").unwrap()
    }

    pub(crate) async fn no_event(&mut self, within: Duration) {
        if let Ok(event) = timeout(within, self.events.recv()).await {
            panic!("{event:?}");
        }
    }

    pub(crate) async fn up(&mut self) -> (NodeName, SessionId, Hello) {
        match self.event().await {
            SessionEvent::Up { node, session, hello } => (node, session, *hello),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn down(&mut self) -> (NodeName, SessionId) {
        match self.event().await {
            SessionEvent::Down { node, session } => (node, session),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn message(&mut self) -> (NodeName, EdgeMessage) {
        match self.event().await {
            SessionEvent::Message { node, message, .. } => (node, message),
            other => panic!("{other:?}"),
        }
    }
}

pub(crate) fn task(job: &str) -> TaskId {
    TaskId { job: JobUid(job.into()), attempt: 1 }
}

pub(crate) fn ack(job: &str) -> CloudMessage {
    CloudMessage::ResultAck { task: task(job) }
}
