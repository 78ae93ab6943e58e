//! The one place that holds sessions, and the queue in front of each.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prepull_api::task::NodeName;
use prepull_api::wire::{CloudMessage, DecodeError, MAX_MESSAGE, MAX_OPEN_TASKS, encode};
use prepull_engine::shared::session::SessionId;
use prepull_tunnel::{CloseCode, Utf8Bytes};
use tokio::sync::Notify;

use super::SendError;

/// Messages that wait for one node. It holds at most [`MAX_OPEN_TASKS`] tasks, and each may be assigned,
/// cancelled and acknowledged while the node does not read.
const MAX_QUEUED: usize = 4 * MAX_OPEN_TASKS;
/// Bytes that wait for one node: room for some messages of the largest size, and far more than 64 tasks of
/// the usual few KiB. Whoever lets so much pile up is as good as gone, and will be told anew.
const MAX_QUEUED_BYTES: usize = 4 * MAX_MESSAGE;
/// Sessions that are told to come back per second of a drain. A full TLS handshake takes a core about a
/// millisecond, so this leaves most of one core to whatever takes over.
const RETURNS_PER_SECOND: u32 = 500;
/// The least that a drain is spread over: a successor needs a moment to listen.
const LEAST_SPREAD: Duration = Duration::from_secs(1);

/// All sessions of this process, one per node.
#[derive(Clone, Debug, Default)]
pub struct Sessions {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    table: Mutex<HashMap<NodeName, Arc<Outbox>>>,
    last_id: AtomicU64,
}

impl Sessions {
    /// No session yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Queues a message for a node; never waits. Says which session will carry it, should it last.
    ///
    /// # Errors
    /// [`SendError::Full`] closes the session: what was queued is lost with it, and is told anew after the
    /// next `Hello`.
    // By value: an `Assign` holds credentials, which the caller is not to keep after they were sent.
    #[allow(clippy::needless_pass_by_value)]
    pub fn send(&self, node: &NodeName, message: CloudMessage) -> Result<SessionId, SendError> {
        let Some(outbox) = self.table().get(node).cloned() else { return Err(SendError::Offline) };
        let text = match encode(&message) {
            Ok(text) => Utf8Bytes::from(text),
            Err(DecodeError::TooLarge(size)) => return Err(SendError::TooLarge(size)),
            Err(error) => {
                // Messages are made of types that always serialise, so this is a bug that must not be silent; to
                // the caller it looks like a node that cannot take the message, which is what it comes to.
                tracing::error!(%node, %error, "a message for the node cannot be sent");
                outbox.end(Farewell::new(CloseCode::Error, "internal error: a message could not be encoded"));
                self.forget(node, outbox.id);
                return Err(SendError::Full);
            }
        };
        match outbox.push(text) {
            Ok(()) => Ok(outbox.id),
            Err(error) => {
                self.forget(node, outbox.id);
                Err(error)
            }
        }
    }

    /// Ends a node's session, if it has one. The reason goes into the close frame.
    pub fn disconnect(&self, node: &NodeName, reason: &str) {
        let outbox = self.table().remove(node);
        if let Some(outbox) = outbox {
            outbox.end(Farewell::new(CloseCode::Policy, reason));
        }
    }

    /// Whether a message would be queued.
    pub fn is_online(&self, node: &NodeName) -> bool {
        self.table().contains_key(node)
    }

    /// How many nodes are online.
    pub fn len(&self) -> usize {
        self.table().len()
    }

    /// Whether no node is online.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Asks every node to come back, each at a time of its own, and ends its session once it has been told.
    pub fn goaway_all(&self, reason: &str) {
        let outboxes: Vec<_> = self.table().drain().map(|(_, outbox)| outbox).collect();
        let count = u32::try_from(outboxes.len()).unwrap_or(u32::MAX);
        for (outbox, after) in outboxes.into_iter().zip(spread(count)) {
            let goaway = CloudMessage::Goaway { after, reason: reason.to_owned() };
            if let Ok(text) = encode(&goaway) {
                let _ = outbox.push(text.into()); // an outbox that is full is told by the close frame alone
            }
            outbox.end_when_sent(Farewell::new(CloseCode::Away, reason));
        }
    }

    /// Makes `outbox` the node's only one.
    pub(super) fn register(&self, node: NodeName) -> Arc<Outbox> {
        // Relaxed: the table's lock orders the sessions of a node.
        let mut table = self.table();
        let id = SessionId(self.shared.last_id.fetch_add(1, Ordering::Relaxed) + 1);
        let outbox = Arc::new(Outbox::new(id));
        let replaced = table.insert(node, Arc::clone(&outbox));
        drop(table);
        if let Some(replaced) = replaced {
            replaced.end(Farewell::new(CloseCode::Policy, "replaced by a newer session of this node"));
        }
        outbox
    }

