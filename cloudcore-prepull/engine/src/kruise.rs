//! OpenKruise's API on the same engine: ImagePullJob, ImageListPullJob, NodeImage.
//!
//! ```text
//!  ImageListPullJob ─▶ jobs ─children─▶ (API server)
//!  ImagePullJob ─────▶ jobs ─Wish─▶ node_images ─spec─▶ (API server) ─▶ NodeImage
//!  Pod ──────────────▶  ▲                │ ▲                               │
//!                       └────News────────┘ └───────────────────────────────┘
//!  Node, session ─────────────────▶ node_images ─Order─▶ dispatch ═tunnel═▶ (edge)
//!  NodeImage.status ◀─ writer ◀──── node_images ◀─────────────────═tunnel═─ Progress, Result
//! ```
//!
//! A NodeImage is desired state for one node: whatever writes it, a job or a person, the node is driven there. So the
//! two halves know little of each other: a job writes a [`Wish`] into a NodeImage and hears in [`News`] how it fares.
//! Both halves are pure.

pub mod engine;
pub mod io;
pub mod jobs;
pub mod node_images;
pub mod rules;

pub use engine::{Action, Input, Kruise};
pub use io::{Liveness, News, Standing, Wish};
