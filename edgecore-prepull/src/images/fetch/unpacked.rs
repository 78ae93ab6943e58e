//! Layers that are unpacked already: where containerd discards what it has unpacked, it asks for none of them again.

use prepull_registry::digest::sha256;
use serde::Deserialize;

/// The names by which snapshotters know the layers of an image, the lowest one first. Each names the layers below it,
/// too. Empty if the configuration of the image does not tell them.
pub(super) fn chain_ids(config: &[u8]) -> Vec<String> {
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
    let chain = |diff: String| {
        let id = match &below {
            None => diff,
            Some(below) => sha256(format!("{below} {diff}").as_bytes()),
        };
        below = Some(id.clone());
        id
    };
    rootfs.diff_ids.into_iter().map(chain).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_names_its_layer_and_all_below() {
        let ids =
            chain_ids(br#"{"os":"linux","rootfs":{"type":"layers","diff_ids":["sha256:a","sha256:b"]}}"#);
        assert_eq!(ids, ["sha256:a".to_owned(), sha256(b"sha256:a sha256:b")]);
        assert!(chain_ids(b"{}").is_empty() && chain_ids(b"no json").is_empty());
    }
}
