//! The steps that make the agent run on this machine, decided without touching anything.

use std::path::PathBuf;

use prepull_api::task::NodeName;
use serde_json::{Map, Value};

use super::places::{InstallPlaces, PROGRAM_OF_PACKAGE, UNIT};
use super::{proxies, settings};
use crate::cloud::endpoint::Urls;
use crate::cloud::identity::Connection;
use crate::config::AgentSettings;

/// The unit. Packages have the same one with another path of the program.
pub(crate) const UNIT_FILE: &str =
    include_str!("../../../../manifests/edgecore-prepull/edgecore-prepull.service");
/// The settings of a machine that has none yet: only comments and defaults.
const FIRST_SETTINGS: &str = include_str!("../../../../manifests/edgecore-prepull/config.yaml");

/// The init system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Init {
    Systemd,
    OpenRc,
    Runit,
    Container,
    Unknown,
}

/// Facts about this machine.
#[derive(Clone, Debug)]
#[allow(clippy::struct_excessive_bools, reason = "each is found by itself")]
pub(super) struct MachineFacts {
    pub(super) init: Init,
    /// Whether a package has installed program and unit.
    pub(super) is_packaged: bool,
    /// The running program.
    pub(super) program: PathBuf,
    /// Whether the unit starts the same program as the running one.
    pub(super) is_program_there: bool,
    pub(super) has_state_dir: bool,
    /// Whether `install` has put a program in place.
    pub(super) has_own_program: bool,
    /// The contents of the files that exist.
    pub(super) unit: Option<String>,
    pub(super) settings: Option<String>,
    pub(super) proxies: Option<String>,
    pub(super) upgrade_key: Option<String>,
    /// The proxies of the runtime, by variable. `None` if we can't read them.
    pub(super) runtime_proxies: Option<Vec<(String, String)>>,
    pub(super) is_enabled: bool,
    pub(super) is_running: bool,
    /// Whether an earlier run was interrupted between a change and its restart.
    pub(super) is_restart_due: bool,
    /// Whether a process other than the unit's uses the state directory.
    pub(super) is_state_in_use: bool,
    pub(super) host_name: String,
    pub(super) joined: Option<JoinedAs>,
}

/// The identity in the state directory.
#[derive(Clone, Debug)]
pub(super) struct JoinedAs {
    pub(super) node: NodeName,
    pub(super) has_expired: bool,
    pub(super) connection: Option<Connection>,
    /// Whether the node trusts the CA of the given token. True without a token.
    pub(super) trusts_token: bool,
    /// Whether a run that was interrupted before the restart got this certificate.
    pub(super) is_of_interrupted_run: bool,
}

/// The options of the command line.
#[derive(Clone, Debug, Default)]
pub(super) struct InstallWish {
    /// Empty to keep the URLs that the node has joined with.
    pub(super) enroll_urls: Urls,
    pub(super) tunnel_urls: Urls,
    pub(super) has_token: bool,
    pub(super) node: Option<NodeName>,
    pub(super) rejoin: bool,
    /// Public keys of releases, in PEM.
    pub(super) upgrade_key: Option<String>,
    /// By their names in the file.
    pub(super) settings: Map<String, Value>,
}

/// One step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum InstallStep {
    CreateStateDir,
    /// Get a certificate. With `renew`, an expired certificate may still be renewed without the token.
    Join {
        renew: bool,
    },
    /// Store new addresses of cloudcore.
    Redirect(Connection),
    CopyProgram,
    WriteUnit,
    WriteSettings(String),
    /// Make the agent use the proxies of the runtime.
    WriteProxies(String),
    /// Store the public keys of releases.
    WriteUpgradeKey(String),
    /// Remove a file that a package has replaced.
    Remove(PathBuf),
    Reload,
    /// Link the unit, again if its file has changed.
    Enable,
    Start,
    Restart,
    AwaitConnection,
    /// Explain how to start the agent without systemd.
    Explain(Init),
}

