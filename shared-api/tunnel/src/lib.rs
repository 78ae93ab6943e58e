//! What both ends of the tunnel do alike.
//!
//! ```text
//!  messages ──▶ Channel::start_send ─┐                     ┌─▶ TLS, TCP
//!                                    ├─ WebSocket ─ Metered┤
//!  messages ◀── Channel::next ───────┘                     └─◀ TLS, TCP
//!                  └─ pings, silence, write deadline
//! ```
//!
//! A [`Channel`] does all its work inside [`Channel::next`], on the caller's task: no task, no queue and no
//! timer of its own, so that ten thousand idle ones are cheap.

mod channel;
mod metered;

pub use channel::{Channel, Ended, Event, Terms};
pub use metered::Metered;
pub use tokio_tungstenite::tungstenite::Utf8Bytes;
pub use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;

use prepull_api::wire::MAX_MESSAGE;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;

/// Bytes that a control frame can carry, less the two of the close code (RFC 6455, section 5.5).
pub const MAX_CLOSE_REASON: usize = 123;
/// What a read asks for at once, and what an idle session holds on to. Messages are a few KiB at most times;
/// the library's default of 128 KiB would be all of a session's memory several times over.
const READ_BUFFER: usize = 2 * 1024;
/// Beyond one message: its header, a pong and a close frame.
const CONTROL_FRAMES: usize = 1024;

/// The websocket's limits, the same on both sides.
pub fn websocket_config() -> WebSocketConfig {
    WebSocketConfig::default()
        .read_buffer_size(READ_BUFFER)
        // Every message is flushed at once, so that a buffer would only add to the memory.
        .write_buffer_size(0)
        // One message is written at a time.
        .max_write_buffer_size(MAX_MESSAGE + CONTROL_FRAMES)
        .max_message_size(Some(MAX_MESSAGE))
        .max_frame_size(Some(MAX_MESSAGE))
}

/// Cuts a text to what a close frame can carry, at a character boundary.
pub fn close_reason(text: &str) -> &str {
    let mut end = text.len().min(MAX_CLOSE_REASON);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_close_reason_fits_a_control_frame() {
        assert_eq!(close_reason("short"), "short");
        let long = "é".repeat(100);
        assert_eq!(close_reason(&long), "é".repeat(61));
    }
}
