//! The tunnel's listener: accepts connections until shutdown, then drains the sessions.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use prepull_engine::fleet::session::SessionEvent;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::mpsc;
use tokio::task::{unconstrained, yield_now};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument;

use super::admission::Admission;
use super::{ListenerSettings, Sessions};
use crate::edges::PortTerms;
use crate::edges::accept::accept_connection;

/// The kernel's queue of established connections: a fleet's first second after a restart fits into it.
const BACKLOG: u32 = 4096;
/// Connections that are accepted in a row before other tasks get a turn: a quarter of the backlog.
const ACCEPT_BATCH: usize = 1024;
/// The interval, while draining, between two looks for connections that became sessions in the meantime.
const DRAIN_STEP: Duration = Duration::from_millis(100);

/// Binds a listener with a backlog for a whole fleet that reconnects.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Serves edges until `shutdown`, then stops accepting and sends every session a `Goaway`. Returns when all
/// sessions have ended, at the latest after [`ListenerSettings::drain_deadline`].
pub async fn serve(
    listener: TcpListener,
    terms: PortTerms,
    sessions: Sessions,
    events: mpsc::Sender<SessionEvent>,
    settings: ListenerSettings,
) {
    let (drain_deadline, shutdown) = (settings.drain_deadline, terms.shutdown.clone());
    let admission = Arc::new(Admission::new(terms, sessions.clone(), events, settings));
    let tracker = TaskTracker::new();
    let abort = CancellationToken::new();
    let mut in_a_row = 0;
    // Unconstrained, so that this task does not yield while connections wait: hundreds of handshakes could run
    // before its next turn, and the backlog would overflow.
    while let Some((stream, address)) =
        unconstrained(shutdown.run_until_cancelled(accept_connection(&listener))).await
    {
        in_a_row = (in_a_row + 1) % ACCEPT_BATCH;
        if in_a_row == 0 {
            yield_now().await;
        }
        let (admission, abort) = (Arc::clone(&admission), abort.clone());
        // Without the listener's span around it, which has the same name and no fields.
        let span = tracing::info_span!(parent: None, "tunnel", %address, node = tracing::field::Empty);
        let connection = async move {
            tokio::select! {
                () = admission.serve_connection(stream, address) => {}
                () = abort.cancelled() => {}
            }
        };
        tracker.spawn(connection.instrument(span));
    }
    drop(listener);
    tracker.close();
    let drained = async {
        // Repeated because connections may still become sessions after the first round.
        while !tracker.is_empty() {
            sessions.goaway_all("cloudcore is shutting down");
            let _ = timeout(DRAIN_STEP, tracker.wait()).await;
        }
    };
    if timeout(drain_deadline, drained).await.is_err() {
        tracing::warn!(sessions = tracker.len(), "closing the sessions that did not end in time");
    }
    abort.cancel();
    tracker.wait().await;
}
