//! A second of the nodes: downloads, lies and faults.

use super::*;

impl World {
    /// A second of work.
    pub(super) fn work(&mut self) {
        let is_real = |node: &&Node| {
            let lie = node.lie;
            !matches!(
                lie,
                Some(Lie::Silent | Lie::Claims | Lie::Trickles | Lie::Reconnects | Lie::Colludes(_))
            )
        };
        let carrying = self.nodes.iter().filter(is_real).flat_map(|node| &node.blobs);
        let carrying = carrying.filter(|of| of.doing == Doing::Registry).count();
        let share = self.link / (carrying.max(1) as u64);
        for node in 0..self.nodes.len() {
            if self.nodes[node].frozen || !self.nodes[node].begun {
                continue;
            }
            self.tell_lies(node);
            for blob in 0..self.sizes.len() {
                match self.nodes[node].blobs[blob].doing {
                    Doing::Registry => self.carry(node, blob, share),
                    Doing::Peer(peer) => self.fetch(node, blob, peer),
                    Doing::Nothing | Doing::Done => {}
                }
            }
        }
    }

    pub(super) fn tell_lies(&mut self, node: usize) {
        let (second, lie, count) = (self.second, self.nodes[node].lie, self.sizes.len());
        let mut claim = |digests: std::ops::Range<usize>, state, done: u64| {
            let news = |of: usize| {
                let size = self.sizes.get(of).copied().unwrap_or(50 * MIB);
                BlobNews { digest: digest(&of.to_string()), size, state, done: done.min(size - 1) }
            };
            let news = digests.map(news).collect();
            self.send(node, news, Vec::new());
        };
        match lie {
            Some(Lie::Invents) if second.is_multiple_of(10) => {
                claim(1000..1006, BlobState::Carrying, second * MIB);
            }
            Some(Lie::Claims) if second.is_multiple_of(5) => {
                claim(0..count, BlobState::Carrying, second * MIB);
            }
            Some(Lie::FalseHere) if second.is_multiple_of(20) => {
                claim(0..count, BlobState::Here, 0);
                self.nodes[node].blobs.iter_mut().for_each(|of| of.has_said = true);
            }
            Some(Lie::Reconnects) if second % 14 == 13 => self.begin_session(node),
            Some(Lie::Colludes(rate)) if second.is_multiple_of(5) => self.collude(node, rate),
            Some(Lie::Relabels) if second.is_multiple_of(5) => {
                claim(2000..2050, BlobState::Here, 0);
                self.place(node, &format!("site-{}", second % 97));
            }
            _ => {}
        }
    }

    /// Reports progress that it makes with no one's bytes, and at the end that it has everything.
    pub(super) fn collude(&mut self, node: usize, rate: u64) {
        for blob in 0..self.sizes.len() {
            let of = &mut self.nodes[node].blobs[blob];
            if matches!(of.doing, Doing::Registry | Doing::Peer(_)) {
                of.done = (of.done + 5 * rate).min(self.sizes[blob]);
                let is_done = of.done == self.sizes[blob];
                of.doing = if is_done { Doing::Done } else { of.doing };
                self.say(node, blob, Vec::new());
            }
        }
    }

    pub(super) fn carry(&mut self, node: usize, blob: usize, share: u64) {
        let size = self.sizes[blob];
        let lie = self.nodes[node].lie;
        let of = &mut self.nodes[node].blobs[blob];
        let more = match lie {
            Some(Lie::Reconnects | Lie::Colludes(_)) => return,
            Some(Lie::Silent | Lie::Claims | Lie::FalseHere) => 0,
            Some(Lie::Trickles) => 1024,
            _ => share,
        };
        let more = more.min(size - of.done);
        // A node that says that it reads from none downloads for itself, as it could without a site.
        self.uplink += if matches!(lie, Some(Lie::FalseGone | Lie::FalseDamaged)) { 0 } else { more };
        of.done += more;
        of.sole = None;
        if lie == Some(Lie::Trickles) {
            // It says more than it has.
            let news = BlobNews {
                digest: digest(&blob.to_string()),
                size,
                state: BlobState::Carrying,
                done: (of.done * 900).min(size - 1),
            };
            return if self.second.is_multiple_of(5) {
                self.send(node, vec![news], Vec::new());
            };
        }
        self.advance(node, blob);
    }

    pub(super) fn advance(&mut self, node: usize, blob: usize) {
        let of = &mut self.nodes[node].blobs[blob];
        if of.done >= self.sizes[blob] && of.is_bad {
            (of.done, of.is_bad, of.sole) = (0, false, None);
            self.say(node, blob, Vec::new());
        } else if of.done >= self.sizes[blob] {
            of.doing = Doing::Done;
            self.say(node, blob, Vec::new());
        } else if self.second.is_multiple_of(5) {
            self.say(node, blob, Vec::new());
        }
    }

