use super::*;

#[test]
fn a_neighbour_that_is_busy_is_waited_for_and_not_for_ever() {
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
fn whoever_was_turned_away_goes_to_another_one() {
    let mut story = Story::of(&["a", "b", "c"]);
    story.have_proven("a", "1");
    story.have_proven("c", "1");
    story.want("b", "1");
    assert_eq!(story.hear(), ["b 1: a,c"]);
    story.blame("b", "1", "a", PeerFault::Busy);
    story.want("b", "1");
    assert_eq!(story.hear(), ["b 1: c"]);
}
