//! OpenKruise's API on the same engine: ImagePullJob, ImageListPullJob, NodeImage.
//!
//! ```text
//!  ImageListPullJob ─▶ jobs ─children─────▶ (API server)
//!  ImagePullJob ─────▶ jobs ─TagRequest───▶ node_images ─spec─▶ (API server) ─▶ NodeImage
//!  Pod ──────────────▶  ▲                     │ ▲                                │
//!                       └──NodeImageUpdate────┘ └────────────────────────────────┘
//!  Node, session ──────────────────────▶ node_images ─TagDispatch─▶ dispatch ═tunnel═▶ (edge)
//!  NodeImage.status ◀─ writer ◀───────── node_images ◀─────────────────────═tunnel═─ Progress, Result
//! ```
//!
//! A NodeImage is desired state for one node, written by a job or a person. So the two halves need to know little of
//! each other: a job writes a [`TagRequest`] into a NodeImage, and learns its outcome from [`NodeImageUpdate`]s. Both
//! halves are pure.

mod engine;
mod io;
pub mod jobs;
pub mod node_images;
mod rules;
mod stored_text;

pub use engine::{Action, Input, Kruise};
pub use io::TagKey;
pub(crate) use io::{Liveness, NodeImageUpdate, TagRequest, TagState};
