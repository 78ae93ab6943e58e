//! Choice of neighbours, complaints and waits.

use super::*;

#[test]
fn readers_wait_for_a_holder_that_restarts() {
    let mut story = Story::of(&["a", "b"]);
    story.hear_in(30);
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
fn a_restarted_neighbour_is_asked_again() {
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
    // It has noticed, and no node is blamed.
    story.sites.disconnect(&"a".into(), story.now);
    story.blame("b", "1", "a", PeerFault::Unreachable);
    story.want("b", "1");
    assert!(!story.hear().iter().any(|line| line.contains("alone")));
    story.connect("a");
    assert!(story.hear_in(6).contains(&"b 1: a".to_owned()));
}

#[test]
fn a_lost_session_blames_no_source() {
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
fn an_unlisted_node_has_no_site() {
    let mut story = Story::of(&["a", "b"]);
    story.have("a", "1");
    let labels = [(SITE_LABEL.to_owned(), "factory".to_owned())].into();
    story.sites.set_nodes(&[NodeView { name: "b".into(), labels, ready: true }], story.now);
    story.want("b", "1");
    assert_eq!(story.hear(), ["b 1: carry"]);
}

#[test]
fn a_node_without_neighbours_downloads_for_itself() {
    let mut story = Story::of(&["a", "b", "c"]);
    story.want("a", "1");
    story.hear();
    story.want("b", "1");
    story.have_proven("a", "1");
    assert_eq!(story.hear(), ["b 1: a"]);
    story.blame("b", "1", "a", PeerFault::Unreachable);
    assert!(!story.hear_in(4).iter().any(|word| word.contains("alone")), "it may be restarting");
    assert!(story.hear_in(2).contains(&"b 1: alone: it reaches no".to_owned()));
    story.want("c", "1");
    assert_eq!(story.hear(), ["c 1: a"], "others do reach it");
}

#[test]
fn isolated_nodes_stop_waiting_for_others() {
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
fn a_node_serves_four_readers_at_most() {
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
fn waiting_nodes_get_reminders() {
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
fn a_busy_neighbour_is_awaited_for_a_minute() {
    let mut story = Story::of(&["a", "b"]);
    story.have_proven("a", "1");
    story.want("b", "1");
    assert_eq!(story.hear(), ["b 1: a"]);
    for _ in 0..11 {
        story.blame("b", "1", "a", PeerFault::Busy);
        assert!(story.hear_in(4).iter().all(|line| line == "b 1: wait"));
        assert_eq!(story.hear_in(2), ["b 1: a"]);
    }
    story.blame("b", "1", "a", PeerFault::Busy);
    assert_eq!(story.hear(), ["b 1: alone: it reaches no"]);
}

#[test]
fn a_refused_reader_goes_to_another_neighbour() {
    let mut story = Story::of(&["a", "b", "c"]);
    story.have_proven("a", "1");
    story.have_proven("c", "1");
    story.want("b", "1");
    assert_eq!(story.hear(), ["b 1: a,c"]);
    story.blame("b", "1", "a", PeerFault::Busy);
    story.want("b", "1");
    assert_eq!(story.hear(), ["b 1: c"]);
}

#[test]
fn a_node_that_lost_a_blob_may_carry_it() {
    let mut story = Story::of_streaming(&["a", "b", "c"]);
    story.have_proven("a", "1");
    for node in ["b", "c"] {
        story.want(node, "1");
        assert_eq!(story.hear(), [format!("{node} 1: a")]);
    }
    for node in ["b", "c"] {
        story.blame(node, "1", "a", PeerFault::Gone);
    }
    story.say("a", &[("1", 10 * MIB, BlobState::Wanted, MIB)]);
    let mut heard = story.hear_in(2);
    heard.sort();
    assert_eq!(heard, ["a 1: carry", "b 1: a", "c 1: a,b"]);
}

#[test]
fn a_holder_that_has_just_begun_is_not_barred() {
    let complain = |seconds| {
        let mut story = Story::of(&["a", "b", "c"]);
        story.have("a", "1");
        story.hear_in(seconds);
        for reader in ["b", "c"] {
            story.want(reader, "1");
            story.hear();
            story.blame(reader, "1", "a", PeerFault::Refused);
        }
        story.gather(&["d"]);
        story.want("d", "1");
        story.hear().contains(&"d 1: a".to_owned())
    };
    assert_eq!((complain(1), complain(31)), (true, false), "its door may not be open yet");
}

#[test]
fn a_delivery_ends_older_complaints() {
    let mut story = Story::of(&["a", "b", "c"]);
    story.have_proven("a", "1");
    story.want("b", "1");
    assert_eq!(story.hear(), ["b 1: a"]);
    story.blame("b", "1", "a", PeerFault::Unreachable);
    story.have_proven("c", "1");
    assert_eq!(story.hear(), ["b 1: c"]);
    story.have("b", "1");
    story.have_proven("a", "2");
    story.want("b", "2");
    assert_eq!(story.hear(), ["b 2: a"], "its network is in order");
}

#[test]
fn a_source_streams_again_after_its_readers() {
    let mut story = Story::of_streaming(&["a", "b"]);
    for of in 1..=8 {
        let of = of.to_string();
        story.want("a", &of);
        story.want("b", &of);
        assert_eq!(story.hear(), [format!("a {of}: carry"), format!("b {of}: a")]);
        story.have("a", &of);
        story.have("b", &of);
        story.hear();
    }
}
