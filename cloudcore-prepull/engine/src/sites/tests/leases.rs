//! Measures of leases, and how they end or change hands.

use super::*;

/// Two nodes that stream: one carries the blob, and the other one reads it.
fn pair() -> Story {
    let mut story = Story::of_streaming(&["a", "b"]);
    story.want("a", "1");
    story.want("b", "1");
    assert_eq!(story.hear(), ["a 1: carry", "b 1: a"]);
    story
}

#[test]
fn a_lease_is_measured_over_a_minute() {
    let mut story = pair();
    for second in 1..59 {
        story.fetch("b", "1", second);
        assert_eq!(story.hear(), [""; 0], "after {second} s");
    }
    assert_eq!(story.fastest(), 0);
    story.hear_in(2);
    story.fetch("b", "1", 1000);
    assert_eq!(story.fastest(), 1000 / 61);
    assert!(story.hear().contains(&"b 1: carry".to_owned()), "it would take days");
}

#[test]
fn a_whole_blob_is_measured_at_once() {
    let mut story = pair();
    story.hear_in(10);
    story.have("b", "1");
    assert_eq!(story.fastest(), MIB);
    let mut story = Story::of_streaming(&["a", "b"]);
    story.want("a", "1");
    story.want("b", "1");
    story.sites.flush(story.now + Duration::from_secs(1));
    story.now += Duration::from_millis(1999);
    story.have("b", "1");
    assert_eq!(story.fastest(), 0, "within a second there's too little to measure");
}

#[test]
fn a_lease_of_ten_more_minutes_stays() {
    for (done, is_left) in [(1_024_960, false), (1_024_900, true)] {
        let mut story = pair();
        story.hear_in(30);
        story.fetch("b", "1", 1);
        story.hear_in(35);
        story.fetch("b", "1", done);
        assert_eq!(story.hear().contains(&"b 1: carry".to_owned()), is_left, "{done} bytes in 65 s");
    }
}

/// Node a loses the lease of the blob by its silence, and b shows that the link works.
fn lose(story: &mut Story, of: &str) {
    story.want("a", of);
    assert_eq!(story.hear_in(2), [format!("a {of}: carry")]);
    story.want("b", of);
    story.hear_in(90);
    story.carry("b", of, MIB);
    story.fetch("a", of, MIB);
    story.have("b", of);
    story.have("a", of);
}

#[test]
fn a_loss_blames_no_successor() {
    let mut story = Story::of_streaming(&["a", "b", "c"]);
    for node in ["a", "b", "c"] {
        story.want(node, "1");
    }
    let heard = story.hear_in(63);
    assert!(heard.contains(&"b 1: carry".to_owned()) && heard.contains(&"c 1: b".to_owned()), "{heard:?}");
    let a = story.id("a");
    story.sites.disconnect(&"a".into(), story.now);
    story.sites.set_labels(&"a".into(), None, story.now);
    story.gather(&["z"]);
    assert_eq!(story.id("z"), a, "its number is used again");
    story.fetch("c", "1", MIB);
    assert_eq!(story.sites.nodes[a].trust.lost_at, None);
}

#[test]
fn two_leases_lost_within_an_hour_bar_a_node() {
    for (seconds, events, carrier) in [
        (3507, &[SiteEventKind::LeaseLost, SiteEventKind::CarriesNothing][..], "b"),
        (3508, &[SiteEventKind::LeaseLost], "a"),
    ] {
        let mut story = Story::of_streaming(&["a", "b"]);
        story.hear_in(10);
        lose(&mut story, "1");
        assert_eq!(story.events(), [SiteEventKind::LeaseLost]);
        story.hear_in(seconds);
        lose(&mut story, "2");
        assert_eq!(story.events(), events, "after {seconds} s");
        story.hear_in(3590);
        for (of, carrier) in [("3", carrier), ("4", "a")] {
            for node in ["a", "b"] {
                story.want(node, of);
            }
            let heard = story.hear();
            assert!(heard.contains(&format!("{carrier} {of}: carry")), "{heard:?} after {seconds} s");
            for node in ["a", "b"] {
                story.have(node, of);
            }
            story.hear_in(10);
        }
    }
}

