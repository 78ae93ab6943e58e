//! Settings of the agent: from flags, the environment and a file, in this order of precedence.

mod lenient;
mod values;

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow};
use clap::Args;
use prepull_api::sites::MAX_ADDRESSES;
use serde::{Deserialize, Deserializer, Serialize};
use serde_saphyr::{DefaultMessageFormatter, MessageFormatter};

use crate::cloud::endpoint::{BadUrl, Urls, parse_enroll_url, parse_tunnel_url, printable_start};
use crate::cloud::identity::DEFAULT_STATE_DIR;
use crate::cloud::tunnel::dial::PeerAddress;
use crate::images::fetch::{
    DEFAULT_DISK_MIN_FREE, DEFAULT_GC_HIGH_THRESHOLD, FetchMode, FetchSettings, RoomRules,
};
use crate::images::kubelet::DEFAULT_KUBELET_DIR;
use crate::images::providers::ProviderSettings;
use crate::images::runtime::RuntimeEndpoint;
use crate::settings::Own;
pub use crate::units::{Amount, Percent};
pub(crate) use values::{
    DownloadWindow, GcThreshold, KeepTime, Listen, MaxTasks, ParallelPulls, PeerAddressText, PeerPatience,
    Rate,
};

/// The kubelet evicts pods below 100 MiB of available memory (memory.available).
const DEFAULT_MEM_MIN_FREE: Amount = Amount::Bytes(100 << 20);
/// Unpacking layers occupies a core, which a busier machine can't spare.
const DEFAULT_CPU_MAX_LOAD: Percent = Percent(90);