    /// Removes a session that has ended, unless a newer one has taken its place.
    pub(super) fn forget(&self, node: &NodeName, session: SessionId) {
        let mut table = self.table();
        if table.get(node).is_some_and(|outbox| outbox.id == session) {
            table.remove(node);
        }
    }

    fn table(&self) -> MutexGuard<'_, HashMap<NodeName, Arc<Outbox>>> {
        // Nothing that holds the lock can leave the table half changed.
        self.shared.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// When each of `count` nodes comes back: evenly, at most [`RETURNS_PER_SECOND`].
fn spread(count: u32) -> impl Iterator<Item = Duration> {
    let over = (Duration::from_secs(1) * count / RETURNS_PER_SECOND).max(LEAST_SPREAD);
    (0..count).map(move |nth| over.mul_f64(f64::from(nth) / f64::from(count)))
}

/// How a session is to end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Farewell {
    pub(super) code: CloseCode,
    pub(super) reason: String,
}

impl Farewell {
    pub(super) fn new(code: CloseCode, reason: &str) -> Self {
        Self { code, reason: reason.to_owned() }
    }
}

/// What a session is to do next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outgoing {
    /// Send this.
    Message(Utf8Bytes),
    /// Close.
    End(Farewell),
}

/// What waits for one session. It holds no memory while nothing waits.
#[derive(Debug)]
pub(super) struct Outbox {
    pub(super) id: SessionId,
    waiting: Mutex<Waiting>,
    wake: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    messages: VecDeque<Utf8Bytes>,
    bytes: usize,
    end: Option<Farewell>,
    /// The end does not wait for a write that is under way.
    at_once: bool,
}

impl Outbox {
    fn new(id: SessionId) -> Self {
        Self { id, waiting: Mutex::default(), wake: Notify::new() }
    }

    pub(super) fn push(&self, text: Utf8Bytes) -> Result<(), SendError> {
        let mut waiting = self.waiting();
        if waiting.end.is_some() {
            return Err(SendError::Offline);
        }
        let bytes = waiting.bytes + text.len();
        let outcome = if waiting.messages.len() >= MAX_QUEUED || bytes > MAX_QUEUED_BYTES {
            waiting.drop_all_for(Farewell::new(
                CloseCode::Policy,
                "the node reads too slowly: its queue is full",
            ));
            Err(SendError::Full)
        } else {
            waiting.bytes = bytes;
            waiting.messages.push_back(text);
            Ok(())
        };
        drop(waiting);
        self.wake.notify_one();
        outcome
    }

    /// Ends the session now; what waits is dropped.
    pub(super) fn end(&self, farewell: Farewell) {
        self.waiting().drop_all_for(farewell);
        self.wake.notify_one();
    }

    /// Ends the session after what waits.
    fn end_when_sent(&self, farewell: Farewell) {
        self.waiting().end.get_or_insert(farewell);
        self.wake.notify_one();
    }

    /// Waits for something to do; where the session is not writable, for nothing but an end that does not
    /// wait. Cancel safe; for one caller at a time.
    pub(super) async fn next(&self, writable: bool) -> Outgoing {
        loop {
            if let Some(outgoing) = self.take(writable) {
                return outgoing;
            }
            self.wake.notified().await;
        }
    }

