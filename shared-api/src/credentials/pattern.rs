//! Patterns of registries, with the kubelet's rule for matching images (`pkg/credentialprovider/keyring.go`).

use std::fmt;

use crate::abbreviate::abbreviate;
use crate::image::NormalizedReference;

/// A pattern `host[:port][/path]`, where `*` stands for any text within one label of the host.
///
/// - The number of labels and the port must be equal: `r.io` does not match `r.io:5000/app`.
/// - The path is a plain text prefix of the repository: `r.io/team` matches `r.io/team-b/app` as well.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RegistryPattern {
    labels: Vec<String>,
    port: Option<String>,
    /// Prefix of the repository, without the leading slash.
    path: String,
}

/// Rank of a pattern among those that match the same image; the greatest is the most specific. A longer path
/// outranks everything; then comes a host without `*`; then the host with more literal characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Specificity {
    path: usize,
    exact_host: bool,
    letters: usize,
}

/// A text that is not a registry pattern.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a registry: write host, host:port or host/path, with * for any text in one label of the host"
)]
pub struct PatternError(String);

impl RegistryPattern {
    /// Parses a pattern. Drops `http://` and `https://`, and an API version after the host (`/v1/`, `/v2/`), with
    /// which Docker's configuration writes the keys of registries.
    pub fn parse(text: &str) -> Result<Self, PatternError> {
        let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://")).unwrap_or(text);
        let (host, path) = match rest.find('/') {
            Some(slash) => rest.split_at(slash),
            None => (rest, ""),
        };
        let path = path.strip_prefix("/v1/").or_else(|| path.strip_prefix("/v2/")).unwrap_or(path);
        Self::from_parts(text, host, path)
    }

    /// Parses an entry of `matchImages` in the kubelet's `CredentialProviderConfig`: the same rule without the
    /// concessions to Docker, so that `r.io/v2/` matches the repositories below `v2`. A scheme is refused: with one, the
    /// kubelet would match no image.
    pub fn parse_match_image(text: &str) -> Result<Self, PatternError> {
        let (host, path) = text.find('/').map_or((text, ""), |slash| text.split_at(slash));
        Self::from_parts(text, host, path)
    }

    fn from_parts(text: &str, host: &str, path: &str) -> Result<Self, PatternError> {
        let error = || PatternError(abbreviate(text));
        let (host, port) = match host.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
            _ => (host, None),
        };
        let is_label = |label: &str| {
            !label.is_empty()
                && label.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'*'))
        };
        let is_address = host
            .strip_prefix('[')
            .and_then(|h| h.strip_suffix(']'))
            .is_some_and(|h| !h.is_empty() && h.bytes().all(|b| b.is_ascii_hexdigit() || b == b':'));
        if !is_address && !host.split('.').all(is_label) {
            return Err(error());
        }
        if port.is_some_and(|port| port.is_empty() || !port.bytes().all(|b| b.is_ascii_digit())) {
            return Err(error());
        }
        if path.contains(|c: char| c.is_whitespace() || c.is_control() || matches!(c, '?' | '#')) {
            return Err(error());
        }
        Ok(Self {
            labels: host.split('.').map(str::to_owned).collect(),
            port: port.map(str::to_owned),
            path: path.trim_start_matches('/').to_owned(),
        })
    }

    /// Whether the pattern matches an image.
    pub fn matches(&self, reference: &NormalizedReference) -> bool {
        self.matches_parts(reference.registry(), reference.repository())
    }

    fn matches_parts(&self, registry: &str, repository: &str) -> bool {
        let (host, port) = match registry.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
            _ => (registry, None),
        };
        let mut labels = host.split('.');
        port == self.port.as_deref()
            && repository.starts_with(&self.path)
            && self.labels.iter().all(|glob| labels.next().is_some_and(|label| glob_matches(glob, label)))
            && labels.next().is_none()
    }

    /// Selects the entries that match an image, the most specific first; of equally specific ones, the
    /// earlier first. Docker Hub's legacy key, `https://index.docker.io/v1/`, stands for docker.io where no other
    /// pattern matches, as in the kubelet.
    ///
    /// Every place that has patterns chooses by this function, so that a key means the same within a secret and in
    /// `registrySecrets`.
    pub fn select<'a, T>(
        entries: &'a [T],
        pattern: impl Fn(&T) -> &Self,
        reference: &NormalizedReference,
    ) -> Vec<&'a T> {
        let mut selected: Vec<&T> =
            entries.iter().filter(|entry| pattern(entry).matches(reference)).collect();
        if selected.is_empty() && reference.registry() == "docker.io" {
            selected = entries.iter().filter(|entry| pattern(entry).is_legacy_docker_hub()).collect();
        }
        selected.sort_by_key(|entry| std::cmp::Reverse(pattern(entry).specificity()));
        selected
    }

    /// Whether the host of the pattern is not one host, but any of several.
    pub fn has_wildcard(&self) -> bool {
        self.labels.iter().any(|label| label.contains('*'))
    }

    /// Rank of this pattern among those that match the same image.
    pub(super) fn specificity(&self) -> Specificity {
        let letters = |label: &String| label.bytes().filter(|b| *b != b'*').count();
        Specificity {
            path: self.path.len(),
            exact_host: !self.has_wildcard(),
            letters: self.labels.iter().map(letters).sum(),
        }
    }

    /// Whether this is Docker Hub's legacy key, `https://index.docker.io/v1/`, which stands for docker.io.
    fn is_legacy_docker_hub(&self) -> bool {
        self.labels == ["index", "docker", "io"] && self.port.is_none() && self.path.is_empty()
    }
}

impl fmt::Display for RegistryPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.labels.join("."))?;
        if let Some(port) = &self.port {
            write!(f, ":{port}")?;
        }
        if self.path.is_empty() { Ok(()) } else { write!(f, "/{}", self.path) }
    }
}

/// Matches one label of a host, or a name; `*` stands for any text, also the empty one. Takes time linear in the label for each
/// star, without backtracking.
pub(super) fn glob_matches(glob: &str, label: &str) -> bool {
    let mut parts = glob.split('*');
    let Some(mut rest) = parts.next().and_then(|first| label.strip_prefix(first)) else { return false };
    let mut parts = parts.peekable();
    if parts.peek().is_none() {
        return rest.is_empty();
    }
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rest.ends_with(part);
        }
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    true
}
