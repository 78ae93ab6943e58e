//! The registry of sessions: at most one per node.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use prepull_api::task::NodeName;
use prepull_api::wire::{CloudMessage, DecodeError, encode_frame};
use prepull_engine::fleet::session::SessionId;
use prepull_tunnel::{CloseCode, Utf8Bytes};
use tokio::time::Instant;

use super::outbox::{Close, Knowledge, Outbox, PushError};
use super::trust::SessionTrust;
use crate::edges::directory::Directory;
use crate::edges::log_rate::NodeLogRate;
use crate::edges::pki::{CaCensus, CaSet, KeyHash};
use crate::edges::tickets::Tickets;

/// The rate at which a drain lets edges come back. A full TLS handshake takes about a millisecond of a core, so
/// this leaves half a core to the rest of the successor's work.
const RETURNS_PER_SECOND: u32 = 500;
/// The shortest time over which a drain spreads the returns: a successor needs a moment before it listens.
const MIN_SPREAD: Duration = Duration::from_secs(1);

/// Why a message was not queued for a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The node has no session.
    #[error("the node has no session")]
    Offline,
    /// The message is larger than any session accepts. The session goes on.
    #[error("the message is too large: {0} bytes")]
    TooLarge(usize),
    /// The node's agent doesn't know the task, which is to do this.
    #[error("its edgecore-prepull is too old to {0}: upgrade it on the node, and raise spec.retry")]
    TooOld(&'static str),
    /// The node does not read: its queue is full, and its session is being closed.
    #[error("the node reads too slowly")]
    Full,
}

/// All sessions of this process, one per node. Clones share the sessions.
#[derive(Clone, Debug, Default)]
pub struct Sessions {
    shared: Arc<SharedSessions>,
}

#[derive(Debug, Default)]
struct SharedSessions {
    table: Mutex<HashMap<NodeName, Arc<Outbox>>>,
    last_id: AtomicU64,
    log_rate: NodeLogRate,
    directory: Directory,
    tickets: Tickets,
}

impl Sessions {
    /// Queues a message for a node without waiting. Returns the session that carries it, unless that ends before.
    ///
    /// # Errors
    /// [`SendError::Full`] closes the session. The queued messages are lost with it, and sent again after the node's
    /// next `Hello`.
    // By value: an `Assign` holds credentials, which the caller must not keep after they were sent.
    #[allow(clippy::needless_pass_by_value)]
    pub fn send(&self, node: &NodeName, message: CloudMessage) -> Result<SessionId, SendError> {
        let Some(outbox) = self.shared.table.lock().get(node).cloned() else {
            return Err(SendError::Offline);
        };
        if let CloudMessage::Assign(assign) = &message
            && let Some(lack) = outbox.knows.unsupported_part(&assign.task)
        {
            return Err(SendError::TooOld(lack));
        }
        let text = match encode_frame(&message) {
            Ok(text) => Utf8Bytes::from(text),
            Err(DecodeError::TooLarge(size)) => return Err(SendError::TooLarge(size)),
            Err(error) => {
                // The types of messages always serialize, so this is a bug and must not be silent. To the caller it
                // amounts to a node that cannot take the message.
                tracing::error!(%node, %error, "a message to the node cannot be encoded");
                outbox.close(Close::new(CloseCode::Error, "internal error: a message could not be encoded"));
                self.remove(node, outbox.id);
                return Err(SendError::Full);
            }
        };
        outbox.push(text).map(|()| outbox.id).map_err(|error| {
            self.remove(node, outbox.id);
            match error {
                PushError::Closing => SendError::Offline,
                PushError::Full => SendError::Full,
            }
        })
    }

    /// Whether a message to the node would be queued.
    pub fn is_online(&self, node: &NodeName) -> bool {
        self.shared.table.lock().contains_key(node)
    }

    pub(crate) fn directory(&self) -> &Directory {
        &self.shared.directory
    }

    /// What lets the nodes of a site read from each other.
    pub(crate) fn tickets(&self) -> &Tickets {
        &self.shared.tickets
    }

    pub(crate) fn may_log(&self, node: &NodeName) -> bool {
        self.shared.log_rate.allows(node, Instant::now())
    }

    /// The number of nodes with a session.
    pub fn len(&self) -> usize {
        self.shared.table.lock().len()
    }

    /// Whether no node has a session.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Counts how far the connected edges are in a rotation of the CA.
    pub(crate) fn ca_census(&self, cas: &CaSet) -> CaCensus {
        CaCensus::from_sessions(self.shared.table.lock().values().map(|outbox| &outbox.trust), cas)
    }

    /// Asks every node to come back at a time of its own, and closes its session after that message.
    pub fn goaway_all(&self, reason: &str) {
        let outboxes: Vec<_> = self.shared.table.lock().drain().map(|(_, outbox)| outbox).collect();
        let count = u32::try_from(outboxes.len()).unwrap_or(u32::MAX);
        for (outbox, after) in outboxes.into_iter().zip(spread_returns(count)) {
            let goaway = CloudMessage::Goaway { after, reason: reason.to_owned() };
            if let Ok(text) = encode_frame(&goaway) {
                let _ = outbox.push(text.into()); // with a full outbox, the close frame alone gives the reason
            }
            outbox.close_when_sent(Close::new(CloseCode::Away, reason));
        }
    }

