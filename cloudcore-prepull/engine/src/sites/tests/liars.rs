//! Lies, nonsense and bounds.

use super::*;

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
    assert!(story.hear().contains(&"a 1: carry".to_owned()), "it names few blobs");
    story.want("a", "2");
    story.want("b", "2");
    assert!(story.hear().contains(&"b 2: carry".to_owned()));
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
fn a_full_memory_forgets_the_oldest_idle_blob() {
    let mut story = Story::of(&["a", "b"]);
    story.place("b", "ship");
    story.have("b", "1");
    story.hear_in(1);
    story.have("a", "2");
    story.hear_in(1);
    story.sites.settings.memory = story.sites.bytes;
    story.want("a", "3");
    assert_eq!(story.hear_in(2), ["a 3: carry"]);
    let names: Vec<_> = story.sites.by_name.keys().map(|name| &**name).collect();
    assert_eq!(names, ["factory"], "it is of another site");
    assert_eq!(story.sites.by_name["factory"].books.len(), 2, "no more than needed");
    story.sites.settings.memory = 0;
    story.want("b", "4");
    assert_eq!(story.hear_in(2), ["b 4: alone: its site has"]);
    assert_eq!(story.sites.by_name["factory"].books.len(), 1, "the rest is in use");
}

#[test]
fn nonsense_in_reports_harms_nothing() {
    let mut story = Story::of(&["a", "b"]);
    story.want("a", "1");
    story.hear();
    story.say("b", &[("1", 99 * MIB, BlobState::Wanted, 0)]);
    assert_eq!(story.hear(), ["b 1: carry"], "another size is another blob");
    story.say("b", &[("1", 10 * MIB, BlobState::Carrying, u64::MAX)]);
    story.hear();
    let news = BlobNews { digest: "../../x".to_owned(), size: 1, state: BlobState::Here, done: 0 };
    let news = Blobs { task: task(), blobs: vec![news], failures: Vec::new(), reads_streams: false };
    story.sites.note_blobs(&"b".into(), &story.shared(), news, story.now);
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
fn sessions_alone_keep_no_lease() {
    let mut story = Story::of(&["a", "b"]);
    story.want("a", "1");
    story.want("b", "1");
    assert_eq!(story.hear(), ["a 1: carry", "b 1: wait"]);
    let mut heard = Vec::new();
    for _ in 0..4 {
        heard.extend(story.hear_in(14));
        story.connect("a");
    }
    assert!(heard.contains(&"b 1: carry".to_owned()), "{heard:?}");
}

/// Node d has all four places of the holder, and reads nothing.
#[test]
fn sessions_alone_keep_no_place() {
    let mut story = Story::of(&["a", "b", "d"]);
    for of in ["1", "2", "3", "4"] {
        story.have_proven("a", of);
        story.want("d", of);
    }
    assert_eq!(story.hear(), ["d 1: a", "d 2: a", "d 3: a", "d 4: a"]);
    story.want("b", "1");
    assert_eq!(story.hear(), ["b 1: wait"]);
    let mut heard = Vec::new();
    for _ in 0..4 {
        heard.extend(story.hear_in(14));
        story.connect("d");
    }
    assert!(heard.contains(&"b 1: a".to_owned()), "{heard:?}");
}

#[test]
fn a_node_without_leases_gives_way() {
    let mut story = Story::of_streaming(&["a", "b"]);
    story.bar("b");
    story.want("b", "1");
    assert_eq!(story.hear_in(2), ["b 1: carry"], "no other node wants it");
    story.want("a", "1");
    let heard = story.hear_in(2);
    assert!(heard.contains(&"a 1: carry".to_owned()), "{heard:?}");
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
fn two_complaints_delist_a_liar() {
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
    // No node can slander a node that it was not sent to.
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
fn wrong_bytes_that_were_passed_on_move_the_lease() {
    let mut story = Story::of_streaming(&["liar", "b", "c"]);
    for node in ["liar", "b", "c"] {
        story.want(node, "1");
    }
    story.hear_in(2);
    story.blame("b", "1", "liar", PeerFault::Damaged);
    story.blame("c", "1", "b", PeerFault::Damaged);
    let heard = story.hear_in(2);
    assert!(heard.iter().any(|line| !line.starts_with("liar") && line.ends_with("carry")), "{heard:?}");
}

#[test]
fn after_wrong_bytes_only_whole_copies_are_read() {
    let mut story = Story::of_streaming(&["liar", "b", "c", "d"]);
    for node in ["liar", "b", "c"] {
        story.want(node, "1");
    }
    story.hear_in(2);
    story.blame("b", "1", "liar", PeerFault::Damaged);
    story.blame("c", "1", "b", PeerFault::Damaged);
    story.want("d", "1");
    let heard = story.hear_in(5);
    assert!(heard.iter().all(|line| line.ends_with("wait") || line.ends_with("carry")), "{heard:?}");
}

#[test]
fn two_complaints_bar_an_unproven_holder() {
    let mut story = Story::of(&["liar", "b", "c", "d"]);
    story.hear_in(30);
    story.have("liar", "1");
    for node in ["b", "c"] {
        story.want(node, "1");
        assert!(story.hear().contains(&format!("{node} 1: liar")));
        story.blame(node, "1", "liar", PeerFault::Gone);
    }
    assert_eq!(story.sites.reports(story.now)[0].counters.holders_delisted, 1);
    story.have("liar", "2");
    story.want("d", "2");
    assert!(story.hear().contains(&"d 2: carry".to_owned()));
    story.want("liar", "3");
    story.hear();
    story.want("d", "3");
    assert_eq!(story.hear(), ["d 3: wait"], "the uplink carries a blob once");
    story.hear_in(3600);
    story.have("liar", "4");
    story.want("d", "4");
    assert!(story.hear().contains(&"d 4: liar".to_owned()), "after an hour");
}

#[test]
fn wrong_bytes_of_two_blobs_bar_a_holder() {
    for (fault, seconds, is_barred) in [
        (PeerFault::Damaged, 0, true),
        (PeerFault::Damaged, 3598, true),
        (PeerFault::Damaged, 3599, false),
        (PeerFault::Refused, 0, false),
    ] {
        let mut story = Story::of(&["a", "b", "c"]);
        story.hear_in(40);
        story.have_proven("a", "1");
        story.have_proven("a", "2");
        for (reader, of, seconds) in [("b", "1", seconds), ("c", "2", 0)] {
            story.want(reader, of);
            assert!(story.hear().contains(&format!("{reader} {of}: a")));
            story.blame(reader, of, "a", fault);
            story.hear_in(seconds);
        }
        let is_delisted = story.events().contains(&SiteEventKind::HolderDelisted);
        assert_eq!(is_delisted, is_barred, "{fault:?} after {seconds} s");
    }
}
