//! `kubectl prepull failures`.

use clap::Args;
use futures::TryStreamExt;
use jiff::Timestamp;
use prepull_api::crd::status::{JobImageStatus, NodePhase, NodeStatus, Tristate};
use prepull_api::failure::FailureCode;
use serde::Serialize;

use crate::amounts::format_age;
use crate::cluster::Cluster;
use crate::name::JobName;
use crate::output::OutputFormat;
use crate::progress::tally::reason_of;
use crate::screen::{Screen, sanitize_line};
use crate::session::{CommandOutcome, Session};
use crate::table::with_text;
use crate::{jobs, kruise, problem};

/// The arguments of `failures`.
#[derive(Debug, Args)]
#[command(after_help = "\
All nodes are listed, also those of large jobs; the status of a job holds only 200. -o wide adds the image that is
missing and how often it was tried; -o name prints names as kubectl takes them. docs/api.md explains the codes.

Examples:
  kubectl prepull failures spring-release
  kubectl prepull failures spring-release --reason NoSpace -o name | xargs kubectl describe
  kubectl prepull failures spring-release --reason 'connection refused' -o wide
  kubectl prepull failures imagelistpulljob/spring -n shop -o wide")]
pub(crate) struct FailuresArgs {
    /// The job; imagepulljob/NAME or imagelistpulljob/NAME for one of OpenKruise's.
    job: JobName,
    /// Only nodes with this code, or with this text in their reason.
    #[arg(long, value_name = "REASON")]
    reason: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeFailure {
    node: String,
    code: FailureCode,
    phase: NodePhase,
    reason: String,
    /// When it was known.
    #[serde(skip_serializing_if = "Option::is_none")]
    since: Option<Timestamp>,
    attempt: u32,
    /// The first image that is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    image: Option<String>,
    tries: u32,
}

pub(crate) async fn run(
    session: &Session,
    cluster: &Cluster,
    args: &FailuresArgs,
) -> anyhow::Result<CommandOutcome> {
    let (name, mut failures) = match &args.job {
        JobName::Own(name) => {
            let job = jobs::get(cluster, name).await?;
            let mut failures = Vec::new();
            let mut pages = std::pin::pin!(jobs::reports(cluster, &job));
            while let Some(page) = pages.try_next().await? {
                failures.extend(page.iter().flat_map(|report| failures_of(&report.body.node_status)));
            }
            (name.clone(), failures)
        }
        JobName::Kruise(name) => {
            let seen = kruise::read_job(cluster, name).await?;
            let nodes = seen.jobs.iter().flat_map(|(_, nodes)| failures_of(nodes));
            (name.to_string(), nodes.collect())
        }
    };
    if let Some(reason) = &args.reason {
        failures.retain(|failure| failure.matches_reason(reason));
    }
    failures.sort_by(|one, other| (one.code, &one.node).cmp(&(other.code, &other.node)));
    let output = session.global.output;
    if failures.is_empty() && matches!(output, None | Some(OutputFormat::Wide)) {
        let such = if args.reason.is_some() { " for this reason" } else { "" };
        problem::print_note(&format!("no node of job {name} has failed{such}"));
        return Ok(CommandOutcome::Done);
    }
    let names = failures.iter().map(|failure| format!("node/{}", failure.node));
    session.print(&failures, names, |wide| render(&failures, session.screen, wide, Timestamp::now()))?;
    Ok(CommandOutcome::Done)
}

fn failures_of(nodes: &[NodeStatus]) -> impl Iterator<Item = NodeFailure> {
    let has_failed = |node: &&NodeStatus| matches!(node.phase, NodePhase::Failure | NodePhase::Unknown);
    nodes.iter().filter(has_failed).map(NodeFailure::from_status)
}

impl NodeFailure {
    fn from_status(node: &NodeStatus) -> Self {
        let is_missing = |image: &&JobImageStatus| image.status == Tristate::False;
        let image = node.image_status.iter().find(is_missing);
        Self {
            node: node.node_name.clone(),
            code: node.code.unwrap_or(FailureCode::Other),
            phase: node.phase,
            reason: reason_of(node),
            since: node.action_flow.last().map(|action| action.time.0),
            attempt: node.attempt,
            image: image.map(|image| {
                // What was asked for: after the overriders.
                let pulled = Some(&image.pulled_image).filter(|pulled| !pulled.is_empty());
                sanitize_line(pulled.unwrap_or(&image.image))
            }),
            tries: image.map_or(0, |image| image.attempts),
        }
    }

