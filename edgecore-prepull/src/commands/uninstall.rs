//! `edgecore-prepull uninstall`: removes the files of `install`, and the agent's state.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};

use crate::cloud::identity::{StateDir, temporary_of};
use crate::commands::install::args::UninstallArgs;
use crate::commands::install::elsewhere::explain_stop;
use crate::commands::install::places::{InstallPlaces, UNIT};
use crate::commands::install::plan::{Init, InstallRefusal};
use crate::commands::install::proxies::is_ours;
use crate::commands::install::systemd::{self, UnitState};
use crate::commands::install::{machine, print_line};
use crate::config::AgentSettings;
use crate::images::puller::cri::CriPuller;
use crate::images::puller::{ErrorClass, JobsToUnpin, Puller};
use crate::images::runtime::RuntimeEndpoint;

/// One step.
#[derive(Clone, Debug, PartialEq, Eq)]
enum UninstallStep {
    /// Stop the unit, and disable it.
    Disable,
    File(PathBuf),
    /// The file of the proxies, if `install` has written it.
    Proxies(PathBuf),
    /// A directory with its content.
    Tree(PathBuf),
    /// A directory, if it's empty.
    EmptyDir(PathBuf),
    Reload,
    /// Pins and unfinished pulls in the container runtime, if there is one. The agent is stopped by then, so it can't pin again.
    Runtime(RuntimeEndpoint),
}

/// Decides on the steps. Files that don't exist need none. Program and settings come after the runtime: while it's down,
/// another `uninstall` needs them.
fn plan_uninstall(
    places: &InstallPlaces,
    runtime: RuntimeEndpoint,
    has_systemd: bool,
    unit: &UnitState,
    purge: bool,
) -> Vec<UninstallStep> {
    let mut steps = Vec::new();
    if has_systemd && unit.is_known {
        steps.push(UninstallStep::Disable);
    }
    // An `install` that was killed during a write may have left these.
    steps.extend(places.replaced_whole().map(|file| UninstallStep::File(temporary_of(file))));
    let InstallPlaces {
        program,
        unit: unit_file,
        drop_ins,
        etc,
        settings,
        proxies,
        upgrade_key,
        state,
        restart_due,
        ..
    } = places.clone();
    steps.push(UninstallStep::File(unit_file));
    if purge {
        steps.push(UninstallStep::Tree(drop_ins));
    }
    steps.extend([UninstallStep::Tree(state), UninstallStep::File(restart_due)]);
    if has_systemd && unit.is_known {
        steps.push(UninstallStep::Reload);
    }
    steps.push(UninstallStep::Runtime(runtime));
    if purge {
        steps.push(UninstallStep::Tree(etc));
    } else {
        steps.extend([settings, upgrade_key].map(UninstallStep::File));
        steps.extend([UninstallStep::Proxies(proxies), UninstallStep::EmptyDir(etc)]);
    }
    steps.push(UninstallStep::File(program));
    steps
}

impl UninstallStep {
    fn describe(&self) -> String {
        match self {
            Self::Disable => format!("systemctl disable --now {UNIT}"),
            Self::File(path) | Self::Proxies(path) => format!("remove {}", path.display()),
            Self::Tree(path) => format!("remove {} and all that is in it", path.display()),
            Self::EmptyDir(path) => format!("remove {} if nothing else is in it", path.display()),
            Self::Reload => "systemctl daemon-reload".to_owned(),
            Self::Runtime(_) => {
                "end the agent's pins and unfinished pulls in the container runtime".to_owned()
            }
        }
    }

    /// What it removes.
    fn path(&self) -> Option<&Path> {
        match self {
            Self::File(path) | Self::Proxies(path) | Self::Tree(path) | Self::EmptyDir(path) => Some(path),
            Self::Disable | Self::Reload | Self::Runtime(_) => None,
        }
    }

    /// Whether there's anything to remove.
    fn is_due(&self) -> bool {
        match self {
            Self::Disable | Self::Reload => true,
            Self::Runtime(endpoint) => !endpoint.has_no_trace(),
            Self::Proxies(path) => fs::read_to_string(path).is_ok_and(|text| is_ours(&text)),
            // This includes a dangling symbolic link.
            Self::File(path) => path.symlink_metadata().is_ok(),
            Self::Tree(path) | Self::EmptyDir(path) => {
                path.symlink_metadata().is_ok() && !(is_mount_point(path) && is_empty(path))
            }
        }
    }

