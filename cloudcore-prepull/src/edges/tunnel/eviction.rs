//! The end of the sessions of nodes that are revoked or deleted.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::Sessions;
use crate::edges::roster::{NodeRefusal, Roster};

/// The shortest time between two looks at all sessions: there may be 20,000.
const PAUSE: Duration = Duration::from_millis(100);

/// How long a session outlives its Node: what is cancelled with the Node has to reach the edge.
const FAREWELL: Duration = Duration::from_secs(3);

/// Ends the sessions of nodes that the roster does not let in any more, for ever.
pub(crate) async fn end_sessions(roster: Roster, sessions: Sessions) {
    // Since when each session is without its Node.
    let mut without_node = HashMap::new();
    loop {
        if without_node.is_empty() {
            roster.wait_for_change().await;
        } else {
            let _ = timeout(PAUSE, roster.wait_for_change()).await;
        }
        let (now, before) = (Instant::now(), std::mem::take(&mut without_node));
        for (node, session, key) in sessions.all() {
            let Err(refusal) = roster.check_key(&node, key) else { continue };
            let since = *before.get(&session).unwrap_or(&now);
            if matches!(refusal, NodeRefusal::NoNode { .. }) && now - since < FAREWELL {
                without_node.insert(session, since);
                continue;
            }
            tracing::warn!(%node, reason = %refusal, "a session is ended");
            roster.count_ended(&refusal);
            sessions.disconnect(&node, session, &refusal.to_string());
        }
        tokio::time::sleep(PAUSE).await;
    }
}
