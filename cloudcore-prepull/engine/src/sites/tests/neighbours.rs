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
    assert_eq!(story.hear_in(29).last().unwrap(), "b 1: carry", "not for ever");
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
    story.have_proven("a", "2");
    story.hear_in(292);
    story.want("b", "2");
    assert!(story.hear().contains(&"b 2: a".to_owned()));
    story.blame("b", "2", "a", PeerFault::Unreachable);
    assert!(!story.hear_in(4).iter().any(|word| word.contains("alone")), "it may be restarting again");
}

/// Node e reaches none of three neighbours that no other node has reached either.
fn isolated() -> Story {
    let mut story = Story::of(&["a", "b", "c", "d", "e"]);
    isolate(&mut story, 0);
    story
}

/// The same, with a pause in seconds before the third neighbour.
fn isolate(story: &mut Story, pause: u64) {
    for (of, holder, pause) in [("1", "a", 0), ("2", "b", 0), ("3", "c", pause)] {
        story.hear_in(pause);
        story.have_proven(holder, of);
        story.want("e", of);
        assert_eq!(story.hear(), [format!("e {of}: {holder}")]);
        story.blame("e", of, holder, PeerFault::Unreachable);
        story.hear();
        story.have_proven("e", of);
    }
}

#[test]
fn complaints_of_five_minutes_ago_make_no_loner() {
    for (pause, expected) in [(295, "e 4: alone: it reaches no"), (296, "e 4: wait")] {
        let mut story = Story::of(&["a", "b", "c", "d", "e"]);
        isolate(&mut story, pause);
        story.want("d", "4");
        assert_eq!(story.hear(), ["d 4: carry"]);
        story.want("e", "4");
        assert_eq!(story.hear(), [expected], "after {pause} s");
    }
}

#[test]
fn a_loner_goes_on_with_its_lease() {
    for (seconds, expected) in [(598, &[][..]), (599, &["e 4: d"])] {
        let mut story = Story::of(&["a", "b", "c", "d", "e"]);
        story.want("e", "4");
        assert_eq!(story.hear(), ["e 4: carry"]);
        isolate(&mut story, 0);
        story.hear_in(seconds);
        story.have_proven("d", "4");
        assert_eq!(story.hear(), expected, "after {seconds} s");
    }
}

