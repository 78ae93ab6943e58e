//! Settings of the agent: flags, environment and file, in this order of precedence.

use std::fmt;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::Context;
use clap::Args;
use serde::{Deserialize, Deserializer};

/// Where identity and ledger are kept.
pub const DEFAULT_STATE_DIR: &str = "/var/lib/edgecore-prepull";
/// As many as containerd fetches layers of one image at a time: more only shares the same link.
// The value is not zero.
pub const DEFAULT_PARALLEL_PULLS: NonZeroUsize = NonZeroUsize::new(3).expect("three is not zero");
/// Only from the machine itself: metrics of an edge are for its own collector.
const DEFAULT_METRICS_LISTEN: &str = "127.0.0.1:10004";
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
    /// Where the tunnel is; `join` stores it [default: as stored]
    #[arg(long, value_name = "URL", env = "PREPULL_TUNNEL_URL")]
    pub tunnel_url: Option<String>,
    /// Where the certificate is renewed; `join` stores it [default: as stored]
    #[arg(long, value_name = "URL", env = "PREPULL_ENROLL_URL")]
    pub enroll_url: Option<String>,
    /// Socket of the container runtime [default: found in the usual places]
    #[arg(long, value_name = "ENDPOINT", env = "PREPULL_RUNTIME_ENDPOINT")]
    pub runtime_endpoint: Option<String>,
    /// Address for metrics and health, or off [default: 127.0.0.1:10004]
    #[arg(long, value_name = "ADDR", env = "PREPULL_METRICS_LISTEN")]
    pub metrics_listen: Option<Listen>,
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
}

/// All settings, with their defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Effective {
    /// Identity and ledger.
    pub state_dir: PathBuf,
    /// None: as `join` stored it.
    pub tunnel_url: Option<String>,
    /// None: as `join` stored it.
    pub enroll_url: Option<String>,
    /// None: to be found.
    pub runtime_endpoint: Option<String>,
    /// Metrics and health.
    pub metrics_listen: Listen,
    /// Images at the same time.
    pub parallel_pulls: NonZeroUsize,
    /// What the check items look for.
    pub limits: Limits,
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
            .with_context(|| format!("--config {} is not what it should be", path.display()))
    }

    /// Fills in what is not set here from `file`, and then from the defaults.
    pub fn over(self, file: Self) -> Effective {
        let Self {
            state_dir,
            tunnel_url,
            enroll_url,
            runtime_endpoint,
            metrics_listen,
            parallel_pulls,
            disk_min_free,
            mem_min_free,
            cpu_max_load,
        } = self;
        let limits = Limits::default();
        Effective {
            state_dir: state_dir.or(file.state_dir).unwrap_or_else(|| DEFAULT_STATE_DIR.into()),
            tunnel_url: tunnel_url.or(file.tunnel_url),
            enroll_url: enroll_url.or(file.enroll_url),
            runtime_endpoint: runtime_endpoint.or(file.runtime_endpoint),
            metrics_listen: metrics_listen.or(file.metrics_listen).unwrap_or_default(),
            parallel_pulls: parallel_pulls.or(file.parallel_pulls).unwrap_or(DEFAULT_PARALLEL_PULLS),
            limits: Limits {
                disk_min_free: disk_min_free.or(file.disk_min_free).unwrap_or(limits.disk_min_free),
                mem_min_free: mem_min_free.or(file.mem_min_free).unwrap_or(limits.mem_min_free),
                cpu_max_load: cpu_max_load.or(file.cpu_max_load).unwrap_or(limits.cpu_max_load),
            },
        }
    }
}

/// An address to listen on, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listen {
    /// Nowhere.
    Off,
    /// There.
    On(SocketAddr),
}

impl Default for Listen {
    fn default() -> Self {
        // The constant is an address; a test reads it.
        DEFAULT_METRICS_LISTEN.parse().unwrap_or(Self::Off)
    }
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            text => text
                .parse()
                .map(Self::On)
                .map_err(|_| format!("{text:?} is no address: write 127.0.0.1:10004, or off")),
        }
    }
}

/// A part of a whole, or a number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// Of the whole.
    Percent(u8),
    /// Regardless of the whole.
    Bytes(u64),
}

