//! The link to the cloud: dialled by the edge, lost at any moment, dialled again.

pub(crate) mod backoff;
pub mod dial;
mod route;

use prepull_api::wire::{CloudMessage, EdgeMessage, Hello, Welcome};
use tokio::sync::{mpsc, oneshot};

/// What the tunnel tells the agent. In the order of one session: `Connecting`, `Connected`, `Message`…,
/// `Disconnected`; after `Connecting` a `Disconnected` may follow directly.
#[derive(Debug)]
pub enum TunnelEvent {
    /// The handshake is done: what is the `Hello` to say? Not answering ends the attempt.
    Connecting(oneshot::Sender<Hello>),
    /// The cloud has welcomed the session. Results that are not acknowledged are to be sent again now.
    Connected(Welcome),
    /// The cloud said something.
    Message(CloudMessage),
    /// The session is over. What was handed to [`Link::send`] may or may not have arrived.
    Disconnected,
}

/// The agent's end of the tunnel for what it has to say.
#[derive(Clone, Debug)]
pub struct Link {
    sender: mpsc::Sender<EdgeMessage>,
}

impl Link {
    /// A link and the tunnel's end of it. `depth` messages wait at the most.
    pub fn new(depth: usize) -> (Self, mpsc::Receiver<EdgeMessage>) {
        let (sender, receiver) = mpsc::channel(depth);
        (Self { sender }, receiver)
    }

    /// Hands a message to the session, if there is one; drops it otherwise. A result is safe in the ledger and
    /// is sent again on the next session, progress is only of the moment.
    pub async fn send(&self, message: EdgeMessage) {
        // The receiver goes only when the program ends.
        let _ = self.sender.send(message).await;
    }

    /// Like [`Self::send`], but drops the message where the queue is full.
    pub fn offer(&self, message: EdgeMessage) {
        let _ = self.sender.try_send(message);
    }
}
