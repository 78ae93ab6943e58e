//! Sites by chance: nodes that come, go, freeze and can't reach each other, a cloud that fails over, and liars.
//!
//! In each second each blob has at most one lease, and a node is sent only to nodes that have reported some of the blob. All
//! honest nodes end. A liar costs them at most the same time once more, and the uplink half of the bytes.

mod life;
mod world;

use std::time::Duration;

use prepull_api::sites::{BlobNews, PeerDoor, PeerFailure, PeerFault};
use prepull_api::task::{JobUid, TaskId};

use super::super::*;
use super::digest;
use crate::shared::rng::Rng;

const MIB: u64 = 1 << 20;
/// Bytes a second that the uplink carries into the site, and one neighbour to another.
const UPLINK: u64 = MIB;
const LAN: u64 = 20 * MIB;
/// Seconds in which faults happen, and after which everything has to end.
const FAULTS: u64 = 600;
const PEACE: u64 = 3600;
/// Seconds that a liar may cost beyond twice the honest time.
const LIE: u64 = 180;
/// Seconds for which two that confirm each other keep a lease.
const TURNS: u64 = 300;
/// Seconds after which a reader leaves a source that sends nothing.
const STALLED: u64 = 30;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Lie {
    Invents,
    WrongSize,
    Claims,
    FalseHere,
    FalseGone,
    FalseDamaged,
    Relabels,
    Silent,
    Trickles,
    Garbage,
    /// Begins sessions, and reports nothing in them.
    Reconnects,
    /// Two of them confirm each other's invented progress, at this many bytes a second.
    Colludes(u64),
}

const LIES: [Lie; 10] = [
    Lie::Invents,
    Lie::WrongSize,
    Lie::Claims,
    Lie::FalseHere,
    Lie::FalseGone,
    Lie::FalseDamaged,
    Lie::Relabels,
    Lie::Silent,
    Lie::Trickles,
    Lie::Garbage,
];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Doing {
    Nothing,
    Registry,
    Peer(usize),
    Done,
}

#[derive(Clone, Debug)]
struct Copied {
    done: u64,
    doing: Doing,
    is_bad: bool,
    /// The only neighbour that sent any of it: that one is to blame if it is bad.
    sole: Option<usize>,
    stalled: u64,
    has_said: bool,
}

#[allow(clippy::struct_excessive_bools, reason = "each is a fault of its own")]
#[derive(Debug)]
struct Node {
    online: bool,
    serves: bool,
    frozen: bool,
    island: u32,
    begun: bool,
    lie: Option<Lie>,
    blobs: Vec<Copied>,
}

struct World {
    sites: Sites,
    now: Timestamp,
    second: u64,
    nodes: Vec<Node>,
    sizes: Vec<u64>,
    rng: Rng,
    streams: bool,
    link: u64,
    uplink: u64,
    losses: u64,
    is_whole: bool,
    trace: Vec<String>,
}

fn name(node: usize) -> NodeName {
    NodeName(format!("n{node:02}"))
}

fn task() -> TaskId {
    TaskId { job: JobUid("uid".to_owned()), attempt: 1 }
}

impl World {
    fn is_done(&self) -> bool {
        let honest = self.nodes.iter().filter(|node| node.lie.is_none());
        honest.flat_map(|node| &node.blobs).all(|of| of.doing == Doing::Done)
    }

    fn tick(&mut self) {
        self.hear();
        self.work();
        self.second += 1;
        self.now = self.now.saturating_add(Duration::from_secs(1)).unwrap();
    }

    fn begin(&mut self) {
        for node in 0..self.nodes.len() {
            self.nodes[node].begun = true;
            self.connect(node);
        }
    }

    /// Lets time pass until the honest nodes have everything.
    fn run(&mut self, seconds: u64, what: &str) -> u64 {
        let end = self.second + seconds;
        while !self.is_done() {
            let shown = || self.trace.join("\n");
            assert!(self.second < end, "{what}: a node waits for ever\n{:#?}\n{}", self.nodes, shown());
            self.tick();
        }
        self.second
    }

