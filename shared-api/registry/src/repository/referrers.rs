//! The referrers of an image: its signatures and attestations.
//!
//! Content with a digest is the same at each endpoint, so the first endpoint that has it will do. What stands beside an image
//! differs: a mirror may keep images and no signatures, or only those of last month. So each endpoint is asked by itself, and
//! the caller decides whether it found enough.

mod list;

use std::sync::Arc;

use futures::future::FutureExt;
use http::header::{ACCEPT, LINK};
use http::{HeaderMap, HeaderValue, Method};

use super::{Repository, ResolvedReference};
use crate::blob::HostId;
use crate::error::{ErrorKind, RegistryError};
use crate::hosts::RegistryEndpoint;
use crate::manifest::{Descriptor, MAX_MANIFEST, OCI_INDEX};

use list::ListedPart;
pub use list::{BUNDLE_TYPE, SIGNATURE_TYPES, SIGNED, may_be_signature};

/// Most parts of a list of referrers that are read: registries put 50 or more into one.
const MAX_PARTS: usize = 8;

/// One endpoint of a repository: a mirror, or the registry itself.
#[derive(Clone, Copy)]
pub struct ReferrerPlace<'a> {
    repository: &'a Repository,
    endpoint: &'a RegistryEndpoint,
}

/// The referrers of a digest, as an endpoint has listed them.
pub(super) struct ListedReferrers {
    endpoint: HostId,
    digest: String,
    referrers: Arc<[Descriptor]>,
}

impl Repository {
    /// The endpoints at which something may stand beside an image, in their order. One that may resolve tags is asked for
    /// referrers too: a hosts.toml from before containerd 2.1 couldn't say `referrers`, and a signature proves itself.
    pub fn referrer_places(&self) -> Vec<ReferrerPlace<'_>> {
        let able = self.endpoints.iter().filter(|endpoint| {
            let may = endpoint.capabilities;
            may.resolve || may.referrers
        });
        able.map(|endpoint| ReferrerPlace { repository: self, endpoint }).collect()
    }
}

impl ReferrerPlace<'_> {
    /// Asks what a tag of the repository points to here. `None` if there is no such tag.
    pub async fn resolve_tag(&self, tag: &str) -> Result<Option<ResolvedReference>, RegistryError> {
        match self.repository.resolve_at(self.endpoint, tag).boxed().await {
            Ok(resolved) => Ok(Some(resolved)),
            Err(error) if error.kind == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The referrers of a digest that this endpoint lists and that may be signatures or deltas, by the API of OCI 1.1, or by the
    /// tag that stands in for it: the first 1,024. Of a list in several parts, the first eight. The endpoint is asked once.
    pub async fn referrers(&self, digest: &str) -> Result<Arc<[Descriptor]>, RegistryError> {
        let mut all = self.repository.listed.lock().await;
        let endpoint = self.endpoint.host_id();
        if let Some(listed) = all.iter().find(|one| one.endpoint == endpoint && one.digest == digest) {
            return Ok(Arc::clone(&listed.referrers));
        }
        let referrers: Arc<[Descriptor]> = self.ask_referrers(digest).await?.into();
        let digest = digest.to_owned();
        all.push(ListedReferrers { endpoint, digest, referrers: Arc::clone(&referrers) });
        Ok(referrers)
    }

    async fn ask_referrers(&self, digest: &str) -> Result<Vec<Descriptor>, RegistryError> {
        let by_api = self.referrers_by_api(digest).boxed().await?;
        // A cache that knows the API and not what is behind it answers with an empty list.
        if let Some(listed) = by_api.filter(|listed| listed.has_any) {
            return Ok(listed.referrers);
        }
        let Some(resolved) = self.resolve_tag(&digest.replace(':', "-")).await? else {
            return Ok(Vec::new());
        };
        if !resolved.descriptor.is_index() {
            return Ok(Vec::new());
        }
        let content = match resolved.manifest {
            Some(content) => content,
            None => self.repository.fetch_manifest(&resolved.descriptor).await?,
        };
        Ok(ListedPart::parse(&content)?.referrers)
    }

    /// `None` if the endpoint does not know the API.
    async fn referrers_by_api(&self, digest: &str) -> Result<Option<ListedPart>, RegistryError> {
        let Self { repository, endpoint } = self;
        let path = repository.object_path(endpoint, "referrers", digest);
        let (mut part, mut listed) = (path.clone(), ListedPart::default());
        for _ in 0..MAX_PARTS {
            let accept = HeaderMap::from_iter([(ACCEPT, HeaderValue::from_static(OCI_INDEX))]);
            let answer = repository.ask_endpoint(endpoint, Method::GET, &part, accept).await?;
            if matches!(answer.response.status().as_u16(), 400 | 404 | 405 | 501) {
                return Ok(listed.has_any.then_some(listed));
            }
            let answer = repository.check_answer(answer).await?;
            let next = answer.response.headers().get(LINK).and_then(next_query);
            let content = repository.read_answer(answer, MAX_MANIFEST).await?;
            let has_room = listed.add(ListedPart::parse(&content)?);
            let Some(query) = next.filter(|_| has_room) else { break };
            let separator = if path.contains('?') { '&' } else { '?' };
            part = format!("{path}{separator}{query}");
        }
        Ok(Some(listed))
    }
}

/// The query of the next part, as in `</v2/…/referrers/sha256:…?n=50&last=…>; rel="next"`. Nothing else of the link counts: it
/// must not lead to another host.
fn next_query(link: &HeaderValue) -> Option<String> {
    let (target, relation) = link.to_str().ok()?.trim().strip_prefix('<')?.split_once('>')?;
    let is_next = relation.contains("rel=\"next\"") || relation.contains("rel=next");
    let (_, query) = target.split_once('?')?;
    let query = query.split('#').next().filter(|query| !query.is_empty())?;
    is_next.then(|| query.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_query_of_the_next_part_counts() {
        for (link, query) in [
            ("</v2/a/referrers/sha256:1?n=5&last=x>; rel=\"next\"", Some("n=5&last=x")),
            ("<https://evil.example/v2/a?last=x>; rel=next", Some("last=x")),
            ("</v2/a/referrers/sha256:1>; rel=\"next\"", None),
            ("</v2/a?last=x>; rel=\"prev\"", None),
            ("</v2/a?#x>; rel=next", None),
            ("last=x", None),
        ] {
            assert_eq!(next_query(&HeaderValue::from_static(link)).as_deref(), query, "{link}");
        }
    }
}
