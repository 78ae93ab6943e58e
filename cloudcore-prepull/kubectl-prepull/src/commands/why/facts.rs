//! The facts about a node: its Node, its edge, and its record in jobs.

use std::collections::BTreeSet;
use std::pin::pin;

use futures::TryStreamExt;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::api::{Api, ListParams};
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::status::{MAX_NODES_IN_STATUS, NodeStatus};
use prepull_api::edges::ListedEdge;
use prepull_api::selector::Selector;

use crate::cluster::Cluster;
use crate::edges::read_edge;
use crate::kruise::OfNode;
use crate::leader::{self, Leaderless};
use crate::name::JobName;
use crate::pages::pages;
use crate::{jobs, kruise, problem};

/// Jobs of one page: each has at most 320 KiB in its status.
const JOBS_OF_A_PAGE: u32 = 20;
/// Of the jobs that are over and may have had the node, how many are looked at for the last one in which it took part: each may have
/// 40 reports.
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
        None => {
            let node = node.as_ref().ok().and_then(Option::as_ref);
            of_jobs(cluster, name, node).await.map_err(said)
        }
    };
    let (name, is_job_named) = (name.to_owned(), job.is_some());
    Ok(NodeFacts { name, node, edge, known_since, gone, jobs, pull_jobs, is_job_named })
}

/// The jobs that run, and the last one of the others that has a record of the node.
async fn of_jobs(cluster: &Cluster, name: &str, node: Option<&Node>) -> anyhow::Result<Vec<OfJob>> {
    let (mut found, mut latest) = (Vec::new(), BTreeSet::new());
    let mut pages = pin!(pages(jobs::api(cluster), ListParams::default().limit(JOBS_OF_A_PAGE)));
    while let Some(jobs) = pages.try_next().await? {
        for job in jobs {
            if !jobs::is_over(&job) {
                found.push(of_job(cluster, job, name).await?);
            } else if may_have_had(&job, name, node) {
                let ended = job.status.as_ref().and_then(|status| status.completion_time.as_ref());
                latest.insert((ended.map_or(Timestamp::MIN, |time| time.0), job.name_any()));
                if latest.len() > LATEST {
                    latest.pop_first();
                }
            }
        }
    }
    for (_, job) in latest.iter().rev() {
        // Skip a job that was just deleted.
        let Some(job) = jobs::api(cluster).get_opt(job).await? else { continue };
        let of = of_job(cluster, job, name).await?;
        if of.record.is_some() {
            found.push(of);
            break;
        }
    }
    Ok(found)
}

/// Whether a job may have a record of the node. Its status shows that for up to 200 nodes; of a larger job the status has a part of
/// them, and it's for the nodes that it names or selects.
pub(super) fn may_have_had(job: &ImagePrePullJob, name: &str, node: Option<&Node>) -> bool {
    let Some(status) = &job.status else { return false };
    if status.node_status.iter().any(|record| record.node_name == name) {
        return true;
    }
    let lists_all = status.summary.desired as usize <= status.node_status.len();
    !lists_all && is_chosen(job, name, node) != Some(false)
}

/// Whether the job names the node or selects its labels; `None` if that is unknown.
pub(super) fn is_chosen(job: &ImagePrePullJob, name: &str, node: Option<&Node>) -> Option<bool> {
    let template = &job.spec.image_pre_pull_template;
    match &template.label_selector {
        None => Some(template.node_names.iter().any(|named| named == name)),
        Some(selector) => Some(Selector::try_from(selector).ok()?.matches(node?.labels())),
    }
}

async fn of_job(cluster: &Cluster, mut job: ImagePrePullJob, node: &str) -> anyhow::Result<OfJob> {
    let is_it = |record: &NodeStatus| record.node_name == node;
    let status = job.status.as_mut();
    let (listed, all) = status
        .map_or((Vec::new(), 0), |status| (std::mem::take(&mut status.node_status), status.summary.desired));
    let mut record = listed.into_iter().find(is_it);
    let is_elsewhere = record.as_ref().map_or(all as usize > MAX_NODES_IN_STATUS, is_without_details);
    if is_elsewhere {
        let mut pages = pin!(jobs::reports(cluster, &job));
        while let Some(reports) = pages.try_next().await? {
            let found = reports.into_iter().flat_map(|report| report.body.node_status).find(is_it);
            if found.is_some() {
                // The report may be of an earlier moment than the status.
                let is_same = |short: &NodeStatus| {
                    found.as_ref().is_some_and(|it| (it.attempt, it.phase) == (short.attempt, short.phase))
                };
                if record.as_ref().is_none_or(is_same) {
                    record = found;
                }
                break;
            }
        }
    }
    Ok(OfJob { job, record })
}

/// Whether the status left out the images and the course of a node that has begun, for want of room. A report has them.
fn is_without_details(record: &NodeStatus) -> bool {
    record.attempt > 0 && record.image_status.is_empty() && record.action_flow.is_empty()
}