    fn matches_reason(&self, reason: &str) -> bool {
        self.code.as_str().eq_ignore_ascii_case(reason)
            || self.reason.to_lowercase().contains(&reason.to_lowercase())
    }
}

fn render(failures: &[NodeFailure], screen: Screen, is_wide: bool, now: Timestamp) -> String {
    let mut head = vec!["NODE", "CODE", "SINCE", "ATTEMPT"];
    if is_wide {
        head.extend(["IMAGE", "TRIES"]);
    }
    head.push("REASON");
    let mut rows = vec![head.into_iter().map(str::to_owned).collect::<Vec<_>>()];
    rows.extend(failures.iter().map(|failure| {
        let since = format_age(failure.since, now);
        let mut row =
            vec![failure.node.clone(), failure.code.to_string(), since, failure.attempt.to_string()];
        if is_wide {
            row.extend([failure.image.clone().unwrap_or_else(|| "-".to_owned()), failure.tries.to_string()]);
        }
        row.push(failure.reason.clone());
        row
    }));
    with_text(&rows, screen.width)
}

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use prepull_api::crd::status::{Action, ActionStatus};

    use super::*;
    use crate::snapshot::assert_snapshot;

    const NOW: Timestamp = Timestamp::constant(1_795_000_000, 0);

    fn node(name: &str, phase: NodePhase, code: FailureCode, reason: &str, ago: i64) -> NodeStatus {
        let image = JobImageStatus {
            image: "shop/web:v2".to_owned(),
            pulled_image: "harbor.example/shop/web:v2".to_owned(),
            status: Tristate::False,
            reason: reason.to_owned(),
            attempts: 4,
            ..JobImageStatus::default()
        };
        NodeStatus {
            node_name: name.to_owned(),
            phase,
            code: Some(code),
            attempt: 2,
            action_flow: vec![ActionStatus {
                action: Action::Pull,
                status: Tristate::False,
                reason: String::new(),
                time: Time(NOW - SignedDuration::from_secs(ago)),
            }],
            image_status: if phase == NodePhase::Unknown { Vec::new() } else { vec![image] },
            reason: if phase == NodePhase::Unknown { reason.to_owned() } else { String::new() },
            ..NodeStatus::default()
        }
    }

    fn failures() -> Vec<NodeFailure> {
        let refused = "harbor.example/shop/web:v2: cannot connect to harbor.example:443: connection refused";
        let nodes = vec![
            node("edge-1", NodePhase::Failure, FailureCode::Unreachable, refused, 300),
            node("edge-2", NodePhase::Successful, FailureCode::Other, "", 300),
            node(
                "edge-17.factory.example",
                NodePhase::Unknown,
                FailureCode::NoResult,
                "no result by the deadline",
                7_300,
            ),
        ];
        failures_of(&nodes).collect()
    }

    #[test]
    fn failed_nodes_are_rows_that_fit() {
        for width in [80, 160] {
            for (name, is_wide) in [("table", false), ("wide", true)] {
                let text = render(&failures(), Screen::plain(width), is_wide, NOW);
                assert_snapshot(&format!("commands/failures/{name}-{width}.txt"), &text);
            }
        }
    }

    #[test]
    fn filters_by_code_or_part_of_reason() {
        let of = |reason: &str| failures().iter().filter(|failure| failure.matches_reason(reason)).count();
        assert_eq!((of("noresult"), of("Connection Refused"), of("NoSpace")), (1, 1, 0));
    }
}
