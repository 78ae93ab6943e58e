//! From what a reference points to, through indexes, to the manifest for one platform.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use super::{Repository, ResolvedReference};
use crate::error::{ErrorKind, RegistryError};
use crate::manifest::{Descriptor, Index, Platform};

/// Deepest index in an index that is followed. One within another is known, more is not.
const MAX_DEPTH: usize = 4;

/// What is fetched for one platform.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// The indexes that lead to the manifest, the outermost one first, each with its content.
    pub indexes: Vec<(Descriptor, Vec<u8>)>,
    /// The manifest, with its content.
    pub manifest: (Descriptor, Vec<u8>),
}

/// Manifests and indexes that are at hand, so that the registry is not asked for them.
pub trait Contents: Sync {
    /// The content of this digest, if it is there. The caller trusts it to match the digest.
    fn read(&self, digest: &str) -> impl Future<Output = Option<Vec<u8>>> + Send;

    /// Receives content that the registry had to be asked for, so that it can be kept for the next time.
    fn keep_content(&self, _digest: &str, _content: &[u8]) {}
}

/// Nothing is at hand.
impl Contents for () {
    async fn read(&self, _digest: &str) -> Option<Vec<u8>> {
        None
    }
}

/// By digest; what is asked for once is at hand from then on.
impl Contents for Mutex<BTreeMap<String, Vec<u8>>> {
    async fn read(&self, digest: &str) -> Option<Vec<u8>> {
        self.lock().unwrap_or_else(PoisonError::into_inner).get(digest).cloned()
    }

    fn keep_content(&self, digest: &str, content: &[u8]) {
        self.lock().unwrap_or_else(PoisonError::into_inner).insert(digest.to_owned(), content.to_owned());
    }
}

impl Repository {
    /// The manifest for a platform, with the indexes that lead to it. What was resolved may be a manifest itself.
    pub async fn choose(
        &self,
        resolved: ResolvedReference,
        platform: &Platform,
        at_hand: &impl Contents,
    ) -> Result<Chosen, RegistryError> {
        let ResolvedReference { mut descriptor, manifest: mut known } = resolved;
        let mut indexes: Vec<(Descriptor, Vec<u8>)> = Vec::new();
        loop {
            let content = match known.take() {
                Some(content) => content,
                None => self.manifest_through(at_hand, &descriptor).await?,
            };
            if descriptor.is_manifest() {
                return Ok(Chosen { indexes, manifest: (descriptor, content) });
            }
            if !descriptor.is_index() {
                let message = format!("manifests of the kind {:?} are not known here", descriptor.media_type);
                return Err(RegistryError::new(ErrorKind::Unsupported, message));
            }
            if indexes.len() == MAX_DEPTH {
                return Err(RegistryError::new(
                    ErrorKind::Unsupported,
                    "its indexes lead to ever more indexes",
                ));
            }
            let next = Index::parse(&content)?.select(platform).cloned();
            let next = next.ok_or_else(|| {
                let Platform { os, architecture, .. } = platform;
                let message = format!("the image has no manifest for the platform {os}/{architecture}");
                RegistryError::new(ErrorKind::PlatformMismatch, message)
            })?;
            indexes.push((std::mem::replace(&mut descriptor, next), content));
        }
    }

    async fn manifest_through(
        &self,
        at_hand: &impl Contents,
        descriptor: &Descriptor,
    ) -> Result<Vec<u8>, RegistryError> {
        if let Some(content) = at_hand.read(&descriptor.digest).await {
            return Ok(content);
        }
        let content = self.fetch_manifest(descriptor).await?;
        at_hand.keep_content(&descriptor.digest, &content);
        Ok(content)
    }
}
