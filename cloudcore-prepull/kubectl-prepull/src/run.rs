//! The program from its arguments to its exit status.

use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use crate::cli::{Cli, Command};
use crate::cluster::Cluster;
use crate::commands;
use crate::complete;
use crate::problem;
use crate::screen::Screen;
use crate::session::{CommandOutcome, Session};
use crate::ui;

const FAILED: u8 = 1;
/// The exit status of a wrong usage, which is also clap's.
const WRONG_USAGE: u8 = 2;

/// Runs the program.
pub fn main() -> ExitCode {
    // A second install is refused and harmless: the first one is the same.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let arguments: Vec<_> = std::env::args_os().collect();
    let outcome = if let Some(words) = complete::asked_for(&arguments) {
        block_on(async move { complete::run(&words).await.map(|()| CommandOutcome::Done) })
    } else {
        let Cli { global, command } = Cli::parse_from(arguments);
        let session = Session { screen: Screen::of_stdout(global.no_color), global };
        block_on(run(&session, command))
    };
    match outcome {
        Ok(ended) => ExitCode::from(ended.exit_code()),
        // `kubectl prepull … | head` has what it wants.
        Err(error) if problem::is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            problem::print_error(&error);
            ExitCode::from(if error.is::<problem::WrongUsage>() { WRONG_USAGE } else { FAILED })
        }
    }
}

fn block_on(work: impl Future<Output = anyhow::Result<CommandOutcome>>) -> anyhow::Result<CommandOutcome> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
}

async fn run(session: &Session, command: Command) -> anyhow::Result<CommandOutcome> {
    if let Command::Completion(args) = command {
        return commands::completion::run(&args, Cli::command());
    }
    if let Command::Delta(args) = command {
        return Box::pin(commands::delta::run(session, &args)).await;
    }
    let cluster = Cluster::connect(&session.global).await?;
    let outcome = match command {
        Command::Run(args) => commands::run::run(session, &cluster, &args).await,
        Command::Remove(args) => commands::remove::run(session, &cluster, &args).await,
        Command::Upgrade(args) => commands::upgrade::run(session, &cluster, &args).await,
        Command::From(args) => commands::from::run(session, &cluster, &args).await,
        Command::Plan(args) => commands::plan::run(session, &cluster, &args).await,
        Command::List(args) => commands::list::run(session, &cluster, &args).await,
        Command::Set(args) => commands::set::run(session, &cluster, &args).await,
        Command::Allow(args) => commands::allow::run(session, &cluster, &args).await,
        Command::Status(args) => commands::status::run(session, &cluster, &args).await,
        Command::Failures(args) => commands::failures::run(session, &cluster, &args).await,
        Command::Events(args) => commands::events::run(session, &cluster, &args).await,
        Command::Retry(args) => commands::retry::run(session, &cluster, &args).await,
        Command::Verify(args) => commands::verify::run(session, &cluster, &args).await,
        Command::Suspend(args) => commands::suspend::run(session, &cluster, &args).await,
        Command::Pause(args) => commands::pause::run(session, &cluster, &args).await,
        Command::Resume(args) => commands::resume::run(session, &cluster, &args).await,
        Command::Cancel(args) => commands::cancel::run(session, &cluster, &args).await,
        Command::Nodes(args) => commands::nodes::run(session, &cluster, &args).await,
        Command::Sites(args) => commands::sites::run(session, &cluster, &args).await,
        Command::Rates(args) => commands::rates::run(session, &cluster, &args).await,
        Command::Why(args) => commands::why::run(session, &cluster, &args).await,
        Command::Ui(args) => return Box::pin(ui::command::run(session, cluster, &args)).await,
        Command::Tokens(args) => commands::tokens::run(session, &cluster, args).await,
        Command::Node(args) => commands::node::run(session, &cluster, args).await,
        Command::Check(_) => commands::check::run(session, &cluster).await,
        Command::Completion(_) | Command::Delta(_) => Ok(CommandOutcome::Done), // ran above, without a cluster
    };
    outcome.map_err(|error| problem::explain(error, cluster.place()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_manual_has_each_exit_status() {
        let codes = [
            CommandOutcome::Done.exit_code(),
            FAILED,
            WRONG_USAGE,
            CommandOutcome::TimedOut.exit_code(),
            CommandOutcome::Interrupted.exit_code(),
        ];
        assert_eq!(CommandOutcome::Failed.exit_code(), FAILED);
        let manual = include_str!("../../../docs/kubectl-prepull.md");
        let (_, table) = manual.split_once("| exit status | |\n|---|---|\n").unwrap();
        let (table, _) = table.split_once("\n\n").unwrap();
        let listed: Vec<u8> =
            table.lines().map(|row| row.split('|').nth(1).unwrap().trim().parse().unwrap()).collect();
        assert_eq!(listed, codes);
        let help = Cli::command().get_after_help().unwrap().to_string();
        let (_, help) = help.split_once("Exit status: ").unwrap();
        for code in codes {
            assert!(help.contains(&format!("{code} ")), "{code}: {help}");
        }
        // A command that says more of them says no others.
        for command in Cli::command().get_subcommands() {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let Some((_, said)) = help.split_once("Exit status: ") else { continue };
            let numbers =
                said.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse::<u8>().ok());
            assert!(
                numbers.into_iter().all(|number| codes.contains(&number)),
                "{}: {said}",
                command.get_name()
            );
        }
    }
}
