//! Settings of nodes that come from the cloud: the wire form of an `ImagePrePullSettings`.

use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};

use crate::download::Window;

/// The settings that the cloud has for a node. The node's own ones are the upper bound: of each, the stricter is in force.
/// Absent fields set nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeSettings {
    /// Bytes a second that all pulls of the node together may download.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_download_rate: Option<NonZeroU64>,
    /// Bytes a second that all neighbours together may read from the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_max_upload_rate: Option<NonZeroU64>,
    /// When the node may download, for any task. Empty: always. At most [`crate::download::MAX_WINDOWS`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub windows: Vec<Window>,
    /// How full the image file system may become by a pull, in percent, from 1 to 100.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_gc_high_threshold: Option<u8>,
    /// Whether images that nothing needs are removed where one to be pulled doesn't fit otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub make_room: Option<bool>,
}

impl NodeSettings {
    /// Whether nothing is set.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Takes over what `later` sets.
    pub fn override_with(&mut self, later: &Self) {
        let Self { max_download_rate, peer_max_upload_rate, windows, image_gc_high_threshold, make_room } =
            later;
        self.max_download_rate = max_download_rate.or(self.max_download_rate);
        self.peer_max_upload_rate = peer_max_upload_rate.or(self.peer_max_upload_rate);
        if !windows.is_empty() {
            self.windows.clone_from(windows);
        }
        self.image_gc_high_threshold = image_gc_high_threshold.or(self.image_gc_high_threshold);
        self.make_room = make_room.or(self.make_room);
    }
}