#[test]
fn an_old_lease_changes_hands_for_waiting_nodes() {
    let mut story = Story::of_streaming(&["a", "b", "c"]);
    // Else the slow lease would be b's after a minute.
    story.bar("b");
    story.hear_in(30);
    story.want("a", "1");
    story.want("b", "1");
    assert_eq!(story.hear(), ["a 1: carry", "b 1: a"]);
    // It has more than they have, so it can't read from them.
    story.say("c", &[("1", 10 * MIB, BlobState::Wanted, MIB)]);
    let mut heard = Vec::new();
    for ten in 1..36 {
        story.carry("a", "1", ten * 1000);
        story.fetch("b", "1", ten * 1000);
        heard.extend(story.hear_in(10));
        if ten < 29 {
            assert!(heard.iter().all(|line| line == "c 1: wait"), "{heard:?}");
        }
    }
    assert!(heard.contains(&"c 1: carry".to_owned()), "{heard:?}");
    assert_eq!(story.events(), [], "without blame");
    // Node a had its turn, and the others must not carry.
    story.gather(&["d"]);
    story.bar("d");
    story.say("d", &[("1", 10 * MIB, BlobState::Wanted, 2 * MIB)]);
    story.hear();
    for ten in 1..50 {
        story.carry("c", "1", MIB + ten * 1000);
        story.fetch("a", "1", MIB + ten * 1000);
        let heard = story.hear_in(10);
        assert!(!heard.iter().any(|line| line.ends_with("carry")), "{heard:?}");
    }
}

#[test]
fn the_fullest_of_many_nodes_carries() {
    for fuller_first in [false, true] {
        let names: Vec<String> = (0..200).map(|node| format!("n{node}")).collect();
        let mut story = Story::of(&names.iter().map(String::as_str).collect::<Vec<_>>());
        for node in &names {
            story.want(node, "1");
        }
        let mut full = [("n150", 5), ("n160", 9)];
        if fuller_first {
            full.reverse();
        }
        for (node, done) in full {
            story.say(node, &[("1", 10 * MIB, BlobState::Wanted, done * MIB)]);
        }
        let heard = story.hear();
        assert!(heard.contains(&"n160 1: carry".to_owned()), "{heard:?}");
    }
}

#[test]
fn an_unconfirmed_lease_lasts_by_the_uplink() {
    let mut story = pair();
    story.hear_in(10);
    story.have("b", "1");
    story.have("a", "1");
    assert_eq!(story.fastest(), MIB);
    // An agent that reads no streams can't confirm the next one.
    story.streams = false;
    let mut blob = ("2", 200 * MIB, BlobState::Wanted, 0);
    story.say("a", &[blob]);
    assert_eq!(story.hear_in(2), ["a 2: carry"]);
    story.say("b", &[blob]);
    blob.2 = BlobState::Carrying;
    let start = story.now;
    loop {
        blob.3 += 1;
        story.say("a", &[blob]);
        let took = story.now.duration_since(start).as_secs();
        if story.hear_in(30).contains(&"b 2: carry".to_owned()) {
            // A quarter of the uplink, divided by six leases.
            return assert!((4770..4830).contains(&took), "{took} s");
        }
        assert!(took < 7200, "its own reports prolong it");
    }
}

#[test]
fn lone_leases_give_way_to_several_nodes() {
    let mut story = Story::of_full_lanes();
    story.want("c", "3");
    assert!(
        story.hear_in(120).iter().all(|line| line == "c 3: wait"),
        "one node is no more than another one"
    );
    story.want("d", "3");
    story.want("d", "10");
    let heard = story.hear_in(5);
    assert!(heard.iter().any(|line| line.ends_with(" 3: carry")), "{heard:?}");
    let waiting = heard.iter().filter(|line| line.ends_with(": wait") && !line.starts_with(['c', 'd']));
    assert_eq!(waiting.collect::<Vec<_>>(), ["a 11: wait"], "one lane is wanted, and two nodes want 10");
    assert_eq!(story.events(), [], "without blame");
}

