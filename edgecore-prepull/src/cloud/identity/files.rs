//! The files `DIR/pki/*` and `DIR/connection.json`. After a power cut each is either the old version or the new one.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prepull_api::enroll::{MAX_TRUSTED_CAS, SubjectForm};
use prepull_api::task::NodeName;
use rcgen::{CertificateParams, KeyPair, PublicKeyData};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use serde::{Deserialize, Serialize};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::error::IdentityError;
use crate::cloud::endpoint::{ENROLL_SCHEME, TUNNEL_SCHEME, Urls};

/// The default of `--state-dir`.
pub(crate) const DEFAULT_STATE_DIR: &str = "/var/lib/edgecore-prepull";

const CA: &str = "ca.crt";
const CERTIFICATE: &str = "client.crt";
const KEY: &str = "client.key";
/// The key of a certificate that was requested. It replaces [`KEY`] once the certificate is written. In between,
/// [`StateDir::read_pki`] finds out which of the two keys belongs to the certificate.
const NEW_KEY: &str = "client.key.new";

/// Content of `DIR/connection.json`: the addresses of cloudcore, as given to `join`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Connection {
    /// URLs of the tunnel, `wss://HOST:10000/v1/edge`.
    pub tunnel_urls: Urls,
    /// URLs for renewing, `https://HOST:10002`.
    pub enroll_urls: Urls,
    /// The node as which this machine joined.
    pub node_name: NodeName,
}

impl Connection {
    /// Loads the file of `state_dir`.
    pub fn load(state_dir: &Path) -> Result<Self, IdentityError> {
        let path = StateDir::new(state_dir).connection();
        let text = read_text(&path)?;
        let connection = serde_json::from_str(&text).ok().filter(|connection: &Self| {
            connection.tunnel_urls.parse_endpoints(TUNNEL_SCHEME).is_ok()
                && connection.enroll_urls.parse_endpoints(ENROLL_SCHEME).is_ok()
        });
        connection
            .ok_or(IdentityError::Malformed { path, reason: "it is not the JSON with URLs that join writes" })
    }
}

/// The directory in which the agent keeps its state, `--state-dir`.
#[derive(Clone, Debug)]
pub(crate) struct StateDir(PathBuf);

/// The content of `DIR/pki`: the key is known to belong to the certificate.
pub(super) struct Pki {
    /// Never empty.
    pub(super) cas: Vec<CertificateDer<'static>>,
    pub(super) certificate: CertificateDer<'static>,
    pub(super) key: PrivateKeyDer<'static>,
    pub(super) facts: CertificateFacts,
}

/// The fields of a node's certificate that matter here.
pub(crate) struct CertificateFacts {
    pub(crate) node: NodeName,
    pub(crate) not_before: SystemTime,
    pub(crate) not_after: SystemTime,
    /// The SubjectPublicKeyInfo in DER.
    pub(crate) public_key: Vec<u8>,
}

/// A key that has no certificate yet.
pub(crate) struct NewKey(KeyPair);

impl NewKey {
    /// A certificate request in PEM. Only its key matters: the server identifies the node by other means.
    pub(crate) fn csr(&self) -> Result<String, rcgen::Error> {
        CertificateParams::default().serialize_request(&self.0)?.pem()
    }

    /// The SubjectPublicKeyInfo in DER.
    pub(crate) fn public_key(&self) -> Vec<u8> {
        self.0.subject_public_key_info()
    }
}

/// Parses a certificate that the server issued, and checks that it's for this node and this key.
pub(crate) fn check_issued(
    pem: &str,
    node: &NodeName,
    key: &NewKey,
) -> Result<CertificateFacts, &'static str> {
    let facts = parse_facts(&parse_pem(pem)?)?;
    if facts.node != *node {
        return Err("it is for another node");
    }
    if facts.public_key != key.public_key() {
        return Err("it is for another key");
    }
    Ok(facts)
}

fn parse_pem(pem: &str) -> Result<CertificateDer<'static>, &'static str> {
    CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|_| "it is not a PEM block CERTIFICATE")
}

/// Parses the certificates of CAs.
pub(super) fn parse_bundle(pem: &str) -> Result<Vec<CertificateDer<'static>>, &'static str> {
    let cas = CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<Vec<_>, _>>();
    let cas = cas.map_err(|_| "it has a PEM block that is no CERTIFICATE")?;
    if cas.is_empty() {
        return Err("it is not a PEM block CERTIFICATE");
    }
    if cas.len() > MAX_TRUSTED_CAS {
        return Err("it has too many CAs");
    }
    Ok(cas)
}

