//! Sites by chance: nodes that come, go, freeze, lie and cannot reach each other, and a cloud that fails over.
//!
//! What holds in each second: each blob has at most one carrier; nobody is sent to a node that has not said that it has the
//! blob. And after the faults have ended, everybody has everything within a bounded time, and the uplink has carried each
//! blob once for each time that its carrier was lost, unless nodes could not reach each other.

use prepull_api::sites::{PeerDoor, PeerFailure, PeerFault};
use prepull_api::task::JobUid;

use super::super::*;
use super::digest;
use crate::shared::rng::Rng;

const MIB: u64 = 1 << 20;
/// Bytes a second that the uplink carries into the site, and one neighbour to another.
const UPLINK: u64 = MIB;
const LAN: u64 = 20 * MIB;
/// Seconds in which anything may happen, and after which everything has to end well.
const FAULTS: u64 = 600;
const PEACE: u64 = 3600;

#[derive(Clone, Debug, PartialEq)]
enum Doing {
    Nothing,
    Registry,
    Peer(usize, u64),
    Done,
}

#[allow(clippy::struct_excessive_bools, reason = "each is a fault of its own")]
#[derive(Debug)]
struct Node {
    online: bool,
    serves: bool,
    /// It says that it works, and does not.
    frozen: bool,
    /// What it sends is wrong.
    liar: bool,
    /// It says that it is busy, always.
    idle: bool,
    island: u32,
    /// It has begun to pull.
    begun: bool,
    blobs: Vec<(u64, Doing)>,
}

struct World {
    sites: Sites,
    now: Timestamp,
    nodes: Vec<Node>,
    sizes: Vec<u64>,
    rng: Rng,
    uplink: u64,
    losses: u64,
    split: bool,
    has_frozen: bool,
    trace: Vec<String>,
    seed: u64,
}

fn name(node: usize) -> NodeName {
    NodeName(format!("n{node:02}"))
}

