//! A network with cables that can be cut: the cloud and each edge run in network namespaces, connected by veth pairs,
//! and packet filters drop packets without a sign to either end.
//!
//! ```text
//!            root namespace                    cloud                          edge
//!  kube-apiserver, registry, containerd    cloudcore-prepull ══ cable ══ edgecore-prepull
//!     127.0.0.1:port ◀────────── Passage ── 127.0.0.1:port                    │
//!     127.0.0.1:port ◀────────── Passage ─────────────────────── 127.0.0.1:port
//! ```
//!
//! All other servers are at their usual port on loopback: a [`passage::Passage`] forwards it to the root namespace.
//! Dropping packets needs only `iptables`. Delaying them would need `netem`, which some kernels lack;
//! [`Cable::slow_way`] delays connections instead.
//!
//! A [`Lan`] is another layout: the boxes of one site at a switch, behind one uplink. An [`EdgeWire`] leads to one edge, and
//! treats packets like one of the [`profiles`] of real links.

pub mod lan;
mod passage;
pub mod profiles;
pub(crate) mod space;
mod wire;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};

pub use lan::{Lan, Outlet, Uplink};
pub use passage::Passage;
pub use space::Space;
pub use wire::EdgeWire;

/// The number of uplinks that this process has made.
static UPLINKS: AtomicU32 = AtomicU32::new(0);
/// Uplinks that one process may have.
const UPLINKS_OF_ONE: u32 = 4;
/// Concurrent processes with uplinks, if their ids are consecutive: limited by the number of addresses.
const PROCESSES: u32 = 4096;

/// The namespace of the cloud, and the cables that lead to it.
pub struct Network {
    cloud: Space,
    cables: AtomicU8,
}

/// A connection between the cloud and one edge. It is removed when dropped.
pub struct Cable {
    edge: Space,
    cloud: Space,
    number: u8,
}

impl Network {
    /// Creates a network with a namespace for the cloud and no cables.
    pub async fn new() -> Result<Self> {
        Ok(Self { cloud: Space::new().await?, cables: AtomicU8::new(1) })
    }

    /// Namespace for the cloud.
    pub fn cloud_space(&self) -> &Space {
        &self.cloud
    }

    /// Addresses of the cloud for the edges of this many cables, for the cloud's certificate.
    pub fn cloud_addresses(cables: u8) -> Vec<String> {
        (1..=cables).map(|number| address(number, 1).to_string()).collect()
    }

    /// Adds a cable, with a namespace for an edge at its end.
    pub async fn add_cable(&self) -> Result<Cable> {
        let number = self.cables.fetch_add(1, Ordering::SeqCst);
        let edge = Space::new().await?;
        let device = device(number);
        let (ours, theirs) = (self.cloud.name(), edge.name());
        space::ip(&[
            "link", "add", &device, "netns", ours, "type", "veth", "peer", "name", &device, "netns", theirs,
        ])
        .await?;
        for (space, host) in [(&self.cloud, 1), (&edge, 2)] {
            let address = format!("{}/30", address(number, host));
            space.ip(&["address", "add", &address, "dev", &device]).await?;
            space.ip(&["link", "set", &device, "up"]).await?;
            // Each cable has its own chain, so that mending one does not mend another.
            space.iptables(&["-N", &device]).await?;
            space.iptables(&["-A", "INPUT", "-i", &device, "-j", &device]).await?;
        }
        Ok(Cable { edge, cloud: self.cloud.clone(), number })
    }
}

impl Network {
    /// Connects the namespace of the cloud with that of the API server, as a network of pods does. Returns the address of the
    /// cloud.
    pub async fn uplink(&self) -> Result<Ipv4Addr> {
        Ok(self.uplink_with_ends().await?[1])
    }

    /// Connects the two like [`Self::uplink`]. Returns the address on this side: one that is not of loopback, for a cloud that
    /// is not in the namespace.
    pub async fn uplink_here(&self) -> Result<Ipv4Addr> {
        Ok(self.uplink_with_ends().await?[0])
    }

