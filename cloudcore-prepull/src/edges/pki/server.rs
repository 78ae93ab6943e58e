//! cloudcore's own certificate, and the TLS configuration of both listeners.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rcgen::SanType;
use rustls::crypto::CryptoProvider;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{CipherSuite, ServerConfig};
use rustls_pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::lapsed::AcceptsExpired;
use super::{CaSet, PkiError};

/// The interval of checks whether the certificate is due for renewal. A month is left when it is due, unless the clock was
/// wrong when it was issued and is set right: then the fleet waits for it.
const CHECK_EVERY: Duration = Duration::from_secs(60);

/// What the listeners serve with, and what certificates are signed with: replaced as a whole when the certificate is
/// renewed or the CAs change.
pub struct ServerIdentity {
    provider: Arc<CryptoProvider>,
    subject_names: Vec<SanType>,
    serving: watch::Sender<Arc<ServingIdentity>>,
}

/// The CAs of one moment, and TLS that goes with them.
#[derive(Debug)]
pub(crate) struct ServingIdentity {
    pub(crate) cas: Arc<CaSet>,
    /// The TLS configuration of the tunnel, which requires a client certificate of our CAs.
    pub(crate) tunnel: Arc<ServerConfig>,
    /// The TLS configuration of enrolment, where a client certificate of our CAs is optional.
    pub(crate) enroll: Arc<ServerConfig>,
    issued: SystemTime,
    not_after: SystemTime,
}

impl fmt::Debug for ServerIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerIdentity").field("subject_names", &self.subject_names).finish_non_exhaustive()
    }
}

impl ServerIdentity {
    /// Issues a certificate for `advertise` (DNS names or IP addresses), `localhost`, `127.0.0.1` and `::1`.
    pub fn new(cas: impl Into<CaSet>, advertise: &[String]) -> Result<Arc<Self>, PkiError> {
        let subject_names = subject_names(advertise)?;
        let provider = Arc::new(quick_provider());
        let serving = serve_with(Arc::new(cas.into()), &provider, &subject_names, SystemTime::now())?;
        Ok(Arc::new(Self { provider, subject_names, serving: watch::Sender::new(Arc::new(serving)) }))
    }

    /// The CAs that are in use now.
    pub fn cas(&self) -> Arc<CaSet> {
        Arc::clone(&self.serving.borrow().cas)
    }

    /// The TLS configuration of enrolment that is in use now. There a client certificate is optional, and may have
    /// expired: see [`PeerIdentity::from_chain_within`](super::peer::PeerIdentity::from_chain_within).
    pub fn enroll_tls(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.serving.borrow().enroll)
    }

    pub(crate) fn serving(&self) -> Arc<ServingIdentity> {
        Arc::clone(&self.serving.borrow())
    }

    /// What is in use now, and a notification whenever it is replaced.
    pub(crate) fn watch(&self) -> watch::Receiver<Arc<ServingIdentity>> {
        self.serving.subscribe()
    }

    /// Takes other CAs into use, with a certificate of their signer. Connections that are being made keep what they began
    /// with. Returns whether anything has changed.
    pub fn adopt(&self, cas: CaSet) -> Result<bool, PkiError> {
        if self.serving.borrow().cas.is_same(&cas) {
            return Ok(false);
        }
        self.reissue(Arc::new(cas), SystemTime::now()).map(|()| true)
    }

    /// Renews the certificate whenever it is due, until `shutdown`.
    pub(crate) async fn keep_renewed(self: Arc<Self>, shutdown: CancellationToken) {
        while shutdown.run_until_cancelled(tokio::time::sleep(CHECK_EVERY)).await.is_some() {
            match self.renew_if_due(SystemTime::now()) {
                Ok(true) => tracing::info!("the server certificate was renewed"),
                Ok(false) => {}
                // Not fatal: a month of attempts is left.
                Err(error) => tracing::error!(%error, "the server certificate was not renewed"),
            }
        }
    }

    /// Renews the certificate if a third or less of its lifetime is left, or if it was issued by a clock that was ahead: edges
    /// refuse it until that time. Returns whether it did.
    fn renew_if_due(&self, now: SystemTime) -> Result<bool, PkiError> {
        let serving = self.serving();
        let life = serving.not_after.duration_since(serving.issued).unwrap_or_default();
        let left = serving.not_after.duration_since(now).unwrap_or_default();
        if now >= serving.issued && left > life / 3 {
            return Ok(false);
        }
        self.reissue(Arc::clone(&serving.cas), now).map(|()| true)
    }

    fn reissue(&self, cas: Arc<CaSet>, now: SystemTime) -> Result<(), PkiError> {
        let serving = serve_with(cas, &self.provider, &self.subject_names, now)?;
        self.serving.send_replace(Arc::new(serving));
        Ok(())
    }
}

/// Whether a certificate can be issued for the name.
pub(crate) fn is_server_name(name: &str) -> bool {
    subject_names(&[name.to_owned()]).is_ok()
}

