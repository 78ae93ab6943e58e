//! Values as people write them, in flags and in the file alike.

use std::fmt::{self, Display};
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::str::FromStr;

use prepull_api::wire::MAX_OPEN_TASKS;
use serde::{Deserialize, Deserializer};

use crate::cloud::endpoint::{BadUrl, ENROLL_SCHEME, Endpoint, TUNNEL_SCHEME};
use crate::images::runtime::RuntimeEndpoint;

/// Only from the machine itself: metrics of an edge are for its own collector.
pub(super) const DEFAULT_METRICS_LISTEN: &str = "127.0.0.1:10004";

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

/// Tasks at the same time: from one to as many as a node holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaxTasks(pub NonZeroU32);

impl Default for MaxTasks {
    /// Tasks share the node's link, and the one that came first is done sooner alone.
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
            // Nothing is nothing in any unit.
            "" if number.parse() == Ok(0) => 1,
            "" if !number.is_empty() => {
                return Err(format!("{text:?} has no unit: write 10%, 512MiB or 5GiB"));
            }
            "B" => 1,
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

/// Reads a URL of the tunnel.
pub(crate) fn tunnel_url(text: &str) -> Result<String, BadUrl> {
    url(text, TUNNEL_SCHEME)
}

/// Reads a URL for joining and renewing.
pub(crate) fn enroll_url(text: &str) -> Result<String, BadUrl> {
    url(text, ENROLL_SCHEME)
}

/// An empty one counts as none, as a variable that is set to nothing.
fn url(text: &str, scheme: &'static str) -> Result<String, BadUrl> {
    let text = text.trim();
    if !text.is_empty() {
        Endpoint::parse(text, scheme)?;
    }
    Ok(text.to_owned())
}

/// Reads whatever a flag would take, be it a text or a number in the file.
fn from_flag<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(deserializer: D) -> Result<T, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "one value is expected here, not a list or a map")]
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

impl<'de> Deserialize<'de> for RuntimeEndpoint {
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

impl<'de> Deserialize<'de> for MaxTasks {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        from_flag(deserializer)
    }
}
