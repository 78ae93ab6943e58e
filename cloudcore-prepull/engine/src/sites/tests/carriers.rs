//! Leases and carriers.

use super::*;

#[test]
fn one_node_carries_a_blob_for_all() {
    let mut story = Story::of(&["a", "b", "c", "d"]);
    story.want("a", "1");
    assert_eq!(story.hear(), ["a 1: carry"]);
    for node in ["b", "c", "d"] {
        story.want(node, "1");
    }
    assert_eq!(story.hear(), ["b 1: wait", "c 1: wait", "d 1: wait"]);
    story.have("a", "1");
    assert_eq!(story.hear(), ["b 1: a", "c 1: a"], "unproven, two readers at first");
    story.have("b", "1");
    assert_eq!(story.hear(), ["d 1: b,a"]);
    story.have("c", "1");
    story.have("d", "1");
    assert_eq!(story.hear(), [""; 0]);
}

#[test]
fn six_leases_are_spread_over_the_nodes() {
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
fn the_fullest_node_gets_the_first_lease() {
    for less in [0, MIB] {
        let mut story = Story::of(&["a", "b"]);
        for (node, done) in [("b", 9 * MIB), ("a", 9 * MIB - less)] {
            story.say(node, &[("1", 10 * MIB, BlobState::Wanted, done)]);
        }
        assert_eq!(story.hear(), ["a 1: wait", "b 1: carry"], "of equal ones the first");
    }
}

#[test]
fn a_carrier_without_progress_is_replaced() {
    let mut story = Story::of(&["a", "b"]);
    story.want("a", "1");
    story.hear();
    story.want("b", "1");
    for done in 1..10 {
        story.say("a", &[("1", 10 * MIB, BlobState::Carrying, done * MIB)]);
        let heard = story.hear_in(40);
        assert!(heard.iter().all(|line| line == "b 1: wait"), "{heard:?}");
    }
    story.carry("a", "1", 9 * MIB);
    let heard = story.hear_in(50);
    assert!(heard.contains(&"b 1: carry".to_owned()) && heard.contains(&"a 1: wait".to_owned()), "{heard:?}");
    assert_eq!(story.sites.reports(story.now)[0].counters.leases_lost, 1);
    story.say("a", &[("1", 10 * MIB, BlobState::Carrying, 9 * MIB + 1)]);
    assert!(
        story.hear().contains(&"a 1: wait".to_owned())
            || story.sites.by_name.values().all(|site| site.books.values().all(|book| book
                .seekers
                .values()
                .filter(|seeker| matches!(seeker.way, AssignedSource::Registry { .. }))
                .count()
                == 1))
    );
}

#[test]
fn a_carrier_may_return_in_time() {
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
    story.connect("a");
    assert!(story.hear_in(16).contains(&"b 1: carry".to_owned()), "it doesn't go on");
    story.sites.disconnect(&"b".into(), story.now);
    story.hear_in(20);
    story.connect("a");
    story.want("a", "1");
    assert!(story.hear_in(16).contains(&"a 1: carry".to_owned()), "b doesn't return");
}

#[test]
fn a_carrier_may_restart_once() {
    let mut story = Story::of(&["a", "b"]);
    story.want("a", "1");
    story.hear();
    story.want("b", "1");
    let carry = |done| {
        story.carry("a", "1", done * MIB);
        story.hear_in(40).contains(&"b 1: carry".to_owned())
    };
    assert_eq!([5, 0, 1, 2, 0].map(carry), [false, false, false, false, true]);
}

#[test]
fn a_restart_is_forgotten_with_the_whole_blob() {
    let mut story = Story::of(&["a", "b"]);
    story.want("a", "1");
    story.hear();
    story.want("b", "1");
    story.carry("a", "1", MIB);
    story.carry("a", "1", 0);
    story.have("a", "1");
    assert_eq!(story.hear(), ["b 1: a"]);
    story.say("a", &[("1", 10 * MIB, BlobState::Wanted, MIB)]);
    assert!(story.hear().contains(&"a 1: carry".to_owned()), "b has less");
}

/// Its readers notice the end of a carrier before its session ends, and ask it again before it has opened its blobs.
#[test]
fn readers_wait_for_a_carrier_that_restarts() {
    let mut story = Story::of_streaming(&["a", "b"]);
    story.want("a", "1");
    story.want("b", "1");
    assert_eq!(story.hear(), ["a 1: carry", "b 1: a"]);
    story.blame("b", "1", "a", PeerFault::Unreachable);
    let mut heard = story.hear();
    story.sites.disconnect(&"a".into(), story.now);
    heard.extend(story.hear_in(10));
    story.connect("a");
    story.say("a", &[("1", 10 * MIB, BlobState::Wanted, MIB)]);
    heard.extend(story.hear_in(6));
    assert!(heard.ends_with(&["a 1: carry".to_owned(), "b 1: a".to_owned()]), "{heard:?}");
    story.blame("b", "1", "a", PeerFault::Gone);
    story.say("a", &[("1", 10 * MIB, BlobState::Carrying, 2 * MIB)]);
    assert!(!story.hear_in(4).contains(&"b 1: a".to_owned()), "it may open the blob by then");
    assert_eq!(story.hear_in(3), ["b 1: a"]);
    assert!(!heard.iter().any(|word| word.contains("alone")), "{heard:?}");
}

#[test]
fn a_new_leader_waits_for_nodes_that_are_on_their_way() {
    let mut story = Story::of(&[]);
    for node in ["a", "b", "c"] {
        story.place(node, "factory");
    }
    story.connect("b");
    story.want("b", "1");
    assert_eq!(story.hear_in(17), ["b 1: wait"; 0]);
    story.connect("a");
    story.say("a", &[("1", 10 * MIB, BlobState::Carrying, 5 * MIB)]);
    assert_eq!(
        story.hear_in(14),
        ["b 1: wait", "a 1: carry", "b 1: wait"],
        "it has half, and c doesn't come"
    );
    assert_eq!(story.events(), [], "it may have had a lease");
    story.want("b", "2");
    assert_eq!(story.hear_in(2), ["b 2: carry"], "later none is on its way");
}

#[test]
fn after_an_outage_the_carrier_may_return() {
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
fn others_sessions_keep_no_carrier() {
    let mut story = Story::of(&["a", "b", "c"]);
    story.want("a", "1");
    story.want("b", "1");
    story.hear();
    story.sites.disconnect(&"a".into(), story.now);
    let mut heard = Vec::new();
    for _ in 0..6 {
        story.connect("c");
        heard.extend(story.hear_in(10));
    }
    assert!(heard.contains(&"b 1: carry".to_owned()), "{heard:?}");
}

#[test]
fn after_a_failover_the_fullest_node_carries() {
    let mut story = Story::of(&["a", "b", "c"]);
    story.want("b", "1");
    assert_eq!(story.hear(), ["b 1: carry"]);
    story.say("a", &[("1", 10 * MIB, BlobState::Carrying, 5 * MIB)]);
    assert_eq!(story.hear(), ["a 1: carry", "b 1: wait"]);
    story.say("c", &[("1", 10 * MIB, BlobState::Carrying, 4 * MIB)]);
    assert_eq!(story.hear(), ["c 1: wait"]);
}

#[test]
fn a_lease_is_taken_over_once() {
    let mut story = Story::of(&["a", "b"]);
    story.want("b", "1");
    assert_eq!(story.hear(), ["b 1: carry"]);
    story.carry("b", "1", 5 * MIB);
    story.carry("a", "1", 5 * MIB);
    assert_eq!(story.hear(), ["a 1: wait"], "it has no more");
    story.carry("a", "1", 5 * MIB + 1);
    assert_eq!(story.hear(), ["a 1: carry", "b 1: wait"]);
    story.say("a", &[("1", 10 * MIB, BlobState::Dropped, 0)]);
    assert_eq!(story.hear(), ["b 1: carry"]);
    story.carry("a", "1", 9 * MIB);
    assert_eq!(story.hear(), ["a 1: wait"]);
}

#[test]
fn a_node_with_three_leases_takes_none_over() {
    let mut story = Story::of(&["a", "b"]);
    for of in ["1", "2", "3"] {
        story.want("a", of);
    }
    story.want("b", "4");
    assert_eq!(story.hear().len(), 4);
    story.carry("a", "4", 5 * MIB);
    assert_eq!(story.hear(), ["a 4: wait"]);
}

#[test]
fn a_proven_holder_stops_an_early_carrier() {
    for (done, expected) in [(MIB, &["a 1: b"][..]), (6 * MIB, &[])] {
        let mut story = Story::of(&["a", "b"]);
        story.want("a", "1");
        assert_eq!(story.hear(), ["a 1: carry"], "no other node has come back yet");
        story.say("a", &[("1", 10 * MIB, BlobState::Carrying, done)]);
        story.have_proven("b", "1");
        assert_eq!(story.hear(), expected, "with {done} bytes");
    }
    let mut story = Story::of(&["a", "b?"]);
    story.want("a", "1");
    story.hear();
    story.have_proven("b?", "1");
    assert_eq!(story.hear(), [""; 0], "no node is sent to one that serves none");
}

#[test]
fn a_slow_lease_changes_hands_once() {
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
fn carriers_divide_the_limit_of_a_site() {
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
    story.sites.limit_job(&task().job, story.max_rate, story.now);
    assert_eq!(story.hear(), ["b 2: carry at 200"]);
    story.max_rate = None;
    story.want("a", "3");
    let mut heard = story.hear();
    heard.sort();
    assert_eq!(heard, ["a 3: carry", "b 2: carry"]);
}

#[test]
fn a_sites_rate_is_divided_by_node() {
    let mut story = Story::of(&["a", "b"]);
    story.max_rate = NonZeroU64::new(900);
    story.want("a", "1");
    story.want("a", "2");
    story.want("b", "3");
    let mut heard = story.hear();
    heard.sort();
    assert_eq!(
        heard,
        ["a 1: carry at 225", "a 2: carry at 225", "b 3: carry at 450"],
        "many claims gain nothing"
    );
}

#[test]
fn without_servers_all_nodes_download_at_once() {
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
fn each_half_of_a_split_lan_has_a_carrier() {
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
    // Those that were not sent to b yet are now.
    for node in ["x", "y", "z"] {
        story.blame(node, "1", "b", PeerFault::Unreachable);
    }
    story.hear_in(6);
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
fn a_lone_lease_is_looked_at_when_it_ends() {
    let mut story = Story::of(&["a", "b", "c"]);
    for (node, of) in [("a", 10..14), ("b", 20..24), ("c", 30..34)] {
        of.for_each(|of| story.want(node, &of.to_string()));
    }
    story.hear();
    // Reminders of waiting nodes.
    let looks = story.count_looks(50);
    assert!(looks < 20, "{looks}");
}

#[test]
fn a_lone_lease_has_its_minute() {
    let mut story = Story::of_full_lanes();
    for node in ["c", "d"] {
        story.want(node, "3");
    }
    for (seconds, is_carried) in [(50, false), (15, true)] {
        let heard = story.hear_in(seconds);
        assert_eq!(heard.iter().any(|line| line.ends_with(" 3: carry")), is_carried, "{heard:?}");
    }
}
