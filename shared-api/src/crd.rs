//! The Kubernetes resources. The checked-in manifests are made from these types (`cloudcore-prepull crds`).
//!
//! The types accept whatever has the right JSON kinds: what a value means, and whether it is allowed, is
//! decided by cloudcore's validate step, whose answer stands in the job's status. The CEL rules say the same
//! where the API server knows CEL (1.25 and later), so that a mistake is refused at once.

pub mod job;
pub mod kruise;
pub mod report;
pub mod status;

/// The API group, KubeEdge's.
pub const GROUP: &str = "operations.kubeedge.io";
/// The label of an edge node, as KubeEdge sets it.
pub const EDGE_LABEL: &str = "node-role.kubernetes.io/edge";
