//! The source of content, in containerd's labels.

/// Label with the repositories of a host that have a blob; the host follows.
const SOURCE_LABEL: &str = "containerd.io/distribution.source";

/// A normalised reference, split as containerd's labels name repositories.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SourceRepository {
    pub(crate) host: String,
    pub(crate) path: String,
    pub(crate) digest: Option<String>,
}

impl SourceRepository {
    pub(crate) fn of_reference(reference: &str) -> Self {
        let (name, digest) = match reference.split_once('@') {
            Some((name, digest)) => (name, Some(digest.to_owned())),
            None => (reference, None),
        };
        let (host, path) = name.split_once('/').unwrap_or(("", name));
        let path = path.split_once(':').map_or(path, |(path, _tag)| path);
        // containerd cuts the host at the first colon, so its labels lack the port.
        let host = host.split_once(':').map_or(host, |(host, _port)| host);
        Self { host: host.to_owned(), path: path.to_owned(), digest }
    }

    /// The label for content from this repository.
    pub(crate) fn label(&self) -> (String, String) {
        (format!("{SOURCE_LABEL}.{}", self.host), self.path.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_split_like_containerds_labels() {
        for (reference, host, path, digest) in [
            ("docker.io/library/nginx:1.25", "docker.io", "library/nginx", None),
            ("127.0.0.1:5000/a/b", "127.0.0.1", "a/b", None),
            ("r.io:5000/a:1@sha256:00", "r.io", "a", Some("sha256:00")),
        ] {
            let expected = SourceRepository {
                host: host.to_owned(),
                path: path.to_owned(),
                digest: digest.map(str::to_owned),
            };
            assert_eq!(SourceRepository::of_reference(reference), expected);
        }
    }
}