/// The steps, in this order. A run may stop after any of them; the same command then continues from there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InstallPlan {
    pub(super) node: NodeName,
    pub(super) connection: Connection,
    /// The file of the agent's proxies, as it will be.
    pub(super) proxies: Option<String>,
    pub(super) steps: Vec<InstallStep>,
}

/// Reason for doing nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InstallRefusal {
    #[error(
        "{0} must run as root: put `sudo` in front (with the token in --token-file), or look at what it would do with --dry-run"
    )]
    NotRoot(&'static str),
    #[error(
        "a package has installed {PROGRAM_OF_PACKAGE}, and this is another program: run `{PROGRAM_OF_PACKAGE} install` \
         with the same arguments, or remove the package first"
    )]
    Packaged,
    #[error(
        "another edgecore-prepull uses {}, in a pod of the DaemonSet perhaps: a node has one agent. Stop that one first: \
         end its process, or give the DaemonSet a nodeSelector without this node",
        .0.display()
    )]
    OtherAgent(PathBuf),
    #[error(
        "--state-dir cannot be chosen here: the unit lets the agent write to {} only (stateDir in {})",
        state.display(), file.display()
    )]
    StateDir { state: PathBuf, file: PathBuf },
    #[error("{}: {problem}", file.display())]
    Settings { file: PathBuf, problem: String },
    #[error(
        "--node-name {0:?} is not a node's name: lower-case letters, digits, '-' and '.', as in `kubectl get nodes`"
    )]
    NodeName(String),
    #[error(
        "this machine has joined as node {joined}, and not as {wanted}: give --node-name {joined}, or --rejoin and a token \
         for {wanted} to give {joined} up"
    )]
    OtherNode { joined: NodeName, wanted: NodeName },
    #[error("--server is missing: the host of cloudcore, a name or an address that is in its --advertise")]
    Server,
    #[error(
        "no join token is given, and this node has {0}: set PREPULL_TOKEN, or give --token-file FILE (`cloudcore-prepull \
         token create` prints one)"
    )]
    Token(&'static str),
}

/// Decides on the steps.
pub(super) fn plan_install(
    facts: &MachineFacts,
    wish: &InstallWish,
    places: &InstallPlaces,
) -> Result<InstallPlan, InstallRefusal> {
    if facts.is_packaged && !facts.is_program_there {
        return Err(InstallRefusal::Packaged);
    }
    let has_systemd = facts.init == Init::Systemd;
    // We can't query services of another init. If our program is in place, we assume that the running agent is ours.
    let is_ours = facts.is_running || (!has_systemd && (facts.has_own_program || facts.is_packaged));
    if facts.is_state_in_use && !is_ours {
        return Err(InstallRefusal::OtherAgent(places.state.clone()));
    }
    let settings = plan_settings(facts, wish, places)?;
    let node = choose_node(facts, wish)?;
    let (connection, joining) = plan_joining(facts, wish, &node)?;

    let mut steps = Vec::new();
    if !facts.has_state_dir {
        steps.push(InstallStep::CreateStateDir);
    }
    // First, because it fails most often: then nothing else is left behind.
    steps.extend(joining);
    if !facts.is_packaged && !facts.is_program_there {
        steps.push(InstallStep::CopyProgram);
    }
    let is_unit_due = has_systemd && !facts.is_packaged && facts.unit.as_deref() != Some(UNIT_FILE);
    if is_unit_due {
        steps.push(InstallStep::WriteUnit);
    }
    steps.extend(settings.map(InstallStep::WriteSettings));
    let new_proxies = proxies::plan_file(facts.proxies.as_deref(), facts.runtime_proxies.as_deref());
    let proxies = new_proxies.clone().or_else(|| facts.proxies.clone());
    steps.extend(new_proxies.map(InstallStep::WriteProxies));
    let replaced = find_replaced(facts, places);
    let is_unit_replaced = replaced.contains(&places.unit);
    steps.extend(replaced.into_iter().map(InstallStep::Remove));
    // An upgrade reads it.
    let upgrade_key = wish.upgrade_key.as_ref().filter(|key| facts.upgrade_key.as_ref() != Some(*key));
    steps.extend(upgrade_key.cloned().map(InstallStep::WriteUpgradeKey));
    if !has_systemd {
        steps.push(InstallStep::Explain(facts.init));
        return Ok(InstallPlan { node, connection, proxies, steps });
    }
    let has_changed = facts.is_restart_due || steps.iter().any(InstallStep::needs_restart);
    let is_reload_due = is_unit_due || is_unit_replaced || facts.is_restart_due;
    if is_reload_due {
        steps.push(InstallStep::Reload);
    }
    if is_reload_due || !facts.is_enabled {
        steps.push(InstallStep::Enable);
    }
    match (facts.is_running, has_changed) {
        (true, true) => steps.push(InstallStep::Restart),
        (true, false) => {}
        (false, _) => steps.push(InstallStep::Start),
    }
    steps.push(InstallStep::AwaitConnection);
    Ok(InstallPlan { node, connection, proxies, steps })
}