    async fn carry_out(&self) -> anyhow::Result<()> {
        match self {
            Self::Disable => systemd::systemctl(&["--quiet", "disable", "--now", UNIT]).await?,
            Self::File(path) | Self::Proxies(path) => report_removal(path, fs::remove_file(path))?,
            Self::Tree(path) => remove_directory(path, |path| fs::remove_dir_all(path))?,
            Self::EmptyDir(path) if is_empty(path) => remove_directory(path, |path| fs::remove_dir(path))?,
            Self::EmptyDir(path) => {
                print_line(&format!("{} has files of others and stays; --purge removes it", path.display()))?;
            }
            Self::Reload => {
                systemd::systemctl(&["daemon-reload"]).await?;
                // A failed unit would be listed until the next boot. There may be none.
                let _ = systemd::systemctl(&["reset-failed", UNIT]).await;
            }
            Self::Runtime(endpoint) => clear_runtime(endpoint).await?,
        }
        Ok(())
    }
}

/// Carries out the steps, up to the first that fails.
async fn carry_out_all(steps: &[UninstallStep]) -> anyhow::Result<()> {
    for (at, step) in steps.iter().enumerate() {
        step.carry_out().await.with_context(|| {
            let left = steps[at..].iter().filter_map(UninstallStep::path);
            let left: Vec<_> = left.map(|path| path.display().to_string()).collect();
            format!("{} stays; when this is mended, run `uninstall` again", left.join(" "))
        })?;
    }
    Ok(())
}

/// Removes a directory, and a symbolic link to it. A mount point can only be emptied.
fn remove_directory(path: &Path, remove: impl Fn(&Path) -> io::Result<()>) -> anyhow::Result<()> {
    // A dangling link has no directory.
    if let Ok(directory) = path.canonicalize() {
        match remove(&directory) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && is_empty(&directory) => {
                print_line(&format!("{} is a mount point: it's empty now, and stays", directory.display()))?;
            }
            removed => report_removal(&directory, removed)?,
        }
    }
    if path.is_symlink() { report_removal(path, fs::remove_file(path)) } else { Ok(()) }
}

fn is_empty(directory: &Path) -> bool {
    fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_none())
}

/// Whether another file system is mounted there.
fn is_mount_point(directory: &Path) -> bool {
    let device = |path: &Path| fs::symlink_metadata(path).map(|found| found.dev()).ok();
    directory.parent().is_some_and(|parent| device(directory) != device(parent))
}

