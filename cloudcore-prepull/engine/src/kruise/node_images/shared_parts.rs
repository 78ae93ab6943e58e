//! Parts that many NodeImages have in common, each kept once. The nodes of a fleet are asked for the same images by the
//! same jobs: without this, ten thousand of them would keep ten thousand copies of each name and each owner.

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use k8s_openapi::api::core::v1::ObjectReference;
use prepull_api::crd::kruise::{ImageTagPullPolicy, SandboxConfig, SecretObject};
use prepull_api::task::JobUid;

use crate::kruise::TagKey;
use crate::shared::shelf::Shelf;

/// A shelf is not swept before it has this many values.
const FIRST_SWEEP: usize = 1024;

pub(super) type NodeImageLabels = BTreeMap<String, String>;

/// What holds for all tags of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ImageTerms {
    pub(super) pull_secrets: Vec<SecretObject>,
    pub(super) sandbox_config: Option<SandboxConfig>,
}

impl Hash for ImageTerms {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.pull_secrets.len().hash(state);
        for secret in &self.pull_secrets {
            (&secret.namespace, &secret.name).hash(state);
        }
        if let Some(sandbox) = &self.sandbox_config {
            (&sandbox.labels, &sandbox.annotations).hash(state);
        }
    }
}

/// What a tag has in common with the same tag of other nodes: all but its times and its version.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct TagTerms {
    pub(super) pull_policy: Option<ImageTagPullPolicy>,
    pub(super) owner_references: Vec<ObjectReference>,
    pub(super) image_pull_policy: Option<String>,
}

// Its parts have no `Eq` of their own, and no floating-point number either.
impl Eq for TagTerms {}

impl Hash for TagTerms {
    /// Hashes only the fields in which terms usually differ.
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.owner_references.iter().for_each(|owner| owner.uid.hash(state));
        let seconds = self.pull_policy.as_ref().map(|limits| limits.ttl_seconds_after_finished);
        (seconds, &self.image_pull_policy).hash(state);
    }
}

/// The parts that are kept once. What nothing uses any more is removed from time to time.
#[derive(Debug)]
pub struct SharedParts {
    texts: Shelf<str>,
    jobs: Shelf<JobUid>,
    keys: Shelf<TagKey>,
    labels: Shelf<NodeImageLabels>,
    image_terms: Shelf<ImageTerms>,
    tag_terms: Shelf<TagTerms>,
}

impl Default for SharedParts {
    fn default() -> Self {
        Self {
            texts: Shelf::new(FIRST_SWEEP),
            jobs: Shelf::new(FIRST_SWEEP),
            keys: Shelf::new(FIRST_SWEEP),
            labels: Shelf::new(FIRST_SWEEP),
            image_terms: Shelf::new(FIRST_SWEEP),
            tag_terms: Shelf::new(FIRST_SWEEP),
        }
    }
}

impl SharedParts {
    pub(super) fn text(&mut self, text: &str) -> Arc<str> {
        self.texts.share(text, || text.into())
    }

    pub(super) fn job(&mut self, job: &JobUid) -> Arc<JobUid> {
        self.jobs.share(job, || Arc::new(job.clone()))
    }

    pub(super) fn key(&mut self, key: &TagKey) -> Arc<TagKey> {
        self.keys.share(key, || Arc::new(key.clone()))
    }

    pub(super) fn labels(&mut self, labels: &NodeImageLabels) -> Arc<NodeImageLabels> {
        self.labels.share(labels, || Arc::new(labels.clone()))
    }

    pub(super) fn image_terms(&mut self, terms: &ImageTerms) -> Arc<ImageTerms> {
        self.image_terms.share(terms, || Arc::new(terms.clone()))
    }

    pub(super) fn tag_terms(&mut self, terms: &TagTerms) -> Arc<TagTerms> {
        self.tag_terms.share(terms, || Arc::new(terms.clone()))
    }
}

#[cfg(test)]
mod tests {
    use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};

    use super::*;

    #[test]
    fn different_terms_have_different_hashes() {
        let hasher = BuildHasherDefault::<DefaultHasher>::default();
        let owner = ObjectReference { uid: Some("job".to_owned()), ..ObjectReference::default() };
        let owned = TagTerms { owner_references: vec![owner], ..TagTerms::default() };
        assert_ne!(hasher.hash_one(owned), hasher.hash_one(TagTerms::default()));
        let secret = SecretObject { namespace: "shop".to_owned(), name: "registry".to_owned() };
        let secret = ImageTerms { pull_secrets: vec![secret], sandbox_config: None };
        assert_ne!(hasher.hash_one(secret), hasher.hash_one(ImageTerms::default()));
    }

    #[test]
    fn unused_parts_are_removed() {
        let mut parts = SharedParts::default();
        let used = parts.text("used");
        for number in 0..3 * FIRST_SWEEP {
            parts.text(&number.to_string());
        }
        assert!(parts.texts.len() <= FIRST_SWEEP);
        assert!(Arc::ptr_eq(&used, &parts.text("used")));
    }
}
