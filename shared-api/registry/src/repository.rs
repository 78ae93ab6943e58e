//! The content of one repository, asked for in the order of its endpoints.

mod ask;
mod choose;
mod push;
mod referrers;
mod unpacked;

use std::sync::Arc;

use futures::future::{BoxFuture, FutureExt};
use http::header::{ACCEPT, AUTHORIZATION, RANGE};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use prepull_api::credentials::RegistryCredential;
use prepull_api::image::NormalizedReference;
use tokio::sync::Mutex;

use crate::auth::TokenCache;
use crate::blob::{BlobStream, HostId, begins_at};
use crate::body;
use crate::digest::{check_digest, is_digest, sha256};
use crate::error::{ErrorKind, RegistryError};
use crate::hosts::{Capabilities, RegistryEndpoint};
use crate::location::HostPort;
use crate::manifest::{
    DOCKER_INDEX, DOCKER_MANIFEST, Descriptor, MAX_MANIFEST, OCI_INDEX, OCI_MANIFEST, own_media_type,
};
use crate::transport::{RegistryAnswer, Transport};
pub use choose::{Chosen, Contents};
pub use push::Open;
use referrers::ListedReferrers;
pub use referrers::{BUNDLE_TYPE, ReferrerPlace, SIGNATURE_TYPES, SIGNED, may_be_signature};

const DIGEST: HeaderName = HeaderName::from_static("docker-content-digest");

/// What the repositories of one client share.
pub(crate) struct SharedClient {
    pub(crate) transport: Transport,
    pub(crate) tokens: TokenCache,
}

/// The repository of one reference, with the credential for it.
#[derive(Clone)]
pub struct Repository {
    shared: Arc<SharedClient>,
    reference: NormalizedReference,
    endpoints: Vec<RegistryEndpoint>,
    /// Hosts that a person has named, with their ports.
    named: Vec<HostPort>,
    credential: Option<RegistryCredential>,
    fingerprint: [u8; 32],
    /// One token at a time is asked for: several blobs at once need the same one.
    asking: Arc<Mutex<()>>,
    /// The lists of referrers so far: signatures and deltas are in one list, which is asked for once.
    listed: Arc<Mutex<Vec<ListedReferrers>>>,
    /// Bytes that a connection may receive ahead of its reader; `None` for what the kernel thinks best.
    receive_ahead: Option<usize>,
}

/// What a reference points to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedReference {
    /// The manifest or index.
    pub descriptor: Descriptor,
    /// Its content, where it had to be fetched to know its digest.
    pub manifest: Option<Vec<u8>>,
}

impl Repository {
    pub(crate) fn new(
        shared: Arc<SharedClient>,
        reference: &NormalizedReference,
        endpoints: Vec<RegistryEndpoint>,
        credential: Option<&RegistryCredential>,
    ) -> Self {
        let named = endpoints.iter().flat_map(RegistryEndpoint::places).collect();
        Self {
            shared,
            reference: reference.clone(),
            endpoints,
            named,
            credential: credential.cloned(),
            fingerprint: crate::auth::fingerprint(credential),
            asking: Arc::default(),
            listed: Arc::default(),
            receive_ahead: None,
        }
    }

    /// Bounds how many bytes of each connection may arrive before they are read, for a reader that is slow on purpose. Each
    /// bound has connections of its own, and tokens are shared.
    #[must_use]
    pub fn receiving_ahead(self, bytes: Option<usize>) -> Self {
        Self { receive_ahead: bytes, ..self }
    }

    /// The reference that this is about.
    pub fn reference(&self) -> &NormalizedReference {
        &self.reference
    }

    /// Whether hosts.toml has a credential of this machine for an endpoint: an `Authorization` header or a client certificate.
    pub fn has_machine_credential(&self) -> bool {
        let has = |endpoint: &RegistryEndpoint| {
            endpoint.headers.contains_key(AUTHORIZATION) || endpoint.tls.has_client_certificate()
        };
        self.endpoints.iter().any(has)
    }

    /// Asks what the reference points to now. A reference with a digest is asked for by the digest alone.
    pub async fn resolve(&self) -> Result<ResolvedReference, RegistryError> {
        match (self.reference.digest(), self.reference.tag()) {
            (Some(digest), _) => self.resolve_object(digest, |c| c.pull).await,
            (None, Some(tag)) => self.resolve_object(tag, |c| c.pull && c.resolve).await,
            (None, None) => {
                Err(RegistryError::new(ErrorKind::Protocol, "the reference has neither tag nor digest"))
            }
        }
    }

    async fn resolve_object(
        &self,
        object: &str,
        may: fn(Capabilities) -> bool,
    ) -> Result<ResolvedReference, RegistryError> {
        self.first_of(may, &[], |endpoint| self.resolve_at(endpoint, object).boxed()).await
    }

