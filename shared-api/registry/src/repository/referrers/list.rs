//! Lists of referrers, and the part of them that is of use here.

use std::fmt;

use prepull_api::delta::{ARTIFACT_TYPE, DOWNLOAD_SIZE, EMPTY_TYPE, SOURCE_CONFIG, TARGET};
use serde::de::{Error, IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::digest::is_digest;
use crate::error::RegistryError;
use crate::manifest::{Annotations, Descriptor, annotations_of, parse_json};

/// Most referrers of an image that are kept. An image is signed once or twice, and has a delta from each of some earlier ones;
/// anyone who may push to its repository can add others, and an agent's memory is small.
pub(super) const MAX_REFERRERS: usize = 1024;
/// Longest text of a referrer: a digest, a media type, or the URL that names a kind of statement.
const MAX_TEXT: usize = 255;
/// Prefix of the media type of a Sigstore bundle; its version follows.
pub const BUNDLE_TYPE: &str = "application/vnd.dev.sigstore.bundle";
/// How the types of signatures begin.
pub const SIGNATURE_TYPES: [&str; 3] =
    [BUNDLE_TYPE, EMPTY_TYPE, "application/vnd.dev.cosign.artifact.sig.v1+json"];
/// Annotation of a bundle with the kind of its statement, if a registry passes it on.
const PREDICATE: &str = "dev.sigstore.bundle.predicateType";
/// The kind of a signature. Others are attestations, such as SBOMs and scan reports: perhaps signed by the same key, but with
/// statements such as "built like this" or "has these vulnerabilities".
pub const SIGNED: &str = "https://sigstore.dev/cosign/sign/v1";
/// The annotations that are kept: those of bundles, and those of deltas that `prepull_delta` reads for an `Offer`.
const ANNOTATIONS: [&str; 4] = [PREDICATE, SOURCE_CONFIG, TARGET, DOWNLOAD_SIZE];

/// What is kept of a list.
#[derive(Debug, Default)]
pub(super) struct ListedPart {
    /// The entries that may be signatures or deltas, at most [`MAX_REFERRERS`].
    pub(super) referrers: Vec<Descriptor>,
    /// Whether the list had any entries.
    pub(super) has_any: bool,
}

impl ListedPart {
    pub(super) fn parse(content: &[u8]) -> Result<Self, RegistryError> {
        #[derive(Deserialize)]
        struct List {
            #[serde(default)]
            manifests: ListedPart,
        }
        parse_json(content, "list of referrers").map(|list: List| list.manifests)
    }

    /// Adds the next part. Whether there's room for more.
    pub(super) fn add(&mut self, next: Self) -> bool {
        self.has_any |= next.has_any;
        let room = MAX_REFERRERS.saturating_sub(self.referrers.len());
        self.referrers.extend(next.referrers.into_iter().take(room));
        self.referrers.len() < MAX_REFERRERS
    }
}

/// An entry of a list. One at a time is in memory.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: u64,
    artifact_type: Option<String>,
    #[serde(default, deserialize_with = "used_annotations")]
    annotations: Annotations,
}

impl From<Entry> for Descriptor {
    fn from(entry: Entry) -> Self {
        let Entry { media_type, digest, size, artifact_type, annotations } = entry;
        Self { media_type, digest, size, platform: None, artifact_type, annotations }
    }
}

/// Whether a referrer may be a signature, by its entry in a list.
pub fn may_be_signature(referrer: &Descriptor) -> bool {
    let kind = referrer.artifact_type.as_deref().unwrap_or_default();
    referrer.is_manifest() && (kind.is_empty() || is_signature_type(kind))
}

fn is_signature_type(kind: &str) -> bool {
    SIGNATURE_TYPES.iter().any(|known| kind.starts_with(known))
}

/// Whether a referrer may be a signature or a delta. Registries report the type of signatures for some deltas too.
fn is_of_use(referrer: &Descriptor) -> bool {
    let kind = referrer.artifact_type.as_deref().unwrap_or_default();
    let is_statement = referrer.annotations.get(PREDICATE).is_some_and(|kind| kind != SIGNED);
    let mut texts = referrer.annotations.values().map(String::as_str).chain([kind, &referrer.media_type]);
    let may_be = kind == ARTIFACT_TYPE || is_signature_type(kind) || may_be_signature(referrer);
    may_be && !is_statement && texts.all(|text| text.len() <= MAX_TEXT)
}

fn used_annotations<'de, D: Deserializer<'de>>(from: D) -> Result<Annotations, D::Error> {
    annotations_of(from, |name| ANNOTATIONS.contains(&name))
}

impl<'de> Deserialize<'de> for ListedPart {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(PartVisitor)
    }
}

struct PartVisitor;

impl<'de> Visitor<'de> for PartVisitor {
    type Value = ListedPart;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("a list of descriptors")
    }

    /// Go's programs write `null` for an empty list.
    fn visit_unit<E: Error>(self) -> Result<ListedPart, E> {
        Ok(ListedPart::default())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<ListedPart, A::Error> {
        let mut part = ListedPart::default();
        while part.referrers.len() < MAX_REFERRERS {
            let Some(entry) = entries.next_element::<Entry>()? else { return Ok(part) };
            let referrer = Descriptor::from(entry);
            if !is_digest(&referrer.digest) {
                return Err(A::Error::custom(format!("{:.100?} is no digest", referrer.digest)));
            }
            part.has_any = true;
            if is_of_use(&referrer) {
                part.referrers.push(referrer);
            }
        }
        while entries.next_element::<IgnoredAny>()?.is_some() {}
        Ok(part)
    }
}
