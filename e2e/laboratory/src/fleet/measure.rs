//! Measurement of one job over all nodes, from its creation to the last acknowledgement, with or without a kill of
//! cloudcore.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use prepull_api::crd::EDGE_LABEL;
use prepull_api::crd::status::JobPhase;
use prepull_e2e::cloud::{Cloud, Metrics};
use prepull_e2e::plain_http;
use prepull_e2e::sim::{Fleet, FleetTally};
use prepull_e2e::teller::Teller;
use prepull_e2e::usage::Usage;

use super::figures::{JobFigures, Kill};
use super::requests::WriteCounts;
use super::scene::{FleetScene, usage};
use super::sizes;

/// Limit for the last acknowledgements: an edge may reconnect before it gets its own.
const ACKNOWLEDGEMENT_LIMIT: Duration = Duration::from_secs(120);
/// The write of the harness itself, which creates the job.
const CREATION: &str = "imageprepulljobs POST";

/// A job to measure.
#[derive(Clone, Debug)]
pub(crate) struct MeasuredJob {
    /// Name of the job.
    pub name: String,
    /// Number of images.
    pub images: u32,
    /// The job's `concurrency`.
    pub concurrency: i64,
    /// The job's `failureTolerate`.
    pub tolerate: String,
    /// The job's `timeoutSeconds`.
    pub timeout_seconds: i64,
    /// Whether to kill cloudcore when half of the images are pulled.
    pub kill_cloud: bool,
    /// Limit for the end of the job.
    pub limit: Duration,
}

impl FleetScene {
    /// Creates the job and measures it.
    pub(crate) async fn measure_job(&mut self, plan: &MeasuredJob, teller: &Teller) -> Result<JobFigures> {
        let Self { fleet, cloud, cluster, .. } = self;
        let (client, nodes) = (cluster.client(), fleet.names().len());
        teller.step(&format!("job {} over {nodes} nodes", plan.name));
        let images =
            (0..plan.images).map(|number| format!("registry.example/{}/image-{number}:v1", plan.name));
        let job = cluster
            .job(&plan.name)
            .images(images)
            .on_label(EDGE_LABEL, "")
            .concurrency(plan.concurrency)
            .tolerate(&plan.tolerate)
            .timeout_seconds(plan.timeout_seconds);
        let (cpu_before, tally_before) = (usage(cloud)?.cpu, fleet.tally());
        let requests_before = WriteCounts::read_current(&client).await?;
        fleet.reset_task_times();

        let begun = Instant::now();
        let job = job.apply().await?.within(plan.limit);
        let ends = async {
            let is_final = |phase| matches!(phase, JobPhase::Completed | JobPhase::Failure);
            let status = job.until("has ended", |status| is_final(status.phase)).await?;
            anyhow::Ok((status, Instant::now()))
        };
        let ((status, ended), killed) = if plan.kill_cloud {
            let kill = kill_at_half(fleet, cloud, plan, begun, tally_before.whole, teller);
            let (ended, (kill, usage)) = tokio::try_join!(ends, kill)?;
            let ended_seconds = ended.1.duration_since(kill.0).as_secs_f64();
            (ended, Some((Kill { ended_seconds, ..kill.1 }, usage)))
        } else {
            (ends.await?, None)
        };
        fleet.until_met("all is acknowledged", ACKNOWLEDGEMENT_LIMIT, |tally| tally.open == 0).await?;
        let acknowledged = Instant::now();

        let mut writes = WriteCounts::read_current(&client).await?.added_since(&requests_before);
        if let Some(creations) = writes.get_mut(CREATION) {
            *creations -= 1;
        }
        writes.retain(|_, count| *count > 0);
        let (tally, now) = (fleet.tally(), usage(cloud)?);
        let before_kill = killed.map(|(_, usage)| usage).unwrap_or_default();
        // The CPU time of a new process counts from zero.
        let cpu = (before_kill.cpu + now.cpu).saturating_sub(cpu_before);
        let since = |at: Instant| at.saturating_duration_since(begun).as_secs_f64();
        let times = fleet.task_times();
        let servers = cluster.servers();
        let of = |pid: Option<u32>| pid.and_then(|pid| Usage::of_process(pid).ok()).unwrap_or_default().rss;
        Ok(JobFigures {
            nodes,
            phase: status.phase,
            first_task_seconds: times.map(|(first, _)| since(first)),
            last_task_seconds: times.map(|(_, last)| since(last)),
            ended_seconds: since(ended),
            acknowledged_seconds: since(acknowledged),
            writes_sum: writes.values().sum(),
            writes,
            job_bytes: sizes::job(&client, job.name()).await?,
            reports: sizes::reports(&client, &job.uid().await?).await?,
            cloud_cpu_seconds: cpu.as_secs_f64(),
            cloud_peak: now.peak.max(before_kill.peak),
            apiserver_rss: of(servers.as_ref().map(|servers| servers.apiserver)),
            etcd_rss: of(servers.as_ref().map(|servers| servers.etcd)),
            etcd_database: match &servers {
                Some(servers) => database_bytes(servers.etcd_addr).await?,
                None => 0,
            },
            fleet_rss: Usage::of_this_process()?.rss,
            pulls: tally.pulls - tally_before.pulls,
            pulled_twice: tally.pulled_twice - tally_before.pulled_twice,
            most_at_once: tally.most_at_once,
            messages_down: tally.received_messages - tally_before.received_messages,
            messages_up: tally.sent_messages - tally_before.sent_messages,
            sessions: tally.sessions - tally_before.sessions,
            kill: killed.map(|(kill, _)| kill),
            summary: status.summary,
        })
    }
}

