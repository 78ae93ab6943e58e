//! `kubectl prepull events`.

use std::collections::BTreeSet;

use clap::Args;
use futures::TryStreamExt;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Event;
use prepull_api::crd::job::ImagePrePullJob;

use crate::amounts::format_age;
use crate::cluster::Cluster;
use crate::events::{EventRow, read_events};
use crate::name::JobName;
use crate::screen::Screen;
use crate::session::{CommandOutcome, Session};
use crate::table::with_text;
use crate::{jobs, kruise, problem};

/// The arguments of `events`.
#[derive(Debug, Args)]
#[command(after_help = "\
Kubernetes keeps events for an hour, unless the API server is set otherwise. Of the job's nodes, those since the job was made
are shown. -o wide adds how often each was seen.

Examples:
  kubectl prepull events spring-release
  kubectl prepull events imagepulljob/spring -n shop
  kubectl prepull events spring-release -o json | jq '.[] | select(.type == \"Warning\")'")]
pub(crate) struct EventsArgs {
    /// The job; imagepulljob/NAME or imagelistpulljob/NAME for one of OpenKruise's.
    job: JobName,
}

pub(crate) async fn run(
    session: &Session,
    cluster: &Cluster,
    args: &EventsArgs,
) -> anyhow::Result<CommandOutcome> {
    let (name, rows) = match &args.job {
        JobName::Own(name) => (name.clone(), of_job_and_nodes(cluster, name).await?),
        JobName::Kruise(name) => {
            let seen = kruise::read_job(cluster, name).await?;
            (seen.name().to_string(), kruise::events(cluster, &seen).await?)
        }
    };
    if rows.is_empty() && !session.is_for_programs() {
        problem::print_note(&format!("there are no events of job {name} (any more)"));
        return Ok(CommandOutcome::Done);
    }
    let objects: BTreeSet<_> = rows.iter().map(|row| row.object.clone()).collect();
    session.print(&rows, objects, |is_wide| render(&rows, session.screen, is_wide, Timestamp::now()))?;
    Ok(CommandOutcome::Done)
}

async fn of_job_and_nodes(cluster: &Cluster, name: &str) -> anyhow::Result<Vec<EventRow>> {
    let job = jobs::get(cluster, name).await?;
    let mut nodes = BTreeSet::new();
    let mut pages = std::pin::pin!(jobs::reports(cluster, &job));
    while let Some(page) = pages.try_next().await? {
        nodes.extend(page.into_iter().flat_map(|report| report.body.node_status).map(|node| node.node_name));
    }
    let since = job.metadata.creation_timestamp.as_ref().map(|time| time.0);
    let mut rows = of_job(cluster, &job).await?;
    if !nodes.is_empty() {
        let of_nodes = read_events(cluster, None, "involvedObject.kind=Node").await?;
        let of_job =
            |event: &&Event| event.involved_object.name.as_ref().is_some_and(|name| nodes.contains(name));
        rows.extend(of_nodes.iter().filter(of_job).map(EventRow::from_event).filter(|row| row.time >= since));
    }
    rows.sort();
    Ok(rows)
}

pub(crate) async fn of_job(cluster: &Cluster, job: &ImagePrePullJob) -> anyhow::Result<Vec<EventRow>> {
    let uid = job.metadata.uid.as_deref().unwrap_or_default();
    Ok(read_events(cluster, None, &format!("involvedObject.uid={uid}"))
        .await?
        .iter()
        .map(EventRow::from_event)
        .collect())
}

fn render(rows: &[EventRow], screen: Screen, is_wide: bool, now: Timestamp) -> String {
    let mut head = vec!["AGO", "TYPE", "REASON", "OBJECT"];
    if is_wide {
        head.push("COUNT");
    }
    head.push("MESSAGE");
    let mut lines = vec![head.into_iter().map(str::to_owned).collect::<Vec<_>>()];
    lines.extend(rows.iter().map(|row| {
        let mut line =
            vec![format_age(row.time, now), row.kind.clone(), row.reason.clone(), row.object.clone()];
        if is_wide {
            line.push(row.count.to_string());
        }
        line.push(row.message.clone());
        line
    }));
    with_text(&lines, screen.width)
}

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;
    use k8s_openapi::api::core::v1::ObjectReference;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;
    use crate::snapshot::assert_snapshot;

    const NOW: Timestamp = Timestamp::constant(1_795_000_000, 0);

    fn row(kind: &str, name: &str, reason: &str, message: &str, ago: i64) -> EventRow {
        let object = ObjectReference {
            kind: Some(kind.to_owned()),
            name: Some(name.to_owned()),
            ..ObjectReference::default()
        };
        EventRow::from_event(&Event {
            involved_object: object,
            type_: Some(if reason.starts_with("Node") { "Warning" } else { "Normal" }.to_owned()),
            reason: Some(reason.to_owned()),
            message: Some(message.to_owned()),
            last_timestamp: Some(Time(NOW - SignedDuration::from_secs(ago))),
            ..Event::default()
        })
    }

    #[test]
    fn events_are_sorted_and_fit_the_screen() {
        let long = "2 nodes are skipped: edge-90 (NotReady), edge-91 (NotReady); see status.skippedNodes";
        let mut rows = vec![
            row("Node", "edge-3", "NodeNotReady", "Node edge-3 status is now: NodeNotReady", 40),
            row("ImagePrePullJob", "spring-release", "NodesSkipped", long, 250),
            row("ImagePrePullJob", "spring-release", "Started", "100 nodes are selected", 252),
        ];
        rows.sort();
        assert_eq!(rows[0].reason, "Started");
        for width in [80, 160] {
            let text = render(&rows, Screen::plain(width), width == 160, NOW);
            assert_snapshot(&format!("commands/events/table-{width}.txt"), &text);
        }
    }
}
