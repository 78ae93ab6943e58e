//! The part of a job that removes images.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use crate::task::RemovalResult;
use crate::text::human_bytes;

/// Removes images in place of pulling some. An image stays while a container uses it, and where a job or the container
/// runtime pins it.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RemoveSpec {
    /// Images by reference, such as registry.example/team/app:v1, as the nodes have them. An image that has other names on
    /// a node stays there, unless these are named as well. At most 256.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    pub images: Vec<String>,
    /// Repositories, such as registry.example/team/app. Their images are removed, under any tag, if olderThan and
    /// keepLast let them: at least one of both must be set. At most 256.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    pub repositories: Vec<String>,
    /// Of the repositories, only images that the node has had for longer than this, such as 720h. The time counts from
    /// when the container runtime got the image; a pull of what is there already doesn't renew it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = r"^([0-9]+(h|m|s))+$"))]
    pub older_than: Option<String>,
    /// How many images of each repository stay on each node, those that it got last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1000))]
    pub keep_last: Option<i64>,
    /// Whether nothing is removed: the status then has what would be.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
}

/// What a job has removed from all of its nodes; in a dry run, what it would remove.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RemovalStatus {
    /// Images that were removed, counted on each node.
    #[serde(default)]
    pub removed: u32,
    /// Images that stay, or weren't there, counted on each node.
    #[serde(default)]
    pub kept: u32,
    /// Bytes that were freed on all nodes.
    #[serde(default)]
    pub freed_bytes: u64,
    /// Nodes from which an image was removed.
    #[serde(default)]
    pub nodes: u32,
}

impl RemovalStatus {
    /// The sum as one sentence. `dry_run`: nothing was removed.
    pub fn sentence(&self, dry_run: bool) -> String {
        let Self { removed, kept, freed_bytes, nodes } = self;
        let counted = |number: u32, noun: &str| match number {
            1 => format!("1 {noun}"),
            number => format!("{number} {noun}s"),
        };
        let (images, on, freed) =
            (counted(*removed, "image"), counted(*nodes, "node"), human_bytes(*freed_bytes));
        let kept = if *kept == 0 { String::new() } else { format!("; {kept} kept") };
        match (removed, dry_run) {
            (0, true) => format!("nothing would be removed{kept}"),
            (0, false) => format!("nothing was removed{kept}"),
            (_, true) => format!("removing {images} would free {freed} on {on}{kept}"),
            (_, false) => format!("removed {images}, which freed {freed} on {on}{kept}"),
        }
    }

    /// Adds what became of the images of a node.
    pub fn add_node(&mut self, node: &RemovalResult) {
        let removed = node.all_removed();
        self.removed = self.removed.saturating_add(removed);
        self.kept = self.kept.saturating_add(node.kept);
        // An API server keeps integers of 64 bits with a sign.
        let freed = self.freed_bytes.saturating_add(node.all_freed_bytes());
        self.freed_bytes = freed.min(i64::MAX.unsigned_abs());
        self.nodes = self.nodes.saturating_add(u32::from(removed > 0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_is_a_sentence() {
        let mut sum = RemovalStatus::default();
        assert_eq!(sum.sentence(true), "nothing would be removed");
        let node = |removed, kept, freed_bytes| RemovalResult {
            removed,
            kept,
            freed_bytes,
            ..RemovalResult::default()
        };
        for node in [node(1, 0, 6 << 20), node(1, 2, 0), node(0, 1, 0)] {
            sum.add_node(&node);
        }
        assert_eq!(sum.sentence(true), "removing 2 images would free 6.0 MiB on 2 nodes; 3 kept");
        assert_eq!(sum.sentence(false), "removed 2 images, which freed 6.0 MiB on 2 nodes; 3 kept");
        sum.add_node(&node(1, 0, 1).before_next_attempt());
        assert_eq!((sum.removed, sum.freed_bytes, sum.nodes), (3, (6 << 20) + 1, 3));
    }
}
