//! `kubectl prepull completion`.

use anyhow::bail;
use clap::{Args, Command, ValueEnum};
use clap_complete::Shell;

use crate::problem::WrongUsage;
use crate::session::CommandOutcome;

/// The arguments of `completion`.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  kubectl prepull completion bash > /etc/bash_completion.d/kubectl-prepull"
)]
pub(crate) struct CompletionArgs {
    /// The shell [default: that of $SHELL].
    shell: Option<Shell>,
}

/// Prints the script for `command`, the whole program.
pub(crate) fn run(args: &CompletionArgs, command: Command) -> anyhow::Result<CommandOutcome> {
    let Some(shell) = args.shell.or_else(Shell::from_env) else {
        let shells: Vec<_> = Shell::value_variants().iter().map(ToString::to_string).collect();
        bail!(WrongUsage(format!("$SHELL names no known shell: give one of {}", shells.join(", "))))
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command.bin_name("kubectl-prepull"), "kubectl-prepull", &mut script);
    crate::output::print(&String::from_utf8_lossy(&script))?;
    Ok(CommandOutcome::Done)
}
