//! The download terms of a task: rate limit, windows, signatures, pins.
//!
//! [`DownloadTerms`] travel with each [`crate::wire::Assign`], may change while the task runs, and are never stored on
//! the edge. When a window is open is computed by the crate `prepull-window`, which knows the time zones.

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::task::millis;

/// Most windows of a job or of a node: two for each day of the week, and two for what else there is.
pub const MAX_WINDOWS: usize = 16;
/// Longest duration of a window: windows recur weekly, so that a longer one would overlap itself.
pub const MAX_WINDOW_DURATION: Duration = Duration::from_secs(7 * 24 * 3600);
/// Most public keys of a job: the current and the next one of a few teams.
pub const MAX_VERIFICATION_KEYS: usize = 8;
/// Longest public key in bytes: one of RSA-4096 takes 800, so that all of them stay far below
/// [`crate::wire::MAX_MESSAGE`].
pub const MAX_VERIFICATION_KEY: usize = 8 * 1024;
/// Longest name of a time zone in bytes. The longest of IANA's has 32.
pub const MAX_ZONE_NAME: usize = 64;

/// How a task may download.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DownloadTerms {
    /// Bytes a second of this task on the node. Absent: only the cap of the node counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_rate: Option<NonZeroU64>,
    /// When the task may download. Empty: always. At most [`MAX_WINDOWS`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub windows: Vec<Window>,
    /// How much later than others this node begins in each window. It still ends with the window.
    #[serde(default, with = "millis", skip_serializing_if = "Duration::is_zero")]
    pub delay: Duration,
    /// Whether the images are kept from the kubelet's garbage collection.
    #[serde(default, skip_serializing_if = "is_false")]
    pub pin: bool,
    /// What the signatures of the images must be. Absent: they are not looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verify: Option<Verification>,
    /// Whether the node shares layers with the others of its site.
    #[serde(default, skip_serializing_if = "is_false")]
    pub share: bool,
    /// Bytes a second of its site. The cloud gives each node a part of them, and a node without one waits. A node that helps
    /// itself because its time runs out keeps to the whole. Absent: the site has no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub site_rate: Option<NonZeroU64>,
    /// Whether the job is paused. Its windows are then [`Window::never`], by which earlier agents stop as well.
    #[serde(default, skip_serializing_if = "is_false")]
    pub paused: bool,
    /// Whether an image may be rebuilt from an earlier one on the node and a delta.
    #[serde(default, skip_serializing_if = "Deltas::is_auto")]
    pub deltas: Deltas,
}

impl DownloadTerms {
    /// Whether nothing is said of the download.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Whether a node downloads what has changed since an earlier image, if its registry offers that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Deltas {
    /// A delta where one fits, and otherwise the layer.
    #[default]
    Auto,
    /// Only whole layers.
    Never,
    /// The image fails rather than have a layer of it downloaded whole that a delta could bring.
    Require,
    /// A rule that only a newer version knows. The image fails: the rule may be there to protect a link.
    #[serde(other)]
    Other,
}

impl Deltas {
    /// The rules that a job can name.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Never, Self::Require];

    /// The rule as the API spells it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "Auto",
            Self::Never => "Never",
            Self::Require => "Require",
            Self::Other => "Other",
        }
    }

    #[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
    fn is_auto(&self) -> bool {
        *self == Self::Auto
    }
}

/// The signatures that an image must have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Verification {
    /// What happens to an image without a valid signature.
    pub mode: VerificationMode,
    /// Public keys as PEM. A signature by any of them is enough. At most [`MAX_VERIFICATION_KEYS`], each of at most
    /// [`MAX_VERIFICATION_KEY`] bytes.
    #[serde(default)]
    pub keys: Vec<String>,
    /// Why a secret with keys cannot be used. The keys are then not complete, and no signature is valid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unavailable: Option<String>,
}

/// What happens to an image without a valid signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum VerificationMode {
    /// It is pulled, and the status has the reason.
    Warn,
    /// It is not pulled. A mode that only a newer version knows counts as this one.
    #[serde(other)]
    Enforce,
}

/// A recurring time in which downloads may run.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Window {
    /// The days on which it opens. Empty: every day.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub days: Vec<Weekday>,
    /// When it opens, by the local time of `time_zone`.
    pub start: TimeOfDay,
    /// How long it stays open, as elapsed time. At most [`MAX_WINDOW_DURATION`].
    #[serde(with = "millis")]
    pub duration: Duration,
    /// The time zone of `start`.
    pub time_zone: Zone,
}

