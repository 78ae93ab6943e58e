//! Image references: as somebody wrote them, and normalised.
//!
//! The grammar and the normalisation are distribution's (`github.com/distribution/reference`), which Docker,
//! containerd and the kubelet share. Overriders work on the written form, everything else on the normalised
//! one.

use std::fmt;

use crate::task::PullPolicy;

mod grammar;
#[cfg(test)]
pub(crate) mod tests;

pub use grammar::{is_digest, is_tag};
use grammar::{is_host, is_lower_hex, is_repository, looks_like_host};

/// Host and path of a name together, in bytes. distribution once counted both and now counts the path alone;
/// runtimes of either age are in the field, so the stricter rule stands.
pub const MAX_NAME: usize = 255;
/// Bytes of a tag, by distribution's grammar.
pub const MAX_TAG: usize = 128;

const DEFAULT_REGISTRY: &str = "docker.io";
const LEGACY_DEFAULT_REGISTRY: &str = "index.docker.io";
const OFFICIAL_PREFIX: &str = "library/";
const DEFAULT_TAG: &str = "latest";

/// A reference in the parts that its text has: `nginx:1.25` has no registry. Always valid: its text parses to
/// the same parts, and its normalised form exists.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reference {
    registry: Option<String>,
    repository: String,
    tag: Option<String>,
    digest: Option<String>,
}

/// A reference with nothing implied: registry and full repository, and at least one of tag and digest.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NormalizedReference {
    registry: String,
    repository: String,
    tag: Option<String>,
    digest: Option<String>,
}

/// Why a text is no image reference.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReferenceError {
    /// Nothing there.
    #[error("the image reference is empty")]
    Empty,
    /// 64 hexadecimal digits: Docker reads them as an image id.
    #[error("{0:?} is an image id, not a name: write a repository, with @sha256:… for a digest")]
    Id(String),
    /// The part before the first slash is taken for a host, and is none.
    #[error(
        "{registry:?} in image {image:?} is not a registry host: it takes letters, digits, dots and dashes, and a port after a colon"
    )]
    Registry {
        /// The whole text.
        image: String,
        /// What was taken for the host.
        registry: String,
    },
    /// A registry given by itself that Docker would read as a part of the repository.
    #[error(
        "registry {0:?} is not recognised as a host: it needs a dot, a port, or to be localhost; a path belongs in the repository"
    )]
    NotAHost(String),
    /// A repository given by itself that begins with a host.
    #[error("repository {0:?} begins with a host: put it in the registry")]
    HostInRepository(String),
    /// The repository has an upper-case letter.
    #[error("repository {repository:?} in image {image:?} must be lowercase")]
    Uppercase {
        /// The whole text.
        image: String,
        /// The part.
        repository: String,
    },
    /// The repository breaks the grammar.
    #[error(
        "repository {repository:?} in image {image:?} is malformed: it takes lowercase letters and digits, joined by one of . _ __ - and /"
    )]
    Repository {
        /// The whole text.
        image: String,
        /// The part.
        repository: String,
    },
    /// The name is longer than [`MAX_NAME`].
    #[error("the name in image {image:?} has {length} bytes; at most {MAX_NAME} are allowed")]
    TooLong {
        /// The whole text, cut.
        image: String,
        /// Of host and path, after normalisation.
        length: usize,
    },
    /// The tag breaks the grammar.
    #[error(
        "tag {tag:?} in image {image:?} is malformed: it takes at most {MAX_TAG} letters, digits, _ . and -, and begins with none of . and -"
    )]
    Tag {
        /// The whole text.
        image: String,
        /// The part.
        tag: String,
    },
    /// The digest breaks the grammar.
    #[error(
        "digest {digest:?} in image {image:?} is malformed: write sha256: and 64 lowercase hexadecimal digits, or sha384: with 96, or sha512: with 128"
    )]
    Digest {
        /// The whole text.
        image: String,
        /// The part.
        digest: String,
    },
}

