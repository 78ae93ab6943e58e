//! What is measured, as programs read it: times in seconds, sizes in bytes.

use std::collections::BTreeMap;

use prepull_api::crd::status::{JobPhase, Summary};
use serde::Serialize;

use super::Options;

/// One run of the program.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Figures {
    /// What was asked for.
    pub options: Options,
    /// Which API server.
    pub cluster: String,
    /// Cores and memory of this machine.
    pub machine: String,
    /// How the fleet came up.
    pub connect: Connect,
    /// What idle sessions cost, where that was asked for.
    pub idle: Option<Idle>,
    /// The job.
    pub job: JobFigures,
}

/// How a fleet came up: all edges dial at one moment.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Connect {
    /// Edges.
    pub nodes: usize,
    /// From the first dial to the moment when each edge has been connected.
    pub seconds: f64,
    /// Of cloudcore, for that.
    pub cpu_seconds: f64,
    /// cloudcore's resident memory before,
    pub rss_before: u64,
    /// and after.
    pub rss_after: u64,
    /// What a session takes of it.
    pub per_session: u64,
}

/// Sessions that have nothing to do but their heartbeats.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Idle {
    /// How long they were watched.
    pub seconds: f64,
    /// cloudcore's CPU time meanwhile.
    pub cpu_seconds: f64,
    /// CPU time per second and 1,000 sessions, in milliseconds: 10 is one percent of a core.
    pub cpu_millis_per_thousand: f64,
    /// cloudcore's resident memory at the end.
    pub rss: u64,
}

/// One job over all nodes. Times count from the moment when its creation was asked for.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct JobFigures {
    /// Edges.
    pub nodes: usize,
    /// How it ended.
    pub phase: JobPhase,
    /// Its nodes, counted.
    pub summary: Summary,
    /// When an edge had the first task. None where there was none.
    pub first_task_seconds: Option<f64>,
    /// When an edge had the last task.
    pub last_task_seconds: Option<f64>,
    /// When the job's status was final.
    pub ended_seconds: f64,
    /// When every edge had its result acknowledged.
    pub acknowledged_seconds: f64,
    /// Writes that the API server took, by resource and verb, without the job's creation.
    pub writes: BTreeMap<String, u64>,
    /// All of them.
    pub writes_sum: u64,
    /// Of the job, as the API server sends it.
    pub job_bytes: u64,
    /// Of its reports.
    pub reports: Reports,
    /// cloudcore's CPU time for the job, over its restarts.
    pub cloud_cpu_seconds: f64,
    /// The most resident memory that cloudcore has had since its start.
    pub cloud_peak: u64,
    /// The API server's resident memory at the end. 0 where it is not ours to look at.
    pub apiserver_rss: u64,
    /// etcd's.
    pub etcd_rss: u64,
    /// Bytes of etcd's database.
    pub etcd_database: u64,
    /// This process': all the edges.
    pub fleet_rss: u64,
    /// Pulls that were begun.
    pub pulls: u64,
    /// Images that were whole and were pulled again.
    pub pulled_twice: u64,
    /// Edges that pulled at the same time, at most, since the start of the fleet.
    pub most_at_once: usize,
    /// Messages from the cloud to the edges, and
    pub messages_down: u64,
    /// from the edges to the cloud.
    pub messages_up: u64,
    /// Sessions that came up meanwhile: reconnects.
    pub sessions: u64,
    /// The kill in the middle, where that was asked for.
    pub kill: Option<Kill>,
}

/// The reports of a job.
#[derive(Clone, Copy, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Reports {
    /// Objects.
    pub count: u64,
    /// Bytes of the largest.
    pub largest: u64,
    /// Bytes of all.
    pub sum: u64,
}

/// cloudcore killed in the middle of a job and started again. Times count from the kill.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Kill {
    /// From the job's creation to the kill.
    pub at_seconds: f64,
    /// Images that were there.
    pub pulled: u64,
    /// Edges that were pulling.
    pub running: u64,
    /// Until the new process listened.
    pub listens_seconds: f64,
    /// Until half of the edges were back.
    pub half_back_seconds: f64,
    /// Until every edge was back.
    pub back_seconds: f64,
    /// Until the job had ended.
    pub ended_seconds: f64,
    /// CPU time of the new process until all were back.
    pub cpu_seconds: f64,
}

impl JobFigures {
    /// Every node came to an end, and nothing was pulled twice. Nodes may have failed where they were told to.
    pub fn is_whole(&self) -> bool {
        let Summary { desired, successful, failure, .. } = self.summary;
        usize::try_from(desired) == Ok(self.nodes)
            && successful + failure == desired
            && self.pulled_twice == 0
    }
}
