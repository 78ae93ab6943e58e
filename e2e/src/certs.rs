//! Certificate authority for the servers of a test.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};

use crate::place::Place;

/// A certificate authority. Only clients with its file trust it.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    file: PathBuf,
    /// Keeps the directory of the file.
    place: Arc<Place>,
}

impl Authority {
    /// Creates an authority, with its file in the place of the calling test.
    pub fn new(name: &str) -> Result<Self> {
        Self::within(&Place::here()?.new_dir("ca")?, name)
    }

    /// Creates an authority, with its file in the given directory.
    pub(crate) fn within(dir: &Path, name: &str) -> Result<Self> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        let file = dir.join("ca.crt");
        std::fs::write(&file, issuer.pem())?;
        Ok(Self { issuer, file, place: Place::here()? })
    }

    /// Certificate of the authority as PEM.
    pub fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// Place of the test, which holds the files.
    pub fn place(&self) -> &Arc<Place> {
        &self.place
    }

    /// File with the certificate as PEM.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// A certificate and a key, as PEM, with which Kubernetes identifies a client as this user of this group.
    pub(crate) fn client(&self, user: &str, group: Option<&str>) -> Result<(String, String)> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, user);
        if let Some(group) = group {
            params.distinguished_name.push(DnType::OrganizationName, group);
        }
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate()?;
        Ok((params.signed_by(&key, &self.issuer)?.pem(), key.serialize_pem()))
    }

    /// Writes `server.crt` and `server.key` for a server on loopback, valid for the given names as well.
    pub fn server(&self, dir: &Path, names: &[&str]) -> Result<(PathBuf, PathBuf)> {
        let names = ["127.0.0.1", "localhost"].iter().chain(names).map(ToString::to_string);
        let mut params = CertificateParams::new(names.collect::<Vec<_>>())?;
        params.distinguished_name.push(DnType::CommonName, "server");
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        let (cert_file, key_file) = (dir.join("server.crt"), dir.join("server.key"));
        std::fs::write(&cert_file, certificate.pem())?;
        std::fs::write(&key_file, key.serialize_pem())?;
        Ok((cert_file, key_file))
    }
}
