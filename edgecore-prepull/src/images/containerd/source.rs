//! The source of content, in containerd's labels.

use std::collections::HashMap;

/// Names and values of labels.
pub(crate) type Labels = HashMap<String, String>;

/// Label with the repositories of a host that have a blob; the host follows.
const SOURCE_LABEL: &str = "containerd.io/distribution.source";
/// Label of a blob that the agent has fetched, with the repository that its bytes came from.
///
/// containerd's own label can't tell: its pulls add a repository to each blob that a manifest lists, also to those that are
/// there already and that the registry was never asked for. A registry may list any digest that it has heard of.
const FETCHED_LABEL: &str = "prepull.kubeedge.io/fetched-from";

/// A normalised reference, split as containerd's labels name repositories.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SourceRepository {
    pub(crate) host: String,
    pub(crate) path: String,
    pub(crate) digest: Option<String>,
    /// Host with port, and path.
    pub(crate) name: String,
}

impl SourceRepository {
    pub(crate) fn of_reference(reference: &str) -> Self {
        let (name, digest) = match reference.split_once('@') {
            Some((name, digest)) => (name, Some(digest.to_owned())),
            None => (reference, None),
        };
        let (host, path) = name.split_once('/').unwrap_or(("", name));
        let path = path.split_once(':').map_or(path, |(path, _tag)| path);
        let name = if host.is_empty() { path.to_owned() } else { format!("{host}/{path}") };
        // containerd cuts the host at the first colon, so its labels lack the port.
        let host = host.split_once(':').map_or(host, |(host, _port)| host);
        Self { host: host.to_owned(), path: path.to_owned(), digest, name }
    }

    /// The label for content from this repository.
    pub(crate) fn label(&self) -> (String, String) {
        (format!("{SOURCE_LABEL}.{}", self.host), self.path.clone())
    }

    /// The label for a blob with all of its bytes from this repository.
    pub(crate) fn fetched_label(&self) -> Labels {
        Labels::from([(FETCHED_LABEL.to_owned(), self.name.clone())])
    }
}

/// The repository that the agent has fetched a blob from, by the blob's labels. `None`: the runtime has fetched it.
pub(super) fn fetched_from(mut labels: Labels) -> Option<String> {
    labels.remove(FETCHED_LABEL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_split_like_containerds_labels() {
        for (reference, host, path, digest, name) in [
            ("docker.io/library/nginx:1.25", "docker.io", "library/nginx", None, "docker.io/library/nginx"),
            ("127.0.0.1:5000/a/b", "127.0.0.1", "a/b", None, "127.0.0.1:5000/a/b"),
            ("r.io:5000/a:1@sha256:00", "r.io", "a", Some("sha256:00"), "r.io:5000/a"),
        ] {
            let expected = SourceRepository {
                host: host.to_owned(),
                path: path.to_owned(),
                digest: digest.map(str::to_owned),
                name: name.to_owned(),
            };
            assert_eq!(SourceRepository::of_reference(reference), expected);
        }
    }

    #[test]
    fn the_runtimes_label_proves_no_source() {
        let [bank, evil] = ["r.io:8443/bank:1", "evil.io/x:1"].map(SourceRepository::of_reference);
        let labels = |sources: &[&SourceRepository], more: Labels| -> Labels {
            sources.iter().map(|source| source.label()).chain(more).collect()
        };
        // What containerd makes of a pull of either image, whichever brought the blob.
        assert_eq!(fetched_from(labels(&[&bank, &evil], Labels::new())), None);
        let fetched = fetched_from(labels(&[&bank, &evil], bank.fetched_label()));
        assert_eq!(fetched.as_deref(), Some("r.io:8443/bank"));
        assert_ne!(SourceRepository::of_reference("r.io/bank:1").name, bank.name, "another port");
    }
}
