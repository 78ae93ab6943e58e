//! A network of our own, whose cables can be cut: the cloud and each edge in a network namespace, a veth pair
//! between them, and packet filters that let packets vanish, which tells neither end anything.
//!
//! ```text
//!            root namespace                    cloud                          edge
//!  kube-apiserver, registry, containerd    cloudcore-prepull ══ cable ══ edgecore-prepull
//!     127.0.0.1:port ◀────────── Passage ── 127.0.0.1:port                    │
//!     127.0.0.1:port ◀────────── Passage ─────────────────────── 127.0.0.1:port
//! ```
//!
//! Whatever else a program needs it finds where it would be without all this, at its port on loopback: a
//! [`passage::Passage`] carries it over. Kernels without `netem` (ours is one) cannot delay packets; losing them needs
//! only `iptables`. A delay is made by [`Cable::slow_way`].

mod passage;
mod space;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};

pub use passage::Passage;
pub use space::Space;

/// The cloud's namespace, and cables that lead there.
pub struct Network {
    cloud: Space,
    cables: AtomicU8,
}

/// From the cloud to one edge. Dropped, it is cut for good.
pub struct Cable {
    edge: Space,
    cloud: Space,
    number: u8,
}

impl Network {
    /// With nobody in it but the cloud.
    pub async fn new() -> Result<Self> {
        Ok(Self { cloud: Space::new().await?, cables: AtomicU8::new(1) })
    }

    /// Where the cloud is to run.
    pub fn cloud(&self) -> &Space {
        &self.cloud
    }

    /// The addresses under which edges will reach the cloud, for its certificate.
    pub fn cloud_addresses(cables: u8) -> Vec<String> {
        (1..=cables).map(|number| address(number, 1).to_string()).collect()
    }

    /// One more edge.
    pub async fn cable(&self) -> Result<Cable> {
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
            // A chain of the cable's own, so that mending one mends no other.
            space.iptables(&["-N", &device]).await?;
            space.iptables(&["-A", "INPUT", "-i", &device, "-j", &device]).await?;
        }
        Ok(Cable { edge, cloud: self.cloud.clone(), number })
    }
}

impl Cable {
    /// Where the edge is to run.
    pub fn edge(&self) -> &Space {
        &self.edge
    }

    /// The cloud's address at its end.
    pub fn cloud_address(&self) -> Ipv4Addr {
        address(self.number, 1)
    }

    /// From now on what the edge sends vanishes.
    pub async fn lose_from_edge(&self) -> Result<()> {
        self.drop_at(&self.cloud, &[]).await
    }

    /// From now on what the cloud sends vanishes.
    pub async fn lose_from_cloud(&self) -> Result<()> {
        self.drop_at(&self.edge, &[]).await
    }

    /// From now on nothing gets through.
    pub async fn cut(&self) -> Result<()> {
        self.lose_from_edge().await?;
        self.lose_from_cloud().await
    }

    /// From now on each packet, either way, is lost with this probability.
    pub async fn lose(&self, probability: f64) -> Result<()> {
        let probability = probability.to_string();
        let some = ["-m", "statistic", "--mode", "random", "--probability", &probability];
        self.drop_at(&self.cloud, &some).await?;
        self.drop_at(&self.edge, &some).await
    }

    /// All is well again.
    pub async fn mend(&self) -> Result<()> {
        let device = device(self.number);
        for space in [&self.cloud, &self.edge] {
            space.iptables(&["-F", &device]).await?;
        }
        Ok(())
    }

    /// How many packets were lost so far since it was last mended.
    pub async fn lost(&self) -> Result<u64> {
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

    /// A way to a port of the cloud that takes this much longer, each way, behind the cable: what it returns is for
    /// the edge to dial.
    pub fn slow_way(&self, port: u16, delay: Duration) -> Result<(SocketAddr, Passage)> {
        let to = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        // Any port but the cloud's own.
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

/// For documentation and tests (RFC 5737 has too few of them; RFC 2544 has these), and only inside the namespaces.
fn address(number: u8, host: u8) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, number, host)
}
