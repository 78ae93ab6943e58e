//! Settings of the agent: flags, environment and file, in this order of precedence.

mod values;

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow};
use clap::Args;
use serde::{Deserialize, Deserializer};
use serde_saphyr::{DefaultMessageFormatter, MessageFormatter};

use crate::cloud::endpoint::{BadUrl, Urls, printable};
use crate::images::runtime::RuntimeEndpoint;
pub use values::{Amount, Listen, MaxTasks, Percent};
pub(crate) use values::{enroll_url, tunnel_url};

/// Where identity and ledger are kept.
pub const DEFAULT_STATE_DIR: &str = "/var/lib/edgecore-prepull";
/// As many as containerd fetches layers of one image at a time: more only shares the same link.
// The value is not zero.
pub const DEFAULT_PARALLEL_PULLS: NonZeroUsize = NonZeroUsize::new(3).expect("three is not zero");
/// What the kubelet's garbage collection leaves free by default is 15 %; below 10 % it evicts pods
/// (nodefs.available), so a pull must not take a node there.
const DEFAULT_DISK_MIN_FREE: Amount = Amount::Percent(10);
/// The kubelet evicts pods below 100 MiB of available memory (memory.available).
const DEFAULT_MEM_MIN_FREE: Amount = Amount::Bytes(100 << 20);
/// Unpacking layers takes a core: a machine that is busy beyond this has better to do.
const DEFAULT_CPU_MAX_LOAD: Percent = Percent(90);

/// What may be set. Every field is optional here; [`Effective`] has the defaults.
#[derive(Args, Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Settings {
    /// Folder with the identity and the ledger [default: /var/lib/edgecore-prepull]
    #[arg(long, value_name = "DIR", env = "PREPULL_STATE_DIR")]
    pub state_dir: Option<PathBuf>,
    /// Where the tunnel is; several, repeated or with commas, are tried in turn [default: as `join` stored it]
    #[arg(long, value_name = "URL", env = "PREPULL_TUNNEL_URL", value_delimiter = ',', value_parser = tunnel_url)]
    #[serde(default, deserialize_with = "tunnel_urls")]
    pub tunnel_url: Vec<String>,
    /// Where the certificate is renewed; several likewise [default: as `join` stored it]
    #[arg(long, value_name = "URL", env = "PREPULL_ENROLL_URL", value_delimiter = ',', value_parser = enroll_url)]
    #[serde(default, deserialize_with = "enroll_urls")]
    pub enroll_url: Vec<String>,
    /// Socket of the container runtime [default: found in the usual places]
    #[arg(long, value_name = "ENDPOINT", env = "PREPULL_RUNTIME_ENDPOINT")]
    pub runtime_endpoint: Option<RuntimeEndpoint>,
    /// Address for metrics and health, or off [default: 127.0.0.1:10004]
    #[arg(long, value_name = "ADDR", env = "PREPULL_METRICS_LISTEN")]
    pub metrics_listen: Option<Listen>,
    /// Tasks that are worked on at the same time, from 1 to 64; more wait for their turn [default: 1]
    #[arg(long, value_name = "NUMBER", env = "PREPULL_MAX_TASKS")]
    pub max_tasks: Option<MaxTasks>,
    /// Images that are pulled at the same time, over all tasks [default: 3]
    #[arg(long, value_name = "NUMBER", env = "PREPULL_PARALLEL_PULLS")]
    pub parallel_pulls: Option<NonZeroUsize>,
    /// Check item disk: room that the image file system must have, as 10% or 5GiB [default: 10%]
    #[arg(long, value_name = "AMOUNT", env = "PREPULL_DISK_MIN_FREE")]
    pub disk_min_free: Option<Amount>,
    /// Check item mem: memory that must be available, as 5% or 256MiB [default: 100MiB]
    #[arg(long, value_name = "AMOUNT", env = "PREPULL_MEM_MIN_FREE")]
    pub mem_min_free: Option<Amount>,
    /// Check item cpu: load per processor, over a minute, that must not be exceeded [default: 90%]
    #[arg(long, value_name = "PERCENT", env = "PREPULL_CPU_MAX_LOAD")]
    pub cpu_max_load: Option<Percent>,
    /// The kubelet's CredentialProviderConfig; takes --image-credential-provider-bin-dir as well [default: none]
    #[arg(long, value_name = "FILE", env = "PREPULL_IMAGE_CREDENTIAL_PROVIDER_CONFIG")]
    pub image_credential_provider_config: Option<PathBuf>,
    /// Where the programs are that it names: they are run as the user that the agent runs as [default: none]
    #[arg(long, value_name = "DIR", env = "PREPULL_IMAGE_CREDENTIAL_PROVIDER_BIN_DIR")]
    pub image_credential_provider_bin_dir: Option<PathBuf>,
    /// For tests: a program that takes longer is killed [default: 1m]
    #[arg(long, hide = true, value_name = "TIME", value_parser = humantime::parse_duration)]
    #[serde(skip)]
    pub image_credential_provider_timeout: Option<Duration>,
}

