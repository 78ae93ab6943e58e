//! Pushes of artifacts: blobs, their manifest, and the tag that lists referrers where the registry itself doesn't.

use std::io::{self, Read};
use std::time::Duration;

use bytes::Bytes;
use futures::stream;
use http::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, LOCATION};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use serde_json::{Value, json};

use super::Repository;
use crate::address::Reach;
use crate::error::{ErrorKind, RegistryError};
use crate::hosts::RegistryEndpoint;
use crate::location;
use crate::manifest::{Descriptor, OCI_INDEX};
use crate::transport::{ConnectionOptions, HEAD, RegistryAnswer, RequestBody, is_on_loopback};

/// The header by which a registry confirms that it lists the manifest among the referrers of its subject.
const SUBJECT: HeaderName = HeaderName::from_static("oci-subject");
/// Bytes of a blob that are sent at once.
const PIECE: usize = 64 << 10;
/// The rate below which a push is given up, in bytes per second.
const LEAST_RATE: u64 = 16 << 10;

/// Opens the content of a blob. It's called again where the content must be sent again.
pub type Open<'a> = &'a (dyn Fn() -> io::Result<Box<dyn Read + Send>> + Sync);

/// A body that goes to a place.
struct Upload<'a> {
    target: Uri,
    headers: HeaderMap,
    /// Makes the body; called again where it must be sent again.
    body: &'a (dyn Fn() -> Result<RequestBody, RegistryError> + Sync),
    /// The time for all of it.
    limit: Duration,
}

impl Repository {
    /// The registry itself, to which pushes go: mirrors only answer pulls.
    fn own_endpoint(&self) -> Result<&RegistryEndpoint, RegistryError> {
        let none = || RegistryError::new(ErrorKind::NotFound, "hosts.toml leaves no endpoint to push to");
        self.endpoints.last().ok_or_else(none)
    }

    /// Pushes a blob, unless the registry has it. Returns whether it was sent.
    pub async fn push_blob(&self, blob: &Descriptor, open: Open<'_>) -> Result<bool, RegistryError> {
        let endpoint = self.own_endpoint()?;
        let path = self.object_path(endpoint, "blobs", &blob.digest);
        let answer = self.ask_endpoint(endpoint, Method::HEAD, &path, HeaderMap::new()).await?;
        match answer.response.status().as_u16() {
            404 => {}
            _ => return self.check_answer(answer).await.map(|_| false),
        }
        let path = format!("/{}/blobs/uploads/", self.reference.repository());
        let answer = self.ask_endpoint(endpoint, Method::POST, &path, HeaderMap::new()).await?;
        let answer = self.check_answer(answer).await?;
        let target = upload_target(&answer, &blob.digest)?;
        let body = || {
            let content = open().map_err(|error| unreadable_source(&error))?;
            Ok(StreamBody::new(stream::iter(Pieces(content))).boxed_unsync())
        };
        let size = HeaderValue::from(blob.size);
        let octets = HeaderValue::from_static("application/octet-stream");
        let headers = HeaderMap::from_iter([(CONTENT_LENGTH, size), (CONTENT_TYPE, octets)]);
        let limit = HEAD + Duration::from_secs(blob.size / LEAST_RATE);
        let upload = Upload { target, headers, body: &body, limit };
        let answer = self.send_upload(endpoint, &answer, &upload).await?;
        self.check_answer(answer).await.map(|_| true)
    }

    /// Pushes a manifest by its digest or under a tag. Returns whether the registry lists it among the referrers of its
    /// subject.
    pub async fn push_manifest(
        &self,
        reference: &str,
        media_type: &str,
        content: &[u8],
    ) -> Result<bool, RegistryError> {
        let endpoint = self.own_endpoint()?;
        // A question first: its answer has the scheme by which the registry is reached, and where it is.
        let path = self.object_path(endpoint, "manifests", reference);
        let answer = self.ask_endpoint(endpoint, Method::HEAD, &path, HeaderMap::new()).await?;
        let target = answer.uri.clone();
        let content = Bytes::copy_from_slice(content);
        let body = || Ok(Full::new(content.clone()).map_err(|never| match never {}).boxed_unsync());
        let bad = |_| RegistryError::new(ErrorKind::Protocol, format!("{media_type:.100?} is no media type"));
        let media_type = HeaderValue::from_str(media_type).map_err(bad)?;
        let headers = HeaderMap::from_iter([(CONTENT_TYPE, media_type)]);
        let upload = Upload { target, headers, body: &body, limit: HEAD };
        let answer = self.send_upload(endpoint, &answer, &upload).await?;
        let answer = self.check_answer(answer).await?;
        Ok(answer.response.headers().contains_key(SUBJECT))
    }

