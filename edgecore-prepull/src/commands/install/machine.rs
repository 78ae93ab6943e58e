//! Looks at the machine, and collects the facts for the plan.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, anyhow};
use rustix::fs::{FlockOperation, flock};
use tokio::time::{Instant, sleep};

use super::places::InstallPlaces;
use super::plan::{Init, InstallWish, JoinedAs, MachineFacts};
use super::proxies;
use super::systemd::{self, UnitState};
use crate::cloud::identity::{Connection, Identity, IdentityError, StateDir};
use crate::config::AgentSettings;
use crate::images::runtime::RuntimeEndpoint;

/// How long a process may take to end that was killed a moment ago: it holds the lock until then.
const ENDING: Duration = Duration::from_secs(2);

/// The mode of the program.
pub(super) const PROGRAM_MODE: u32 = 0o755;

/// Collects the facts for [`super::plan`]. `ca` is the CA of the token, if there is one.
pub(super) async fn collect_facts(
    places: &InstallPlaces,
    ca: Option<&[u8; 32]>,
    wish: &InstallWish,
) -> anyhow::Result<MachineFacts> {
    let init = find_init(places);
    let unit = if init == Init::Systemd { systemd::unit_state().await? } else { UnitState::default() };
    let program = std::env::current_exe().context("cannot find the path of this program")?;
    let is_packaged = is_packaged(places);
    let is_program_there = if is_packaged {
        is_same_file(&program, &places.program_of_package)
    } else {
        is_same_program(&program, &places.program)?
    };
    Ok(MachineFacts {
        init,
        is_packaged,
        program,
        is_program_there,
        has_state_dir: places.state.is_dir(),
        has_own_program: places.program.exists(),
        unit: read_if_present(&places.unit)?,
        settings: read_if_present(&places.settings)?,
        proxies: read_if_present(&places.proxies)?,
        upgrade_key: read_if_present(&places.upgrade_key)?,
        runtime_proxies: proxies::of_runtime(&runtime(places, wish)).await,
        is_enabled: unit.is_enabled,
        is_running: unit.is_running(),
        is_restart_due: places.restart_due.exists(),
        // A running agent of ours isn't in the way.
        is_state_in_use: if unit.is_running() || init != Init::Systemd {
            is_state_in_use(places)
        } else {
            stays_in_use(places).await
        },
        host_name: read_if_present(Path::new("/proc/sys/kernel/hostname"))?.unwrap_or_default(),
        joined: find_identity(places, ca)?,
    })
}

/// The runtime that the agent will use.
fn runtime(places: &InstallPlaces, wish: &InstallWish) -> RuntimeEndpoint {
    let given = wish.settings.get("runtimeEndpoint").and_then(|endpoint| endpoint.as_str()?.parse().ok());
    let stored = || AgentSettings::from_file_leniently(&places.settings).runtime_endpoint;
    given.or_else(stored).unwrap_or_else(RuntimeEndpoint::in_the_usual_places)
}

/// Whether a package has installed the agent.
pub(crate) fn is_packaged(places: &InstallPlaces) -> bool {
    places.units_of_packages.iter().any(|unit| unit.exists())
}

/// The init system of this machine.
pub(crate) fn find_init(places: &InstallPlaces) -> Init {
    // The test of sd_booted(3). systemd in a container counts as well.
    if places.systemd.is_dir() {
        return Init::Systemd;
    }
    for (init, signs) in [
        (Init::OpenRc, &["/run/openrc", "/sbin/openrc-run"][..]),
        (Init::Runit, &["/run/runit", "/etc/runit/runsvdir"]),
        (Init::Container, &["/.dockerenv", "/run/.containerenv", "/var/run/secrets/kubernetes.io"]),
    ] {
        if signs.iter().any(|sign| Path::new(sign).exists()) {
            return init;
        }
    }
    // A pod without a token of a service account has none of these files, but the address of the API server.
    if std::env::var_os("KUBERNETES_SERVICE_HOST").is_some() { Init::Container } else { Init::Unknown }
}

