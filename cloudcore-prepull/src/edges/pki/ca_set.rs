//! The CAs of one moment: the one that signs, the others that are trusted, and what the server sends along.

use std::sync::OnceLock;

use rustls::RootCertStore;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use x509_parser::prelude::{FromDer, X509Certificate};

pub(crate) use prepull_admission::ca::CaFingerprint;

use super::{Authority, PkiError, sha256};
use prepull_api::enroll::{MAX_TRUSTED_CAS, certificate_pem, hex};

/// The CAs of one moment. In a rotation there are two; outside of one, the signer alone.
#[derive(Debug)]
pub struct CaSet {
    signer: Authority,
    /// What edges and servers trust beside the signer.
    others: Vec<CertificateDer<'static>>,
    /// The signer's key, certified by another CA: a client that trusts only that one can verify what the signer signs.
    cross: Vec<CertificateDer<'static>>,
    /// The hash of the bundle, which every session asks for.
    bundle_hash: OnceLock<CaFingerprint>,
}

impl From<Authority> for CaSet {
    fn from(signer: Authority) -> Self {
        Self { signer, others: Vec::new(), cross: Vec::new(), bundle_hash: OnceLock::new() }
    }
}

impl CaSet {
    /// The signer with further certificates. Those for the signer's own key are cross certificates, which the server
    /// sends along; all others are trusted.
    pub(super) fn new(
        signer: Authority,
        further: impl IntoIterator<Item = CertificateDer<'static>>,
        origin: &str,
    ) -> Result<Self, PkiError> {
        let unusable =
            |reason: &str| PkiError::Unusable { origin: origin.to_owned(), reason: reason.to_owned() };
        let mut set = Self::from(signer);
        let signers_key = public_key(set.signer.certificate()).unwrap_or_default();
        for certificate in further {
            let key = public_key(&certificate)
                .ok_or_else(|| unusable("a further certificate is not a CA's (basicConstraints CA:TRUE)"))?;
            let list = if key == signers_key { &mut set.cross } else { &mut set.others };
            if certificate != *set.signer.certificate() && !list.contains(&certificate) {
                list.push(certificate);
            }
        }
        if set.others.len() >= MAX_TRUSTED_CAS {
            return Err(unusable(&format!("it has more than {MAX_TRUSTED_CAS} CAs, which no edge accepts")));
        }
        Ok(set)
    }

    /// The CA that signs.
    pub fn signer(&self) -> &Authority {
        &self.signer
    }

    /// All trusted CAs, the signer first.
    pub(crate) fn trusted(&self) -> impl Iterator<Item = &CertificateDer<'static>> {
        std::iter::once(self.signer.certificate()).chain(&self.others)
    }

    /// All trusted CAs as PEM, the signer first: what edges store.
    pub fn bundle(&self) -> String {
        self.trusted().map(|certificate| certificate_pem(certificate)).collect()
    }

    /// The hash of the bundle, by which an edge and cloudcore see whether they mean the same.
    pub(crate) fn bundle_hash(&self) -> CaFingerprint {
        *self.bundle_hash.get_or_init(|| sha256(self.bundle().as_bytes()))
    }

    /// Whether two sets lead to the same certificates and to the same trust.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.trusted().eq(other.trusted()) && self.cross == other.cross
    }

    pub(crate) fn is_trusted(&self, ca: &CaFingerprint) -> bool {
        self.trusted().any(|certificate| sha256(certificate) == *ca)
    }

    /// The trusted CA that has signed a certificate. For one that TLS has verified with [`Self::roots`].
    pub(crate) fn issuer_of(&self, certificate: &CertificateDer<'_>) -> Option<CaFingerprint> {
        if self.others.is_empty() {
            return Some(self.signer.fingerprint());
        }
        let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
        let has_signed = |ca: &&CertificateDer<'_>| {
            X509Certificate::from_der(ca)
                .is_ok_and(|(_, ca)| certificate.verify_signature(Some(ca.public_key())).is_ok())
        };
        self.trusted().find(has_signed).map(|ca| sha256(ca))
    }

    /// Refuses a CA that shares its key with one of the cluster's: the API server might accept our edges' certificates
    /// as client certificates of its own.
    pub(crate) fn check_not_of(&self, clusters: &[CertificateDer<'_>]) -> Result<(), PkiError> {
        let of_cluster: Vec<_> = clusters.iter().filter_map(public_key).collect();
        let shared = self.trusted().find(|ca| public_key(ca).is_some_and(|key| of_cluster.contains(&key)));
        shared.map_or(Ok(()), |ca| Err(PkiError::OfCluster(hex(&sha256(ca)))))
    }

    /// The roots by which clients are verified.
    pub(super) fn roots(&self) -> Result<RootCertStore, PkiError> {
        let mut roots = RootCertStore::empty();
        for certificate in self.trusted() {
            roots.add(certificate.clone()).map_err(|error| PkiError::Tls(error.to_string()))?;
        }
        Ok(roots)
    }

    /// What the server sends after its own certificate. The CAs themselves are part of it, because an edge that joins
    /// knows only the hash of one of them.
    pub(super) fn chain(&self) -> impl Iterator<Item = CertificateDer<'static>> {
        let signer = std::iter::once(self.signer.certificate());
        // Without a path to them, other CAs are of no use to anybody.
        let others = self.others.iter().filter(|_| !self.cross.is_empty());
        signer.chain(&self.cross).chain(others).cloned().collect::<Vec<_>>().into_iter()
    }
}

pub(crate) fn certificates_of_pem(pem: &str) -> Result<Vec<CertificateDer<'static>>, &'static str> {
    let certificates = CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<Vec<_>, _>>();
    certificates.ok().filter(|all| !all.is_empty()).ok_or("the certificate is not a PEM block CERTIFICATE")
}

/// The SubjectPublicKeyInfo of a CA; none for other certificates.
fn public_key(certificate: &CertificateDer<'_>) -> Option<Vec<u8>> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    parsed.is_ca().then(|| parsed.public_key().raw.to_vec())
}

/// How far the connected edges are in a rotation, or with the new subject.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct CaCensus {
    /// Edges with a session.
    pub(crate) connected: usize,
    /// Those that trust exactly the CAs that are to be trusted.
    pub(crate) informed: usize,
    /// Edges with a certificate of the CA that signs.
    pub(crate) renewed: usize,
    /// Edges with an agent too old to learn of another CA.
    pub(crate) unable: usize,
    /// Edges with the certificate subject of release 0.1.
    pub(crate) old_subject: usize,
}
