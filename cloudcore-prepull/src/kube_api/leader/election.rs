//! The rules of the election: what to do about the Lease as it was read. Pure: the clocks are arguments.

use std::time::{Duration, Instant};

use jiff::{Timestamp, ToSpan};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};

use super::timing::Timing;

/// The name of the Lease, in the namespace of cloudcore-prepull.
pub(super) const LEASE: &str = "cloudcore-prepull";

/// The duration of a released Lease. It must not be zero, and no replica waits for a Lease without a holder.
const RELEASED_SECONDS: i32 = 1;

#[derive(Debug)]
pub(super) struct Election {
    identity: String,
    timing: Timing,
    leading: bool,
    seen: Option<SeenLease>,
}

/// One version of the Lease, as this replica last read it.
#[derive(Debug)]
struct SeenLease {
    version: Option<String>,
    holder: Option<String>,
    /// When this replica first saw this version, by its own monotonic clock: times that others wrote do not count.
    since: Instant,
    /// The duration that the holder has promised: it stops before this has passed.
    lasts: Duration,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum ElectionStep {
    /// Write this Lease; create it if it has no resourceVersion. If that succeeds, this replica holds it.
    Write(Box<Lease>),
    /// Another replica holds the Lease, which must not be taken before `until`.
    Wait {
        holder: String,
        /// By the clock of this replica.
        until: Instant,
    },
    /// This replica led, and does not hold the Lease any more.
    Deposed { by: Option<String> },
}

impl Election {
    pub(super) fn new(identity: String, timing: Timing) -> Self {
        Self { identity, timing, leading: false, seen: None }
    }

    pub(super) fn identity(&self) -> &str {
        &self.identity
    }

    /// The Lease was written and this replica leads: from now on it does not wait for another holder.
    pub(super) fn mark_leading(&mut self) {
        self.leading = true;
    }

    /// The step that follows from the Lease, which was requested before `now`. `wall` is only written for people to
    /// read.
    pub(super) fn step(&mut self, found: Option<&Lease>, now: Instant, wall: Timestamp) -> ElectionStep {
        let Some(lease) = found else { return self.step_without(now, wall) };
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = lease_holder(&spec);
        let seen = self.note_lease(lease, &spec, now);
        let until = seen.since + seen.lasts;
        match holder {
            // Also if the answer to the write that took it was lost.
            Some(holder) if holder == self.identity => self.write_step(lease.clone(), spec, wall),
            by if self.leading => ElectionStep::Deposed { by },
            Some(holder) if now < until => ElectionStep::Wait { holder, until },
            Some(_) | None => self.write_step(lease.clone(), change_hands(spec, wall), wall),
        }
    }

    /// The step if there is no Lease: it was never created, or deleted, perhaps without its holder's knowledge.
    fn step_without(&self, now: Instant, wall: Timestamp) -> ElectionStep {
        if let Some(SeenLease { holder: Some(holder), since, lasts, .. }) = &self.seen
            && *holder != self.identity
            && now < *since + *lasts
        {
            return ElectionStep::Wait { holder: holder.clone(), until: *since + *lasts };
        }
        let metadata = ObjectMeta { name: Some(LEASE.to_owned()), ..ObjectMeta::default() };
        let spec = LeaseSpec {
            acquire_time: Some(MicroTime(wall)),
            lease_transitions: Some(0),
            ..LeaseSpec::default()
        };
        self.write_step(Lease { metadata, spec: None }, spec, wall)
    }

    /// Any change of the object counts as a sign of life: if it is none, that costs time and nothing else.
    fn note_lease(&mut self, lease: &Lease, spec: &LeaseSpec, now: Instant) -> &SeenLease {
        let version = &lease.metadata.resource_version;
        if self.seen.as_ref().is_some_and(|seen| seen.version != *version) {
            self.seen = None;
        }
        self.seen.get_or_insert_with(|| SeenLease {
            version: version.clone(),
            holder: lease_holder(spec),
            since: now,
            // The holder's own promise, because replicas may have been given different times.
            lasts: spec
                .lease_duration_seconds
                .and_then(|seconds| u64::try_from(seconds).ok())
                .map_or(self.timing.duration, Duration::from_secs),
        })
    }

    fn write_step(&self, lease: Lease, spec: LeaseSpec, wall: Timestamp) -> ElectionStep {
        let spec = LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(whole_seconds(self.timing.duration)),
            renew_time: Some(MicroTime(later_than(spec.renew_time.as_ref(), wall))),
            ..spec
        };
        ElectionStep::Write(Box::new(Lease { spec: Some(spec), ..lease }))
    }

    /// The Lease without a holder, if this replica holds it.
    pub(super) fn without_holder(&self, lease: Lease, wall: Timestamp) -> Option<Lease> {
        let spec = lease.spec.clone()?;
        (lease_holder(&spec).as_deref() == Some(self.identity.as_str())).then(|| {
            let spec = LeaseSpec {
                // Empty and not absent, as client-go writes it.
                holder_identity: Some(String::new()),
                lease_duration_seconds: Some(RELEASED_SECONDS),
                renew_time: Some(MicroTime(later_than(spec.renew_time.as_ref(), wall))),
                ..spec
            };
            Lease { spec: Some(spec), ..lease }
        })
    }
}

fn lease_holder(spec: &LeaseSpec) -> Option<String> {
    spec.holder_identity.clone().filter(|holder| !holder.is_empty())
}

/// The spec for a new holder.
fn change_hands(spec: LeaseSpec, wall: Timestamp) -> LeaseSpec {
    LeaseSpec {
        acquire_time: Some(MicroTime(wall)),
        lease_transitions: Some(spec.lease_transitions.unwrap_or(0).saturating_add(1)),
        ..spec
    }
}

/// A time after the last one, even if the wall clock went back: a write that changes nothing is no sign of life.
fn later_than(last: Option<&MicroTime>, wall: Timestamp) -> Timestamp {
    let next = last.and_then(|last| last.0.checked_add(1.microsecond()).ok());
    next.map_or(wall, |next| next.max(wall))
}

/// The Lease counts whole seconds; rounding up is safe.
fn whole_seconds(duration: Duration) -> i32 {
    i32::try_from(duration.as_millis().div_ceil(1000)).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests;
