//! `kubectl prepull`, run by a person.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::ChildStdout;

use crate::cleanup::{Child, SOON, eventually};
use crate::network::{Outlet, Space};
use crate::parts;
use crate::place::Place;
use crate::usage::Usage;

/// Interval between two looks at the memory of a command: short, since some last for a tenth of a second.
const LOOK: Duration = Duration::from_millis(2);

/// A person with a kubeconfig.
pub struct Person {
    kubeconfig: PathBuf,
    /// Where the person sits, if not here.
    space: Option<Space>,
    environment: Vec<(String, String)>,
}

/// `kubectl prepull ui`, until it is dropped.
pub struct PageServer {
    url: String,
    process: Child,
}

impl PageServer {
    /// Address of the page, with its token.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The usage of the process.
    pub fn usage(&self) -> Result<Usage> {
        Usage::of_process(self.process.pid())
    }
}

/// The output of a command.
#[derive(Clone, Debug)]
pub struct CommandOutput {
    /// Its exit status.
    pub status: i32,
    /// Its standard output.
    pub out: String,
    /// Its standard error.
    pub err: String,
}

impl CommandOutput {
    /// Fails unless the command has ended with this status and printed all of these words.
    pub fn is(self, status: i32, words: &[&str]) -> Result<Self> {
        let all = format!("{}{}", self.out, self.err);
        ensure!(self.status == status, "it ended with {}, not {status}: {all}", self.status);
        for word in words {
            ensure!(all.contains(word), "{word:?} is not in: {all}");
        }
        Ok(self)
    }
}

impl Person {
    /// A person with the rights of this kubeconfig.
    pub fn new(kubeconfig: &Path) -> Self {
        Self { kubeconfig: kubeconfig.to_owned(), space: None, environment: Vec::new() }
    }

    /// The person at a box, with these variables in the environment.
    #[must_use]
    pub fn at_box(mut self, outlet: &Outlet, environment: &[(&str, &str)]) -> Self {
        self.space = Some(outlet.space().clone());
        self.environment =
            environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        self
    }

    fn command(&self, line: &str) -> Result<tokio::process::Command> {
        let mut command = Command::new(parts::program_path("kubectl-prepull")?);
        if let Some(space) = &self.space {
            command = space.wrap_command(&command);
        }
        let mut command = tokio::process::Command::from(command);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.args(line.split_whitespace()).arg("--kubeconfig").arg(&self.kubeconfig);
        command.env_remove("KUBECONFIG").env("COLUMNS", "100").env("NO_COLOR", "1");
        // `from --apply-then` runs kubectl.
        let kubectl = parts::kubectl();
        let dirs = kubectl.parent().filter(|dir| !dir.as_os_str().is_empty()).map(Path::to_owned);
        let path = std::env::var_os("PATH").unwrap_or_default();
        let dirs = dirs.into_iter().chain(std::env::split_paths(&path));
        command.env("PATH", std::env::join_paths(dirs)?);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        Ok(command)
    }

    /// Runs `kubectl prepull` with the words of this line.
    pub async fn runs(&self, line: &str) -> Result<CommandOutput> {
        let output = self.command(line)?.output().await;
        command_output(output.with_context(|| format!("cannot run kubectl-prepull {line}"))?)
    }

    /// Runs `kubectl prepull` like [`Self::runs`], with at most `kib` KiB of memory besides the program itself.
    pub async fn runs_within(&self, line: &str, kib: u32) -> Result<CommandOutput> {
        let command = self.command(line)?;
        let command = command.as_std();
        let mut shell = tokio::process::Command::new("sh");
        shell.args(["-c", &format!("ulimit -d {kib} && exec \"$0\" \"$@\"")]);
        shell.arg(command.get_program()).args(command.get_args()).stdin(Stdio::null());
        command_output(
            shell
                .kill_on_drop(true)
                .output()
                .await
                .with_context(|| format!("cannot run kubectl-prepull {line}"))?,
        )
    }

    /// Runs `kubectl prepull` like [`Self::runs`]. Also returns the time, and the peak memory in bytes.
    pub async fn runs_measured(&self, line: &str) -> Result<(CommandOutput, Duration, u64)> {
        let began = Instant::now();
        let child =
            self.command(line)?.spawn().with_context(|| format!("cannot run kubectl-prepull {line}"))?;
        let pid = child.id().context("it has ended")?;
        let ends = child.wait_with_output();
        let (mut peak, mut looks) = (0, tokio::time::interval(LOOK));
        tokio::pin!(ends);
        let output = loop {
            tokio::select! {
                output = &mut ends => break output?,
                // It ended in between: keep the last value.
                _ = looks.tick() => peak = Usage::of_process(pid).map_or(peak, |usage| usage.peak.max(peak)),
            }
        };
        Ok((command_output(output)?, began.elapsed(), peak))
    }

