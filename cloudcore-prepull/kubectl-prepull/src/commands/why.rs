//! `kubectl prepull why`.

mod facts;
mod judge;
#[cfg(test)]
mod tests;

use clap::Args;
use jiff::Timestamp;

use crate::checklist::render_points;
use crate::cluster::Cluster;
use crate::name::JobName;
use crate::problem;
use crate::screen::{Screen, Tone, wrap};
use crate::session::{CommandOutcome, Session};
use judge::{Why, judge_facts};

/// The arguments of `why`.
#[derive(Debug, Args)]
#[command(after_help = "\
Without a job, the jobs that run and the last one that the node took part in are looked at. ✓ is as it should be, ✗ is in the
way, ! could not be looked at or is for you to judge. The last line is what to do next.

Examples:
  kubectl prepull why edge-7
  kubectl prepull why edge-7 spring-release
  kubectl prepull why edge-7 imagepulljob/spring -n shop
  kubectl prepull why edge-7 -o json | jq -r .next

Exit status: 0, or 1 if something is in the way (✗), or if neither node, edge nor jobs can be read.")]
pub(crate) struct WhyArgs {
    /// The node.
    node: String,
    /// The job; imagepulljob/NAME or imagelistpulljob/NAME for one of OpenKruise's.
    job: Option<JobName>,
}

pub(crate) async fn run(
    session: &Session,
    cluster: &Cluster,
    args: &WhyArgs,
) -> anyhow::Result<CommandOutcome> {
    let facts = facts::read(cluster, &args.node, args.job.as_ref()).await?;
    let why = judge_facts(&facts, Timestamp::now());
    let names = [format!("node/{}", why.node)];
    problem::unless_unread(session.print(&why, names, |_| render(&why, session.screen)))?;
    Ok(if why.is_clear() { CommandOutcome::Done } else { CommandOutcome::Failed })
}

fn render(why: &Why, screen: Screen) -> String {
    let mut text = render_points(&why.points, screen, false);
    text.push(String::new());
    let next = format!("Next: {}", why.next);
    let next = wrap(&next, screen.width.unwrap_or(usize::MAX));
    text.extend(next.iter().map(|line| screen.paint.with_tone(Tone::Bold, line)));
    format!("{}\n", text.join("\n"))
}
