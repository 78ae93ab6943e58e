//! The cloud's time, which a node learns with each session. We use it for download windows, for the tickets of a site's
//! nodes, and for the validity of certificates, because the clock of a box without a battery may be years behind.
//!
//! Before the first session we use this machine's own clock. If it shows a time before this program was built, it's
//! wrong, and no window opens. The time isn't stored for the next start: no task runs before the cloud has assigned it
//! again, in a session.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jiff::Timestamp;
use rustls::CertificateError;
use rustls::time_provider::TimeProvider;
use rustls_pki_types::UnixTime;
use tokio::time::Instant;

use crate::boot::BootTime;

/// The time of a clock that isn't set. Boards without a battery boot in 1970.
const UNKNOWN: SystemTime = UNIX_EPOCH;
/// November 2026, when this was written: the lower bound for the current time if the build doesn't record its own.
const WRITTEN: Duration = Duration::from_secs(1_793_491_200);
/// Build time in seconds since 1970, set by reproducible builds.
const BUILT: Option<&str> = option_env!("SOURCE_DATE_EPOCH");

/// December 2019. No kubelet that we work with had an image before; a machine without a battery for its clock dates images in
/// 1970 until it's set.
const FIRST_IMAGES: Duration = Duration::from_secs(50 * 365 * 24 * 3600);

/// Length of a certificate chain in which each certificate may start to be valid later than the one before.
const MAX_NEWER: u32 = 4;

/// 1971: an earlier time is from a clock that isn't set.
pub(crate) const FIRST_KNOWN: Timestamp = Timestamp::constant(365 * 24 * 3600, 0);

/// The cloud's time as of the last session, or this machine's own time before the first one.
#[derive(Debug, Default)]
pub(crate) struct CloudClock(Mutex<Option<CloudTime>>);

/// The cloud's time at one moment.
#[derive(Clone, Copy, Debug)]
struct CloudTime {
    /// Since 1970.
    time: Duration,
    at: Instant,
    /// The same moment by a clock that stands still while the machine sleeps, and by one that goes on.
    awake: std::time::Instant,
    boot: Option<BootTime>,
}

impl CloudTime {
    /// The time since 1970, at this moment of the boot.
    fn now(self, boot: Option<BootTime>) -> Duration {
        let elapsed = boot.zip(self.boot).and_then(|(now, then)| now.elapsed_since(then));
        let asleep = elapsed.and_then(|elapsed| elapsed.checked_sub(self.awake.elapsed()));
        // The clocks aren't read at the same time.
        let asleep = asleep.filter(|asleep| *asleep >= Duration::from_secs(1));
        self.time + self.at.elapsed() + asleep.unwrap_or_default()
    }
}

impl CloudClock {
    /// Sets the time since 1970.
    pub(crate) fn set(&self, now: Duration) {
        let (awake, boot) = (std::time::Instant::now(), BootTime::now());
        let time = CloudTime { time: now, at: Instant::now(), awake, boot };
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(time);
    }

    /// The time since 1970, or a lower bound of it.
    pub(crate) fn now(&self) -> Duration {
        self.of_cloud().unwrap_or_else(|| machine_time().max(build_time()))
    }

    /// The time of day. 1970 if it isn't known.
    pub(crate) fn wall(&self) -> SystemTime {
        if self.is_known() { UNIX_EPOCH + self.now() } else { UNKNOWN }
    }

    /// Whether the time is plausible.
    pub(crate) fn is_known(&self) -> bool {
        self.of_cloud().is_some() || is_machine_set()
    }

    fn of_cloud(&self) -> Option<Duration> {
        let cloud = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        cloud.map(|cloud| cloud.now(BootTime::now()))
    }
}

/// This machine's own clock at one moment of the boot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClockReading {
    pub(crate) wall: SystemTime,
    /// `None` if we can't read it.
    pub(crate) boot: Option<BootTime>,
}

impl ClockReading {
    pub(crate) fn now() -> Self {
        Self { wall: SystemTime::now(), boot: BootTime::now() }
    }

    /// A date that this machine's clock gave, by the clock as it is `now`. If it was set forward since this reading, the date
    /// of what came between the two moves along. A machine without a battery boots with the time at which it was switched off,
    /// and an image that it then pulls would be as old as the time it was off.
    pub(crate) fn correct_date(self, date: SystemTime, now: Self) -> SystemTime {
        let elapsed = now.boot.zip(self.boot).and_then(|(now, then)| now.elapsed_since(then));
        // The time of this reading, by the clock of now.
        let Some(start) = elapsed.and_then(|elapsed| now.wall.checked_sub(elapsed)) else { return date };
        match date.duration_since(self.wall) {
            Ok(later) if date < start => (start + later).min(now.wall),
            _ => date,
        }
    }
}

impl TimeProvider for CloudClock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(self.now()))
    }
}

/// Whether an image can be from this time. If not, the clock wasn't set.
pub(crate) fn dates_images(time: SystemTime) -> bool {
    time >= UNIX_EPOCH + FIRST_IMAGES
}

/// Whether this machine's own clock is plausible.
pub(crate) fn is_machine_set() -> bool {
    machine_time() >= build_time()
}

