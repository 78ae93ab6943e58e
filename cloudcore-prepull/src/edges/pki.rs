//! The CA and the certificates that it signs: cloudcore's own and those of the edges.
//!
//! ```text
//!  Secret or files ─▶ CaSet: Authority ─sign_server─▶ ServerIdentity ─▶ TLS of both listeners
//!                                └──────sign_client─▶ enroll ─▶ edge ─▶ PeerIdentity, on each connection
//! ```

pub(crate) mod ca_set;
mod lapsed;
pub(crate) mod peer;
pub(crate) mod published;
pub(crate) mod rotation;
mod server;
pub(crate) mod store;

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prepull_api::enroll::{SubjectForm, certificate_pem};
use prepull_api::task::NodeName;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PublicKeyData, SerialNumber, SubjectPublicKeyInfo,
};
use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::oid_registry::{OID_EC_P256, OID_KEY_TYPE_EC_PUBLIC_KEY};
use x509_parser::prelude::{FromDer, X509Certificate};

pub(crate) use ca_set::CaCensus;
pub use ca_set::CaSet;
pub use prepull_admission::KeyHash;
pub use rotation::Rotation;
pub use server::ServerIdentity;
pub(crate) use server::is_server_name;
use store::CA_SECRET;

/// The lifetime of the CA. A rotation replaces it without anybody joining again.
const CA_LIFE: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// The lifetime of cloudcore's own certificate; it is renewed when a third is left.
const SERVER_LIFE: Duration = Duration::from_secs(90 * 24 * 3600);
/// How far in the past a certificate's validity begins. Clocks of edges without NTP have been seen minutes slow,
/// and would reject a certificate that is not yet valid.
const BACKDATE: Duration = Duration::from_secs(10 * 60);
/// The most bytes of a CSR. One with an ECDSA key is below 1 KiB.
const MAX_CSR: usize = 8 * 1024;

/// An error of the CA or of a certificate.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// A file of `--ca-cert` or `--ca-key` cannot be read.
    #[error("reading {}", path.display())]
    File {
        /// The path of the file.
        path: PathBuf,
        /// The error of the file system.
        source: std::io::Error,
    },
    /// The CA's Secret cannot be read or created.
    #[error("{operation} Secret {namespace}/{}", CA_SECRET)]
    Secret {
        /// `reading` or `creating`.
        operation: &'static str,
        /// The namespace of cloudcore-prepull.
        namespace: String,
        /// The error of the API server.
        source: Box<kube::Error>,
    },
    /// The Secret or the files hold no usable CA.
    #[error("{origin} holds no CA that can be used: {reason}")]
    Unusable {
        /// The Secret or the files, for the message.
        origin: String,
        /// What is wrong with the CA.
        reason: String,
    },
    /// The CA is the one that the API server has its own certificate from, and may verify its users by.
    #[error(
        "the CA {0} is the cluster's own: with its key, cloudcore-prepull could issue certificates that the API server \
         accepts. Give --ca-cert and --ca-key, or the Secret prepull-ca, a CA that is used for nothing else"
    )]
    OfCluster(String),
    /// A value of `--advertise` cannot be in a certificate.
    #[error("--advertise {0}: neither a DNS name nor an IP address")]
    Advertise(String),
    /// An edge sent a CSR that was refused.
    #[error("the certificate request was refused: {0}")]
    Csr(&'static str),
    /// A key or certificate could not be generated, parsed or signed.
    #[error("making a certificate")]
    Signing(#[from] rcgen::Error),
    /// The operating system provides no random bytes.
    #[error("no random bytes from the operating system")]
    Random,
    /// rustls rejected the key or the certificate.
    #[error("setting up TLS: {0}")]
    Tls(String),
}

/// The CA's certificate and key.
pub struct Authority {
    certificate: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
    not_after: SystemTime,
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Authority({})", prepull_api::enroll::hex(&self.fingerprint()))
    }
}