#[test]
fn a_lease_with_progress_needs_few_looks() {
    let mut story = pair();
    let mut looks = 0;
    for done in 1..8 {
        story.carry("a", "1", done * MIB);
        story.fetch("b", "1", done * MIB);
        looks += story.count_looks(30);
    }
    assert!(looks < 20, "{looks}");
}

#[test]
fn a_whole_copy_is_read_at_some_speed() {
    for (size, least) in [(10, 64), (64, 128)] {
        for (less, is_left) in [(0, false), (1, true)] {
            let mut story = Story::of(&["a", "b"]);
            let blob = |state, done| [("1", size * MIB, state, done)];
            story.has_succeeded = true;
            story.say("a", &blob(BlobState::Here, 0));
            story.say("b", &blob(BlobState::Wanted, 0));
            assert_eq!(story.hear(), ["b 1: a"]);
            let mut heard = Vec::new();
            for times in 1..5 {
                story.say("b", &blob(BlobState::Fetching, times * (least * 1024 - less)));
                heard.extend(story.hear_in(50));
            }
            heard.dedup();
            let expected = if is_left { &["b 1: alone: it reaches no"][..] } else { &[] };
            assert_eq!(heard, expected, "{size} MiB, {less} too few a minute");
        }
    }
}

#[test]
fn all_leases_of_a_site_share_its_uplink() {
    let mut story = Story::of_streaming(&["a", "b"]);
    for (node, of) in [("a", "1"), ("a", "2"), ("b", "1"), ("b", "2")] {
        story.want(node, of);
    }
    assert_eq!(story.hear(), ["a 1: carry", "a 2: b", "b 1: a", "b 2: carry"]);
    story.hear_in(10);
    story.have("b", "1");
    assert_eq!(story.fastest(), 2 * MIB);
}

/// The reader gets this much over a minute.
fn be_slow(story: &mut Story, reader: &str, done: u64) {
    story.hear_in(30);
    story.fetch(reader, "1", done - 1);
    story.hear_in(31);
    story.fetch(reader, "1", done);
}

#[test]
fn a_slow_node_is_blamed_by_a_faster_one() {
    for (bytes, is_blamed) in [(3968, false), (4030, true)] {
        let mut story = pair();
        be_slow(&mut story, "b", 1000);
        let heard = story.hear();
        assert!(heard.contains(&"b 1: carry".to_owned()), "{heard:?}");
        be_slow(&mut story, "a", 1000 + bytes);
        let a = story.id("a");
        assert_eq!(story.sites.nodes[a].trust.lost_at.is_some(), is_blamed, "{bytes} bytes in the same time");
    }
}

/// It had the blob before, and says nothing about the link.
#[test]
fn a_copy_from_elsewhere_blames_no_slow_node() {
    for (is_slow, holder, is_blamed) in [(true, "c", false), (false, "c", true)] {
        let mut story = pair();
        story.gather(&["c"]);
        if is_slow {
            be_slow(&mut story, "b", 1000);
        }
        let heard = story.hear_in(if is_slow { 1 } else { 62 });
        assert!(heard.contains(&"b 1: carry".to_owned()), "{heard:?}");
        story.have_proven(holder, "1");
        let a = story.id("a");
        assert_eq!(story.sites.nodes[a].trust.lost_at.is_some(), is_blamed, "{is_slow}, by {holder}");
    }
}

