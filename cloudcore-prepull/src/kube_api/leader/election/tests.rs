#![allow(clippy::unwrap_used)]
use proptest::prelude::*;

use super::super::leadership::Leadership;
use super::*;

const DURATION: Duration = Duration::from_secs(15);
const DEADLINE: Duration = Duration::from_secs(10);
const SECOND: Duration = Duration::from_secs(1);

fn timing() -> Timing {
    Timing::new(DURATION, DEADLINE, 2 * SECOND).unwrap()
}

fn replica(name: &str) -> Election {
    Election::new(name.to_owned(), timing())
}

fn wall() -> Timestamp {
    Timestamp::from_second(1_000_000_000).unwrap()
}

/// A Lease as the API server has it.
fn lease(holder: &str, version: &str) -> Lease {
    let metadata = ObjectMeta {
        name: Some(LEASE.to_owned()),
        resource_version: Some(version.to_owned()),
        ..ObjectMeta::default()
    };
    let spec = LeaseSpec {
        holder_identity: Some(holder.to_owned()),
        lease_duration_seconds: Some(15),
        lease_transitions: Some(3),
        acquire_time: Some(MicroTime(wall())),
        renew_time: Some(MicroTime(wall())),
        ..LeaseSpec::default()
    };
    Lease { metadata, spec: Some(spec) }
}

fn written(step: ElectionStep) -> Lease {
    match step {
        ElectionStep::Write(lease) => *lease,
        step => panic!("nothing to write: {step:?}"),
    }
}

fn holder_and_transitions(lease: &Lease) -> (Option<String>, Option<i32>) {
    let spec = lease.spec.as_ref().unwrap();
    (lease_holder(spec), spec.lease_transitions)
}

#[test]
fn a_missing_lease_is_created() {
    let made = written(replica("a").step(None, Instant::now(), wall()));
    assert_eq!(made.metadata.name.as_deref(), Some(LEASE));
    assert_eq!(made.metadata.resource_version, None);
    let spec = made.spec.unwrap();
    assert_eq!(spec.lease_duration_seconds, Some(15));
    assert_eq!((spec.holder_identity.as_deref(), spec.lease_transitions), (Some("a"), Some(0)));
    assert_eq!((spec.acquire_time, spec.renew_time), (Some(MicroTime(wall())), Some(MicroTime(wall()))));
}

#[test]
fn a_lease_is_taken_after_its_duration_unchanged() {
    let (mut b, now) = (replica("b"), Instant::now());
    // The times in the Lease are of the year 2001: they do not count.
    let wait = ElectionStep::Wait { holder: "a".to_owned(), until: now + DURATION };
    assert_eq!(b.step(Some(&lease("a", "7")), now, wall()), wait);
    assert_eq!(b.step(Some(&lease("a", "7")), now + 13 * SECOND, wall()), wait);
    // The Lease has changed: the wait starts over.
    let seen = now + 14 * SECOND;
    let wait = ElectionStep::Wait { holder: "a".to_owned(), until: seen + DURATION };
    assert_eq!(b.step(Some(&lease("a", "8")), seen, wall()), wait);
    assert_eq!(b.step(Some(&lease("a", "8")), now + 16 * SECOND, wall()), wait);
    let taken = written(b.step(Some(&lease("a", "8")), seen + DURATION, wall()));
    // With the version, so that a replica that was faster keeps the Lease.
    assert_eq!(taken.metadata.resource_version.as_deref(), Some("8"));
    assert_eq!(holder_and_transitions(&taken), (Some("b".to_owned()), Some(4)));
}

#[test]
fn a_standby_waits_for_the_holders_duration() {
    let (mut b, now) = (replica("b"), Instant::now());
    let mut long = lease("a", "7");
    long.spec.as_mut().unwrap().lease_duration_seconds = Some(60);
    let wait = ElectionStep::Wait { holder: "a".to_owned(), until: now + 60 * SECOND };
    assert_eq!(b.step(Some(&long), now, wall()), wait);
}

#[test]
fn a_released_lease_is_taken_at_once() {
    let (a, mut b, now) = (replica("a"), replica("b"), Instant::now());
    b.step(Some(&lease("a", "7")), now, wall());
    let mut released = a.without_holder(lease("a", "7"), wall()).unwrap();
    assert_eq!(holder_and_transitions(&released), (None, Some(3)));
    assert_eq!(released.metadata.resource_version.as_deref(), Some("7"));
    released.metadata.resource_version = Some("8".to_owned());
    let taken = written(b.step(Some(&released), now, wall()));
    assert_eq!(holder_and_transitions(&taken), (Some("b".to_owned()), Some(4)));
    // A replica doesn't release the Lease of another.
    assert_eq!(a.without_holder(lease("b", "9"), wall()), None);
}

#[test]
fn renewals_change_leases_despite_clock_jumps() {
    let (mut a, now) = (replica("a"), Instant::now());
    a.mark_leading();
    let earlier = wall() - Duration::from_secs(3600);
    let renewed = written(a.step(Some(&lease("a", "7")), now, earlier)).spec.unwrap();
    assert_eq!(renewed.renew_time.unwrap().0, wall() + Duration::from_micros(1));
    assert_eq!((renewed.acquire_time, renewed.lease_transitions), (Some(MicroTime(wall())), Some(3)));
}

