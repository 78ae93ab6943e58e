//! After the storm: everything is healed, every job ends, and nothing is left behind.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use containerd_client::services::v1::ListRequest;
use containerd_client::services::v1::leases_client::LeasesClient;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;
use kube::api::Api;
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::kruise::{ImageListPullJob, ImagePullJob};
use prepull_api::crd::status::{JobPhase, MAX_NODES_IN_STATUS, NodePhase, Tristate};
use prepull_api::task::JobUid;
use prepull_e2e::cleanup::eventually;
use prepull_e2e::cloud::Cloud;
use prepull_e2e::cluster::Cluster;
use prepull_e2e::node::EdgeNode;
use serde_json::json;
use tonic::Request;

use super::diary::Diary;
use super::people::{People, existing_objects};
use super::scene::{NODES, StormParts, StormScene};
use super::weather::{self, Weather};

/// Longest time in which no job may move: a node's attempt takes up to a minute, and so does the wait before the next one.
const STILL: Duration = Duration::from_secs(180);
/// Limit for all jobs to end: one with two nodes at a time goes over the whole fleet, round by round.
const JOBS_LIMIT: Duration = Duration::from_secs(1800);
/// Limit for everything else, which should take seconds.
const LIMIT: Duration = Duration::from_secs(90);
/// Largest memory of debug builds with hundreds of edges: large enough for noise, small enough to reveal a leak.
const MOST_MEMORY: [(&str, u64); 2] = [("cloudcore-prepull", 300 << 20), ("agent", 100 << 20)];

/// Waits until everything has ended, and records deviations.
pub(super) async fn wait_and_check(
    scene: &mut StormScene,
    weather: &Weather,
    people: &People,
    diary: &Diary,
) -> Result<()> {
    let StormScene { fleet, trouble, images, cluster } = scene;
    let ended = async {
        for registry in 0..images.logins.len() {
            images.make_secret(cluster, registry, true).await?;
        }
        all_nodes_are_back(cluster, fleet.names()).await?;
        resume_jobs(cluster).await?;
        diary.note_event("calm: jobs are waited for");
        for check in [jobs_end(cluster).await, pull_jobs_end(cluster).await] {
            if let Err(error) = check {
                diary.note_broken(&format!("{error:#}"));
            }
        }
        anyhow::Ok(())
    };
    tokio::select! {
        ended = ended => ended?,
        () = weather::keep_running(trouble, diary) => {}
    }
    diary.note_event("calm: what is left is looked for");
    jobs_are_as_they_should_be(cluster, &trouble.nodes, people, diary).await?;
    if let Err(error) = fleet.all_acknowledged().await {
        diary.note_broken(&format!("simulated edges: {error:#}"));
    }
    let tally = fleet.tally();
    let pulled_twice = fleet.pulled_twice_for(|job| !people.have_deleted_reports_of(job));
    if (pulled_twice, tally.open, tally.running) != (0, 0, 0) {
        diary.note_broken(&format!(
            "simulated edges pulled again what was whole, or are still at work: {tally:?}"
        ));
    }
    for node in &trouble.nodes {
        // One more than the images: an edit before the start may add the lease of another image.
        if let Err(error) = leaves_nothing_behind(node, images.references.len() + 1).await {
            diary.note_broken(&format!("{}: {error:#}", node.name()));
        }
    }
    let sessions = fleet.names().len() + trouble.nodes.len();
    if let Err(error) = every_edge_is_in(trouble, sessions, diary).await {
        diary.note_broken(&format!("{error:#}"));
    }
    memory_is_bounded(trouble, diary)?;
    no_program_panicked(trouble, diary);
    diary.note_event(&format!(
        "{} strokes, {} jobs were made; simulated edges: {} tasks, {} pulls, {} cuts, {} restarts",
        weather.strokes(),
        people.made(),
        tally.tasks,
        tally.pulls,
        tally.cuts,
        tally.restarts
    ));
    Ok(())
}

