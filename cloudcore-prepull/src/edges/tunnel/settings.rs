//! Bounds and timing of the tunnel's cloud side.

use std::time::Duration;

use crate::edges::door::Limits;

/// Bounds and timing of the tunnel's cloud side.
#[derive(Clone, Debug)]
pub struct ListenerSettings {
    /// The interval of pings in both directions; `--heartbeat`.
    pub heartbeat: Duration,
    /// Whether certificates with the subject of release 0.1 are accepted; `--accept-system-nodes`.
    pub accept_system_nodes: bool,
    /// The shortest time between two `Progress` messages about one task: people don't read faster.
    pub progress_interval: Duration,
    /// The shortest time between two reports of a node's disk and runtime. It sends one only after a change: at most
    /// 170 a second from 10,000 nodes that all pull.
    pub state_interval: Duration,
    /// The most sessions at a time, over all nodes. An idle session takes up to 25 KiB. Edges beyond the limit are
    /// sent away for some time.
    pub max_connections: usize,
    /// The most connections of one node at a time: its session, the one that replaces it, and some that are
    /// closing.
    pub max_connections_per_node: usize,
    /// The most connections with a silent client, before its ClientHello or in the middle of a handshake. Each takes
    /// up to 30 KiB. Those that come beyond take the place of the oldest, of the address that has the most; at 2,000 a
    /// second from one address that is two seconds old, and an edge speaks at once.
    pub max_silent: usize,
    /// The most TLS and websocket handshakes at work. With more than the cores can complete before the deadline, all
    /// of them would fail. Together with the patience it limits what clients cost that send a ClientHello and nothing
    /// more, to some 500 signatures a second.
    pub max_handshakes: usize,
    /// The most connections that wait for their handshake to begin: a whole fleet behind one load balancer. Each is a
    /// socket, a task, and a ClientHello, some 8 KiB.
    pub max_waiting: usize,
    /// The deadline for the ClientHello, which an edge sends as soon as it is connected: that, and two losses.
    pub client_hello_deadline: Duration,
    /// How long a connection may wait for its handshake to begin. An edge gives up after 20 s; a handshake that
    /// begins later is wasted.
    pub queue_deadline: Duration,
    /// The deadline for the TLS and websocket handshakes together: four round trips on a bad link.
    pub handshake_deadline: Duration,
    /// How long a client may be silent in its handshake, while others wait, until it counts as a silent one: more than
    /// most round trips take. On a slower link it goes on when it speaks, and only its slot is free for others.
    pub handshake_patience: Duration,
    /// How long a handshake may take, while others wait, until it counts as a silent one although its client sends
    /// something now and then. It covers the time that a slow machine needs for all slots: when a whole fleet
    /// reconnects they are always taken, and it must not take on even more at a time.
    pub handshake_turn: Duration,
    /// The deadline for `Hello`, which the edge sends without waiting for anything.
    pub hello_deadline: Duration,
    /// How long a write may take in addition to its size at 8 KiB/s.
    pub write_grace: Duration,
    /// How long sessions may take to end after `shutdown`.
    pub drain_deadline: Duration,
}

impl ListenerSettings {
    pub(super) fn door_limits(&self) -> Limits {
        Limits {
            silent: self.max_silent,
            waiting: self.max_waiting,
            slots: self.max_handshakes,
            hello_deadline: self.client_hello_deadline.min(self.handshake_deadline),
            waiting_deadline: self.queue_deadline,
            patience: self.handshake_patience,
            turn: self.handshake_turn,
            deadline: self.handshake_deadline,
        }
    }
}

impl Default for ListenerSettings {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_secs(15),
            accept_system_nodes: true,
            progress_interval: Duration::from_secs(1),
            state_interval: Duration::from_secs(60),
            max_connections: 20_000,
            max_connections_per_node: 4,
            max_silent: 4096,
            max_handshakes: 128,
            max_waiting: 10_000,
            queue_deadline: Duration::from_secs(15),
            handshake_deadline: Duration::from_secs(10),
            client_hello_deadline: Duration::from_secs(5),
            handshake_patience: Duration::from_millis(200),
            handshake_turn: Duration::from_secs(3),
            hello_deadline: Duration::from_secs(10),
            write_grace: Duration::from_secs(10),
            drain_deadline: Duration::from_secs(5),
        }
    }
}
