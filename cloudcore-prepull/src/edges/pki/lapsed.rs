//! The verifier of the enrolment endpoint, where a certificate may have expired: renewing decides how long ago.

use std::sync::Arc;
use std::time::Duration;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};
use rustls_pki_types::{CertificateDer, UnixTime};
use x509_parser::prelude::{FromDer, X509Certificate};

/// Verifies as another verifier does, but takes an expired certificate for what it was in the last second of its life, and one
/// from the future for what it is in the first: a replica with a wrong clock has issued it.
/// Everything else must be right: issuer, usage, and that the peer holds its key.
#[derive(Debug)]
pub(super) struct AcceptsExpired(pub(super) Arc<dyn ClientCertVerifier>);

impl ClientCertVerifier for AcceptsExpired {
    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.0.verify_client_cert(end_entity, intermediates, now);
        let Err(Error::InvalidCertificate(problem)) = &verified else { return verified };
        let Some((first, last)) = validity(end_entity) else { return verified };
        match problem {
            // Verify as of that second: an issuer that had expired by then is still refused.
            CertificateError::Expired | CertificateError::ExpiredContext { .. } if last < now => {
                self.0.verify_client_cert(end_entity, intermediates, last)
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } if first > now => {
                self.0.verify_client_cert(end_entity, intermediates, first)
            }
            _ => verified,
        }
    }

    fn offer_client_auth(&self) -> bool {
        self.0.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.0.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

/// The first and the last second in which a certificate is valid.
fn validity(certificate: &CertificateDer<'_>) -> Option<(UnixTime, UnixTime)> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let time =
        |seconds: i64| Some(UnixTime::since_unix_epoch(Duration::from_secs(u64::try_from(seconds).ok()?)));
    let validity = certificate.validity();
    Some((time(validity.not_before.timestamp())?, time(validity.not_after.timestamp())?))
}
