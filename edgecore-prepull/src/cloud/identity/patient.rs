//! Verification of the cloud on a machine with a clock that isn't set. The clock shows 1970, or another time before this
//! program was built, at which no certificate is valid yet. Without a session the machine would never learn the time.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::{DigitallySignedStruct, Error, SignatureScheme};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

use crate::clock::{is_machine_set, verify_at};

/// Verifies like rustls. But if the clock isn't set, a certificate of our CA may start in the future.
#[derive(Debug)]
pub(in crate::cloud) struct Patient(pub(in crate::cloud) Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for Patient {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        verify_at(now, is_machine_set(), |now| {
            self.0.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
        })
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}
