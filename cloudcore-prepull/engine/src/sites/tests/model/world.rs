//! Messages between the nodes of the model and the tracker.

use super::*;

impl World {
    pub(super) fn new(seed: u64, least: u64) -> Self {
        let mut rng = Rng::new(seed);
        let count = usize::try_from(rng.between(least, 12)).unwrap();
        let sizes: Vec<u64> = (0..rng.between(1, 8)).map(|_| rng.between(1, 60) * MIB).collect();
        let copied =
            Copied { done: 0, doing: Doing::Nothing, is_bad: false, sole: None, stalled: 0, has_said: false };
        let node = |_| Node {
            online: false,
            serves: true,
            frozen: false,
            island: 0,
            begun: false,
            lie: None,
            blobs: vec![copied.clone(); sizes.len()],
        };
        Self {
            sites: Sites::default(),
            now: Timestamp::UNIX_EPOCH,
            second: 0,
            nodes: (0..count).map(node).collect(),
            streams: rng.chance(80),
            rng,
            sizes,
            link: UPLINK,
            uplink: 0,
            losses: 0,
            is_whole: true,
            trace: Vec::new(),
        }
    }

    pub(super) fn log(&mut self, line: &str) {
        self.trace.push(format!("{}: {line}", self.second));
    }

    pub(super) fn place(&mut self, node: usize, site: &str) {
        let labels = [(SITE_LABEL.to_owned(), site.to_owned())].into();
        self.sites.set_labels(&name(node), Some(&labels), self.now);
    }

    pub(super) fn connect(&mut self, node: usize) {
        self.begin_session(node);
        self.say_all(node);
    }

    pub(super) fn begin_session(&mut self, node: usize) {
        self.place(node, "ship");
        let door = PeerDoor { addresses: vec![format!("10.0.0.{node}:1")], streams: self.streams };
        let peer = self.nodes[node].serves.then_some(door);
        self.sites.connect(&name(node), &Hello { peer, ..Hello::default() }, self.now);
        self.nodes[node].online = true;
    }

    pub(super) fn disconnect(&mut self, node: usize) {
        self.sites.disconnect(&name(node), self.now);
        // Another node may begin what it carries, and fetch once more what only it has.
        let is_lost = |of: &&Copied| matches!(of.doing, Doing::Done | Doing::Registry);
        self.losses += self.nodes[node].blobs.iter().filter(is_lost).count() as u64;
        self.nodes[node].online = false;
    }

    pub(super) fn send(&mut self, node: usize, blobs: Vec<BlobNews>, failures: Vec<PeerFailure>) {
        if self.nodes[node].online {
            let news = Blobs { task: task(), blobs, failures, reads_streams: self.streams };
            let shared = BlobSharing { entitlement: "image".into(), max_rate: None, has_succeeded: false };
            self.sites.note_blobs(&name(node), &shared, news, self.now);
        }
    }

    pub(super) fn say(&mut self, node: usize, blob: usize, failures: Vec<PeerFailure>) {
        let size = self.sizes[blob] + u64::from(self.nodes[node].lie == Some(Lie::WrongSize));
        let of = &mut self.nodes[node].blobs[blob];
        of.has_said = true;
        let state = match of.doing {
            Doing::Nothing => BlobState::Wanted,
            Doing::Registry => BlobState::Carrying,
            Doing::Peer(_) => BlobState::Fetching,
            Doing::Done => BlobState::Here,
        };
        let news = BlobNews { digest: digest(&blob.to_string()), size, state, done: of.done };
        self.send(node, vec![news], failures);
    }

    pub(super) fn say_all(&mut self, node: usize) {
        if self.nodes[node].begun {
            (0..self.sizes.len()).for_each(|blob| self.say(node, blob, Vec::new()));
        }
    }

    pub(super) fn hear(&mut self) {
        for Directions { node, blobs, .. } in self.sites.flush(self.now) {
            let node: usize = node.as_str()[1..].parse().unwrap();
            for (of, direction) in blobs {
                let blob: usize = of.trim_start_matches("sha256:").parse().unwrap();
                if blob < self.sizes.len() {
                    self.obey(node, blob, &direction);
                }
            }
        }
        for SiteEvent { node, digest, kind, .. } in self.sites.take_events() {
            let blob = digest.trim_start_matches("sha256:").trim_start_matches('0').to_owned();
            self.log(&format!("{node} {blob}: {kind:?}"));
        }
        for book in self.sites.by_name.values().flat_map(|site| site.books.values()) {
            let is_carrier = |seeker: &&book::Seeker| matches!(&seeker.way, AssignedSource::Registry(of) if of.alone.is_empty());
            assert!(book.seekers.values().filter(is_carrier).count() <= 1, "two carriers");
        }
        assert!(self.sites.bytes() <= self.sites.settings().memory);
    }

    pub(super) fn obey(&mut self, node: usize, blob: usize, direction: &Direction) {
        let doing = match direction {
            Direction::Wait => Doing::Nothing,
            Direction::Registry { alone, .. } => {
                self.losses += u64::from(!alone.is_empty());
                Doing::Registry
            }
            Direction::Peers(peers) => {
                let peer: usize = peers[0].0.as_str()[1..].parse().unwrap();
                assert_ne!(peer, node, "a node is sent to itself");
                assert!(self.nodes[peer].blobs[blob].has_said, "n{peer} never named blob {blob}");
                Doing::Peer(peer)
            }
        };
        let is_alone = matches!(direction, Direction::Registry { alone, .. } if !alone.is_empty());
        self.log(&format!("n{node} blob {blob}: {doing:?}{}", if is_alone { " alone" } else { "" }));
        let of = &mut self.nodes[node];
        if !of.online || of.blobs[blob].doing == Doing::Done {
            return;
        }
        if let (Some(lie @ (Lie::FalseGone | Lie::FalseDamaged)), Doing::Peer(peer)) = (of.lie, doing) {
            let fault = if lie == Lie::FalseGone { PeerFault::Gone } else { PeerFault::Damaged };
            let failure = PeerFailure { digest: digest(&blob.to_string()), peer: name(peer), fault };
            return self.say(node, blob, vec![failure]);
        }
        let of = &mut of.blobs[blob];
        if of.doing != doing {
            self.losses += u64::from(of.doing == Doing::Registry);
            (of.doing, of.stalled) = (doing, 0);
            self.say(node, blob, Vec::new());
        }
    }
}
