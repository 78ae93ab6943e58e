//! The uncompressed digests of layers, from the configuration of their image, and the names of their snapshots.

use prepull_registry::digest::sha256;
use serde::Deserialize;

/// A layer after unpacking.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Diff {
    /// Digest of the uncompressed layer.
    pub(super) diff_id: String,
    /// Name of its snapshot, derived from the digests of the layer and of all layers below it.
    pub(super) chain_id: String,
}

/// The unpacked layers of an image, the lowest one first. Empty if the configuration doesn't list them.
pub(super) fn parse_diffs(config: &[u8]) -> Vec<Diff> {
    #[derive(Deserialize)]
    struct Config {
        rootfs: RootFs,
    }
    #[derive(Deserialize)]
    struct RootFs {
        #[serde(default)]
        diff_ids: Vec<String>,
    }
    let Ok(Config { rootfs }) = serde_json::from_slice(config) else { return Vec::new() };
    let mut below: Option<String> = None;
    let chain = |diff_id: String| {
        let chain_id = match &below {
            None => diff_id.clone(),
            Some(below) => sha256(format!("{below} {diff_id}").as_bytes()),
        };
        below = Some(chain_id.clone());
        Diff { diff_id, chain_id }
    };
    rootfs.diff_ids.into_iter().map(chain).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn to_diff((diff_id, chain_id): (&str, &str)) -> Diff {
        Diff { diff_id: diff_id.to_owned(), chain_id: chain_id.to_owned() }
    }

    #[test]
    fn a_chain_includes_all_layers_below() {
        let diffs = super::parse_diffs(
            br#"{"os":"linux","rootfs":{"type":"layers","diff_ids":["sha256:a","sha256:b"]}}"#,
        );
        let both = sha256(b"sha256:a sha256:b");
        assert_eq!(diffs, [("sha256:a", "sha256:a"), ("sha256:b", &*both)].map(to_diff));
        assert!(super::parse_diffs(b"{}").is_empty() && super::parse_diffs(b"no json").is_empty());
    }
}