    /// All sessions, each with its node and the key of its certificate.
    pub(crate) fn all(&self) -> Vec<(NodeName, SessionId, KeyHash)> {
        self.shared.table.lock().iter().map(|(node, outbox)| (node.clone(), outbox.id, outbox.key)).collect()
    }

    /// Ends a session at once, unless a newer one of the node has replaced it. What is queued for it is not sent.
    pub(crate) fn disconnect(&self, node: &NodeName, session: SessionId, reason: &str) {
        let mut table = self.shared.table.lock();
        if table.get(node).is_some_and(|outbox| outbox.id == session)
            && let Some(outbox) = table.remove(node)
        {
            drop(table);
            outbox.close(Close::new(CloseCode::Policy, reason));
        }
    }

    /// Makes a new session the node's only one, and closes the one that it replaces.
    pub(super) fn register(
        &self,
        node: NodeName,
        trust: SessionTrust,
        key: KeyHash,
        knows: Knowledge,
    ) -> Arc<Outbox> {
        let mut table = self.shared.table.lock();
        // Relaxed: the table's lock orders the sessions of a node.
        let id = SessionId(self.shared.last_id.fetch_add(1, Ordering::Relaxed) + 1);
        let outbox = Arc::new(Outbox::new(id, trust, key, knows));
        let replaced = table.insert(node, Arc::clone(&outbox));
        drop(table);
        if let Some(replaced) = replaced {
            replaced.close(Close::new(CloseCode::Policy, "replaced by a newer session of this node"));
        }
        outbox
    }

    /// Removes an ended session, unless a newer session of the node has replaced it.
    pub(super) fn remove(&self, node: &NodeName, session: SessionId) {
        let mut table = self.shared.table.lock();
        if table.get(node).is_some_and(|outbox| outbox.id == session) {
            table.remove(node);
        }
    }
}

