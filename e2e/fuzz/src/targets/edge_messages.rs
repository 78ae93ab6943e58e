//! Messages from two edges to the cloud, a frame on each line. The first edge also works as usual.
//!
//! With any frames, each job ends, and everything written and sent stays within its size limits.

use jiff::SignedDuration;
use prepull_api::wire::{EdgeMessage, decode_frame, encode_frame};
use prepull_engine::fleet::event::FleetEvent;
use prepull_engine::fleet::session::SessionEvent;
use prepull_engine::recording::{Replay, replay};

use self::world::{World, name, session};
use super::recordings;

#[path = "../../../../cloudcore-prepull/engine/benches/engine/world.rs"]
#[allow(
    dead_code,
    unfulfilled_lint_expectations,
    reason = "the benchmark uses the rest, and may ask for the time"
)]
mod world;

/// A pull takes as long as a few frames.
fn pull_time(_: usize) -> SignedDuration {
    SignedDuration::from_millis(8)
}

pub(crate) fn run(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let messages: Vec<EdgeMessage> = text.split('\n').filter_map(decode_checked).collect();
    if messages.is_empty() {
        return;
    }
    let mut world = World::new(2, true, pull_time, true);
    world.make_job("all", None);
    world.make_pull_job("kruise", None);
    let node = name(0);
    let mut wait = SignedDuration::ZERO;
    for message in messages {
        wait += SignedDuration::from_millis(2);
        let (node, session) = (node.clone(), session(&node));
        if let EdgeMessage::Hello(hello) = message {
            let down = SessionEvent::Down { node: node.clone(), session };
            world.happens_after(wait, FleetEvent::Session(down).into());
            world.happens_after(wait, FleetEvent::Session(SessionEvent::Up { node, session, hello }).into());
        } else {
            let said = SessionEvent::Message { node, session, message };
            world.happens_after(wait, FleetEvent::Session(said).into());
        }
    }
    world.run_until_ended(2);
    world.settle();
    let recording = world.recording.take().unwrap_or_default();
    let replayed = replay(recording.as_slice(), |_, action| recordings::check_action(action));
    let Replay { differences, .. } = replayed.expect("what was recorded can be played");
    assert_eq!(differences, Vec::<String>::new(), "a replay takes the same actions");
}

/// Decodes a frame, and checks that it encodes to the same.
fn decode_checked(frame: &str) -> Option<EdgeMessage> {
    let message = decode_frame(frame).ok()?;
    let again = encode_frame(&message).and_then(|frame| decode_frame(&frame));
    assert_eq!(again.ok().as_ref(), Some(&message), "{frame}");
    Some(message)
}
