//! The websocket channel that both ends of the tunnel share.
//!
//! ```text
//!  messages ──▶ Channel::start_send ─┐                              ┌─▶ TLS, TCP
//!                                    ├─ WebSocket ─ CountingStream ─┤
//!  messages ◀── Channel::next ───────┘                              └─◀ TLS, TCP
//!                  └─ pings, silence, write deadline
//! ```
//!
//! A [`Channel`] does all its work inside [`Channel::next`], on the caller's task. It has no task, queue or timer of
//! its own, so that ten thousand idle channels are cheap.

mod channel;
mod observed_stream;

pub use channel::{Channel, ChannelEnd, ChannelEvent, Terms};
pub use observed_stream::{ByteCount, CountingStream, ObservedStream, Observer};
pub use tokio_tungstenite::tungstenite::Utf8Bytes;
pub use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;

use prepull_api::wire::MAX_MESSAGE;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;

/// The most bytes of a close reason: what a control frame can carry, less two for the close code (RFC 6455,
/// section 5.5).
const MAX_CLOSE_REASON: usize = 123;
/// The size of the read buffer, which an idle session keeps. A message gets room of its own once its length is known, and
/// what is read comes out of a buffer of TLS; so it costs next to nothing that most messages need several reads.
const READ_BUFFER: usize = 512;
/// Room in the write buffer beyond one message: its header, a pong and a close frame.
const CONTROL_FRAMES: usize = 1024;

/// The websocket limits of both ends.
pub fn websocket_config() -> WebSocketConfig {
    WebSocketConfig::default()
        .read_buffer_size(READ_BUFFER)
        // Every message is flushed at once, so that a buffer would only cost memory.
        .write_buffer_size(0)
        // One message is written at a time.
        .max_write_buffer_size(MAX_MESSAGE + CONTROL_FRAMES)
        .max_message_size(Some(MAX_MESSAGE))
        .max_frame_size(Some(MAX_MESSAGE))
}

/// Truncates a text to what a close frame can carry, at a character boundary.
fn truncate_close_reason(text: &str) -> &str {
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
        assert_eq!(truncate_close_reason("short"), "short");
        let long = "é".repeat(100);
        assert_eq!(truncate_close_reason(&long), "é".repeat(61));
    }
}
