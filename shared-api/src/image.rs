//! Image references, as written and as normalised.
//!
//! The grammar and the normalisation are distribution's (`github.com/distribution/reference`), which Docker,
//! containerd and the kubelet share. Overriders work on the written form, everything else on the normalised
//! one.

use std::borrow::Cow;
use std::fmt;

use crate::abbreviate::abbreviate;
use crate::task::PullPolicy;

mod grammar;
#[cfg(test)]
pub(crate) mod tests;

use grammar::{MAX_TAG, is_host, is_lower_hex, is_repository};
pub(crate) use grammar::{is_digest, is_tag, looks_like_host};

/// Longest name, host and path together, in bytes. distribution once counted both and now counts the path alone;
/// runtimes of either age are in the field, so the stricter rule applies.
const MAX_NAME: usize = 255;

/// Longest reference in bytes: a name with a tag and a digest, and that of SHA-512 is the longest.
pub const MAX_REFERENCE: usize = MAX_NAME + 1 + MAX_TAG + 1 + "sha512:".len() + 128;

const DEFAULT_REGISTRY: &str = "docker.io";
const LEGACY_DEFAULT_REGISTRY: &str = "index.docker.io";
const OFFICIAL_PREFIX: &str = "library/";
const DEFAULT_TAG: &str = "latest";

/// A reference as written, split into the parts that the text has: `nginx:1.25` has no registry. Always valid: its
/// text parses to the same parts, and its normalised form exists.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reference {
    registry: Option<String>,
    repository: String,
    tag: Option<String>,
    digest: Option<String>,
}

/// A reference with nothing left implied: it has a registry, a full repository, and a tag or a digest or both.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NormalizedReference {
    registry: String,
    repository: String,
    tag: Option<String>,
    digest: Option<String>,
}

/// Why a text is not an image reference.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReferenceError {
    /// The text is empty.
    #[error("the image reference is empty")]
    Empty,
    /// The text is 64 hexadecimal digits, which Docker reads as an image id.
    #[error("{0:?} is an image id, not a name: write a repository, with @sha256:… for a digest")]
    Id(String),
    /// The part before the first slash looks like a host but is not a valid one.
    #[error(
        "{registry:?} in image {image:?} is not a registry host: it takes letters, digits, dots and dashes, and a port after a colon"
    )]
    Registry {
        /// The image reference, abbreviated.
        image: String,
        /// The part that was read as the host.
        registry: String,
    },
    /// A registry that was given separately, and that Docker would read as a part of the repository.
    #[error(
        "registry {0:?} is not recognised as a host: it needs a dot, a port, or to be localhost; a path belongs in the repository"
    )]
    NotAHost(String),
    /// A repository that was given separately and begins with a host.
    #[error("repository {0:?} begins with a host: put it in the registry")]
    HostInRepository(String),
    /// The repository has an upper-case letter.
    #[error("repository {repository:?} in image {image:?} must be lowercase")]
    Uppercase {
        /// The image reference, abbreviated.
        image: String,
        /// The malformed repository.
        repository: String,
    },
    /// The repository breaks the grammar.
    #[error(
        "repository {repository:?} in image {image:?} is malformed: it takes lowercase letters and digits, joined by one of . _ __ - and /"
    )]
    Repository {
        /// The image reference, abbreviated.
        image: String,
        /// The malformed repository.
        repository: String,
    },
    /// Host and path together are longer than 255 bytes.
    #[error("the name in image {image:?} has {length} bytes; at most {MAX_NAME} are allowed")]
    TooLong {
        /// The image reference, abbreviated.
        image: String,
        /// Bytes of host and path after normalisation.
        length: usize,
    },
    /// The tag breaks the grammar.
    #[error(
        "tag {tag:?} in image {image:?} is malformed: it takes at most {MAX_TAG} letters, digits, _ . and -, and begins with none of . and -"
    )]
    Tag {
        /// The image reference, abbreviated.
        image: String,
        /// The malformed tag.
        tag: String,
    },
    /// The digest breaks the grammar.
    #[error(
        "digest {digest:?} in image {image:?} is malformed: write sha256: and 64 lowercase hexadecimal digits, or sha384: with 96, or sha512: with 128"
    )]
    Digest {
        /// The image reference, abbreviated.
        image: String,
        /// The malformed digest.
        digest: String,
    },
}

