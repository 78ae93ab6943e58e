//! Runs a plugin once.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};
use tokio::time::timeout;
use zeroize::Zeroize;

/// The kubelet's own limit: a plugin has time for a few tries of its own.
pub(super) const TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes that a plugin may write. An answer is a few KiB for each registry.
const MAX_OUTPUT: usize = 1024 * 1024;
/// The most of them that answers really have: no second buffer is needed for these.
const USUAL_OUTPUT: usize = 16 * 1024;

/// What becomes of the words that a plugin writes for people. They may hold anything, a credential as well (a shell
/// script that traces its commands is enough), and so they are never logged and go into no reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stderr {
    /// Nobody sees them.
    Dropped,
    /// Whoever runs us sees them, at their terminal.
    Shown,
}

/// Why a plugin gave no answer.
#[derive(Debug, Error)]
pub(super) enum ExecError {
    #[error("cannot be started: {0}")]
    Start(std::io::Error),
    #[error("cannot be read: {0}")]
    Read(std::io::Error),
    #[error("ended with {0}")]
    Exit(ExitStatus),
    #[error("gave no answer within {0:?} and was killed")]
    Timeout(Duration),
    #[error("wrote more than {} KiB and was killed", MAX_OUTPUT / 1024)]
    TooLong,
}

/// Bytes that are wiped when dropped.
#[derive(Default)]
pub(super) struct Output(Vec<u8>);

impl Output {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Takes more, without leaving a copy behind where the buffer must grow.
    fn push(&mut self, bytes: &[u8]) {
        if self.0.capacity() - self.0.len() < bytes.len() {
            let room = (self.0.capacity() * 2).max(self.0.len() + bytes.len()).max(USUAL_OUTPUT);
            let mut larger = Vec::with_capacity(room);
            larger.extend_from_slice(&self.0);
            self.0.zeroize();
            self.0 = larger;
        }
        self.0.extend_from_slice(bytes);
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

/// What to run.
pub(super) struct Plugin<'a> {
    pub(super) program: &'a Path,
    pub(super) args: &'a [String],
    /// Beside our own environment, and before it.
    pub(super) env: &'a [(String, String)],
    pub(super) timeout: Duration,
    pub(super) stderr: Stderr,
}

/// Kills a plugin with all that it has started, unless it has ended by itself.
struct Group {
    leader: Option<Pid>,
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(leader) = self.leader {
            // It was not waited for, so that the number is still its own.
            let _ = kill_process_group(leader, Signal::KILL);
        }
    }
}

/// Writes `input` to the plugin and returns what it wrote. Dropping the future kills it.
pub(super) async fn run(plugin: Plugin<'_>, input: &[u8]) -> Result<Output, ExecError> {
    let Plugin { program, args, env, timeout: limit, stderr } = plugin;
    let mut command = Command::new(program);
    command
        .args(args)
        .envs(env.iter().map(|(name, value)| (OsStr::new(name), OsStr::new(value))))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(match stderr {
            Stderr::Dropped => Stdio::null(),
            Stderr::Shown => Stdio::inherit(),
        })
        .process_group(0)
        .kill_on_drop(true);
    let mut child = command.spawn().map_err(ExecError::Start)?;
    // Declared after the child, so dropped before it: while nobody has waited for the child, its number is its own.
    let mut group =
        Group { leader: child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw) };
    match timeout(limit, answer(&mut child, input)).await {
        Ok(Ok((output, status))) => {
            group.leader = None;
            if status.success() { Ok(output) } else { Err(ExecError::Exit(status)) }
        }
        Ok(Err(error)) => Err(error),
        Err(_) => Err(ExecError::Timeout(limit)),
    }
}

async fn answer(child: &mut Child, input: &[u8]) -> Result<(Output, ExitStatus), ExecError> {
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
    let write = async {
        if let Some(mut stdin) = stdin {
            // A plugin that answers without having read is none the worse for it.
            let _ = stdin.write_all(input).await;
        }
    };
    let read = async {
        let mut output = Output::default();
        let Some(mut stdout) = stdout else { return Ok(output) };
        let mut chunk = [0; 4096];
        loop {
            let read = stdout.read(&mut chunk).await.map_err(ExecError::Read)?;
            if read == 0 {
                break;
            }
            output.push(&chunk[..read]);
            chunk[..read].zeroize();
            if output.bytes().len() > MAX_OUTPUT {
                return Err(ExecError::TooLong);
            }
        }
        Ok(output)
    };
    let ((), output) = tokio::join!(write, read);
    let output = output?;
    // Not before its output has ended: see Group.
    let status = child.wait().await.map_err(ExecError::Read)?;
    Ok((output, status))
}

#[cfg(test)]
mod tests;
