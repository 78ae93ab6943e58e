//! Jobs of OpenKruise's API, where a cluster has it: what they and their NodeImages say, as records like those of our own
//! jobs, which are summed, listed and shown in the same way.

mod events;
pub(crate) mod follow;
mod records;
#[cfg(test)]
mod tests;
mod view;

use std::fmt::Debug;
use std::pin::pin;

use anyhow::{Context, anyhow};
use futures::TryStreamExt;
use jiff::Timestamp;
use kube::ResourceExt;
use kube::api::{Api, ListParams};
use prepull_api::crd::kruise::{ImageListPullJob, ImagePullJob, NodeImage};
use prepull_api::crd::status::NodeStatus;
use serde::de::DeserializeOwned;

use crate::cluster::Cluster;
use crate::name::{KruiseKind, KruiseName};
use crate::pages::pages;
use crate::problem;
use crate::progress::tally::Tally;
use crate::progress::view::JobView;

pub(crate) use events::events;
pub(crate) use view::{job_row, row_name};

/// Jobs of one page: a job has the names of its failed nodes in its status.
const JOBS_OF_A_PAGE: u32 = 100;
/// NodeImages of one page: one of a few images has a few kilobytes.
const NODES_OF_A_PAGE: u32 = 250;

/// A job, with the jobs of its images if it is a list.
#[derive(Debug)]
pub(crate) struct KruiseJob {
    name: KruiseName,
    namespace: String,
    list: Option<ImageListPullJob>,
    /// Each with the records of its nodes.
    pub(crate) jobs: Vec<(ImagePullJob, Vec<NodeStatus>)>,
}

#[derive(Debug)]
pub(crate) struct OfNode {
    /// The job, without what its nodes say.
    pub(crate) job: JobView,
    /// The record of the node, if the job has asked for its image there.
    pub(crate) record: Option<NodeStatus>,
    /// Whether the node can be asked for anything.
    pub(crate) has_node_image: bool,
}

/// The jobs of a namespace, or of all.
pub(crate) fn api(cluster: &Cluster, namespace: Option<&str>) -> Api<ImagePullJob> {
    match namespace {
        Some(namespace) => Api::namespaced(cluster.client(), namespace),
        None => Api::all(cluster.client()),
    }
}

pub(crate) async fn read_job(cluster: &Cluster, name: &KruiseName) -> anyhow::Result<KruiseJob> {
    look_again(cluster, name).await?.ok_or_else(|| missing_job(cluster, name))
}

/// The same of a job that may have been deleted.
pub(crate) async fn look_again(cluster: &Cluster, name: &KruiseName) -> anyhow::Result<Option<KruiseJob>> {
    let Some((list, jobs)) = read_jobs(cluster, name).await? else { return Ok(None) };
    let mut jobs: Vec<_> = jobs.into_iter().map(|job| (job, Vec::new())).collect();
    read_records(cluster, &mut jobs).await?;
    for (job, records) in &mut jobs {
        records::apply_job_status(job, records);
    }
    Ok(Some(KruiseJob { name: name.clone(), namespace: cluster.namespace().to_owned(), list, jobs }))
}

/// Reads the record of one node from a job, or from each job of a list.
pub(crate) async fn look_at(cluster: &Cluster, name: &KruiseName, node: &str) -> anyhow::Result<Vec<OfNode>> {
    let (_, jobs) = read_jobs(cluster, name).await?.ok_or_else(|| missing_job(cluster, name))?;
    let image = Api::<NodeImage>::all(cluster.client()).get_opt(node).await;
    let image = image.with_context(|| format!("NodeImage {node} cannot be read"))?;
    let of = |job: ImagePullJob| {
        let mut records: Vec<_> =
            image.iter().filter_map(|image| records::node_record(&job, image)).collect();
        records::apply_job_status(&job, &mut records);
        OfNode {
            job: view::job_row(&job, Timestamp::now()),
            record: records.into_iter().find(|record| record.node_name == node),
            has_node_image: image.is_some(),
        }
    };
    Ok(jobs.into_iter().map(of).collect())
}

/// The view of a job, without what its nodes say.
pub(crate) fn view_of_job(job: &ImagePullJob, now: Timestamp) -> JobView {
    view::of_job(job, &job.namespace().unwrap_or_default(), &Tally::default(), now)
}

