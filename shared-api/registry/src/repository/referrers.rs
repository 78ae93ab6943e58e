//! What refers to an image: signatures, attestations.

use futures::future::FutureExt;
use http::{HeaderMap, HeaderValue, Method};

use super::Repository;
use crate::error::{Kind, RegistryError};
use crate::hosts::Endpoint;
use crate::manifest::{Descriptor, Index, MAX_MANIFEST, OCI_INDEX};

impl Repository {
    /// The referrers of a digest, by the API of OCI 1.1, or by the tag that stands in for it. Empty if there are none. Of a
    /// list in several parts it is the first one.
    pub async fn referrers(&self, digest: &str) -> Result<Vec<Descriptor>, RegistryError> {
        match self
            .first_of(|c| c.referrers, &[], |endpoint| self.referrers_at(endpoint, digest).boxed())
            .await
        {
            Ok(Some(referrers)) => return Ok(referrers),
            Ok(None) => {}
            Err(error) if error.kind == Kind::NotFound => {}
            Err(error) => return Err(error),
        }
        let Some(resolved) = self.resolve_tag(&digest.replace(':', "-")).await? else {
            return Ok(Vec::new());
        };
        if !resolved.descriptor.is_index() {
            return Ok(Vec::new());
        }
        let content = match resolved.manifest {
            Some(content) => content,
            None => self.manifest(&resolved.descriptor).await?,
        };
        Ok(Index::parse(&content)?.manifests)
    }

    /// `None` if the endpoint does not know the API.
    async fn referrers_at(
        &self,
        endpoint: &Endpoint,
        digest: &str,
    ) -> Result<Option<Vec<Descriptor>>, RegistryError> {
        let accept = HeaderMap::from_iter([(http::header::ACCEPT, HeaderValue::from_static(OCI_INDEX))]);
        let path = self.path(endpoint, "referrers", digest);
        let answer = self.ask(endpoint, Method::GET, &path, accept).await?;
        if matches!(answer.response.status().as_u16(), 400 | 404 | 405 | 501) {
            return Ok(None);
        }
        let answer = self.accept(answer).await?;
        let content = self.read(answer, MAX_MANIFEST).await?;
        Index::parse(&content).map(|index| Some(index.manifests))
    }
}
