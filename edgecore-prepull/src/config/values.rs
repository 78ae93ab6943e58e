//! Types of single settings, and their syntax in flags and in the configuration file.

use std::fmt::{self, Display};
use std::net::SocketAddr;
use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::str::FromStr;
use std::time::Duration;

use prepull_api::download::Window;
use prepull_api::settings::KEEP_UNFINISHED;
use prepull_api::sites::is_address;
use prepull_api::wire::MAX_OPEN_TASKS;
use prepull_window::{BadWindow, parse_window, write_duration, write_window};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::images::runtime::RuntimeEndpoint;
use crate::units::{Amount, Percent};

/// Reachable only from the machine itself: the metrics of a node are for a collector on that node.
pub(super) const DEFAULT_METRICS_LISTEN: &str = "127.0.0.1:10004";

/// The value of `--metrics-listen` and of `--peer-listen`: an address, or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Listen {
    /// Listen nowhere.
    Off,
    /// Listen on this address.
    On(SocketAddr),
}

impl Default for Listen {
    fn default() -> Self {
        // The constant is a valid address; a test parses it.
        DEFAULT_METRICS_LISTEN.parse().unwrap_or(Self::Off)
    }
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            text => text.parse().map(Self::On).map_err(|_| {
                format!("{text:?} is not an address with a port: write 127.0.0.1:10004, or off")
            }),
        }
    }
}

/// A value of `--peer-advertise`: a host and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PeerAddressText(pub(crate) String);

impl FromStr for PeerAddressText {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if !is_address(text) {
            return Err(format!("{text:?} is not a host with a port: write 192.168.1.7:10006"));
        }
        Ok(Self(text.to_owned()))
    }
}

/// A time within bounds, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BoundedTime<const LEAST: u64, const MOST: u64>(pub(crate) Duration);

/// The value of `--peer-patience`. The cloud sends a reminder every 20 s; with less patience each box would download for itself.
/// After a day without a message from the cloud, waiting helps no box.
pub(crate) type PeerPatience = BoundedTime<30, 86_400>;

/// The value of `--keep-unfinished`.
pub(crate) type KeepTime =
    BoundedTime<{ KEEP_UNFINISHED.start().as_secs() }, { KEEP_UNFINISHED.end().as_secs() }>;

/// Three reminders of the cloud.
impl Default for PeerPatience {
    fn default() -> Self {
        Self(Duration::from_secs(60))
    }
}

impl<const LEAST: u64, const MOST: u64> FromStr for BoundedTime<LEAST, MOST> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let [least, most] = [LEAST, MOST].map(Duration::from_secs);
        let time = humantime::parse_duration(text).ok().filter(|time| (least..=most).contains(time));
        time.map(Self).ok_or_else(|| {
            let (least, most) = (write_duration(least), write_duration(most));
            format!("{text:?} is not a time from {least} to {most}: write 10m or 6h")
        })
    }
}

impl<const LEAST: u64, const MOST: u64> Serialize for BoundedTime<LEAST, MOST> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&humantime::format_duration(self.0))
    }
}

impl<'de, const LEAST: u64, const MOST: u64> Deserialize<'de> for BoundedTime<LEAST, MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        from_flag(deserializer)
    }
}

impl Serialize for PeerAddressText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

/// The value of `--max-tasks`: from one to as many tasks as a node holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct MaxTasks(pub(crate) NonZeroU32);

impl Default for MaxTasks {
    /// One, because tasks share the node's link: the first task is done sooner if it runs alone.
    fn default() -> Self {
        Self(NonZeroU32::MIN)
    }
}

impl FromStr for MaxTasks {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.parse().ok().filter(|number: &NonZeroU32| number.get() as usize <= MAX_OPEN_TASKS);
        number.map(Self).ok_or_else(|| format!("{text:?} is not a number from 1 to {MAX_OPEN_TASKS}"))
    }
}

/// The value of `--parallel-pulls`: at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct ParallelPulls(pub(crate) NonZeroUsize);

impl Default for ParallelPulls {
    /// The number of layers of one image that containerd fetches at a time. More would only share the same link.
    fn default() -> Self {
        Self(const { NonZeroUsize::new(3).expect("three is not zero") })
    }
}

impl FromStr for ParallelPulls {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse().map(Self).map_err(|_| format!("{text:?} is not a number of images: write 1 or more"))
    }
}

/// For the default in a help text.
impl fmt::Display for ParallelPulls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The value of `--image-gc-high-threshold`: from 1% to 100%. As for the kubelet, 100% switches it off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct GcThreshold(pub(crate) Percent);

impl FromStr for GcThreshold {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let percent = text.parse().ok().filter(|Percent(number)| (1..=100).contains(number));
        percent.map(Self).ok_or_else(|| format!("{text:?} is not a percentage from 1% to 100%"))
    }
}

/// A value of `--download-window`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DownloadWindow(pub(crate) Window);

impl FromStr for DownloadWindow {
    type Err = BadWindow;

    fn from_str(text: &str) -> Result<Self, BadWindow> {
        parse_window(text).map(Self)
    }
}

/// A number of bytes a second, at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rate(pub(crate) NonZeroU64);

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bytes = match text.parse() {
            Ok(Amount::Bytes(bytes)) => NonZeroU64::new(bytes),
            _ => None,
        };
        bytes
            .map(Self)
            .ok_or_else(|| format!("{text:?} is not a number of bytes a second: write 500KiB or 2MiB"))
    }
}

impl Serialize for Rate {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Amount::Bytes(self.0.get()).serialize(serializer)
    }
}

/// Has values in the file written as their flags are.
macro_rules! deserialize_from_flag {
    ($($value:ty),+ $(,)?) => {$(
        impl<'de> Deserialize<'de> for $value {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                from_flag(deserializer)
            }
        }
    )+};
}

deserialize_from_flag!(
    Amount,
    DownloadWindow,
    GcThreshold,
    Listen,
    MaxTasks,
    ParallelPulls,
    PeerAddressText,
    Percent,
    Rate,
    RuntimeEndpoint,
);

/// Deserializes a text, number or boolean of the file as a flag would parse it.
fn from_flag<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(deserializer: D) -> Result<T, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "one value is expected here, not a list or a map")]
    enum Scalar {
        /// YAML reads an unquoted `off` as a boolean.
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

impl Serialize for Amount {
    /// Exactly, and in the largest unit that leaves no fraction.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match *self {
            Self::Percent(part) => serializer.collect_str(&format_args!("{part}%")),
            Self::Bytes(bytes) => {
                let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
                let fits = |(_, shift): &(&str, u32)| bytes != 0 && bytes.trailing_zeros() >= *shift;
                let (unit, shift) = units.into_iter().find(fits).unwrap_or(("B", 0));
                serializer.collect_str(&format_args!("{}{unit}", bytes >> shift))
            }
        }
    }
}

impl Serialize for RuntimeEndpoint {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for Percent {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for Listen {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Off => serializer.serialize_str("off"),
            Self::On(address) => serializer.collect_str(address),
        }
    }
}

impl Serialize for DownloadWindow {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&write_window(&self.0))
    }
}
