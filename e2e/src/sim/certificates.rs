//! Certificates for simulated edges, signed with the cloud's own CA: joining ten thousand times would measure the
//! joining.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow};
use edgecore_prepull::cloud::identity::Identity;
use k8s_openapi::api::core::v1::Secret;
use kube::api::Api;
use prepull_api::enroll::SubjectForm;
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair, KeyUsagePurpose};

use crate::cluster::{Cluster, NAMESPACE};

/// Secret in which cloudcore keeps its CA.
const SECRET: &str = "prepull-ca";

const DAY: Duration = Duration::from_secs(24 * 3600);

/// The CA of the cloud, with its private key.
pub struct CloudAuthority {
    certificate: String,
    issuer: Issuer<'static, KeyPair>,
}

impl CloudAuthority {
    /// Reads the CA from its Secret, with an administrator's rights.
    pub async fn from_cluster(cluster: &Cluster) -> Result<Self> {
        let secret = Api::<Secret>::namespaced(cluster.client(), NAMESPACE).get(SECRET).await;
        let secret = secret.with_context(|| format!("cannot read Secret {NAMESPACE}/{SECRET}"))?;
        let part = |name: &str| {
            let bytes = secret.data.as_ref().and_then(|data| data.get(name));
            let bytes = bytes.with_context(|| format!("Secret {NAMESPACE}/{SECRET} has no {name}"))?;
            anyhow::Ok(String::from_utf8(bytes.0.clone())?)
        };
        let certificate = part("tls.crt")?;
        let issuer = Issuer::from_ca_cert_pem(&certificate, KeyPair::from_pem(&part("tls.key")?)?)?;
        Ok(Self { certificate, issuer })
    }

    /// Creates an identity for each node, in their order, and passes the number of identities so far to `progress`.
    /// They share one key: generating a key takes as long as signing a certificate, and proves nothing here.
    pub(super) fn create_identities(
        &self,
        dir: &Path,
        nodes: &[String],
        progress: &(impl Fn(usize) + Sync),
    ) -> Result<Vec<Identity>> {
        let key = KeyPair::generate()?;
        let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let done = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let sign = |(number, nodes): (usize, &[String])| {
                let state = self.write_state(&dir.join(number.to_string()), &key)?;
                let identity = |node: &String| {
                    let identity = self.create_identity(&state, node, &key)?;
                    progress(done.fetch_add(1, Ordering::Relaxed) + 1);
                    Ok(identity)
                };
                nodes.iter().map(identity).collect::<Result<Vec<_>>>()
            };
            let parts = nodes.chunks(nodes.len().div_ceil(threads).max(1)).enumerate();
            let workers: Vec<_> = parts.map(|part| scope.spawn(move || sign(part))).collect();
            let mut identities = Vec::with_capacity(nodes.len());
            for worker in workers {
                let signed =
                    worker.join().map_err(|_| anyhow!("a thread that signs certificates panicked"))?;
                identities.extend(signed?);
            }
            // The identities are in memory, and are not renewed within a test.
            std::fs::remove_dir_all(dir)?;
            Ok(identities)
        })
    }

    /// Writes a state directory with the files that all identities share.
    fn write_state(&self, dir: &Path, key: &KeyPair) -> Result<PathBuf> {
        let pki = dir.join("pki");
        std::fs::create_dir_all(&pki)?;
        std::fs::write(pki.join("ca.crt"), &self.certificate)?;
        std::fs::write(pki.join("client.key"), key.serialize_pem())?;
        Ok(dir.to_owned())
    }

    /// Signs a certificate for a node as enrolment would, and returns it as PEM.
    pub(crate) fn node_certificate(&self, node: &str, key: &KeyPair) -> Result<String> {
        self.sign(CertificateParams::default(), node, key)
    }

    /// Replaces the certificate of a joined node by one for the same key that expired this long ago.
    pub fn expire(&self, state: &Path, node: &str, ago: Duration) -> Result<()> {
        self.replace(state, node, SystemTime::now() - ago)
    }

    /// Replaces it by one that isn't valid before so long.
    pub fn postdate(&self, state: &Path, node: &str, ahead: Duration) -> Result<()> {
        self.replace(state, node, SystemTime::now() + ahead + 30 * DAY)
    }

    fn replace(&self, state: &Path, node: &str, end: SystemTime) -> Result<()> {
        let key = KeyPair::from_pem(&std::fs::read_to_string(state.join("pki/client.key"))?)?;
        let end = end.duration_since(UNIX_EPOCH)?;
        let epoch = rcgen::date_time_ymd(1970, 1, 1);
        let mut params = CertificateParams::default();
        (params.not_before, params.not_after) = (epoch + end - 30 * DAY, epoch + end);
        Ok(std::fs::write(state.join("pki/client.crt"), self.sign(params, node, &key)?)?)
    }

    fn sign(&self, mut params: CertificateParams, node: &str, key: &KeyPair) -> Result<String> {
        params.distinguished_name.push(DnType::OrganizationName, SubjectForm::Own.organisation());
        params.distinguished_name.push(DnType::CommonName, format!("{}{node}", SubjectForm::Own.prefix()));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        Ok(params.signed_by(key, &self.issuer)?.pem())
    }

    /// Writes a state directory like `join`, with its own key.
    pub fn join(&self, state: &Path, node: &str) -> Result<()> {
        let key = KeyPair::generate()?;
        self.write_state(state, &key)?;
        std::fs::write(state.join("pki/client.crt"), self.node_certificate(node, &key)?)?;
        Ok(())
    }

    /// Certificate of the CA as PEM.
    pub(crate) fn pem(&self) -> &str {
        &self.certificate
    }

    /// Creates the identity that `join` would create.
    fn create_identity(&self, state: &Path, node: &str, key: &KeyPair) -> Result<Identity> {
        std::fs::write(state.join("pki/client.crt"), self.node_certificate(node, key)?)?;
        Identity::load(state).with_context(|| format!("no identity for {node}"))
    }
}