/// Files of an earlier `install` that would take precedence over those of a package that was installed since.
fn find_replaced(facts: &MachineFacts, places: &InstallPlaces) -> Vec<PathBuf> {
    if !facts.is_packaged {
        return Vec::new();
    }
    // An administrator's own unit starts the program of the package.
    let starts_ours = |unit: &String| unit.contains(&*places.program.to_string_lossy());
    let unit = facts.unit.as_ref().filter(|unit| starts_ours(unit)).map(|_| places.unit.clone());
    unit.into_iter().chain(facts.has_own_program.then(|| places.program.clone())).collect()
}

/// The new text of the settings, if it changes.
fn plan_settings(
    facts: &MachineFacts,
    wish: &InstallWish,
    places: &InstallPlaces,
) -> Result<Option<String>, InstallRefusal> {
    let file = places.settings.clone();
    let before = facts.settings.as_deref();
    let after = settings::apply_settings(before.unwrap_or(FIRST_SETTINGS), &wish.settings)
        .map_err(|problem| InstallRefusal::Settings { file: file.clone(), problem })?;
    let read = AgentSettings::from_text(&after).map_err(|problem| InstallRefusal::Settings {
        file: file.clone(),
        problem: format!("wrong{problem}"),
    })?;
    let has_urls = !wish.enroll_urls.is_empty() || !wish.tunnel_urls.is_empty();
    if has_urls && !(read.tunnel_url.is_empty() && read.enroll_url.is_empty()) {
        let problem =
            "tunnelUrl and enrollUrl override the addresses that are given here: remove them".to_owned();
        return Err(InstallRefusal::Settings { file, problem });
    }
    if read.state_dir.is_some_and(|dir| dir != InstallPlaces::default().state) {
        return Err(InstallRefusal::StateDir { state: places.state.clone(), file });
    }
    Ok((before != Some(after.as_str())).then_some(after))
}

fn choose_node(facts: &MachineFacts, wish: &InstallWish) -> Result<NodeName, InstallRefusal> {
    let joined = facts.joined.as_ref().map(|joined| &joined.node);
    // The same name that the kubelet and KubeEdge's EdgeCore derive from the host name.
    let of_host = || NodeName(facts.host_name.trim().to_lowercase());
    let node = wish.node.clone().or_else(|| joined.cloned()).unwrap_or_else(of_host);
    if !node.is_valid() {
        return Err(InstallRefusal::NodeName(node.0));
    }
    match joined {
        Some(joined) if *joined != node && !wish.rejoin => {
            Err(InstallRefusal::OtherNode { joined: joined.clone(), wanted: node })
        }
        _ => Ok(node),
    }
}

