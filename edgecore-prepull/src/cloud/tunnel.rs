//! The websocket to cloudcore. The edge dials it, and dials again after each loss.

pub mod dial;
mod route;

use prepull_api::wire::{CloudMessage, EdgeMessage, Hello, Welcome};
use tokio::sync::{mpsc, oneshot};

/// Events of the tunnel, for the agent. In one session their order is `Connecting`, `Connected`, any number of
/// `Message`, `Disconnected`. A session that fails early goes from `Connecting` to `Disconnected`.
#[derive(Debug)]
pub enum TunnelEvent {
    /// The handshake is done, and the agent should send its `Hello`. Dropping the sender ends the attempt.
    Connecting(oneshot::Sender<Hello>),
    /// The cloud has answered with `Welcome`. The agent must send unacknowledged results again.
    Connected(Welcome),
    /// The cloud sent a message.
    Message(CloudMessage),
    /// The session has ended. Messages given to [`TunnelSender::send`] may or may not have arrived.
    Disconnected,
}

/// The agent's sending end of the tunnel.
#[derive(Clone, Debug)]
pub struct TunnelSender {
    sender: mpsc::Sender<EdgeMessage>,
}

impl TunnelSender {
    /// Creates a link and the tunnel's receiving end of it; at most `depth` messages wait in between.
    pub fn new(depth: usize) -> (Self, mpsc::Receiver<EdgeMessage>) {
        let (sender, receiver) = mpsc::channel(depth);
        (Self { sender }, receiver)
    }

    /// Sends a message over the session, or drops it if there's none. No message is lost for good: results are in the
    /// ledger and are sent again in the next session, and progress is soon out of date.
    pub async fn send(&self, message: EdgeMessage) {
        // The receiver is dropped only when the program ends.
        let _ = self.sender.send(message).await;
    }

    /// Like [`Self::send`], but drops the message if the queue is full.
    pub fn try_send(&self, message: EdgeMessage) {
        let _ = self.sender.try_send(message);
    }
}
