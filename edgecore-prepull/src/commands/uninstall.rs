//! `edgecore-prepull uninstall`: removes the files of `install`, and the agent's state.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};

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
use crate::images::puller::{JobsToUnpin, Puller};
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
}

/// Decides on the steps. Files that don't exist need none.
fn plan_uninstall(
    places: &InstallPlaces,
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
        steps.extend([UninstallStep::Tree(drop_ins), UninstallStep::Tree(etc)]);
    } else {
        steps.extend([settings, upgrade_key].map(UninstallStep::File));
        steps.push(UninstallStep::Proxies(proxies));
        steps.push(UninstallStep::EmptyDir(etc));
    }
    steps.extend([
        UninstallStep::Tree(state),
        UninstallStep::File(restart_due),
        UninstallStep::File(program),
    ]);
    if has_systemd && unit.is_known {
        steps.push(UninstallStep::Reload);
    }
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
        }
    }

    /// Whether there's anything to remove.
    fn is_due(&self) -> bool {
        match self {
            Self::Disable | Self::Reload => true,
            Self::Proxies(path) => fs::read_to_string(path).is_ok_and(|text| is_ours(&text)),
            // This includes a dangling symbolic link.
            Self::File(path) | Self::Tree(path) | Self::EmptyDir(path) => path.symlink_metadata().is_ok(),
        }
    }

    async fn carry_out(&self) -> anyhow::Result<()> {
        match self {
            Self::Disable => systemd::systemctl(&["--quiet", "disable", "--now", UNIT]).await?,
            Self::File(path) | Self::Proxies(path) => report_removal(path, fs::remove_file(path))?,
            Self::Tree(path) => report_removal(path, fs::remove_dir_all(path))?,
            Self::EmptyDir(path) => match fs::remove_dir(path) {
                Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
                    return print_line(&format!(
                        "{} has files of others and stays; --purge removes it",
                        path.display()
                    ));
                }
                removed => report_removal(path, removed)?,
            },
            Self::Reload => {
                systemd::systemctl(&["daemon-reload"]).await?;
                // A failed unit would be listed until the next boot. There may be none.
                let _ = systemd::systemctl(&["reset-failed", UNIT]).await;
            }
        }
        Ok(())
    }
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
    if !unit.is_running() && machine::is_state_in_use(&places) {
        bail!(
            "an edgecore-prepull is running with its state in {}: stop it first: {}",
            places.state.display(),
            explain_stop(init)
        );
    }
    let node = StateDir::new(&places.state).joined_as().ok().flatten();
    let runtime = runtime_of(&places.settings);
    let steps = plan_uninstall(&places, has_systemd, &unit, purge)
        .into_iter()
        .filter(UninstallStep::is_due)
        .collect::<Vec<_>>();
    for step in &steps {
        if dry_run {
            print_line(&step.describe())?;
        } else {
            step.carry_out()
                .await
                .context("not everything is removed; when that is mended, run `uninstall` again")?;
        }
    }
    if steps.is_empty() {
        print_line("nothing of edgecore-prepull is installed here")?;
    }
    // The agent is stopped now, so it can't pin again.
    if !steps.is_empty() && !dry_run {
        let puller = CriPuller::new(runtime);
        unpin_all(&puller).await?;
        release_all(&puller).await?;
    }
    if !has_systemd && !steps.is_empty() {
        print_line(&format!("no systemd runs here: remove what starts the agent: {}", explain_stop(init)))?;
    }
    if let Some(node) = node {
        print_line(&format!(
            "the certificate of node {node} stays valid until it expires; if it may have been copied, run \
             `kubectl prepull node revoke {node}`"
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The runtime in the settings, or the one in the usual places.
fn runtime_of(settings: &Path) -> RuntimeEndpoint {
    AgentSettings::from_file_leniently(settings)
        .runtime_endpoint
        .unwrap_or_else(RuntimeEndpoint::in_the_usual_places)
}

/// Ends all pins: without an agent this node never learns that a job is over.
async fn unpin_all(puller: &CriPuller) -> anyhow::Result<()> {
    // There are no pins of ours, or the runtime is gone as well.
    let Some(jobs) = puller.pinning_jobs().await.filter(|jobs| !jobs.is_empty()) else { return Ok(()) };
    match puller.unpin(JobsToUnpin::All).await {
        Ok(()) => print_line(&format!("unpinned the images of {} jobs", jobs.len())),
        Err(error) => print_line(&format!(
            "images of {} jobs stay pinned, since the container runtime says: {error}; remove the label \
             io.cri-containerd.pinned from those that `ctr -n k8s.io images ls` lists with \
             operations.kubeedge.io/pinned-by=edgecore-prepull",
            jobs.len()
        )),
    }
}

/// Releases content of unfinished pulls in containerd. The kubelet can't remove it, and it would stay for a month.
async fn release_all(puller: &CriPuller) -> anyhow::Result<()> {
    // There are none, or the runtime has no leases or is gone as well.
    let Some(leases) = puller.count_leases().await.filter(|leases| *leases > 0) else { return Ok(()) };
    puller.release_unwanted(&[], Duration::ZERO).await;
    match puller.count_leases().await {
        Some(0) => print_line(&format!("released what {leases} unfinished pulls had downloaded")),
        _ => print_line(
            "what unfinished pulls had downloaded stays in containerd for up to 30 days; remove it with `ctr \
                  --namespace k8s.io leases ls --quiet | grep ^edgecore-prepull- | xargs ctr --namespace k8s.io leases rm`",
        ),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

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

    #[tokio::test]
    async fn uninstall_spares_foreign_files_unless_purged() {
        for (purge, left) in [(false, &["mine.conf", "mine.yaml", "proxy.env"][..]), (true, &[])] {
            let dir = tempfile::tempdir().unwrap();
            let places = installed(dir.path());
            let steps = plan_uninstall(&places, false, &UnitState::default(), purge);
            for step in steps.iter().filter(|step| step.is_due()) {
                step.carry_out().await.unwrap();
            }
            assert_eq!(files_below(dir.path()), left, "purge: {purge}");
            assert!(!places.state.exists());
            let mut again = plan_uninstall(&places, false, &UnitState::default(), purge);
            again.retain(UninstallStep::is_due);
            assert_eq!(again, if purge { vec![] } else { vec![UninstallStep::EmptyDir(places.etc)] });
        }
    }

    #[test]
    fn the_unit_stops_before_its_files_go() {
        let known = UnitState { is_known: true, ..UnitState::default() };
        let steps = plan_uninstall(&InstallPlaces::default(), true, &known, false);
        assert_eq!(
            (steps.first(), steps.last()),
            (Some(&UninstallStep::Disable), Some(&UninstallStep::Reload))
        );
        assert!(
            !plan_uninstall(&InstallPlaces::default(), true, &UnitState::default(), false)
                .contains(&UninstallStep::Disable)
        );
    }
}
