//! The measured figures.

use serde::Serialize;

/// The cost of one job.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Row {
    /// How the boxes got the image.
    pub what: String,
    /// Boxes of the job.
    pub boxes: usize,
    /// From the creation of the job to its end.
    pub seconds: f64,
    /// Bytes that the uplink carried to the site.
    pub down: u64,
    /// Bytes that the uplink carried from the site.
    pub up: u64,
    /// Boxes that have the image.
    pub have: usize,
    /// Bytes from the registry, or a cache of it, as counted by the agents. Those of an agent that was killed are
    /// missing.
    pub from_registry: u64,
    /// Bytes from other boxes, as counted by the agents.
    pub from_peers: u64,
    /// Bytes that the busiest box has served.
    pub most_served: u64,
    /// cloudcore.
    pub cloud: OfProcess,
    /// The agent of each box.
    pub agents: Vec<OfProcess>,
    /// The containerd of each box.
    pub containerds: Vec<OfProcess>,
}

/// Usage of one process during a job.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct OfProcess {
    /// CPU time.
    pub cpu_seconds: f64,
    /// Largest resident memory in bytes.
    pub peak: u64,
}