    pub(super) fn fetch(&mut self, node: usize, blob: usize, peer: usize) {
        if matches!(self.nodes[node].lie, Some(Lie::Reconnects | Lie::Colludes(_))) {
            return;
        }
        let (me, other) = (&self.nodes[node], &self.nodes[peer]);
        let size = self.sizes[blob];
        let source = &other.blobs[blob];
        let may_send = other.lie.is_none() || matches!(other.lie, Some(Lie::Garbage | Lie::Trickles));
        let available = match source.doing {
            _ if !may_send || other.frozen => 0,
            Doing::Done => size,
            Doing::Registry | Doing::Peer(_) if self.streams => source.done,
            _ => 0,
        };
        let is_bad = other.lie == Some(Lie::Garbage) || source.is_bad;
        let is_gone = source.doing == Doing::Nothing
            || other.lie == Some(Lie::FalseHere)
            || matches!(other.lie, Some(Lie::Colludes(_))) && source.doing == Doing::Done;
        let fault = if me.island != other.island || me.island == u32::MAX || !other.serves {
            Some(PeerFault::Unreachable)
        } else if self.rng.chance(1) {
            Some(PeerFault::Busy)
        } else if is_gone && !other.frozen {
            Some(PeerFault::Gone)
        } else {
            let of = &mut self.nodes[node].blobs[blob];
            let more = available.saturating_sub(of.done).min(LAN);
            of.done += more;
            of.is_bad |= is_bad && more > 0;
            if more > 0 {
                of.sole = (of.done == more || of.sole == Some(peer)).then_some(peer);
            }
            of.stalled = if more > 0 { 0 } else { of.stalled + 1 };
            if of.done >= size && of.is_bad {
                let is_to_blame = of.sole == Some(peer);
                (of.done, of.is_bad, of.sole) = (0, false, None);
                if !is_to_blame {
                    of.doing = Doing::Nothing;
                    return self.say(node, blob, Vec::new());
                }
                Some(PeerFault::Damaged)
            } else if of.stalled > STALLED {
                Some(PeerFault::Stalled)
            } else {
                return if more > 0 {
                    self.advance(node, blob);
                };
            }
        };
        if let Some(fault) = fault {
            self.log(&format!("n{node} blob {blob}: n{peer} is {fault:?}"));
            let of = &mut self.nodes[node].blobs[blob];
            (of.doing, of.stalled) = (Doing::Nothing, 0);
            let failure = PeerFailure { digest: digest(&blob.to_string()), peer: name(peer), fault };
            self.say(node, blob, vec![failure]);
        }
    }

    /// Something happens by chance.
    pub(super) fn happen(&mut self) {
        let node = self.rng.below(self.nodes.len());
        match self.rng.below(100) {
            0..=2 if self.nodes[node].online => self.disconnect(node),
            3..=8 if !self.nodes[node].online => self.connect(node),
            9 => {
                self.nodes[node].frozen = true;
                self.is_whole = false;
            }
            10..=13 => self.nodes[node].frozen = false,
            14 => self.restart(node),
            15 if self.rng.chance(30) => self.fail_over(),
            16 if self.rng.chance(20) => {
                let islands = self.rng.pick(&[1, 2, u32::MAX]);
                self.is_whole &= islands == 1;
                for node in &mut self.nodes {
                    let island = u32::try_from(self.rng.below(2)).unwrap();
                    node.island = if islands == 2 { island } else { islands };
                }
            }
            17..=30 if !self.nodes[node].begun => {
                self.nodes[node].begun = true;
                self.say_all(node);
            }
            _ => {}
        }
    }

    /// Things break by chance for a time, and are whole at its end.
    pub(super) fn break_things(&mut self) {
        for _ in 0..FAULTS {
            if self.rng.chance(50) {
                self.happen();
            }
            self.tick();
        }
        for node in 0..self.nodes.len() {
            (self.nodes[node].island, self.nodes[node].frozen, self.nodes[node].begun) = (0, false, true);
            if self.nodes[node].online { self.say_all(node) } else { self.connect(node) }
        }
    }

    pub(super) fn fail_over(&mut self) {
        self.log("failover");
        self.sites = Sites::default();
        for node in 0..self.nodes.len() {
            self.nodes[node].blobs.iter_mut().for_each(|of| of.has_said = false);
            if self.nodes[node].online {
                self.connect(node);
            }
        }
    }

    /// No leader for this many seconds; then a new one, to which the nodes come back over the same time.
    pub(super) fn be_away(&mut self, seconds: u64) {
        self.log("away");
        self.sites = Sites::default();
        for node in 0..self.nodes.len() {
            self.nodes[node].online = false;
            self.nodes[node].blobs.iter_mut().for_each(|of| of.has_said = false);
        }
        (0..seconds).for_each(|_| self.tick());
        self.log("a new leader");
        let mut left = self.nodes.len();
        for node in 0..self.nodes.len() {
            self.place(node, "ship");
        }
        let back: Vec<u64> = (0..left).map(|_| self.rng.between(0, seconds)).collect();
        for second in 0.. {
            for node in (0..self.nodes.len()).filter(|node| back[*node] == second) {
                self.connect(node);
                left -= 1;
            }
            if left == 0 {
                return;
            }
            self.tick();
        }
    }

    /// The readers of a node find that it's gone, before its session ends.
    pub(super) fn complain_about(&mut self, peer: usize) {
        for node in 0..self.nodes.len() {
            for blob in 0..self.sizes.len() {
                let of = &mut self.nodes[node].blobs[blob];
                if of.doing == Doing::Peer(peer) {
                    of.doing = Doing::Nothing;
                    let (digest, peer) = (digest(&blob.to_string()), name(peer));
                    self.say(node, blob, vec![PeerFailure { digest, peer, fault: PeerFault::Unreachable }]);
                }
            }
        }
    }

    /// The agent begins again: what it has stays.
    pub(super) fn restart(&mut self, node: usize) {
        if self.nodes[node].online {
            self.disconnect(node);
        }
        for of in self.nodes[node].blobs.iter_mut().filter(|of| of.doing != Doing::Done) {
            of.doing = Doing::Nothing;
        }
        self.nodes[node].frozen = false;
        self.connect(node);
    }
}
