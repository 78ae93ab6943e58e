//! A machine with its own init, for tests that need one: a real systemd as process 1, in namespaces.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::cleanup::{Child, SOON, eventually};
use crate::node::Containerd;
use crate::parts;
use crate::place::Place;

/// Limit for the end of all its processes, which takes some milliseconds.
const END_LIMIT: Duration = Duration::from_secs(5);

/// A running machine, in the network of the test. None of its processes outlives this value.
pub struct Machine {
    process: Child,
}

impl Machine {
    /// Boots a machine with this host name. The runtime has its socket at containerd's usual place there.
    pub async fn boot(name: &str, runtime: &Containerd) -> Result<Self> {
        Self::boot_from(name, runtime, None).await
    }

    /// The same, with the state of the agent in this directory.
    pub async fn boot_with_state(name: &str, runtime: &Containerd, state: &Path) -> Result<Self> {
        Self::boot_from(name, runtime, Some(state)).await
    }

    async fn boot_from(name: &str, runtime: &Containerd, state: Option<&Path>) -> Result<Self> {
        let place = Place::here()?;
        let mut command = Command::new("bash");
        command.arg(parts::setup_dir().join("machine.sh")).arg(name).arg(place.new_dir("machine")?);
        command.arg(parts::program_path("edgecore-prepull")?).arg(runtime.dir()).args(state);
        let mut machine = Self { process: Child::spawn(&place, &format!("machine-{name}"), command)? };
        let booted = eventually("systemd runs", SOON, async || {
            let state = machine.run(&["systemctl", "is-system-running"]).await?;
            ensure!(state.trim() == "running", "{state}");
            Ok(())
        });
        if let Err(error) = booted.await {
            machine.process.check_running()?;
            return Err(error.context(machine.process.log()));
        }
        Ok(machine)
    }

    /// Runs a program on the machine, and returns its output. If it fails, the error has what it printed.
    pub async fn run(&self, line: &[&str]) -> Result<String> {
        parts::run_command(self.command(line)?).await
    }

    /// A command that runs a program on the machine.
    pub fn command(&self, line: &[&str]) -> Result<Command> {
        let init = self.init_pid()?;
        let mut command = Command::new("nsenter");
        command.args([
            "--target", &init, "--mount", "--uts", "--ipc", "--pid", "--cgroup", "--root", "--wd", "--",
        ]);
        command.args(line);
        Ok(command)
    }

    /// Ends all of its processes at once, as a power cut does.
    pub fn end_processes(&mut self) {
        end_machine(&mut self.process);
    }

    /// Id of process 1, in this namespace.
    fn init_pid(&self) -> Result<String> {
        let pid = self.process.pid();
        let children =
            std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        let init = children.split_whitespace().next().context("the machine has no process 1")?;
        Ok(init.to_owned())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.end_processes();
    }
}

/// Ends a machine. All of its processes end with its first one, and then its control groups can be removed.
pub(crate) fn end_machine(machine: &mut Child) {
    let pid = machine.pid();
    let _ = machine.kill9();
    let began = Instant::now();
    while !remove_groups(pid) && began.elapsed() < END_LIMIT {
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Removes the control groups of a machine that has ended. Returns whether none is left.
fn remove_groups(pid: u32) -> bool {
    let root = PathBuf::from("/sys/fs/cgroup");
    // That of cgroup v2, and one for each controller of v1.
    let controllers = std::fs::read_dir(&root).into_iter().flatten().flatten().map(|entry| entry.path());
    let trees = std::iter::once(root).chain(controllers);
    let mut groups: Vec<_> =
        trees.map(|tree| tree.join(format!("prepull-{pid}"))).filter(|group| group.exists()).collect();
    let mut next = 0;
    while let Some(group) = groups.get(next).cloned() {
        let inner = std::fs::read_dir(group).into_iter().flatten().flatten().map(|entry| entry.path());
        groups.extend(inner.filter(|path| path.is_dir()));
        next += 1;
    }
    // Inner groups before outer ones.
    let left = groups.iter().rev().filter(|group| std::fs::remove_dir(group).is_err());
    left.count() == 0
}