impl Reference {
    /// Reads a reference as Docker does. What stands before the first slash is a host if it has a dot, a colon
    /// or an upper-case letter, or is `localhost`; everything else is repository.
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
        Self::checked(text, registry, repository, tag, digest)
    }

    /// Builds a reference of parts that are given one by one. Each must be what it is called: a registry that
    /// Docker would take for a part of the repository is refused, and so is a repository with a host in it.
    pub fn from_parts(
        registry: Option<&str>,
        repository: &str,
        tag: Option<&str>,
        digest: Option<&str>,
    ) -> Result<Self, ReferenceError> {
        if let Some(registry) = registry
            && (registry.contains('/') || !looks_like_host(registry))
        {
            return Err(ReferenceError::NotAHost(shown(registry)));
        }
        let text = joined(registry, repository, tag, digest);
        if registry.is_none() && repository.split_once('/').is_some_and(|(first, _)| looks_like_host(first)) {
            return Err(ReferenceError::HostInRepository(shown(repository)));
        }
        if registry.is_none() && text.len() == 64 && text.bytes().all(is_lower_hex) {
            return Err(ReferenceError::Id(text));
        }
        Self::checked(&text, registry, repository, tag, digest)
    }

    fn checked(
        image: &str,
        registry: Option<&str>,
        repository: &str,
        tag: Option<&str>,
        digest: Option<&str>,
    ) -> Result<Self, ReferenceError> {
        let image = || shown(image);
        if let Some(registry) = registry
            && !is_host(registry)
        {
            return Err(ReferenceError::Registry { image: image(), registry: shown(registry) });
        }
        if !is_repository(repository) {
            let lower = repository.to_ascii_lowercase();
            let repository = shown(repository);
            return Err(if is_repository(&lower) {
                ReferenceError::Uppercase { image: image(), repository }
            } else {
                ReferenceError::Repository { image: image(), repository }
            });
        }
        if let Some(tag) = tag
            && !is_tag(tag)
        {
            return Err(ReferenceError::Tag { image: image(), tag: shown(tag) });
        }
        if let Some(digest) = digest
            && !is_digest(digest)
        {
            return Err(ReferenceError::Digest { image: image(), digest: shown(digest) });
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

    /// Host and port, where they are written.
    pub fn registry(&self) -> Option<&str> {
        self.registry.as_deref()
    }

    /// The path as it is written, without `library/` unless it is there.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// The tag, where it is written.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// `sha256:…`, where it is written.
    pub fn digest(&self) -> Option<&str> {
        self.digest.as_deref()
    }

    /// The reference with everything implied written out. With a digest, no tag is implied.
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

    /// The policy that Kubernetes gives a container with this image and no policy: Always for the tag latest,
    /// and for no tag and no digest; else IfNotPresent.
    pub fn default_policy(&self) -> PullPolicy {
        match (self.tag.as_deref(), &self.digest) {
            (Some(DEFAULT_TAG), _) | (None, None) => PullPolicy::Always,
            _ => PullPolicy::IfNotPresent,
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&joined(self.registry(), &self.repository, self.tag(), self.digest()))
    }
}

impl std::str::FromStr for Reference {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text)
    }
}

impl NormalizedReference {
    /// Host and port.
    pub fn registry(&self) -> &str {
        &self.registry
    }

    /// The path, with `library/` where Docker Hub implies it.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// Absent only beside a digest.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// `sha256:…`.
    pub fn digest(&self) -> Option<&str> {
        self.digest.as_deref()
    }

    /// Registry and repository, the text that registry secrets are matched against.
    pub fn name(&self) -> String {
        format!("{}/{}", self.registry, self.repository)
    }

    /// The name as people write it, and the tag: `nginx` and `1.25` for `docker.io/library/nginx:1.25`. With a digest
    /// this is the tag, and the tag beside it is dropped. A name that would be read as another one without its
    /// registry, such as `docker.io/localhost/app`, keeps it.
    pub fn familiar(&self) -> (String, String) {
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
        f.write_str(&joined(Some(&self.registry), &self.repository, self.tag(), self.digest()))
    }
}

/// The text of the parts, whether or not it is a reference.
pub(crate) fn joined(
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

/// A text as an error shows it: all of a plausible reference, the beginning of a hostile one.
pub(crate) fn shown(text: &str) -> String {
    const LONGEST: usize = 300;
    match text.char_indices().nth(LONGEST) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}