fn task() -> TaskId {
    TaskId { job: JobUid("uid".to_owned()), attempt: 1 }
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let count = usize::try_from(rng.between(2, 12)).unwrap();
        let sizes: Vec<u64> = (0..rng.between(1, 8)).map(|_| rng.between(1, 60) * MIB).collect();
        let serves = rng.between(60, 100);
        let nodes = (0..count).map(|_| Node {
            online: false,
            serves: rng.chance(serves),
            frozen: false,
            liar: rng.chance(5),
            idle: rng.chance(3),
            island: 0,
            begun: false,
            blobs: vec![(0, Doing::Nothing); sizes.len()],
        });
        let nodes = nodes.collect();
        let (sites, now, trace) = (Sites::default(), Timestamp::UNIX_EPOCH, Vec::new());
        Self {
            sites,
            now,
            nodes,
            sizes,
            rng,
            uplink: 0,
            losses: 0,
            split: false,
            has_frozen: false,
            trace,
            seed,
        }
    }

    fn log(&mut self, line: impl FnOnce() -> String) {
        let second = self.now.as_second();
        self.trace.push(format!("{second}: {}", line()));
    }

    fn connect(&mut self, node: usize) {
        let labels = [(SITE_LABEL.to_owned(), "ship".to_owned())].into();
        self.sites.set_labels(&name(node), Some(&labels), self.now);
        let peer = self.nodes[node]
            .serves
            .then(|| PeerDoor { addresses: vec![format!("10.0.0.{node}:1")], streams: false });
        self.sites.connect(&name(node), &Hello { peer, ..Hello::default() }, self.now);
        self.nodes[node].online = true;
        self.say_all(node);
    }

    fn disconnect(&mut self, node: usize) {
        self.sites.disconnect(&name(node), self.now);
        // It goes on with what it carries, and somebody else may begin it.
        self.losses += self.carried_by(node);
        // And what only it has is fetched once more.
        self.losses +=
            self.nodes[node].blobs.iter().filter(|(_, doing)| *doing == Doing::Done).count() as u64;
        self.nodes[node].online = false;
    }

    fn say(&mut self, node: usize, blobs: Vec<usize>, failures: Vec<PeerFailure>) {
        let of = &self.nodes[node];
        if !of.online {
            return;
        }
        let blob = |blob: usize| {
            let (done, doing) = &of.blobs[blob];
            let state = match doing {
                Doing::Nothing => BlobState::Wanted,
                Doing::Registry => BlobState::Carrying,
                Doing::Peer(..) => BlobState::Fetching,
                Doing::Done => BlobState::Here,
            };
            BlobNews { digest: digest(&blob.to_string()), size: self.sizes[blob], state, done: *done }
        };
        let news = Blobs {
            task: task(),
            blobs: blobs.into_iter().map(blob).collect(),
            failures,
            reads_streams: false,
        };
        let shared = Shared { images: "image".into(), max_rate: None };
        self.sites.note(&name(node), &shared, news, self.now);
    }

    fn say_all(&mut self, node: usize) {
        if self.nodes[node].begun {
            self.say(node, (0..self.sizes.len()).collect(), Vec::new());
        }
    }

    fn hear(&mut self) {
        for Directions { node, blobs, .. } in self.sites.flush(self.now) {
            let node: usize = node.as_str()[1..].parse().unwrap();
            for (of, direction) in blobs {
                let blob: usize = of.trim_start_matches("sha256:").parse().unwrap();
                let doing = match &direction {
                    Direction::Wait => Doing::Nothing,
                    Direction::Registry { .. } => Doing::Registry,
                    Direction::Peers(peers) => {
                        let peer: usize = peers[0].0.as_str()[1..].parse().unwrap();
                        assert_ne!(peer, node, "a node is sent to itself");
                        assert_eq!(
                            self.nodes[peer].blobs[blob].1,
                            Doing::Done,
                            "n{peer} has never had blob {blob}"
                        );
                        Doing::Peer(peer, 0)
                    }
                };
                if matches!(direction, Direction::Registry { alone, .. } if !alone.is_empty()) {
                    let has_reason = self.split
                        || self.has_frozen
                        || self.nodes.iter().any(|node| node.liar || node.idle || !node.serves);
                    assert!(
                        has_reason,
                        "seed {}: n{node} is left alone with {blob} in a site that is whole\n{}",
                        self.seed,
                        self.trace.join("\n")
                    );
                    self.losses += 1;
                }
                self.log(|| format!("n{node} blob {blob}: {direction:?}"));
                let of = &mut self.nodes[node];
                if !of.online || of.blobs[blob].1 == Doing::Done {
                    continue;
                }
                let same_peer =
                    matches!((&of.blobs[blob].1, &doing), (Doing::Peer(a, _), Doing::Peer(b, _)) if a == b);
                if !same_peer {
                    if of.blobs[blob].1 == Doing::Registry && doing != Doing::Registry {
                        self.losses += 1;
                    }
                    self.nodes[node].blobs[blob].1 = doing;
                }
                self.say(node, vec![blob], Vec::new());
            }
        }
        for site in self.sites.by_name.values() {
            for book in site.books.values() {
                let is_carrier = |seeker: &&Seeker| matches!(seeker.way, Way::Registry { alone: "", .. });
                assert!(book.seekers.values().filter(is_carrier).count() <= 1, "two carriers");
            }
        }
    }

    /// A second of work.
    fn work(&mut self) {
        let carrying: usize = self
            .nodes
            .iter()
            .map(|node| node.blobs.iter().filter(|(_, doing)| *doing == Doing::Registry).count())
            .sum();
        let share = UPLINK / (carrying.max(1) as u64);
        for node in 0..self.nodes.len() {
            if self.nodes[node].frozen || !self.nodes[node].begun {
                continue;
            }
            for blob in 0..self.sizes.len() {
                let size = self.sizes[blob];
                let (done, doing) = self.nodes[node].blobs[blob].clone();
                match doing {
                    Doing::Registry => {
                        let more = share.min(size - done);
                        self.uplink += more;
                        self.nodes[node].blobs[blob].0 = done + more;
                        self.advance(node, blob, size);
                    }
                    Doing::Peer(peer, got) => self.fetch(node, blob, peer, got),
                    Doing::Nothing | Doing::Done => {}
                }
            }
        }
    }

    fn advance(&mut self, node: usize, blob: usize, size: u64) {
        if self.nodes[node].blobs[blob].0 >= size {
            self.nodes[node].blobs[blob] = (size, Doing::Done);
            self.say(node, vec![blob], Vec::new());
        } else if self.now.as_second() % 5 == 0 {
            self.say(node, vec![blob], Vec::new());
        }
    }

    fn fetch(&mut self, node: usize, blob: usize, peer: usize, got: u64) {
        let is_busy = self.rng.chance(5);
        let (me, other) = (&self.nodes[node], &self.nodes[peer]);
        let fault = if me.island != other.island || me.island == u32::MAX {
            Some(PeerFault::Unreachable)
        } else if other.idle || is_busy {
            Some(PeerFault::Busy)
        } else if other.frozen {
            None
        } else if got + LAN >= self.sizes[blob] && other.liar {
            Some(PeerFault::Damaged)
        } else {
            let got = (got + LAN).min(self.sizes[blob]);
            self.nodes[node].blobs[blob].1 = Doing::Peer(peer, got);
            if got >= self.sizes[blob] {
                self.nodes[node].blobs[blob] = (got, Doing::Done);
                self.say(node, vec![blob], Vec::new());
            }
            None
        };
        if let Some(fault) = fault {
            self.log(|| format!("n{node} blob {blob}: n{peer} is {fault:?}"));
            self.nodes[node].blobs[blob].1 = Doing::Nothing;
            let failure = PeerFailure { digest: digest(&blob.to_string()), peer: name(peer), fault };
            self.say(node, vec![blob], vec![failure]);
        }
    }

    /// Something happens by chance.
    fn happen(&mut self) {
        let node = self.rng.below(self.nodes.len());
        match self.rng.below(100) {
            0..=2 if self.nodes[node].online => {
                self.log(|| format!("n{node} is cut off"));
                self.disconnect(node);
            }
            3..=8 if !self.nodes[node].online => self.connect(node),
            9 => {
                self.log(|| format!("n{node} freezes"));
                self.nodes[node].frozen = true;
                self.has_frozen = true;
            }
            10..=13 => self.nodes[node].frozen = false,
            14 => {
                self.log(|| format!("n{node} is restarted"));
                self.restart(node);
            }
            15 if self.rng.chance(30) => {
                self.log(|| "failover".to_owned());
                self.losses += (0..self.nodes.len()).map(|node| self.carried_by(node)).sum::<u64>();
                self.sites = Sites::default();
                for node in 0..self.nodes.len() {
                    if self.nodes[node].online {
                        self.connect(node);
                    }
                }
            }
            16 if self.rng.chance(20) => {
                let islands = self.rng.pick(&[0, 2, u32::MAX]);
                self.split |= islands != 0;
                self.log(|| format!("the LAN: {islands}"));
                for node in &mut self.nodes {
                    node.island = match islands {
                        0 => 0,
                        u32::MAX => u32::MAX,
                        islands => u32::try_from(self.rng.below(islands as usize)).unwrap(),
                    };
                }
            }
            17..=30 if !self.nodes[node].begun => {
                self.nodes[node].begun = true;
                self.say_all(node);
            }
            _ => {}
        }
    }

    fn carried_by(&self, node: usize) -> u64 {
        self.nodes[node].blobs.iter().filter(|(_, doing)| *doing == Doing::Registry).count() as u64
    }

    /// The agent begins anew: what it has stays, and it says so when its task goes on.
    fn restart(&mut self, node: usize) {
        if self.nodes[node].online {
            self.disconnect(node);
        }
        self.losses += self.carried_by(node);
        for (_, doing) in &mut self.nodes[node].blobs {
            if *doing != Doing::Done {
                *doing = Doing::Nothing;
            }
        }
        self.nodes[node].frozen = false;
        self.connect(node);
    }

    fn is_done(&self) -> bool {
        self.nodes.iter().all(|node| node.blobs.iter().all(|(_, doing)| *doing == Doing::Done))
    }

    fn tick(&mut self) {
        self.hear();
        self.work();
        self.now = self.now.saturating_add(Duration::from_secs(1)).unwrap();
    }

    fn run(mut self) -> Self {
        for node in 0..self.nodes.len() {
            self.connect(node);
            self.nodes[node].begun = self.rng.chance(70);
            self.say_all(node);
        }
        for _ in 0..FAULTS {
            if self.rng.chance(50) {
                self.happen();
            }
            self.tick();
        }
        let liars: Vec<usize> = (0..self.nodes.len()).filter(|node| self.nodes[*node].liar).collect();
        self.log(|| format!("peace; liars {liars:?}"));
        for node in 0..self.nodes.len() {
            self.nodes[node].island = 0;
            self.nodes[node].frozen = false;
            if !self.nodes[node].online {
                self.connect(node);
            }
            if !self.nodes[node].begun {
                self.nodes[node].begun = true;
                self.say_all(node);
            }
        }
        for _ in 0..PEACE {
            if self.is_done() {
                break;
            }
            self.tick();
        }
        self
    }
}