impl Window {
    /// A window that never opens: on a day that never comes.
    pub fn never() -> Self {
        Self {
            days: vec![Weekday::Other],
            start: TimeOfDay { hour: 0, minute: 0 },
            duration: Duration::from_secs(60),
            time_zone: Zone::Named("UTC".to_owned()),
        }
    }
}

/// A day of the week, as `spec.windows[].days` spells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Weekday {
    Mon,
    Tue,
    Wed,
    Thu,
    Fri,
    Sat,
    Sun,
    /// A day that only a newer version knows. It never comes: a window must not open when the job doesn't want it to.
    #[serde(other)]
    Other,
}

impl Weekday {
    /// All days of the week, Monday first.
    pub const ALL: [Self; 7] = [Self::Mon, Self::Tue, Self::Wed, Self::Thu, Self::Fri, Self::Sat, Self::Sun];

    /// The day as the API spells it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Mon => "Mon",
            Self::Tue => "Tue",
            Self::Wed => "Wed",
            Self::Thu => "Thu",
            Self::Fri => "Fri",
            Self::Sat => "Sat",
            Self::Sun => "Sun",
            Self::Other => "Other",
        }
    }
}

impl fmt::Display for Weekday {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Hour and minute of a day, `HH:MM`, from 00:00 to 23:59.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TimeOfDay {
    hour: u8,
    minute: u8,
}

/// A text that is no [`TimeOfDay`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("write a time of day from 00:00 to 23:59, such as 01:00")]
pub struct BadTimeOfDay;

impl TimeOfDay {
    /// The hour, 0 to 23.
    pub fn hour(self) -> u8 {
        self.hour
    }

    /// The minute, 0 to 59.
    pub fn minute(self) -> u8 {
        self.minute
    }
}

impl FromStr for TimeOfDay {
    type Err = BadTimeOfDay;

    fn from_str(text: &str) -> Result<Self, BadTimeOfDay> {
        let two_digits = |part: &str, limit: u8| {
            let digits = part.len() == 2 && part.bytes().all(|byte| byte.is_ascii_digit());
            digits.then(|| part.parse().ok()).flatten().filter(|number| *number < limit)
        };
        let (hour, minute) = text.split_once(':').ok_or(BadTimeOfDay)?;
        let hour = two_digits(hour, 24).ok_or(BadTimeOfDay)?;
        let minute = two_digits(minute, 60).ok_or(BadTimeOfDay)?;
        Ok(Self { hour, minute })
    }
}

impl fmt::Display for TimeOfDay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02}:{:02}", self.hour, self.minute)
    }
}

impl TryFrom<String> for TimeOfDay {
    type Error = BadTimeOfDay;

    fn try_from(text: String) -> Result<Self, BadTimeOfDay> {
        text.parse()
    }
}

impl From<TimeOfDay> for String {
    fn from(time: TimeOfDay) -> Self {
        time.to_string()
    }
}

/// The time zone of a window.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum Zone {
    /// The node's own, written `Node`: UTC where it is unknown.
    Node,
    /// A name of the IANA time zone database, such as `Europe/Berlin`.
    Named(String),
}

impl From<String> for Zone {
    fn from(name: String) -> Self {
        if name == "Node" { Self::Node } else { Self::Named(name) }
    }
}

impl From<Zone> for String {
    fn from(zone: Zone) -> Self {
        zone.to_string()
    }
}

impl fmt::Display for Zone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Node => "Node",
            Self::Named(name) => name,
        })
    }
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_false(value: &bool) -> bool {
    !value
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_time_of_day_has_two_digits_each() {
        for good in ["00:00", "01:30", "23:59"] {
            assert_eq!(good.parse::<TimeOfDay>().unwrap().to_string(), good);
        }
        for bad in ["", "1:00", "24:00", "12:60", "+1:00", "01:00:00", "0100", "01:0", "é1:00", "01: 0"] {
            assert_eq!(bad.parse::<TimeOfDay>(), Err(BadTimeOfDay), "{bad}");
        }
    }

    #[test]
    fn the_mode_of_a_newer_version_is_the_strict_one() {
        let mode = |text| serde_json::from_str::<VerificationMode>(text).unwrap();
        assert_eq!(mode("\"Enforce\""), VerificationMode::Enforce);
        assert_eq!(mode("\"Warn\""), VerificationMode::Warn);
        assert_eq!(mode("\"Newer\""), VerificationMode::Enforce);
    }
}
