//! The command line: commands, flags, and their help.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use prepull_program::log::LogArgs;

use crate::cloud::join::JoinArgs;
use crate::commands::install::args::{InstallArgs, UninstallArgs};
use crate::config::{AgentSettings, Amount, DownloadWindow, GcThreshold, Listen, ParallelPulls, Rate};
use crate::images::fetch::FetchMode;
use crate::images::runtime::RuntimeEndpoint;

/// Pulls images ahead on an edge node and reports how each fared.
#[derive(Debug, Parser)]
#[command(
    version,
    about,
    propagate_version = true,
    after_help = "\
Examples:
  PREPULL_TOKEN=TOKEN edgecore-prepull install --server cloudcore.example --node-name edge-1
  edgecore-prepull status
  edgecore-prepull uninstall
  edgecore-prepull pull nginx:1.25 redis:7"
)]
pub(crate) struct Cli {
    /// What to do
    #[command(subcommand)]
    pub(crate) command: AgentCommand,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum AgentCommand {
    /// Install the agent on this machine: program, unit, settings; join, start, wait until it is connected
    Install(Box<InstallArgs>),
    /// Take the agent off this machine, with all that it has kept
    Uninstall(UninstallArgs),
    /// Get a certificate for this node with a join token
    Join(JoinArgs),
    /// Run the agent: keep the tunnel up, pull what the cloud assigns, report
    Run(Box<RunArgs>),
    /// Pull images on this machine now, without the cloud
    Pull(PullArgs),
    /// Run another version of the agent on this machine, from a signed image; it goes back by itself if that one doesn't connect
    Upgrade(Box<UpgradeArgs>),
    /// Show whether this machine is connected, what it downloads, and what is in its way
    Status(StatusArgs),
    /// Print the completion script of a shell
    #[command(
        after_help = "Example:\n  edgecore-prepull completion bash > /etc/bash_completion.d/edgecore-prepull"
    )]
    Completion {
        /// The shell
        shell: Shell,
    },
}

/// The arguments of `status`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  edgecore-prepull status
  edgecore-prepull status -o json

As root: the state directory and the socket of the runtime are root's. Where the agent doesn't run, it shows what is on the disk.

Exit status: 0 if the agent is connected, its certificate has not expired, and the runtime answers; 1 if not, 2 for wrong usage.")]
pub(crate) struct StatusArgs {
    /// YAML file with the settings of the agent [default: /etc/edgecore-prepull/config.yaml, if it is there]
    #[arg(long, value_name = "FILE", env = "PREPULL_CONFIG")]
    pub(crate) config: Option<PathBuf>,
    /// Directory with the identity and the ledger [default: that of the settings]
    #[arg(long, value_name = "DIR", env = "PREPULL_STATE_DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    /// Socket of the container runtime [default: that of the settings]
    #[arg(long, value_name = "ENDPOINT", env = "PREPULL_RUNTIME_ENDPOINT")]
    pub(crate) runtime_endpoint: Option<RuntimeEndpoint>,
    /// Where the agent serves metrics and health [default: that of the settings]
    #[arg(long, value_name = "ADDR", env = "PREPULL_METRICS_LISTEN")]
    pub(crate) metrics_listen: Option<Listen>,
    /// What is printed [default: text for people]
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    pub(crate) output: Option<StatusOutput>,
}

/// What `status` prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum StatusOutput {
    /// JSON for programs
    Json,
}

/// Settings of the agent. A flag wins over its environment variable, and both over the file.
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  edgecore-prepull run
  edgecore-prepull run --runtime-endpoint unix:///run/k3s/containerd/containerd.sock --parallel-pulls 2
  edgecore-prepull run --config /etc/edgecore-prepull/config.yaml --log-format json
  edgecore-prepull run --image-credential-provider-config /etc/providers.yaml \\
      --image-credential-provider-bin-dir /usr/local/lib/providers

The configuration file is YAML with the flags' names in camelCase:
  runtimeEndpoint: unix:///run/containerd/containerd.sock
  parallelPulls: 3
  diskMinFree: 10%")]
