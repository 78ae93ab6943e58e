//! Network namespaces.

use std::fs::File;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, anyhow};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::keep::keeps_everything;
use crate::{parts, reaper};

/// Number of namespaces that this process has created.
static COUNT: AtomicU32 = AtomicU32::new(0);

/// A network namespace that has only loopback at first. It is removed with the last handle, or after this process.
#[derive(Clone, Debug)]
pub struct Space(Arc<Named>);

#[derive(Debug)]
struct Named(String);

impl Space {
    /// Creates a namespace.
    pub(crate) async fn new() -> Result<Self> {
        let name = format!("prepull-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::SeqCst));
        // Tell the reaper first, so that nothing is left behind if this process dies.
        reaper::watch_netns(&name)?;
        ip(&["netns", "add", &name]).await?;
        let space = Self(Arc::new(Named(name)));
        space.ip(&["link", "set", "lo", "up"]).await?;
        Ok(space)
    }

    /// Name of the namespace for `ip netns`.
    pub fn name(&self) -> &str {
        &self.0.0
    }

    fn file(&self) -> String {
        format!("/run/netns/{}", self.name())
    }

    /// Wraps a command so that it runs in the namespace, with the same process id.
    pub fn wrap_command(&self, command: &Command) -> Command {
        let mut inside = Command::new("nsenter");
        inside
            .arg(format!("--net={}", self.file()))
            .arg("--")
            .arg(command.get_program())
            .args(command.get_args());
        inside.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        inside
    }

    /// Runs `ip` in the namespace.
    pub(crate) async fn ip(&self, arguments: &[&str]) -> Result<()> {
        ip(&[&["-n", self.name()], arguments].concat()).await
    }

    /// Runs `iptables` in the namespace.
    pub(super) async fn iptables(&self, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new("iptables");
        command.arg("--wait").args(arguments);
        parts::run_command(self.wrap_command(&command)).await
    }

    /// Runs `tc` in the namespace.
    pub(super) async fn tc(&self, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new("tc");
        command.args(arguments);
        let output = parts::run_command(self.wrap_command(&command)).await;
        output.with_context(|| format!("tc {}", arguments.join(" ")))
    }

    /// Runs some work in the namespace, on its own thread. A socket belongs to the namespace in which it was created.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
    ) -> Result<T> {
        let file = File::open(self.file()).with_context(|| self.file())?;
        let thread = std::thread::spawn(move || {
            move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?;
            work()
        });
        Ok(thread.join().map_err(|_| anyhow!("a thread in {} panicked", self.name()))??)
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        if !keeps_everything() {
            // The reaper removes what cannot be removed now.
            let _ = Command::new("ip").args(["netns", "delete", &self.0]).status();
        }
    }
}

pub(crate) async fn ip(arguments: &[&str]) -> Result<()> {
    let mut command = Command::new("ip");
    command.args(arguments);
    parts::run_command(command).await.with_context(|| format!("ip {}", arguments.join(" ")))?;
    Ok(())
}
