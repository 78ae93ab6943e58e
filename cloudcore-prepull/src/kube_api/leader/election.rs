//! What follows from the Lease as it was read. Pure: the clocks are arguments.

use std::time::{Duration, Instant};

use jiff::{Timestamp, ToSpan};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};

use super::{LEASE, Timing};

/// How long a Lease lasts that was given back; a Lease must last, and nobody waits for one without a holder.
const RELEASED_SECONDS: i32 = 1;

/// One replica's part in the election.
#[derive(Debug)]
pub(super) struct Election {
    identity: String,
    timing: Timing,
    leading: bool,
    seen: Option<Seen>,
}

/// The Lease as it was last read, and since when it has been so.
#[derive(Debug)]
struct Seen {
    version: Option<String>,
    holder: Option<String>,
    /// When this replica first saw it so, by its own monotonic clock: no time that another one wrote counts.
    since: Instant,
    /// What its holder has promised: it stops before.
    lasts: Duration,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    /// Write this; a new object where it has no resource version. Where that succeeds, the Lease is ours.
    Write(Box<Lease>),
    /// It is another's, and not to be taken before that time.
    Wait {
        /// Whose.
        holder: String,
        /// By our clock.
        until: Instant,
    },
    /// It was ours and is not any more.
    Deposed {
        /// Whose it is.
        by: Option<String>,
    },
}

impl Election {
    pub(super) fn new(identity: String, timing: Timing) -> Self {
        Self { identity, timing, leading: false, seen: None }
    }

    pub(super) fn identity(&self) -> &str {
        &self.identity
    }

    /// The Lease was written, and we lead: from now on another holder is not waited for.
    pub(super) fn won(&mut self) {
        self.leading = true;
    }

    /// What follows from the Lease, which was asked for before `now`. `wall` is only for people who read it.
    pub(super) fn step(&mut self, found: Option<&Lease>, now: Instant, wall: Timestamp) -> Step {
        let Some(lease) = found else { return self.step_without(now, wall) };
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = holder(&spec);
        let seen = self.see(lease, &spec, now);
        let until = seen.since + seen.lasts;
        match holder {
            // Also where the answer to the write that took it was lost.
            Some(holder) if holder == self.identity => self.write(lease.clone(), spec, wall),
            by if self.leading => Step::Deposed { by },
            Some(holder) if now < until => Step::Wait { holder, until },
            Some(_) | None => self.write(lease.clone(), taken(spec, wall), wall),
        }
    }

    /// Somebody has deleted it, or it was never there. Its holder, if it had one, does not know yet.
    fn step_without(&self, now: Instant, wall: Timestamp) -> Step {
        if let Some(Seen { holder: Some(holder), since, lasts, .. }) = &self.seen
            && *holder != self.identity
            && now < *since + *lasts
        {
            return Step::Wait { holder: holder.clone(), until: *since + *lasts };
        }
        let metadata = ObjectMeta { name: Some(LEASE.to_owned()), ..ObjectMeta::default() };
        let spec = LeaseSpec {
            acquire_time: Some(MicroTime(wall)),
            lease_transitions: Some(0),
            ..LeaseSpec::default()
        };
        self.write(Lease { metadata, spec: None }, spec, wall)
    }

    /// Any change of the object counts as a sign of life: to be wrong here costs time, and nothing else.
    fn see(&mut self, lease: &Lease, spec: &LeaseSpec, now: Instant) -> &Seen {
        let version = &lease.metadata.resource_version;
        if self.seen.as_ref().is_some_and(|seen| seen.version != *version) {
            self.seen = None;
        }
        self.seen.get_or_insert_with(|| Seen {
            version: version.clone(),
            holder: holder(spec),
            since: now,
            // The holder's own promise, for replicas may have been given different times.
            lasts: spec
                .lease_duration_seconds
                .and_then(|seconds| u64::try_from(seconds).ok())
                .map_or(self.timing.duration, Duration::from_secs),
        })
    }

    fn write(&self, lease: Lease, spec: LeaseSpec, wall: Timestamp) -> Step {
        let spec = LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(whole_seconds(self.timing.duration)),
            renew_time: Some(MicroTime(after(spec.renew_time.as_ref(), wall))),
            ..spec
        };
        Step::Write(Box::new(Lease { spec: Some(spec), ..lease }))
    }

    /// The Lease without a holder, if we are it.
    pub(super) fn released(&self, lease: Lease, wall: Timestamp) -> Option<Lease> {
        let spec = lease.spec.clone()?;
        (holder(&spec).as_deref() == Some(self.identity.as_str())).then(|| {
            let spec = LeaseSpec {
                // Not absent: client-go, too, says with an empty name that nobody holds it.
                holder_identity: Some(String::new()),
                lease_duration_seconds: Some(RELEASED_SECONDS),
                renew_time: Some(MicroTime(after(spec.renew_time.as_ref(), wall))),
                ..spec
            };
            Lease { spec: Some(spec), ..lease }
        })
    }
}

fn holder(spec: &LeaseSpec) -> Option<String> {
    spec.holder_identity.clone().filter(|holder| !holder.is_empty())
}

/// It changes hands.
fn taken(spec: LeaseSpec, wall: Timestamp) -> LeaseSpec {
    LeaseSpec {
        acquire_time: Some(MicroTime(wall)),
        lease_transitions: Some(spec.lease_transitions.unwrap_or(0).saturating_add(1)),
        ..spec
    }
}

/// Later than the last time, whatever became of the wall clock: a write that changes nothing is no sign of life.
fn after(last: Option<&MicroTime>, wall: Timestamp) -> Timestamp {
    let next = last.and_then(|last| last.0.checked_add(1.microsecond()).ok());
    next.map_or(wall, |next| next.max(wall))
}

/// The Lease counts whole seconds; more is safe.
fn whole_seconds(duration: Duration) -> i32 {
    i32::try_from(duration.as_millis().div_ceil(1000)).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests;