fn check(seed: u64) {
    let world = World::new(seed).run();
    let shown = || world.trace.iter().rev().take(60).rev().cloned().collect::<Vec<_>>().join("\n");
    let stuck: Vec<String> =
        world.nodes.iter().enumerate().map(|(node, of)| format!("n{node} {of:?}")).collect();
    assert!(world.is_done(), "seed {seed}: somebody waits for ever\n{}\n{}", stuck.join("\n"), shown());
    let all: u64 = world.sizes.iter().sum();
    let largest = world.sizes.iter().max().unwrap();
    // Each loss costs what one carrier had at most. Who serves nobody, lies or is cut off from the others is a case of its own.
    let is_whole = !world.split && world.nodes.iter().all(|node| node.serves && !node.liar && !node.idle);
    if is_whole {
        let most = all + world.losses * largest;
        assert!(world.uplink <= most, "seed {seed}: {} of {most} bytes\n{}", world.uplink, shown());
    }
    let most = all * world.nodes.len() as u64 + world.losses * largest;
    assert!(world.uplink <= most, "seed {seed}: more than without sharing: {} of {most}", world.uplink);
}

#[test]
fn every_blob_has_one_carrier_nobody_waits_for_ever_and_the_uplink_carries_it_once() {
    let seeds = std::env::var("PREPULL_MODEL_SEEDS").ok().and_then(|seeds| seeds.parse().ok());
    let first = 0;
    if let Some(seed) = std::env::var("PREPULL_MODEL_SEED").ok().and_then(|seed| seed.parse().ok()) {
        return check(seed);
    }
    (first..first + seeds.unwrap_or(300)).for_each(check);
}

#[test]
fn in_peace_the_uplink_carries_each_blob_exactly_once_however_many_nodes_want_it() {
    for nodes in [2, 10, 50] {
        let mut world = World::new(7);
        let template = Node {
            serves: true,
            liar: false,
            idle: false,
            online: false,
            frozen: false,
            island: 0,
            begun: true,
            blobs: vec![(0, Doing::Nothing); world.sizes.len()],
        };
        world.nodes = (0..nodes).map(|_| Node { blobs: template.blobs.clone(), ..template }).collect();
        for node in 0..nodes {
            world.connect(node);
        }
        let mut seconds = 0;
        while !world.is_done() {
            world.tick();
            seconds += 1;
            assert!(seconds < PEACE);
        }
        let all: u64 = world.sizes.iter().sum();
        assert_eq!(world.uplink, all, "{nodes} nodes");
        assert!(
            seconds <= all / UPLINK * 13 / 10 + 30,
            "{nodes} nodes take {seconds} s for {} s",
            all / UPLINK
        );
    }
}
