//! One leader among the replicas, by a Lease of coordination.k8s.io.
//!
//! ```text
//!  Lease ◀─read, write─▶ elector ─▶ election (pure): write it, wait, or see that it is another's
//!                                       │ renewed since
//!  Core::act, fence (every write) ◀─ Leadership ─▶ watchdog (a thread of its own) ─▶ exit
//!  readyz, metrics                ◀─────┘
//! ```
//!
//! Two clocks never have to agree: who waits counts from when it saw the Lease change, who leads from before it
//! asked for the change, and the time that the one waits is longer than the time that the other leads. Why it is
//! written here and not taken from a crate: docs/decisions/0008-leader-election.md.

mod election;
mod elector;
mod fence;
mod leadership;
mod watchdog;

use std::time::Duration;

use ring::rand::{SecureRandom, SystemRandom};

pub use elector::{Term, lead};
pub use fence::{Fence, Fenced, NotTheLeader};
pub use leadership::Leadership;

/// The name of the Lease, in our own namespace.
pub const LEASE: &str = "cloudcore-prepull";

/// Each replica reads the Lease once in a period: more than ten times a second is of no use to anybody.
const SHORTEST_PERIOD: Duration = Duration::from_millis(100);

/// The times of an election; what each means is Kubernetes' own (`kube-controller-manager --help`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Others wait this long after they last saw the Lease change.
    duration: Duration,
    /// The leader stops this long after it last began a renewal that succeeded.
    renew_deadline: Duration,
    /// Between two looks at the Lease.
    retry_period: Duration,
}

impl Timing {
    /// Refuses times with which there could be two leaders, or none for long.
    pub fn new(
        duration: Duration,
        renew_deadline: Duration,
        retry_period: Duration,
    ) -> Result<Self, TimingError> {
        if retry_period < SHORTEST_PERIOD {
            return Err(TimingError::Period(retry_period));
        }
        if renew_deadline <= retry_period {
            return Err(TimingError::Deadline { renew_deadline, retry_period });
        }
        if duration <= renew_deadline {
            return Err(TimingError::Duration { duration, renew_deadline });
        }
        Ok(Self { duration, renew_deadline, retry_period })
    }

    /// One attempt, to read and to write, may take half of the time that is left when it begins, one period after the
    /// last renewal: so that one that hangs is not the last.
    fn attempt(&self) -> Duration {
        self.renew_deadline.saturating_sub(self.retry_period) / 2
    }
}

/// Times that make no sense together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TimingError {
    /// Below [`SHORTEST_PERIOD`].
    #[error("--lease-retry-period {0:?} is too short; the API server is to be asked every 100ms at most")]
    Period(Duration),
    /// There would be no second try.
    #[error(
        "--lease-renew-deadline {renew_deadline:?} must be longer than --lease-retry-period {retry_period:?}, \
         or the leader ends before it has tried to renew"
    )]
    Deadline {
        /// As given.
        renew_deadline: Duration,
        /// As given.
        retry_period: Duration,
    },
    /// There could be two leaders.
    #[error(
        "--lease-duration {duration:?} must be longer than --lease-renew-deadline {renew_deadline:?}, \
         or there can be two leaders at a time"
    )]
    Duration {
        /// As given.
        duration: Duration,
        /// As given.
        renew_deadline: Duration,
    },
}

/// Who this process is, as the Lease's holder: the pod, or the machine, and a part that no other process has. A
/// process that was restarted is another one, for what it does not know is whether the first is really gone.
fn identity() -> Result<String, ring::error::Unspecified> {
    let name = std::env::var("POD_NAME").ok().filter(|name| !name.is_empty());
    let name = name.or_else(|| std::fs::read_to_string("/proc/sys/kernel/hostname").ok());
    let mut suffix = [0; 5];
    SystemRandom::new().fill(&mut suffix)?;
    let name = name.as_deref().map_or("cloudcore-prepull", str::trim);
    Ok(format!("{name}_{}", prepull_api::enroll::hex(&suffix)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn times_that_allow_two_leaders_are_refused() {
        Timing::new(ms(15_000), ms(10_000), ms(2000)).unwrap();
        let refused = |duration, deadline, period| {
            Timing::new(ms(duration), ms(deadline), ms(period)).unwrap_err().to_string()
        };
        assert!(refused(10_000, 10_000, 2000).starts_with("--lease-duration 10s must be longer"));
        assert!(refused(15_000, 2000, 2000).starts_with("--lease-renew-deadline 2s must be longer"));
        assert!(refused(15_000, 10_000, 99).starts_with("--lease-retry-period 99ms is too short"));
    }

    #[test]
    fn an_attempt_that_hangs_is_not_the_last() {
        for (deadline, period) in [(10_000, 2000), (3000, 500), (10_000, 9000)] {
            let timing = Timing::new(ms(15_000), ms(deadline), ms(period)).unwrap();
            assert!(ms(period) + 2 * timing.attempt() <= ms(deadline), "{timing:?}");
        }
    }

    #[test]
    fn no_two_processes_are_the_same() {
        let (one, other) = (identity().unwrap(), identity().unwrap());
        assert_ne!(one, other);
        assert_eq!(one.rsplit_once('_').unwrap().0, other.rsplit_once('_').unwrap().0);
    }
}
