//! cloudcore's own certificate, and the TLS configuration of both listeners.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use rcgen::SanType;
use rustls::crypto::CryptoProvider;
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{RootCertStore, ServerConfig};
use rustls_pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio_util::sync::CancellationToken;

use super::{Authority, PkiError};

/// The interval of checks whether the certificate is due for renewal. A month is left when it is due.
const CHECK_EVERY: Duration = Duration::from_secs(24 * 3600);

/// cloudcore's own certificate, which is renewed while listeners use it.
pub struct ServerIdentity {
    authority: Arc<Authority>,
    provider: Arc<CryptoProvider>,
    subject_names: Vec<SanType>,
    current: RwLock<IssuedCertificate>,
}

struct IssuedCertificate {
    key: Arc<CertifiedKey>,
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
    pub fn new(authority: Arc<Authority>, advertise: &[String]) -> Result<Arc<Self>, PkiError> {
        let subject_names = subject_names(advertise)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let current = issue_certificate(&authority, &provider, &subject_names, SystemTime::now())?;
        Ok(Arc::new(Self { authority, provider, subject_names, current: RwLock::new(current) }))
    }

    /// The TLS configuration of the tunnel, which requires a client certificate of our CA.
    pub fn tunnel_tls(self: &Arc<Self>) -> Result<Arc<ServerConfig>, PkiError> {
        self.tls_config(true)
    }

    /// The TLS configuration of enrolment, where a client certificate of our CA is optional.
    pub fn enroll_tls(self: &Arc<Self>) -> Result<Arc<ServerConfig>, PkiError> {
        self.tls_config(false)
    }

    /// Renews the certificate whenever it is due, until `shutdown`.
    pub(crate) async fn keep_renewed(self: Arc<Self>, shutdown: CancellationToken) {
        while shutdown.run_until_cancelled(tokio::time::sleep(CHECK_EVERY)).await.is_some() {
            match self.renew_if_due(SystemTime::now()) {
                Ok(true) => tracing::info!("the server certificate was renewed"),
                Ok(false) => {}
                // Not fatal: a month of daily attempts is left.
                Err(error) => tracing::error!(%error, "the server certificate was not renewed"),
            }
        }
    }

    /// Renews the certificate if a third or less of its lifetime is left. Returns whether it did.
    fn renew_if_due(&self, now: SystemTime) -> Result<bool, PkiError> {
        {
            let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
            let life = current.not_after.duration_since(current.issued).unwrap_or_default();
            if current.not_after.duration_since(now).unwrap_or_default() > life / 3 {
                return Ok(false);
            }
        }
        let renewed = issue_certificate(&self.authority, &self.provider, &self.subject_names, now)?;
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = renewed;
        Ok(true)
    }

    fn tls_config(self: &Arc<Self>, certificate_required: bool) -> Result<Arc<ServerConfig>, PkiError> {
        let tls_error = |error: &dyn fmt::Display| PkiError::Tls(error.to_string());
        let mut roots = RootCertStore::empty();
        roots.add(self.authority.certificate().clone()).map_err(|error| tls_error(&error))?;
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), Arc::clone(&self.provider));
        let verifier = if certificate_required { verifier } else { verifier.allow_unauthenticated() };
        let mut config = ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])
            .map_err(|error| tls_error(&error))?
            .with_client_cert_verifier(verifier.build().map_err(|error| tls_error(&error))?)
            .with_cert_resolver(Arc::clone(self) as Arc<dyn ResolvesServerCert>);
        // Resumption state is in the ticket, which the edge keeps: it takes no memory here. Each listener has a ticket
        // key of its own, so that a ticket of one is useless at the other.
        config.ticketer = rustls::crypto::ring::Ticketer::new().map_err(|error| tls_error(&error))?;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 1; // an edge opens one connection at a time
        Ok(Arc::new(config))
    }
}

impl ResolvesServerCert for ServerIdentity {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner).key))
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

fn issue_certificate(
    authority: &Authority,
    provider: &CryptoProvider,
    subject_names: &[SanType],
    now: SystemTime,
) -> Result<IssuedCertificate, PkiError> {
    let (certificate, key, not_after) = authority.sign_server(subject_names.to_vec(), now)?;
    let private = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let signer =
        provider.key_provider.load_private_key(private).map_err(|error| PkiError::Tls(error.to_string()))?;
    // The chain includes the CA, because a joining edge knows only its hash.
    let chain = vec![certificate, authority.certificate().clone()];
    Ok(IssuedCertificate { key: Arc::new(CertifiedKey::new(chain, signer)), issued: now, not_after })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn an_advertised_value_is_a_dns_name_or_an_ip_address() {
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
    fn the_certificate_is_renewed_when_a_third_of_its_life_is_left() {
        let (authority, _) = Authority::generate(SystemTime::now()).unwrap();
        let identity = ServerIdentity::new(Arc::new(authority), &[]).unwrap();
        let shown = || identity.current.read().unwrap().key.cert[0].clone();
        let (first, day) = (shown(), Duration::from_secs(24 * 3600));
        assert!(!identity.renew_if_due(SystemTime::now() + 59 * day).unwrap());
        assert_eq!(shown(), first);
        assert!(identity.renew_if_due(SystemTime::now() + 61 * day).unwrap());
        assert_ne!(shown(), first);
        assert!(!identity.renew_if_due(SystemTime::now() + 62 * day).unwrap());
    }
}
