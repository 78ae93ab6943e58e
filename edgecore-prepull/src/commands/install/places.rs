//! The paths of an installed agent.

use std::path::{Path, PathBuf};

use crate::cloud::identity::DEFAULT_STATE_DIR;
use crate::upgrade;

/// The unit's name.
pub(crate) const UNIT: &str = "edgecore-prepull.service";
/// The program of a package, which the package's unit starts: packages don't install to /usr/local.
pub(crate) const PROGRAM_OF_PACKAGE: &str = "/usr/bin/edgecore-prepull";

/// The files and directories of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InstallPlaces {
    pub(crate) program: PathBuf,
    pub(crate) unit: PathBuf,
    /// The administrator's additions to the unit, by `systemctl edit`.
    pub(crate) drop_ins: PathBuf,
    /// Directories with the units of packages.
    pub(crate) units_of_packages: [PathBuf; 2],
    pub(crate) program_of_package: PathBuf,
    /// The directory of `settings`. The files of credential providers may be there as well.
    pub(crate) etc: PathBuf,
    pub(crate) settings: PathBuf,
    /// The environment of the agent: proxies.
    pub(crate) proxies: PathBuf,
    /// Public keys of releases.
    pub(crate) upgrade_key: PathBuf,
    pub(crate) state: PathBuf,
    /// Exists from the first change until the restart that it needs. A boot removes it, because that restarts
    /// everything.
    pub(crate) restart_due: PathBuf,
    /// Exists while systemd runs.
    pub(crate) systemd: PathBuf,
}

impl Default for InstallPlaces {
    fn default() -> Self {
        Self::under(Path::new("/"))
    }
}

impl InstallPlaces {
    /// The key with which a run of `install` joins. It exists until a run restarts the agent, and over a boot: a token lets a
    /// node join once, so the next run must know whether this one has used it.
    pub(crate) fn joining_key(&self) -> PathBuf {
        self.state.join("pki/joining")
    }

    /// The files that are replaced as a whole, each through a temporary file beside it.
    pub(crate) fn replaced_whole(&self) -> [&Path; 5] {
        [&self.program, &self.unit, &self.settings, &self.proxies, &self.upgrade_key]
    }

    /// The paths below another root than `/`.
    pub(crate) fn under(root: &Path) -> Self {
        let at = |path: &str| root.join(path.trim_start_matches('/'));
        Self {
            program: at("/usr/local/bin/edgecore-prepull"),
            unit: at("/etc/systemd/system/edgecore-prepull.service"),
            drop_ins: at("/etc/systemd/system/edgecore-prepull.service.d"),
            units_of_packages: ["/usr/lib", "/lib"].map(|lib| at(lib).join("systemd/system").join(UNIT)),
            program_of_package: at(PROGRAM_OF_PACKAGE),
            etc: at("/etc/edgecore-prepull"),
            settings: at("/etc/edgecore-prepull/config.yaml"),
            proxies: at("/etc/edgecore-prepull/proxy.env"),
            upgrade_key: at(upgrade::KEY),
            state: at(DEFAULT_STATE_DIR),
            restart_due: at("/run/edgecore-prepull.restart"),
            systemd: at("/run/systemd/system"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::install::plan::UNIT_FILE;

    #[test]
    fn the_unit_starts_the_installed_program() {
        let InstallPlaces { program, settings, proxies, state, .. } = InstallPlaces::default();
        let start = format!("ExecStart={} run --config {}\n", program.display(), settings.display());
        assert!(UNIT_FILE.contains(&start), "{start}");
        assert!(UNIT_FILE.contains(&format!("\nEnvironmentFile=-{}\n", proxies.display())));
        assert!(UNIT_FILE.contains("\nStateDirectory=edgecore-prepull\nStateDirectoryMode=0700\n"));
        assert!(UNIT_FILE.contains(&format!("\nConditionPathExists={}/pki/client.crt\n", state.display())));
    }
}