pub(crate) struct RunArgs {
    /// YAML file with the same settings
    #[arg(long, value_name = "FILE", env = "PREPULL_CONFIG")]
    pub(crate) config: Option<PathBuf>,
    /// The settings that the file may hold as well
    #[command(flatten)]
    pub(crate) settings: AgentSettings,
    /// How to log
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

/// The arguments of `pull`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  edgecore-prepull pull nginx:1.25
  edgecore-prepull pull --docker-config ~/.docker/config.json registry.example/team/app:v1
  edgecore-prepull pull --max-download-rate 2MiB --download-window 'Mon-Fri 01:00+4h Europe/Berlin' nginx:1.25
  edgecore-prepull pull --image-credential-provider-config /etc/providers.yaml \\
      --image-credential-provider-bin-dir /usr/local/lib/providers registry.example/team/app:v1

The stderr of credential providers is shown here; the agent discards it.

Exit status: 0 if all images are there, 1 if at least one is not, 2 for wrong usage, 130 after Ctrl-C, 143 after SIGTERM.")]
pub(crate) struct PullArgs {
    /// The images
    #[arg(required = true, value_name = "IMAGE")]
    pub(crate) images: Vec<String>,
    /// How to pull them
    #[command(flatten)]
    pub(crate) how: PullOptions,
}

/// The arguments of `upgrade`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  edgecore-prepull upgrade --key /etc/edgecore-prepull/upgrade.pub registry.example/edgecore-prepull:0.2.0
  edgecore-prepull upgrade registry.example/edgecore-prepull:0.2.0
  edgecore-prepull upgrade --undo

The installed program stays, and launches the other one. Once that one is connected and the container runtime answers, it runs
from then on; else the program before runs again. A later `install`, or a package of another version, ends the upgrade.

The image is pulled as the agent pulls, and flags win: with its runtime, registries, credential providers and rate, and the
proxies of /etc/edgecore-prepull/proxy.env. It doesn't wait for the agent's download windows; give --download-window for that.

Exit status: 0 if the machine runs what was asked for, 1 if not, 2 for wrong usage.")]
pub(crate) struct UpgradeArgs {
    /// The image with the program, as it's released for the DaemonSet
    #[arg(value_name = "IMAGE", required_unless_present = "undo", conflicts_with = "undo")]
    pub(crate) image: Option<String>,
    /// Public key, as PEM, by which the image must be signed (`cosign sign --key`); may be repeated
    #[arg(long, value_name = "FILE", default_value = crate::upgrade::KEY)]
    pub(crate) key: Vec<PathBuf>,
    /// Time in which the program must be connected, with a container runtime that answers
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_within)]
    pub(crate) within: std::time::Duration,
    /// Run the installed program again
    #[arg(long)]
    pub(crate) undo: bool,
    /// YAML file with the settings of the agent [default: /etc/edgecore-prepull/config.yaml, if it is there]
    #[arg(long, value_name = "FILE", env = "PREPULL_CONFIG")]
    pub(crate) config: Option<PathBuf>,
    /// How to pull the image
    #[command(flatten)]
    pub(crate) how: PullOptions,
}

/// A day: a person waits for it.
fn parse_within(text: &str) -> Result<std::time::Duration, String> {
    const BOUNDS: std::ops::RangeInclusive<u64> = 10..=86_400;
    let within = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if BOUNDS.contains(&within.as_secs()) { Ok(within) } else { Err("from 10s to 1day".to_owned()) }
}

/// How images are pulled by hand.
#[derive(Clone, Debug, Args)]
pub(crate) struct PullOptions {
    /// Socket of the container runtime [default: found in the usual places]
    #[arg(long, value_name = "ENDPOINT", env = "PREPULL_RUNTIME_ENDPOINT")]
    pub(crate) runtime_endpoint: Option<RuntimeEndpoint>,
    /// A docker config.json with credentials [default: none; pull with credential providers, or anonymously]
    #[arg(long, value_name = "FILE", env = "PREPULL_DOCKER_CONFIG")]
    pub(crate) docker_config: Option<PathBuf>,
    /// The kubelet's CredentialProviderConfig, for images that --docker-config does not serve
    #[arg(long, value_name = "FILE", env = "PREPULL_IMAGE_CREDENTIAL_PROVIDER_CONFIG")]
    pub(crate) image_credential_provider_config: Option<PathBuf>,
    /// Directory of the programs that it names
    #[arg(long, value_name = "DIR", env = "PREPULL_IMAGE_CREDENTIAL_PROVIDER_BIN_DIR")]
    pub(crate) image_credential_provider_bin_dir: Option<PathBuf>,
    /// For tests: the time after which a program is killed
    #[arg(long, hide = true, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) image_credential_provider_timeout: Option<std::time::Duration>,
    /// Who downloads images: agent, runtime, or auto: the agent where it can
    #[arg(long, value_name = "WHO", env = "PREPULL_FETCH", default_value_t)]
    pub(crate) fetch: FetchMode,
    /// Bytes a second that all images together may download, as 2MiB [default: no limit]
    #[arg(long, value_name = "RATE", env = "PREPULL_MAX_DOWNLOAD_RATE")]
    pub(crate) max_download_rate: Option<Rate>,
    /// Download all layers whole, also those that were rebuilt from deltas: afterwards the image can be exported
    #[arg(long)]
    pub(crate) whole: bool,
    /// Directory with a hosts.toml for each registry [default: the config_path of containerd]
    #[arg(long, value_name = "DIR", env = "PREPULL_REGISTRY_CONFIG_PATH")]
    pub(crate) registry_config_path: Option<PathBuf>,
    /// No image is fetched that would fill the disk further: set it to the kubelet's --image-gc-high-threshold
    #[arg(long, value_name = "PERCENT", env = "PREPULL_IMAGE_GC_HIGH_THRESHOLD", default_value = "100%")]
    pub(crate) image_gc_high_threshold: GcThreshold,
    /// Space that stays free on the disk, as 10% or 5GiB [default: none]
    #[arg(long, value_name = "AMOUNT", env = "PREPULL_DISK_MIN_FREE")]
    pub(crate) disk_min_free: Option<Amount>,
    /// Window outside of which nothing is downloaded, as "Mon-Fri 01:00+4h Europe/Berlin"; may be repeated, separated by ;
    /// in the variable [default: always]
    #[arg(long, value_name = "WINDOW", env = "PREPULL_DOWNLOAD_WINDOW", value_delimiter = ';')]
    pub(crate) download_window: Vec<DownloadWindow>,
    /// Retries per image after an error that may be temporary
    #[arg(long, value_name = "TIMES", default_value_t = 3)]
    pub(crate) retries: u32,
    /// Time after which to give up; with windows, what lies in them
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = humantime::parse_duration)]
    pub(crate) timeout: std::time::Duration,
    /// Images that are pulled at the same time
    #[arg(long, value_name = "NUMBER", default_value_t)]
    pub(crate) parallel_pulls: ParallelPulls,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }
}
