//! Bounds and timing of the tunnel's cloud side.

use std::time::Duration;

/// Bounds and timing of the tunnel's cloud side.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The interval of pings in both directions; `--heartbeat`.
    pub heartbeat: Duration,
    /// The shortest time between two `Progress` messages about one task: nobody reads them faster.
    pub progress_interval: Duration,
    /// The most sessions at a time, over all nodes. An idle session takes up to 25 KiB. Edges beyond the limit are
    /// told when to come back.
    pub max_connections: usize,
    /// The most connections of one node at a time: its session, the one that replaces it, and some that are
    /// closing.
    pub max_connections_per_node: usize,
    /// The most TLS and websocket handshakes in flight. With more than the cores can complete before the deadline,
    /// all of them would fail.
    pub max_handshakes: usize,
    /// The most connections that wait for their handshake to begin. Each is a socket and a task.
    pub max_waiting: usize,
    /// How long a connection may wait for its handshake to begin. An edge gives up after 20 s; a handshake that
    /// begins later is wasted.
    pub queue_deadline: Duration,
    /// The deadline for the TLS and websocket handshakes together: four round trips on a bad link.
    pub handshake_deadline: Duration,
    /// The handshake deadline while all handshake slots are taken, so that a stalled handshake makes room. It
    /// covers four round trips at 300 ms with some loss, and the time that a slow machine needs for all slots:
    /// when a whole fleet reconnects, the slots are always taken, and every edge that is cut off tries again and
    /// adds to the load.
    pub contended_handshake_deadline: Duration,
    /// The deadline for `Hello`, which the edge sends without waiting for anything.
    pub hello_deadline: Duration,
    /// How long a write may take in addition to its size at 8 KiB/s.
    pub write_grace: Duration,
    /// How long sessions may take to end after `shutdown`.
    pub drain_deadline: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_secs(15),
            progress_interval: Duration::from_secs(1),
            max_connections: 20_000,
            max_connections_per_node: 4,
            max_handshakes: 512,
            max_waiting: 10_000,
            queue_deadline: Duration::from_secs(15),
            handshake_deadline: Duration::from_secs(10),
            contended_handshake_deadline: Duration::from_secs(3),
            hello_deadline: Duration::from_secs(10),
            write_grace: Duration::from_secs(10),
            drain_deadline: Duration::from_secs(5),
        }
    }
}
