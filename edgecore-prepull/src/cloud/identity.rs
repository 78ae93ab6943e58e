//! Who this edge is: its certificate and key, and the CA that it trusts.
//!
//! ```text
//!  join ──▶ DIR/pki/{ca.crt,client.crt,client.key} ──▶ Identity ──▶ TLS of the tunnel
//!                     ▲                                   │
//!                     └──────── renew, over mTLS ◀────────┘
//! ```

mod files;
mod renew;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use prepull_api::task::NodeName;
use rustls::ClientConfig;
use rustls::client::Resumption;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::sync::watch;

pub use files::Connection;
pub(crate) use files::{StateDir, certificate_facts};
pub use renew::RenewError;

/// TLS sessions that can be resumed: of the server that was dialled last, the few tickets that it hands out.
const TICKETS: usize = 4;

/// For files of the state directory that the system does not let this user have.
pub(crate) const REMEDY_OF_DENIAL: &str =
    "permission denied: run edgecore-prepull as root, or give it a --state-dir of its own";

/// Why this edge has no identity.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// Nobody has joined here.
    #[error("{}: this node has not joined: run `edgecore-prepull join` first", .0.display())]
    NotJoined(PathBuf),
    /// A file cannot be read or written.
    #[error("{operation} {}", path.display())]
    File {
        /// `reading`, `writing`, …
        operation: &'static str,
        /// Which.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// It belongs to another user.
    #[error("{operation} {}: {REMEDY_OF_DENIAL}", path.display())]
    Denied {
        /// `reading`, `writing`, …
        operation: &'static str,
        /// Which.
        path: PathBuf,
    },
    /// A file holds something else.
    #[error("{}: {reason}: join again with a new token", path.display())]
    Malformed {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// Too late.
    #[error(
        "the certificate of node {node} expired at {}: join again with a new token (or set this machine's clock, if \
         {} is wrong)",
        humantime::format_rfc3339_seconds(*not_after),
        humantime::format_rfc3339_seconds(*now)
    )]
    Expired {
        /// Whose.
        node: NodeName,
        /// Its end.
        not_after: SystemTime,
        /// By this machine.
        now: SystemTime,
    },
    /// rustls does not accept what the files hold.
    #[error("the certificate in {} cannot be used: {reason}: join again with a new token", dir.display())]
    Unusable {
        /// `DIR/pki`.
        dir: PathBuf,
        /// In rustls' words.
        reason: String,
    },
}

impl IdentityError {
    fn file(operation: &'static str, path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::PermissionDenied => Self::Denied { operation, path },
            _ => Self::File { operation, path, source },
        }
    }
}

/// The certificate of this edge, always the latest one.
#[derive(Clone)]
pub struct Identity {
    dir: StateDir,
    current: Arc<watch::Sender<Arc<Current>>>,
}

/// One certificate.
pub(crate) struct Current {
    pub(crate) node: NodeName,
    pub(crate) not_before: SystemTime,
    pub(crate) not_after: SystemTime,
    pub(crate) tls: Arc<ClientConfig>,
    certificate: CertificateDer<'static>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({})", self.node())
    }
}

impl Identity {
    /// Reads what `join` left in `state_dir`.
    ///
    /// # Errors
    /// Among others [`IdentityError::NotJoined`] and [`IdentityError::Expired`], each with its remedy.
    pub fn load(state_dir: &Path) -> Result<Self, IdentityError> {
        let dir = StateDir::new(state_dir);
        let current = read(&dir)?;
        current.check_expiry(SystemTime::now())?;
        Ok(Self { dir, current: Arc::new(watch::Sender::new(Arc::new(current))) })
    }

    /// Who this edge is.
    pub fn node(&self) -> NodeName {
        self.current.borrow().node.clone()
    }

    /// Until when, unless it is renewed.
    pub fn not_after(&self) -> SystemTime {
        self.current.borrow().not_after
    }

    /// The latest, and the news of a later one.
    pub(crate) fn watch(&self) -> watch::Receiver<Arc<Current>> {
        self.current.subscribe()
    }

    /// Takes over what the files hold now; whether that was something new.
    fn reload(&self) -> Result<bool, IdentityError> {
        let read = read(&self.dir)?;
        read.check_expiry(SystemTime::now())?;
        Ok(self.current.send_if_modified(|current| {
            let new = current.certificate != read.certificate;
            if new {
                *current = Arc::new(read);
            }
            new
        }))
    }
}

impl Current {
    fn check_expiry(&self, now: SystemTime) -> Result<(), IdentityError> {
        if self.not_after <= now {
            return Err(IdentityError::Expired { node: self.node.clone(), not_after: self.not_after, now });
        }
        Ok(())
    }
}

fn read(dir: &StateDir) -> Result<Current, IdentityError> {
    let files::Pki { ca, certificate, key, facts } = dir.read_pki()?;
    let tls = client_tls(ca, certificate.clone(), key)
        .map_err(|error| IdentityError::Unusable { dir: dir.pki(), reason: error.to_string() })?;
    let files::Facts { node, not_before, not_after, public_key: _ } = facts;
    Ok(Current { node, not_before, not_after, tls: Arc::new(tls), certificate })
}

/// Our CA and no other; resumption on, and with every new certificate from the beginning: a ticket stands for
/// the certificate that it was given to.
fn client_tls(
    ca: CertificateDer<'static>,
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
) -> Result<ClientConfig, rustls::Error> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(ca)?;
    let mut config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])?
        .with_root_certificates(roots)
        .with_client_auth_cert(vec![certificate], key)?;
    config.resumption = Resumption::in_memory_sessions(TICKETS);
    Ok(config)
}