#[test]
fn a_deposed_leader_does_not_retake_the_lease() {
    let (mut a, now) = (replica("a"), Instant::now());
    a.mark_leading();
    let deposed = ElectionStep::Deposed { by: Some("b".to_owned()) };
    assert_eq!(a.step(Some(&lease("b", "7")), now, wall()), deposed);
    // Nor does it take the Lease back.
    assert_eq!(a.step(Some(&lease("", "8")), now + DURATION, wall()), ElectionStep::Deposed { by: None });
}

#[test]
fn a_deleted_lease_blocks_for_its_duration() {
    let (mut a, mut b, now) = (replica("a"), replica("b"), Instant::now());
    b.step(Some(&lease("a", "7")), now, wall());
    let wait = ElectionStep::Wait { holder: "a".to_owned(), until: now + DURATION };
    assert_eq!(b.step(None, now + SECOND, wall()), wait);
    written(b.step(None, now + DURATION, wall()));
    // The holder creates it again.
    a.step(Some(&lease("a", "7")), now, wall());
    a.mark_leading();
    written(a.step(None, now + SECOND, wall()));
}

/// Replicas and one API server, with any time between any two of their steps.
struct Model {
    now: Instant,
    stored: Option<Lease>,
    version: u32,
    replicas: Vec<Replica>,
    born: u32,
}

struct Replica {
    election: Election,
    leadership: Leadership,
    phase: Phase,
}

enum Phase {
    Idle,
    Read(Option<Box<Lease>>),
    Sent(Box<Lease>, Instant),
    Answered(Instant),
}

impl Model {
    fn new(replicas: u32) -> Self {
        let mut model = Self { now: Instant::now(), stored: None, version: 0, replicas: Vec::new(), born: 0 };
        for _ in 0..replicas {
            let replica = model.replica();
            model.replicas.push(replica);
        }
        model
    }

    fn replica(&mut self) -> Replica {
        self.born += 1;
        Replica {
            election: replica(&format!("replica-{}", self.born)),
            leadership: Leadership::standby(),
            phase: Phase::Idle,
        }
    }

    /// The API server: it refuses a write of an old version.
    fn store(&mut self, mut lease: Lease) -> bool {
        let current = self.stored.as_ref().and_then(|lease| lease.metadata.resource_version.clone());
        let accepted = lease.metadata.resource_version == current;
        if accepted {
            self.version += 1;
            lease.metadata.resource_version = Some(self.version.to_string());
            self.stored = Some(lease);
        }
        accepted
    }

    /// One step of one replica. With `lost` the answer to its write does not arrive.
    fn step(&mut self, index: usize, lost: bool) {
        let index = index % self.replicas.len();
        let now = self.now;
        let phase = std::mem::replace(&mut self.replicas[index].phase, Phase::Idle);
        self.replicas[index].phase = match phase {
            Phase::Idle => Phase::Read(self.stored.clone().map(Box::new)),
            Phase::Read(found) => match self.replicas[index].election.step(found.as_deref(), now, wall()) {
                ElectionStep::Write(lease) => Phase::Sent(lease, now),
                ElectionStep::Wait { .. } => Phase::Idle,
                ElectionStep::Deposed { .. } => {
                    self.replicas[index].leadership.lose_term(String::new());
                    Phase::Idle
                }
            },
            Phase::Sent(ref lease, since) if self.store((**lease).clone()) && !lost => Phase::Answered(since),
            Phase::Sent(..) => Phase::Idle,
            Phase::Answered(since) => {
                let Replica { election, leadership, .. } = &mut self.replicas[index];
                if leadership.leads_until(since + DEADLINE, now) {
                    election.mark_leading();
                }
                Phase::Idle
            }
        };
    }

    fn release(&mut self, index: usize) {
        let index = index % self.replicas.len();
        if !self.replicas[index].leadership.is_leader_at(self.now) {
            return;
        }
        self.replicas[index].leadership.release();
        let released =
            self.stored.clone().and_then(|lease| self.replicas[index].election.without_holder(lease, wall()));
        if let Some(released) = released {
            assert!(self.store(released));
        }
        self.replicas[index] = self.replica();
    }

    /// What the watchdog does sooner or later.
    fn restart_deposed(&mut self) {
        for index in 0..self.replicas.len() {
            let Replica { election, leadership, .. } = &self.replicas[index];
            if election.leading && !leadership.is_leader_at(self.now) {
                self.replicas[index] = self.replica();
            }
        }
    }

    fn leaders(&self) -> usize {
        self.replicas.iter().filter(|replica| replica.leadership.is_leader_at(self.now)).count()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// However late each step of each replica is, and whichever answers are lost: never two leaders. Once nothing is
    /// late or lost any more: one.
    #[test]
    fn there_are_never_two_leaders(
        steps in prop::collection::vec((0_usize..3, 0_u64..4000, 0_u8..40), 1..400),
        ever in Just(3_u32),
    ) {
        let mut model = Model::new(ever);
        for (index, pause, chance) in steps {
            // Most steps follow at once, some much later.
            model.now += Duration::from_millis(if chance < 25 { pause / 20 } else { pause });
            match chance {
                0 => model.release(index),
                1 => model.restart_deposed(),
                chance => model.step(index, chance == 2),
            }
            prop_assert!(model.leaders() <= 1, "{} leaders", model.leaders());
        }
        model.restart_deposed();
        // For longer than a Lease lasts.
        for round in 0..40_usize {
            model.now += Duration::from_millis(500);
            for index in 0..3 {
                for _ in 0..4 {
                    model.step(index, false);
                    prop_assert!(model.leaders() <= 1);
                }
            }
            if round % 2 == 0 {
                model.restart_deposed();
            }
        }
        prop_assert_eq!(model.leaders(), 1);
    }
}
