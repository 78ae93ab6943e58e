//! The current certificate, which a newer one can replace while the agent runs.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use prepull_api::enroll::certificate_pem;
use prepull_api::task::NodeName;
use rustls::ClientConfig;
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::sync::watch;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::error::IdentityError;
use super::files::{CertificateFacts, Pki, StateDir};
use super::patient::Patient;
use super::peers::{PeerTls, peer_tls, root_store};
use crate::clock::CloudClock;
use crate::one_question::OneQuestion;

/// TLS sessions kept for resumption: one server hands out a few tickets.
const TICKETS: usize = 4;

/// The identity of this node. All clones see a renewed certificate immediately.
#[derive(Clone)]
pub struct Identity {
    pub(super) dir: StateDir,
    pub(super) current: Arc<watch::Sender<Arc<CurrentCertificate>>>,
    /// Time at which to renew a certificate that isn't old yet, because another CA signs now.
    pub(super) renew_at: Arc<watch::Sender<Option<SystemTime>>>,
    pub(super) clock: Arc<CloudClock>,
    /// The end of the certificate that the cloud has refused as expired.
    pub(super) refused: Arc<watch::Sender<Option<SystemTime>>>,
    /// A renewal and a change of the CAs both read all the files after writing theirs, so they take turns.
    files: OneQuestion,
}

/// One certificate, ready for use.
pub(crate) struct CurrentCertificate {
    pub(crate) node: NodeName,
    pub(crate) not_before: SystemTime,
    pub(crate) not_after: SystemTime,
    pub(crate) tls: Arc<ClientConfig>,
    /// TLS with the neighbours of the site.
    pub(crate) peers: PeerTls,
    certificate: CertificateDer<'static>,
    /// The CAs as PEM.
    pub(super) bundle: String,
    /// Whether the CA that signs now has issued the certificate.
    pub(super) is_of_signer: bool,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({})", self.node())
    }
}

impl Identity {
    /// Loads the files that `join` wrote to `state_dir`. An expired certificate is accepted: cloudcore-prepull may
    /// still renew it, and this machine's clock may be wrong.
    ///
    /// # Errors
    /// Among others [`IdentityError::NotJoined`], with its remedy.
    pub fn load(state_dir: &Path) -> Result<Self, IdentityError> {
        let dir = StateDir::new(state_dir);
        let clock = Arc::default();
        let current = load_current(&dir, &clock)?;
        let current = Arc::new(watch::Sender::new(Arc::new(current)));
        let (renew_at, refused) = (Arc::new(watch::Sender::new(None)), Arc::new(watch::Sender::new(None)));
        Ok(Self { dir, current, renew_at, clock, refused, files: OneQuestion::default() })
    }

    /// The cloud's time, updated by each session.
    pub(crate) fn clock(&self) -> &Arc<CloudClock> {
        &self.clock
    }

    /// The node that the certificate is for.
    pub fn node(&self) -> NodeName {
        self.current.borrow().node.clone()
    }

    /// The end of the current certificate's validity.
    pub fn not_after(&self) -> SystemTime {
        self.current.borrow().not_after
    }

    /// Whether the certificate has expired, by the cloud's time, or by this machine's before the first session.
    pub fn has_expired(&self) -> bool {
        let until = self.not_after();
        *self.refused.borrow() == Some(until) || until <= self.now()
    }

    /// Notes whether the cloud refuses the certificate with this end as expired: its clock counts, and that of a box without a
    /// battery may be years behind.
    pub(crate) fn note_refused(&self, refused: Option<SystemTime>) {
        self.refused.send_if_modified(|before| std::mem::replace(before, refused) != refused);
    }

    /// The time by which certificates count.
    pub(super) fn now(&self) -> SystemTime {
        UNIX_EPOCH + self.clock.now()
    }

    /// The current certificate, with a notification for each replacement.
    pub(crate) fn watch(&self) -> watch::Receiver<Arc<CurrentCertificate>> {
        self.current.subscribe()
    }

    /// Runs work on the files, which may block for long, away from the agent's only thread. Work that has begun goes on if its
    /// caller is dropped.
    pub(super) async fn use_files<T, E>(
        &self,
        work: impl FnOnce(&Self) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<IdentityError> + Send + 'static,
    {
        let identity = self.clone();
        let done = self.files.ask(move || work(&identity)).await;
        done.unwrap_or_else(|error| {
            Err(IdentityError::for_file("use", &self.dir.pki(), io::Error::from(error)).into())
        })
    }

    /// Takes over the certificate and the CAs on disk. Returns whether the certificate has changed: only then must
    /// sessions restart. May block for long.
    pub(super) fn reload(&self) -> Result<bool, IdentityError> {
        let loaded = load_current(&self.dir, &self.clock)?;
        Ok(self.current.send_if_modified(|current| {
            let is_new = current.certificate != loaded.certificate;
            *current = Arc::new(loaded);
            is_new
        }))
    }
}

fn load_current(dir: &StateDir, clock: &Arc<CloudClock>) -> Result<CurrentCertificate, IdentityError> {
    let Pki { cas, certificate, key, facts } = dir.read_pki()?;
    let is_of_signer = cas.first().is_some_and(|signer| has_signed(signer, &certificate));
    let bundle = cas.iter().map(|ca| certificate_pem(ca)).collect();
    let unusable =
        |error: rustls::Error| IdentityError::Unusable { dir: dir.pki(), reason: error.to_string() };
    let peers = peer_tls(&cas, &certificate, &key, clock).map_err(unusable)?;
    let tls = client_tls(cas, certificate.clone(), key).map_err(unusable)?;
    let CertificateFacts { node, not_before, not_after, public_key: _ } = facts;
    Ok(CurrentCertificate {
        node,
        not_before,
        not_after,
        tls: Arc::new(tls),
        peers,
        certificate,
        bundle,
        is_of_signer,
    })
}

fn has_signed(ca: &CertificateDer<'_>, certificate: &CertificateDer<'_>) -> bool {
    let (Ok((_, ca)), Ok((_, certificate))) =
        (X509Certificate::from_der(ca), X509Certificate::from_der(certificate))
    else {
        return false;
    };
    certificate.verify_signature(Some(ca.public_key())).is_ok()
}

/// TLS that trusts only our CAs. Each certificate has its own session store, because a ticket stands for the
/// certificate that it was issued to.
fn client_tls(
    cas: Vec<CertificateDer<'static>>,
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
) -> Result<ClientConfig, rustls::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let cloud = WebPkiServerVerifier::builder_with_provider(root_store(cas)?.into(), Arc::clone(&provider))
        .build()
        .map_err(|error| rustls::Error::General(error.to_string()))?;
    // Use this machine's clock rather than the cloud's: otherwise a cloud that sent a wrong time once would lock us
    // out.
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])?
        .dangerous() // demanded by rustls for every verifier but its own
        .with_custom_certificate_verifier(Arc::new(Patient(cloud)))
        .with_client_auth_cert(vec![certificate], key)?;
    config.resumption = Resumption::in_memory_sessions(TICKETS);
    Ok(config)
}