/// The subject alternative names: `advertise` and the local ones.
fn subject_names(advertise: &[String]) -> Result<Vec<SanType>, PkiError> {
    let mut names = vec![
        SanType::DnsName("localhost".try_into()?),
        SanType::IpAddress(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        SanType::IpAddress(IpAddr::V6(Ipv6Addr::LOCALHOST)),
    ];
    for name in advertise {
        let refused = || PkiError::Advertise(name.clone());
        let name = if let Ok(address) = name.parse::<IpAddr>() {
            SanType::IpAddress(address)
        } else {
            rustls_pki_types::DnsName::try_from(name.as_str()).map_err(|_| refused())?;
            SanType::DnsName(name.as_str().try_into().map_err(|_| refused())?)
        };
        if !names.contains(&name) {
            names.push(name);
        }
    }
    Ok(names)
}

/// Issues a certificate, and sets TLS up with it.
fn serve_with(
    cas: Arc<CaSet>,
    provider: &Arc<CryptoProvider>,
    subject_names: &[SanType],
    now: SystemTime,
) -> Result<ServingIdentity, PkiError> {
    let (certificate, key, not_after) = cas.signer().sign_server(subject_names.to_vec(), now)?;
    let private = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let signer =
        provider.key_provider.load_private_key(private).map_err(|error| PkiError::Tls(error.to_string()))?;
    let chain = std::iter::once(certificate).chain(cas.chain()).collect();
    let own = Arc::new(SingleCertAndKey::from(CertifiedKey::new(chain, signer)));
    let tunnel = tls_config(&cas, provider, &own, true)?;
    let enroll = tls_config(&cas, provider, &own, false)?;
    Ok(ServingIdentity { cas, tunnel, enroll, issued: now, not_after })
}

/// The default algorithms, and first of them the suite whose keys and hashes cost least: processors have instructions for
/// SHA-256, and few for SHA-384. A fleet that comes back is a handshake a millisecond.
fn quick_provider() -> CryptoProvider {
    let mut provider = rustls::crypto::ring::default_provider();
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    provider
}

fn tls_config(
    cas: &CaSet,
    provider: &Arc<CryptoProvider>,
    own: &Arc<SingleCertAndKey>,
    certificate_required: bool,
) -> Result<Arc<ServerConfig>, PkiError> {
    let tls_error = |error: &dyn fmt::Display| PkiError::Tls(error.to_string());
    let verifier = WebPkiClientVerifier::builder_with_provider(cas.roots()?.into(), Arc::clone(provider));
    let verifier = if certificate_required { verifier } else { verifier.allow_unauthenticated() };
    let verifier = verifier.build().map_err(|error| tls_error(&error))?;
    let verifier: Arc<dyn ClientCertVerifier> =
        if certificate_required { verifier } else { Arc::new(AcceptsExpired(verifier)) };
    let mut config = ServerConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])
        .map_err(|error| tls_error(&error))?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(Arc::<SingleCertAndKey>::clone(own));
    config.ignore_client_order = true;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    if certificate_required {
        // Resumption state is in the ticket, which the edge keeps: it takes no memory here. Each configuration has a
        // ticket key of its own, so that no ticket outlives the trust in a CA.
        config.ticketer = rustls::crypto::ring::Ticketer::new().map_err(|error| tls_error(&error))?;
        config.send_tls13_tickets = 1; // an edge opens one connection at a time
    } else {
        // No resumption: each renewal must prove that the edge holds the key.
        config.send_tls13_tickets = 0;
    }
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::edges::pki::Authority;

    #[test]
    fn advertised_values_are_dns_names_or_ips() {
        let advertise = ["cloud.example", "192.0.2.7", "localhost", "2001:db8::7"].map(str::to_owned);
        assert_eq!(subject_names(&advertise).unwrap().len(), 6);
        for bad in ["", "https://cloud.example", "cloud.example:10000", "a b"] {
            assert!(
                matches!(subject_names(&[bad.to_owned()]), Err(PkiError::Advertise(name)) if name == bad),
                "{bad}"
            );
        }
    }

    #[test]
    fn the_cheapest_suite_comes_first() {
        let (authority, _) = Authority::generate(SystemTime::now()).unwrap();
        let serving = ServerIdentity::new(authority, &[]).unwrap().serving();
        for config in [&serving.tunnel, &serving.enroll] {
            let suites = &config.crypto_provider().cipher_suites;
            assert_eq!(suites[0].suite(), CipherSuite::TLS13_AES_128_GCM_SHA256);
            assert_eq!(suites.len(), rustls::crypto::ring::default_provider().cipher_suites.len());
            assert!(config.ignore_client_order, "agents of our own ask for another one first");
        }
    }

    #[test]
    fn a_certificate_renews_with_a_third_left() {
        let (authority, _) = Authority::generate(SystemTime::now()).unwrap();
        let identity = ServerIdentity::new(authority, &[]).unwrap();
        let (first, day) = (identity.serving(), Duration::from_secs(24 * 3600));
        assert!(!identity.renew_if_due(SystemTime::now() + 59 * day).unwrap());
        assert!(Arc::ptr_eq(&identity.serving(), &first));
        assert!(identity.renew_if_due(SystemTime::now() + 61 * day).unwrap());
        assert!(identity.serving().not_after > first.not_after);
        assert!(!identity.renew_if_due(SystemTime::now() + 62 * day).unwrap());
    }

    #[test]
    fn a_clock_set_back_renews() {
        let (authority, _) = Authority::generate(SystemTime::now()).unwrap();
        let identity = ServerIdentity::new(authority, &[]).unwrap();
        let (first, right) = (identity.serving(), SystemTime::now() - Duration::from_secs(8 * 3600));
        assert!(identity.renew_if_due(right).unwrap());
        assert!(identity.serving().not_after < first.not_after);
        assert!(!identity.renew_if_due(right + CHECK_EVERY).unwrap());
    }
}