/// All settings, with their defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Effective {
    /// Identity and ledger.
    pub state_dir: PathBuf,
    /// Empty: as `join` stored it.
    pub tunnel_urls: Urls,
    /// Empty: as `join` stored it.
    pub enroll_urls: Urls,
    /// None: to be found.
    pub runtime_endpoint: Option<RuntimeEndpoint>,
    /// Metrics and health.
    pub metrics_listen: Listen,
    /// Tasks at the same time.
    pub max_tasks: MaxTasks,
    /// Images at the same time.
    pub parallel_pulls: NonZeroUsize,
    /// What the check items look for.
    pub limits: Limits,
    /// Credential providers of the kubelet.
    pub providers: ProviderSettings,
}

/// Where the kubelet's credential providers are configured: both, or neither.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProviderSettings {
    /// The kubelet's CredentialProviderConfig.
    pub config: Option<PathBuf>,
    /// Of the programs.
    pub bin_dir: Option<PathBuf>,
    /// None: the kubelet's.
    pub timeout: Option<Duration>,
}

/// What is wrong with the file, once, and in which line: that names the field, which the error does not always do.
fn wrong(text: &str, error: &serde_saphyr::Error) -> String {
    let problem = DefaultMessageFormatter.format_message(error.without_snippet());
    let place = error.location().and_then(|at| {
        let line = usize::try_from(at.line()).ok()?.checked_sub(1)?;
        Some(format!(", line {}, {:?}", line + 1, printable(text.lines().nth(line)?.trim())))
    });
    format!("{}: {}", place.unwrap_or_default(), printable(&problem))
}

fn either(flag: Vec<String>, file: Vec<String>) -> Urls {
    let flag = Urls::from(flag);
    if flag.is_empty() { file.into() } else { flag }
}

fn tunnel_urls<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    one_or_many(deserializer, tunnel_url)
}

fn enroll_urls<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    one_or_many(deserializer, enroll_url)
}

fn one_or_many<'de, D: Deserializer<'de>>(
    deserializer: D,
    url: fn(&str) -> Result<String, BadUrl>,
) -> Result<Vec<String>, D::Error> {
    let urls: Vec<String> = Urls::deserialize(deserializer)?.into();
    urls.iter().map(|text| url(text)).collect::<Result<_, _>>().map_err(serde::de::Error::custom)
}

/// What the check items look for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Of the image file system.
    pub disk_min_free: Amount,
    /// Of the machine's memory.
    pub mem_min_free: Amount,
    /// Per processor.
    pub cpu_max_load: Percent,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            disk_min_free: DEFAULT_DISK_MIN_FREE,
            mem_min_free: DEFAULT_MEM_MIN_FREE,
            cpu_max_load: DEFAULT_CPU_MAX_LOAD,
        }
    }
}

impl Settings {
    /// Reads a file. An unknown key is an error that names it.
    pub fn from_file(path: &Path) -> anyhow::Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("read --config {}", path.display()))?;
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        serde_saphyr::from_str(&text)
            .map_err(|error| anyhow!("--config {}{}", path.display(), wrong(&text, &error)))
    }

    /// Fills in what is not set here from `file`, and then from the defaults.
    pub fn over(self, file: Self) -> Effective {
        let Self {
            state_dir,
            tunnel_url,
            enroll_url,
            runtime_endpoint,
            metrics_listen,
            max_tasks,
            parallel_pulls,
            disk_min_free,
            mem_min_free,
            cpu_max_load,
            image_credential_provider_config,
            image_credential_provider_bin_dir,
            image_credential_provider_timeout,
        } = self;
        let limits = Limits::default();
        Effective {
            state_dir: state_dir.or(file.state_dir).unwrap_or_else(|| DEFAULT_STATE_DIR.into()),
            tunnel_urls: either(tunnel_url, file.tunnel_url),
            enroll_urls: either(enroll_url, file.enroll_url),
            runtime_endpoint: runtime_endpoint.or(file.runtime_endpoint),
            metrics_listen: metrics_listen.or(file.metrics_listen).unwrap_or_default(),
            max_tasks: max_tasks.or(file.max_tasks).unwrap_or_default(),
            parallel_pulls: parallel_pulls.or(file.parallel_pulls).unwrap_or(DEFAULT_PARALLEL_PULLS),
            limits: Limits {
                disk_min_free: disk_min_free.or(file.disk_min_free).unwrap_or(limits.disk_min_free),
                mem_min_free: mem_min_free.or(file.mem_min_free).unwrap_or(limits.mem_min_free),
                cpu_max_load: cpu_max_load.or(file.cpu_max_load).unwrap_or(limits.cpu_max_load),
            },
            providers: ProviderSettings {
                config: image_credential_provider_config.or(file.image_credential_provider_config),
                bin_dir: image_credential_provider_bin_dir.or(file.image_credential_provider_bin_dir),
                timeout: image_credential_provider_timeout,
            },
        }
    }
}

#[cfg(test)]
mod tests;