impl Amount {
    /// In bytes, of this whole.
    pub fn of(self, whole: u64) -> u64 {
        match self {
            // At most 100, and the product is taken in 128 bits.
            Self::Percent(part) => {
                u64::try_from(u128::from(whole) * u128::from(part) / 100).unwrap_or(u64::MAX)
            }
            Self::Bytes(bytes) => bytes,
        }
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Percent(part) => write!(f, "{part}%"),
            Self::Bytes(bytes) => write!(f, "{} MiB", bytes >> 20),
        }
    }
}

impl FromStr for Amount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no amount: write 10%, 512MiB or 5GiB");
        if let Some(part) = text.strip_suffix('%') {
            let part = part.trim().parse().ok().filter(|part| *part <= 100).ok_or_else(wrong)?;
            return Ok(Self::Percent(part));
        }
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let unit: u64 = match unit.trim() {
            "" | "B" => 1,
            "KiB" | "Ki" => 1 << 10,
            "MiB" | "Mi" => 1 << 20,
            "GiB" | "Gi" => 1 << 30,
            "TiB" | "Ti" => 1 << 40,
            _ => return Err(wrong()),
        };
        number
            .parse::<u64>()
            .ok()
            .and_then(|number| number.checked_mul(unit))
            .map(Self::Bytes)
            .ok_or_else(wrong)
    }
}

/// A percentage that may be beyond 100.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Percent(pub u32);

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}%", self.0)
    }
}

impl FromStr for Percent {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.strip_suffix('%').unwrap_or(text).trim().parse();
        number.map(Self).map_err(|_| format!("{text:?} is no percentage: write 90%"))
    }
}

/// Reads whatever a flag would take, be it a text or a number in the file.
fn from_flag<'de, D: Deserializer<'de>, T: FromStr<Err = String>>(deserializer: D) -> Result<T, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Scalar {
        /// YAML's `off`, unquoted.
        Switch(bool),
        Number(u64),
        Text(String),
    }
    let text = match Scalar::deserialize(deserializer)? {
        Scalar::Switch(on) => if on { "on" } else { "off" }.to_owned(),
        Scalar::Number(number) => number.to_string(),
        Scalar::Text(text) => text,
    };
    text.parse().map_err(serde::de::Error::custom)
}

impl<'de> Deserialize<'de> for Amount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        from_flag(deserializer)
    }
}

impl<'de> Deserialize<'de> for Percent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        from_flag(deserializer)
    }
}

impl<'de> Deserialize<'de> for Listen {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        from_flag(deserializer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_as_people_write_them() {
        for (text, amount) in [
            ("10%", Amount::Percent(10)),
            ("0%", Amount::Percent(0)),
            ("5GiB", Amount::Bytes(5 << 30)),
            ("512Mi", Amount::Bytes(512 << 20)),
            ("100", Amount::Bytes(100)),
        ] {
            assert_eq!(text.parse(), Ok(amount), "{text}");
        }
        for text in ["", "%", "101%", "-1", "5 parsecs", "99999999999999999999", "1.5GiB"] {
            assert!(text.parse::<Amount>().is_err(), "{text}");
        }
        assert_eq!(Amount::Percent(10).of(u64::MAX), u64::MAX / 10);
        assert_eq!(Listen::default(), Listen::On(DEFAULT_METRICS_LISTEN.parse().unwrap()));
    }

    #[test]
    fn a_flag_wins_over_the_file_and_the_file_over_the_default() {
        let file: Settings =
            serde_saphyr::from_str("parallelPulls: 7\nstateDir: /x\ndiskMinFree: 5%\nmetricsListen: off\n")
                .unwrap();
        let flags = Settings { state_dir: Some("/y".into()), ..Settings::default() };
        let effective = flags.over(file);
        assert_eq!((effective.state_dir, effective.parallel_pulls.get()), (PathBuf::from("/y"), 7));
        assert_eq!(effective.limits.disk_min_free, Amount::Percent(5));
        assert_eq!(effective.limits.cpu_max_load, DEFAULT_CPU_MAX_LOAD);
        assert_eq!(effective.metrics_listen, Listen::Off);
    }

    #[test]
    fn an_unknown_key_is_named() {
        let error = serde_saphyr::from_str::<Settings>("paralelPulls: 7\n").unwrap_err().to_string();
        assert!(error.contains("paralelPulls"), "{error}");
    }
}
