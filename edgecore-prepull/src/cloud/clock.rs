//! The cloud's time, which a node learns with each session. The tickets of a site's nodes expire by it, and the validity of
//! their certificates is judged by it: the clock of a box without a battery may be years behind.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustls::time_provider::TimeProvider;
use rustls_pki_types::UnixTime;

/// The cloud's time, as of the last session; this machine's own until there was one.
#[derive(Debug, Default)]
pub(crate) struct CloudClock(Mutex<Option<(Instant, Duration)>>);

impl CloudClock {
    /// Sets the time since 1970.
    pub(crate) fn set(&self, now: Duration) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), now));
    }

    /// The time since 1970.
    pub(crate) fn now(&self) -> Duration {
        match *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Some((at, then)) => then + at.elapsed(),
            None => SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
        }
    }
}

impl TimeProvider for CloudClock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(self.now()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clouds_time_counts_whatever_the_machine_thinks() {
        let clock = CloudClock::default();
        assert!(clock.now() > Duration::from_secs(1_600_000_000));
        clock.set(Duration::from_secs(1000));
        assert!((1000..1010).contains(&clock.now().as_secs()));
    }
}
