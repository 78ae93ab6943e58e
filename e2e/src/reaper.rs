//! The reaper: a helper process of each test process (e2e/setup/reaper.sh). It gets a list of all that was started, and
//! removes it at the end of its input, when the test process ends for any reason.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{LazyLock, Mutex, PoisonError};

use anyhow::{Context, Result, anyhow};
use rustix::fs::OFlags;

use crate::parts;

struct Reaper {
    input: ChildStdin,
    process: Child,
}

static REAPER: LazyLock<Mutex<Result<Reaper, String>>> =
    LazyLock::new(|| Mutex::new(start().map_err(|error| format!("{error:#}"))));

fn start() -> Result<Reaper> {
    let script = parts::setup_dir().join("reaper.sh");
    let log = parts::logs_root()?.join(format!("reaper-{}.log", std::process::id()));
    let mut process = Command::new("bash")
        .arg(&script)
        .arg(log)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0) // Ctrl-C is for the foreground group, and the reaper has work to do then
        .spawn()
        .with_context(|| format!("cannot start the reaper, bash {}", script.display()))?;
    let input = process.stdin.take().context("the reaper has no input")?;
    Ok(Reaper { input, process })
}

fn send_line(line: &str) -> Result<()> {
    let mut reaper = REAPER.lock().unwrap_or_else(PoisonError::into_inner);
    let reaper = reaper.as_mut().map_err(|error| anyhow!("{error}"))?;
    let sent = reaper.input.write_all(line.as_bytes()).and_then(|()| reaper.input.flush());
    // Without a reaper, a killed test would leave its processes behind; so fail immediately.
    sent.context("the reaper is gone (see reaper-*.log in the log directory)")
}

/// Has a process, with its group and descendants, killed when this process ends.
pub fn watch_process(pid: u32) -> Result<()> {
    send_line(&line_of(pid)?)
}

/// Has a process, with its group and descendants, killed when the run of this pool ends. with-parts.sh has started a
/// reaper for the run, which reads the pipe `reaper` in the pool.
pub fn watch_process_of_the_run(pool: &Path, pid: u32) -> Result<()> {
    let pipe = pool.join("reaper");
    // Without O_NONBLOCK, this would wait for ever if the reaper has ended.
    let flags = i32::try_from(OFlags::NONBLOCK.bits())?;
    let opened = OpenOptions::new().write(true).custom_flags(flags).open(&pipe);
    let mut opened = opened.with_context(|| format!("the run of {} has ended", pipe.display()))?;
    Ok(opened.write_all(line_of(pid)?.as_bytes())?)
}

fn line_of(pid: u32) -> Result<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    let stat = stat.with_context(|| format!("process {pid} vanished while it was started"))?;
    // Field 22. The name, field 2, may contain blanks and parentheses: what follows its last one is field 3.
    let start_time = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(22 - 3));
    let start_time = start_time.with_context(|| format!("/proc/{pid}/stat has no field 22"))?;
    Ok(format!("pid {pid} {start_time}\n"))
}

/// Has a directory unmounted and removed when this process ends.
pub fn watch_directory(path: &Path) -> Result<()> {
    send_line(&format!("dir {}\n", path.display()))
}

/// Has a network namespace removed when this process ends.
pub fn watch_netns(name: &str) -> Result<()> {
    send_line(&format!("netns {name}\n"))
}

/// Starts a process that keeps the reaper waiting after the end of this one, and returns its id. When it is killed, the
/// reaper removes everything. For the demo with KEEP=1.
pub fn outlive_us() -> Result<u32> {
    let reaper = REAPER.lock().unwrap_or_else(PoisonError::into_inner);
    let reaper = reaper.as_ref().map_err(|error| anyhow!("{error}"))?;
    // The process holds the pipe open as its standard output, and never writes to it.
    let pipe = reaper.input.as_fd().try_clone_to_owned()?;
    let keeper = Command::new("sleep")
        .arg("infinity")
        .stdin(Stdio::null())
        .stdout(pipe)
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .context("cannot start sleep")?;
    Ok(keeper.id())
}

/// Process id of the reaper, for the test of the reaper itself.
pub fn pid() -> Result<u32> {
    let reaper = REAPER.lock().unwrap_or_else(PoisonError::into_inner);
    reaper.as_ref().map(|reaper| reaper.process.id()).map_err(|error| anyhow!("{error}"))
}
