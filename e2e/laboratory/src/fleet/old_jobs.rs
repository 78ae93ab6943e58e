//! `make fleet ARGS='--old-jobs N'`: a leader that starts in a cluster with many old jobs.
//!
//! Old jobs are stored in their state days after their end; running jobs are begun by a leader before it's killed.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures::{TryStreamExt, stream};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use kube::api::{Api, ListParams};
use kube::{Client, Resource};
use prepull_api::crd::GROUP;
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::report::{ImagePrePullReport, JOB_UID_LABEL, ReportBody};
use prepull_api::crd::status::{JobPhase, NodePhase, NodeStatus};
use prepull_e2e::cleanup::eventually;
use prepull_e2e::plain_http;
use prepull_e2e::sim::PullDurations;
use prepull_e2e::teller::Teller;
use serde::Serialize;
use serde_json::{Value, json};

use super::FleetOptions;
use super::figures::Connect;
use super::measure::database_bytes;
use super::scene::{FleetScene, usage};

/// Running jobs when the leader is killed. Each has its share of the nodes.
const RUNNING: usize = 20;
/// Old jobs over all nodes of a large fleet.
const LARGE: usize = 10;
/// Reports of each of those, and the nodes in each.
const REPORTS: (u32, usize) = (40, 250);
/// Requests at a time.
const AT_A_TIME: usize = 16;
/// Jobs in a page, as cloudcore reads them.
const PAGE: u32 = 50;
/// Longer than everything else takes.
const PULL: Duration = Duration::from_secs(3600);
/// Most seconds from the end of reading until the leader is ready.
const READY: f64 = 5.0;
/// Most memory of the leader.
const MEMORY: u64 = 400 * 1024 * 1024;

/// The figures of one run with `--old-jobs`.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct OldJobFigures {
    /// Options of the run.
    pub options: FleetOptions,
    /// Cores and memory of this machine.
    pub machine: String,
    /// How the fleet connected before.
    pub connect: Connect,
    /// Bytes of an old job.
    pub job_bytes: u64,
    /// Reports of old jobs and of running ones.
    pub reports: usize,
    /// Size of etcd's database.
    pub etcd_database: u64,
    /// Seconds in which a client that does nothing else lists all jobs.
    pub list_seconds: f64,
    /// Seconds from the start of the program until it serves edges.
    pub ready_seconds: f64,
    /// CPU time until then.
    pub ready_cpu_seconds: f64,
    /// Resident memory of cloudcore then.
    pub ready_rss: u64,
    /// Seconds from the start until every edge was back.
    pub back_seconds: f64,
    /// Largest resident memory of cloudcore since its start.
    pub cloud_peak: u64,
}

impl OldJobFigures {
    /// Starts a fleet with these options, measures a leader that starts, and stops it.
    pub(crate) async fn measure(options: &FleetOptions, old: usize, teller: &Teller) -> Result<Self> {
        let options = FleetOptions { pull: PullDurations::Fixed(PULL), ..options.clone() };
        let (mut scene, connect) = FleetScene::start(&options, teller).await?;
        teller.step(&format!("{RUNNING} jobs begin"));
        scene.begin_jobs().await?;
        scene.cloud.kill9()?;
        let client = scene.cluster.client();
        teller.step(&format!("cloudcore is killed, and {old} old jobs are written"));
        let counter = teller.counter(old);
        let etcd = scene.cluster.servers().context("the etcd of a cluster of one's own is needed")?.etcd_addr;
        let written = stream::iter((0..old).map(Ok)).try_for_each_concurrent(AT_A_TIME, |number| {
            let (counter, nodes) = (&counter, options.old_nodes);
            async move {
                write_old_job(etcd, number, nodes).await?;
                counter.show("old jobs", number);
                anyhow::Ok(())
            }
        });
        written.await?;
        drop(counter);
        let (list_seconds, bytes) = list_all_jobs(&client).await?;
        teller.step(&format!("listed by a client in {list_seconds:.1} s: {} MiB", bytes >> 20));

        scene.fleet.start_roll_call();
        let begun = Instant::now();
        scene.cloud.restart().await?;
        scene.cloud.leads(options.limit).await?;
        let ready_seconds = begun.elapsed().as_secs_f64();
        let ready = usage(&scene.cloud)?;
        teller.step(&format!("it serves edges after {ready_seconds:.1} s"));
        scene.fleet.have_connected(options.nodes, options.limit).await?;
        let back_seconds = begun.elapsed().as_secs_f64();
        scene.are_in_progress().await?;
        let reports = Api::<ImagePrePullReport>::all(client.clone());
        let reports = reports.list_metadata(&ListParams::default()).await?.items.len();
        Ok(Self {
            machine: prepull_e2e::usage::describe_machine(),
            connect,
            job_bytes: bytes / (old + RUNNING) as u64,
            reports,
            etcd_database: database_bytes(etcd).await?,
            list_seconds,
            ready_seconds,
            ready_cpu_seconds: ready.cpu.as_secs_f64(),
            ready_rss: ready.rss,
            back_seconds,
            cloud_peak: usage(&scene.cloud)?.peak,
            options,
        })
    }

