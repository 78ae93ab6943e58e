//! A wire between two namespaces that treats each packet like a real link: see [`Profile`].
//!
//! ```text
//!        far end (10.75.0.1, fd75::1)                            edge (10.75.0.2, fd75::2)
//!  doors ── TUN ── packets ─▶ lost? ─▶ queue (rate) ─▶ delay, jitter ─▶ packets ── TUN ── agent
//!    │
//!    └─ Passage ─▶ 127.0.0.1:port of this process's namespace
//! ```
//!
//! Many kernels lack `netem`, so the packets pass through this process. TCP sees real round trips, losses and queues.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::{CancellationToken, DropGuard};
use tun_tap::{Iface, Mode};

use super::profiles::{LinkDirection, Profile};
use super::{Passage, Space};
use crate::background;
use crate::chance::Chance;

/// The device at both ends.
const DEVICE: &str = "wire";
/// The MTU of Ethernet, which the far end assumes for the wire.
const MTU: u16 = 1500;
const FAR: (Ipv4Addr, Ipv6Addr) = (Ipv4Addr::new(10, 75, 0, 1), Ipv6Addr::new(0xfd75, 0, 0, 0, 0, 0, 0, 1));
const NEAR: (Ipv4Addr, Ipv6Addr) = (Ipv4Addr::new(10, 75, 0, 2), Ipv6Addr::new(0xfd75, 0, 0, 0, 0, 0, 0, 2));
/// Most packets in this process. The queue of a profile is smaller.
const PACKETS: usize = 4096;

/// A wire with an edge at its end. It's removed when dropped.
pub struct EdgeWire {
    edge: Space,
    far: Space,
    is_ipv6: bool,
    doors: Mutex<Vec<Passage>>,
    #[expect(dead_code, reason = "held for its drop")]
    stop: DropGuard,
}

impl EdgeWire {
    /// Lays a wire of this profile.
    pub async fn new(profile: &Profile, seed: u64) -> Result<Self> {
        let (far, edge) = (Space::new().await?, Space::new().await?);
        let stop = CancellationToken::new();
        let mut tuns = Vec::new();
        for (space, (v4, v6), mtu) in [(&far, FAR, MTU), (&edge, NEAR, profile.edge_mtu)] {
            tuns.push(Arc::new(Tun::new(space)?));
            if profile.is_ipv6 {
                space.ip(&["address", "add", &format!("{v6}/64"), "dev", DEVICE, "nodad"]).await?;
            } else {
                space.ip(&["address", "add", &format!("{v4}/30"), "dev", DEVICE]).await?;
            }
            space.ip(&["link", "set", DEVICE, "mtu", &mtu.to_string(), "up"]).await?;
        }
        if profile.has_probing_far_end {
            far.run(|| std::fs::write("/proc/sys/net/ipv4/tcp_mtu_probing", "1"))?;
        }
        let [far_tun, near_tun] = &tuns[..] else { anyhow::bail!("a wire has two ends") };
        let runtime = background::runtime()?;
        for (number, (from, to, way)) in
            (0..).zip([(far_tun, near_tun, profile.down), (near_tun, far_tun, profile.up)])
        {
            let carrier = Carrier::new(profile, way, seed.wrapping_add(number));
            let carrying = carry_packets(Arc::clone(from), Arc::clone(to), carrier);
            runtime.spawn(stop.clone().run_until_cancelled_owned(carrying));
        }
        let stop = stop.drop_guard();
        Ok(Self { edge, far, is_ipv6: profile.is_ipv6, doors: Mutex::default(), stop })
    }

    /// Addresses of the far end for edges, for the certificate of the cloud.
    pub fn far_addresses() -> [String; 2] {
        [FAR.0.to_string(), FAR.1.to_string()]
    }

    /// Namespace of the edge.
    pub fn edge_space(&self) -> &Space {
        &self.edge
    }

    /// Lets the edge reach a server on loopback. Returns the address for the edge.
    pub fn open_door(&self, server: SocketAddr) -> Result<SocketAddr> {
        let host = if self.is_ipv6 { IpAddr::V6(FAR.1) } else { IpAddr::V4(FAR.0) };
        let door = SocketAddr::from((host, server.port()));
        let passage = Passage::open((Some(&self.far), door), (None, server), Duration::ZERO)?;
        self.doors.lock().unwrap_or_else(PoisonError::into_inner).push(passage);
        Ok(door)
    }
}

/// The device of one end.
struct Tun(AsyncFd<Iface>);

impl Tun {
    fn new(space: &Space) -> Result<Self> {
        let device = space.run(|| Iface::without_packet_info(DEVICE, Mode::Tun));
        let device = device.context("no TUN device: /dev/net/tun is missing, or not ours to open")?;
        device.set_non_blocking()?;
        let _guard = background::runtime()?.enter();
        #[expect(
            deprecated,
            reason = "the device implements AsRawFd only; it keeps its file open for as long as it lives"
        )]
        Ok(Self(AsyncFd::new(device)?))
    }

    async fn receive(&self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.0.async_io(Interest::READABLE, |device| device.recv(buffer)).await
    }

    async fn send(&self, packet: &[u8]) -> std::io::Result<usize> {
        self.0.async_io(Interest::WRITABLE, |device| device.send(packet)).await
    }
}

