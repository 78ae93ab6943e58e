//! Settings of nodes that come from the cloud: the wire form of an `ImagePrePullSettings`.

use std::num::NonZeroU64;
use std::ops::RangeInclusive;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::download::Window;
use crate::task::optional_millis;

/// How long an agent may keep what unfinished pulls have fetched. A retry comes after seconds to minutes, and after 30 days
/// the runtime removes the content itself.
pub const KEEP_UNFINISHED: RangeInclusive<Duration> =
    Duration::from_secs(60)..=Duration::from_secs(14 * 24 * 3600);

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
    /// How long to keep what unfinished pulls have fetched, once no task wants it. Within [`KEEP_UNFINISHED`].
    #[serde(default, skip_serializing_if = "Option::is_none", with = "optional_millis")]
    pub keep_unfinished: Option<Duration>,
}

impl NodeSettings {
    /// Whether nothing is set.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether `more` has all that this sets: an agent that doesn't know the rest confirms this.
    pub fn is_part_of(&self, more: &Self) -> bool {
        let mut all = more.clone();
        all.override_with(self);
        all == *more
    }

    /// Takes over what `later` sets.
    pub fn override_with(&mut self, later: &Self) {
        let Self {
            max_download_rate,
            peer_max_upload_rate,
            windows,
            image_gc_high_threshold,
            make_room,
            keep_unfinished,
        } = later;
        self.max_download_rate = max_download_rate.or(self.max_download_rate);
        self.peer_max_upload_rate = peer_max_upload_rate.or(self.peer_max_upload_rate);
        if !windows.is_empty() {
            self.windows.clone_from(windows);
        }
        self.image_gc_high_threshold = image_gc_high_threshold.or(self.image_gc_high_threshold);
        self.make_room = make_room.or(self.make_room);
        self.keep_unfinished = keep_unfinished.or(self.keep_unfinished);
    }
}
