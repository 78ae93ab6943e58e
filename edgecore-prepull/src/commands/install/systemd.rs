//! systemd, through `systemctl` and `journalctl`.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use tokio::process::Command;
use tokio::time::timeout;

use super::places::UNIT;

/// Deadline of one command. A stop takes up to the unit's TimeoutStopSec, 20 s.
const DEADLINE: Duration = Duration::from_secs(60);
/// Number of lines of the agent's log in an error.
const LINES: &str = "8";

/// The state of the unit in systemd.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct UnitState {
    /// As in `systemctl is-active`: active, activating, failed, …
    pub(crate) active: String,
    pub(crate) is_enabled: bool,
    /// Whether systemd has the unit file, or still knows the unit.
    pub(crate) is_known: bool,
}

impl UnitState {
    /// Whether the unit has a process, or systemd is about to start one.
    pub(crate) fn is_running(&self) -> bool {
        matches!(self.active.as_str(), "active" | "activating" | "reloading" | "deactivating")
    }
}

/// Queries the unit's state.
pub(crate) async fn unit_state() -> anyhow::Result<UnitState> {
    let properties = "--property=ActiveState,UnitFileState,LoadState";
    Ok(parse_state(&run_program("systemctl", &["show", UNIT, properties]).await?))
}

fn parse_state(shown: &str) -> UnitState {
    let value =
        |key| shown.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('=')).unwrap_or_default();
    let active = value("ActiveState");
    UnitState {
        active: active.to_owned(),
        is_enabled: value("UnitFileState") == "enabled",
        is_known: value("LoadState") != "not-found" || active != "inactive",
    }
}

/// Runs `systemctl` with these arguments.
pub(crate) async fn systemctl(arguments: &[&str]) -> anyhow::Result<()> {
    run_program("systemctl", arguments).await.map(drop)
}

/// The last lines of the agent's log since then, indented; empty if there is no journal.
pub(crate) async fn log_since(began: SystemTime) -> String {
    let seconds = began.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let since = format!("--since=@{seconds}");
    let lines =
        run_program("journalctl", &["--unit", UNIT, &since, "--lines", LINES, "--output=cat", "--no-pager"])
            .await;
    let mut log = String::new();
    for line in lines.unwrap_or_default().lines().filter(|line| !line.starts_with("-- ")) {
        // Writing to a String cannot fail.
        let _ = write!(log, "\n    {line}");
    }
    log
}

async fn run_program(program: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let line = || format!("{program} {}", arguments.join(" "));
    let mut command = Command::new(program);
    command.args(arguments).stdin(std::process::Stdio::null()).kill_on_drop(true);
    let output = timeout(DEADLINE, command.output());
    let output = output.await.with_context(|| format!("`{}` has not ended within {DEADLINE:?}", line()))?;
    let output = output.with_context(|| format!("cannot run `{}`", line()))?;
    if !output.status.success() {
        bail!("`{}`: {}", line(), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_has_a_file_or_runs() {
        let state = |active: &str, file: &str, load: &str| {
            parse_state(&format!("ActiveState={active}\nUnitFileState={file}\nLoadState={load}\n"))
        };
        let running = state("active", "enabled", "loaded");
        assert!(running.is_running() && running.is_enabled && running.is_known);
        assert!(!state("inactive", "", "not-found").is_known);
        assert!(state("active", "", "not-found").is_known);
        let failed = state("failed", "disabled", "loaded");
        assert!(!failed.is_running() && !failed.is_enabled && failed.is_known);
    }
}