    fn all(&self) -> u64 {
        self.sizes.iter().sum()
    }

    /// The uplink has carried at most this part of all blobs, in percent.
    fn check_uplink(&self, seed: u64, percent: u64) {
        let (carried, all) = (self.uplink, self.all());
        assert!(carried * 100 <= all * percent, "seed {seed}: {carried} of {all}\n{}", self.trace.join("\n"));
    }
}

fn check_faults(seed: u64) {
    let mut world = World::new(seed, 2);
    let serves = world.rng.between(60, 100);
    for node in 0..world.nodes.len() {
        world.nodes[node].serves = world.rng.chance(serves);
        world.is_whole &= world.nodes[node].serves;
        world.nodes[node].begun = world.rng.chance(70);
        world.connect(node);
    }
    world.break_things();
    world.run(PEACE, &format!("seed {seed}"));
    let (all, largest) = (world.all(), *world.sizes.iter().max().unwrap());
    let times = if world.is_whole { 1 } else { world.nodes.len() as u64 };
    let most = all * times + world.losses * largest;
    assert!(world.uplink <= most, "seed {seed}: {} of {most}", world.uplink);
}

/// How much liars may cost.
struct Bounds {
    /// The honest time and the bytes of all blobs, in percent.
    time: u64,
    bytes: u64,
    /// Seconds and largest blobs beyond that.
    more_time: u64,
    more_blobs: u64,
}

impl Bounds {
    /// Old agents confirm nothing, and a blob whose beginning came from a liar is found wrong at its end only.
    fn of(lie: Lie, streams: bool) -> Self {
        let (time, more_time) = match lie {
            _ if !streams => (200, 10 * LIE),
            Lie::Garbage => (400, 2 * LIE),
            _ => (200, LIE),
        };
        Self { time, bytes: if lie == Lie::Garbage { 250 } else { 150 }, more_time, more_blobs: 3 }
    }
}

/// Runs a site with up to two of these liars until its honest nodes end.
fn run_with(seed: u64, lies: &[Lie], has_faults: bool) -> (World, String) {
    let mut world = World::new(seed, 4);
    let first = world.rng.below(world.nodes.len());
    for (place, lie) in lies.iter().enumerate() {
        let liar = (first + place) % world.nodes.len();
        world.nodes[liar].lie = Some(*lie);
    }
    world.begin();
    if has_faults {
        world.break_things();
    }
    let what = format!("seed {seed}, {lies:?} from n{first}, streams {}", world.streams);
    world.run(PEACE, &what);
    (world, what)
}

/// Runs a site with these liars; without them it takes `usual` seconds.
fn check_liars(usual: u64, seed: u64, lies: &[Lie], has_faults: bool, bounds: impl Fn(bool) -> Bounds) {
    let (world, what) = run_with(seed, lies, has_faults);
    let shown = || world.trace[..world.trace.len().min(200)].join("\n");
    let bounds = bounds(world.streams);
    let took = world.second;
    let most = usual * bounds.time / 100 + bounds.more_time;
    assert!(took <= most, "{what}: {took} s instead of {usual}\n{}", shown());
    let largest = *world.sizes.iter().max().unwrap();
    let losses = if has_faults { world.losses } else { 0 };
    let most = world.all() * bounds.bytes / 100 + (bounds.more_blobs + losses) * largest;
    assert!(world.uplink <= most, "{what}: {} of {most} bytes\n{}", world.uplink, shown());
}

fn lie(seed: u64) -> Lie {
    LIES[usize::try_from(seed).unwrap() % LIES.len()]
}

fn seeds() -> std::ops::Range<u64> {
    let number = |name| std::env::var(name).ok().and_then(|seeds| seeds.parse().ok());
    let seed: Option<u64> = number("PREPULL_MODEL_SEED");
    seed.map_or(0..number("PREPULL_MODEL_SEEDS").unwrap_or(300), |seed| seed..seed + 1)
}

#[test]
fn every_node_ends_whatever_breaks() {
    seeds().for_each(check_faults);
}

