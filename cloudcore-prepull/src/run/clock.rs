//! The time of the engine.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use tracing::warn;

/// How far the engine's time may be from the machine's: windows and the times of nodes count in minutes.
const TOLERANCE: SignedDuration = SignedDuration::from_secs(60);
/// The time between two looks at the machine's clock.
const PERIOD: Duration = Duration::from_secs(5);
/// Looks in a row that find another time. A clock may be set wrong and right again.
const LOOKS: u32 = 6;

/// Wall-clock time that does not jump: the clock of the start, and what a monotonic clock adds.
pub(super) struct Clock {
    wall: Timestamp,
    monotonic: Instant,
}

impl Clock {
    pub(super) fn start() -> Self {
        Self { wall: Timestamp::now(), monotonic: Instant::now() }
    }

    pub(super) fn now(&self) -> Timestamp {
        self.wall.checked_add(self.monotonic.elapsed()).unwrap_or(Timestamp::MAX)
    }
}

/// Warns when the machine's clock was set, or when it has slept: a monotonic clock stands still then. The edges follow the
/// machine's clock, by the Welcome of their sessions, and count their windows by it. The engine doesn't: what runs has its times
/// by the engine's own clock, and a jump would end it.
pub(super) async fn warn_when_set() -> Infallible {
    let clock = Clock::start();
    let off = || Timestamp::now().duration_since(clock.now());
    let mut known = SignedDuration::ZERO;
    loop {
        known = wait_until_off(off, known).await;
        warn!(
            seconds = known.as_secs(),
            "the machine's clock was set, or it has slept: jobs go on by the clock of before. Restart cloudcore-prepull when none runs, so that windows are right"
        );
    }
}

/// Waits until the machine's clock is ahead by another time than `known`, and returns that.
async fn wait_until_off(off: impl Fn() -> SignedDuration, known: SignedDuration) -> SignedDuration {
    let mut looks = 0;
    while looks < LOOKS {
        tokio::time::sleep(PERIOD).await;
        looks = if (off() - known).abs() > TOLERANCE { looks + 1 } else { 0 };
    }
    off()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_set_clock_ends_the_wait() {
        let off = Cell::new(SignedDuration::ZERO);
        let mut waiting = Box::pin(wait_until_off(|| off.get(), SignedDuration::ZERO));
        let mut ends_within = async |seconds| {
            let wait = timeout(Duration::from_secs(seconds), &mut waiting);
            wait.await.is_ok()
        };
        assert!(!ends_within(3600).await);
        off.set(SignedDuration::from_secs(59));
        assert!(!ends_within(3600).await, "as good as none");
        off.set(SignedDuration::from_hours(6));
        assert!(!ends_within(20).await);
        off.set(SignedDuration::ZERO);
        assert!(!ends_within(20).await, "it was corrected");
        off.set(-SignedDuration::from_hours(6));
        assert!(!ends_within(20).await && ends_within(20).await);
    }

    #[test]
    fn an_unset_clock_is_not_off() {
        let clock = Clock::start();
        assert!(Timestamp::now().duration_since(clock.now()).abs() < SignedDuration::from_secs(1));
    }
}
