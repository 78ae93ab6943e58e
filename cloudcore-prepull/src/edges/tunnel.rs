//! The cloud side of the tunnel: one websocket session per connected node.
//!
//! ```text
//! listener ─▶ admission (door) ─▶ handshake ─▶ session (one task each) ─SessionEvent─▶ controller
//!                                                 ▲ outbox (bounded queue)
//!                                              registry (the only owner of sessions) ◀─send─ dispatch
//! ```

mod admission;
mod eviction;
mod frame;
mod handshake;
mod inbound;
pub mod listener;
mod node_connections;
mod outbox;
mod overload;
mod refusal;
mod registry;
mod session;
mod settings;
mod trust;

pub(crate) use eviction::end_sessions;
pub use registry::{SendError, Sessions};
pub use settings::ListenerSettings;