/// The liars come in four ways, and each costs its share of one honest run.
#[test]
fn one_or_two_liars_cost_little() {
    for seed in seeds() {
        let usual = run_with(seed, &[], false).0.second;
        let check = |lies: &[Lie], bounds: &dyn Fn(bool) -> Bounds| {
            check_liars(usual, seed, lies, false, bounds);
        };
        check(&[lie(seed)], &|streams| Bounds::of(lie(seed), streams));
        check(&[Lie::Reconnects], &|streams| Bounds::of(Lie::Reconnects, streams));
        // Two cost as much as each.
        let lies = [lie(seed), lie(seed / LIES.len() as u64)];
        check(&lies, &|streams| {
            let [first, second] = lies.map(|lie| Bounds::of(lie, streams));
            Bounds {
                time: first.time + second.time,
                bytes: first.bytes + second.bytes - 100,
                more_time: first.more_time + second.more_time,
                more_blobs: 6,
            }
        });
        // A pair that confirms each other's progress holds a lease for two turns.
        let rate = [1024, 50 * 1024, 300 * 1024, MIB][usize::try_from(seed % 4).unwrap()];
        check(&[Lie::Colludes(rate); 2], &|streams| {
            // Among old agents each of the twelve may end up by itself.
            let (bytes, more_time) = if streams { (150, 2 * TURNS + LIE) } else { (1200, 10 * LIE) };
            Bounds { bytes, more_time, ..Bounds::of(Lie::Claims, streams) }
        });
    }
}

#[test]
fn a_liar_and_faults_stop_no_node() {
    for seed in seeds() {
        let usual = run_with(seed, &[], true).0.second;
        check_liars(usual, seed, &[lie(seed)], true, |streams| Bounds::of(lie(seed), streams));
    }
}

#[test]
fn in_peace_the_uplink_carries_each_blob_once() {
    for seed in seeds().take(100) {
        let mut world = World::new(seed, 2);
        world.begin();
        let took = world.run(PEACE, &format!("seed {seed}"));
        world.check_uplink(seed, 106);
        assert!(took <= world.all() / UPLINK * 13 / 10 + 30, "seed {seed}: {took} s");
    }
}

#[test]
fn agents_that_restart_carry_nothing_twice() {
    for seed in seeds() {
        let mut world = World::new(seed, 2);
        world.streams = true;
        world.begin();
        while !world.is_done() {
            world.tick();
            if world.second.is_multiple_of(10) {
                let node = world.rng.below(world.nodes.len());
                world.complain_about(node);
                world.hear();
                world.restart(node);
            }
            assert!(world.second < 10 * PEACE, "seed {seed}");
        }
        world.check_uplink(seed, 110);
    }
}

/// A new leader starts after some seconds, and the nodes come back over the same time again.
#[test]
fn a_cloud_that_was_away_carries_nothing_twice() {
    for seed in seeds() {
        let mut world = World::new(seed, 3);
        world.streams = true;
        world.begin();
        let away = world.rng.between(5, 25);
        let third = world.all() / world.link / 3;
        while !world.is_done() {
            (0..third.max(60)).for_each(|_| world.tick());
            world.be_away(away);
            assert!(world.second < 10 * PEACE, "seed {seed}");
        }
        world.check_uplink(seed, 110);
    }
}

#[test]
fn a_slow_link_with_interruptions_carries_little_twice() {
    for seed in seeds().take(20) {
        let mut world = World::new(seed, 3);
        (world.link, world.streams) = (10 * 1024, true);
        world.sizes.truncate(2);
        world.nodes.iter_mut().for_each(|node| node.blobs.truncate(2));
        world.begin();
        let third = world.all() / world.link / 3;
        while !world.is_done() {
            world.tick();
            if world.second.is_multiple_of(third.max(60)) {
                for node in 0..world.nodes.len() {
                    world.restart(node);
                }
                world.fail_over();
            }
            assert!(world.second < 10 * third + 3600, "seed {seed}");
        }
        world.check_uplink(seed, 110);
    }
}
