//! The bounded queue of messages in front of one session.

use std::collections::VecDeque;

use parking_lot::Mutex;
use prepull_api::task::Task;
use prepull_api::wire::{Hello, MAX_MESSAGE, MAX_OPEN_TASKS};
use prepull_engine::fleet::session::SessionId;
use prepull_tunnel::{CloseCode, Utf8Bytes};
use tokio::sync::Notify;

use super::trust::SessionTrust;
use crate::edges::pki::KeyHash;

/// The most messages that wait for one node. It holds at most [`MAX_OPEN_TASKS`] tasks, and each may be assigned,
/// cancelled and acknowledged while the node does not read.
pub(super) const MAX_QUEUED: usize = 4 * MAX_OPEN_TASKS;
/// The most bytes that wait for one node: some messages of the largest size, and far more than 64 tasks of the usual
/// few KiB. A node that lets so much pile up is not reading; it gets everything again after its next `Hello`.
const MAX_QUEUED_BYTES: usize = 4 * MAX_MESSAGE;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Close {
    pub(super) code: CloseCode,
    pub(super) reason: String,
}

impl Close {
    pub(super) fn new(code: CloseCode, reason: &str) -> Self {
        Self { code, reason: reason.to_owned() }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outgoing {
    Message(Utf8Bytes),
    Close(Close),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PushError {
    Closing,
    /// The queue was full, so that the session is closing now.
    Full,
}

/// The queue of one session. An empty one holds no memory.
#[derive(Debug)]
pub(super) struct Outbox {
    pub(super) id: SessionId,
    pub(super) trust: SessionTrust,
    /// The key of the certificate that the session began with.
    pub(super) key: KeyHash,
    /// The kinds of tasks that the node's agent knows.
    pub(super) knows: Knowledge,
    queue: Mutex<OutboxQueue>,
    wake: Notify,
}

#[derive(Debug, Default)]
struct OutboxQueue {
    messages: VecDeque<Utf8Bytes>,
    bytes: usize,
    close: Option<Close>,
    /// Whether to close even while a write is in progress.
    at_once: bool,
}

/// The kinds of tasks that an agent knows beside pulls.
#[derive(Clone, Copy, Debug)]
pub(super) struct Knowledge {
    pub(super) removals: bool,
    pub(super) upgrades: bool,
}

impl Knowledge {
    /// From the agent's own announcement.
    pub(super) fn from_hello(hello: &Hello) -> Self {
        Self { removals: hello.removes, upgrades: hello.upgrades }
    }

    /// What the task asks for and the agent doesn't know.
    pub(super) fn unsupported_part(self, task: &Task) -> Option<&'static str> {
        match task {
            Task { removal: Some(_), .. } if !self.removals => Some("remove images"),
            Task { upgrade: Some(_), .. } if !self.upgrades => Some("be upgraded by a job"),
            _ => None,
        }
    }
}

impl Outbox {
    pub(super) fn new(id: SessionId, trust: SessionTrust, key: KeyHash, knows: Knowledge) -> Self {
        Self { id, trust, key, knows, queue: Mutex::default(), wake: Notify::new() }
    }

    /// Queues a message. A queue without room closes the session instead.
    pub(super) fn push(&self, text: Utf8Bytes) -> Result<(), PushError> {
        let mut queue = self.queue.lock();
        if queue.close.is_some() {
            return Err(PushError::Closing);
        }
        let bytes = queue.bytes + text.len();
        let outcome = if queue.messages.len() >= MAX_QUEUED || bytes > MAX_QUEUED_BYTES {
            queue.close(Close::new(CloseCode::Policy, "the node reads too slowly: its queue is full"));
            Err(PushError::Full)
        } else {
            queue.bytes = bytes;
            queue.messages.push_back(text);
            Ok(())
        };
        drop(queue);
        self.wake.notify_one();
        outcome
    }

    /// Closes the session now, and drops the queued messages.
    pub(super) fn close(&self, close: Close) {
        self.queue.lock().close(close);
        self.wake.notify_one();
    }

    /// Closes the session after the queued messages.
    pub(super) fn close_when_sent(&self, close: Close) {
        self.queue.lock().close.get_or_insert(close);
        self.wake.notify_one();
    }

    /// Waits for the next thing to do; while a write is in progress, only for a close that does not wait for it.
    /// Cancel-safe. At most one caller at a time.
    pub(super) async fn next(&self, writable: bool) -> Outgoing {
        loop {
            if let Some(outgoing) = self.take(writable) {
                return outgoing;
            }
            self.wake.notified().await;
        }
    }

    fn take(&self, writable: bool) -> Option<Outgoing> {
        let mut queue = self.queue.lock();
        if !writable && !queue.at_once {
            return None;
        }
        if let Some(message) = queue.messages.pop_front() {
            queue.bytes -= message.len();
            if queue.messages.is_empty() {
                queue.messages.shrink_to_fit();
            }
            return Some(Outgoing::Message(message));
        }
        queue.close.clone().map(Outgoing::Close)
    }
}

impl OutboxQueue {
    /// Keeps the first close, which is the cause.
    fn close(&mut self, close: Close) {
        self.messages = VecDeque::new();
        self.bytes = 0;
        self.at_once = true;
        self.close.get_or_insert(close);
    }
}
