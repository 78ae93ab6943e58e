//! Deltas between images: most of an update is bytes that a node already has.
//!
//! ```text
//!  referrers ─▶ Offer ─▶ DeltaManifest ─▶ a diff ┐
//!                       files of the old image ──┴▶ apply ─▶ the uncompressed tar of a layer
//!
//!  both images ─▶ make (feature `make`: not for nodes) ─▶ diffs, applied again before anyone gets them
//! ```
//!
//! The formats are those of the containers project: an OCI artifact that refers to the new image, with a layer of the type
//! `application/vnd.tar-diff` for each layer that changed. A delta is trusted with nothing: the node checks the result
//! against the diff ID in the configuration of the image. So an error here costs the download of the real layer, and no more.

mod apply;
#[cfg(feature = "make")]
pub mod make;
pub mod manifest;

pub use apply::{Applied, ApplyError, ApplyLimits, OldRootFiles, apply_diff};
