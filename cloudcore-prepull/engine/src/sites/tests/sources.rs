//! Sources of waiting nodes: their choice, and what complaints change.

use super::*;

#[test]
fn a_proven_holder_is_read_first() {
    let mut story = Story::of(&["a", "b", "c"]);
    story.have("a", "1");
    story.have_proven("b", "1");
    story.want("c", "1");
    assert_eq!(story.hear(), ["c 1: b,a"]);
}

#[test]
fn a_holder_without_a_door_is_not_awaited() {
    let mut story = Story::of(&["a?", "b"]);
    story.hear_in(30);
    story.have_proven("a?", "1");
    story.sites.disconnect(&"a?".into(), story.now);
    story.want("b", "1");
    assert_eq!(story.hear(), ["b 1: carry"]);
}

#[test]
fn a_free_place_serves_a_reader_of_another_blob() {
    let mut story = Story::of(&["a", "b", "c", "d", "e", "f"]);
    story.have_proven("a", "1");
    story.have_proven("a", "2");
    for node in ["b", "c", "d", "e"] {
        story.want(node, "1");
    }
    assert_eq!(story.hear().len(), 4);
    story.want("f", "2");
    assert_eq!(story.hear(), ["f 2: wait"]);
    story.have("b", "1");
    assert_eq!(story.hear(), ["f 2: a"], "without a pause");
}

/// Old agents that can't read streams are before the last node. The search goes on at once if it has placed a node.
#[test]
fn a_search_ends_after_sixteen_failures() {
    for (first, sent) in [(None, 0), (Some("first?"), 2)] {
        let mut story = Story::of_streaming(&["a"]);
        story.want("a", "1");
        assert_eq!(story.hear(), ["a 1: carry"]);
        let old: Vec<String> = (0..20).map(|node| format!("n{node}")).collect();
        for node in first.into_iter().chain(old.iter().map(String::as_str)).chain(["last"]) {
            story.streams = !node.starts_with('n');
            story.gather(&[node]);
            story.want(node, "1");
        }
        let told = story.sites.flush(story.sites.next_wakeup().unwrap());
        let directions = told.iter().flat_map(|told| &told.blobs).map(|blob| &blob.1);
        assert_eq!(directions.filter(|direction| **direction != Direction::Wait).count(), sent, "{first:?}");
        assert!(sent > 0 || story.hear().contains(&"last 1: a".to_owned()), "with the next look");
    }
}

#[test]
fn looks_at_a_site_are_a_tenth_of_a_second_apart() {
    let mut story = Story::of(&["a", "b"]);
    story.want("a", "1");
    assert_eq!(story.hear(), ["a 1: carry"]);
    story.want("b", "1");
    let wait = story.sites.next_wakeup().unwrap().duration_since(story.now);
    assert_eq!(wait.as_millis(), 100);
}

/// A neighbour that delivers all the time needs few looks.
#[test]
fn a_read_ends_up_to_a_second_later() {
    let mut story = Story::of(&["a", "b"]);
    story.have_proven("a", "1");
    story.want("b", "1");
    story.now += Duration::from_millis(100);
    assert_eq!(story.sites.flush(story.now).len(), 1);
    story.now += Duration::from_millis(200);
    story.fetch("b", "1", MIB);
    assert_eq!(story.hear_in(60), [""; 0]);
    assert_eq!(story.hear_in(1), ["b 1: alone: it reaches no"]);
}

#[test]
fn an_unreachable_copy_is_worth_a_wait_for_another() {
    let mut story = Story::of(&["a", "b", "c"]);
    story.have_proven("a", "1");
    story.have_proven("b", "1");
    story.want("c", "1");
    assert_eq!(story.hear(), ["c 1: a,b"]);
    story.blame("c", "1", "a", PeerFault::Unreachable);
    assert_eq!(story.hear(), ["c 1: b"]);
    story.sites.disconnect(&"b".into(), story.now);
    story.blame("c", "1", "b", PeerFault::Unreachable);
    assert!(story.hear_in(28).iter().all(|line| line == "c 1: wait"), "b may come back");
    assert_eq!(story.hear_in(3), ["c 1: alone: it reaches no"]);
}