/// Settings from one source, the flags or the file. Every field is optional; [`Effective`] has the defaults.
#[derive(Args, Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct AgentSettings {
    /// Directory with the identity and the ledger [default: /var/lib/edgecore-prepull]
    #[arg(long, value_name = "DIR", env = "PREPULL_STATE_DIR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) state_dir: Option<PathBuf>,
    /// URL of the tunnel; several, repeated or separated by commas, are tried in turn [default: stored by `join`]
    #[arg(long, value_name = "URL", env = "PREPULL_TUNNEL_URL", value_delimiter = ',', value_parser = parse_tunnel_url)]
    #[serde(default, deserialize_with = "read_tunnel_urls", skip_serializing_if = "Vec::is_empty")]
    pub(crate) tunnel_url: Vec<String>,
    /// URL for renewing the certificate; several likewise [default: stored by `join`]
    #[arg(long, value_name = "URL", env = "PREPULL_ENROLL_URL", value_delimiter = ',', value_parser = parse_enroll_url)]
    #[serde(default, deserialize_with = "read_enroll_urls", skip_serializing_if = "Vec::is_empty")]
    pub(crate) enroll_url: Vec<String>,
    /// Socket of the container runtime [default: found in the usual places]
    #[arg(long, value_name = "ENDPOINT", env = "PREPULL_RUNTIME_ENDPOINT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) runtime_endpoint: Option<RuntimeEndpoint>,
    /// Address for metrics and health, or off [default: 127.0.0.1:10004]
    #[arg(long, value_name = "ADDR", env = "PREPULL_METRICS_LISTEN")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) metrics_listen: Option<Listen>,
    /// Tasks that run at the same time, from 1 to 64; further tasks wait [default: 1]
    #[arg(long, value_name = "NUMBER", env = "PREPULL_MAX_TASKS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) max_tasks: Option<MaxTasks>,
    /// Images that are pulled at the same time, over all tasks; at least 1 [default: 3]
    #[arg(long, value_name = "NUMBER", env = "PREPULL_PARALLEL_PULLS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) parallel_pulls: Option<ParallelPulls>,
    /// Window outside of which nothing is downloaded, as "Mon-Fri 01:00+4h Europe/Berlin"; may be repeated, separated by ;
    /// in the variable [default: always]
    #[arg(long, value_name = "WINDOW", env = "PREPULL_DOWNLOAD_WINDOW", value_delimiter = ';')]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) download_window: Vec<DownloadWindow>,
    /// Check item disk: free space that the image file system must have, as 10% or 5GiB [default: 10%]
    #[arg(long, value_name = "AMOUNT", env = "PREPULL_DISK_MIN_FREE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) disk_min_free: Option<Amount>,
    /// Check item mem: memory that must be available, as 5% or 256MiB [default: 100MiB]
    #[arg(long, value_name = "AMOUNT", env = "PREPULL_MEM_MIN_FREE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mem_min_free: Option<Amount>,
    /// Check item cpu: load per processor, over a minute, that must not be exceeded [default: 90%]
    #[arg(long, value_name = "PERCENT", env = "PREPULL_CPU_MAX_LOAD")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cpu_max_load: Option<Percent>,
    /// Who downloads images: agent, runtime, or auto: the agent where it can [default: auto]
    #[arg(long, value_name = "WHO", env = "PREPULL_FETCH")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) fetch: Option<FetchMode>,
    /// Bytes a second that all pulls of the node together may download, as 2MiB [default: no limit]
    #[arg(long, value_name = "RATE", env = "PREPULL_MAX_DOWNLOAD_RATE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) max_download_rate: Option<Rate>,
    /// Directory with a hosts.toml for each registry [default: the config_path of containerd]
    #[arg(long, value_name = "DIR", env = "PREPULL_REGISTRY_CONFIG_PATH")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) registry_config_path: Option<PathBuf>,
    /// Address at which the neighbours of the site read layers from this node, as 0.0.0.0:10006, or off [default: off]
    #[arg(long, value_name = "ADDR", env = "PREPULL_PEER_LISTEN")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peer_listen: Option<Listen>,
    /// Where they reach it, as HOST:PORT; may be repeated [default: the address that the tunnel is from, and the port of
    /// --peer-listen]
    #[arg(long, value_name = "HOST:PORT", env = "PREPULL_PEER_ADVERTISE", value_delimiter = ',')]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) peer_advertise: Vec<PeerAddressText>,
    /// Time without a message from the cloud after which this node downloads a layer that another node of the site
    /// should deliver [default: 60s]
    #[arg(long, value_name = "TIME", env = "PREPULL_PEER_PATIENCE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peer_patience: Option<PeerPatience>,
    /// Bytes a second that all neighbours together may read from this node, as 10MiB [default: no limit]
    #[arg(long, value_name = "RATE", env = "PREPULL_PEER_MAX_UPLOAD_RATE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peer_max_upload_rate: Option<Rate>,
    /// The kubelet's --image-gc-high-threshold: no image is fetched that would fill the disk further, except with images
    /// that the kubelet can remove; from 1% to 100%, which switches it off [default: 85%]
    #[arg(long, value_name = "PERCENT", env = "PREPULL_IMAGE_GC_HIGH_THRESHOLD")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) image_gc_high_threshold: Option<GcThreshold>,
    /// Remove images that nothing needs where one to be pulled doesn't fit otherwise, those that weren't needed for the
    /// longest time first [default: false, which leaves that to the kubelet]
    #[arg(long, value_name = "BOOL", env = "PREPULL_MAKE_ROOM", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) make_room: Option<bool>,
    /// How long to keep what unfinished pulls have fetched, once no task wants it, as 6h; from 1m to 336h. A full disk ends
    /// it earlier [default: 24h]
    #[arg(long, value_name = "TIME", env = "PREPULL_KEEP_UNFINISHED")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) keep_unfinished: Option<KeepTime>,
    /// Rebuild images from earlier ones and deltas, where the registry has deltas [default: true]
    #[arg(long, value_name = "BOOL", env = "PREPULL_DELTAS", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) deltas: Option<bool>,
    /// Root directory of the kubelet, whose records of pulls show when it will ask the registry for an image that is on the
    /// node; they are only read [default: /var/lib/kubelet]
    #[arg(long, value_name = "DIR", env = "PREPULL_KUBELET_DIR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) kubelet_dir: Option<PathBuf>,
    /// The kubelet's CredentialProviderConfig; needs --image-credential-provider-bin-dir too [default: none]
    #[arg(long, value_name = "FILE", env = "PREPULL_IMAGE_CREDENTIAL_PROVIDER_CONFIG")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) image_credential_provider_config: Option<PathBuf>,
    /// Directory of the programs that it names; they run as the user of the agent [default: none]
    #[arg(long, value_name = "DIR", env = "PREPULL_IMAGE_CREDENTIAL_PROVIDER_BIN_DIR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) image_credential_provider_bin_dir: Option<PathBuf>,
    /// For tests: the time after which a program is killed [default: 1m]
    #[arg(long, hide = true, value_name = "TIME", value_parser = humantime::parse_duration)]
    #[serde(skip)]
    pub(crate) image_credential_provider_timeout: Option<Duration>,
}