    /// Seconds from the end of reading until the leader was ready.
    pub(crate) fn after_reading(&self) -> f64 {
        (self.ready_seconds - self.list_seconds).max(0.0)
    }

    /// Whether the bars are met.
    pub(crate) fn is_whole(&self) -> bool {
        self.after_reading() <= READY && self.cloud_peak <= MEMORY
    }
}

impl FleetScene {
    /// Begins the jobs that run, each on its share of the nodes.
    async fn begin_jobs(&self) -> Result<()> {
        for (number, nodes) in self.shares() {
            let image = format!("registry.example/running/image-{number}:v1");
            let job = self.cluster.job(&format!("running-{number}")).images([image]).on(nodes);
            job.concurrency(i64::try_from(nodes.len())?).timeout_seconds(7200).apply().await?;
        }
        self.are_in_progress().await
    }

    fn shares(&self) -> impl Iterator<Item = (usize, &[String])> {
        let names = self.fleet.names();
        names.chunks(names.len().div_ceil(RUNNING).max(1)).enumerate()
    }

    /// Waits until all nodes are at work, as the API server has it.
    async fn are_in_progress(&self) -> Result<()> {
        let jobs = Api::<ImagePrePullJob>::all(self.cluster.client());
        for (number, nodes) in self.shares() {
            let name = format!("running-{number}");
            eventually(&format!("{name} is in progress"), Duration::from_secs(300), async || {
                let summary = jobs.get(&name).await?.status.unwrap_or_default().summary;
                ensure!(summary.in_progress as usize == nodes.len(), "{summary:?}");
                Ok(())
            })
            .await?;
        }
        Ok(())
    }
}

/// Writes a job that ended a week ago, as the API server stores it.
async fn write_old_job(etcd: SocketAddr, number: usize, nodes: usize) -> Result<()> {
    let (name, uid) = (format!("old-{number}"), format!("{number:08}-0000-4000-8000-000000000000"));
    let image = format!("registry.example/old/image-{number}:v1");
    let spec = json!({ "imagePrePullTemplate": { "images": [image], "nodeNames": ["old-node-0"] } });
    let records: Vec<_> = (0..nodes).map(|node| node_record(node, &image)).collect();
    let ended = jiff::Timestamp::now() - Duration::from_secs(7 * 24 * 3600);
    let ended = ended.round(jiff::Unit::Second)?;
    let status = json!({
        "observedGeneration": 1, "phase": JobPhase::Completed, "startTime": ended, "completionTime": ended,
        "summary": { "desired": nodes, "successful": nodes },
        "startedSpec": spec, "nodeStatus": records,
    });
    let job = json!({
        "apiVersion": ImagePrePullJob::api_version(&()), "kind": ImagePrePullJob::kind(&()),
        "metadata": { "name": name, "uid": uid, "generation": 1, "creationTimestamp": ended },
        "spec": spec, "status": with_text(status, "startedSpec"),
    });
    put_object(etcd, "imageprepulljobs", &name, &job).await?;
    if number >= LARGE {
        return Ok(());
    }
    for index in 0..REPORTS.0 {
        let report = serde_json::to_value(job_report(&name, &uid, index, &image))?;
        put_object(etcd, "imageprepullreports", &format!("{name}-{}-{index}", &uid[..8]), &report).await?;
    }
    Ok(())
}

