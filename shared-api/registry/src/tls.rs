//! Trust in a registry: the CAs of the system and of hosts.toml, client certificates, or no verification at all.

use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;

use ring::digest::{Context, SHA256};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::time_provider::TimeProvider;
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use zeroize::Zeroizing;

use crate::error::{ErrorKind, RegistryError};

/// Largest file of certificates or keys that is read: the bundle of all public CAs has a quarter of that.
const MAX_FILE: u64 = 1 << 20;

/// What TLS to a registry is made with, as the files have it.
#[derive(Clone, Default)]
pub(crate) struct Tls {
    /// PEM, beside the CAs of the system.
    cas: Vec<Vec<u8>>,
    /// PEM of a certificate and of its key.
    pair: Option<(Vec<u8>, Zeroizing<Vec<u8>>)>,
    skip_verify: bool,
}

/// Distinguishes what TLS is made with.
pub(crate) type TlsKey = [u8; 32];

impl Tls {
    pub(crate) fn add_ca(&mut self, file: &Path) -> Result<(), RegistryError> {
        self.cas.push(read_file(file)?);
        Ok(())
    }

    /// Adds a client certificate; the file of the certificate has the key as well if there is none for the key.
    pub(crate) fn add_pair(&mut self, certificate: &Path, key: Option<&Path>) -> Result<(), RegistryError> {
        if self.pair.is_some() {
            return Err(unsupported("several client certificates for one registry"));
        }
        let key = Zeroizing::new(read_file(key.unwrap_or(certificate))?);
        self.pair = Some((read_file(certificate)?, key));
        Ok(())
    }

    pub(crate) fn has_client_certificate(&self) -> bool {
        self.pair.is_some()
    }

    pub(crate) fn skip_verify(&mut self, skip: bool) {
        self.skip_verify = skip;
    }

    pub(crate) fn cache_key(&self) -> TlsKey {
        let mut context = Context::new(&SHA256);
        let mut part = |tag: u8, bytes: &[u8]| {
            context.update(&[tag]);
            context.update(&bytes.len().to_le_bytes());
            context.update(bytes);
        };
        self.cas.iter().for_each(|ca| part(0, ca));
        if let Some((certificate, key)) = &self.pair {
            part(1, certificate);
            part(2, key);
        }
        part(3, &[u8::from(self.skip_verify)]);
        let mut key = TlsKey::default();
        key.copy_from_slice(context.finish().as_ref());
        key
    }

    /// The configuration for rustls, in which certificates are valid by this time. Reads the CAs of the system.
    pub(crate) fn client_config(&self, time: Arc<dyn TimeProvider>) -> Result<ClientConfig, RegistryError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_details(Arc::clone(&provider), time)
            .with_safe_default_protocol_versions()
            .map_err(|error| unsupported(format!("TLS: {error}")))?;
        let builder = if self.skip_verify {
            builder.dangerous().with_custom_certificate_verifier(Arc::new(Unverified(provider)))
        } else {
            builder.with_root_certificates(self.root_store()?)
        };
        let Some((certificate, key)) = &self.pair else { return Ok(builder.with_no_client_auth()) };
        let bad = |what: &str| unsupported(format!("the client certificate of hosts.toml: {what}"));
        let chain: Vec<_> = certificates(certificate).map_err(|()| bad("no PEM certificate"))?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| bad("no PEM key"))?;
        builder.with_client_auth_cert(chain, key).map_err(|error| bad(&error.to_string()))
    }

    fn root_store(&self) -> Result<RootCertStore, RegistryError> {
        let mut roots = RootCertStore::empty();
        // A system without CAs is no error: hosts.toml may name the only one that is needed.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        for ca in &self.cas {
            let bad = || unsupported("a CA file of hosts.toml has no PEM certificate that can be used");
            for certificate in certificates(ca).map_err(|()| bad())? {
                roots.add(certificate).map_err(|_| bad())?;
            }
        }
        Ok(roots)
    }
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, ()> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    all.ok().filter(|all| !all.is_empty()).ok_or(())
}

fn read_file(file: &Path) -> Result<Vec<u8>, RegistryError> {
    read_limited(file, MAX_FILE)
        .map_err(|error| unsupported(format!("cannot read {}: {error}", file.display())))
}

/// Reads a file of at most `limit` bytes.
pub(crate) fn read_limited(file: &Path, limit: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(file)?.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(std::io::Error::new(
            std::io::ErrorKind::FileTooLarge,
            format!("larger than {limit} bytes"),
        ));
    }
    Ok(bytes)
}

fn unsupported(message: impl AsRef<str>) -> RegistryError {
    RegistryError::new(ErrorKind::Unsupported, message)
}

/// Accepts every certificate: `skip_verify`.
#[derive(Debug)]
struct Unverified(Arc<CryptoProvider>);

impl ServerCertVerifier for Unverified {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
