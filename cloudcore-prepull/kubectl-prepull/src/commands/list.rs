//! `kubectl prepull list`.

use std::pin::pin;

use anyhow::Context;
use clap::Args;
use futures::TryStreamExt;
use jiff::Timestamp;
use kube::ResourceExt;
use kube::api::{Api, ListParams};
use prepull_api::crd::kruise::{ImageListPullJob, ImagePullJob};
use prepull_api::crd::status::Summary;
use prepull_program::table::align_columns;
use serde::Serialize;

use crate::amounts::format_age;
use crate::cluster::Cluster;
use crate::pages::pages;
use crate::progress::render::phase_of;
use crate::progress::tally::Tally;
use crate::progress::view::JobView;
use crate::screen::{Screen, Tone, truncate_text};
use crate::session::{CommandOutcome, Session};
use crate::table::GAP;
use crate::{jobs, kruise, problem};

/// Jobs of one page: each has at most 320 KiB in its status.
const JOBS_OF_A_PAGE: u32 = 20;

/// The arguments of `list`.
#[derive(Debug, Args)]
#[command(after_help = "\
ImagePrePullJobs, which have no namespace, and OpenKruise's jobs of the namespace where the cluster has its API; those of a
list are one row. NODES are those that succeeded, of all. What runs is first, then what has ended last.

Examples:
  kubectl prepull list
  kubectl prepull list -A -o wide
  kubectl prepull list -o json | jq -r '.[] | select(.nodes.failure > 0) | .name'")]
pub(crate) struct ListArgs {
    /// OpenKruise's jobs of all namespaces.
    #[arg(short = 'A', long)]
    all_namespaces: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct ListedJob {
    /// As the other commands take it.
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
    phase: String,
    nodes: Summary,
    #[serde(skip_serializing_if = "Option::is_none")]
    created: Option<Timestamp>,
    images: Vec<String>,
    #[serde(skip_serializing_if = "String::is_empty")]
    reason: String,
    #[serde(skip)]
    is_over: bool,
    #[serde(skip)]
    tone: Tone,
    #[serde(skip)]
    full_name: String,
}

impl ListedJob {
    fn new(view: JobView, object: &impl ResourceExt) -> Self {
        let (phase, tone) = phase_of(&view);
        Self {
            phase: phase.to_owned(),
            tone,
            created: object.creation_timestamp().map(|time| time.0),
            full_name: view.full_name(),
            name: view.job,
            namespace: view.namespace,
            nodes: view.nodes,
            images: view.images,
            reason: view.reason,
            is_over: view.is_over,
        }
    }
}

pub(crate) async fn run(
    session: &Session,
    cluster: &Cluster,
    args: &ListArgs,
) -> anyhow::Result<CommandOutcome> {
    let now = Timestamp::now();
    let mut rows = Vec::new();
    let mut own = pin!(pages(jobs::api(cluster), ListParams::default().limit(JOBS_OF_A_PAGE)));
    while let Some(page) = own.try_next().await.context("the jobs cannot be read")? {
        rows.extend(
            page.iter().map(|job| ListedJob::new(JobView::new(job, &Tally::default(), None, now), job)),
        );
    }
    match of_kruise(cluster, args.all_namespaces, now).await {
        Ok(others) => rows.extend(others),
        // Few clusters have OpenKruise's API.
        Err(error) if problem::server_answer(&error).is_some_and(problem::is_unserved) => {}
        Err(error) => {
            let why = problem::error_text(&problem::explain(error, cluster.place()));
            problem::print_note(&format!("OpenKruise's jobs are left out: {why}"));
        }
    }
    sort(&mut rows);
    let names: Vec<_> = rows.iter().map(|row| row.full_name.clone()).collect();
    session.print(&rows, names, |wide| render(&rows, session.screen, wide, now))?;
    Ok(CommandOutcome::Done)
}

/// What runs comes first, and of equals the newest.
fn sort(rows: &mut [ListedJob]) {
    rows.sort_by(|one, other| {
        (one.is_over, other.created, &one.name).cmp(&(other.is_over, one.created, &other.name))
    });
}

/// OpenKruise's jobs, those of a list as one.
async fn of_kruise(cluster: &Cluster, is_everywhere: bool, now: Timestamp) -> anyhow::Result<Vec<ListedJob>> {
    let namespace = Some(cluster.namespace()).filter(|_| !is_everywhere);
    let lists: Api<ImageListPullJob> = match namespace {
        Some(namespace) => Api::namespaced(cluster.client(), namespace),
        None => Api::all(cluster.client()),
    };
    let asked = || ListParams::default().limit(JOBS_OF_A_PAGE);
    let lists: Vec<_> = pages(lists, asked()).try_concat().await?;
    let jobs: Vec<ImagePullJob> = pages(kruise::api(cluster, namespace), asked()).try_concat().await?;
    let mut rows = Vec::new();
    for list in &lists {
        let parts: Vec<_> = jobs.iter().filter(|job| kruise::is_of_list(job, list)).collect();
        rows.push(ListedJob::new(kruise::view_of_list(list, &parts, now), list));
    }
    for job in jobs.iter().filter(|job| !lists.iter().any(|list| kruise::is_of_list(job, list))) {
        rows.push(ListedJob::new(kruise::view_of_job(job, now), job));
    }
    Ok(rows)
}

fn render(rows: &[ListedJob], screen: Screen, is_wide: bool, now: Timestamp) -> String {
    if rows.is_empty() {
        return "There is no job: kubectl prepull run IMAGE makes one.\n".to_owned();
    }
    let has_namespaces = rows.iter().any(|row| row.namespace.is_some());
    let mut head = vec!["NAME"];
    if has_namespaces {
        head.push("NAMESPACE");
    }
    head.extend(["PHASE", "NODES", "FAILED", "AGE"]);
    if is_wide {
        head.extend(["SKIPPED", "PENDING", "RUNNING", "UNKNOWN", "REASON"]);
    }
    let mut table = vec![head.into_iter().map(str::to_owned).collect::<Vec<_>>()];
    table.extend(rows.iter().map(|row| {
        let nodes = &row.nodes;
        let mut cells = vec![row.name.clone()];
        if has_namespaces {
            cells.push(row.namespace.clone().unwrap_or_else(|| "-".to_owned()));
        }
        cells.push(row.phase.clone());
        cells.push(format!("{} of {}", nodes.successful, nodes.desired));
        cells.extend([nodes.failure.to_string(), format_age(row.created, now)]);
        if is_wide {
            let more = [nodes.skipped, nodes.pending, nodes.in_progress, nodes.unknown];
            cells.extend(more.map(|number| number.to_string()));
            cells.push(row.reason.clone());
        }
        cells
    }));
    let tones = std::iter::once(Tone::Bold).chain(rows.iter().map(|row| row.tone));
    let aligned = align_columns(&table, GAP);
    let lines = aligned.lines().zip(tones).map(|(line, tone)| {
        let line = screen
            .width
            .filter(|_| !is_wide)
            .map_or_else(|| line.to_owned(), |width| truncate_text(line, width));
        if tone == Tone::Good { line } else { screen.paint.with_tone(tone, line.trim_end()) }
    });
    format!("{}\n", lines.collect::<Vec<_>>().join("\n"))
}

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use prepull_api::crd::status::JobPhase;

