//! The configuration of a test's containerd, in the form that its release reads.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result};

use crate::parts;

/// Plugins that the tests don't need, or that lack a dependency. Without them containerd starts faster. NRI has one
/// socket for the whole machine, which two containerds of 2.x would compete for.
const DISABLED_PLUGINS: [&str; 9] = [
    "io.containerd.internal.v1.opt",
    "io.containerd.internal.v1.tracing",
    "io.containerd.tracing.processor.v1.otlp",
    "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.zfs",
    "io.containerd.snapshotter.v1.blockfile",
    "io.containerd.nri.v1.nri",
];

/// Number of the release before the first dot: 1 or 2.
fn major(version: &str) -> Option<u32> {
    // `containerd github.com/containerd/containerd/v2 2.1.9 f0e1c2b`, possibly with a `v` before the number.
    let number = version.split_whitespace().nth(2)?.trim_start_matches('v');
    number.split('.').next()?.parse().ok()
}

/// Asks the tests' containerd for its release, once in each process.
fn installed_major() -> Result<u32> {
    static MAJOR: OnceLock<u32> = OnceLock::new();
    if let Some(major) = MAJOR.get() {
        return Ok(*major);
    }
    let program = parts::containerd();
    let output = Command::new(&program).arg("--version").output();
    let output = output.with_context(|| format!("cannot start {}", program.display()))?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let found = major(&said).with_context(|| format!("{} is no containerd: {said}", program.display()))?;
    Ok(*MAJOR.get_or_init(|| found))
}

/// Deviations from the default behaviour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Habit {
    None,
    /// It removes layers from its content store once they are unpacked.
    DiscardsLayers,
    /// It unpacks to a directory that is not below its root.
    UnpacksElsewhere,
}

/// The configuration for a containerd with all its files below `dir`, which reads registry hosts from `hosts`. That
/// must be a single directory: the transfer service of 2.x ignores lists of them.
pub(super) fn config(dir: &Path, hosts: &Path, habit: Habit) -> Result<String> {
    let (dir, hosts) = (dir.display().to_string(), hosts.display().to_string());
    Ok(config_of(installed_major()?, &dir, &hosts, habit))
}

fn config_of(major: u32, dir: &str, hosts: &str, habit: Habit) -> String {
    let discards_layers = habit == Habit::DiscardsLayers;
    let snapshots = match habit {
        Habit::UnpacksElsewhere => {
            format!("[plugins.\"io.containerd.snapshotter.v1.overlayfs\"]\nroot_path = \"{dir}/snapshots\"\n")
        }
        Habit::None | Habit::DiscardsLayers => String::new(),
    };
    let (version, images, runtime, unpacking, bin_dirs) = match major {
        ..2 => (2, "grpc.v1.cri", "grpc.v1.cri", ".containerd", format!("bin_dir = \"{dir}/cni\"")),
        2.. => (3, "cri.v1.images", "cri.v1.runtime", "", format!("bin_dirs = [\"{dir}/cni\"]")),
    };
    format!(
        r#"version = {version}
root = "{dir}/root"
state = "{dir}/state"
disabled_plugins = {DISABLED_PLUGINS:?}
[grpc]
address = "{dir}/containerd.sock"
{snapshots}[plugins."io.containerd.grpc.v1.cri"]
disable_tcp_service = true
[plugins."io.containerd.{runtime}".cni]
conf_dir = "{dir}/cni"
{bin_dirs}
[plugins."io.containerd.{images}"{unpacking}]
discard_unpacked_layers = {discards_layers}
[plugins."io.containerd.{images}".registry]
config_path = "{hosts}"
"#
    )
}

/// The directories of a machine's containerd, as absolute paths on the machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Paths {
    /// Images, and their unpacked layers.
    pub(crate) data: &'static str,
    /// The socket.
    pub(crate) run: &'static str,
    /// The configuration, with that of registries in `certs.d`.
    pub(crate) etc: &'static str,
}

impl Paths {
    /// The defaults of containerd.
    pub(crate) const USUAL: Self =
        Self { data: "/var/lib/containerd", run: "/run/containerd", etc: "/etc/containerd" };
    /// The directories of k3s.
    pub(crate) const K3S: Self = Self {
        data: "/var/lib/rancher/k3s/agent/containerd",
        run: "/run/k3s/containerd",
        etc: "/var/lib/rancher/k3s/agent/etc/containerd",
    };

    /// The main configuration file.
    pub(crate) fn config_file(&self) -> PathBuf {
        Path::new(self.etc).join("config.toml")
    }
}

/// The configuration for a containerd that runs pods.
pub(super) fn of_machine(paths: &Paths, sandbox: &str) -> Result<String> {
    let Paths { data, run, etc } = paths;
    let (version, runtime, images, more) = match installed_major()? {
        ..2 => (2, "grpc.v1.cri", "grpc.v1.cri", format!("sandbox_image = \"{sandbox}\"\n")),
        2.. => (
            3,
            "cri.v1.runtime",
            "cri.v1.images",
            format!("[plugins.\"io.containerd.cri.v1.images\".pinned_images]\nsandbox = \"{sandbox}\"\n"),
        ),
    };
    let bin_dirs = if version == 2 { "bin_dir = \"/opt/cni/bin\"" } else { "bin_dirs = [\"/opt/cni/bin\"]" };
    // A process in a namespace other than the machine's first may not lower its OOM score.
    Ok(format!(
        r#"version = {version}
root = "{data}"
state = "{run}"
disabled_plugins = {DISABLED_PLUGINS:?}
[grpc]
address = "{run}/containerd.sock"
[plugins."io.containerd.{runtime}"]
restrict_oom_score_adj = true
{more}[plugins."io.containerd.{runtime}".cni]
conf_dir = "/etc/cni/net.d"
{bin_dirs}
[plugins."io.containerd.{images}".registry]
config_path = "{etc}/certs.d"
"#
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packagers_release_is_parsed() {
        for (said, expected) in [
            ("containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+deb12u3\n", Some(1)),
            ("containerd github.com/containerd/containerd/v2 2.1.9+unknown \n", Some(2)),
            ("containerd containerd.io v2.0.5 fb4c30d4ede3531652d86197bf3fc9515e5276d9\n", Some(2)),
            ("containerd github.com/containerd/containerd\n", None),
            ("", None),
        ] {
            assert_eq!(major(said), expected, "{said}");
        }
    }
}
