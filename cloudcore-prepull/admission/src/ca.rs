//! The CA of the edges' certificates, as far as it is public.

use std::fmt;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use prepull_api::enroll::hex;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The name of the ConfigMap with what is public, in the namespace of cloudcore-prepull.
pub const CA_CONFIG_MAP: &str = "prepull-ca";
/// Its key for the certificates as PEM, the signer first.
pub const BUNDLE: &str = "ca.crt";

/// The SHA-256 of a CA's certificate.
pub type CaFingerprint = [u8; 32];

/// The hash that new join tokens carry: that of the CA that signs, as cloudcore-prepull publishes it.
pub async fn published_fingerprint(
    client: kube::Client,
    namespace: &str,
) -> kube::Result<Option<CaFingerprint>> {
    let maps: Api<ConfigMap> = Api::namespaced(client, namespace);
    let map = maps.get_opt(CA_CONFIG_MAP).await?;
    Ok(map.and_then(|map| signer_of(map.data?.get(BUNDLE)?)))
}

/// The hash of the first certificate.
pub fn signer_of(bundle: &str) -> Option<CaFingerprint> {
    let signer = CertificateDer::pem_slice_iter(bundle.as_bytes()).next()?.ok()?;
    Some(crate::sha256(&signer))
}

/// The start of a CA's [`CaFingerprint`]: enough to tell the CAs of an installation apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaId([u8; 8]);

impl From<CaFingerprint> for CaId {
    fn from(fingerprint: CaFingerprint) -> Self {
        let mut start = [0; 8];
        start.copy_from_slice(&fingerprint[..8]);
        Self(start)
    }
}

/// As `ca show` shows it, but for the rest.
impl fmt::Display for CaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl Serialize for CaId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for CaId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let number = u64::from_str_radix(&text, 16).map_err(serde::de::Error::custom)?;
        Ok(Self(number.to_be_bytes()))
    }
}
