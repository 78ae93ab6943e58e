//! Storage of the CA: a Secret that all replicas share, or files.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::SystemTime;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::api::{ObjectMeta, PostParams};

use super::{Authority, PkiError};

/// The name of the CA's Secret, of type `kubernetes.io/tls`, in the namespace of cloudcore-prepull.
pub(super) const CA_SECRET: &str = "prepull-ca";

const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";

impl Authority {
    /// Reads the CA from the Secret [`CA_SECRET`], or generates and stores one if there is none. If several replicas
    /// do so at once, the first wins and the others use its CA.
    pub(crate) async fn load_or_create(client: kube::Client, namespace: &str) -> Result<Self, PkiError> {
        let secrets: Api<Secret> = Api::namespaced(client, namespace);
        let failed = |operation| {
            move |source| PkiError::Secret {
                operation,
                namespace: namespace.to_owned(),
                source: Box::new(source),
            }
        };
        let now = SystemTime::now();
        if let Some(secret) = secrets.get_opt(CA_SECRET).await.map_err(failed("reading"))? {
            return from_secret(&secret, namespace, now);
        }
        let (authority, key) = Self::generate(now)?;
        let secret = to_secret(&authority, &key);
        match secrets.create(&PostParams::default(), &secret).await {
            Ok(_) => {
                tracing::info!(namespace, secret = CA_SECRET, ca = ?authority, "generated a new CA");
                Ok(authority)
            }
            Err(kube::Error::Api(status)) if status.code == 409 => {
                let secret = secrets.get(CA_SECRET).await.map_err(failed("reading"))?;
                from_secret(&secret, namespace, now)
            }
            Err(error) => Err(failed("creating")(error)),
        }
    }

    /// Reads the CA from two PEM files. Replacing them takes effect at the next restart.
    pub(crate) fn from_files(certificate: &Path, key: &Path) -> Result<Self, PkiError> {
        let read = |path: &Path| {
            std::fs::read_to_string(path).map_err(|source| PkiError::File { path: path.to_owned(), source })
        };
        let origin = format!("{} with {}", certificate.display(), key.display());
        Self::from_pem(&read(certificate)?, &read(key)?, &origin, SystemTime::now())
    }
}

fn to_secret(authority: &Authority, key: &str) -> Secret {
    let data = [(CERTIFICATE, authority.pem()), (KEY, key.to_owned())];
    Secret {
        metadata: ObjectMeta { name: Some(CA_SECRET.to_owned()), ..ObjectMeta::default() },
        type_: Some("kubernetes.io/tls".to_owned()),
        data: Some(data.map(|(name, text)| (name.to_owned(), ByteString(text.into_bytes()))).into()),
        ..Secret::default()
    }
}

fn from_secret(secret: &Secret, namespace: &str, now: SystemTime) -> Result<Authority, PkiError> {
    let origin = format!("Secret {namespace}/{CA_SECRET}");
    let empty = BTreeMap::new();
    let data = secret.data.as_ref().unwrap_or(&empty);
    let part = |name: &str| {
        data.get(name).and_then(|bytes| std::str::from_utf8(&bytes.0).ok()).ok_or_else(|| {
            PkiError::Unusable {
                origin: origin.clone(),
                reason: format!("the key {name} is missing or is not text"),
            }
        })
    };
    Authority::from_pem(part(CERTIFICATE)?, part(KEY)?, &origin, now)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_ca_is_read_back_from_its_secret() {
        let now = SystemTime::now();
        let (authority, key) = Authority::generate(now).unwrap();
        let mut secret = to_secret(&authority, &key);
        assert_eq!(from_secret(&secret, "ns", now).unwrap().fingerprint(), authority.fingerprint());
        secret.data.as_mut().unwrap().remove(KEY);
        let error = from_secret(&secret, "ns", now).unwrap_err().to_string();
        assert_eq!(
            error,
            "Secret ns/prepull-ca holds no CA that can be used: the key tls.key is missing or is not text"
        );
    }

    #[test]
    fn a_ca_is_read_back_from_files_and_a_missing_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let (authority, key) = Authority::generate(SystemTime::now()).unwrap();
        let (crt_path, key_path) = (dir.path().join("ca.crt"), dir.path().join("ca.key"));
        std::fs::write(&crt_path, authority.pem()).unwrap();
        assert!(Authority::from_files(&crt_path, &key_path).unwrap_err().to_string().ends_with("ca.key"));
        std::fs::write(&key_path, key).unwrap();
        assert_eq!(
            Authority::from_files(&crt_path, &key_path).unwrap().fingerprint(),
            authority.fingerprint()
        );
    }
}
