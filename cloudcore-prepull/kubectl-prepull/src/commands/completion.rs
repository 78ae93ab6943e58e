//! `kubectl prepull completion`.

use clap::{Args, Command};
use clap_complete::Shell;

use crate::session::Ended;

/// The arguments of `completion`.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  kubectl prepull completion bash > /etc/bash_completion.d/kubectl-prepull"
)]
pub(crate) struct CompletionArgs {
    /// The shell.
    shell: Shell,
}

/// Prints the script for `command`, the whole program.
pub(crate) fn run(args: &CompletionArgs, command: Command) -> anyhow::Result<Ended> {
    let mut script = Vec::new();
    clap_complete::generate(
        args.shell,
        &mut command.bin_name("kubectl-prepull"),
        "kubectl-prepull",
        &mut script,
    );
    crate::output::print(&String::from_utf8_lossy(&script))?;
    Ok(Ended::Done)
}
