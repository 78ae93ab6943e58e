//! Child processes, which end with the test that started them, however it ends.
//!
//! - A test that returns or panics drops its [`Child`]ren: each is killed with its process group, and waited for.
//! - A test process that is killed (Ctrl-C, SIGKILL, a runner's timeout) drops nothing. The [`reaper`] has a list of
//!   all that was started, and a process group of its own. It reads from a pipe that the kernel closes when the test
//!   process ends; then it kills the processes on the list and removes the directories.
//! - Processes that should outlive a test are on the list of another reaper, which ends with the whole run.

use std::fs::OpenOptions;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::keep::keeps_everything;
use crate::place::{Place, last_lines};
use crate::reaper;
use crate::usage::Usage;

/// Interval between two attempts at something that can only be polled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Limit for events that must happen and have no promised duration: a process starts, an event is written, an edge
/// connects. On an idle machine they take two seconds at most; a busy one has been seen to take 60.
pub const SOON: Duration = Duration::from_secs(120);

/// Limit for a process to stop: each thread stops when it next leaves the kernel.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// A child process, which is the leader of a process group of its own.
#[derive(Debug)]
pub struct Child {
    name: String,
    process: std::process::Child,
    pid: Pid,
    log: PathBuf,
    /// Whether the process continues when this value is dropped.
    outlives_us: bool,
}

impl Child {
    /// Starts a program. Its output is appended to `<name>.log` in the log directory of the place.
    pub fn spawn(place: &Place, name: &str, command: Command) -> Result<Self> {
        Self::start(place.log_file(name), name, command, reaper::watch_process)
    }

    /// Starts a program that may outlive the test ([`Self::outlive_us`]) and ends with the whole run at the latest. Its
    /// output is appended to `<name>.log` in `logs`.
    pub fn spawn_for_the_run(pool: &Path, logs: &Path, name: &str, command: Command) -> Result<Self> {
        let watch = |pid| reaper::watch_process_of_the_run(pool, pid);
        Self::start(logs.join(format!("{name}.log")), name, command, watch)
    }

    fn start(
        log: PathBuf,
        name: &str,
        mut command: Command,
        watch: impl FnOnce(u32) -> Result<()>,
    ) -> Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(&log);
        let file = file.with_context(|| format!("cannot write the log of {name}, {}", log.display()))?;
        let program = command.get_program().to_string_lossy().into_owned();
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).process_group(0);
        let process = command.spawn().with_context(|| format!("cannot start {program} ({name})"))?;
        let pid = Pid::from_child(&process);
        let child = Self { name: name.to_owned(), process, pid, log, outlives_us: false };
        watch(child.pid())?;
        Ok(child)
    }

    /// Lets the process continue when this value is dropped.
    pub fn outlive_us(&mut self) {
        self.outlives_us = true;
    }

    /// Id of the process, and of its group.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Everything that was printed so far, over all processes of this name.
    pub fn log(&self) -> String {
        std::fs::read(&self.log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    /// Resident memory in bytes.
    pub fn memory(&self) -> Result<u64> {
        Ok(Usage::of_process(self.pid())?.rss)
    }

    /// Whether the process has not ended yet. A frozen process is running as well.
    pub fn is_running(&mut self) -> bool {
        matches!(self.process.try_wait(), Ok(None))
    }

    /// Freezes the process with SIGSTOP; its connections stay open. Returns when all threads have stopped, which takes
    /// effect one by one after the signal.
    pub fn stop(&self) -> Result<()> {
        self.signal(Signal::STOP)?;
        let began = Instant::now();
        while !self.is_stopped() {
            ensure!(began.elapsed() < STOP_LIMIT, "{} does not stop", self.name);
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn is_stopped(&self) -> bool {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.pid()));
        threads.into_iter().flatten().flatten().all(|thread| {
            let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            // The state is the first field after the name, which is in parentheses.
            stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('T'))
        })
    }

    /// Resumes the process with SIGCONT.
    pub fn cont(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    /// Kills the process with SIGKILL, and waits until it has ended.
    pub fn kill9(&mut self) -> Result<()> {
        if self.is_running() {
            self.signal(Signal::KILL)?;
        }
        self.process.wait().with_context(|| format!("cannot wait for {}", self.name))?;
        Ok(())
    }

    /// Sends SIGTERM without waiting for the end: see [`Self::wait`].
    pub fn terminate(&self) -> Result<()> {
        self.signal(Signal::TERM)
    }

    /// Waits until the process ends by itself.
    pub async fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + limit;
        while self.is_running() {
            if Instant::now() >= deadline {
                bail!("{} (pid {}) still runs after {limit:?}", self.name, self.pid());
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(self.process.wait()?)
    }

    /// Fails if the process has ended, with its last output. For use while waiting for the process to do something.
    pub fn check_running(&mut self) -> Result<()> {
        match self.process.try_wait()? {
            None => Ok(()),
            Some(status) => {
                bail!("{} ended with {status}; its last output:\n{}", self.name, last_lines(&self.log(), 20))
            }
        }
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        kill_process_group(self.pid, signal)
            .with_context(|| format!("cannot send {signal:?} to {} (pid {})", self.name, self.pid()))
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if keeps_everything() || self.outlives_us {
            return;
        }
        // The whole group, since children may outlive their leader.
        let _ = kill_process_group(self.pid, Signal::KILL);
        let _ = self.process.wait();
    }
}

/// Repeats an attempt until it succeeds or the limit has passed, and then returns its last error. Use it only for
/// states that must be polled, such as a server that's starting; prefer a watch if there is one.
pub async fn eventually<T, F>(what: &str, limit: Duration, mut attempt: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    let deadline = Instant::now() + limit;
    loop {
        match attempt().await {
            Ok(value) => return Ok(value),
            Err(error) if Instant::now() >= deadline => {
                return Err(error.context(format!("{what}: not within {limit:?}")));
            }
            Err(_) => tokio::time::sleep(POLL_INTERVAL).await,
        }
    }
}
