//! Types and rules that cloudcore-prepull and edgecore-prepull must agree on. No tokio, no clients, no clock.
//!
//! ```text
//!  crd::job ──▶ image, selector, overriders ──▶ task ──▶ wire ═tunnel═▶ (edge)
//!  Secret ────▶ credentials ───────────────────────────▶ wire ═tunnel═▶ (edge, memory only)
//!  crd::status ◀───────────────────────────── task ◀──── wire ◀═tunnel═ (edge)
//! ```
//!
//! - [`image`]: image references as written and as normalised, and the pull policy they imply.
//! - [`selector`]: label selectors, in the API's object form and in string form.
//! - [`overriders`]: rules that edit an image reference or a list of secrets.
//! - [`credentials`]: the contents of a registry secret, and the entries that match a reference.
//! - [`download`]: how a task may download: cap, windows, pin, signatures.
//! - [`settings`]: settings of nodes that come from the cloud.
//! - [`delta`]: the names of a delta in a registry.
//! - [`sites`]: layers that the nodes of a site share.
//! - [`text`]: text from machines that we don't trust, made safe for a terminal.
//! - [`task`]: the work of one node, its progress and its result.
//! - [`failure`]: why an image is not on its node, in one word of a closed list.
//! - [`wire`]: the messages of the tunnel and their limits.
//! - [`enroll`]: how an edge gets its certificate: join tokens, requests and responses.
//! - [`edges`]: what people see of the edges (feature `crd`).
//! - [`kubeedge`]: whether KubeEdge serves the same jobs (feature `crd`).
//! - [`crd`]: the Kubernetes resources (feature `crd`, the cloud side only).

pub mod abbreviate;
pub mod credentials;
pub mod delta;
mod dns_name;
pub mod download;
pub mod enroll;
pub mod failure;
pub mod image;
pub mod overriders;
pub mod selector;
pub mod settings;
pub mod sites;
pub mod task;
pub mod text;
pub mod wire;

#[cfg(feature = "crd")]
pub mod edges;

#[cfg(feature = "crd")]
pub mod kubeedge;

#[cfg(feature = "crd")]
#[allow(unreachable_pub)] // the KubeSchema derive repeats each type inside a function
pub mod crd;