/// One of the clouds leads, and every edge has one session with it.
async fn every_edge_is_in(trouble: &mut StormParts, edges: usize, diary: &Diary) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    loop {
        weather::start_stopped(trouble, diary).await;
        let mut up = 0.0;
        for cloud in &trouble.clouds {
            if cloud.is_ready().await.unwrap_or(false) {
                // It may end between the two requests.
                up += cloud.sessions().await.unwrap_or(0.0);
            }
        }
        #[allow(clippy::cast_precision_loss, reason = "there are thousands of edges, not 2^52")]
        let expected = edges as f64;
        if (up - expected).abs() < 0.5 {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{up} edges have a session after {LIMIT:?}, of {edges}");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

async fn all_nodes_are_back(cluster: &Cluster, simulated: &[String]) -> Result<()> {
    for name in simulated.iter().map(String::as_str).chain(NODES) {
        if cluster.mark_ready(name, true).await.is_err() {
            super::scene::remake_node(cluster, name).await?;
        }
    }
    Ok(())
}

/// Resumes suspended jobs, and undoes edits that make a job invalid.
async fn resume_jobs(cluster: &Cluster) -> Result<()> {
    for job in existing_objects(&Api::<ImagePrePullJob>::all(cluster.client())).await? {
        let template = &job.spec.image_pre_pull_template;
        let mut spec = json!({"suspend": false});
        if template.concurrency <= 0 || template.timeout_seconds < 0 || template.failure_tolerate == "most" {
            spec["imagePrePullTemplate"] =
                json!({"concurrency": 20, "timeoutSeconds": 60, "failureTolerate": "0.5"});
        }
        if job.spec.active_deadline_seconds == Some(0) {
            spec["activeDeadlineSeconds"] = json!(null);
        }
        if job
            .spec
            .rollout
            .as_ref()
            .is_some_and(|rollout| rollout.steps.first().is_some_and(|step| step == "80%"))
        {
            spec["rollout"] = json!(null);
        }
        // One may have been deleted by its own time to live.
        let _ = cluster.existing_job(&job.name_any()).patch_spec(spec).await;
    }
    Ok(())
}

/// Waits until there are no jobs left that run. They may take long, but not stand still.
async fn all_end(kind: &str, running: impl AsyncFn() -> Result<Vec<String>>) -> Result<()> {
    let began = Instant::now();
    let (mut before, mut moved) = (Vec::new(), began);
    loop {
        // The API server may have been restarted a moment ago.
        let now = running().await.unwrap_or_else(|error| vec![format!("{error:#}")]);
        if now.is_empty() {
            return Ok(());
        }
        ensure!(began.elapsed() < JOBS_LIMIT, "{kind}: after {JOBS_LIMIT:?} these still run: {now:?}");
        ensure!(moved.elapsed() < STILL, "{kind}: for {STILL:?} none of these has moved: {now:?}");
        if now != before {
            (before, moved) = (now, Instant::now());
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

async fn jobs_end(cluster: &Cluster) -> Result<()> {
    let api = Api::<ImagePrePullJob>::all(cluster.client());
    all_end("ImagePrePullJobs", async || {
        let running = existing_objects(&api).await?.into_iter().filter(|job| {
            let status = job.status.clone().unwrap_or_default();
            // Until then, a change may still wait for its own run.
            let is_unknown = |condition: &Condition| condition.status == "Unknown";
            !matches!(status.phase, JobPhase::Completed | JobPhase::Failure)
                || status.conditions.iter().any(is_unknown)
        });
        Ok(running
            .map(|job| format!("{}: {:?}", job.name_any(), job.status.unwrap_or_default().summary))
            .collect())
    })
    .await
}

async fn pull_jobs_end(cluster: &Cluster) -> Result<()> {
    let (jobs, lists) =
        (Api::<ImagePullJob>::all(cluster.client()), Api::<ImageListPullJob>::all(cluster.client()));
    all_end("jobs of Kruise's kinds", async || {
        let jobs = existing_objects(&jobs).await?.into_iter();
        let jobs = jobs
            .filter(|job| job.status.as_ref().is_none_or(|status| status.completion_time.is_none()))
            .map(|job| format!("{}: {:?}", job.name_any(), job.status));
        let lists = existing_objects(&lists).await?.into_iter();
        let lists = lists
            .filter(|job| job.status.as_ref().is_none_or(|status| status.completion_time.is_none()))
            .map(|job| format!("{}: {:?}", job.name_any(), job.status));
        Ok(jobs.chain(lists).collect())
    })
    .await
}

/// Checks every finished ImagePrePullJob, its reports, and the images of the real nodes.
async fn jobs_are_as_they_should_be(
    cluster: &Cluster,
    nodes: &[EdgeNode],
    people: &People,
    diary: &Diary,
) -> Result<()> {
    let mut images = Vec::new();
    for node in nodes {
        images.push((node.name(), node.images().await?));
    }
    for job in existing_objects(&Api::<ImagePrePullJob>::all(cluster.client())).await? {
        let (name, status) = (job.name_any(), job.status.clone().unwrap_or_default());
        let sum = &status.summary;
        if status.observed_generation != job.metadata.generation {
            let known = status.observed_generation;
            diary.note_broken(&format!("{name} is at {:?}, not {:?}", known, job.metadata.generation));
        }
        if status.start_time.is_none() {
            continue; // it was refused
        }
        if sum.in_progress > 0 || (status.phase == JobPhase::Completed && sum.pending > 0) {
            diary.note_broken(&format!("{name} is {:?} with {sum:?}", status.phase));
        }
        if status.phase == JobPhase::Failure && status.reason.is_empty() {
            diary.note_broken(&format!("{name} is a Failure without a reason"));
        }
        let reports = cluster.existing_job(&name).reports().await?;
        let reported: Vec<_> = reports.iter().flat_map(|report| &report.body.node_status).collect();
        let count = |phase| reported.iter().filter(|node| node.phase == phase).count();
        let counted = [NodePhase::Successful, NodePhase::Failure, NodePhase::Unknown].map(count);
        let summed = [sum.successful, sum.failure, sum.unknown].map(|number| number as usize);
        // Deleted while none led: of a large job that has ended, the status shows only some nodes.
        let may_lack = people.have_deleted_reports_of(&JobUid(job.uid().unwrap_or_default()))
            && sum.desired as usize > MAX_NODES_IN_STATUS
            && reported.len() < sum.desired as usize;
        if !may_lack && (reported.len() != sum.desired as usize || counted != summed) {
            diary.note_broken(&format!(
                "{name}: its reports have {} nodes, {counted:?}; its status says {sum:?}",
                reported.len()
            ));
        }
        for node in reported {
            if node.phase != NodePhase::Successful
                && node.phase != NodePhase::Pending
                && node.reason.is_empty()
            {
                diary
                    .note_broken(&format!("{name}: {} is {:?} without a reason", node.node_name, node.phase));
            }
            let Some((_, present)) = images.iter().find(|(name, _)| *name == node.node_name) else {
                continue;
            };
            for image in node.image_status.iter().filter(|image| image.status == Tristate::True) {
                if !present.contains_key(&image.pulled_image) {
                    diary.note_broken(&format!(
                        "{name}: {} was pulled on {} and is not there",
                        image.pulled_image, node.node_name
                    ));
                }
            }
        }
    }
    Ok(())
}

/// The ledger is empty, and every lease in containerd expires: that of a failed pull stays for the next one.
async fn leaves_nothing_behind(node: &EdgeNode, most_leases: usize) -> Result<()> {
    eventually("nothing is left behind", LIMIT, async || {
        ensure!(node.open_tasks() == 0, "{} tasks are in the ledger", node.open_tasks());
        let mut request = Request::new(ListRequest::default());
        request.metadata_mut().insert("containerd-namespace", "k8s.io".parse()?);
        let list = LeasesClient::new(node.containerd().channel().await?).list(request).await;
        let leases = list.context("cannot list the leases of containerd")?.into_inner().leases;
        let lasting = leases.iter().filter(|lease| !lease.labels.contains_key("containerd.io/gc.expire"));
        let lasting: Vec<_> = lasting.map(|lease| &lease.id).collect();
        ensure!(lasting.is_empty(), "containerd has leases that never expire: {lasting:?}");
        ensure!(
            leases.len() <= most_leases,
            "containerd has {} leases for {most_leases} images",
            leases.len()
        );
        Ok(())
    })
    .await?;
    let dir = node.state_dir().join("tasks");
    for entry in std::fs::read_dir(dir).into_iter().flatten() {
        let name = entry?.file_name();
        ensure!(!name.to_string_lossy().ends_with(".corrupt"), "a record was set aside: {}", name.display());
    }
    Ok(())
}

fn memory_is_bounded(trouble: &StormParts, diary: &Diary) -> Result<()> {
    let clouds = trouble.clouds.iter().map(|cloud| Ok((MOST_MEMORY[0], cloud.process()?.memory()?)));
    let agents = trouble.nodes.iter().map(|node| Ok((MOST_MEMORY[1], node.agent()?.memory()?)));
    for measured in clouds.chain(agents) {
        let ((name, most), memory): ((&str, u64), u64) = measured.map_err(|error: anyhow::Error| error)?;
        diary.note_event(&format!("{name}: {} MiB", memory >> 20));
        if memory > most {
            diary.note_broken(&format!("{name} takes {} MiB, more than {}", memory >> 20, most >> 20));
        }
    }
    Ok(())
}

fn no_program_panicked(trouble: &StormParts, diary: &Diary) {
    let logs = trouble.clouds.iter().map(Cloud::log).chain(trouble.nodes.iter().map(EdgeNode::agent_log));
    for log in logs {
        if let Some(line) = log.lines().find(|line| line.contains("panicked at")) {
            diary.note_broken(&format!("a program panicked: {line}"));
        }
    }
}