/// A signed certificate for an edge.
#[derive(Clone, Debug)]
pub struct SignedCertificate {
    /// The certificate, PEM.
    pub pem: String,
    /// The end of its validity.
    pub not_after: SystemTime,
}

/// The public key of a CSR. The sender has proved that it holds the private key; the rest of the CSR is ignored.
#[derive(Clone, Debug)]
pub struct VerifiedCsr {
    key: SubjectPublicKeyInfo,
}

impl VerifiedCsr {
    /// Parses PEM and verifies the CSR's signature.
    pub fn from_pem(pem: &str) -> Result<Self, PkiError> {
        if pem.len() > MAX_CSR {
            return Err(PkiError::Csr("it is longer than any CSR with an ECDSA key"));
        }
        let der = rustls_pki_types::CertificateSigningRequestDer::from_pem_slice(pem.as_bytes())
            .map_err(|_| PkiError::Csr("it is not a PEM block CERTIFICATE REQUEST"))?;
        let (_, csr) = X509CertificationRequest::from_der(&der)
            .map_err(|_| PkiError::Csr("it is not a PKCS#10 request"))?;
        let key = &csr.certification_request_info.subject_pki;
        let curve = key.algorithm.parameters.as_ref().and_then(|curve| curve.as_oid().ok());
        if key.algorithm.algorithm != OID_KEY_TYPE_EC_PUBLIC_KEY || curve != Some(OID_EC_P256) {
            return Err(PkiError::Csr("its key is not ECDSA P-256"));
        }
        csr.verify_signature().map_err(|_| PkiError::Csr("its signature was not made with its key"))?;
        Ok(Self { key: SubjectPublicKeyInfo::from_der(key.raw)? })
    }

    /// The SHA-256 of the public key (SubjectPublicKeyInfo, DER).
    pub(crate) fn key_fingerprint(&self) -> [u8; 32] {
        sha256(&self.key.subject_public_key_info())
    }
}