impl Reference {
    /// Parses a reference as Docker does. The text before the first slash is a host if it has a dot, a colon or an
    /// upper-case letter, or is `localhost`; otherwise it belongs to the repository.
    pub fn parse(text: &str) -> Result<Self, ReferenceError> {
        if text.is_empty() {
            return Err(ReferenceError::Empty);
        }
        if text.len() == 64 && text.bytes().all(is_lower_hex) {
            return Err(ReferenceError::Id(text.to_owned()));
        }
        let (registry, rest) = match text.split_once('/') {
            Some((first, rest)) if looks_like_host(first) => (Some(first), rest),
            _ => (None, text),
        };
        let (rest, digest) = match rest.split_once('@') {
            Some((rest, digest)) => (rest, Some(digest)),
            None => (rest, None),
        };
        let (repository, tag) = match rest.split_once(':') {
            Some((repository, tag)) => (repository, Some(tag)),
            None => (rest, None),
        };
        Self::from_valid_parts(text, registry, repository, tag, digest)
    }

    /// Builds a reference from separate parts. Refuses a registry that Docker would read as a part of the repository,
    /// and a repository that begins with a host.
    pub fn from_parts(
        registry: Option<&str>,
        repository: &str,
        tag: Option<&str>,
        digest: Option<&str>,
    ) -> Result<Self, ReferenceError> {
        if let Some(registry) = registry
            && (registry.contains('/') || !looks_like_host(registry))
        {
            return Err(ReferenceError::NotAHost(abbreviate(registry)));
        }
        let text = join_parts(registry, repository, tag, digest);
        if registry.is_none() && repository.split_once('/').is_some_and(|(first, _)| looks_like_host(first)) {
            return Err(ReferenceError::HostInRepository(abbreviate(repository)));
        }
        if registry.is_none() && text.len() == 64 && text.bytes().all(is_lower_hex) {
            return Err(ReferenceError::Id(text));
        }
        Self::from_valid_parts(&text, registry, repository, tag, digest)
    }

    fn from_valid_parts(
        image: &str,
        registry: Option<&str>,
        repository: &str,
        tag: Option<&str>,
        digest: Option<&str>,
    ) -> Result<Self, ReferenceError> {
        let image = || abbreviate(image);
        if let Some(registry) = registry
            && !is_host(registry)
        {
            return Err(ReferenceError::Registry { image: image(), registry: abbreviate(registry) });
        }
        if !is_repository(repository) {
            let lower = repository.to_ascii_lowercase();
            let repository = abbreviate(repository);
            return Err(if is_repository(&lower) {
                ReferenceError::Uppercase { image: image(), repository }
            } else {
                ReferenceError::Repository { image: image(), repository }
            });
        }
        if let Some(tag) = tag
            && !is_tag(tag)
        {
            return Err(ReferenceError::Tag { image: image(), tag: abbreviate(tag) });
        }
        if let Some(digest) = digest
            && !is_digest(digest)
        {
            return Err(ReferenceError::Digest { image: image(), digest: abbreviate(digest) });
        }
        let reference = Self {
            registry: registry.map(str::to_owned),
            repository: repository.to_owned(),
            tag: tag.map(str::to_owned),
            digest: digest.map(str::to_owned),
        };
        let length = reference.normalized().name().len();
        if length > MAX_NAME {
            return Err(ReferenceError::TooLong { image: image(), length });
        }
        Ok(reference)
    }

    /// Host and port of the registry, if written.
    pub fn registry(&self) -> Option<&str> {
        self.registry.as_deref()
    }

    /// The repository path as written; `library/` is not added.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// The tag, if written.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// The digest (`sha256:…`), if written.
    pub fn digest(&self) -> Option<&str> {
        self.digest.as_deref()
    }