#[test]
fn isolated_nodes_stop_waiting_for_others() {
    let mut story = isolated();
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
    story.blame("b", "1", "a", PeerFault::Stalled);
    story.place("b", "ship");
    story.place("b", "factory");
    story.want("b", "1");
    assert_eq!(story.hear(), ["b 1: a"], "its complaints end with a move");
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
fn reminders_outlive_a_site_without_blobs_and_a_move() {
    for moves in [false, true] {
        let mut story = Story::of(&["a", "b", "c"]);
        if moves {
            // The site that they leave stays.
            story.have("c", "2");
        }
        let wait = |story: &mut Story| {
            story.want("a", "1");
            story.hear_in(2);
            story.want("b", "1");
            assert_eq!(story.hear(), ["b 1: wait"]);
        };
        wait(&mut story);
        for node in ["a", "b"] {
            if moves {
                story.place(node, "ship");
            } else {
                story.say(node, &[("1", 10 * MIB, BlobState::Dropped, 0)]);
            }
        }
        wait(&mut story);
        assert_eq!(story.hear_in(25), ["b 1: wait"], "it moves: {moves}");
    }
}

#[test]
fn waiting_nodes_get_reminders() {
    let mut story = Story::of(&["a", "b"]);
    for (node, of) in [("a", "1"), ("a", "2"), ("b", "1"), ("b", "2")] {
        story.want(node, of);
        story.hear();
    }
    for of in ["1", "2"] {
        story.carry("a", of, MIB);
    }
    assert_eq!(story.hear_in(45), ["b 1: wait", "b 1: wait"], "about one of its blobs");
    for of in ["1", "2"] {
        story.say("b", &[(of, 10 * MIB, BlobState::Dropped, 0)]);
        story.have("a", of);
    }
    assert_eq!(story.hear_in(3600), [""; 0]);
    assert_eq!(story.count_looks(3600), 0);
    assert!(!story.sites.by_name.is_empty(), "who has it is remembered");
    story.hear_in(6 * 3600);
    assert!(story.sites.by_name.is_empty() && story.sites.next_wakeup().is_none());
}

/// Node b has asked a eleven times, which was busy, and has got as many bytes each time.
fn after_a_busy_minute(done: u64) -> Story {
    let mut story = Story::of(&["a", "b"]);
    story.have_proven("a", "1");
    story.want("b", "1");
    assert_eq!(story.hear(), ["b 1: a"]);
    for _ in 0..11 {
        story.blame("b", "1", "a", PeerFault::Busy);
        assert!(story.hear_in(4).iter().all(|line| line == "b 1: wait"));
        assert_eq!(story.hear_in(2), ["b 1: a"]);
        story.fetch("b", "1", done);
    }
    story
}

#[test]
fn a_busy_neighbour_is_awaited_for_a_minute() {
    for (done, direction) in [(0, "alone: it reaches no"), (1, "wait")] {
        let mut story = after_a_busy_minute(done);
        story.blame("b", "1", "a", PeerFault::Busy);
        assert_eq!(story.hear(), [format!("b 1: {direction}")], "with {done} bytes");
    }
}

#[test]
fn a_busy_neighbour_is_awaited_again_after_five_minutes() {
    for (pause, expected) in [(290, "b 1: alone: it reaches no"), (300, "b 1: wait")] {
        let mut story = after_a_busy_minute(0);
        story.say("b", &[("1", 10 * MIB, BlobState::Dropped, 0)]);
        story.hear_in(pause);
        story.want("b", "1");
        assert_eq!(story.hear(), ["b 1: a"]);
        story.blame("b", "1", "a", PeerFault::Busy);
        assert_eq!(story.hear(), [expected], "{pause} s after the others");
    }
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
fn the_only_holder_may_want_again() {
    let mut story = Story::of(&["a"]);
    story.have_proven("a", "1");
    story.want("a", "1");
    assert_eq!(story.hear(), ["a 1: carry"]);
    story.sites.disconnect(&"a".into(), story.now);
    story.hear_in(40);
    assert!(story.sites.by_name.is_empty(), "its session ends its lease");
}

#[test]
fn dropped_blobs_have_no_holder() {
    let mut story = Story::of(&["a", "b"]);
    story.have_proven("a", "1");
    story.say("a", &[("1", 10 * MIB, BlobState::Dropped, 0)]);
    story.want("b", "1");
    assert_eq!(story.hear(), ["b 1: carry"]);
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
    assert_eq!((complain(1), complain(29)), (true, false), "its door may not be open yet");
}

#[test]
fn a_delivery_ends_complaints_about_the_connection() {
    for (fault, expected) in [
        (PeerFault::Unreachable, "b 2: a"),
        (PeerFault::Busy, "b 2: a"),
        (PeerFault::Gone, "b 2: alone: it reaches no"),
    ] {
        let mut story = Story::of(&["a", "b", "c"]);
        story.have_proven("a", "1");
        story.want("b", "1");
        assert_eq!(story.hear(), ["b 1: a"]);
        story.blame("b", "1", "a", fault);
        story.have_proven("c", "1");
        assert_eq!(story.hear(), ["b 1: c"]);
        story.have("b", "1");
        story.have_proven("a", "2");
        story.want("b", "2");
        assert_eq!(story.hear(), [expected], "{fault:?}");
    }
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
        assert_eq!(story.hear(), [""; 0], "its reader stays");
        story.have("b", &of);
        story.hear();
    }
}

#[test]
fn a_loner_tries_again_after_ten_minutes() {
    let mut story = isolated();
    story.hear_in(590);
    story.want("d", "4");
    story.want("e", "4");
    assert_eq!(story.hear_in(2), ["d 4: carry", "e 4: alone: it reaches no"]);
    story.hear_in(6);
    story.want("e", "6");
    assert_eq!(story.hear(), ["e 6: carry"], "its time has just ended");
    story.hear_in(3);
    story.want("d", "5");
    story.want("e", "5");
    assert_eq!(story.hear_in(2), ["d 5: carry", "e 5: wait"]);
}

#[test]
fn a_loner_carries_only_if_no_other_node_can() {
    for (seconds, is_loner) in [(597, true), (598, false)] {
        let mut story = isolated();
        story.hear_in(seconds);
        // More than a look tries to find a neighbour for.
        for node in 0..40 {
            let node = format!("n{node}");
            story.gather(&[&node]);
            story.want(&node, "4");
        }
        story.say("e", &[("4", 10 * MIB, BlobState::Wanted, MIB)]);
        let heard = story.hear();
        assert_eq!(heard.contains(&"e 4: carry".to_owned()), !is_loner, "{heard:?} after {seconds} s");
    }
}

#[test]
fn a_loner_that_restarts_tries_again() {
    let mut story = isolated();
    story.have_proven("a", "5");
    story.want("d", "5");
    assert_eq!(story.hear(), ["d 5: a"]);
    story.blame("d", "5", "a", PeerFault::Unreachable);
    story.connect("e");
    story.want("e", "5");
    assert_eq!(story.hear(), ["d 5: wait", "e 5: a"], "the complaint of d stays");
    story.want("d", "4");
    story.want("e", "4");
    assert_eq!(story.hear_in(2), ["d 4: carry", "e 4: wait"]);
}

#[test]
fn eight_neighbours_that_others_reach_make_a_loner() {
    for holders in [7, 8] {
        let mut story = Story::of(&["reader", "e", "d"]);
        for holder in 0..holders {
            let (holder, of, other) = (format!("h{holder}"), format!("1{holder}"), format!("2{holder}"));
            story.gather(&[&holder]);
            story.have_proven(&holder, &other);
            story.want("reader", &other);
            assert_eq!(story.hear(), [format!("reader {other}: {holder}")]);
            story.have("reader", &other);
            story.have_proven(&holder, &of);
            story.want("e", &of);
            assert_eq!(story.hear(), [format!("e {of}: {holder}")]);
            story.blame("e", &of, &holder, PeerFault::Unreachable);
            story.have_proven("e", &of);
            story.hear();
        }
        story.want("d", "50");
        story.hear();
        story.want("e", "50");
        let expected = if holders == 8 { "alone: it reaches no" } else { "wait" };
        assert_eq!(story.hear(), [format!("e 50: {expected}")], "{holders} holders");
    }
}

#[test]
fn a_pair_is_avoided_by_the_fault() {
    for (fault, seconds) in [
        (Some(PeerFault::Refused), 60),
        (Some(PeerFault::Stalled), 60),
        (Some(PeerFault::Gone), 300),
        (Some(PeerFault::Unreachable), 300),
        (Some(PeerFault::Damaged), 3600),
        // Too slow.
        (None, 300),
    ] {
        let mut story = Story::of(&["a", "b"]);
        for of in ["1", "2", "3"] {
            story.have_proven("a", of);
        }
        story.want("b", "1");
        assert_eq!(story.hear(), ["b 1: a"]);
        match fault {
            Some(fault) => story.blame("b", "1", "a", fault),
            None => _ = story.hear_in(60),
        }
        story.hear_in(seconds - 3);
        story.want("b", "2");
        assert_eq!(story.hear(), ["b 2: alone: it reaches no"], "{fault:?}");
        story.hear_in(5);
        story.want("b", "3");
        assert_eq!(story.hear(), ["b 3: a"], "{fault:?}");
    }
}

#[test]
fn an_arriving_blob_has_three_readers_a_node() {
    let mut story = Story::of_streaming(&["a", "b", "c", "d", "e"]);
    for node in ["a", "b", "c", "d", "e"] {
        story.want(node, "1");
    }
    let heard = story.hear();
    let first = |source: &str| heard.iter().filter(|line| line.contains(&format!(": {source}"))).count();
    assert_eq!(heard.len(), 5, "{heard:?}");
    assert_eq!(first("a"), 3, "{heard:?}");
}

#[test]
fn an_unproven_holder_has_half_a_minute() {
    for (is_proven, seconds) in [(false, 30), (true, 60)] {
        let mut story = Story::of(&["a", "b"]);
        story.has_succeeded = is_proven;
        story.have("a", "1");
        story.want("b", "1");
        assert_eq!(story.hear_in(seconds), ["b 1: a"]);
        assert!(!story.hear().is_empty(), "it's left after {seconds} s");
    }
}

#[test]
fn a_site_remembers_4096_pairs() {
    let mut pairs = trust::Pairs::default();
    for source in 0..4098 {
        pairs.avoid((NodeId::MAX, source), source.into());
    }
    let reach = |source| pairs.check_reach(NodeId::MAX, source, 4096);
    assert_eq!([reach(0), reach(1)], [trust::SourceReach::Open; 2], "those that would have ended first");
    assert_eq!([reach(2), reach(4097)], [trust::SourceReach::Avoided; 2]);
}

#[test]
fn each_new_seeker_is_answered_once() {
    let mut story = Story::of(&["a"]);
    story.want("a", "1");
    story.hear();
    let names: Vec<String> = (0..40).map(|node| format!("n{node}")).collect();
    story.gather(&names.iter().map(String::as_str).collect::<Vec<_>>());
    for count in [40, 0] {
        for node in &names {
            story.want(node, "1");
        }
        assert_eq!(story.hear().len(), count);
    }
}

#[test]
fn a_success_proves_the_blobs_of_its_images() {
    for (images, readers) in [("r.io/a:1", 3), ("r.io/b:1", 2)] {
        let mut story = Story::of(&["a", "b", "c", "d"]);
        story.have("a", "1");
        story.sites.note_success(&"a".into(), &images.into(), story.now);
        for node in ["b", "c", "d"] {
            story.want(node, "1");
        }
        let heard = story.hear();
        assert_eq!(heard.iter().filter(|line| line.ends_with(": a")).count(), readers, "{heard:?}");
    }
}
