//! The tunnel's cloud side: sessions come in, events go to the controller, messages go out.
//!
//! ```text
//! listener ─TLS, websocket─▶ session (one task each) ─SessionEvent─▶ controller
//!                               ▲ bounded queue
//!                            registry (the one place that holds sessions) ◀─send─ dispatch
//! ```

pub mod listener;
mod meters;
mod overload;
pub(crate) mod peer;
pub mod registry;
mod session;
pub(crate) mod throttle;

pub use meters::Meters;

/// Why a message was not handed to a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The node has no session.
    #[error("the node has no session")]
    Offline,
    /// The message is larger than any session takes. The session is left alone.
    #[error("the message is too large: {0} bytes")]
    TooLarge(usize),
    /// The node does not read: its queue is full, and its session is being closed.
    #[error("the node reads too slowly")]
    Full,
}