/// All settings, with their defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Effective {
    /// The directory with the identity and the ledger.
    pub(crate) state_dir: PathBuf,
    /// The URLs of the tunnel; empty for those that `join` stored.
    pub(crate) tunnel_urls: Urls,
    /// The URLs for renewing; empty for those that `join` stored.
    pub(crate) enroll_urls: Urls,
    /// The socket of the container runtime; none to look in the usual places.
    pub(crate) runtime_endpoint: Option<RuntimeEndpoint>,
    /// Where metrics and health are served.
    pub(crate) metrics_listen: Listen,
    /// Tasks that run at the same time.
    pub(crate) max_tasks: MaxTasks,
    /// Images that are pulled at the same time, over all tasks.
    pub(crate) parallel_pulls: NonZeroUsize,
    /// Outside of these nothing is downloaded; none: always.
    pub(crate) download_windows: Vec<DownloadWindow>,
    /// The limits of the check items.
    pub(crate) limits: CheckLimits,
    /// `--make-room`, if it's given: the cloud can't go beyond it.
    pub(crate) makes_room: Option<bool>,
    /// `--keep-unfinished`, if it's given, likewise.
    pub(crate) keep_unfinished: Option<Duration>,
    /// How images are downloaded.
    pub(crate) fetch: FetchSettings,
    /// How layers are shared with the neighbours of the site.
    pub(crate) peers: PeerSettings,
    /// The root directory of the kubelet.
    pub(crate) kubelet_dir: PathBuf,
    /// The node's credential providers.
    pub(crate) providers: ProviderSettings,
}

impl Effective {
    /// The upper bounds of what the cloud may set.
    pub(crate) fn own_bounds(&self) -> Own {
        Own {
            max_download_rate: self.fetch.max_rate,
            peer_max_upload_rate: self.peers.max_upload_rate.map(|Rate(rate)| rate),
            room: self.fetch.room,
            make_room: self.makes_room,
            keep_unfinished: self.keep_unfinished,
        }
    }
}

/// How layers are shared with the neighbours of the site.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PeerSettings {
    /// Where they read from this node.
    pub(crate) listen: Listen,
    /// Where they reach that; nothing for the address that the tunnel is from.
    pub(crate) advertise: Vec<PeerAddressText>,
    /// How long the cloud may be silent.
    pub(crate) patience: PeerPatience,
    /// Bytes a second that they may read.
    pub(crate) max_upload_rate: Option<Rate>,
}

impl PeerSettings {
    /// Where the neighbours reach this node, if it listens at this port.
    pub(crate) fn announced_address(&self, port: Option<u16>) -> PeerAddress {
        match port {
            None => PeerAddress::None,
            Some(port) if self.advertise.is_empty() => PeerAddress::Port(port),
            Some(_) => {
                let given = self.advertise.iter().take(MAX_ADDRESSES);
                PeerAddress::Given(given.map(|PeerAddressText(address)| address.clone()).collect())
            }
        }
    }
}

/// The problem with a file, preceded by its line: the line shows the field, which the error doesn't always name.
fn describe_problem(text: &str, error: &serde_saphyr::Error) -> String {
    let problem = DefaultMessageFormatter.format_message(error.without_snippet());
    let place = error.location().and_then(|at| {
        let line = usize::try_from(at.line()).ok()?.checked_sub(1)?;
        Some(format!(", line {}, {:?}", line + 1, printable_start(text.lines().nth(line)?.trim())))
    });
    format!("{}: {}", place.unwrap_or_default(), printable_start(&problem))
}

/// The URLs of the flags if there are any, or else those of the file.
fn first_given(flag: Vec<String>, file: Vec<String>) -> Urls {
    let flag = Urls::from(flag);
    if flag.is_empty() { file.into() } else { flag }
}

fn read_tunnel_urls<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    read_urls(deserializer, parse_tunnel_url)
}

fn read_enroll_urls<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    read_urls(deserializer, parse_enroll_url)
}

fn read_urls<'de, D: Deserializer<'de>>(
    deserializer: D,
    parse: fn(&str) -> Result<String, BadUrl>,
) -> Result<Vec<String>, D::Error> {
    let urls: Vec<String> = Urls::deserialize(deserializer)?.into();
    urls.iter().map(|url| parse(url)).collect::<Result<_, _>>().map_err(serde::de::Error::custom)
}