/// Whether every certificate is a CA's.
pub(super) fn are_cas(certificates: &[CertificateDer<'_>]) -> bool {
    let is_ca = |ca: &CertificateDer<'_>| X509Certificate::from_der(ca).is_ok_and(|(_, ca)| ca.is_ca());
    certificates.iter().all(is_ca)
}

pub(super) fn parse_facts(der: &CertificateDer<'_>) -> Result<CertificateFacts, &'static str> {
    let (_, certificate) = X509Certificate::from_der(der).map_err(|_| "it is not an X.509 certificate")?;
    let common_name = certificate.subject().iter_common_name().next().and_then(|name| name.as_str().ok());
    let node = common_name
        .and_then(|name| SubjectForm::ALL.iter().find_map(|form| name.strip_prefix(form.prefix())))
        .ok_or("it is not a node's certificate")?;
    let time = |seconds: i64| UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
    Ok(CertificateFacts {
        node: node.into(),
        not_before: time(certificate.validity().not_before.timestamp()),
        not_after: time(certificate.validity().not_after.timestamp()),
        public_key: certificate.public_key().raw.to_vec(),
    })
}

impl StateDir {
    pub(crate) fn new(dir: &Path) -> Self {
        Self(dir.to_owned())
    }

    pub(crate) fn pki(&self) -> PathBuf {
        self.0.join("pki")
    }

    fn connection(&self) -> PathBuf {
        self.0.join("connection.json")
    }

    fn in_pki(&self, name: &str) -> PathBuf {
        self.pki().join(name)
    }

    /// The node as which this machine has joined, if it has.
    pub(crate) fn joined_as(&self) -> Result<Option<NodeName>, IdentityError> {
        match self.read_certificate() {
            Ok((_, facts)) => Ok(Some(facts.node)),
            // Joining again is the remedy for a malformed certificate, so it must not stand in the way of it.
            Err(IdentityError::NotJoined(_) | IdentityError::Malformed { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(super) fn read_pki(&self) -> Result<Pki, IdentityError> {
        let (certificate, facts) = self.read_certificate()?;
        let path = self.in_pki(CA);
        let cas =
            parse_bundle(&read_text(&path)?).map_err(|reason| IdentityError::Malformed { path, reason })?;
        let key = if let Some(key) = self.read_key(KEY, &facts)? {
            key
        } else {
            let path = self.in_pki(KEY);
            let reason = "it is not the key of client.crt";
            let key = self.read_key(NEW_KEY, &facts)?.ok_or(IdentityError::Malformed { path, reason })?;
            // The power was cut after the certificate had been written and before its key was in place.
            or_read_only(self.promote_key())?;
            key
        };
        Ok(Pki { cas, certificate, key, facts })
    }

    fn read_certificate(&self) -> Result<(CertificateDer<'static>, CertificateFacts), IdentityError> {
        let path = self.in_pki(CERTIFICATE);
        let malformed = |reason| IdentityError::Malformed { path: path.clone(), reason };
        let text = match read_text(&path) {
            Err(IdentityError::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Err(IdentityError::NotJoined(self.0.clone()));
            }
            other => other?,
        };
        let der = parse_pem(&text).map_err(malformed)?;
        let facts = parse_facts(&der).map_err(malformed)?;
        Ok((der, facts))
    }

    /// Reads a key. `None` if the file is missing, or if the key doesn't belong to the certificate.
    fn read_key(
        &self,
        name: &str,
        facts: &CertificateFacts,
    ) -> Result<Option<PrivateKeyDer<'static>>, IdentityError> {
        let path = self.in_pki(name);
        let pem = match read_text(&path) {
            Err(IdentityError::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Ok(None);
            }
            other => other?,
        };
        let reason = "it is not a PEM block PRIVATE KEY";
        let pair =
            KeyPair::from_pem(&pem).map_err(|_| IdentityError::Malformed { path: path.clone(), reason })?;
        if pair.subject_public_key_info() != facts.public_key {
            return Ok(None);
        }
        PrivateKeyDer::from_pem_slice(pem.as_bytes())
            .map(Some)
            .map_err(|_| IdentityError::Malformed { path, reason })
    }

    /// The key for a certificate request. Reuses the key of a request that got no answer; otherwise creates a new one,
    /// which is on disk when this returns.
    pub(crate) fn requested_key(&self) -> Result<NewKey, IdentityError> {
        let path = self.in_pki(NEW_KEY);
        if let Ok(pem) = fs::read_to_string(&path)
            && let Ok(pair) = KeyPair::from_pem(&pem)
        {
            return Ok(NewKey(pair));
        }
        let failed = |source| IdentityError::for_file("write", &path, source);
        let pair = KeyPair::generate().map_err(|error| failed(io::Error::other(error)))?;
        fs::DirBuilder::new().recursive(true).mode(0o700).create(self.pki()).map_err(failed)?;
        write(&path, pair.serialize_pem().as_bytes(), 0o600)?;
        Ok(NewKey(pair))
    }

    /// The public key of the certificate, as [`NewKey::public_key`] has it; none if there is no certificate.
    pub(crate) fn certified_key(&self) -> Option<Vec<u8>> {
        self.read_certificate().ok().map(|(_, facts)| facts.public_key)
    }

    /// Stores a certificate and activates the key that it was requested with.
    pub(crate) fn store_certificate(&self, certificate: &str) -> Result<(), IdentityError> {
        write(&self.in_pki(CERTIFICATE), certificate.as_bytes(), 0o644)?;
        self.promote_key()
    }

    /// Stores other URLs.
    pub(crate) fn replace_urls(&self, connection: &Connection) -> Result<(), IdentityError> {
        let path = self.connection();
        let json = serde_json::to_vec_pretty(connection)
            .map_err(|error| IdentityError::for_file("write", &path, error.into()))?;
        write(&path, &json, 0o644)
    }

    /// Stores other URLs if they differ.
    pub(crate) fn follow_urls(&self, connection: &Connection) -> Result<(), IdentityError> {
        let is_known = Connection::load(&self.0).is_ok_and(|known| known == *connection);
        if is_known { Ok(()) } else { self.replace_urls(connection) }
    }

    /// Stores the CA and the URLs. Must come before the certificate, whose presence marks this node as joined.
    pub(crate) fn store_connection(&self, ca: &str, connection: &Connection) -> Result<(), IdentityError> {
        self.replace_urls(connection)?;
        write(&self.in_pki(CA), ca.as_bytes(), 0o644)
    }

    /// Stores the CAs to trust. The certificate stays usable at any power cut.
    pub(super) fn store_bundle(&self, bundle: &str) -> Result<(), IdentityError> {
        write(&self.in_pki(CA), bundle.as_bytes(), 0o644)
    }

    fn promote_key(&self) -> Result<(), IdentityError> {
        let path = self.in_pki(KEY);
        fs::rename(self.in_pki(NEW_KEY), &path)
            .and_then(|()| sync_dir(&path))
            .map_err(|source| IdentityError::for_file("rename the new key to", &path, source))
    }
}

/// Lets a write fail on a read-only file system: the next start tries again.
fn or_read_only(written: Result<(), IdentityError>) -> Result<(), IdentityError> {
    match written {
        Err(IdentityError::File { path, source, .. })
            if source.kind() == io::ErrorKind::ReadOnlyFilesystem =>
        {
            tracing::warn!(file = %path.display(), error = %source, "the new key is used from where it is");
            Ok(())
        }
        written => written,
    }
}

fn read_text(path: &Path) -> Result<String, IdentityError> {
    fs::read_to_string(path).map_err(|source| IdentityError::for_file("read", path, source))
}

fn write(path: &Path, bytes: &[u8], mode: u32) -> Result<(), IdentityError> {
    replace_file(path, bytes, mode).map_err(|source| IdentityError::for_file("write", path, source))
}

/// Writes a file atomically: writes and syncs a temporary file, then renames it. The umask doesn't apply to the mode.
pub(crate) fn replace_file(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let temporary = temporary_of(path);
    // A temporary file of an earlier attempt may have another mode.
    let _ = fs::remove_file(&temporary);
    let written = write_new(&temporary, bytes, mode).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // It would take up space on a full disk.
        let _ = fs::remove_file(&temporary);
    }
    written?;
    sync_dir(path)
}

fn write_new(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// The temporary file of [`replace_file`].
pub(crate) fn temporary_of(path: &Path) -> PathBuf {
    path.with_extension("tmp")
}

fn sync_dir(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
}

#[cfg(test)]
mod tests;