/// Spreads the returns of `count` nodes evenly, at most [`RETURNS_PER_SECOND`].
fn spread_returns(count: u32) -> impl Iterator<Item = Duration> {
    let period = (Duration::from_secs(1) * count / RETURNS_PER_SECOND).max(MIN_SPREAD);
    (0..count).map(move |nth| period.mul_f64(f64::from(nth) / f64::from(count)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use futures::FutureExt;
    use prepull_api::download::DownloadTerms;
    use prepull_api::task::{JobUid, Removal, Task, TaskId, Upgrade};
    use prepull_api::wire::Assign;

    use super::*;
    use crate::edges::tunnel::outbox::{MAX_QUEUED, Outgoing};

    fn cancel(reason: &str) -> CloudMessage {
        let task = TaskId { job: JobUid("uid".into()), attempt: 1 };
        CloudMessage::Cancel { task, reason: reason.into() }
    }

    const KEY: KeyHash = KeyHash::new([0; 32]);
    const ALL: Knowledge = Knowledge { removals: true, upgrades: true };

    fn node() -> NodeName {
        "edge-1".into()
    }

    fn closed(outbox: &Outbox) -> Option<String> {
        match outbox.next(true).now_or_never() {
            Some(Outgoing::Close(close)) => Some(close.reason),
            _ => None,
        }
    }

    #[test]
    fn a_task_reaches_only_an_agent_that_knows_it() {
        let sessions = Sessions::default();
        let assign = |removal: Option<Box<Removal>>, upgrade| {
            let id = TaskId { job: JobUid("uid".into()), attempt: 1 };
            let (title, checks, images) = (String::new(), Vec::new(), Vec::new());
            let task = Task { id, title, checks, images, removal, upgrade };
            let (remaining, download) = (Duration::from_secs(1), DownloadTerms::default());
            CloudMessage::Assign(Assign { task, remaining, keys: Vec::new(), download })
        };
        let upgrade = Upgrade { within: Duration::from_secs(60), packaged: false };
        for (removals, upgrades) in [(false, false), (true, false), (false, true)] {
            let knows = Knowledge { removals, upgrades };
            let _outbox = sessions.register(node(), SessionTrust::default(), KEY, knows);
            assert!(sessions.send(&node(), assign(None, None)).is_ok());
            let removes = sessions.send(&node(), assign(Some(Box::default()), None));
            assert_eq!(removes.is_ok(), removals);
            assert_eq!(sessions.send(&node(), assign(None, Some(upgrade))).is_ok(), upgrades);
        }
    }

    #[test]
    fn messages_are_sent_in_order() {
        let sessions = Sessions::default();
        assert_eq!(sessions.send(&node(), cancel("0")), Err(SendError::Offline));
        let outbox = sessions.register(node(), SessionTrust::default(), KEY, ALL);
        sessions.send(&node(), cancel("1")).unwrap();
        sessions.send(&node(), cancel("2")).unwrap();
        let expected = |reason| Some(Outgoing::Message(encode_frame(&cancel(reason)).unwrap().into()));
        assert_eq!(outbox.next(true).now_or_never(), expected("1"));
        assert_eq!(outbox.next(true).now_or_never(), expected("2"));
        assert_eq!(outbox.next(true).now_or_never(), None);
    }

    #[test]
    fn a_full_queue_closes_the_session() {
        for (reason, fits) in [("x".to_owned(), MAX_QUEUED), ("x".repeat(1024 * 1000), 4)] {
            let sessions = Sessions::default();
            let outbox = sessions.register(node(), SessionTrust::default(), KEY, ALL);
            for _ in 0..fits {
                sessions.send(&node(), cancel(&reason)).unwrap();
            }
            assert_eq!(sessions.send(&node(), cancel(&reason)), Err(SendError::Full));
            assert_eq!(sessions.send(&node(), cancel(&reason)), Err(SendError::Offline));
            assert!(!sessions.is_online(&node()));
            assert_eq!(closed(&outbox).as_deref(), Some("the node reads too slowly: its queue is full"));
        }
    }

    #[test]
    fn sent_bytes_make_room_in_the_queue() {
        let sessions = Sessions::default();
        let outbox = sessions.register(node(), SessionTrust::default(), KEY, ALL);
        for _ in 0..20 {
            sessions.send(&node(), cancel(&"x".repeat(1024 * 1000))).unwrap();
            assert!(matches!(outbox.next(true).now_or_never(), Some(Outgoing::Message(_))));
        }
    }

    #[test]
    fn a_second_session_replaces_the_first() {
        let sessions = Sessions::default();
        let first = sessions.register(node(), SessionTrust::default(), KEY, ALL);
        let second = sessions.register(node(), SessionTrust::default(), KEY, ALL);
        assert!(second.id > first.id);
        assert_eq!(closed(&first).as_deref(), Some("replaced by a newer session of this node"));
        sessions.send(&node(), cancel("x")).unwrap();
        assert!(matches!(second.next(true).now_or_never(), Some(Outgoing::Message(_))));
        sessions.remove(&node(), first.id);
        assert!(sessions.is_online(&node()));
        sessions.remove(&node(), second.id);
        assert_eq!(sessions.len(), 0);
    }

    #[test]
    fn disconnects_only_the_current_session() {
        let sessions = Sessions::default();
        let first = sessions.register(node(), SessionTrust::default(), KEY, ALL);
        let second = sessions.register(node(), SessionTrust::default(), KEY, ALL);
        sessions.disconnect(&node(), first.id, "revoked");
        assert_eq!(sessions.all(), [(node(), second.id, KEY)]);
        sessions.send(&node(), cancel("secret")).unwrap();
        sessions.disconnect(&node(), second.id, "revoked");
        assert_eq!(closed(&second).as_deref(), Some("revoked"), "and nothing that was queued before");
        assert!(!sessions.is_online(&node()));
    }

    #[test]
    fn a_drain_spreads_the_return_times() {
        let sessions = Sessions::default();
        let outboxes = ["a", "b", "c", "d"]
            .map(|name| sessions.register(name.into(), SessionTrust::default(), KEY, ALL));
        sessions.goaway_all("restart");
        assert!(sessions.is_empty());
        let mut delays = Vec::new();
        for outbox in outboxes {
            let Some(Outgoing::Message(text)) = outbox.next(true).now_or_never() else { panic!("no goaway") };
            let CloudMessage::Goaway { after, .. } = prepull_api::wire::decode_frame(&text).unwrap() else {
                panic!()
            };
            delays.push(after.as_millis());
            assert_eq!(closed(&outbox).as_deref(), Some("restart"));
        }
        delays.sort_unstable();
        assert_eq!(delays, [0, 250, 500, 750]);
        assert_eq!(spread_returns(10_000).last().unwrap().as_secs(), 19);
    }

    #[test]
    fn an_immediate_close_waits_for_no_write() {
        let sessions = Sessions::default();
        let outbox = sessions.register(node(), SessionTrust::default(), KEY, ALL);
        sessions.send(&node(), cancel("x")).unwrap();
        assert_eq!(outbox.next(false).now_or_never(), None);
        sessions.goaway_all("restart");
        assert_eq!(outbox.next(false).now_or_never(), None);
        outbox.close(Close::new(CloseCode::Policy, "too slow"));
        assert!(matches!(outbox.next(false).now_or_never(), Some(Outgoing::Close(_))));
    }

    #[test]
    fn an_immediate_close_drops_the_queued_messages() {
        let sessions = Sessions::default();
        let outbox = sessions.register(node(), SessionTrust::default(), KEY, ALL);
        sessions.send(&node(), cancel("x")).unwrap();
        outbox.close(Close::new(CloseCode::Policy, "node deleted"));
        assert_eq!(closed(&outbox).as_deref(), Some("node deleted"));
        assert_eq!(sessions.send(&node(), cancel("x")), Err(SendError::Offline));
        assert!(!sessions.is_online(&node()));
    }
}