    async fn uplink_with_ends(&self) -> Result<[Ipv4Addr; 2]> {
        let number = UPLINKS.fetch_add(1, Ordering::SeqCst) % UPLINKS_OF_ONE;
        let process = std::process::id();
        let (theirs, device) = (self.cloud.name(), format!("pu{process}-{number}"));
        // It's removed with the namespace at its other end.
        space::ip(&["link", "add", &device, "type", "veth", "peer", "name", "uplink", "netns", theirs])
            .await?;
        // Four addresses each, which no other process uses at the same time.
        let block = (process % PROCESSES) * UPLINKS_OF_ONE + number;
        let address =
            |host: u32| Ipv4Addr::from_bits(Ipv4Addr::new(198, 19, 0, 0).to_bits() + 4 * block + host);
        let (here, there) = (format!("{}/30", address(1)), format!("{}/30", address(2)));
        space::ip(&["address", "add", &here, "dev", &device]).await?;
        space::ip(&["link", "set", &device, "up"]).await?;
        self.cloud.ip(&["address", "add", &there, "dev", "uplink"]).await?;
        self.cloud.ip(&["link", "set", "uplink", "up"]).await?;
        Ok([address(1), address(2)])
    }
}

impl Cable {
    /// Namespace for the edge.
    pub fn edge_space(&self) -> &Space {
        &self.edge
    }

    /// Address of the cloud at its end of the cable.
    pub fn cloud_address(&self) -> Ipv4Addr {
        address(self.number, 1)
    }

    /// Drops everything that the edge sends from now on.
    pub async fn lose_from_edge(&self) -> Result<()> {
        self.drop_at(&self.cloud, &[]).await
    }

    /// Drops everything that the cloud sends from now on.
    pub async fn lose_from_cloud(&self) -> Result<()> {
        self.drop_at(&self.edge, &[]).await
    }

    /// Drops everything from now on.
    pub async fn cut(&self) -> Result<()> {
        self.lose_from_edge().await?;
        self.lose_from_cloud().await
    }

    /// Drops each packet, in both directions, with this probability from now on.
    pub async fn drop_randomly(&self, probability: f64) -> Result<()> {
        let probability = probability.to_string();
        let some = ["-m", "statistic", "--mode", "random", "--probability", &probability];
        self.drop_at(&self.cloud, &some).await?;
        self.drop_at(&self.edge, &some).await
    }

    /// Stops dropping packets, and resets their count.
    pub async fn mend(&self) -> Result<()> {
        let device = device(self.number);
        for space in [&self.cloud, &self.edge] {
            space.iptables(&["-F", &device]).await?;
        }
        Ok(())
    }

    /// Number of packets dropped since the cable was last mended.
    pub async fn dropped_packets(&self) -> Result<u64> {
        let device = device(self.number);
        let mut lost = 0;
        for space in [&self.cloud, &self.edge] {
            let rules = space.iptables(&["-L", &device, "-v", "-x", "-n"]).await?;
            for rule in rules.lines().filter(|line| line.contains("DROP")) {
                let packets = rule.split_whitespace().next().context("a rule without a counter")?;
                lost += packets.parse::<u64>()?;
            }
        }
        Ok(lost)
    }

    /// Opens a passage to a port of the cloud, at the cloud's end of the cable, with a delay in each direction. Returns
    /// the address for the edge to dial.
    pub fn slow_way(&self, port: u16, delay: Duration) -> Result<(SocketAddr, Passage)> {
        let to = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        // Any other port than the cloud's own.
        let from = SocketAddr::from((self.cloud_address(), port ^ 1));
        Ok((from, Passage::open((Some(&self.cloud), from), (Some(&self.cloud), to), delay)?))
    }

    async fn drop_at(&self, space: &Space, which: &[&str]) -> Result<()> {
        let device = device(self.number);
        space.iptables(&[&["-A", &device], which, &["-j", "DROP"]].concat()).await?;
        Ok(())
    }
}

fn device(number: u8) -> String {
    format!("cable{number}")
}

/// Address of one end of a cable. The range is for tests (RFC 2544; those of RFC 5737 are too small), and used only
/// inside the namespaces.
fn address(number: u8, host: u8) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, number, host)
}
