//! The certificate of the metrics with `--metrics-secure`: of files, which are read again when they change, or made at the
//! start.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use parking_lot::RwLock;
use rustls::ServerConfig;
use rustls::crypto::CryptoProvider;
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio_util::sync::CancellationToken;

/// The interval between two readings of the files: the kubelet takes as long to bring a changed Secret.
const READ_EVERY: Duration = Duration::from_secs(60);

/// Files with a certificate and its key, PEM.
#[derive(Clone, Debug)]
pub(crate) struct CertificateFiles {
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
}

/// The certificate that is shown at present.
#[derive(Debug)]
struct MetricsCertificate(RwLock<Arc<CertifiedKey>>);

impl ResolvesServerCert for MetricsCertificate {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0.read()))
    }
}

/// The TLS configuration, with the certificate of the files or with one of its own. Reads the files again until
/// `shutdown`.
pub(super) fn tls_config(
    files: Option<CertificateFiles>,
    shutdown: CancellationToken,
) -> anyhow::Result<Arc<ServerConfig>> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let first = match &files {
        Some(files) => read_certificate(files, &provider)?,
        None => self_signed(&provider).context("make a certificate for the metrics")?,
    };
    let current = Arc::new(MetricsCertificate(RwLock::new(Arc::new(first))));
    let mut config = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_cert_resolver(Arc::clone(&current) as Arc<dyn ResolvesServerCert>);
    // Each connection serves one request; nothing is kept for a next one.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    if let Some(files) = files {
        tokio::spawn(keep_read(files, current, provider, shutdown));
    }
    Ok(Arc::new(config))
}

async fn keep_read(
    files: CertificateFiles,
    current: Arc<MetricsCertificate>,
    provider: Arc<CryptoProvider>,
    shutdown: CancellationToken,
) {
    while shutdown.run_until_cancelled(tokio::time::sleep(READ_EVERY)).await.is_some() {
        match read_certificate(&files, &provider) {
            Ok(fresh) => {
                let mut current = current.0.write();
                if current.cert != fresh.cert {
                    tracing::info!("the certificate of the metrics has been replaced");
                    *current = Arc::new(fresh);
                }
            }
            // The one before is shown on: the two files are not replaced in one step everywhere.
            Err(error) => {
                let error = prepull_program::errors::with_causes(error.as_ref());
                tracing::warn!(error, "the certificate of the metrics was not read again");
            }
        }
    }
}

fn read_certificate(files: &CertificateFiles, provider: &CryptoProvider) -> anyhow::Result<CertifiedKey> {
    let CertificateFiles { certificate, key } = files;
    let chain = CertificateDer::pem_file_iter(certificate)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .with_context(|| format!("read --metrics-cert {}", certificate.display()))?;
    let private =
        PrivateKeyDer::from_pem_file(key).with_context(|| format!("read --metrics-key {}", key.display()))?;
    CertifiedKey::from_der(chain, private, provider).with_context(|| {
        format!("use --metrics-cert {} with --metrics-key {}", certificate.display(), key.display())
    })
}

/// A self-signed certificate, which clients can't verify: it protects from listeners, and not from a man in the middle.
fn self_signed(provider: &CryptoProvider) -> anyhow::Result<CertifiedKey> {
    let own =
        rcgen::generate_simple_self_signed(["localhost".to_owned(), "cloudcore-prepull-metrics".to_owned()])?;
    let private = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(own.signing_key.serialize_der()));
    Ok(CertifiedKey::from_der(vec![own.cert.der().clone()], private, provider)?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn certificate_and_key_must_match() {
        let (dir, provider) = (tempfile::tempdir().unwrap(), rustls::crypto::ring::default_provider());
        let make = || rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let (one, other) = (make(), make());
        let files =
            CertificateFiles { certificate: dir.path().join("tls.crt"), key: dir.path().join("tls.key") };
        let error = read_certificate(&files, &provider).unwrap_err();
        assert!(error.to_string().contains("--metrics-cert"), "{error}");
        std::fs::write(&files.certificate, one.cert.pem()).unwrap();
        std::fs::write(&files.key, other.signing_key.serialize_pem()).unwrap();
        let error = read_certificate(&files, &provider).unwrap_err();
        assert!(error.to_string().contains("--metrics-key"), "{error}");
        std::fs::write(&files.key, one.signing_key.serialize_pem()).unwrap();
        assert_eq!(read_certificate(&files, &provider).unwrap().cert, [one.cert.der().clone()]);
        self_signed(&provider).unwrap();
    }
}
