//! The custom resources. The manifests are generated from these types (`cloudcore-prepull crds`).
//!
//! The types accept any value of the right JSON type. Whether the value is valid is decided by cloudcore's validate
//! step, which reports it in the job's status. On API servers that support CEL (1.25 and later), the CEL rules refuse
//! the same mistakes at once.

mod defaults;
pub mod job;
pub mod kruise;
pub mod report;
pub mod status;

/// KubeEdge's API group.
pub const GROUP: &str = "operations.kubeedge.io";
/// Label that KubeEdge sets on edge nodes.
pub const EDGE_LABEL: &str = "node-role.kubernetes.io/edge";