/// The addresses of cloudcore, and the step that gets a certificate, if one is needed.
fn plan_joining(
    facts: &MachineFacts,
    wish: &InstallWish,
    node: &NodeName,
) -> Result<(Connection, Option<InstallStep>), InstallRefusal> {
    let stored = facts.joined.as_ref().and_then(|joined| joined.connection.as_ref());
    let or_stored = |given: &Urls, stored: Option<&Urls>| {
        if given.is_empty() { stored.cloned().unwrap_or_default() } else { given.clone() }
    };
    let connection = Connection {
        tunnel_urls: or_stored(&wish.tunnel_urls, stored.map(|stored| &stored.tunnel_urls)),
        enroll_urls: or_stored(&wish.enroll_urls, stored.map(|stored| &stored.enroll_urls)),
        node_name: node.clone(),
    };
    if connection.tunnel_urls.is_empty() || connection.enroll_urls.is_empty() {
        return Err(InstallRefusal::Server);
    }
    let with_token = |why| {
        if wish.has_token { Ok(InstallStep::Join { renew: false }) } else { Err(InstallRefusal::Token(why)) }
    };
    let step = match &facts.joined {
        None => Some(with_token("not joined")?),
        Some(joined) if wish.rejoin && !joined.is_of_interrupted_run => Some(with_token("to join again")?),
        // The token is for another installation, or for a CA that was added while the node was away.
        Some(joined) if !joined.trusts_token => Some(InstallStep::Join { renew: false }),
        Some(joined) if joined.has_expired => Some(InstallStep::Join { renew: true }),
        Some(_) if stored != Some(&connection) => Some(InstallStep::Redirect(connection.clone())),
        Some(_) => None,
    };
    Ok((connection, step))
}

impl InstallStep {
    /// Description of the step for --dry-run.
    pub(super) fn describe(&self, plan: &InstallPlan, places: &InstallPlaces) -> String {
        match self {
            Self::CreateStateDir => format!("create {} (mode 0700)", places.state.display()),
            Self::Join { renew: false } => {
                format!("join as node {} at {}, with the token", plan.node, plan.connection.enroll_urls)
            }
            Self::Join { renew: true } => {
                format!("renew the certificate of node {}, or join with the token", plan.node)
            }
            Self::Redirect(to) => format!("store the addresses of cloudcore: {}", to.tunnel_urls),
            Self::CopyProgram => format!("copy this program to {} (mode 0755)", places.program.display()),
            Self::WriteUnit => format!("write {} (mode 0644)", places.unit.display()),
            Self::WriteSettings(text) => {
                let is_setting = |line: &&str| !line.trim_start().starts_with('#') && !line.trim().is_empty();
                let settings: Vec<_> = text.lines().filter(is_setting).collect();
                let settings = settings.join("\n    ");
                format!("write {} (mode 0644):\n    {settings}", places.settings.display())
            }
            Self::WriteProxies(text) => {
                format!("write {} (mode 0600): {}", places.proxies.display(), proxies::names(text))
            }
            Self::WriteUpgradeKey(_) => format!("write {} (mode 0644)", places.upgrade_key.display()),
            Self::Remove(path) => format!("remove {}, which a package has replaced", path.display()),
            Self::Reload => "systemctl daemon-reload".to_owned(),
            Self::Enable => format!("systemctl reenable {UNIT}"),
            Self::Start => format!("systemctl start {UNIT}"),
            Self::Restart => format!("systemctl restart {UNIT}"),
            Self::AwaitConnection => format!("wait until connected to {}", plan.connection.tunnel_urls),
            Self::Explain(_) => "say how to start the agent: no systemd runs here".to_owned(),
        }
    }

    /// Whether a running agent needs a restart to notice the step.
    pub(super) fn needs_restart(&self) -> bool {
        match self {
            Self::Join { .. }
            | Self::Redirect(_)
            | Self::CopyProgram
            | Self::WriteUnit
            | Self::WriteSettings(_)
            | Self::WriteProxies(_)
            | Self::Remove(_) => true,
            Self::CreateStateDir
            | Self::WriteUpgradeKey(_)
            | Self::Reload
            | Self::Enable
            | Self::Start
            | Self::Restart
            | Self::AwaitConnection
            | Self::Explain(_) => false,
        }
    }
}

#[cfg(test)]
mod tests;
