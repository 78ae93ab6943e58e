//! Paths of programs, scripts, logs and caches.

use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Cache directory of the programs that e2e/setup/kubernetes.sh builds. The tests work with other releases as well.
const KUBERNETES_CACHE: &str = "kubernetes-v1.36.3-1";
/// Prefix of the name of the directory that e2e/setup/oldest-apiserver.sh builds.
const OLDEST_CACHE: &str = "kube-apiserver-v1.20.";

/// Root directory of the workspace.
pub fn workspace() -> &'static Path {
    // This crate is a directory of the workspace.
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_dir.parent().unwrap_or(crate_dir)
}

/// Directory of the scripts, e2e/setup.
pub fn setup_dir() -> PathBuf {
    workspace().join("e2e/setup")
}

/// Target directory of Cargo.
pub fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from)
}

/// Directory of all logs: `$PREPULL_E2E_LOGS`, or target/e2e-logs. Creates it.
pub fn logs_root() -> Result<PathBuf> {
    let root =
        std::env::var_os("PREPULL_E2E_LOGS").map_or_else(|| target_dir().join("e2e-logs"), PathBuf::from);
    std::fs::create_dir_all(&root).with_context(|| format!("cannot create {}", root.display()))?;
    Ok(root)
}

/// Cache directory, `${XDG_CACHE_HOME:-~/.cache}/prepull-e2e`.
pub fn cache_dir() -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_else(|| "/root".into())).join(".cache");
    cache.unwrap_or_else(home).join("prepull-e2e")
}

/// Path of kube-apiserver: in `PREPULL_APISERVER_DIR`, or in the cache that `make setup` fills.
pub fn kube_apiserver() -> Result<PathBuf> {
    kubernetes_program("kube-apiserver")
}

/// Path of a program of Kubernetes, such as `kubelet`: in `PREPULL_APISERVER_DIR`, or in the cache that `make setup` fills.
pub fn kubernetes_program(program: &str) -> Result<PathBuf> {
    let dir = std::env::var_os("PREPULL_APISERVER_DIR")
        .map_or_else(|| cache_dir().join(KUBERNETES_CACHE), PathBuf::from);
    let path = dir.join(program);
    if !path.exists() {
        bail!(
            "no {program} at {}: run `make setup`, or set PREPULL_APISERVER_DIR; where KUBEBUILDER_ASSETS is set, its \
             directory lacks it",
            path.display()
        );
    }
    Ok(path)
}

/// Whether this kube-apiserver, the oldest one that e2e/setup builds, serves beta APIs by default. Since 1.24 releases
/// serve no new ones.
pub fn has_betas_by_default(kube_apiserver: &Path) -> bool {
    let dir = kube_apiserver.parent().and_then(Path::file_name).unwrap_or_default();
    dir.to_string_lossy().starts_with(OLDEST_CACHE)
}

/// Path of etcd: beside kube-apiserver, as in envtest, or in PATH.
pub fn etcd() -> Result<PathBuf> {
    let beside = kube_apiserver()?.with_file_name("etcd");
    Ok(if beside.exists() { beside } else { PathBuf::from("etcd") })
}

/// Path of kubectl: beside kube-apiserver, or in PATH.
pub fn kubectl() -> PathBuf {
    let beside = kube_apiserver().map(|path| path.with_file_name("kubectl"));
    beside.ok().filter(|path| path.exists()).unwrap_or_else(|| PathBuf::from("kubectl"))
}

/// Path of a headless Chromium, in PATH.
pub fn chromium() -> Result<PathBuf> {
    let found = ["chromium-headless-shell", "chromium"].map(PathBuf::from).into_iter().find(|name| {
        let mut path = std::env::var_os("PATH").map(|path| std::env::split_paths(&path).collect::<Vec<_>>());
        path.get_or_insert_default().iter().any(|dir| dir.join(name).exists())
    });
    found.context("there is no Chromium: install chromium-headless-shell, as `make test` does")
}

/// Path of the script of axe-core, from the cache or from npm's registry.
pub async fn axe_core() -> Result<PathBuf> {
    Ok(run_command(Command::new(setup_dir().join("axe-core.sh"))).await?.trim().into())
}

/// Path of containerd: in `PREPULL_CONTAINERD_DIR`, or in PATH.
pub fn containerd() -> PathBuf {
    containerd_dir().unwrap_or_default().join("containerd")
}

/// Directory of a containerd other than that in PATH.
pub fn containerd_dir() -> Option<PathBuf> {
    std::env::var_os("PREPULL_CONTAINERD_DIR").map(PathBuf::from)
}

/// Path of cloudcore-prepull or edgecore-prepull: in `PREPULL_BIN_DIR`, or in target/debug.
pub fn program_path(name: &str) -> Result<PathBuf> {
    let dir = std::env::var_os("PREPULL_BIN_DIR").map_or_else(|| target_dir().join("debug"), PathBuf::from);
    let path = dir.join(name);
    if !path.exists() {
        bail!("no {name} at {}: build it (cargo build -p {name}), or set PREPULL_BIN_DIR", path.display());
    }
    Ok(path)
}

/// Whether our programs are of this machine, and not scripts that start an emulator, as `make test-dist` has them.
pub fn are_native() -> Result<bool> {
    let mut magic = [0; 4];
    std::fs::File::open(program_path("cloudcore-prepull")?)?.read_exact(&mut magic)?;
    Ok(magic == *b"\x7fELF")
}

/// Writes one of our programs to a file, without its debug information: it's less than half as large.
pub async fn strip_program(name: &str, to: &Path) -> Result<()> {
    let mut command = Command::new("strip");
    command.arg("-o").arg(to).arg(program_path(name)?);
    run_command(command).await.map(drop)
}

/// The source of our programs for a test.
#[derive(Clone, Debug, Default)]
pub enum Programs {
    /// From this workspace.
    #[default]
    Built,
    /// From a directory with those of an earlier release.
    Before(PathBuf),
}

impl Programs {
    /// Path of one of our programs.
    pub fn path(&self, name: &str) -> Result<PathBuf> {
        match self {
            Self::Built => program_path(name),
            Self::Before(dir) => Ok(dir.join(name)),
        }
    }
}

/// The environment that gives a program another wall clock, without the variable that says which.
pub(crate) fn faketime() -> Result<Vec<(&'static str, OsString)>> {
    Ok(vec![
        ("LD_PRELOAD", libfaketime()?.into()),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1".into()),
        ("NO_FAKE_STAT", "1".into()),
    ])
}

/// Path of the library of Debian's package `libfaketime` that gives a multi-threaded program another clock.
pub fn libfaketime() -> Result<PathBuf> {
    let library = |dir: PathBuf| dir.join("faketime/libfaketimeMT.so.1");
    let of_architectures = std::fs::read_dir("/usr/lib")?.flatten().map(|entry| library(entry.path()));
    let found = of_architectures.into_iter().find(|path| path.exists());
    found.context("no /usr/lib/*/faketime/libfaketimeMT.so.1: run `make setup`")
}

/// Runs a program to its end and returns its output. If it fails, the error has what it printed.
pub async fn run_command(command: Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let mut command = tokio::process::Command::from(command);
    let output = command.kill_on_drop(true).stdin(std::process::Stdio::null()).output().await;
    let output = output.with_context(|| format!("cannot start {name}"))?;
    if !output.status.success() {
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        bail!("{name} ended with {}: {}{}", output.status, out.trim(), err.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