/// The limits of the check items: requirements that a node must meet before a task pulls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckLimits {
    /// Free space that the image file system must have (check item disk).
    pub disk_min_free: Amount,
    /// Memory that must be available (check item mem).
    pub mem_min_free: Amount,
    /// Load per processor, over a minute, that must not be exceeded (check item cpu).
    pub cpu_max_load: Percent,
}

impl Default for CheckLimits {
    fn default() -> Self {
        Self {
            disk_min_free: DEFAULT_DISK_MIN_FREE,
            mem_min_free: DEFAULT_MEM_MIN_FREE,
            cpu_max_load: DEFAULT_CPU_MAX_LOAD,
        }
    }
}

impl AgentSettings {
    /// Reads a file. An unknown key is an error that names the key.
    pub(crate) fn from_file(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read --config {}", path.display()))?;
        Self::from_text(&text).map_err(|problem| anyhow!("--config {}{problem}", path.display()))
    }

    /// Parses the text of a file. The error begins with the line where the problem is, to be appended to the file's
    /// name.
    pub(crate) fn from_text(text: &str) -> Result<Self, String> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        serde_saphyr::from_str(text).map_err(|error| describe_problem(text, &error))
    }

    /// Fills in what is not set from `file`, and then from the defaults.
    pub(crate) fn or_file(self, file: Self) -> Effective {
        let Self {
            state_dir,
            tunnel_url,
            enroll_url,
            runtime_endpoint,
            metrics_listen,
            max_tasks,
            parallel_pulls,
            download_window,
            disk_min_free,
            mem_min_free,
            cpu_max_load,
            fetch,
            max_download_rate,
            registry_config_path,
            peer_listen,
            peer_advertise,
            peer_patience,
            peer_max_upload_rate,
            image_gc_high_threshold,
            make_room,
            keep_unfinished,
            deltas,
            kubelet_dir,
            image_credential_provider_config,
            image_credential_provider_bin_dir,
            image_credential_provider_timeout,
        } = self;
        let defaults = CheckLimits::default();
        let limits = CheckLimits {
            disk_min_free: disk_min_free.or(file.disk_min_free).unwrap_or(defaults.disk_min_free),
            mem_min_free: mem_min_free.or(file.mem_min_free).unwrap_or(defaults.mem_min_free),
            cpu_max_load: cpu_max_load.or(file.cpu_max_load).unwrap_or(defaults.cpu_max_load),
        };
        let gc_high_threshold = image_gc_high_threshold.or(file.image_gc_high_threshold);
        Effective {
            state_dir: state_dir.or(file.state_dir).unwrap_or_else(|| DEFAULT_STATE_DIR.into()),
            tunnel_urls: first_given(tunnel_url, file.tunnel_url),
            enroll_urls: first_given(enroll_url, file.enroll_url),
            runtime_endpoint: runtime_endpoint.or(file.runtime_endpoint),
            metrics_listen: metrics_listen.or(file.metrics_listen).unwrap_or_default(),
            max_tasks: max_tasks.or(file.max_tasks).unwrap_or_default(),
            parallel_pulls: parallel_pulls.or(file.parallel_pulls).unwrap_or_default().0,
            download_windows: if download_window.is_empty() { file.download_window } else { download_window },
            limits,
            makes_room: make_room.or(file.make_room),
            keep_unfinished: keep_unfinished.or(file.keep_unfinished).map(|time| time.0),
            fetch: FetchSettings {
                mode: fetch.or(file.fetch).unwrap_or_default(),
                max_rate: max_download_rate.or(file.max_download_rate).map(|Rate(rate)| rate),
                hosts_dir: registry_config_path.or(file.registry_config_path),
                room: RoomRules {
                    gc_high_threshold: gc_high_threshold
                        .map_or(DEFAULT_GC_HIGH_THRESHOLD, |GcThreshold(percent)| percent),
                    disk_min_free: limits.disk_min_free,
                    make_room: make_room.or(file.make_room).unwrap_or(false),
                },
                deltas: deltas.or(file.deltas).unwrap_or(true),
                whole: false,
            },
            peers: PeerSettings {
                listen: peer_listen.or(file.peer_listen).unwrap_or(Listen::Off),
                advertise: if peer_advertise.is_empty() { file.peer_advertise } else { peer_advertise },
                patience: peer_patience.or(file.peer_patience).unwrap_or_default(),
                max_upload_rate: peer_max_upload_rate.or(file.peer_max_upload_rate),
            },
            kubelet_dir: kubelet_dir.or(file.kubelet_dir).unwrap_or_else(|| DEFAULT_KUBELET_DIR.into()),
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