/// Kills cloudcore with SIGKILL when half of the images are pulled, and restarts it immediately. Returns the time of
/// the kill, its figures, and the usage of the killed process.
async fn kill_at_half(
    fleet: &Fleet,
    cloud: &mut Cloud,
    plan: &MeasuredJob,
    begun: Instant,
    whole_before: u64,
    teller: &Teller,
) -> Result<((Instant, Kill), Usage)> {
    let nodes = fleet.names().len();
    let half = nodes as u64 * u64::from(plan.images) / 2;
    let pulled = |tally: &FleetTally| tally.whole - whole_before;
    fleet.until_met("half of the images are pulled", plan.limit, |tally| pulled(tally) >= half).await?;
    let (used, tally) = (usage(cloud)?, fleet.tally());
    cloud.kill9()?;
    let killed = Instant::now();
    fleet.start_roll_call();
    teller.step(&format!(
        "cloudcore is killed: {} images are pulled, {} nodes are at it",
        pulled(&tally),
        tally.running
    ));
    cloud.restart().await?;
    let listens_seconds = killed.elapsed().as_secs_f64();
    fleet.have_connected(nodes / 2, plan.limit).await?;
    let half_back_seconds = killed.elapsed().as_secs_f64();
    fleet.have_connected(nodes - nodes / 100, plan.limit).await?;
    let most_back_seconds = killed.elapsed().as_secs_f64();
    fleet.have_connected(nodes, plan.limit).await?;
    let back_seconds = killed.elapsed().as_secs_f64();
    teller.step(&format!("all are back after {back_seconds:.1} s"));
    let kill = Kill {
        at_seconds: killed.duration_since(begun).as_secs_f64(),
        pulled: pulled(&tally),
        running: tally.running,
        listens_seconds,
        half_back_seconds,
        most_back_seconds,
        back_seconds,
        ended_seconds: 0.0,
        cpu_seconds: usage(cloud)?.cpu.as_secs_f64(),
        turned_away: turned_away(&cloud.metrics().await?),
    };
    Ok(((killed, kill), used))
}

/// Connections that were turned away, and edges that were sent away with a wait.
fn turned_away(metrics: &Metrics) -> u64 {
    let sum = |name| metrics.sum(name, &[]);
    count(sum("cloudcore_prepull_turned_away_total") + sum("cloudcore_prepull_sent_away_total"))
}

/// Reads the size of etcd's database in bytes.
pub(super) async fn database_bytes(etcd: std::net::SocketAddr) -> Result<u64> {
    let (_, body) = plain_http::get(etcd, "/metrics").await.context("cannot ask etcd")?;
    Ok(count(Metrics(body).sum("etcd_mvcc_db_total_size_in_bytes", &[])))
}

/// Prometheus writes counters as floats, which are far below the limit of a u64.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn count(value: f64) -> u64 {
    value as u64
}
