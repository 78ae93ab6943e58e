//! The nodes of a job, and their rounds.

use std::sync::Arc;

use super::super::fleet::FleetNode;
use super::super::roster::NodeRoster;
use super::super::tag_requests::next_round;
use super::super::*;
use super::driver::uid;

fn node(presence: Presence) -> FleetNode {
    FleetNode { name: Arc::new("a".into()), labels: Arc::default(), presence }
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + second).unwrap()
}

#[test]
fn only_nodes_of_the_job_concern_it() {
    let (mut roster, node) = (NodeRoster::new(uid("job")), node(Presence::RecentlyOffline));
    assert!(roster.set_selected(&node, true) && roster.set_selected(&node, false));
    assert!(!roster.set_presence(&node.name, Presence::Online));
}

#[test]
fn a_job_waits_only_for_nodes_it_wants() {
    let (mut roster, node) = (NodeRoster::new(uid("job")), node(Presence::RecentlyOffline));
    roster.set_selected(&node, true);
    assert_eq!(roster.counts().wanted_offline, 1);
    roster.set_tag_state(&node, TagState::Succeeded(at(0)));
    assert_eq!(roster.counts().wanted_offline, 0);
}

#[test]
fn a_round_ends_with_its_own_pull() {
    let (mut roster, node) = (NodeRoster::new(uid("job")), node(Presence::Online));
    roster.set_never(true);
    roster.set_selected(&node, true);
    roster.set_tag_state(&node, TagState::Failed(at(0)));
    assert!(roster.set_tag_state(&node, TagState::Succeeded(at(0))) && roster.counts().succeeded == 1);
    // A later pull counts, though another job began it.
    roster.set_tag_state(&node, TagState::Succeeded(at(3_600)));
    let due = next_round(&uid("job"), &node.name, at(3_600));
    assert_eq!(roster.next_round(), Some(due));
    roster.begin_rounds(due);
    let repeat = |roster: &mut NodeRoster| roster.set_tag_state(&node, TagState::Succeeded(at(3_600)));
    assert!(!repeat(&mut roster) && roster.mark_requested(&node.name) && !repeat(&mut roster));
    assert!(roster.set_tag_state(&node, TagState::Succeeded(due)));
    assert!(roster.busy_nodes().is_empty() && roster.wanted_nodes().is_empty());
}
