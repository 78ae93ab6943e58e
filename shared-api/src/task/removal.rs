//! The removal of images from a node: what a task asks for, and what became of it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::optional_millis;

/// Most images in a [`RemovalResult`]. Of more, it has the counts: with names of [`crate::wire::MAX_NOTE`] bytes and reasons
/// of [`crate::wire::MAX_REASON`] bytes, all of them fit into a tenth of a message.
pub const MAX_REMOVALS: usize = 50;
/// How long an agent whose task ends waits for the image that its runtime is removing. A request to the runtime has 30 s, and
/// as long again is for the look at what is left.
pub const LAST_REMOVAL: Duration = Duration::from_secs(60);

/// What a task removes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Removal {
    /// Normalised references. At most [`crate::wire::MAX_IMAGES`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<String>,
    /// Normalised names of repositories, host included, without tags. At most [`crate::wire::MAX_IMAGES`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repositories: Vec<String>,
    /// Of the repositories, only images that the node has had for longer than this. Absent: of any age.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "optional_millis")]
    pub older_than: Option<Duration>,
    /// How many of the newest images of each repository stay.
    #[serde(default)]
    pub keep_last: u32,
    /// Whether nothing is removed, and the result has what would be.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
}

/// What became of the images that a task was to remove from a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct RemovalResult {
    /// Images that were removed; in a dry run, those that would be.
    #[serde(default)]
    pub removed: u32,
    /// Images that stay, or weren't there.
    #[serde(default)]
    pub kept: u32,
    /// Bytes on the node's disks that the removal has freed; in a dry run, that it would free. Layers that other images
    /// have stay.
    #[serde(default)]
    pub freed_bytes: u64,
    /// Images that earlier attempts had removed. Known to the cloud alone.
    #[serde(default, skip_serializing_if = "is_zero_u32")]
    pub removed_before: u32,
    /// Bytes that earlier attempts had freed. Known to the cloud alone.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub freed_before: u64,
    /// At most 50 of the images, those that were removed or couldn't be first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<ImageRemoval>,
}

/// What became of one image that a task was to remove.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ImageRemoval {
    /// The image, by the reference in the job or a name on the node.
    pub image: String,
    /// Removed, Kept or Failed; Removable in a dry run.
    pub outcome: RemovalOutcome,
    /// Why the image was kept, in one word.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<KeepCode>,
    /// More about that, or why the image couldn't be removed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Bytes that its removal has freed, or would free after those before it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_zero(value: &u64) -> bool {
    *value == 0
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_zero_u32(value: &u32) -> bool {
    *value == 0
}

/// How the removal of an image ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
pub enum RemovalOutcome {
    /// It's gone.
    Removed,
    /// It would be removed, and this is a dry run.
    Removable,
    /// It stays, or wasn't there.
    #[default]
    Kept,
    /// It couldn't be removed.
    // Also what only a newer version knows: we can't tell that the image is gone.
    #[serde(other)]
    Failed,
}

impl RemovalOutcome {
    /// Whether the image is gone, or would be.
    pub fn is_removed(self) -> bool {
        matches!(self, Self::Removed | Self::Removable)
    }
}

/// Why an image stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
pub enum KeepCode {
    /// The node doesn't have it.
    NotPresent,
    /// A container uses it, perhaps one that has ended.
    InUse,
    /// A job of this API pins it (spec.pin).
    PinnedByJob,
    /// The container runtime pins it, as it does the sandbox of pods, or another program does.
    PinnedByRuntime,
    /// Another task of the node pulls it, or is about to.
    Wanted,
    /// The image has a name that the job doesn't remove.
    OtherName,
    /// It isn't older than olderThan.
    TooYoung,
    /// The container runtime doesn't say how long the node has had it.
    AgeUnknown,
    /// It's one of the newest ones, which keepLast spares.
    KeepLast,
    /// The task was stopped before.
    Stopped,
    /// A reason that only a newer version knows.
    #[serde(other)]
    Other,
}

