#![allow(clippy::unwrap_used)]

mod busy;
mod model;

use std::time::Duration;

use prepull_api::sites::{BlobNews, PeerDoor, PeerFailure, PeerFault};
use prepull_api::task::{JobUid, TaskId};

use super::nodes::NodeId;
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

    fn gather(&mut self, nodes: &[&str]) {
        for node in nodes {
            self.place(node, "factory");
            self.connect(node);
        }
    }

    fn shared(&self) -> Shared {
        Shared {
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
        self.sites.note(&node.into(), &self.shared(), news, self.now);
    }

    fn want(&mut self, node: &str, of: &str) {
        self.say(node, &[(of, 10 * MIB, BlobState::Wanted, 0)]);
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
        self.sites.note(&node.into(), &self.shared(), news, self.now);
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

#[test]
fn one_node_carries_a_blob_and_the_others_get_it_from_it() {
    let mut story = Story::of(&["a", "b", "c"]);
    story.want("a", "1");
    assert_eq!(story.hear(), ["a 1: carry"]);
    story.want("b", "1");
    story.want("c", "1");
    assert_eq!(story.hear(), ["b 1: wait", "c 1: wait"]);
    story.have("a", "1");
    assert_eq!(story.hear(), ["b 1: a"], "unproven, one reader at first");
    story.have("b", "1");
    assert_eq!(story.hear(), ["c 1: a,b"]);
    story.have("c", "1");
    assert_eq!(story.hear(), [""; 0]);
}

#[test]
fn blobs_are_spread_over_the_nodes_and_only_so_many_are_carried_at_a_time() {
    let mut story = Story::of(&["a", "b", "c"]);
    let names: Vec<String> = (1..=9).map(|n| n.to_string()).collect();
    for node in ["a", "b", "c"] {
        let all: Vec<_> = names.iter().map(|of| (of.as_str(), 10 * MIB, BlobState::Wanted, 0)).collect();
        story.say(node, &all);
    }
    let heard = story.hear();
    let carries =
        |node: &str| heard.iter().filter(|line| line.starts_with(node) && line.ends_with("carry")).count();
    assert_eq!(["a", "b", "c"].map(carries), [2, 2, 2]);
    story.have("a", heard[0].split([' ', ':']).nth(1).unwrap());
    let heard = story.hear();
    assert_eq!(heard.iter().filter(|line| line.ends_with("carry")).count(), 1, "{heard:?}");
}

#[test]
fn the_largest_blob_is_carried_first() {
    let mut story = Story::of(&["a"]);
    let blob = |of, size| (of, size * MIB, BlobState::Wanted, 0);
    story.say("a", &[blob("1", 1), blob("2", 9), blob("3", 5), blob("4", 7)]);
    let heard = story.hear();
    assert_eq!(heard, ["a 1: wait", "a 2: carry", "a 3: carry", "a 4: carry"]);
}

#[test]
fn a_carrier_that_makes_no_progress_is_replaced_and_one_that_does_is_not() {
    let mut story = Story::of(&["a", "b"]);
    story.want("a", "1");
    story.hear();
    story.want("b", "1");
    for done in 1..10 {
        story.say("a", &[("1", 10 * MIB, BlobState::Carrying, done * MIB)]);
        let heard = story.hear_in(40);
        assert!(heard.iter().all(|line| line == "b 1: wait"), "{heard:?}");
    }
    let heard = story.hear_in(60);
    assert!(heard.contains(&"b 1: carry".to_owned()) && heard.contains(&"a 1: wait".to_owned()), "{heard:?}");
    story.say("a", &[("1", 10 * MIB, BlobState::Carrying, 9 * MIB + 1)]);
    assert!(
        story.hear().contains(&"a 1: wait".to_owned())
            || story.sites.by_name.values().all(|site| site.books.values().all(|book| book
                .seekers
                .values()
                .filter(|seeker| matches!(seeker.way, Way::Registry { .. }))
                .count()
                == 1))
    );
}

#[test]
fn a_carrier_that_is_gone_is_replaced_and_goes_on_if_it_comes_back_in_time() {
    let mut story = Story::of(&["a", "b"]);
    story.want("a", "1");
    story.want("b", "1");
    story.hear();
    story.sites.disconnect(&"a".into(), story.now);
    assert_eq!(story.hear_in(25), ["b 1: wait"], "only reminded");
    story.connect("a");
    story.say("a", &[("1", 10 * MIB, BlobState::Wanted, 5 * MIB)]);
    assert_eq!(story.hear(), ["a 1: carry"], "with its own half");
    story.sites.disconnect(&"a".into(), story.now);
    assert!(story.hear_in(40).contains(&"b 1: carry".to_owned()));
}

#[test]
fn the_only_one_who_has_a_blob_is_waited_for_while_it_is_restarted() {
    let mut story = Story::of(&["a", "b"]);
    story.have("a", "1");
    story.sites.disconnect(&"a".into(), story.now);
    story.want("b", "1");
    assert_eq!(story.hear_in(25), ["b 1: wait", "b 1: wait"]);
    story.connect("a");
    assert_eq!(story.hear(), ["b 1: a"]);
    story.blame("b", "1", "a", PeerFault::Busy);
    story.sites.disconnect(&"a".into(), story.now);
    story.hear();
    assert_eq!(story.hear_in(40).last().unwrap(), "b 1: carry", "not for ever");
}

#[test]
fn a_neighbour_that_could_not_be_reached_while_it_was_restarted_is_asked_again() {
    let mut story = Story::of(&["a", "b", "c"]);
    story.have_proven("a", "1");
    story.want("b", "1");
    assert_eq!(story.hear(), ["b 1: a"]);
    // The cloud has not noticed yet that it is gone.
    story.blame("b", "1", "a", PeerFault::Unreachable);
    story.sites.disconnect(&"a".into(), story.now);
    story.want("c", "1");
    assert!(!story.hear().iter().any(|line| line.contains("carry") || line.contains("alone")));
    story.connect("a");
    assert_eq!(story.hear(), ["b 1: a", "c 1: a"]);
    // It has noticed, and nobody is blamed.
    story.sites.disconnect(&"a".into(), story.now);
    story.blame("b", "1", "a", PeerFault::Unreachable);
    story.want("b", "1");
    assert!(!story.hear().iter().any(|line| line.contains("alone")));
    story.connect("a");
    assert!(story.hear_in(6).contains(&"b 1: a".to_owned()));
}

#[test]
fn when_the_uplink_was_gone_for_all_the_carrier_has_time_to_come_back() {
    let mut story = Story::of(&["a", "b"]);
    story.want("a", "1");
    story.want("b", "1");
    story.hear();
    for node in ["a", "b"] {
        story.sites.disconnect(&node.into(), story.now);
    }
    story.hear_in(29);
    story.connect("b");
    story.want("b", "1");
    assert!(!story.hear_in(10).contains(&"b 1: carry".to_owned()));
    story.connect("a");
    story.say("a", &[("1", 10 * MIB, BlobState::Carrying, 5 * MIB)]);
    story.hear_in(40);
    story.have("a", "1");
    assert_eq!(story.hear(), ["b 1: a"]);
}

#[test]
fn after_a_failover_who_has_most_of_a_blob_goes_on_with_it() {
    let mut story = Story::of(&["a", "b", "c"]);
    story.want("b", "1");
    assert_eq!(story.hear(), ["b 1: carry"]);
    story.say("a", &[("1", 10 * MIB, BlobState::Carrying, 5 * MIB)]);
    assert_eq!(story.hear(), ["a 1: carry", "b 1: wait"]);
    story.say("c", &[("1", 10 * MIB, BlobState::Carrying, 4 * MIB)]);
    assert_eq!(story.hear(), ["c 1: wait"]);
}

#[test]
fn a_carrier_that_has_hardly_begun_stops_where_somebody_has_it_already() {
    for (done, expected) in [(MIB, &["a 1: b"][..]), (6 * MIB, &[])] {
        let mut story = Story::of(&["a", "b"]);
        story.want("a", "1");
        assert_eq!(story.hear(), ["a 1: carry"], "nobody else has come back yet");
        story.say("a", &[("1", 10 * MIB, BlobState::Carrying, done)]);
        story.have_proven("b", "1");
        assert_eq!(story.hear(), expected, "with {done} bytes");
    }
    let mut story = Story::of(&["a", "b?"]);
    story.want("a", "1");
    story.hear();
    story.have_proven("b?", "1");
    assert_eq!(story.hear(), [""; 0], "nobody is sent to one that serves nobody");
}

#[test]
fn a_node_that_loses_its_session_while_it_fetches_blames_nobody() {
    let mut story = Story::of(&["a", "b"]);
    story.have("a", "1");
    story.want("b", "1");
    assert_eq!(story.hear(), ["b 1: a"]);
    story.sites.disconnect(&"b".into(), story.now);
    story.hear_in(90);
    story.connect("b");
    story.want("b", "1");
    assert_eq!(story.hear(), ["b 1: a"]);
}

#[test]
fn a_node_that_is_not_listed_any_more_is_at_no_site() {
    let mut story = Story::of(&["a", "b"]);
    story.have("a", "1");
    let labels = [(SITE_LABEL.to_owned(), "factory".to_owned())].into();
    story.sites.set_nodes(&[NodeView { name: "b".into(), labels, ready: true }], story.now);
    story.want("b", "1");
    assert_eq!(story.hear(), ["b 1: carry"]);
}

#[test]
fn who_reaches_no_neighbour_downloads_for_itself_and_says_why() {
    let mut story = Story::of(&["a", "b", "c"]);
    story.want("a", "1");
    story.hear();
    story.want("b", "1");
    story.have_proven("a", "1");
    assert_eq!(story.hear(), ["b 1: a"]);
    story.blame("b", "1", "a", PeerFault::Unreachable);
    assert_eq!(story.hear(), ["b 1: alone: it reaches no"]);
    story.want("c", "1");
    assert_eq!(story.hear(), ["c 1: a"], "others do reach it");
}

#[test]
fn where_nobody_reaches_anybody_nobody_waits_for_others_after_a_while() {
    let mut story = Story::of(&["a", "b", "c", "d", "e"]);
    for (of, holder) in [("1", "a"), ("2", "b"), ("3", "c")] {
        story.have_proven(holder, of);
        story.want("e", of);
        assert_eq!(story.hear(), [format!("e {of}: {holder}")]);
        story.blame("e", of, holder, PeerFault::Unreachable);
        story.hear();
        story.have_proven("e", of);
    }
    story.want("d", "4");
    assert_eq!(story.hear(), ["d 4: carry"]);
    story.want("e", "4");
    assert_eq!(story.hear(), ["e 4: alone: it reaches no"], "at once");
}

#[test]
fn where_the_lan_is_split_each_half_has_a_carrier() {
    let mut story = Story::of(&["a", "b", "x", "y", "z"]);
    story.want("a", "1");
    story.hear();
    for node in ["b", "x", "y", "z"] {
        story.want(node, "1");
    }
    story.have_proven("a", "1");
    story.hear();
    story.have_proven("b", "1");
    for peer in ["a", "b"] {
        for node in ["x", "y", "z"] {
            story.blame(node, "1", peer, PeerFault::Unreachable);
        }
        story.hear();
    }
    // Whoever was not sent to b yet is now.
    for node in ["x", "y", "z"] {
        story.blame(node, "1", "b", PeerFault::Unreachable);
    }
    story.hear();
    let alone = |node: &NodeId| story.sites.nodes[*node].carries;
    let ids: Vec<NodeId> =
        ["x", "y", "z"].iter().map(|node| story.sites.nodes.id(&(*node).into()).unwrap()).collect();
    assert_eq!(ids.iter().map(alone).sum::<usize>(), 1);
    let carrier = ids.into_iter().find(|id| alone(id) == 1).unwrap();
    let carrier = story.sites.nodes[carrier].name.clone();
    story.have_proven(carrier.as_str(), "1");
    let heard = story.hear();
    assert!(heard.iter().any(|line| line.ends_with(carrier.as_str())), "{heard:?}");
}

#[test]
fn a_neighbour_that_lies_is_not_asked_again_by_whom_it_lied_to_and_after_two_complaints_by_nobody() {
    let mut story = Story::of(&["a", "b", "c", "d", "e"]);
    story.have_proven("a", "1");
    story.have_proven("e", "1");
    for node in ["b", "c"] {
        story.want(node, "1");
        let heard = story.hear().remove(0);
        if heard.contains(": e") {
            story.blame(node, "1", "e", PeerFault::Busy);
            story.hear_in(2);
        }
        story.blame(node, "1", "a", PeerFault::Damaged);
        story.hear_in(10);
        story.have_proven(node, "1");
    }
    story.want("d", "1");
    let heard = story.hear();
    assert!(!heard[0].contains('a'), "{heard:?}");
    // Nobody can slander a node that it was not sent to.
    story.have_proven("c", "2");
    story.want("d", "2");
    story.hear();
    for slanderer in ["a", "b", "e"] {
        story.blame(slanderer, "2", "c", PeerFault::Damaged);
    }
    story.want("e", "2");
    assert_eq!(story.hear(), ["e 2: c"]);
}

#[test]
fn a_blob_is_shared_only_among_tasks_that_name_the_same_images() {
    let mut story = Story::of(&["a", "b"]);
    story.have("a", "1");
    story.images = "r.io/private:1".into();
    story.want("b", "1");
    assert_eq!(story.hear(), ["b 1: carry"]);
}

#[test]
fn sites_do_not_mix() {
    let mut story = Story::of(&["a", "b"]);
    story.place("b", "ship");
    story.have("a", "1");
    story.want("b", "1");
    assert_eq!(story.hear(), ["b 1: carry"]);
    story.place("b", "factory");
    story.want("b", "1");
    assert_eq!(story.hear(), ["b 1: a"], "it was moved");
    story.place("b", "");
    story.want("b", "1");
    assert_eq!(story.hear(), ["b 1: alone: its Node has"]);
}

#[test]
fn where_nobody_serves_everybody_downloads_at_once() {
    let mut story = Story::of(&["a?", "b?"]);
    story.want("a?", "1");
    story.want("b?", "1");
    assert_eq!(story.hear(), ["a? 1: carry", "b? 1: alone: no neighbour serves"]);
    let mut story = Story::of(&["a?", "b", "c?"]);
    for node in ["a?", "b", "c?"] {
        story.want(node, "1");
    }
    assert_eq!(story.hear(), ["a? 1: wait", "b 1: carry", "c? 1: wait"], "the one that can serve the others");
}

#[test]
fn one_node_serves_only_so_many_at_a_time_and_is_asked_for_what_it_has_only() {
    let mut story = Story::of(&["a", "b", "c", "d", "e", "f"]);
    story.have_proven("a", "1");
    for node in ["b", "c", "d", "e", "f"] {
        story.want(node, "1");
    }
    let heard = story.hear();
    assert_eq!(heard.iter().filter(|line| line.ends_with(": a")).count(), 4, "{heard:?}");
    assert_eq!(heard.iter().filter(|line| line.ends_with("wait")).count(), 1, "{heard:?}");
    story.have_proven("b", "1");
    let heard = story.hear();
    assert_eq!(heard, ["f 1: b,a"]);
    story.blame("f", "1", "a", PeerFault::Gone);
    story.blame("f", "1", "b", PeerFault::Gone);
    assert_eq!(story.hear(), ["f 1: alone: it reaches no"], "one complaint avoids the pair");
}

#[test]
fn the_limit_of_a_site_is_divided_among_those_who_download_over_its_uplink() {
    let mut story = Story::of(&["a", "b"]);
    story.max_rate = NonZeroU64::new(900);
    story.want("a", "1");
    assert_eq!(story.hear(), ["a 1: carry at 900"]);
    story.want("b", "2");
    assert_eq!(story.hear(), ["a 1: carry at 450", "b 2: carry at 450"]);
    story.have("a", "1");
    assert_eq!(story.hear(), ["b 2: carry at 900"]);
    story.max_rate = NonZeroU64::new(300);
    story.want("a", "2");
    assert_eq!(story.hear(), ["a 2: wait", "b 2: carry at 300"]);
    // At once, without another message.
    story.max_rate = NonZeroU64::new(200);
    story.sites.limit(&task().job, story.max_rate, story.now);
    assert_eq!(story.hear(), ["b 2: carry at 200"]);
    story.max_rate = None;
    story.want("a", "3");
    let mut heard = story.hear();
    heard.sort();
    assert_eq!(heard, ["a 3: carry", "b 2: carry"]);
}

#[test]
fn who_waits_is_reminded_and_who_is_gone_is_forgotten() {
    let mut story = Story::of(&["a", "b"]);
    story.want("a", "1");
    story.want("b", "1");
    story.hear();
    story.say("a", &[("1", 10 * MIB, BlobState::Carrying, MIB)]);
    assert_eq!(story.hear_in(45), ["b 1: wait", "b 1: wait"]);
    story.say("b", &[("1", 10 * MIB, BlobState::Dropped, 0)]);
    story.have("a", "1");
    assert_eq!(story.hear_in(3600), [""; 0]);
    assert!(!story.sites.by_name.is_empty(), "who has it is remembered");
    story.hear_in(6 * 3600);
    assert!(story.sites.by_name.is_empty() && story.sites.next_wakeup().is_none());
}

#[test]
fn what_a_node_says_that_makes_no_sense_harms_nothing() {
    let mut story = Story::of(&["a", "b"]);
    story.want("a", "1");
    story.hear();
    story.say("b", &[("1", 99 * MIB, BlobState::Wanted, 0)]);
    assert_eq!(story.hear(), ["b 1: carry"], "another size is another blob");
    story.say("b", &[("1", 10 * MIB, BlobState::Carrying, u64::MAX)]);
    story.hear();
    let news = BlobNews { digest: "../../x".to_owned(), size: 1, state: BlobState::Here, done: 0 };
    let news = Blobs { task: task(), blobs: vec![news], failures: Vec::new(), reads_streams: false };
    story.sites.note(&"b".into(), &story.shared(), news, story.now);
    let books: usize = story.sites.by_name.values().map(|site| site.books.len()).sum();
    assert_eq!(books, 2);
    for of in 0..2 * MAX_BOOKS_OF_NODE {
        story.say("b", &[(&of.to_string(), MIB, BlobState::Here, 0)]);
    }
    let books: usize = story.sites.by_name.values().map(|site| site.books.len()).sum();
    assert_eq!(books, MAX_BOOKS_OF_NODE);
}

#[test]
fn a_lease_that_no_reader_confirms_ends() {
    let mut story = Story::of_streaming(&["a", "b", "c"]);
    for node in ["a", "b", "c"] {
        story.want(node, "1");
    }
    assert_eq!(story.hear(), ["a 1: carry", "b 1: a", "c 1: a,b"], "while it arrives");
    for done in 1..8 {
        story.say("a", &[("1", 10 * MIB, BlobState::Carrying, done * MIB)]);
        story.say("b", &[("1", 10 * MIB, BlobState::Fetching, 0)]);
        let heard = story.hear_in(10);
        if heard.contains(&"b 1: carry".to_owned()) {
            return assert!(done >= 6, "after a minute");
        }
    }
    panic!("its own reports prolong it");
}

#[test]
fn a_lease_on_a_slow_link_changes_hands_once_at_most() {
    let mut story = Story::of_streaming(&["a", "b"]);
    story.want("a", "1");
    story.want("b", "1");
    story.hear();
    let (mut carrier, mut reader, mut changes) = ("a", "b", 0);
    for done in 1..100 {
        story.say(carrier, &[("1", 10 * MIB, BlobState::Carrying, done * 100_000)]);
        story.say(reader, &[("1", 10 * MIB, BlobState::Fetching, done * 100_000)]);
        if story.hear_in(10).contains(&format!("{reader} 1: carry")) {
            (carrier, reader, changes) = (reader, carrier, changes + 1);
        }
    }
    assert!(changes <= 1, "{changes}");
}

#[test]
fn a_claim_makes_no_carrier() {
    let mut story = Story::of(&["a", "b"]);
    story.want("a", "1");
    story.hear();
    story.say("b", &[("1", 10 * MIB, BlobState::Carrying, 0)]);
    assert_eq!(story.hear(), ["b 1: wait"]);
    assert_eq!(story.sites.reports(story.now)[0].counters.claims_refused, 1);
}

#[test]
fn invented_blobs_leave_lanes_for_others() {
    let mut story = Story::of(&["liar", "a", "b"]);
    for of in 100..1200 {
        story.say("liar", &[(&of.to_string(), 99 * MIB, BlobState::Carrying, MIB)]);
    }
    assert!(story.sites.by_name.values().all(|site| site.books.len() == MAX_BOOKS_OF_NODE));
    story.hear();
    story.want("a", "1");
    story.want("b", "1");
    assert!(story.hear().contains(&"a 1: carry".to_owned()));
}

#[test]
fn relabelling_leaves_nothing_behind() {
    let mut story = Story::of(&["a"]);
    let before = story.sites.bytes();
    for of in 0..200 {
        story.place("a", &of.to_string());
        story.have("a", "1");
        story.have("a", "2");
    }
    story.place("a", "");
    assert_eq!((story.sites.bytes(), story.sites.by_name.len()), (before, 0));
}

#[test]
fn one_complaint_delists_no_holder() {
    let mut story = Story::of(&["a", "b", "c"]);
    story.have_proven("a", "1");
    story.want("b", "1");
    story.hear();
    story.blame("b", "1", "a", PeerFault::Gone);
    story.want("c", "1");
    assert!(story.hear().contains(&"c 1: a".to_owned()));
}

#[test]
fn a_holder_that_two_readers_cant_confirm_is_none() {
    let mut story = Story::of(&["liar", "b", "c"]);
    story.have("liar", "1");
    for node in ["b", "c"] {
        story.want(node, "1");
        assert!(story.hear().contains(&format!("{node} 1: liar")));
        story.blame(node, "1", "liar", PeerFault::Gone);
    }
    story.have("liar", "2");
    story.want("b", "2");
    assert!(story.hear().contains(&"b 2: carry".to_owned()));
}

#[test]
fn the_node_with_the_most_bytes_goes_on_after_a_failover() {
    let mut story = Story::of(&["a", "b"]);
    story.want("a", "1");
    story.say("b", &[("1", 10 * MIB, BlobState::Wanted, 9 * MIB)]);
    assert_eq!(story.hear(), ["a 1: wait", "b 1: carry"]);
}

#[test]
fn a_node_without_leases_gives_way() {
    let mut story = Story::of_streaming(&["a", "b"]);
    let barred = story.sites.nodes.id(&"b".into()).unwrap();
    story.sites.nodes[barred].trust.no_lease_until = HOUR;
    story.want("b", "1");
    assert_eq!(story.hear_in(2), ["b 1: carry"], "no other node wants it");
    story.want("a", "1");
    let heard = story.hear_in(2);
    assert!(heard.contains(&"a 1: carry".to_owned()), "{heard:?}");
}

#[test]
fn a_look_is_bounded_and_short() {
    const NODES: usize = 10_000;
    let names: Vec<String> = (0..NODES).map(|node| format!("n{node}")).collect();
    let mut story = Story::of_streaming(&names.iter().map(String::as_str).collect::<Vec<_>>());
    let blobs: Vec<String> = (0..40).map(|of| of.to_string()).collect();
    let all: Vec<_> = blobs.iter().map(|of| (of.as_str(), 10 * MIB, BlobState::Wanted, 0)).collect();
    for node in &names {
        story.say(node, &all);
    }
    for _ in 0..50 {
        let told: usize = story.sites.flush(story.now).iter().map(|told| told.blobs.len()).sum();
        assert!(told <= 10_000, "{told}");
        story.now = story.now.saturating_add(Duration::from_millis(100)).unwrap();
    }
    assert!(story.sites.bytes() < MEMORY_LIMIT, "{}", story.sites.bytes());
}