    async fn resolve_at(
        &self,
        endpoint: &RegistryEndpoint,
        object: &str,
    ) -> Result<ResolvedReference, RegistryError> {
        let path = self.object_path(endpoint, "manifests", object);
        let answer = self.ask_endpoint(endpoint, Method::HEAD, &path, accept_manifests()).await?;
        let answer = self.check_answer(answer).await?;
        let expected = is_digest(object).then_some(object);
        let bad = |what: &str| RegistryError::new(ErrorKind::Protocol, format!("{}: {what}", answer.from));
        let header =
            |name| answer.response.headers().get(name).and_then(|value: &HeaderValue| value.to_str().ok());
        let digest = match (expected, header(DIGEST)) {
            (Some(digest), _) => Some(digest),
            (None, Some(digest)) if !is_digest(digest) => return Err(bad("it names a digest that is none")),
            (None, digest) => digest,
        };
        let (media_type, size) = (media_type(&answer), body::content_length(&answer.response));
        if let (Some(digest), Some(size), Some(media_type)) = (digest, size, media_type) {
            if size > MAX_MANIFEST {
                return Err(bad(&format!("its manifest has {size} bytes, of at most {MAX_MANIFEST}")));
            }
            let descriptor =
                Descriptor { media_type, digest: digest.to_owned(), size, ..Descriptor::default() };
            return Ok(ResolvedReference { descriptor, manifest: None });
        }
        self.resolve_by_content(endpoint, object, expected).await
    }

    async fn resolve_by_content(
        &self,
        endpoint: &RegistryEndpoint,
        object: &str,
        expected: Option<&str>,
    ) -> Result<ResolvedReference, RegistryError> {
        let path = self.object_path(endpoint, "manifests", object);
        let answer = self.ask_endpoint(endpoint, Method::GET, &path, accept_manifests()).await?;
        let answer = self.check_answer(answer).await?;
        let from = answer.from.clone();
        let named =
            answer.response.headers().get(DIGEST).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let claimed = media_type(&answer);
        let content = self.read_answer(answer, MAX_MANIFEST).await?;
        let digest = expected.map(str::to_owned).or(named).unwrap_or_else(|| sha256(&content));
        check_digest(&content, &digest, &format!("{from}: the manifest {object}"))?;
        let unknown = || {
            RegistryError::new(ErrorKind::Unsupported, format!("{from}: what {object} is, is not known here"))
        };
        let media_type = claimed.or_else(|| own_media_type(&content)).ok_or_else(unknown)?;
        let size = content.len() as u64;
        let descriptor = Descriptor { media_type, digest, size, ..Descriptor::default() };
        Ok(ResolvedReference { descriptor, manifest: Some(content) })
    }

    /// Fetches a manifest or an index, whole and with its digest checked.
    pub async fn fetch_manifest(&self, descriptor: &Descriptor) -> Result<Vec<u8>, RegistryError> {
        self.fetch_whole("manifests", descriptor, MAX_MANIFEST).await
    }

    /// Fetches a blob of at most `limit` bytes, whole and with its digest checked: a configuration, or a signature.
    pub async fn small_blob(&self, descriptor: &Descriptor, limit: u64) -> Result<Vec<u8>, RegistryError> {
        self.fetch_whole("blobs", descriptor, limit).await
    }

    async fn fetch_whole(
        &self,
        kind: &str,
        descriptor: &Descriptor,
        limit: u64,
    ) -> Result<Vec<u8>, RegistryError> {
        let Descriptor { digest, size, .. } = descriptor;
        if *size > limit {
            let message = format!("{} has {size} bytes, of at most {limit}", self.reference.name());
            return Err(RegistryError::new(ErrorKind::Protocol, format!("{message}: {digest}")));
        }
        self.first_of(|c| c.pull, &[], |endpoint| self.whole_at(endpoint, kind, digest, *size).boxed()).await
    }

    async fn whole_at(
        &self,
        endpoint: &RegistryEndpoint,
        kind: &str,
        digest: &str,
        size: u64,
    ) -> Result<Vec<u8>, RegistryError> {
        let headers = if kind == "manifests" { accept_manifests() } else { HeaderMap::new() };
        let answer = self
            .ask_endpoint(endpoint, Method::GET, &self.object_path(endpoint, kind, digest), headers)
            .await?;
        let answer = self.check_answer(answer).await?;
        let from = answer.from.clone();
        let content = self.read_answer(answer, size).await?;
        check_digest(&content, digest, &format!("{from}: {kind}/{digest}"))?;
        Ok(content)
    }

    /// Fetches a blob from an offset on, or from its beginning where the registry knows no ranges. Endpoints to `avoid`
    /// are asked only if there are no others. Where there are, the stream ends with [`ErrorKind::TooSlow`] if it trickles.
    pub async fn fetch_blob(
        &self,
        descriptor: &Descriptor,
        offset: u64,
        avoid: &[HostId],
    ) -> Result<BlobStream, RegistryError> {
        let Descriptor { digest, size, .. } = descriptor;
        if offset > *size || !is_digest(digest) {
            let message = format!("byte {offset} of {digest:.100}, which has {size}, cannot be asked for");
            return Err(RegistryError::new(ErrorKind::Protocol, message));
        }
        let stream = self.first_of(
            |c| c.pull,
            avoid,
            |endpoint| self.blob_at(endpoint, digest, *size, offset).boxed(),
        );
        let stream = stream.await?;
        let is_other = |id: HostId| id != *stream.host() && !avoid.contains(&id);
        let has_other =
            self.endpoints.iter().any(|other| other.capabilities.pull && is_other(other.host_id()));
        Ok(if has_other { stream.with_least_rate() } else { stream })
    }

