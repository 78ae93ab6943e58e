//! What cloudcore-prepull and edgecore-prepull must agree on. No tokio, no clients, no clock.
//!
//! ```text
//!  crd::job ──▶ image, selector, overriders ──▶ task ──▶ wire ═tunnel═▶ (edge)
//!  Secret ────▶ credentials ───────────────────────────▶ wire ═tunnel═▶ (edge, memory only)
//!  crd::status ◀───────────────────────────── task ◀──── wire ◀═tunnel═ (edge)
//! ```
//!
//! - [`image`]: references as written and as normalised, and the pull policy they imply.
//! - [`selector`]: label selectors, from the API's object form and from their string form.
//! - [`overriders`]: image and secret rules applied to one reference or one list of secrets.
//! - [`credentials`]: what a registry secret holds, and which entries match a reference.
//! - [`task`]: what one node is asked to do, and how it fared.
//! - [`wire`]: the messages of the tunnel and their limits.
//! - [`crd`]: the Kubernetes resources (feature `crd`, the cloud side only).

pub mod credentials;
pub mod enroll;
pub mod image;
pub mod overriders;
pub mod selector;
pub mod task;
pub mod wire;

#[cfg(feature = "crd")]
#[allow(unreachable_pub)] // KubeSchema repeats the types inside a function
pub mod crd;
