#![allow(clippy::unwrap_used)]

mod carriers;
mod leases;
mod liars;
mod model;
mod neighbours;
mod reports;
mod sources;

use std::time::Duration;

use prepull_api::sites::{BlobNews, PeerDoor, PeerFailure, PeerFault};
use prepull_api::task::{JobUid, TaskId};

use super::*;

const MIB: u64 = 1 << 20;

fn digest(of: &str) -> String {
    format!("sha256:{of:0>64}")
}

fn task() -> TaskId {
    TaskId { job: JobUid("uid".to_owned()), attempt: 1 }
}

/// A tracker with a clock, in which a test tells a story.
struct Story {
    sites: Sites,
    now: Timestamp,
    images: Arc<str>,
    max_rate: Option<NonZeroU64>,
    has_succeeded: bool,
    /// Whether the agents stream.
    streams: bool,
}

impl Story {
    /// Nodes of one site, all of them online; those whose names end in a question mark serve nobody.
    fn of(nodes: &[&str]) -> Self {
        let (sites, now) = (Sites::default(), Timestamp::UNIX_EPOCH);
        let mut story = Self {
            sites,
            now,
            images: "r.io/a:1".into(),
            max_rate: None,
            has_succeeded: false,
            streams: false,
        };
        story.gather(nodes);
        story
    }

    /// The same, of nodes that stream.
    fn of_streaming(nodes: &[&str]) -> Self {
        let mut story = Self { streams: true, ..Self::of(&[]) };
        story.gather(nodes);
        story
    }

    /// Nodes a and b carry six blobs that no other node wants, and there are c and d.
    fn of_full_lanes() -> Self {
        let mut story = Self::of(&["a", "b", "c", "d"]);
        for (node, of) in [("a", 10..13), ("b", 20..23)] {
            of.for_each(|of| story.want(node, &of.to_string()));
        }
        assert_eq!(story.hear().len(), 6);
        story
    }

    fn gather(&mut self, nodes: &[&str]) {
        for node in nodes {
            self.place(node, "factory");
            self.connect(node);
        }
    }

    fn shared(&self) -> BlobSharing {
        BlobSharing {
            entitlement: self.images.clone(),
            max_rate: self.max_rate,
            has_succeeded: self.has_succeeded,
        }
    }

    fn place(&mut self, node: &str, site: &str) {
        let labels = [(SITE_LABEL.to_owned(), site.to_owned())].into();
        self.sites.set_labels(&node.into(), Some(&labels), self.now);
    }

    fn connect(&mut self, node: &str) {
        let peer = (!node.ends_with('?'))
            .then(|| PeerDoor { addresses: vec!["10.0.0.1:1".to_owned()], streams: self.streams });
        self.sites.connect(&node.into(), &Hello { peer, ..Hello::default() }, self.now);
    }

    fn say(&mut self, node: &str, blobs: &[(&str, u64, BlobState, u64)]) {
        let blob = |(of, size, state, done): &(&str, u64, BlobState, u64)| BlobNews {
            digest: digest(of),
            size: *size,
            state: *state,
            done: *done,
        };
        let news = Blobs {
            task: task(),
            blobs: blobs.iter().map(blob).collect(),
            failures: Vec::new(),
            reads_streams: self.streams,
        };
        self.sites.note_blobs(&node.into(), &self.shared(), news, self.now);
    }

    fn want(&mut self, node: &str, of: &str) {
        self.say(node, &[(of, 10 * MIB, BlobState::Wanted, 0)]);
    }

    fn carry(&mut self, node: &str, of: &str, done: u64) {
        self.say(node, &[(of, 10 * MIB, BlobState::Carrying, done)]);
    }

    fn fetch(&mut self, node: &str, of: &str, done: u64) {
        self.say(node, &[(of, 10 * MIB, BlobState::Fetching, done)]);
    }

    fn have(&mut self, node: &str, of: &str) {
        self.say(node, &[(of, 10 * MIB, BlobState::Here, 0)]);
    }

    /// The node has it, and its task has succeeded.
    fn have_proven(&mut self, node: &str, of: &str) {
        self.has_succeeded = true;
        self.have(node, of);
        self.has_succeeded = false;
    }

    fn blame(&mut self, node: &str, of: &str, peer: &str, fault: PeerFault) {
        let failure = PeerFailure { digest: digest(of), peer: peer.into(), fault };
        let news =
            Blobs { task: task(), blobs: Vec::new(), failures: vec![failure], reads_streams: self.streams };
        self.sites.note_blobs(&node.into(), &self.shared(), news, self.now);
    }

    fn id(&self, node: &str) -> NodeId {
        self.sites.nodes.id(&node.into()).unwrap()
    }

    /// The node gets no lease that another node can have, for an hour from the beginning.
    fn bar(&mut self, node: &str) {
        let id = self.id(node);
        self.sites.nodes[id].trust.no_lease_until = HOUR;
    }

    /// The fastest uplink seen at the site, in bytes a second.
    fn fastest(&self) -> u64 {
        self.sites.by_name["factory"].fastest.0
    }

    /// The kinds of the events since the last call.
    fn events(&mut self) -> Vec<SiteEventKind> {
        self.sites.take_events().into_iter().map(|event| event.kind).collect()
    }

    /// The number of looks within some seconds.
    fn count_looks(&mut self, seconds: u64) -> usize {
        let end = self.now.saturating_add(Duration::from_secs(seconds)).unwrap();
        let mut looks = 0;
        while let Some(at) = self.sites.next_wakeup().filter(|at| *at <= end) {
            self.now = at;
            self.sites.flush(at);
            looks += 1;
        }
        self.now = end;
        looks
    }

    /// What is said within a second, as `node digest: word`.
    fn hear(&mut self) -> Vec<String> {
        self.hear_in(1)
    }

    fn hear_in(&mut self, seconds: u64) -> Vec<String> {
        let end = self.now.saturating_add(Duration::from_secs(seconds)).unwrap();
        let mut heard = Vec::new();
        loop {
            for Directions { node, task: of, blobs } in self.sites.flush(self.now) {
                assert_eq!(of, task());
                for (digest, direction) in blobs {
                    let of = digest.trim_start_matches("sha256:").trim_start_matches('0');
                    let word = match direction {
                        Direction::Wait => "wait".to_owned(),
                        Direction::Registry { alone: "", max_rate: None } => "carry".to_owned(),
                        Direction::Registry { alone: "", max_rate: Some(rate) } => format!("carry at {rate}"),
                        Direction::Registry { alone, .. } => {
                            format!("alone: {}", alone.split(' ').take(3).collect::<Vec<_>>().join(" "))
                        }
                        Direction::Peers(peers) => {
                            let names: Vec<_> = peers.iter().map(|(peer, _)| peer.as_str()).collect();
                            names.join(",")
                        }
                    };
                    heard.push(format!("{node} {of}: {word}"));
                }
            }
            match self.sites.next_wakeup().filter(|at| *at <= end) {
                Some(at) => self.now = self.now.max(at),
                None => break,
            }
        }
        self.now = end;
        heard
    }
}