    /// Serves the page of `kubectl prepull ui`.
    pub async fn serves_page(&self) -> Result<PageServer> {
        let mut command = Command::new(parts::program_path("kubectl-prepull")?);
        command.args(["ui", "--no-open", "--kubeconfig"]).arg(&self.kubeconfig);
        let process = Child::spawn(&*Place::here()?, "ui", command)?;
        let url = eventually("the address is printed", SOON, async || {
            let log = process.log();
            let line = log.lines().find(|line| line.starts_with("http://")).with_context(|| log.clone())?;
            anyhow::Ok(line.to_owned())
        })
        .await?;
        Ok(PageServer { url, process })
    }

    /// Runs `kubectl prepull` like [`Self::runs`], on a terminal of 80 columns. The standard output includes its
    /// drawing.
    pub async fn runs_on_a_terminal(&self, line: &str) -> Result<CommandOutput> {
        let command = self.command(line)?;
        let command = command.as_std();
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let words: Vec<_> = words.map(|word| format!("'{}'", word.to_string_lossy())).collect();
        let line_of_shell = format!("stty cols 80 rows 40; exec {}", words.join(" "));
        let mut script = tokio::process::Command::new("script");
        script.args(["--quiet", "--return", "--command", &line_of_shell, "/dev/null"]).stdin(Stdio::null());
        script.env_remove("NO_COLOR").env_remove("COLUMNS").env("TERM", "xterm").kill_on_drop(true);
        command_output(script.output().await.context("cannot run script, of Debian's bsdutils")?)
    }

    /// The completion for kubectl after these words. The last word is incomplete.
    pub async fn completes(&self, words: &[&str], dir: &Path) -> Result<String> {
        let program = dir.join("kubectl_complete-prepull");
        if !program.exists() {
            std::os::unix::fs::symlink(parts::program_path("kubectl-prepull")?, &program)?;
        }
        let mut command = std::process::Command::new(program);
        command.arg("--kubeconfig").arg(&self.kubeconfig).args(words);
        parts::run_command(command).await
    }

    /// Starts a command whose output is read while it runs.
    pub fn follows(&self, line: &str) -> Result<FollowedCommand> {
        let mut child = self.command(line)?.spawn()?;
        let lines = BufReader::new(child.stdout.take().context("no stdout")?).lines();
        Ok(FollowedCommand { child, lines, out: String::new() })
    }
}

/// A command that runs, and what it has printed.
pub struct FollowedCommand {
    child: tokio::process::Child,
    lines: Lines<BufReader<ChildStdout>>,
    out: String,
}

impl FollowedCommand {
    /// Reads up to a line with this text, and returns what was read until now.
    pub async fn until(&mut self, text: &str) -> Result<&str> {
        while let Some(line) = self.lines.next_line().await? {
            self.out.push_str(&line);
            self.out.push('\n');
            if line.contains(text) {
                return Ok(&self.out);
            }
        }
        bail!("{text:?} is not in {}", self.out)
    }

    /// Presses Ctrl-C, and waits for its end.
    pub async fn interrupted(self) -> Result<CommandOutput> {
        let pid = self.child.id().and_then(|id| Pid::from_raw(id.cast_signed())).context("it has ended")?;
        kill_process(pid, Signal::INT)?;
        let Self { child, lines: _open, out } = self;
        ended(child, out).await
    }

    /// Closes the pipe of its output, and waits for its end.
    pub async fn unread(self) -> Result<CommandOutput> {
        let Self { child, lines, out } = self;
        drop(lines);
        ended(child, out).await
    }
}

async fn ended(child: tokio::process::Child, out: String) -> Result<CommandOutput> {
    let ended = command_output(child.wait_with_output().await?)?;
    Ok(CommandOutput { out: out + &ended.out, ..ended })
}

fn command_output(output: Output) -> Result<CommandOutput> {
    let status = output.status.code().context("a signal has ended it")?;
    Ok(CommandOutput {
        status,
        out: String::from_utf8(output.stdout)?,
        err: String::from_utf8(output.stderr)?,
    })
}