/// Decides about each packet of one direction.
struct Carrier {
    way: LinkDirection,
    largest: usize,
    outages: Option<(Duration, Duration)>,
    begun: Instant,
    chance: Chance,
    is_in_burst: bool,
    /// Departure time of the last packet.
    free_at: Instant,
    /// Arrival time of the last packet: a link reorders nothing.
    arrives_at: Instant,
}

impl Carrier {
    fn new(profile: &Profile, way: LinkDirection, seed: u64) -> Self {
        let now = Instant::now();
        Self {
            way,
            largest: profile.largest_packet.unwrap_or(usize::MAX),
            outages: profile.outages,
            begun: now,
            chance: Chance::new(seed, 0),
            is_in_burst: false,
            free_at: now,
            arrives_at: now,
        }
    }

    /// Arrival time of a packet of this size that's sent now. `None` if it's lost.
    fn arrival(&mut self, size: usize, now: Instant) -> Option<Instant> {
        let is_lost = self.is_lost();
        if is_lost || size > self.largest || self.is_out(now) {
            return None;
        }
        let leaves = self.free_at.max(now);
        if leaves - now > self.way.queue {
            return None;
        }
        let bits = u64::try_from(size).unwrap_or(u64::MAX).saturating_mul(8);
        self.free_at = leaves + Duration::from_nanos(bits.saturating_mul(1_000_000_000) / self.way.rate);
        let jitter = self.way.jitter.mul_f64(self.chance.part());
        self.arrives_at = self.arrives_at.max(self.free_at + self.way.delay + jitter);
        Some(self.arrives_at)
    }

    /// The model of Gilbert and Elliott: the link switches randomly between two states.
    fn is_lost(&mut self) -> bool {
        let loss = self.way.loss;
        let changes = if self.is_in_burst { loss.leave } else { loss.enter };
        if self.chance.happens(changes) {
            self.is_in_burst = !self.is_in_burst;
        }
        self.is_in_burst && self.chance.happens(loss.within)
    }

    fn is_out(&self, now: Instant) -> bool {
        self.outages.is_some_and(|(up, down)| {
            let since = (now - self.begun).as_secs_f64() % (up + down).as_secs_f64();
            since >= up.as_secs_f64()
        })
    }
}

async fn carry_packets(from: Arc<Tun>, to: Arc<Tun>, mut carrier: Carrier) {
    let (sender, mut packets) = mpsc::channel::<(Instant, Vec<u8>)>(PACKETS);
    let receive = async {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(size) = from.receive(&mut buffer).await {
            if let Some(arrival) = carrier.arrival(size, Instant::now()) {
                // A packet without room is lost.
                let _ = sender.try_send((arrival, buffer[..size].to_vec()));
            }
        }
    };
    let deliver = async {
        while let Some((arrival, packet)) = packets.recv().await {
            sleep_until(arrival).await;
            // The kernel rejects malformed packets, like a network card.
            let _ = to.send(&packet).await;
        }
    };
    tokio::join!(receive, deliver);
}

#[cfg(test)]
mod tests {
    use super::super::profiles::{BLACK_HOLE, BURSTS, FLAPPING, SATELLITE};
    use super::*;

    #[test]
    fn bursts_follow_their_model() {
        let mut carrier = Carrier::new(&BURSTS, BURSTS.down, 1);
        let packets = 100_000;
        let part_of = |count: usize| f64::from(u32::try_from(count).unwrap_or(u32::MAX)) / f64::from(packets);
        let lost: Vec<bool> = (0..packets).map(|_| carrier.is_lost()).collect();
        let part = part_of(lost.iter().filter(|lost| **lost).count());
        let loss = BURSTS.down.loss;
        let expected = loss.enter / (loss.enter + loss.leave) * loss.within;
        assert!((part - expected).abs() < expected / 5.0, "{part} of {expected}");
        let pairs = part_of(lost.windows(2).filter(|pair| pair[0] && pair[1]).count());
        assert!(pairs > 3.0 * part * part, "no bursts");
    }

    #[test]
    fn packets_wait_arrive_and_vanish() {
        let mut carrier =
            Carrier::new(&SATELLITE, LinkDirection { loss: BLACK_HOLE.down.loss, ..SATELLITE.down }, 1);
        let now = carrier.begun;
        let first = carrier.arrival(1500, now).map(|at| at - now);
        assert!(first.is_some_and(|after| after >= SATELLITE.down.delay), "{first:?}");
        let sent = (0..100_000).filter(|_| carrier.arrival(1500, now).is_some()).count() as u64;
        let queue =
            SATELLITE.down.rate / 8 * u64::try_from(SATELLITE.down.queue.as_millis()).unwrap_or(0) / 1000;
        assert!(sent * 1500 <= queue + 3000, "{sent} packets");

        let mut hole = Carrier::new(&BLACK_HOLE, BLACK_HOLE.down, 1);
        assert!(hole.arrival(1500, now).is_none() && hole.arrival(1000, now).is_some());
        let (up, down) = FLAPPING.outages.unwrap_or_default();
        let flapping = Carrier::new(&FLAPPING, FLAPPING.down, 1);
        let at = |after: Duration| flapping.is_out(flapping.begun + after);
        assert_eq!((at(Duration::ZERO), at(up + down / 2), at(up + down + up / 2)), (false, true, false));
    }
}
