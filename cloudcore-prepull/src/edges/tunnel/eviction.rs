//! The end of the sessions of nodes that are revoked or deleted.

use std::time::Duration;

use super::Sessions;
use crate::edges::roster::Roster;

/// The shortest time between two looks at all sessions, of which there may be 20,000.
const PAUSE: Duration = Duration::from_millis(100);

/// Ends the sessions of nodes that the roster does not let in any more, for ever.
pub(crate) async fn end_sessions(roster: Roster, sessions: Sessions) {
    loop {
        roster.changed().await;
        for (node, session, key) in sessions.all() {
            if let Err(refusal) = roster.check(&node, key) {
                tracing::warn!(%node, reason = %refusal, "a session is ended");
                sessions.disconnect(&node, session, &refusal.to_string());
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
}