    fn take(&self, writable: bool) -> Option<Outgoing> {
        let mut waiting = self.waiting();
        if !writable && !waiting.at_once {
            return None;
        }
        if let Some(message) = waiting.messages.pop_front() {
            waiting.bytes -= message.len();
            if waiting.messages.is_empty() {
                waiting.messages.shrink_to_fit();
            }
            return Some(Outgoing::Message(message));
        }
        waiting.end.clone().map(Outgoing::End)
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        // Nothing that holds the lock can leave the queue half changed.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    /// The first reason stands: it is the one that began the end.
    fn drop_all_for(&mut self, farewell: Farewell) {
        self.messages = VecDeque::new();
        self.bytes = 0;
        self.at_once = true;
        self.end.get_or_insert(farewell);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use futures::FutureExt;
    use prepull_api::task::{JobUid, TaskId};

    use super::*;

    fn cancel(reason: &str) -> CloudMessage {
        let task = TaskId { job: JobUid("uid".into()), attempt: 1 };
        CloudMessage::Cancel { task, reason: reason.into() }
    }

    fn node() -> NodeName {
        "edge-1".into()
    }

    fn ended(outbox: &Outbox) -> Option<String> {
        match outbox.next(true).now_or_never() {
            Some(Outgoing::End(farewell)) => Some(farewell.reason),
            _ => None,
        }
    }

    #[test]
    fn messages_leave_in_their_order() {
        let sessions = Sessions::new();
        assert_eq!(sessions.send(&node(), cancel("0")), Err(SendError::Offline));
        let outbox = sessions.register(node());
        sessions.send(&node(), cancel("1")).unwrap();
        sessions.send(&node(), cancel("2")).unwrap();
        let expected = |reason| Some(Outgoing::Message(encode(&cancel(reason)).unwrap().into()));
        assert_eq!(outbox.next(true).now_or_never(), expected("1"));
        assert_eq!(outbox.next(true).now_or_never(), expected("2"));
        assert_eq!(outbox.next(true).now_or_never(), None);
    }

    #[test]
    fn a_queue_full_of_messages_or_of_bytes_ends_the_session() {
        for (reason, fits) in [("x".to_owned(), MAX_QUEUED), ("x".repeat(1024 * 1000), 4)] {
            let sessions = Sessions::new();
            let outbox = sessions.register(node());
            for _ in 0..fits {
                sessions.send(&node(), cancel(&reason)).unwrap();
            }
            assert_eq!(sessions.send(&node(), cancel(&reason)), Err(SendError::Full));
            assert_eq!(sessions.send(&node(), cancel(&reason)), Err(SendError::Offline));
            assert!(!sessions.is_online(&node()));
            assert_eq!(ended(&outbox).as_deref(), Some("the node reads too slowly: its queue is full"));
        }
    }

    #[test]
    fn bytes_that_have_left_make_room() {
        let sessions = Sessions::new();
        let outbox = sessions.register(node());
        for _ in 0..20 {
            sessions.send(&node(), cancel(&"x".repeat(1024 * 1000))).unwrap();
            assert!(matches!(outbox.next(true).now_or_never(), Some(Outgoing::Message(_))));
        }
    }

    #[test]
    fn a_second_session_replaces_the_first_and_outlives_its_end() {
        let sessions = Sessions::new();
        let first = sessions.register(node());
        let second = sessions.register(node());
        assert!(second.id > first.id);
        assert_eq!(ended(&first).as_deref(), Some("replaced by a newer session of this node"));
        sessions.forget(&node(), first.id);
        assert!(sessions.is_online(&node()));
        sessions.forget(&node(), second.id);
        assert_eq!(sessions.len(), 0);
    }

    #[test]
    fn a_drain_tells_every_node_a_time_of_its_own_before_it_closes() {
        let sessions = Sessions::new();
        let outboxes = ["a", "b", "c", "d"].map(|name| sessions.register(name.into()));
        sessions.goaway_all("restart");
        assert!(sessions.is_empty());
        let mut delays = Vec::new();
        for outbox in outboxes {
            let Some(Outgoing::Message(text)) = outbox.next(true).now_or_never() else { panic!("no goaway") };
            let CloudMessage::Goaway { after, .. } = prepull_api::wire::decode(&text).unwrap() else {
                panic!()
            };
            delays.push(after.as_millis());
            assert_eq!(ended(&outbox).as_deref(), Some("restart"));
        }
        delays.sort_unstable();
        assert_eq!(delays, [0, 250, 500, 750]);
        assert_eq!(spread(10_000).last().unwrap().as_secs(), 19);
    }

    #[test]
    fn a_session_that_cannot_write_still_learns_of_an_end_that_does_not_wait() {
        let sessions = Sessions::new();
        let outbox = sessions.register(node());
        sessions.send(&node(), cancel("x")).unwrap();
        assert_eq!(outbox.next(false).now_or_never(), None);
        sessions.goaway_all("restart");
        assert_eq!(outbox.next(false).now_or_never(), None);
        outbox.end(Farewell::new(CloseCode::Policy, "too slow"));
        assert!(matches!(outbox.next(false).now_or_never(), Some(Outgoing::End(_))));
    }

    #[test]
    fn disconnecting_drops_what_waits() {
        let sessions = Sessions::new();
        let outbox = sessions.register(node());
        sessions.send(&node(), cancel("x")).unwrap();
        sessions.disconnect(&node(), "node deleted");
        assert_eq!(ended(&outbox).as_deref(), Some("node deleted"));
        assert!(!sessions.is_online(&node()));
    }
}
