//! `kubectl prepull check`.

mod facts;
mod judge;
mod schema;
#[cfg(test)]
mod tests;

use anyhow::bail;
use clap::Args;
use jiff::Timestamp;

use crate::checklist::{Mark, render_points};
use crate::cluster::Cluster;
use crate::output::OutputFormat;
use crate::problem::{self, WrongUsage};
use crate::screen::{Screen, Tone, wrap};
use crate::session::{CommandOutcome, Session};
use judge::{CheckReport, judge_facts};

/// The arguments of `check`.
#[derive(Debug, Args)]
#[command(after_help = "\
Goes through what pulling ahead needs: the definitions, your rights, the leader and the way to it, other controllers that serve
the same kinds, and the edges. ✓ is as it should be, ✗ is wrong, with the remedy below it, ! could not be looked at or is
for you to judge. Without a right its point is a !. The ClusterRole and the Role prepull-checker have what it reads beyond the
ClusterRole prepull-viewer: manifests/kubectl-prepull/checker.yaml. Bind all three.

Examples:
  kubectl prepull check
  kubectl prepull check --system-namespace prepull && kubectl prepull run nginx:1.27
  kubectl prepull check -o json | jq '.sections[].points[] | select(.mark == \"bad\")'

Exit status: 0, or 1 if something is wrong (✗).")]
pub(crate) struct CheckArgs {}

pub(crate) async fn run(session: &Session, cluster: &Cluster) -> anyhow::Result<CommandOutcome> {
    if session.global.output == Some(OutputFormat::Name) {
        bail!(WrongUsage("-o name: what is checked has no names; there are json and yaml".to_owned()));
    }
    let checked = judge_facts(&facts::read(cluster).await?, Timestamp::now());
    problem::unless_unread(session.print(&checked, [], |_| render(&checked, session.screen)))?;
    Ok(if checked.wrong == 0 { CommandOutcome::Done } else { CommandOutcome::Failed })
}

fn render(checked: &CheckReport, screen: Screen) -> String {
    let mut text = Vec::new();
    for section in &checked.sections {
        text.push(screen.paint.with_tone(Tone::Bold, section.title));
        text.extend(render_points(&section.points, screen, true));
        text.push(String::new());
    }
    let (sum, tone) = match (checked.wrong, checked.is_open()) {
        (0, false) => ("All is well.".to_owned(), Tone::Good),
        (0, true) => ("Nothing is wrong, as far as could be looked.".to_owned(), Tone::Good),
        (1, _) => ("1 thing is wrong (✗).".to_owned(), Tone::Bad),
        (wrong, _) => (format!("{wrong} things are wrong (✗)."), Tone::Bad),
    };
    text.extend(
        wrap(&sum, screen.width.unwrap_or(usize::MAX)).iter().map(|line| screen.paint.with_tone(tone, line)),
    );
    format!("{}\n", text.join("\n"))
}

impl CheckReport {
    fn is_open(&self) -> bool {
        self.sections.iter().flat_map(|section| &section.points).any(|point| point.mark == Mark::Open)
    }
}
