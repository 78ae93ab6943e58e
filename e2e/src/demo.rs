//! `make demo`: the whole way, from two private registries to images on three edge nodes, on this machine.
//!
//! ```text
//!  scenario (who, what, what is expected) ─▶ stage (starts the parts) ─▶ live (progress) ─▶ report ─▶ verdict
//! ```

mod live;
mod report;
mod scenario;
mod stage;
mod story;
mod verdict;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use prepull_api::crd::status::JobPhase;

use crate::jobs::Job;
use crate::{keep, parts, reaper};
use live::Live;
use stage::Stage;
use story::Story;
use verdict::Verdict;

/// Longer than any job of the demo takes on a machine that is busy.
const JOB_LIMIT: Duration = Duration::from_secs(120);
/// Between two looks at the ledgers.
const LOOK: Duration = Duration::from_millis(2);
/// The exit status of a program that Ctrl-C has ended.
const INTERRUPTED: u8 = 130;

/// Runs the demo. The exit status is 0 only where every expected state was reached.
pub async fn run() -> ExitCode {
    let keep = std::env::var_os("KEEP").is_some_and(|value| !value.is_empty() && value != "0");
    let mut story = Story::new();
    let logs = parts::logs_root().map(|root| root.join("demo")).unwrap_or_default();
    let mut stage = None;
    let told = tokio::select! {
        told = tell(&mut story, &mut stage) => Some(told),
        _ = tokio::signal::ctrl_c() => None,
    };
    let (code, reached) = match told {
        None => {
            drop(stage.take());
            story.note("Interrupted; everything is stopped.");
            return ExitCode::from(INTERRUPTED);
        }
        Some(Ok(verdict)) => {
            (if verdict.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE }, Ok(verdict))
        }
        Some(Err(error)) => (ExitCode::FAILURE, Err(error)),
    };
    match &reached {
        Ok(verdict) => verdict.print(&story),
        Err(error) => story.failure(error),
    }
    if let (true, Some(stage)) = (keep, &stage) {
        match reaper::outlive_us() {
            Ok(keeper) => {
                keep::keep_everything();
                stage.print_how_to_go_on(&story, keeper);
            }
            Err(error) => story.failure(&error),
        }
    } else {
        drop(stage.take());
        story.note(&format!("Everything is stopped; the logs are in {}", logs.display()));
    }
    code
}

async fn tell(story: &mut Story, stage: &mut Option<Stage>) -> Result<Verdict> {
    let mut verdict = Verdict::default();
    let stage = stage.insert(Stage::set(story).await?);

    story.step("One job, four images, three nodes");
    let (job, times) = run_job(story, stage, &scenario::job(), &scenario::MAIN).await?;
    report::print_times(story, &times);

    story.step("What Kubernetes says");
    stage.print_jobs(story).await?;
    let status = job.status().await?;
    report::print_nodes(story, &status);
    verdict.of_main_job(stage, &status);

    story.step("What each containerd says");
    for node in &stage.nodes {
        let images = node.images().await?;
        report::print_images(story, node.name(), &images);
        verdict.of_node(stage, node.name(), &images);
    }
    verdict.of_registries(stage);

    story.step("A wrong password fails its image, and no other");
    let (job, _) = run_job(story, stage, &scenario::second_job(), &scenario::SECOND).await?;
    story.blank();
    stage.print_jobs(story).await?;
    let status = job.status().await?;
    report::print_nodes(story, &status);
    let images = stage.nodes.first().context("no node")?.images().await?;
    verdict.of_second_job(stage, &status, &images);
    Ok(verdict)
}

/// When things happened, counted from the moment the API server had the job.
struct Times {
    arrived: Option<Duration>,
    ended: Duration,
    phase: JobPhase,
}

/// Applies a job with kubectl, and shows how it goes until it has ended, whichever way.
async fn run_job(story: &Story, stage: &Stage, yaml: &str, plan: &scenario::Plan) -> Result<(Job, Times)> {
    let file = stage.logs().join(format!("{}.yaml", plan.name));
    std::fs::write(&file, yaml)?;
    let path = file.display().to_string();
    plan.explain(story);
    story.command(&format!("kubectl apply -f {path}"));

    let job = stage.cluster.existing_job(plan.name);
    let arguments = ["apply", "-f", path.as_str()];
    // Watched before it is there, so that nothing is missed; kubectl itself takes a moment to end.
    let run = async { tokio::try_join!(to_its_end(&job, story, plan), stage.cluster.kubectl(&arguments)) };
    let run = tokio::time::timeout(JOB_LIMIT, run);
    let arrival = first_arrival(stage);
    let mut arrived = None;
    tokio::pin!(run, arrival);
    let run = loop {
        tokio::select! {
            run = &mut run => break run,
            at = &mut arrival, if arrived.is_none() => arrived = Some(at),
        }
    };
    let run = run
        .with_context(|| format!("{} has not ended within {JOB_LIMIT:?}\n{}", plan.name, stage.log_tails()));
    let ((began, ended, phase), _) = run??;
    let since = |at: Instant| at.saturating_duration_since(began);
    Ok((job.clone(), Times { arrived: arrived.map(since), ended: since(ended), phase }))
}

/// Follows a job; returns when it was first there, when it ended, and how.
async fn to_its_end(job: &Job, story: &Story, plan: &scenario::Plan) -> Result<(Instant, Instant, JobPhase)> {
    let mut live = Live::new(story, plan);
    job.exists().await?;
    let began = Instant::now();
    let mut phase = JobPhase::Init;
    job.watch(|status| {
        live.show(&status);
        phase = status.phase;
        matches!(phase, JobPhase::Completed | JobPhase::Failure)
    })
    .await?;
    live.finish();
    Ok((began, Instant::now(), phase))
}

/// When the first task lies in the ledger of an edge node.
async fn first_arrival(stage: &Stage) -> Instant {
    while stage.nodes.iter().all(|node| node.open_tasks() == 0) {
        tokio::time::sleep(LOOK).await;
    }
    Instant::now()
}