#[test]
fn progress_ends_only_complaints_about_busy_sources() {
    for (fault, expected) in [(PeerFault::Busy, "a"), (PeerFault::Stalled, "alone: it reaches no")] {
        let mut story = Story::of(&["a", "b"]);
        for of in ["1", "2"] {
            story.have_proven("a", of);
            story.want("b", of);
        }
        assert_eq!(story.hear(), ["b 1: a", "b 2: a"]);
        story.blame("b", "1", "a", fault);
        story.fetch("b", "2", MIB);
        assert_eq!(story.hear(), [format!("b 1: {expected}")], "{fault:?}");
    }
}

#[test]
fn a_proven_holder_loses_one_blob_by_two_complaints() {
    let mut story = Story::of(&["a", "b", "c", "d"]);
    story.hear_in(30);
    story.have_proven("a", "1");
    story.have_proven("a", "2");
    for reader in ["b", "c"] {
        story.want(reader, "1");
        assert!(story.hear().contains(&format!("{reader} 1: a")));
        story.blame(reader, "1", "a", PeerFault::Gone);
    }
    assert_eq!(story.sites.reports(story.now)[0].counters.holders_delisted, 1);
    assert_eq!(story.events(), [SiteEventKind::HolderDelisted]);
    story.want("d", "2");
    assert!(story.hear().contains(&"d 2: a".to_owned()));
}

/// Two nodes find wrong bytes of a, which carries another blob at the time.
fn barred() -> Story {
    let mut story = Story::of(&["a", "b", "c", "d"]);
    story.have_proven("a", "1");
    story.have_proven("a", "2");
    story.want("a", "3");
    story.want("d", "3");
    assert!(story.hear().contains(&"a 3: carry".to_owned()));
    story.carry("a", "3", MIB);
    for (reader, of) in [("b", "1"), ("c", "2")] {
        story.want(reader, of);
        assert!(story.hear().contains(&format!("{reader} {of}: a")));
        story.blame(reader, of, "a", PeerFault::Damaged);
    }
    story
}

#[test]
fn a_node_with_wrong_bytes_carries_nothing_for_an_hour() {
    for (seconds, carrier) in [(3590, "d"), (3600, "a")] {
        let mut story = barred();
        assert!(story.hear_in(2).contains(&"d 3: carry".to_owned()), "it takes the lease over");
        story.hear_in(seconds);
        story.say("a", &[("4", 10 * MIB, BlobState::Wanted, MIB)]);
        story.want("d", "4");
        let heard = story.hear_in(2);
        assert!(heard.contains(&format!("{carrier} 4: carry")), "after {seconds} s: {heard:?}");
    }
}

/// Node a carries the blob, and sends it to three others. Two more read from those.
fn tree() -> Story {
    let mut story = Story::of_streaming(&["a", "b", "c", "d", "e", "f"]);
    for node in ["a", "b", "c", "d", "e", "f"] {
        story.want(node, "1");
    }
    story.hear();
    story
}

#[test]
fn wrong_bytes_of_an_arriving_blob_bar_its_carrier_alone() {
    for (readers, source, is_barred) in [(["b", "c"], "a", true), (["e", "f"], "b", false)] {
        let mut story = tree();
        for reader in readers {
            story.blame(reader, "1", source, PeerFault::Damaged);
        }
        let is_delisted = story.events().contains(&SiteEventKind::HolderDelisted);
        assert_eq!(is_delisted, is_barred, "node {source}");
    }
}

#[test]
fn one_node_with_wrong_bytes_ends_no_stream() {
    let mut story = tree();
    story.blame("b", "1", "a", PeerFault::Damaged);
    let heard = story.hear();
    assert!(!heard.iter().any(|line| line.starts_with(['c', 'd'])), "{heard:?}");
}

/// It has no reader then that could confirm its progress.
#[test]
fn an_unreachable_carrier_keeps_its_lease_by_reports() {
    for (fault, is_lost) in [(PeerFault::Unreachable, false), (PeerFault::Stalled, true)] {
        let mut story = Story::of_streaming(&["a", "b"]);
        story.want("a", "1");
        story.want("b", "1");
        assert_eq!(story.hear(), ["a 1: carry", "b 1: a"]);
        story.blame("b", "1", "a", fault);
        for ten in 1..9 {
            story.carry("a", "1", ten * 1000);
            story.hear_in(10);
        }
        assert_eq!(story.events().contains(&SiteEventKind::LeaseLost), is_lost, "{fault:?}");
    }
}