    async fn blob_at(
        &self,
        endpoint: &RegistryEndpoint,
        digest: &str,
        size: u64,
        mut offset: u64,
    ) -> Result<BlobStream, RegistryError> {
        let path = self.object_path(endpoint, "blobs", digest);
        loop {
            let mut headers = HeaderMap::new();
            if offset > 0
                && let Ok(range) = HeaderValue::try_from(format!("bytes={offset}-"))
            {
                headers.insert(RANGE, range);
            }
            let answer = self.ask_endpoint(endpoint, Method::GET, &path, headers).await?;
            let begins = begins_at(&answer.response, offset, size);
            let is_range = matches!(answer.response.status().as_u16(), 206 | 416);
            if is_range && begins.is_none() && offset > 0 {
                // Not the range that was asked for: without one there is nothing to get wrong.
                offset = 0;
                continue;
            }
            let answer = self.check_answer(answer).await?;
            let failed = |kind, what: &str| RegistryError::new(kind, format!("{}: {what}", answer.from));
            body::refuse_encoded(&answer.response).map_err(|error| failed(error.kind, &error.message))?;
            let wrong = || failed(ErrorKind::Protocol, &format!("the length of blob {digest} is not {size}"));
            let begins = begins.ok_or_else(wrong)?;
            return Ok(BlobStream::new(answer.response.into_body(), endpoint.host_id(), begins, size));
        }
    }

    /// Asks the permitted endpoints one after another. If all fail, returns the most useful error. A mirror's refusal is marked as
    /// [undecided](RegistryError::undecided) if another endpoint may answer later: a mirror needn't have what the registry has.
    /// That of the registry itself, the last endpoint, decides.
    async fn first_of<'a, T>(
        &'a self,
        may: fn(Capabilities) -> bool,
        avoid: &[HostId],
        one: impl Fn(&'a RegistryEndpoint) -> BoxFuture<'a, Result<T, RegistryError>>,
    ) -> Result<T, RegistryError> {
        let able = self.endpoints.iter().filter(|endpoint| may(endpoint.capabilities));
        let (last, first): (Vec<_>, Vec<_>) = able.partition(|endpoint| avoid.contains(&endpoint.host_id()));
        let (mut worst, mut passing): (Option<RegistryError>, Option<RegistryError>) = (None, None);
        let (registry, mut is_decided) = (self.endpoints.last().map(RegistryEndpoint::host_id), false);
        for endpoint in first.into_iter().chain(last) {
            match one(endpoint).await {
                Ok(value) => return Ok(value),
                // The runtime will ask all of them, in the right order.
                Err(error) if error.kind == ErrorKind::Unsupported => return Err(error),
                Err(error) => {
                    tracing::debug!(endpoint = endpoint.name(), %error, "endpoint failed");
                    is_decided |= error.is_refusal() && registry == Some(endpoint.host_id());
                    if passing.is_none() && error.may_pass() {
                        passing = Some(error.clone());
                    }
                    if worst.as_ref().is_none_or(|worst| worst.weight() < error.weight()) {
                        worst = Some(error);
                    }
                }
            }
        }
        let none = || {
            let message = format!("hosts.toml leaves no endpoint for {}", self.reference.registry());
            RegistryError::new(ErrorKind::NotFound, message)
        };
        let worst = worst.unwrap_or_else(none);
        Err(match passing.filter(|_| worst.is_refusal() && !is_decided) {
            Some(passing) => {
                let message = format!("{}, and {}", worst.message, passing.message);
                RegistryError { undecided: true, ..RegistryError::new(worst.kind, message) }
            }
            None => worst,
        })
    }
}

fn accept_manifests() -> HeaderMap {
    // As containerd asks: a registry may convert what is not accepted, or say that it is not there.
    let accepted = format!("{DOCKER_MANIFEST}, {DOCKER_INDEX}, {OCI_MANIFEST}, {OCI_INDEX}, */*");
    HeaderValue::try_from(accepted)
        .map(|accepted| HeaderMap::from_iter([(ACCEPT, accepted)]))
        .unwrap_or_default()
}

/// The media type, if the answer has a meaningful one.
fn media_type(answer: &RegistryAnswer) -> Option<String> {
    let text = answer.response.headers().get(http::header::CONTENT_TYPE)?.to_str().ok()?;
    let text = text.split(';').next().unwrap_or_default().trim();
    let known = [OCI_MANIFEST, OCI_INDEX, DOCKER_MANIFEST, DOCKER_INDEX];
    known.contains(&text).then(|| text.to_owned())
}
