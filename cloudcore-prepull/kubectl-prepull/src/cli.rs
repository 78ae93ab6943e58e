//! The command line: the flags of all commands, and the list of commands.

use clap::{Parser, Subcommand};

use crate::commands::allow::AllowArgs;
use crate::commands::check::CheckArgs;
use crate::commands::completion::CompletionArgs;
use crate::commands::delta::DeltaArgs;
use crate::commands::events::EventsArgs;
use crate::commands::failures::FailuresArgs;
use crate::commands::from::FromArgs;
use crate::commands::list::ListArgs;
use crate::commands::node::NodeArgs;
use crate::commands::nodes::NodesArgs;
use crate::commands::plan::PlanCommandArgs;
use crate::commands::rates::RatesArgs;
use crate::commands::remove::RemoveArgs;
use crate::commands::run::RunArgs;
use crate::commands::set::SetArgs;
use crate::commands::sites::SitesArgs;
use crate::commands::status::StatusArgs;
use crate::commands::tokens::TokensArgs;
use crate::commands::upgrade::UpgradeArgs;
use crate::commands::verify::VerifyArgs;
use crate::commands::why::WhyArgs;
use crate::name::OwnJob;
use crate::session::GlobalArgs;
use crate::ui::command::UiArgs;

/// Starts, follows and mends image pre-pull jobs.
#[derive(Debug, Parser)]
#[command(
    name = "kubectl-prepull",
    bin_name = "kubectl prepull",
    version,
    about,
    propagate_version = true,
    after_help = "\
Examples:
  kubectl prepull run harbor.example/shop/web:v2 -l site=factory --concurrency 10%
  kubectl prepull from -f app.yaml --apply-then
  kubectl prepull status spring --watch
  kubectl prepull failures spring
  kubectl prepull retry spring

Exit status: 0 done, 1 failed, 2 wrong usage, 3 the time was over, 130 after Ctrl-C."
)]
pub(crate) struct Cli {
    /// The flags of all commands.
    #[command(flatten)]
    pub(crate) global: GlobalArgs,
    /// The command.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Make a job that pulls images ahead, and follow it.
    Run(Box<RunArgs>),
    /// Make a job of the images of a workload that is about to be rolled out.
    From(Box<FromArgs>),
    /// Make a job that removes images, and follow it; --preview for what that would free.
    Remove(Box<RemoveArgs>),
    /// Make a job that upgrades the agents of nodes, and follow it; they go back by themselves.
    Upgrade(Box<UpgradeArgs>),
    /// Show what a job would do: what each node would pull, from where, with which secret; --sizes for how much.
    Plan(PlanCommandArgs),
    /// List the jobs, with their phase and their nodes.
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Show how far a job is, and what failed; --watch follows it.
    Status(StatusArgs),
    /// List the nodes of a job that failed, and why.
    Failures(FailuresArgs),
    /// List the events of a job and of its nodes, in order.
    Events(EventsArgs),
    /// Try the nodes of a job that has ended again, as far as they lack an image.
    #[command(after_help = "\
The nodes that failed, are unknown or never started are tried again; what is on a node already is not pulled again. A job
with a refused spec is corrected instead (`kubectl edit ippj JOB`): it is looked at again after each edit. Images that were
removed since are found by `verify`. Where the job ended before all rounds of its `spec.retry` were used, as after its
deadline, those that are left follow as far as nodes fail again.

Example:
  kubectl prepull retry spring-release && kubectl prepull status spring-release --watch")]
    Retry(OwnJob),
    /// Ask the nodes of a job that has ended whether their images are still there; nothing is downloaded.
    Verify(VerifyArgs),
    /// Change the settings of a job while it runs: its rate, concurrency, secret, windows and others.
    Set(SetArgs),
    /// Let jobs use a secret, beside those that may use it already.
    Allow(AllowArgs),
    /// Start no further node of a job; those that have started go on to their end.
    #[command(after_help = "Example:\n  kubectl prepull suspend spring-release")]
    Suspend(OwnJob),
    /// Stop the downloads of a job, and start no further node; what has been downloaded is kept.
    #[command(after_help = "\
The uplink is free within seconds, where a node is connected; one that is not connected learns it when it comes back. `resume`
lets all go on where they stopped, and each node has its whole time again. `suspend` leaves nodes at work.

Example:
  kubectl prepull pause spring-release")]
    Pause(OwnJob),
    /// Let a suspended or paused job go on.
    #[command(after_help = "Example:\n  kubectl prepull resume spring-release")]
    Resume(OwnJob),
    /// End a job now: nodes that are pulling stop, and no further one starts.
    #[command(after_help = "\
The job becomes a Failure with the reason Cancelled, within a second or two, and keeps its record. Nodes that wait never start,
also those of a suspended job. That is for good: neither `retry` nor `resume` takes it up again; for that, create a new job. What
nodes have downloaded of an unfinished image is kept for a day. `kubectl delete ippj JOB` deletes the record as well.

Example:
  kubectl prepull cancel spring-release")]
    Cancel(OwnJob),
    /// List the edges: since when they are connected, their versions, disks and certificates.
    Nodes(NodesArgs),
    /// List the sites whose nodes share layers: what fills an uplink now, and how much neighbours have shared.
    Sites(SitesArgs),
    /// Show what fills the uplinks now: the rates of sites, nodes and jobs, the busiest first.
    Rates(RatesArgs),
    /// Go through what must be true for a node, and say what to do next.
    Why(WhyArgs),
    /// Show all jobs, their nodes and the edges in the browser, live.
    Ui(UiArgs),
    /// Create, list and revoke the tokens with which edge nodes join.
    #[command(visible_alias = "token")]
    Tokens(TokensArgs),
    /// Keep a node out whose machine was stolen or copied, or let it in again.
    Node(NodeArgs),
    /// Make an update small: push the differences between two images beside the new one.
    Delta(Box<DeltaArgs>),
    /// Look for what is wrong with the installation, and say the remedies.
    Check(CheckArgs),
    /// Print the completion script for a shell.
    Completion(CompletionArgs),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_has_examples_in_its_help() {
        for command in Cli::command().get_subcommands() {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(
                help.contains("Example") && help.contains("  kubectl prepull "),
                "{}",
                command.get_name()
            );
        }
    }
}