    /// Adds a manifest to the tag that lists the referrers of a digest, for registries without the API. Two clients that do
    /// so at the same moment may lose one: the specification has nothing better.
    pub async fn attach_by_tag(&self, subject: &str, referrer: &Descriptor) -> Result<(), RegistryError> {
        let tag = subject.replace(':', "-");
        let known = match self.referrer_places().last() {
            Some(place) => place.resolve_tag(&tag).await?,
            None => None,
        };
        let mut index = json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []});
        if let Some(known) = known.filter(|known| known.descriptor.is_index()) {
            let content = match known.manifest {
                Some(content) => content,
                None => self.fetch_manifest(&known.descriptor).await?,
            };
            let bad = |_| RegistryError::new(ErrorKind::Protocol, format!("the tag {tag} is no index"));
            index = serde_json::from_slice(&content).map_err(bad)?;
        }
        let bad = |_| RegistryError::new(ErrorKind::Protocol, "a descriptor is no JSON");
        let entry = serde_json::to_value(referrer).map_err(bad)?;
        let Some(Value::Array(manifests)) = index.get_mut("manifests") else {
            return Err(RegistryError::new(
                ErrorKind::Protocol,
                format!("the tag {tag} has no list of manifests"),
            ));
        };
        manifests.retain(|known| known["digest"] != entry["digest"]);
        manifests.push(entry);
        self.push_manifest(&tag, OCI_INDEX, index.to_string().as_bytes()).await.map(|_| ())
    }

    /// Sends a body, and sends it again with a new token if the first one isn't enough to push.
    async fn send_upload(
        &self,
        endpoint: &RegistryEndpoint,
        before: &RegistryAnswer,
        Upload { target, headers, body, limit }: &Upload<'_>,
    ) -> Result<RegistryAnswer, RegistryError> {
        let own = !before.redirected && location::same_origin(target, &before.uri);
        let reach = Reach::toward(target, &self.named, before.on_loopback);
        let link = ConnectionOptions { reach, dial: endpoint.dial, receive_ahead: self.receive_ahead };
        let mut shown = self.first_authorization(endpoint).filter(|_| own);
        let mut tries = 0;
        loop {
            let mut request = Request::new(body()?);
            *request.method_mut() = Method::PUT;
            *request.uri_mut() = target.clone();
            *request.headers_mut() = if own { endpoint.headers.clone() } else { HeaderMap::new() };
            request.headers_mut().extend(headers.clone());
            if let Some(authorization) = &shown {
                request.headers_mut().insert(AUTHORIZATION, authorization.clone());
            }
            let response = self.shared.transport.send_body(&endpoint.tls, link, request, *limit).await;
            let response = response.map_err(|failed| failed.into_error(endpoint.name()))?;
            let on_loopback = is_on_loopback(&response);
            let from = target.authority().map(ToString::to_string).unwrap_or_default();
            let answer =
                RegistryAnswer { response, uri: target.clone(), from, redirected: !own, on_loopback };
            tries += 1;
            match self.answer_challenge(endpoint, &Method::PUT, &answer, shown.as_ref()).await? {
                Some(authorization) if tries == 1 => shown = Some(authorization),
                _ => return Ok(answer),
            }
        }
    }
}

/// The URL that an upload goes to, with the digest of the blob.
fn upload_target(answer: &RegistryAnswer, digest: &str) -> Result<Uri, RegistryError> {
    let bad = |what: &str| {
        RegistryError::new(ErrorKind::Protocol, format!("{}: it begins an upload {what}", answer.from))
    };
    let location = answer.response.headers().get(LOCATION).and_then(|location| location.to_str().ok());
    let location = location.ok_or_else(|| bad("without a location"))?;
    let target = location::join_url(&answer.uri, location).ok_or_else(|| bad("at what is no URL of HTTP"))?;
    if answer.uri.scheme_str() == Some("https") && target.scheme_str() == Some("http") {
        return Err(bad("without TLS: the registry doesn't know that it is behind a proxy with TLS"));
    }
    let joint = if target.query().is_some_and(|query| !query.is_empty()) { '&' } else { '?' };
    let text =
        format!("{}{joint}digest={}", target.to_string().trim_end_matches('?'), digest.replace(':', "%3A"));
    text.parse().map_err(|_| bad("at what is no URL of HTTP"))
}

fn unreadable_source(error: &io::Error) -> RegistryError {
    RegistryError::new(ErrorKind::Protocol, format!("cannot read what should be pushed: {error}"))
}

/// The pieces of a content.
struct Pieces(Box<dyn Read + Send>);

impl Iterator for Pieces {
    type Item = io::Result<Frame<Bytes>>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut piece = vec![0; PIECE];
        match self.0.read(&mut piece) {
            Ok(0) => None,
            Ok(read) => {
                piece.truncate(read);
                Some(Ok(Frame::data(piece.into())))
            }
            Err(error) => Some(Err(error)),
        }
    }
}