fn report_removal(path: &Path, removed: io::Result<()>) -> anyhow::Result<()> {
    match removed {
        Ok(()) => print_line(&format!("removed {}", path.display())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot remove {}", path.display())),
    }
}

/// Removes the agent from this machine.
pub(crate) async fn run(args: UninstallArgs) -> anyhow::Result<ExitCode> {
    let UninstallArgs { purge, dry_run } = args;
    let places = InstallPlaces::default();
    if !dry_run && !rustix::process::geteuid().is_root() {
        return Err(InstallRefusal::NotRoot("uninstall").into());
    }
    if machine::is_packaged(&places) {
        bail!(
            "a package has installed the agent: `apt purge edgecore-prepull`, or `dnf remove edgecore-prepull && rm -r {} \
             {}`, takes it away",
            places.etc.display(),
            places.state.display()
        );
    }
    let init = machine::find_init(&places);
    let has_systemd = init == Init::Systemd;
    let unit = if has_systemd { systemd::unit_state().await? } else { UnitState::default() };
    if !unit.is_running() && machine::stays_in_use(&places).await {
        bail!(
            "an edgecore-prepull is running with its state in {}: stop it first: {}",
            places.state.display(),
            explain_stop(init)
        );
    }
    let node = StateDir::new(&places.state).joined_as().ok().flatten();
    let mut steps = plan_uninstall(&places, runtime_of(&places.settings), has_systemd, &unit, purge);
    steps.retain(UninstallStep::is_due);
    if steps.iter().all(|step| matches!(step, UninstallStep::Runtime(_))) {
        steps.clear();
        print_line("nothing of edgecore-prepull is installed here")?;
    }
    if dry_run {
        steps.iter().try_for_each(|step| print_line(&step.describe()))?;
    }
    let removed = if dry_run { Ok(()) } else { carry_out_all(&steps).await };
    if !has_systemd && !steps.is_empty() {
        print_line(&format!("no systemd runs here: remove what starts the agent: {}", explain_stop(init)))?;
    }
    if let Some(node) = node {
        print_line(&format!(
            "the certificate of node {node} stays valid until it expires; if it may have been copied, run \
             `kubectl prepull node revoke {node}`"
        ))?;
    }
    removed.map(|()| ExitCode::SUCCESS)
}

/// The runtime in the settings, or the one in the usual places.
fn runtime_of(settings: &Path) -> RuntimeEndpoint {
    AgentSettings::from_file_leniently(settings)
        .runtime_endpoint
        .unwrap_or_else(RuntimeEndpoint::in_the_usual_places)
}

/// Ends all pins, since without an agent this node never learns that a job is over, and releases content of unfinished pulls:
/// the kubelet can't remove it, and it would stay for a month.
async fn clear_runtime(endpoint: &RuntimeEndpoint) -> anyhow::Result<()> {
    let puller = CriPuller::new(endpoint.clone());
    // One without CRI, as Docker's containerd, may still have pins and leases.
    if let Err(error) = puller.read_version().await
        && error.class != ErrorClass::Permanent
    {
        bail!(
            "cannot end the agent's pins and unfinished pulls: {error}. Start the runtime; if it is gone for good, remove by hand what \
             stays here"
        );
    }
    // A runtime without pins, or without leases, answers neither.
    if let Some(jobs) = puller.pinning_jobs().await.filter(|jobs| !jobs.is_empty()) {
        puller.unpin(JobsToUnpin::All).await.map_err(|error| {
            anyhow!(
                "images of {} jobs stay pinned, since the container runtime refuses: {error}; or remove the label \
                 io.cri-containerd.pinned from those that `ctr -n k8s.io images ls` lists with \
                 operations.kubeedge.io/pinned-by=edgecore-prepull",
                jobs.len()
            )
        })?;
        print_line(&format!("unpinned the images of {} jobs", jobs.len()))?;
    }
    if let Some(leases) = puller.count_leases().await.filter(|leases| *leases > 0) {
        puller.release_unwanted(Vec::new, Duration::ZERO).await;
        if puller.count_leases().await != Some(0) {
            bail!(
                "what unfinished pulls had downloaded stays in containerd for up to 30 days; or remove it with `ctr --namespace \
                 k8s.io leases ls --quiet | grep ^edgecore-prepull- | xargs ctr --namespace k8s.io leases rm`"
            );
        }
        print_line(&format!("released what {leases} unfinished pulls had downloaded"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::symlink;

    use prepull_program::errors::with_causes;

    use super::*;
    use crate::images::runtime::fake::{VersionAnswer, serve};

    /// A machine with every file that the agent may have, and a foreign file.
    fn installed(root: &Path) -> InstallPlaces {
        let places = InstallPlaces::under(root);
        for dir in [&places.etc, &places.drop_ins, &places.state, &places.state.join("pki")] {
            fs::create_dir_all(dir).unwrap();
        }
        fs::create_dir_all(places.program.parent().unwrap()).unwrap();
        fs::create_dir_all(places.restart_due.parent().unwrap()).unwrap();
        let InstallPlaces {
            program,
            unit,
            settings,
            proxies,
            upgrade_key,
            restart_due,
            state,
            etc,
            drop_ins,
            ..
        } = &places;
        let key = state.join("pki/client.key");
        for file in [
            program,
            unit,
            settings,
            proxies,
            upgrade_key,
            restart_due,
            &key,
            &etc.join("mine.yaml"),
            &drop_ins.join("mine.conf"),
        ] {
            fs::write(file, "").unwrap();
        }
        for file in places.replaced_whole() {
            fs::write(temporary_of(file), "").unwrap();
        }
        places
    }

    fn files_below(dir: &Path) -> Vec<String> {
        let mut files = Vec::new();
        for entry in fs::read_dir(dir).unwrap().flatten() {
            if entry.path().is_dir() {
                files.extend(files_below(&entry.path()));
            } else {
                files.push(entry.file_name().into_string().unwrap());
            }
        }
        files.sort();
        files
    }

    fn plan(root: &Path, purge: bool) -> Vec<UninstallStep> {
        let runtime = root.join("runtime.sock").display().to_string().parse().unwrap();
        let places = InstallPlaces::under(root);
        let mut steps = plan_uninstall(&places, runtime, false, &UnitState::default(), purge);
        steps.retain(UninstallStep::is_due);
        steps
    }

    #[tokio::test]
    async fn uninstall_spares_foreign_files_unless_purged() {
        for (purge, left) in [(false, &["mine.conf", "mine.yaml", "proxy.env"][..]), (true, &[])] {
            let dir = tempfile::tempdir().unwrap();
            let runtime = serve(&dir.path().join("runtime.sock"), VersionAnswer(Ok("containerd")));
            let places = installed(dir.path());
            carry_out_all(&plan(dir.path(), purge)).await.unwrap();
            drop(runtime);
            fs::remove_file(dir.path().join("runtime.sock")).unwrap();
            assert_eq!(files_below(dir.path()), left, "purge: {purge}");
            assert!(!places.state.exists());
            let again: Vec<_> =
                plan(dir.path(), purge).iter().filter_map(UninstallStep::path).map(Path::to_owned).collect();
            assert_eq!(again, if purge { vec![] } else { vec![places.etc] });
        }
    }

    #[tokio::test]
    async fn program_and_settings_wait_for_the_runtime() {
        for purge in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let places = installed(dir.path());
            let error = carry_out_all(&plan(dir.path(), purge)).await.unwrap_err();
            let said = with_causes(error.as_ref());
            let left =
                format!("{} stays; when this is mended, run `uninstall` again", places.program.display());
            assert!(said.contains(&left) && said.contains("runtime.sock"), "{said}");
            assert!(!places.state.exists() && !places.unit.exists());
            assert!(places.program.exists() && places.settings.exists());

            let _runtime = serve(&dir.path().join("runtime.sock"), VersionAnswer(Ok("containerd")));
            carry_out_all(&plan(dir.path(), purge)).await.unwrap();
            assert!(!places.program.exists() && !places.settings.exists());
        }
    }

    #[test]
    fn a_machine_without_a_runtime_has_no_such_step() {
        let dir = tempfile::tempdir().unwrap();
        let is_due = |socket: &str| {
            let socket = dir.path().join(socket).display().to_string();
            UninstallStep::Runtime(socket.parse().unwrap()).is_due()
        };
        assert!(is_due("stopped.sock") && !is_due("absent/runtime.sock"));
    }

    #[tokio::test]
    async fn a_linked_state_goes_with_its_content() {
        let dir = tempfile::tempdir().unwrap();
        let places = installed(dir.path());
        let data = dir.path().join("data");
        fs::rename(&places.state, &data).unwrap();
        symlink(&data, &places.state).unwrap();
        let state = UninstallStep::Tree(places.state.clone());
        state.carry_out().await.unwrap();
        assert!(!data.exists() && !state.is_due());
        symlink(&data, &places.state).unwrap();
        state.carry_out().await.unwrap();
        assert!(!state.is_due());
    }

    #[test]
    fn a_mount_point_is_emptied_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        // As the kernel answers for one.
        let remove = |_: &Path| Err(io::ErrorKind::ResourceBusy.into());
        remove_directory(dir.path(), remove).unwrap();
        fs::write(dir.path().join("of-a-mount-inside"), "").unwrap();
        assert!(remove_directory(dir.path(), remove).is_err());
        assert!(is_mount_point(Path::new("/proc")) && !is_mount_point(dir.path()));
    }

    #[test]
    fn the_unit_stops_before_its_files_go() {
        let plan = |unit: &UnitState| {
            plan_uninstall(&InstallPlaces::default(), "/r".parse().unwrap(), true, unit, false)
        };
        let steps = plan(&UnitState { is_known: true, ..UnitState::default() });
        let at = |step: &UninstallStep| steps.iter().position(|other| other == step).unwrap();
        assert_eq!(at(&UninstallStep::Disable), 0);
        assert!(at(&UninstallStep::Reload) > at(&UninstallStep::File(InstallPlaces::default().unit)));
        assert!(!plan(&UnitState::default()).contains(&UninstallStep::Disable));
    }
}
