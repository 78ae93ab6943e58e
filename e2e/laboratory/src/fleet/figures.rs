//! Figures of a run, for programs: times in seconds, sizes in bytes.

use std::collections::BTreeMap;

use prepull_api::crd::status::{JobPhase, Summary};
use serde::Serialize;

use super::{EdgeListing, FleetOptions, PeopleFigures};

/// The figures of one run.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct FleetFigures {
    /// Options of the run.
    pub options: FleetOptions,
    /// Version of the API server.
    pub cluster: String,
    /// Cores and memory of this machine.
    pub machine: String,
    /// How the fleet connected.
    pub connect: Connect,
    /// Cost of idle sessions, if `--idle` was given.
    pub idle: Option<Idle>,
    /// Figures of the job.
    pub job: JobFigures,
    /// Cost of people's tools, if `--people` was given.
    pub people: Option<PeopleFigures>,
}

/// How a fleet connected, with all edges dialling at the same moment.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Connect {
    /// Number of edges.
    pub nodes: usize,
    /// Seconds from the first dial until every edge had been connected.
    pub seconds: f64,
    /// CPU time of cloudcore in these seconds.
    pub cpu_seconds: f64,
    /// Resident memory of cloudcore before.
    pub rss_before: u64,
    /// Resident memory of cloudcore after.
    pub rss_after: u64,
    /// Resident memory of cloudcore for each session.
    pub per_session: u64,
}

/// The cost of sessions that only exchange heartbeats.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Idle {
    /// Seconds of the measurement.
    pub seconds: f64,
    /// CPU time of cloudcore in these seconds.
    pub cpu_seconds: f64,
    /// CPU time per second and 1,000 sessions, in milliseconds: 10 is one percent of a core.
    pub cpu_millis_per_thousand: f64,
    /// Resident memory of cloudcore at the end.
    pub rss: u64,
    /// Number of sessions that began.
    pub sessions_begun: u64,
    /// The list of the edges at the end.
    pub listing: EdgeListing,
}

/// The figures of one job over all nodes. Times count from the request that created the job.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct JobFigures {
    /// Number of edges.
    pub nodes: usize,
    /// Final phase of the job.
    pub phase: JobPhase,
    /// Counts of the nodes of the job.
    pub summary: Summary,
    /// When the first task arrived on an edge; None if none did.
    pub first_task_seconds: Option<f64>,
    /// When the last task arrived on an edge; None if none did.
    pub last_task_seconds: Option<f64>,
    /// When the status of the job was final.
    pub ended_seconds: f64,
    /// When every result had been acknowledged.
    pub acknowledged_seconds: f64,
    /// Writes to the API server by resource and verb, without the creation of the job.
    pub writes: BTreeMap<String, u64>,
    /// Sum of all writes.
    pub writes_sum: u64,
    /// Size of the job as the API server sends it.
    pub job_bytes: u64,
    /// Number and size of the reports.
    pub reports: Reports,
    /// CPU time of cloudcore for the job, over its restarts.
    pub cloud_cpu_seconds: f64,
    /// Largest resident memory of cloudcore since its start.
    pub cloud_peak: u64,
    /// Resident memory of the API server at the end; 0 if the harness did not start it.
    pub apiserver_rss: u64,
    /// Resident memory of etcd at the end; 0 if the harness did not start it.
    pub etcd_rss: u64,
    /// Size of etcd's database; 0 if the harness did not start it.
    pub etcd_database: u64,
    /// Resident memory of this process, in which all edges run.
    pub fleet_rss: u64,
    /// Pulls that were begun.
    pub pulls: u64,
    /// Complete images that were pulled again.
    pub pulled_twice: u64,
    /// Largest number of edges that pulled at the same time since the start of the fleet.
    pub most_at_once: usize,
    /// Messages from the cloud to the edges.
    pub messages_down: u64,
    /// Messages from the edges to the cloud.
    pub messages_up: u64,
    /// Sessions that came up during the job, which are reconnects.
    pub sessions: u64,
    /// Figures of the kill, if `--kill-cloud` was given.
    pub kill: Option<Kill>,
}

/// Number and size of the reports of a job.
#[derive(Clone, Copy, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Reports {
    /// Number of reports.
    pub count: u64,
    /// Size of the largest report.
    pub largest: u64,
    /// Size of all reports together.
    pub sum: u64,
}

/// A kill and restart of cloudcore in the middle of a job. Times count from the kill.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Kill {
    /// Time of the kill, from the creation of the job.
    pub at_seconds: f64,
    /// Images that had been pulled.
    pub pulled: u64,
    /// Edges that were pulling.
    pub running: u64,
    /// Time until the new process listened.
    pub listens_seconds: f64,
    /// Time until half of the edges had reconnected.
    pub half_back_seconds: f64,
    /// Time until 99 of 100 had. The rest is caused by the random waits of a few edges.
    pub most_back_seconds: f64,
    /// Time until every edge had reconnected.
    pub back_seconds: f64,
    /// Time until the job had ended.
    pub ended_seconds: f64,
    /// CPU time of the new process until every edge had reconnected.
    pub cpu_seconds: f64,
    /// Connections that the new process turned away or sent away with a wait.
    pub turned_away: u64,
}

impl JobFigures {
    /// Whether every node ended, and nothing was pulled twice. Nodes may have failed.
    pub(crate) fn is_whole(&self) -> bool {
        let Summary { desired, successful, failure, .. } = self.summary;
        usize::try_from(desired) == Ok(self.nodes)
            && successful + failure == desired
            && self.pulled_twice == 0
    }
}
