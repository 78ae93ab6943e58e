//! Storage of the CA: a Secret that all replicas share, or files.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::SystemTime;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::api::ObjectMeta;
use tokio::time::sleep;

use super::ca_set::{CaSet, certificates_of_pem};
use super::rotation::Rotation;
use super::{Authority, PkiError};
use crate::kube_api::cluster::READ_RETRY;
use crate::kube_api::field_manager::post_params;
use crate::kube_api::refusal::{FailureLog, explain_error};

/// The name of the CA's Secret, of type `kubernetes.io/tls`, in the namespace of cloudcore-prepull.
pub(super) const CA_SECRET: &str = "prepull-ca";

#[derive(Clone, Debug)]
pub(crate) struct CaStore {
    secrets: Api<Secret>,
    namespace: String,
}

pub(crate) struct StoredCa {
    secret: Secret,
    pub(crate) rotation: Rotation,
}

impl CaStore {
    pub(crate) fn new(client: kube::Client, namespace: &str) -> Self {
        Self { secrets: Api::namespaced(client, namespace), namespace: namespace.to_owned() }
    }

    /// As [`Self::load_or_create`], again and again while the API server doesn't answer.
    pub(crate) async fn load_or_create_with_retry(&self) -> Result<StoredCa, PkiError> {
        let (mut backoff, log) = (READ_RETRY, FailureLog::default());
        loop {
            match self.load_or_create().await {
                Err(PkiError::Secret { source, operation, .. })
                    if explain_error::<Secret>(&source).is_none() =>
                {
                    log.record(operation, CA_SECRET, None, &source);
                    sleep(backoff.next_wait()).await;
                }
                ended => return ended,
            }
        }
    }

    /// Reads the CA, or generates and stores one if there is none. If several replicas do so at once, the first wins and
    /// the others use its CA.
    pub(crate) async fn load_or_create(&self) -> Result<StoredCa, PkiError> {
        if let Some(stored) = self.read().await? {
            return Ok(stored);
        }
        let secret = Secret {
            metadata: ObjectMeta { name: Some(CA_SECRET.to_owned()), ..ObjectMeta::default() },
            type_: Some("kubernetes.io/tls".to_owned()),
            data: Some(Rotation::first_secret_data(SystemTime::now())?),
            ..Secret::default()
        };
        match self.secrets.create(&post_params(), &secret).await {
            Ok(created) => {
                let stored = self.parse(created)?;
                let ca = stored.rotation.set.signer();
                tracing::info!(namespace = self.namespace, secret = CA_SECRET, ?ca, "generated a new CA");
                Ok(stored)
            }
            Err(kube::Error::Api(status)) if status.code == 409 => self.parse(
                self.secrets.get(CA_SECRET).await.map_err(|error| self.secret_error("reading", error))?,
            ),
            Err(error) => Err(self.secret_error("creating", error)),
        }
    }

    /// Reads the CA; none if there is no Secret.
    pub(crate) async fn read(&self) -> Result<Option<StoredCa>, PkiError> {
        let secret =
            self.secrets.get_opt(CA_SECRET).await.map_err(|error| self.secret_error("reading", error))?;
        secret.map(|secret| self.parse(secret)).transpose()
    }

    /// Stores a step. It fails if the Secret has changed since the step's state was read.
    pub(crate) async fn write(
        &self,
        read: StoredCa,
        data: BTreeMap<String, ByteString>,
    ) -> Result<StoredCa, PkiError> {
        // With the resource version, by which the API server notices another write.
        let secret = Secret { data: Some(data), ..read.secret };
        let written = self.secrets.replace(CA_SECRET, &post_params(), &secret).await;
        self.parse(written.map_err(|error| self.secret_error("writing", error))?)
    }

    fn parse(&self, secret: Secret) -> Result<StoredCa, PkiError> {
        let origin = format!("Secret {}/{CA_SECRET}", self.namespace);
        let data = secret.data.clone().unwrap_or_default();
        Ok(StoredCa { rotation: Rotation::parse(data, &origin, SystemTime::now())?, secret })
    }

    fn secret_error(&self, operation: &'static str, source: kube::Error) -> PkiError {
        PkiError::Secret { operation, namespace: self.namespace.clone(), source: Box::new(source) }
    }
}

impl CaSet {
    /// Reads the CAs from two PEM files: the signer's certificate first, then others that are trusted, and the signer's
    /// key.
    pub(crate) fn from_files(certificates: &Path, key: &Path) -> Result<Self, PkiError> {
        let read = |path: &Path| {
            std::fs::read_to_string(path).map_err(|source| PkiError::File { path: path.to_owned(), source })
        };
        let origin = format!("{} with {}", certificates.display(), key.display());
        let pem = read(certificates)?;
        let signer = Authority::from_pem(&pem, &read(key)?, &origin, SystemTime::now())?;
        let all = certificates_of_pem(&pem)
            .map_err(|reason| PkiError::Unusable { origin: origin.clone(), reason: reason.to_owned() })?;
        Self::new(signer, all.into_iter().skip(1), &origin)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::atomic::{AtomicUsize, Ordering};

    use serde_json::json;

    use super::*;
    use crate::kube_api::fake_api::{client_answering, refusal_status};

    #[tokio::test(start_paused = true)]
    async fn a_leader_waits_for_its_ca() {
        let data = Rotation::first_secret_data(SystemTime::now()).unwrap();
        let secret =
            json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": CA_SECRET }, "data": data });
        for (refusals, answer, is_read) in [(2, secret, true), (0, json!({ "data": {} }), false)] {
            let asked = AtomicUsize::new(0);
            let (client, _) = client_answering(move |_| {
                if asked.fetch_add(1, Ordering::Relaxed) < refusals {
                    refusal_status(500)
                } else {
                    answer.clone()
                }
            });
            let loaded = CaStore::new(client, "prepull-system").load_or_create_with_retry().await;
            assert_eq!(loaded.is_ok(), is_read, "{:?}", loaded.err());
        }
    }

    #[test]
    fn reads_a_ca_from_files() {
        let dir = tempfile::tempdir().unwrap();
        let (authority, key) = Authority::generate(SystemTime::now()).unwrap();
        let (crt_path, key_path) = (dir.path().join("ca.crt"), dir.path().join("ca.key"));
        std::fs::write(&crt_path, authority.pem()).unwrap();
        assert!(CaSet::from_files(&crt_path, &key_path).unwrap_err().to_string().ends_with("ca.key"));
        std::fs::write(&key_path, key).unwrap();
        let read = CaSet::from_files(&crt_path, &key_path).unwrap();
        assert_eq!(read.bundle(), authority.pem());
    }

    #[test]
    fn files_hold_signer_trusted_and_cross_certificates() {
        let dir = tempfile::tempdir().unwrap();
        let now = SystemTime::now();
        let ((old, _), (new, key)) = (Authority::generate(now).unwrap(), Authority::generate(now).unwrap());
        let (crt_path, key_path) = (dir.path().join("ca.crt"), dir.path().join("ca.key"));
        let cross = old.cross_certify(&new, now).unwrap();
        std::fs::write(&crt_path, [new.pem(), old.pem(), cross].concat()).unwrap();
        std::fs::write(&key_path, key).unwrap();
        let set = CaSet::from_files(&crt_path, &key_path).unwrap();
        assert_eq!(set.bundle(), [new.pem(), old.pem()].concat(), "the cross certificate is no CA to trust");
        assert_eq!(set.chain().count(), 3);
    }
}