    /// The reference with everything written out that Docker implies. A digest implies no tag.
    pub fn normalized(&self) -> NormalizedReference {
        let registry = match self.registry.as_deref() {
            None | Some(LEGACY_DEFAULT_REGISTRY) => DEFAULT_REGISTRY,
            Some(registry) => registry,
        };
        let official = registry == DEFAULT_REGISTRY && !self.repository.contains('/');
        NormalizedReference {
            registry: registry.to_owned(),
            repository: format!("{}{}", if official { OFFICIAL_PREFIX } else { "" }, self.repository),
            tag: match (&self.tag, &self.digest) {
                (None, None) => Some(DEFAULT_TAG.to_owned()),
                (tag, _) => tag.clone(),
            },
            digest: self.digest.clone(),
        }
    }

    /// The pull policy that Kubernetes gives a container that sets none: `Always` for the tag `latest` and for a
    /// reference with neither tag nor digest, otherwise `IfNotPresent`.
    pub fn default_pull_policy(&self) -> PullPolicy {
        match (self.tag.as_deref(), &self.digest) {
            (Some(DEFAULT_TAG), _) | (None, None) => PullPolicy::Always,
            _ => PullPolicy::IfNotPresent,
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&join_parts(self.registry(), &self.repository, self.tag(), self.digest()))
    }
}

/// The name by which a runtime lists what was pulled by a normalized reference: with a digest, it has no tag.
pub fn listed_name(normalized: &str) -> Cow<'_, str> {
    match normalized.split_once('@').and_then(|(name, digest)| Some((name.rsplit_once(':')?, digest))) {
        // What has a slash is no tag, but the rest after a port.
        Some(((name, tag), digest)) if !tag.contains('/') => Cow::Owned(format!("{name}@{digest}")),
        _ => Cow::Borrowed(normalized),
    }
}

impl NormalizedReference {
    /// Host and port of the registry.
    pub fn registry(&self) -> &str {
        &self.registry
    }

    /// The repository path, with `library/` where Docker Hub implies it.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// The tag. Only a reference with a digest may lack it.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// The digest, `sha256:…`.
    pub fn digest(&self) -> Option<&str> {
        self.digest.as_deref()
    }

    /// Registry and repository, joined by a slash.
    pub fn name(&self) -> String {
        format!("{}/{}", self.registry, self.repository)
    }

    /// The familiar name, as distribution calls the short form, and the tag: `nginx` and `1.25` for
    /// `docker.io/library/nginx:1.25`. If there is a digest, it is returned in place of the tag. A name that would be
    /// parsed differently without its registry, such as `docker.io/localhost/app`, keeps the registry.
    pub fn familiar_name_and_tag(&self) -> (String, String) {
        let whole = self.name();
        let short = match self.repository.strip_prefix(OFFICIAL_PREFIX) {
            _ if self.registry != DEFAULT_REGISTRY => whole.as_str(),
            Some(official) if !official.contains('/') => official,
            _ => &self.repository,
        };
        let same = Reference::parse(short).is_ok_and(|read| read.normalized().name() == whole);
        let name = if same { short.to_owned() } else { whole };
        let tag = self.digest.as_ref().or(self.tag.as_ref());
        (name, tag.map_or(DEFAULT_TAG, String::as_str).to_owned())
    }
}

impl fmt::Display for NormalizedReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&join_parts(Some(&self.registry), &self.repository, self.tag(), self.digest()))
    }
}

/// Joins parts into the text of a reference, without checking that it is one.
pub(crate) fn join_parts(
    registry: Option<&str>,
    repository: &str,
    tag: Option<&str>,
    digest: Option<&str>,
) -> String {
    let mut text = String::new();
    for (before, part, after) in
        [("", registry, "/"), ("", Some(repository), ""), (":", tag, ""), ("@", digest, "")]
    {
        if let Some(part) = part {
            text.push_str(before);
            text.push_str(part);
            text.push_str(after);
        }
    }
    text
}