impl Authority {
    /// Generates a CA with an ECDSA P-256 key. Also returns the key as PEM, to be stored.
    pub fn generate(now: SystemTime) -> Result<(Self, String), PkiError> {
        let key = KeyPair::generate()?;
        let mut params = certificate_params(now, now + CA_LIFE)?;
        // A name of its own, so that a verifier needn't try the keys of all CAs of the same name.
        let mut name = [0; 4];
        SystemRandom::new().fill(&mut name).map_err(|_| PkiError::Random)?;
        let name = format!("cloudcore-prepull CA {}", prepull_api::enroll::hex(&name));
        params.distinguished_name.push(DnType::CommonName, name);
        // One level below it: the next CA, when this one certifies it.
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(1));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.use_authority_key_identifier_extension = false; // self-signed
        let certificate = params.self_signed(&key)?.pem();
        let key = key.serialize_pem();
        Ok((Self::from_pem(&certificate, &key, "a new CA", now)?, key))
    }

    /// Parses a CA. `origin` names the Secret or the files in errors.
    fn from_pem(certificate: &str, key: &str, origin: &str, now: SystemTime) -> Result<Self, PkiError> {
        let unusable =
            |reason: &str| PkiError::Unusable { origin: origin.to_owned(), reason: reason.to_owned() };
        let der = CertificateDer::from_pem_slice(certificate.as_bytes())
            .map_err(|_| unusable("the certificate is not a PEM block CERTIFICATE"))?;
        let key = KeyPair::from_pem(key)
            .map_err(|_| unusable("the key is not a PEM block PRIVATE KEY (PKCS#8)"))?;
        let (_, parsed) = X509Certificate::from_der(&der)
            .map_err(|_| unusable("the certificate is not an X.509 certificate"))?;
        if !parsed.is_ca() {
            return Err(unusable("the certificate is not a CA's (basicConstraints CA:TRUE is missing)"));
        }
        if parsed.public_key().raw != key.subject_public_key_info() {
            return Err(unusable("key and certificate do not belong together"));
        }
        let not_after = system_time(parsed.validity().not_after.timestamp());
        if not_after <= now {
            let end = humantime::format_rfc3339_seconds(not_after);
            return Err(unusable(&format!("the certificate expired at {end}")));
        }
        let issuer = Issuer::from_ca_cert_der(&der, key)?;
        Ok(Self { certificate: der, issuer, not_after })
    }

    /// The CA's certificate, PEM.
    pub fn pem(&self) -> String {
        certificate_pem(&self.certificate)
    }

    /// The SHA-256 of the certificate's DER, which join tokens carry.
    pub fn fingerprint(&self) -> [u8; 32] {
        sha256(&self.certificate)
    }

    /// The CA's certificate, DER.
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// Signs a certificate that identifies the holder of the CSR's key as this node, for client authentication only.
    /// It never outlives the CA.
    pub fn sign_client(
        &self,
        csr: &VerifiedCsr,
        node: &NodeName,
        form: SubjectForm,
        validity: Range<SystemTime>,
    ) -> Result<SignedCertificate, PkiError> {
        let not_after = validity.end.min(self.not_after);
        let mut params = certificate_params(validity.start, not_after)?;
        params.distinguished_name.push(DnType::OrganizationName, form.organisation());
        params.distinguished_name.push(DnType::CommonName, format!("{}{node}", form.prefix()));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let certificate = params.signed_by(&csr.key, &self.issuer)?;
        Ok(SignedCertificate { pem: certificate.pem(), not_after })
    }

    /// Certifies the key of a CA that [`Self::generate`] has made: a client that trusts `self` can then verify what
    /// `other` signs. PEM.
    fn cross_certify(&self, other: &Self, now: SystemTime) -> Result<String, PkiError> {
        let unusable = || PkiError::Csr("the new CA's certificate cannot be read");
        let (_, certificate) = X509Certificate::from_der(&other.certificate).map_err(|_| unusable())?;
        let name = certificate.subject().iter_common_name().next().and_then(|name| name.as_str().ok());
        let mut params = certificate_params(now, other.not_after.min(self.not_after))?;
        params.distinguished_name.push(DnType::CommonName, name.ok_or_else(unusable)?);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = SubjectPublicKeyInfo::from_der(certificate.public_key().raw)?;
        Ok(params.signed_by(&key, &self.issuer)?.pem())
    }

    /// Generates a key and signs a certificate for cloudcore itself.
    fn sign_server(
        &self,
        names: Vec<rcgen::SanType>,
        now: SystemTime,
    ) -> Result<(CertificateDer<'static>, KeyPair, SystemTime), PkiError> {
        let not_after = (now + SERVER_LIFE).min(self.not_after);
        let key = KeyPair::generate()?;
        let mut params = certificate_params(now, not_after)?;
        params.distinguished_name.push(DnType::CommonName, "cloudcore-prepull");
        params.subject_alt_names = names;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        Ok((params.signed_by(&key, &self.issuer)?.into(), key, not_after))
    }
}

/// Parameters with an empty subject, a random serial number (RFC 5280, 4.1.2.2), and the validity.
fn certificate_params(now: SystemTime, not_after: SystemTime) -> Result<CertificateParams, PkiError> {
    let mut serial = [0; 16];
    SystemRandom::new().fill(&mut serial).map_err(|_| PkiError::Random)?;
    serial[0] = (serial[0] & 0x7f) | 0x40; // positive, and without a leading zero that DER would drop
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    params.not_before = rcgen::date_time_ymd(1970, 1, 1) + since_epoch(now - BACKDATE);
    params.not_after = rcgen::date_time_ymd(1970, 1, 1) + since_epoch(not_after);
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

/// Whole seconds, as X.509 has them.
fn since_epoch(time: SystemTime) -> Duration {
    Duration::from_secs(time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs())
}

fn system_time(seconds: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}

pub(crate) fn sha256(bytes: &[u8]) -> [u8; 32] {
    let mut hash = [0; 32];
    hash.copy_from_slice(digest(&SHA256, bytes).as_ref());
    hash
}

#[cfg(test)]
mod tests;
