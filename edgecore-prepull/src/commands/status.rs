//! `edgecore-prepull status`: the state of this machine, by the running agent, the disk and the container runtime.

mod text;

use std::io::Write as _;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::Context;
use humantime::parse_rfc3339;
use prepull_api::wire::Filesystem;
use prepull_program::errors::with_causes;
use serde::Serialize;
use tokio::time::timeout;

use crate::clock::timestamp;
use crate::cloud::identity::Identity;
use crate::commands::args::{StatusArgs, StatusOutput};
use crate::commands::install::places::InstallPlaces;
use crate::config::{AgentSettings, Effective, Listen};
use crate::health::get;
use crate::images::puller::Puller;
use crate::images::puller::cri::CriPuller;
use crate::images::runtime::RuntimeEndpoint;
use crate::node_clock::node_clock;
use crate::status::{AgentStatus, TaskStatus};
use crate::tasks::agent::TaskRecord;
use crate::tasks::{ledger, node};
use crate::upgrade::{TrialOutcome, UpgradeFiles};
use text::render_report;

/// Deadline of a question to the runtime: a person waits.
const RUNTIME_PATIENCE: Duration = Duration::from_secs(3);

/// What was found, or why it wasn't.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
enum Looked<T> {
    Error(String),
    #[serde(untagged)]
    Known(T),
}

impl<T> Looked<T> {
    fn known(&self) -> Option<&T> {
        match self {
            Self::Known(known) => Some(known),
            Self::Error(_) => None,
        }
    }
}

impl<T, E: std::fmt::Display> From<Result<T, E>> for Looked<T> {
    fn from(result: Result<T, E>) -> Self {
        match result {
            Ok(known) => Self::Known(known),
            Err(error) => Self::Error(error.to_string()),
        }
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct BoxReport {
    identity: Looked<IdentityStatus>,
    agent: Looked<AgentStatus>,
    /// How the last trial of another version ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    upgrade: Option<TrialOutcome>,
    runtime: Looked<RuntimeStatus>,
    /// Why the node's own windows let it download nothing now; absent while they do.
    #[serde(skip_serializing_if = "Option::is_none")]
    window: Option<String>,
    /// The tasks on the disk, where the agent doesn't answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    tasks: Option<Looked<Vec<TaskStatus>>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct IdentityStatus {
    node: String,
    /// In RFC 3339.
    certificate_until: String,
    has_expired: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct RuntimeStatus {
    version: String,
    disk: Looked<Filesystem>,
    /// Jobs that keep images from the kubelet's garbage collection; absent where the runtime can't pin.
    #[serde(skip_serializing_if = "Option::is_none")]
    pinning_jobs: Option<usize>,
}

impl BoxReport {
    /// Whether the machine can take part in jobs.
    fn is_well(&self) -> bool {
        self.agent.known().is_some_and(|agent| agent.cloud.connected)
            && self.identity.known().is_some_and(|identity| !identity.has_expired)
            && self.runtime.known().is_some()
    }

    fn time(&self) -> SystemTime {
        agent_time(&self.agent).unwrap_or_else(SystemTime::now)
    }
}

/// Prints the state. The exit status is 0 if the machine can take part in jobs.
pub(crate) async fn run(args: StatusArgs) -> anyhow::Result<ExitCode> {
    let output = args.output;
    let report = collect_report(&read_settings(args)?).await?;
    let text = match output {
        Some(StatusOutput::Json) => serde_json::to_string_pretty(&report)? + "\n",
        None => render_report(&report, report.time()),
    };
    std::io::stdout().write_all(text.as_bytes()).context("cannot write the status")?;
    Ok(if report.is_well() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The settings with which the agent runs, as far as its file and the flags have them.
fn read_settings(args: StatusArgs) -> anyhow::Result<Effective> {
    let StatusArgs { config, state_dir, runtime_endpoint, metrics_listen, output: _ } = args;
    let usual = InstallPlaces::default().settings;
    let file = config.or_else(|| usual.exists().then_some(usual));
    let file = file.as_deref().map(AgentSettings::from_file_by_hand).transpose()?.unwrap_or_default();
    Ok(AgentSettings { state_dir, runtime_endpoint, metrics_listen, ..AgentSettings::default() }
        .or_file(file))
}

async fn collect_report(settings: &Effective) -> anyhow::Result<BoxReport> {
    let state_dir = &settings.state_dir;
    let (agent, runtime) = tokio::join!(
        ask_agent(settings.metrics_listen),
        ask_runtime(settings.runtime_endpoint.clone().unwrap_or_else(RuntimeEndpoint::in_the_usual_places))
    );
    let time = agent_time(&agent);
    let identity = Identity::load(state_dir).map(|identity| IdentityStatus {
        node: identity.node().to_string(),
        certificate_until: humantime::format_rfc3339_seconds(identity.not_after()).to_string(),
        has_expired: time.map_or_else(|| identity.has_expired(), |time| identity.not_after() <= time),
    });
    let tasks = agent.known().is_none().then(|| {
        let records = ledger::read_beside_agent(state_dir);
        let status = |record: &TaskRecord| node::describe_task((record, "goes on when the agent runs")).1;
        let records = records.map(|records| records.iter().map(status).collect());
        records.map_err(|error| with_causes(&error)).into()
    });
    let upgrade = UpgradeFiles::in_state_dir(state_dir)
        .read_record()
        .ok()
        .and_then(|record| record.last_outcome().cloned());
    let mut clock = node_clock(settings.download_windows.clone())?;
    if let Some(agent) = agent.known() {
        clock.cloud_windows.clone_from(&agent.settings.windows);
    }
    let window = timestamp(time.unwrap_or_else(SystemTime::now))
        .and_then(|now| clock.own_openings().explain_wait(now));
    Ok(BoxReport { identity: identity.into(), agent, upgrade, runtime, window, tasks })
}

/// The time by which the agent goes: the cloud's, while this machine's clock may be years behind.
fn agent_time(agent: &Looked<AgentStatus>) -> Option<SystemTime> {
    parse_rfc3339(agent.known()?.time.as_deref()?).ok()
}

async fn ask_agent(listen: Listen) -> Looked<AgentStatus> {
    let Listen::On(address) = listen else {
        return Looked::Error("it can't be asked: --metrics-listen is off".to_owned());
    };
    match get(address, "/status").await {
        Ok(answer) => read_status(&answer, address),
        Err(error) => Looked::Error(format!("it does not answer at {address}: {error}")),
    }
}

fn read_status(answer: &str, address: SocketAddr) -> Looked<AgentStatus> {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((answer, ""));
    if !head.lines().next().is_some_and(|line| line.contains(" 200 ")) {
        return Looked::Error(format!("what answers at {address} is no agent, or one of an earlier version"));
    }
    serde_json::from_str(body).map_err(|error| format!("its answer is not readable: {error}")).into()
}

async fn ask_runtime(endpoint: RuntimeEndpoint) -> Looked<RuntimeStatus> {
    if let Err(error) = endpoint.find_socket().await {
        return Looked::Error(error.to_string());
    }
    let puller = CriPuller::by_hand(endpoint);
    let asked = async {
        let version = puller.read_version().await.map_err(|error| error.to_string())?;
        let disk = puller.read_filesystem().await.into();
        let pinning_jobs = puller.pinning_jobs().await.map(|jobs| jobs.len());
        Ok(RuntimeStatus { version, disk, pinning_jobs })
    };
    let late = Err(format!("the container runtime does not answer within {RUNTIME_PATIENCE:?}"));
    timeout(RUNTIME_PATIENCE, asked).await.unwrap_or(late).into()
}

#[cfg(test)]
mod tests;