#[test]
fn the_fastest_uplink_counts_for_an_hour() {
    for (carrier, seconds, expected) in [("a", 600, MIB / 10), ("c", 3499, MIB), ("c", 3500, MIB / 10)] {
        let mut story = Story::of_streaming(&["a", "b", "c"]);
        story.want("a", "1");
        story.want("b", "1");
        story.hear();
        story.hear_in(10);
        story.have("b", "1");
        assert_eq!(story.fastest(), MIB);
        story.have("a", "1");
        story.hear_in(seconds);
        story.want(carrier, "2");
        assert_eq!(story.hear(), [format!("{carrier} 2: carry")]);
        story.want("b", "2");
        story.hear_in(50);
        story.fetch("b", "2", 1);
        story.hear_in(50);
        story.have("b", "2");
        assert_eq!(story.fastest(), expected, "by {carrier} after {seconds} s");
    }
}

#[test]
fn a_lease_below_a_quarter_of_the_uplink_ends() {
    for (part, is_slow) in [(4, false), (5, true)] {
        let mut story = Story::of_streaming(&["a", "b", "c"]);
        story.want("a", "1");
        story.want("b", "1");
        story.hear();
        story.hear_in(10);
        story.have("b", "1");
        story.have("a", "1");
        assert_eq!(story.fastest(), MIB);
        let mut say = |node, state, done| {
            story.say(node, &[("2", 100 * MIB, state, done)]);
            story.hear()
        };
        assert_eq!(say("b", BlobState::Wanted, 0), ["b 2: carry"]);
        assert_eq!(say("c", BlobState::Wanted, 0), ["c 2: b"]);
        story.hear_in(30);
        story.say("c", &[("2", 100 * MIB, BlobState::Fetching, 1)]);
        story.hear_in(30);
        story.say("c", &[("2", 100 * MIB, BlobState::Fetching, 61 * MIB / part)]);
        assert_eq!(story.hear().contains(&"c 2: carry".to_owned()), is_slow, "a part of {part}");
    }
}

#[test]
fn a_silent_loser_is_avoided_and_a_slow_one_not() {
    for is_slow in [false, true] {
        let mut story = pair();
        if is_slow {
            be_slow(&mut story, "b", 1000);
        }
        let heard = story.hear_in(62);
        assert!(heard.contains(&"b 1: carry".to_owned()), "{heard:?}");
        story.have_proven("a", "1");
        assert_eq!(!story.hear().is_empty(), is_slow, "b stops, and reads the whole copy");
    }
}

#[test]
fn a_held_up_reader_leaves_the_lease_to_end() {
    let mut story = pair();
    story.carry("a", "1", MIB);
    story.fetch("b", "1", MIB);
    assert_eq!(story.hear_in(10), [""; 0]);
    // It has little time after a restart.
    story.connect("b");
    story.say("b", &[("1", 10 * MIB, BlobState::Wanted, MIB)]);
    assert_eq!(story.hear_in(30), ["b 1: a"]);
    assert!(story.count_looks(15) < 5);
    let heard = story.hear_in(15);
    assert!(heard.contains(&"b 1: carry".to_owned()), "{heard:?}");
}

#[test]
fn a_lease_ends_a_minute_after_its_first_reader() {
    let old_reader = |story: &mut Story| {
        story.say("b", &[("1", 10 * MIB, BlobState::Dropped, 0)]);
        story.streams = false;
        story.want("b", "1");
    };
    let old_carrier = |story: &mut Story| {
        story.streams = false;
        story.connect("a");
    };
    let changes: [(fn(&mut Story), _, _); 3] = [
        (|_| {}, 59, "it streams"),
        (old_reader, 19, "b reads no streams"),
        (old_carrier, 15, "a has no streams"),
    ];
    for (change, seconds, why) in changes {
        let mut story = Story::of_streaming(&["a", "b"]);
        story.streams = false;
        story.want("a", "1");
        assert_eq!(story.hear_in(41), ["a 1: carry"]);
        story.streams = true;
        story.want("b", "1");
        assert_eq!(story.hear(), ["b 1: a"]);
        change(&mut story);
        assert!(!story.hear_in(seconds - 1).contains(&"b 1: carry".to_owned()), "{why}");
        assert!(story.hear().contains(&"b 1: carry".to_owned()), "{why}");
    }
}

