//! The clocks of the agent: a monotonic one for deadlines, and others for times that survive a restart.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::boot::BootTime;

/// The current time. The agent reads no clock: each event brings the time along.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Monotonic clock, for deadlines while the agent runs.
    pub monotonic: Instant,
    /// Wall clock, for times that must survive a restart.
    pub wall: SystemTime,
    /// Time since the machine booted, for deadlines that must survive a restart. `None` if we can't read it.
    pub boot: Option<BootTime>,
}

/// A deadline beyond the range of the clock would panic; a year is as good.
const FAR: Duration = Duration::from_secs(365 * 24 * 3600);

impl Now {
    pub(super) fn wall(self) -> WallClock {
        WallClock::from_system_time(self.wall)
    }

    pub(super) fn moment_after(self, duration: Duration) -> Instant {
        self.monotonic + duration.min(FAR)
    }

    /// The moment that is `duration` after an earlier one.
    pub(super) fn moment_since(self, earlier: Instant, duration: Duration) -> Instant {
        let passed = self.monotonic.saturating_duration_since(earlier);
        earlier + duration.min(passed + FAR)
    }
}

/// Wall-clock time in milliseconds since 1970.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WallClock(pub u64);

impl WallClock {
    /// Converts a system time; times before 1970 become 1970.
    pub(crate) fn from_system_time(time: SystemTime) -> Self {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
    }

    pub(super) fn plus(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)))
    }

    pub(super) fn time_until(self, later: Self) -> Duration {
        Duration::from_millis(later.0.saturating_sub(self.0))
    }
}
