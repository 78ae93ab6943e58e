//! One run of a plugin as a child process.

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

/// The kubelet's limit for one run. It leaves a plugin time for a few retries of its own.
pub(super) const TIMEOUT: Duration = Duration::from_secs(60);
/// The largest output in bytes. An answer is a few KiB for each registry.
const MAX_OUTPUT: usize = 1024 * 1024;
/// The initial size of the buffer, enough for a usual answer.
const USUAL_OUTPUT: usize = 16 * 1024;

/// Destination of a plugin's stderr. It may hold credentials (`set -x` in a shell script is enough), so we never log it
/// or put it into an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stderr {
    /// It is discarded.
    Dropped,
    /// It goes to our own stderr, for a person who runs the program by hand.
    Shown,
}

/// Reason why a plugin gave no answer.
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

/// The output of a plugin, wiped when dropped.
#[derive(Default)]
pub(super) struct PluginOutput(Vec<u8>);

impl PluginOutput {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Appends bytes. Wipes a buffer when it's replaced by a larger one.
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

impl Drop for PluginOutput {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

/// The program to run, and how.
pub(super) struct Plugin<'a> {
    pub(super) program: &'a Path,
    pub(super) args: &'a [String],
    /// Variables in addition to our own environment, which they override.
    pub(super) env: &'a [(String, String)],
    pub(super) timeout: Duration,
    pub(super) stderr: Stderr,
}

/// The process group of a plugin. It's killed on drop, unless the plugin has ended by itself.
struct Group {
    leader: Option<Pid>,
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(leader) = self.leader {
            // We haven't waited for the leader, so the kernel hasn't reused its process id.
            let _ = kill_process_group(leader, Signal::KILL);
        }
    }
}

/// Runs the plugin with `input` on its stdin and returns its stdout. Dropping the future kills the plugin.
pub(super) async fn run(plugin: Plugin<'_>, input: &[u8]) -> Result<PluginOutput, ExecError> {
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
    // Declared after the child and so dropped before it: until we wait for the child, its id isn't reused.
    let mut group =
        Group { leader: child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw) };
    match timeout(limit, exchange(&mut child, input)).await {
        Ok(Ok((output, status))) => {
            group.leader = None;
            if status.success() { Ok(output) } else { Err(ExecError::Exit(status)) }
        }
        Ok(Err(error)) => Err(error),
        Err(_) => Err(ExecError::Timeout(limit)),
    }
}

async fn exchange(child: &mut Child, input: &[u8]) -> Result<(PluginOutput, ExitStatus), ExecError> {
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
    let write = async {
        if let Some(mut stdin) = stdin {
            // A plugin may answer without reading its input, so a failed write doesn't matter.
            let _ = stdin.write_all(input).await;
        }
    };
    let read = async {
        let mut output = PluginOutput::default();
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
    // Only after the end of the output: a child of the plugin may hold it open, and `Group` must be able to kill it.
    let status = child.wait().await.map_err(ExecError::Read)?;
    Ok((output, status))
}

#[cfg(test)]
mod tests;
