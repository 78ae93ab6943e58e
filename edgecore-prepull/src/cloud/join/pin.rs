//! Verification of the server by the CA hash in the token.

use std::sync::{Arc, OnceLock};

use prepull_api::enroll::certificate_pem;
use ring::digest::{SHA256, digest};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, OtherError, RootCertStore, SignatureScheme,
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

use crate::cloud::endpoint::PinMismatch;
use crate::cloud::identity::patient::Patient;

/// Trusts only the CA with a certificate of the SHA-256 `pin`. The server must send that certificate in its chain. The
/// server's own certificate is then verified as usual: signature, time and name. After a rotation of the CA, its issuer
/// may be a newer CA that the pinned one has certified.
#[derive(Debug)]
pub(super) struct PinnedCa {
    pin: [u8; 32],
    provider: Arc<CryptoProvider>,
    found: OnceLock<CertificateDer<'static>>,
}

impl PinnedCa {
    pub(super) fn new(pin: [u8; 32]) -> Self {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        Self { pin, provider, found: OnceLock::new() }
    }

    /// A TLS configuration that verifies by the pin, without resumption.
    pub(super) fn client_tls(self: &Arc<Self>) -> Result<Arc<ClientConfig>, Error> {
        let mut config = ClientConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])?
            .dangerous() // demanded by rustls for every verifier but its own
            .with_custom_certificate_verifier(Arc::clone(self) as Arc<dyn ServerCertVerifier>)
            .with_no_client_auth();
        config.resumption = Resumption::disabled();
        Ok(Arc::new(config))
    }

    /// The CA, once a server was verified.
    pub(super) fn found_pem(&self) -> Option<String> {
        self.found.get().map(|ca| certificate_pem(ca))
    }
}

impl ServerCertVerifier for PinnedCa {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let ca = intermediates
            .iter()
            .find(|certificate| digest(&SHA256, certificate).as_ref() == self.pin)
            .ok_or_else(|| CertificateError::Other(OtherError(Arc::new(PinMismatch))))?;
        let ca = ca.clone().into_owned();
        let mut roots = RootCertStore::empty();
        roots.add(ca.clone())?;
        let verifier = WebPkiServerVerifier::builder_with_provider(roots.into(), Arc::clone(&self.provider))
            .build()
            .map_err(|error| Error::General(error.to_string()))?;
        let proof = Patient(verifier).verify_server_cert(
            end_entity,
            intermediates,
            server_name,
            ocsp_response,
            now,
        )?;
        // An earlier handshake may have set it. Then it's the same CA, because the hash is the same.
        let _ = self.found.set(ca);
        Ok(proof)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
