//! `kubectl prepull completion`.

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::cli::Cli;
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

pub(crate) fn run(args: &CompletionArgs) -> anyhow::Result<Ended> {
    let mut script = Vec::new();
    clap_complete::generate(
        args.shell,
        &mut Cli::command().bin_name("kubectl-prepull"),
        "kubectl-prepull",
        &mut script,
    );
    crate::output::print(&String::from_utf8_lossy(&script))?;
    Ok(Ended::Done)
}
