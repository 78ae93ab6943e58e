//! The command line: the flags of all commands, and the list of commands.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::commands::cancel::CancelArgs;
use crate::commands::check::CheckArgs;
use crate::commands::completion::CompletionArgs;
use crate::commands::events::EventsArgs;
use crate::commands::failures::FailuresArgs;
use crate::commands::from::FromArgs;
use crate::commands::node::NodeArgs;
use crate::commands::nodes::NodesArgs;
use crate::commands::resume::ResumeArgs;
use crate::commands::retry::RetryArgs;
use crate::commands::run::RunArgs;
use crate::commands::status::StatusArgs;
use crate::commands::suspend::SuspendArgs;
use crate::commands::tokens::TokensArgs;
use crate::commands::ui::UiArgs;
use crate::commands::verify::VerifyArgs;
use crate::commands::why::WhyArgs;

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
  kubectl prepull status web-v2 --watch
  kubectl prepull failures web-v2
  kubectl prepull retry web-v2

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
    /// Show how far a job is, and what failed; --watch follows it.
    Status(StatusArgs),
    /// List the nodes of a job that failed, and why.
    Failures(FailuresArgs),
    /// List the events of a job and of its nodes, in order.
    Events(EventsArgs),
    /// Try the nodes of a job that has ended again, as far as they lack an image.
    Retry(RetryArgs),
    /// Ask the nodes of a job that has ended whether their images are still there; nothing is downloaded.
    Verify(VerifyArgs),
    /// Start no further node of a job; those that have started go on to their end.
    Suspend(SuspendArgs),
    /// Let a suspended job go on.
    Resume(ResumeArgs),
    /// End a job now: nodes that are pulling are told to stop, and no further one starts.
    Cancel(CancelArgs),
    /// List the edges: since when they are connected, their versions, disks and certificates.
    Nodes(NodesArgs),
    /// Go through what must be true for a node, and say what to do next.
    Why(WhyArgs),
    /// Show all jobs, their nodes and the edges in the browser, live.
    Ui(UiArgs),
    /// Create, list and revoke the tokens with which edge nodes join.
    #[command(visible_alias = "token")]
    Tokens(TokensArgs),
    /// Keep a node out whose machine was stolen or copied, or let it in again.
    Node(NodeArgs),
    /// Look for what is wrong with the installation, and say the remedies.
    Check(CheckArgs),
    /// Print the completion script for a shell, or say how kubectl completes this command.
    Completion(CompletionArgs),
}

#[derive(Clone, Debug, Default, Args)]
pub(crate) struct GlobalArgs {
    /// Namespace of what the command names, where that has one [default: that of the context].
    #[arg(short, long, global = true, value_name = "NAME")]
    pub(crate) namespace: Option<String>,
    /// Context of the kubeconfig [default: the current one].
    #[arg(long, global = true, value_name = "NAME")]
    pub(crate) context: Option<String>,
    /// Kubeconfig file [default: $KUBECONFIG, ~/.kube/config, or the ServiceAccount of the pod].
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// What is printed [default: text for people].
    #[arg(short, long, global = true, value_enum, value_name = "FORMAT")]
    pub(crate) output: Option<Output>,
    /// No colours. There are none either where the output is no terminal or `NO_COLOR` is set.
    #[arg(long, global = true)]
    pub(crate) no_color: bool,
}

/// What is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// JSON for programs
    Json,
    /// YAML for programs
    Yaml,
    /// Only names, as kubectl takes them
    Name,
    /// Text for people, with more columns
    Wide,
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
