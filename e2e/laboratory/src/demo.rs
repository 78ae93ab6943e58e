//! `make demo`: a job from two private registries to images on three edge nodes, on this machine, and a pod that starts
//! without its registry.
//!
//! ```text
//!  scenario (nodes, images, jobs) ─▶ stage (starts the parts) ─▶ kubectl prepull, report ─▶ verdict
//!                                    promise (a whole cluster, gone when the act is over) ────▲
//! ```

mod promise;
mod report;
mod scenario;
mod stage;
mod story;
mod verdict;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use prepull_api::crd::status::JobPhase;
use prepull_e2e::jobs::Job;
use prepull_e2e::{keep, parts, reaper};

use crate::interrupt::{INTERRUPTED, unless_interrupted};
use scenario::OFFLINE_NODE;
use stage::DemoStage;
use story::Story;
use verdict::DemoVerdict;

/// Limit for a job of the demo, longer than it takes on a busy machine.
const JOB_LIMIT: Duration = Duration::from_secs(120);
/// Interval between two looks at the ledgers.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Runs the demo. The exit status is 0 only if every expected state was reached.
pub(crate) async fn run() -> ExitCode {
    let keep = std::env::var_os("KEEP").is_some_and(|value| !value.is_empty() && value != "0");
    let mut story = Story::new();
    let logs = parts::logs_root().map(|root| root.join("demo")).unwrap_or_default();
    let mut stage = None;
    let told = Box::pin(unless_interrupted(run_steps(&mut story, &mut stage))).await;
    let (code, reached) = match told {
        None => {
            drop(stage.take());
            story.print_note("Interrupted; everything is stopped.");
            return ExitCode::from(INTERRUPTED);
        }
        Some(Ok(verdict)) => {
            (if verdict.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE }, Ok(verdict))
        }
        Some(Err(error)) => (ExitCode::FAILURE, Err(error)),
    };
    match &reached {
        Ok(verdict) => verdict.print(&story),
        Err(error) => story.print_failure(error),
    }
    if let (true, Some(stage)) = (keep, &stage) {
        match reaper::outlive_us() {
            Ok(keeper) => {
                keep::keep_everything();
                if let Err(error) = mark_as_kept(keeper) {
                    story.print_failure(&error);
                }
                if let Err(error) = stage.print_how_to_go_on(&story, keeper) {
                    story.print_failure(&error);
                }
            }
            Err(error) => story.print_failure(&error),
        }
    } else {
        drop(stage.take());
        story.print_note(&format!("Everything is stopped; the logs are in {}", logs.display()));
    }
    code
}

/// Marks the logs as still in use for with-parts.sh, for as long as the keeper runs.
fn mark_as_kept(keeper: u32) -> Result<()> {
    let mark = parts::logs_root()?.join(".kept");
    std::fs::write(&mark, keeper.to_string()).with_context(|| format!("cannot write {}", mark.display()))
}

async fn run_steps(story: &mut Story, stage: &mut Option<DemoStage>) -> Result<DemoVerdict> {
    let mut verdict = DemoVerdict::default();
    let stage = stage.insert(DemoStage::start(story).await?);

    story.begin_step("One job, four images, three nodes");
    let (job, times) = run_job(story, stage, &scenario::first_job(), &scenario::MAIN).await?;
    report::print_times(story, &times);
    let status = job.status().await?;
    verdict.check_main_job(stage, &status);

    story.begin_step("What Kubernetes says");
    stage.print_jobs(story).await?;
    // `why` finds what is in the way.
    for (words, status) in
        [(String::from("nodes"), 0), (format!("why {OFFLINE_NODE} {}", scenario::MAIN.name), 1)]
    {
        story.print_blank_line();
        run_prepull(story, stage, &words, status).await?;
    }

    story.begin_step("What each containerd says");
    for node in &stage.nodes {
        let images = node.images().await?;
        report::print_images(story, node.name(), &images);
        verdict.check_node(stage, node.name(), &images);
    }
    verdict.check_registries(stage);

    story.begin_step("A wrong password fails its image, and no other");
    let (job, _) = run_job(story, stage, &scenario::second_job(), &scenario::SECOND).await?;
    story.print_blank_line();
    run_prepull(story, stage, &format!("failures {}", scenario::SECOND.name), 0).await?;
    let status = job.status().await?;
    let images = stage.nodes.first().context("no node")?.images().await?;
    verdict.check_second_job(stage, &status, &images);
    Box::pin(promise::show(story, &mut verdict)).await?;
    Ok(verdict)
}

/// Times of a job, counted from the moment that the API server had it.
struct DemoTimes {
    arrived: Option<Duration>,
    ended: Duration,
    phase: JobPhase,
}

/// Runs `kubectl prepull`, which must end with this status.
async fn run_prepull(story: &Story, stage: &DemoStage, words: &str, status: i32) -> Result<()> {
    let words = format!("kubectl prepull {words}");
    let ended = story.run(&words, stage.typed_command(&words)?).await?;
    ensure!(ended.code() == Some(status), "{words} has ended with {ended}, not with status {status}");
    Ok(())
}

/// Applies a job with kubectl, and follows it until it has ended.
async fn run_job(
    story: &Story,
    stage: &DemoStage,
    yaml: &str,
    plan: &scenario::DemoPlan,
) -> Result<(Job, DemoTimes)> {
    let file = stage.logs().join(format!("{}.yaml", plan.name));
    std::fs::write(&file, yaml)?;
    let path = file.display().to_string();
    plan.explain(story);
    story.print_command(&format!("kubectl apply -f {path}"));

    let job = stage.cluster.existing_job(plan.name);
    let shown = async {
        stage.cluster.kubectl(&["apply", "-f", &path]).await?;
        run_prepull(story, stage, &format!("status {} --watch", plan.name), plan.exit_status).await
    };
    // The watch begins before kubectl, which takes a moment to end, so that nothing is missed.
    let run = async { tokio::try_join!(watch_to_end(&job), shown) };
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
    let ((began, ended, phase), ()) = run??;
    let since = |at: Instant| at.saturating_duration_since(began);
    Ok((job.clone(), DemoTimes { arrived: arrived.map(since), ended: since(ended), phase }))
}

/// Watches a job; returns when it was created, when it ended, and its final phase.
async fn watch_to_end(job: &Job) -> Result<(Instant, Instant, JobPhase)> {
    job.exists().await?;
    let began = Instant::now();
    let mut phase = JobPhase::Init;
    job.watch(|status| {
        phase = status.phase;
        matches!(phase, JobPhase::Completed | JobPhase::Failure)
    })
    .await?;
    Ok((began, Instant::now(), phase))
}

/// Waits until the first task is in the ledger of an edge node, and returns when.
async fn first_arrival(stage: &DemoStage) -> Instant {
    while stage.nodes.iter().all(|node| node.open_tasks() == 0) {
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Instant::now()
}