impl KeepCode {
    /// The code as the API spells it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotPresent => "NotPresent",
            Self::InUse => "InUse",
            Self::PinnedByJob => "PinnedByJob",
            Self::PinnedByRuntime => "PinnedByRuntime",
            Self::Wanted => "Wanted",
            Self::OtherName => "OtherName",
            Self::TooYoung => "TooYoung",
            Self::AgeUnknown => "AgeUnknown",
            Self::KeepLast => "KeepLast",
            Self::Stopped => "Stopped",
            Self::Other => "Other",
        }
    }
}

impl RemovalResult {
    /// Counts the images and sums up what they free, and lists the first [`MAX_REMOVALS`], kept ones last.
    pub fn from_images(mut images: Vec<ImageRemoval>) -> Self {
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let removed = images.iter().filter(|image| image.outcome.is_removed()).count();
        let kept = images.iter().filter(|image| image.outcome == RemovalOutcome::Kept).count();
        let freed_bytes = images.iter().fold(0_u64, |sum, image| sum.saturating_add(image.bytes));
        images.sort_by_key(|image| match image.outcome {
            RemovalOutcome::Failed => 0,
            RemovalOutcome::Removed | RemovalOutcome::Removable => 1,
            RemovalOutcome::Kept => 2,
        });
        images.truncate(MAX_REMOVALS);
        Self { removed: count(removed), kept: count(kept), freed_bytes, images, ..Self::default() }
    }

    /// Prepares for another attempt, which won't find what this one and those before it have removed.
    #[must_use]
    pub fn before_next_attempt(&self) -> Self {
        Self { removed_before: self.all_removed(), freed_before: self.all_freed_bytes(), ..Self::default() }
    }

    /// Images that were removed over all attempts.
    pub fn all_removed(&self) -> u32 {
        self.removed_before.saturating_add(self.removed)
    }

    /// Bytes that were freed over all attempts, capped at `i64::MAX`, the largest number that an API server keeps.
    pub fn all_freed_bytes(&self) -> u64 {
        self.freed_before.saturating_add(self.freed_bytes).min(i64::MAX.unsigned_abs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(outcome: RemovalOutcome, bytes: u64) -> ImageRemoval {
        ImageRemoval { image: "app:1".to_owned(), outcome, bytes, ..ImageRemoval::default() }
    }

    #[test]
    fn a_long_result_lists_kept_images_last() {
        let kept = std::iter::repeat_n(image(RemovalOutcome::Kept, 0), 2 * MAX_REMOVALS);
        let gone = [image(RemovalOutcome::Removed, 5), image(RemovalOutcome::Failed, 0)];
        let result = RemovalResult::from_images(kept.chain(gone).collect());
        assert_eq!((result.removed, result.kept, result.freed_bytes), (1, 100, 5));
        assert_eq!(result.images.len(), MAX_REMOVALS);
        let first = result.images.iter().take(3).map(|image| image.outcome);
        assert_eq!(
            first.collect::<Vec<_>>(),
            [RemovalOutcome::Failed, RemovalOutcome::Removed, RemovalOutcome::Kept]
        );
    }

    #[test]
    fn an_unknown_end_is_no_removal() {
        let read = |text: &str| serde_json::from_str::<RemovalOutcome>(text).unwrap_or_default();
        assert_eq!(read("\"Removed\""), RemovalOutcome::Removed);
        assert_eq!(read("\"Newer\""), RemovalOutcome::Failed);
    }

    #[test]
    fn attempts_free_no_more_than_an_api_server_keeps() {
        let most = i64::MAX.unsigned_abs();
        let mut result = RemovalResult { freed_bytes: most, ..RemovalResult::default() };
        for _ in 0..2 {
            result = RemovalResult { freed_bytes: most, ..result.before_next_attempt() };
        }
        assert_eq!((result.freed_before, result.all_freed_bytes()), (most, most));
    }
}