/// The same of a list and its jobs.
pub(crate) fn view_of_list(list: &ImageListPullJob, jobs: &[&ImagePullJob], now: Timestamp) -> JobView {
    view::of_list(list, jobs, &list.namespace().unwrap_or_default(), &Tally::default(), now)
}

fn missing_job(cluster: &Cluster, name: &KruiseName) -> anyhow::Error {
    let (namespace, kind) = (cluster.namespace(), name.kind.singular());
    anyhow!("there is no {name} in namespace {namespace}: `kubectl get {kind} -A` lists those that there are")
}

async fn read_jobs(
    cluster: &Cluster,
    name: &KruiseName,
) -> anyhow::Result<Option<(Option<ImageListPullJob>, Vec<ImagePullJob>)>> {
    let api = api(cluster, Some(cluster.namespace()));
    let failed = || format!("{name} cannot be read");
    Ok(match name.kind {
        KruiseKind::Pull => {
            let job = get_opt(&api, &name.name).await.with_context(failed)?;
            job.map(|job| (None, vec![job]))
        }
        KruiseKind::List => {
            let lists = Api::<ImageListPullJob>::namespaced(cluster.client(), cluster.namespace());
            let Some(list) = get_opt(&lists, &name.name).await.with_context(failed)? else { return Ok(None) };
            let jobs =
                of_list(&api, &list).await.with_context(|| format!("the jobs of {name} cannot be read"))?;
            Some((Some(list), jobs))
        }
    })
}

/// Reads an object that may not be there, of a kind that may not be there.
async fn get_opt<K: Clone + DeserializeOwned + Debug>(api: &Api<K>, name: &str) -> anyhow::Result<Option<K>> {
    let read = api.get(name).await.map(Some).map_err(anyhow::Error::from);
    match read.as_ref().err().and_then(problem::server_answer) {
        Some(answer) if problem::is_unserved(answer) => {
            Err(anyhow!("the cluster does not know OpenKruise's kinds: their definitions are not installed"))
        }
        Some(answer) if answer.code == 404 => Ok(None),
        _ => read,
    }
}

/// Whether the list owns the job.
pub(crate) fn is_of_list(job: &ImagePullJob, list: &ImageListPullJob) -> bool {
    job.owner_references().iter().any(|owner| Some(&owner.uid) == list.metadata.uid.as_ref())
}

/// The jobs of a list, in the order of its images.
async fn of_list(api: &Api<ImagePullJob>, list: &ImageListPullJob) -> kube::Result<Vec<ImagePullJob>> {
    let mut found = Vec::new();
    let mut pages = pin!(pages(api.clone(), ListParams::default().limit(JOBS_OF_A_PAGE)));
    while let Some(jobs) = pages.try_next().await? {
        found.extend(jobs.into_iter().filter(|job| is_of_list(job, list)));
    }
    let place = |job: &ImagePullJob| list.spec.images.iter().position(|image| *image == job.spec.image);
    found.sort_by_key(|job| (place(job).unwrap_or(usize::MAX), job.name_any()));
    Ok(found)
}

/// Reads what the NodeImages say of the jobs, page by page: never are all of them in memory.
async fn read_records(cluster: &Cluster, jobs: &mut [(ImagePullJob, Vec<NodeStatus>)]) -> anyhow::Result<()> {
    let api = Api::<NodeImage>::all(cluster.client());
    let mut pages = pin!(pages(api, ListParams::default().limit(NODES_OF_A_PAGE)));
    while let Some(nodes) = pages.try_next().await.context("the NodeImages cannot be read")? {
        for (job, records) in jobs.iter_mut() {
            records.extend(nodes.iter().filter_map(|node| records::node_record(job, node)));
        }
    }
    Ok(())
}

impl KruiseJob {
    pub(crate) fn view(&self, now: Timestamp) -> JobView {
        let tally = |records: &[NodeStatus]| Tally::of_nodes(records);
        match (&self.list, &self.jobs[..]) {
            (None, [(job, records)]) => view::of_job(job, &self.namespace, &tally(records), now),
            (list, jobs) => {
                let tallies: Vec<_> = jobs.iter().map(|(_, records)| tally(records)).collect();
                let jobs: Vec<_> = jobs.iter().map(|(job, _)| job).collect();
                let list = list.clone().unwrap_or_default();
                view::of_list(&list, &jobs, &self.namespace, &Tally::sum(&tallies), now)
            }
        }
    }

    pub(crate) fn name(&self) -> &KruiseName {
        &self.name
    }
}
