//! The cost of one job over a fleet and of idle sessions, and the recovery of a fleet when cloudcore is killed, with the
//! code of `make fleet`.

use std::process::ExitCode;
use std::time::Duration;

use prepull_e2e::prelude::*;
use prepull_e2e::sim::PullDurations;
use prepull_e2e::teller::Teller;

use super::print_bar;
use crate::fleet::{
    Connect, FleetFigures, FleetOptions, Idle, JobFigures, Kill, OldJobFigures, print, print_old_jobs,
};

/// Size of the fleet that the bars are for.
const NODES: usize = 10_000;
/// Old jobs in the cluster of a starting leader. Together with the rest, they stay below etcd's default limit.
const OLD_JOBS: usize = 10_000;
/// Duration of a pull in the case for which KubeEdge has published figures.
const PEERS_PULL: Duration = Duration::from_millis(100);
/// Duration of the measurement of idle sessions, four heartbeats.
const IDLE: Duration = Duration::from_secs(60);
/// Durations of pulls, long enough for a kill in the middle.
const SLOW: PullDurations = PullDurations::Between(Duration::from_secs(2), Duration::from_secs(20));
const MIB_F: f64 = 1024.0 * 1024.0;

/// `NODES` in the environment sets another size than 10,000 for the largest fleet.
pub(crate) async fn run() -> Result<ExitCode> {
    let nodes = match std::env::var("NODES") {
        Ok(nodes) => nodes.parse().with_context(|| format!("NODES={nodes} is no number"))?,
        Err(_) => NODES,
    };
    let teller = Teller::new();
    let mut jobs = Vec::new();
    for size in [100, 1000].into_iter().filter(|size| *size < nodes) {
        jobs.push(one_job(&FleetOptions::with_nodes(size), &teller).await?);
    }
    let peers =
        FleetOptions { pull: PullDurations::Fixed(PEERS_PULL), ..FleetOptions::with_nodes(1000.min(nodes)) };
    let peers = one_job(&peers, &teller).await?;
    let (whole, idle) =
        measure_large_fleet(&FleetOptions { idle: Some(IDLE), ..FleetOptions::with_nodes(nodes) }, &teller)
            .await?;
    let connect = whole.connect;
    jobs.push(whole);
    let kill = FleetOptions { pull: SLOW, kill_cloud: true, ..FleetOptions::with_nodes(nodes) };
    let killed = one_job(&kill, &teller).await?;
    let old = FleetOptions { old_jobs: Some(OLD_JOBS.min(nodes)), ..FleetOptions::with_nodes(nodes) };
    let old = OldJobFigures::measure(&old, OLD_JOBS.min(nodes), &teller).await?;
    print_old_jobs(&old);

    println!("\nOne job, instant pulls, concurrency = nodes: how it grows");
    print_growth(&jobs);
    println!("\nThe bars");
    print_bars(&jobs, &peers, &connect, &idle, &killed);
    let of = |what: &str| format!("a leader starts among {} old jobs: {what}", OLD_JOBS.min(nodes));
    print_bar(&of("ready after reading"), old.after_reading(), 5.0, " s");
    print_bar(&of("cloudcore's memory at most"), number(old.cloud_peak) / MIB_F, 400.0, " MiB");
    Ok(ExitCode::SUCCESS)
}

async fn one_job(options: &FleetOptions, teller: &Teller) -> Result<FleetFigures> {
    let figures = FleetFigures::measure(options, teller).await?;
    print(&figures);
    Ok(figures)
}

async fn measure_large_fleet(options: &FleetOptions, teller: &Teller) -> Result<(FleetFigures, Idle)> {
    let figures = one_job(options, teller).await?;
    let idle = figures.idle.context("the idle sessions were not watched")?;
    Ok((figures, idle))
}

/// Prints a line for each size of fleet.
fn print_growth(jobs: &[FleetFigures]) {
    println!(
        "   nodes   first task    last task    Completed   writes   job object   reports      CPU   memory"
    );
    for FleetFigures { job, .. } in jobs {
        let JobFigures { nodes, first_task_seconds, last_task_seconds, ended_seconds, writes_sum, .. } = job;
        println!(
            "{nodes:8} {:10.2} s {:10.2} s {ended_seconds:10.2} s {writes_sum:8} {:8.1} KiB {:9} {:6.1} s {:4.0} MiB",
            first_task_seconds.unwrap_or(f64::NAN),
            last_task_seconds.unwrap_or(f64::NAN),
            kib(job.job_bytes),
            job.reports.count,
            job.cloud_cpu_seconds,
            kib(job.cloud_peak) / 1024.0,
        );
    }
}

fn print_bars(
    jobs: &[FleetFigures],
    peers: &FleetFigures,
    connect: &Connect,
    idle: &Idle,
    killed: &FleetFigures,
) {
    let peers = &peers.job;
    print_bar(&format!("{} nodes x 100 ms, Completed", peers.nodes), peers.ended_seconds, 3.0, " s");
    if let Some(FleetFigures { job, .. }) = jobs.last() {
        let of = |what: &str| format!("{} nodes, {what}", job.nodes);
        print_bar(&of("Completed"), job.ended_seconds, 30.0, " s");
        print_bar(&of("Completed, what we aim at"), job.ended_seconds, 10.0, " s");
        print_bar(&of("writes to the API server"), number(job.writes_sum), 300.0, "");
        print_bar(&of("the job object"), kib(job.job_bytes), 256.0, " KiB");
        print_bar(&of("cloudcore's memory at most"), number(job.cloud_peak) / MIB_F, 400.0, " MiB");
        print_bar(&of("pulled twice"), number(job.pulled_twice), 0.0, "");
    }
    let of = |what: &str| format!("{} sessions, {what}", connect.nodes);
    print_bar(&of("memory of each"), kib(connect.per_session), 25.0, " KiB");
    println!("  {}: {:.1} ms a second", of("CPU of 1,000 idle"), idle.cpu_millis_per_thousand);
    let job = &killed.job;
    if let Some(Kill { back_seconds, ended_seconds, .. }) = job.kill {
        let of = |what: &str| format!("{} nodes, cloudcore killed: {what}", job.nodes);
        print_bar(&of("all are back"), back_seconds, 30.0, " s");
        println!("  {}: {ended_seconds:.1} s after the kill", of("the job ended"));
        print_bar(&of("pulled twice"), number(job.pulled_twice), 0.0, "");
    }
}

fn kib(bytes: u64) -> f64 {
    number(bytes) / 1024.0
}

/// Converts a count, which is far below the 2^53 where a float loses digits.
#[allow(clippy::cast_precision_loss)]
fn number(count: u64) -> f64 {
    count as f64
}