    use super::*;
    use crate::snapshot::assert_snapshot;

    const NOW: Timestamp = Timestamp::constant(1_795_000_000, 0);

    fn row(name: &str, phase: JobPhase, (successful, failure): (u32, u32), ago: i64) -> ListedJob {
        let is_over = matches!(phase, JobPhase::Completed | JobPhase::Failure);
        let nodes = Summary { desired: 2_000, successful, failure, skipped: 3, ..Summary::default() };
        let reason = if failure > 0 { "1200 of 2000 nodes failed".to_owned() } else { String::new() };
        let view = JobView { job: name.to_owned(), phase, is_over, nodes, reason, ..JobView::default() };
        let mut object = ImagePullJob::default();
        object.metadata.creation_timestamp = Some(Time(NOW - SignedDuration::from_secs(ago)));
        ListedJob::new(view, &object)
    }

    fn rows() -> Vec<ListedJob> {
        let mut rows = vec![
            row("web-v1", JobPhase::Completed, (2_000, 0), 900_000),
            row("web-v2", JobPhase::Failure, (800, 1_200), 7_300),
            row("shop-frontend-v2026.11.22-rc1", JobPhase::InProgress, (14, 0), 20_000),
        ];
        sort(&mut rows);
        rows
    }

    #[test]
    fn jobs_are_rows_that_fit() {
        for width in [80, 160] {
            let text = render(&rows(), Screen::plain(width), false, NOW);
            assert_snapshot(&format!("commands/list/table-{width}.txt"), &text);
        }
        let mut with_kruise = rows();
        with_kruise[0].namespace = Some("shop".to_owned());
        let text = render(&with_kruise, Screen::plain(160), true, NOW);
        assert_snapshot("commands/list/wide-160.txt", &text);
    }

    #[test]
    fn what_runs_comes_first_then_the_newest() {
        let names: Vec<_> = rows().into_iter().map(|row| row.name).collect();
        assert_eq!(names, ["shop-frontend-v2026.11.22-rc1", "web-v2", "web-v1"]);
    }
}
