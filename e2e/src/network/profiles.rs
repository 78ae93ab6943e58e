//! Links in the field, each with its source. docs/runtimes.md has the results for each.

use std::time::Duration;

/// The effect of a link on packets.
#[derive(Clone, Copy, Debug)]
pub struct Profile {
    /// Its name in tests and docs.
    pub name: &'static str,
    /// Towards the edge.
    pub down: LinkDirection,
    /// From the edge.
    pub up: LinkDirection,
    /// Lengths of up and down times, alternating.
    pub outages: Option<(Duration, Duration)>,
    /// Packets above this many bytes are dropped without an ICMP message.
    pub largest_packet: Option<usize>,
    /// Whether the kernel at the far end probes for black holes, as in large content networks. By default Linux
    /// doesn't.
    pub has_probing_far_end: bool,
    /// The MTU of the edge's interface.
    pub edge_mtu: u16,
    /// Whether the link has only IPv6.
    pub is_ipv6: bool,
}

/// One direction of a link.
#[derive(Clone, Copy, Debug)]
pub struct LinkDirection {
    /// Bits a second.
    pub rate: u64,
    /// Time from one end to the other.
    pub delay: Duration,
    /// Largest random addition to the delay. Packets keep their order.
    pub jitter: Duration,
    /// Its losses.
    pub loss: Bursts,
    /// Longest time in the queue. A packet that would wait longer is lost.
    pub queue: Duration,
}

/// Losses in bursts, by the model of Gilbert (1960) and Elliott (1963), like `loss gemodel` of `tc-netem`.
#[derive(Clone, Copy, Debug)]
pub struct Bursts {
    /// Probability with each packet that a burst begins.
    pub enter: f64,
    /// Probability with each packet that it ends.
    pub leave: f64,
    /// Probability that a packet of a burst is lost.
    pub within: f64,
}

const NO_LOSS: Bursts = Bursts { enter: 0.0, leave: 1.0, within: 0.0 };

const fn way(kbits: u64, delay: u64, jitter: u64, loss: Bursts) -> LinkDirection {
    let [delay, jitter, queue] = [delay, jitter, 300];
    LinkDirection {
        rate: kbits * 1000,
        delay: Duration::from_millis(delay),
        jitter: Duration::from_millis(jitter),
        loss,
        queue: Duration::from_millis(queue),
    }
}

const fn link(name: &'static str, down: LinkDirection, up: LinkDirection) -> Profile {
    Profile {
        name,
        down,
        up,
        outages: None,
        largest_packet: None,
        has_probing_far_end: false,
        edge_mtu: 1500,
        is_ipv6: false,
    }
}

/// Wi-Fi at the edge of its range: 4 % of the packets are lost, five at a time. Parameters within those that Hasslinger and
/// Hohlfeld fit to real traffic ("The Gilbert-Elliott Model for Packet Loss in Real Time Services on the Internet", 2008).
pub const BURSTS: Profile = {
    let loss = Bursts { enter: 0.01, leave: 0.2, within: 0.8 };
    link("loss in bursts", way(8_000, 15, 0, loss), way(8_000, 15, 0, loss))
};

/// A mobile network with deep queues that fill and empty: Jiang and others measured round trips from 100 ms to more
/// than a second ("Tackling Bufferbloat in 3G/4G Networks", IMC 2012).
pub const JITTER: Profile =
    link("delay and jitter", way(4_000, 100, 300, NO_LOSS), way(4_000, 100, 300, NO_LOSS));

/// ADSL over a long line: some Mbit/s down, and so little up that acknowledgements fill it (RFC 3449, section 2).
pub const ASYMMETRIC: Profile = link("asymmetric", way(6_000, 20, 0, NO_LOSS), way(64, 20, 0, NO_LOSS));

/// A B channel of ISDN (ITU-T I.412), a leased line of a plant, or a mobile plan that has used up its volume.
pub const KBITS_64: Profile = {
    let way = LinkDirection { queue: Duration::from_secs(2), ..way(64, 60, 0, NO_LOSS) };
    link("64 kbit/s", way, way)
};

/// A geostationary satellite: up and down again are 240 to 280 ms each way (RFC 2488, section 2), and the modem adds some.
pub const SATELLITE: Profile = {
    let loss = Bursts { enter: 0.002, leave: 0.5, within: 1.0 };
    link("GEO satellite", way(2_000, 300, 10, loss), way(256, 300, 10, NO_LOSS))
};

/// LTE at the edge of a cell: the requirement of 3GPP TR 36.913, 0.07 bit/s/Hz down and 0.04 up, on 10 MHz.
pub const LTE_CELL_EDGE: Profile = {
    let loss = Bursts { enter: 0.01, leave: 0.4, within: 0.7 };
    let queue = Duration::from_secs(1);
    let [down, up] = [way(700, 40, 80, loss), way(400, 40, 80, loss)];
    link("LTE at the cell edge", LinkDirection { queue, ..down }, LinkDirection { queue, ..up })
};

/// A link that goes away for 2 s in every 6: a loose plug, a modem that reconnects. Ours; there's no standard for it.
pub const FLAPPING: Profile = Profile {
    outages: Some((Duration::from_secs(4), Duration::from_secs(2))),
    ..link("flapping", way(2_000, 20, 0, NO_LOSS), way(2_000, 20, 0, NO_LOSS))
};

/// A tunnel in the path carries 1280 bytes, both ends assume 1500, and a firewall drops the ICMP messages (RFC 2923,
/// section 2.1). The far end probes, as RFC 4821 requires.
pub const BLACK_HOLE: Profile = Profile {
    largest_packet: Some(1280),
    has_probing_far_end: true,
    ..link("MTU black hole", way(8_000, 15, 0, NO_LOSS), way(8_000, 15, 0, NO_LOSS))
};

/// The same with a server that doesn't probe, the default of Linux. No large packet arrives, neither for the tunnel nor
/// for a registry, until the operator lowers the MTU of the edge's interface, as here.
pub const BLACK_HOLE_NO_PROBING: Profile =
    Profile { name: "MTU black hole, no probing", has_probing_far_end: false, edge_mtu: 1280, ..BLACK_HOLE };

/// IPv6 and no IPv4 at all (RFC 8925), at its smallest MTU.
pub const IPV6_ONLY: Profile =
    Profile { is_ipv6: true, ..link("IPv6 only", way(8_000, 15, 0, NO_LOSS), way(8_000, 15, 0, NO_LOSS)) };

/// A good link. A test may add a captive portal (RFC 8952).
pub const GUEST_WIFI: Profile =
    link("captive portal", way(8_000, 15, 0, NO_LOSS), way(8_000, 15, 0, NO_LOSS));