#[test]
fn a_held_up_reader_leaves_where_others_go_on() {
    let mut story = Story::of_streaming(&["a", "b", "c"]);
    for node in ["a", "b", "c"] {
        story.want(node, "1");
    }
    story.hear();
    for node in ["b", "c"] {
        story.fetch(node, "1", MIB);
    }
    story.connect("b");
    story.fetch("b", "1", MIB);
    for done in 1..4 {
        assert_eq!(story.hear_in(20), [""; 0], "{done} MiB");
        story.fetch("c", "1", done * MIB);
    }
    assert_eq!(story.hear_in(20), ["b 1: c"]);
}

#[test]
fn only_the_most_bytes_confirm_a_lease() {
    let mut story = Story::of_streaming(&["a", "b", "c"]);
    for node in ["a", "b", "c"] {
        story.want(node, "1");
    }
    story.hear();
    story.fetch("b", "1", 5 * MIB);
    let mut heard = Vec::new();
    for done in 3..6 {
        heard.extend(story.hear_in(15));
        story.fetch("c", "1", done * MIB);
    }
    assert_eq!(heard, [""; 0]);
    heard.extend(story.hear_in(20));
    assert!(heard.iter().any(|line| line.ends_with("carry")), "{heard:?}");
}

#[test]
fn bytes_from_before_a_restart_confirm_nothing() {
    let mut story = pair();
    story.fetch("b", "1", 5 * MIB);
    story.carry("a", "1", MIB);
    story.carry("a", "1", 0);
    assert_eq!(story.hear(), ["a 1: carry"], "it may restart");
    for _ in 0..3 {
        assert_eq!(story.hear_in(19), [""; 0]);
        story.fetch("b", "1", 5 * MIB);
    }
    assert!(story.hear_in(4).contains(&"b 1: carry".to_owned()));
}

#[test]
fn what_a_successor_had_blames_no_loser() {
    let mut story = Story::of_streaming(&["a", "b"]);
    story.want("a", "1");
    story.hear();
    story.carry("a", "1", 10 * MIB);
    story.say("b", &[("1", 10 * MIB, BlobState::Wanted, 10 * MIB)]);
    let heard = story.hear_in(70);
    assert!(heard.ends_with(&["a 1: b".to_owned(), "b 1: carry".to_owned()]), "{heard:?}");
    story.have("a", "1");
    assert_eq!(story.sites.nodes[story.id("a")].trust.lost_at, None);
}

#[test]
fn a_lone_silent_carrier_is_replaced_once_another_waits() {
    let mut story = Story::of(&["a", "b"]);
    story.want("a", "1");
    assert_eq!(story.hear(), ["a 1: carry"]);
    assert!(story.count_looks(100) < 10);
    story.want("b", "1");
    assert!(story.hear_in(60).contains(&"b 1: carry".to_owned()));
}

#[test]
fn a_node_with_a_source_takes_no_lease_over() {
    let mut story = pair();
    story.say("b", &[("1", 10 * MIB, BlobState::Wanted, 5 * MIB)]);
    assert_eq!(story.hear(), ["b 1: a"]);
}

#[test]
fn bytes_from_before_confirm_no_new_lease() {
    let mut story = Story::of_streaming(&["a", "b", "c", "d"]);
    story.want("a", "1");
    story.want("b", "1");
    story.hear();
    story.carry("a", "1", 5 * MIB);
    story.fetch("b", "1", 5 * MIB);
    story.want("c", "1");
    story.want("d", "1");
    story.hear();
    for node in ["a", "b"] {
        story.say(node, &[("1", 10 * MIB, BlobState::Dropped, 0)]);
    }
    assert_eq!(story.hear_in(2), ["c 1: carry", "d 1: c"]);
    for done in 1..5 {
        story.carry("c", "1", done * MIB);
        story.fetch("d", "1", done * MIB);
        assert_eq!(story.hear_in(40), [""; 0], "{done} MiB");
    }
}