/// Verifies certificates at this time. If the clock isn't set, verifies at the time from which they are valid.
pub(crate) fn verify_at<T>(
    now: UnixTime,
    is_set: bool,
    verify: impl Fn(UnixTime) -> Result<T, rustls::Error>,
) -> Result<T, rustls::Error> {
    let mut verified = verify(now);
    // The server's own certificate and those of its CAs may have different start dates.
    for _ in 0..MAX_NEWER {
        let Err(rustls::Error::InvalidCertificate(CertificateError::NotValidYetContext {
            not_before, ..
        })) = &verified
        else {
            break;
        };
        if is_set {
            break;
        }
        verified = verify(*not_before);
    }
    verified
}

/// The time of this machine's clock.
fn machine_time() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// The time at which this program was built, or an earlier one.
fn build_time() -> Duration {
    let built = BUILT.and_then(|seconds| seconds.trim().parse().ok()).map(Duration::from_secs);
    // A build from an archive without history says 0.
    built.unwrap_or_default().max(WRITTEN)
}

/// `None` for a time outside the calendar, or from a clock that isn't set.
pub(crate) fn timestamp(wall: SystemTime) -> Option<Timestamp> {
    Timestamp::try_from(wall).ok().filter(|time| *time >= FIRST_KNOWN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clouds_time_wins() {
        let clock = CloudClock::default();
        assert!(clock.is_known() && clock.now() >= WRITTEN);
        let early = Duration::from_secs(40_000_000);
        clock.set(early);
        assert!((40_000_000..40_000_010).contains(&clock.now().as_secs()));
        assert!(clock.is_known() && clock.wall() >= UNIX_EPOCH + early, "the cloud's time wins");
    }

    #[test]
    fn time_passes_while_the_machine_sleeps() {
        let hours = |hours: u64| Duration::from_secs(hours * 3600);
        let boot = |id, hours: u64| Some(BootTime { id, millis: hours * 3_600_000 });
        let awake = std::time::Instant::now();
        let at_two = CloudTime { time: hours(2), at: Instant::now(), awake, boot: boot(1, 10) };
        // The time that this test takes counts as awake.
        let hour = |boot| (at_two.now(boot) + Duration::from_secs(60)).as_secs() / 3600;
        assert_eq!(hour(boot(1, 17)), 9);
        assert_eq!([boot(1, 10), boot(2, 17), None].map(hour), [2; 3], "the other clock counts");
        assert_eq!(CloudTime { boot: None, ..at_two }.now(boot(1, 17)).as_secs(), 2 * 3600);
    }

    #[test]
    fn dates_move_with_the_clock() {
        let (booted, minute) = (UNIX_EPOCH + WRITTEN, Duration::from_secs(60));
        let reading = |wall, minutes: u64| ClockReading {
            wall,
            boot: Some(BootTime { id: 1, millis: minutes * 60_000 }),
        };
        let start = reading(booted, 1);
        for off in [10 * minute, 365 * 24 * 60 * minute] {
            let today = booted + off;
            let now = reading(today + 6 * minute, 7);
            let corrected = |date| start.correct_date(date, now);
            assert_eq!(
                corrected(booted + 2 * minute),
                today + 2 * minute,
                "it came before the clock was set"
            );
            for right in [booted - minute, today, today + 5 * minute] {
                assert_eq!(corrected(right), right, "off for {off:?}");
            }
            let other_boot = ClockReading { boot: None, ..now };
            assert_eq!(start.correct_date(booted + minute, other_boot), booted + minute);
        }
        // It was saved an hour before the machine was switched off.
        let now = reading(booted + 120 * minute, 2);
        assert_eq!(start.correct_date(booted + 50 * minute, now), now.wall, "not in the future");
        let now = reading(booted + 6 * minute, 7);
        assert_eq!(start.correct_date(booted + minute, now), booted + minute, "nothing has set the clock");
        let now = reading(booted - minute, 7);
        assert_eq!(start.correct_date(booted + minute, now), booted + minute, "it was set back");
    }

    #[test]
    fn an_unset_clock_waits_for_no_certificate() {
        let at = |seconds| UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        let valid = |from: u64, until: u64| {
            move |now: UnixTime| match now.as_secs() {
                second if second < from => {
                    let problem = CertificateError::NotValidYetContext { time: now, not_before: at(from) };
                    Err(rustls::Error::InvalidCertificate(problem))
                }
                second if second > until => Err(rustls::Error::InvalidCertificate(CertificateError::Expired)),
                second => Ok(second),
            }
        };
        let both = |now| valid(100, 200)(now).and_then(|_| valid(150, 300)(now));
        assert_eq!(verify_at(at(0), false, both), Ok(150));
        assert_eq!(verify_at(at(170), true, both), Ok(170));
        assert!(verify_at(at(0), true, both).is_err(), "a clock that is set counts");
        assert!(verify_at(at(250), false, both).is_err(), "it has expired");
        let never = |now| valid(300, 400)(now).and_then(|_| valid(100, 200)(now));
        assert!(verify_at(at(0), false, never).is_err(), "never valid at the same time");
    }

    #[test]
    fn no_build_is_from_the_future() {
        assert!(
            build_time() >= WRITTEN && build_time() <= machine_time() + Duration::from_secs(24 * 3600),
            "{:?}",
            build_time()
        );
    }
}
