//! TLS between the nodes of a site. Both sides present the certificate that they use for the cloud.

use std::sync::Arc;

use prepull_api::task::NodeName;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, ServerConfig, SignatureScheme};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};

use super::files::parse_facts;
use crate::clock::CloudClock;

/// TLS for reading from the neighbours and for serving them.
pub(crate) struct PeerTls {
    pub(crate) client: Arc<ClientConfig>,
    pub(crate) server: Arc<ServerConfig>,
}

/// TLS with these CAs and this certificate, at the cloud's time.
pub(super) fn peer_tls(
    cas: &[CertificateDer<'static>],
    certificate: &CertificateDer<'static>,
    key: &PrivateKeyDer<'static>,
    clock: &Arc<CloudClock>,
) -> Result<PeerTls, Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let roots = Arc::new(root_store(cas.to_vec())?);
    let nodes = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
        .build()
        .map_err(|error| Error::General(error.to_string()))?;
    let mut server = ServerConfig::builder_with_details(Arc::clone(&provider), clock.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(Arc::clone(&nodes))
        .with_single_cert(vec![certificate.clone()], key.clone_key())?;
    // Each connection reads one blob, so no client would reuse a ticket.
    server.send_tls13_tickets = 0;
    let mut client = ClientConfig::builder_with_details(provider, clock.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(NodeVerifier(nodes)))
        .with_client_auth_cert(vec![certificate.clone()], key.clone_key())?;
    // Hide the names of nodes from listeners in the LAN.
    client.enable_sni = false;
    Ok(PeerTls { client: Arc::new(client), server: Arc::new(server) })
}

/// Accepts only the certificate of the expected node. Nodes have client certificates, which name the node and not its
/// address.
#[derive(Debug)]
struct NodeVerifier(Arc<dyn ClientCertVerifier>);

impl ServerCertVerifier for NodeVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.0.verify_client_cert(end_entity, intermediates, now)?;
        match node_of(end_entity) {
            Some(node) if node.as_str() == server_name.to_str() => Ok(ServerCertVerified::assertion()),
            _ => Err(CertificateError::NotValidForName.into()),
        }
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

/// The node name in a certificate that TLS has verified.
pub(crate) fn node_of(certificate: &CertificateDer<'_>) -> Option<NodeName> {
    Some(parse_facts(certificate).ok()?.node)
}

/// A root store with exactly these CAs.
pub(super) fn root_store(cas: Vec<CertificateDer<'static>>) -> Result<rustls::RootCertStore, rustls::Error> {
    let mut roots = rustls::RootCertStore::empty();
    for ca in cas {
        roots.add(ca)?;
    }
    Ok(roots)
}