fn read_if_present(path: &Path) -> anyhow::Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(anyhow!(error).context(format!("cannot read {}", path.display()))),
    }
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    matches!((one.canonicalize(), other.canonicalize()), (Ok(one), Ok(other)) if one == other)
}

fn is_same_program(running: &Path, installed: &Path) -> anyhow::Result<bool> {
    let Ok(there) = fs::metadata(installed) else { return Ok(false) };
    let here = fs::metadata(running).with_context(|| format!("cannot read {}", running.display()))?;
    if there.permissions().mode() & 0o7777 != PROGRAM_MODE || there.len() != here.len() {
        return Ok(false);
    }
    Ok(is_same_file(running, installed) || fs::read(running)? == fs::read(installed)?)
}

/// Whether a process holds the lock of a running agent, and isn't ending.
pub(crate) async fn stays_in_use(places: &InstallPlaces) -> bool {
    let until = Instant::now() + ENDING;
    while is_state_in_use(places) {
        if Instant::now() >= until {
            return true;
        }
        sleep(ENDING / 20).await;
    }
    false
}

/// Whether a process holds the lock of a running agent.
fn is_state_in_use(places: &InstallPlaces) -> bool {
    let lock = places.state.join("lock");
    let Ok(file) = fs::OpenOptions::new().write(true).open(lock) else { return false };
    matches!(flock(&file, FlockOperation::NonBlockingLockExclusive), Err(rustix::io::Errno::WOULDBLOCK))
}

fn find_identity(places: &InstallPlaces, ca: Option<&[u8; 32]>) -> anyhow::Result<Option<JoinedAs>> {
    match Identity::load(&places.state) {
        Ok(identity) => Ok(Some(JoinedAs {
            node: identity.node(),
            has_expired: identity.has_expired(),
            // A broken file is written again.
            connection: Connection::load(&places.state).ok(),
            trusts_token: ca.is_none_or(|ca| identity.is_trusted(ca)),
            is_of_interrupted_run: fs::read(places.joining_key())
                .is_ok_and(|key| Some(key) == StateDir::new(&places.state).certified_key()),
        })),
        // A new certificate fixes a broken one.
        Err(
            IdentityError::NotJoined(_) | IdentityError::Malformed { .. } | IdentityError::Unusable { .. },
        ) => Ok(None),
        Err(IdentityError::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupted_join_is_known_after_a_boot() {
        let root = tempfile::tempdir().unwrap();
        let places = InstallPlaces::under(root.path());
        let state = StateDir::new(&places.state);
        fs::create_dir_all(state.pki()).unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::default();
        params.distinguished_name.push(rcgen::DnType::CommonName, "system:node:edge-1");
        let certificate = params.self_signed(&key).unwrap().pem();
        for (name, text) in
            [("ca.crt", &certificate), ("client.crt", &certificate), ("client.key", &key.serialize_pem())]
        {
            fs::write(state.pki().join(name), text).unwrap();
        }
        let is_known = || find_identity(&places, None).unwrap().unwrap().is_of_interrupted_run;
        assert!(!is_known());
        // A boot empties /run, where the mark of a restart is.
        fs::write(places.joining_key(), state.certified_key().unwrap()).unwrap();
        assert!(is_known());
        fs::write(places.joining_key(), "another").unwrap();
        assert!(!is_known());
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_is_ending_isnt_in_the_way() {
        let root = tempfile::tempdir().unwrap();
        let places = InstallPlaces::under(root.path());
        assert!(!stays_in_use(&places).await, "there is no lock");
        fs::create_dir_all(&places.state).unwrap();
        let agent = fs::File::create(places.state.join("lock")).unwrap();
        flock(&agent, FlockOperation::NonBlockingLockExclusive).unwrap();
        assert!(stays_in_use(&places).await);
        let ends = async {
            sleep(ENDING / 2).await;
            drop(agent);
        };
        assert!(!tokio::join!(stays_in_use(&places), ends).0);
    }
}
