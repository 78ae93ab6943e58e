//! A command's output with the time of each line.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncBufReadExt, BufReader};

/// The output of a command that has ended.
#[derive(Clone, Debug)]
pub struct Recording {
    /// Its exit status.
    pub status: i32,
    /// The lines of both outputs, each with the time since the start.
    pub lines: Vec<(Duration, String)>,
}

impl Recording {
    /// Fails unless the command has ended with this status and printed all of these words.
    pub fn is(&self, status: i32, words: &[&str]) -> Result<()> {
        let lines: Vec<_> = self.lines.iter().map(|(_, line)| line.as_str()).collect();
        let all = lines.join("\n");
        ensure!(self.status == status, "it ended with {}, not {status}: {all}", self.status);
        for word in words {
            ensure!(all.contains(word), "{word:?} is not in: {all}");
        }
        Ok(())
    }
}

/// Runs a command and records both of its outputs in one.
pub async fn record(command: Command) -> Result<Recording> {
    let mut shell = tokio::process::Command::new("sh");
    shell.args(["-c", "exec \"$0\" \"$@\" 2>&1"]).arg(command.get_program()).args(command.get_args());
    shell.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    shell.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
    let began = Instant::now();
    let mut child = shell.spawn().context("cannot start sh")?;
    let mut out = BufReader::new(child.stdout.take().context("no stdout")?).lines();
    let mut lines = Vec::new();
    while let Some(line) = out.next_line().await? {
        lines.push((began.elapsed(), line));
    }
    let status = child.wait().await?.code().context("a signal has ended it")?;
    Ok(Recording { status, lines })
}
