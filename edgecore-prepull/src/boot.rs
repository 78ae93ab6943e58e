//! Time since one boot of the machine. Unlike the wall clock it can't be set, and it continues during sleep.

use std::sync::LazyLock;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// A moment of one boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootTime {
    /// Identifies the boot: a part of the kernel's random boot id.
    pub id: u64,
    /// Milliseconds since then.
    pub millis: u64,
}

impl BootTime {
    /// Now. `None` if the kernel doesn't say.
    pub(crate) fn now() -> Option<Self> {
        static BOOT: LazyLock<Option<u64>> = LazyLock::new(|| {
            let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
            let digits: String = id.chars().filter(char::is_ascii_hexdigit).take(16).collect();
            u64::from_str_radix(&digits, 16).ok()
        });
        let since = clock_gettime(ClockId::Boottime);
        let millis =
            u64::try_from(since.tv_sec).ok()? * 1000 + u64::try_from(since.tv_nsec).ok()? / 1_000_000;
        Some(Self { id: (*BOOT)?, millis })
    }

    /// Computes the time since an earlier moment of the same boot. `None` if the machine has been booted since.
    pub(crate) fn elapsed_since(self, earlier: Self) -> Option<Duration> {
        (self.id == earlier.id).then(|| Duration::from_millis(self.millis.saturating_sub(earlier.millis)))
    }
}
