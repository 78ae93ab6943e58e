//! The facts about a node: its Node, its edge, and its record in jobs.

use std::pin::pin;

use futures::TryStreamExt;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::api::{Api, ListParams};
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::status::{MAX_NODES_IN_STATUS, NodeStatus};
use prepull_api::edges::ListedEdge;

use crate::cluster::Cluster;
use crate::edges::read_edge;
use crate::kruise::OfNode;
use crate::leader::{self, Leaderless};
use crate::name::JobName;
use crate::pages::pages;
use crate::{jobs, kruise, problem};

/// Jobs of one page: each has at most 320 KiB in its status.
const JOBS_OF_A_PAGE: u32 = 20;
/// Of the jobs that are over, how many are looked at for the last one in which the node took part: each may have 40 reports.
const LATEST: usize = 3;

/// What was read, or why it could not be.
pub(super) type ReadResult<T> = Result<T, String>;

pub(super) struct NodeFacts {
    pub(super) name: String,
    pub(super) node: ReadResult<Option<Node>>,
    pub(super) edge: ReadResult<Option<ListedEdge>>,
    pub(super) known_since: Option<Timestamp>,
    pub(super) gone: Option<Leaderless>,
    /// The job that was named, or the jobs that run and the last one that is over.
    pub(super) jobs: ReadResult<Vec<OfJob>>,
    /// The job of OpenKruise that was named, or the jobs of the list.
    pub(super) pull_jobs: Vec<OfNode>,
    pub(super) is_job_named: bool,
}

pub(super) struct OfJob {
    /// The job, without the records of its other nodes.
    pub(super) job: ImagePrePullJob,
    pub(super) record: Option<NodeStatus>,
}

/// Reads all that is known. Only a job that is named and cannot be read is an error.
pub(super) async fn read(cluster: &Cluster, name: &str, job: Option<&JobName>) -> anyhow::Result<NodeFacts> {
    let said = |error: anyhow::Error| problem::error_text(&problem::explain(error, cluster.place()));
    let node = async { Api::<Node>::all(cluster.client()).get_opt(name).await };
    let gone = leader::check_leader(cluster);
    let (node, edge, gone) = futures::join!(node, read_edge(cluster, name), gone);
    // Without a cluster, or with refused credentials, fail at once.
    let node = match node.map_err(anyhow::Error::from) {
        Err(error) if problem::server_answer(&error).is_none_or(|answer| answer.code == 401) => {
            return Err(error);
        }
        node => node.map_err(said),
    };
    let known_since = edge.as_ref().ok().map(|(_, since)| *since);
    let edge = edge.map(|(edge, _)| edge).map_err(said);
    let mut pull_jobs = Vec::new();
    let jobs = match job {
        Some(JobName::Own(job)) => Ok(vec![of_job(cluster, jobs::get(cluster, job).await?, name).await?]),
        Some(JobName::Kruise(job)) => {
            pull_jobs = kruise::look_at(cluster, job, name).await?;
            Ok(Vec::new())
        }
        None => of_jobs(cluster, name).await.map_err(said),
    };
    let (name, is_job_named) = (name.to_owned(), job.is_some());
    Ok(NodeFacts { name, node, edge, known_since, gone, jobs, pull_jobs, is_job_named })
}

/// The jobs that run, and the last one of the others that has a record of the node.
async fn of_jobs(cluster: &Cluster, node: &str) -> anyhow::Result<Vec<OfJob>> {
    let (mut found, mut over) = (Vec::new(), Vec::new());
    let mut pages = pin!(pages(jobs::api(cluster), ListParams::default().limit(JOBS_OF_A_PAGE)));
    while let Some(jobs) = pages.try_next().await? {
        for job in jobs {
            if jobs::is_over(&job) {
                let ended = job.status.as_ref().and_then(|status| status.completion_time.as_ref());
                over.push((ended.map_or(Timestamp::MIN, |time| time.0), job.name_any()));
            } else {
                found.push(of_job(cluster, job, node).await?);
            }
        }
    }
    over.sort_unstable();
    for (_, name) in over.iter().rev().take(LATEST) {
        // Skip a job that was just deleted.
        let Some(job) = jobs::api(cluster).get_opt(name).await? else { continue };
        let of = of_job(cluster, job, node).await?;
        if of.record.is_some() {
            found.push(of);
            break;
        }
    }
    Ok(found)
}

async fn of_job(cluster: &Cluster, mut job: ImagePrePullJob, node: &str) -> anyhow::Result<OfJob> {
    let is_it = |record: &NodeStatus| record.node_name == node;
    let status = job.status.as_mut();
    let (listed, all) = status
        .map_or((Vec::new(), 0), |status| (std::mem::take(&mut status.node_status), status.summary.desired));
    let mut record = listed.into_iter().find(is_it);
    if record.is_none() && all as usize > MAX_NODES_IN_STATUS {
        let mut pages = pin!(jobs::reports(cluster, &job));
        while let Some(reports) = pages.try_next().await? {
            record = reports.into_iter().flat_map(|report| report.body.node_status).find(is_it);
            if record.is_some() {
                break;
            }
        }
    }
    Ok(OfJob { job, record })
}