/// Stores an object directly in etcd: through the API server ten thousand large ones would take half an hour.
async fn put_object(etcd: SocketAddr, resource: &str, name: &str, object: &Value) -> Result<()> {
    let key = STANDARD.encode(format!("/registry/{GROUP}/{resource}/{name}"));
    let request = json!({ "key": key, "value": STANDARD.encode(object.to_string()) });
    let (status, body) = plain_http::post_json(etcd, "/v3/kv/put", &request.to_string()).await?;
    ensure!(status == 200, "etcd takes no {resource} {name}: {status} {body}");
    Ok(())
}

/// Converts a field to JSON in a string.
fn with_text(mut status: Value, field: &str) -> Value {
    status[field] = Value::String(status[field].to_string());
    status
}

fn node_record(node: usize, image: &str) -> Value {
    json!({
        "nodeName": format!("old-node-{node}"), "phase": NodePhase::Successful, "attempt": 1,
        "startTime": "2026-01-01T00:00:00Z",
        "actionFlow": [
            { "action": "Check", "status": "True", "time": "2026-01-01T00:00:00Z" },
            { "action": "Pull", "status": "True", "time": "2026-01-01T00:00:00Z" },
        ],
        "imageStatus": [{
            "image": image, "pulledImage": image, "status": "True", "attempts": 1, "pulledBy": "Agent",
            "digest": format!("sha256:{}", "a".repeat(64)), "bytes": { "done": 400_000_000, "total": 400_000_000 },
        }],
    })
}

fn job_report(name: &str, uid: &str, index: u32, image: &str) -> ImagePrePullReport {
    let first = index as usize * REPORTS.1;
    let records =
        (first..first + REPORTS.1).map(|node| serde_json::from_value::<NodeStatus>(node_record(node, image)));
    let owner = OwnerReference {
        api_version: ImagePrePullJob::api_version(&()).into_owned(),
        kind: ImagePrePullJob::kind(&()).into_owned(),
        name: name.to_owned(),
        uid: uid.to_owned(),
        ..OwnerReference::default()
    };
    ImagePrePullReport {
        types: Some(ImagePrePullReport::type_meta()),
        metadata: ObjectMeta {
            name: Some(format!("{name}-{}-{index}", &uid[..8])),
            labels: Some(BTreeMap::from([(JOB_UID_LABEL.to_owned(), uid.to_owned())])),
            owner_references: Some(vec![owner]),
            uid: Some(format!("{index:08}{}", &uid[8..])),
            creation_timestamp: Some(Time(jiff::Timestamp::UNIX_EPOCH)),
            ..ObjectMeta::default()
        },
        body: ReportBody {
            job_name: name.to_owned(),
            index,
            node_status: records.filter_map(Result::ok).collect(),
            ..ReportBody::default()
        },
    }
}

/// Lists all jobs, and drops the answer. Returns the seconds and the bytes.
async fn list_all_jobs(client: &Client) -> Result<(f64, u64)> {
    let (begun, mut bytes, mut next) = (Instant::now(), 0, String::new());
    loop {
        let url = Api::<ImagePrePullJob>::all(client.clone()).resource_url().to_owned();
        let page = ListParams::default().limit(PAGE);
        let page = if next.is_empty() { page } else { page.continue_token(&next) };
        let request = kube::core::Request::new(url).list(&page)?;
        let text = client.request_text(request).await?;
        bytes += text.len() as u64;
        let list: Metadata = serde_json::from_str(&text)?;
        next = list.metadata.continue_.unwrap_or_default();
        if next.is_empty() {
            return Ok((begun.elapsed().as_secs_f64(), bytes));
        }
    }
}

#[derive(serde::Deserialize)]
struct Metadata {
    metadata: k8s_openapi::apimachinery::pkg::apis::meta::v1::ListMeta,
}
