//! The network of a whole cluster.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use anyhow::{Result, ensure};

use crate::network::{Space, space};

/// Address of the control plane.
pub(crate) const CONTROL: Ipv4Addr = Ipv4Addr::new(10, 79, 0, 1);
/// Address of the load balancer for edges.
pub(crate) const BALANCER: Ipv4Addr = Ipv4Addr::new(10, 79, 0, 200);
/// Address for the Service `cloudcore-prepull` within the cluster, in place of a proxy for Services.
pub(crate) const CLOUD_SERVICE: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 200);
/// Address of the Service `kubernetes`, the first one of the range of Services.
const API_SERVICE: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
/// Port of the API server, that of its Service: pods reach it without a proxy for Services.
pub(crate) const API_PORT: u16 = 443;
/// Names for the certificate of the API server.
pub(crate) const API_NAMES: [&str; 3] = ["10.79.0.1", "10.0.0.1", "kubernetes.default.svc"];
const SWITCH: &str = "workers";
/// Last part of the address of the worker before the first one.
const BEFORE_FIRST: u8 = 10;
const MOST: u8 = 50;

/// The control room, with a switch for the workers. Removed with the last handle.
#[derive(Clone)]
pub(crate) struct Ground {
    control: Space,
    workers: Arc<AtomicU8>,
}

/// A worker's place at the switch.
pub(crate) struct Plot {
    /// Its network.
    pub(crate) space: Space,
    /// Address of the worker.
    pub(crate) address: Ipv4Addr,
    /// Addresses for its pods, `10.80.11.0/24`.
    pub(crate) pods: String,
}

impl Ground {
    /// Creates a control room without workers.
    pub(crate) async fn new() -> Result<Self> {
        let control = Space::new().await?;
        control.ip(&["link", "add", SWITCH, "type", "bridge"]).await?;
        for address in [CONTROL, BALANCER] {
            control.ip(&["address", "add", &format!("{address}/24"), "dev", SWITCH]).await?;
        }
        for address in [API_SERVICE, CLOUD_SERVICE] {
            control.ip(&["address", "add", &format!("{address}/32"), "dev", "lo"]).await?;
        }
        control.ip(&["link", "set", SWITCH, "up"]).await?;
        forwards(&control)?;
        Ok(Self { control, workers: Arc::default() })
    }

    /// Namespace of the control plane.
    pub(crate) fn control(&self) -> &Space {
        &self.control
    }

    /// Plugs a new worker into the switch.
    pub(crate) async fn plot(&self) -> Result<Plot> {
        let number = BEFORE_FIRST + self.workers.fetch_add(1, Ordering::SeqCst) + 1;
        ensure!(number <= MOST, "a cluster has at most {} workers", MOST - BEFORE_FIRST);
        let (space, port) = (Space::new().await?, format!("worker{number}"));
        let (control, worker) = (self.control.name(), space.name());
        space::ip(&[
            "link", "add", &port, "netns", control, "type", "veth", "peer", "name", "eth0", "netns", worker,
        ])
        .await?;
        let address = Ipv4Addr::new(10, 79, 0, number);
        space.ip(&["address", "add", &format!("{address}/24"), "dev", "eth0"]).await?;
        space.ip(&["link", "set", "eth0", "up"]).await?;
        space.ip(&["route", "add", "default", "via", &CONTROL.to_string()]).await?;
        self.control.ip(&["link", "set", &port, "master", SWITCH, "up"]).await?;
        let pods = format!("10.80.{number}.0/24");
        self.control.ip(&["route", "add", &pods, "via", &address.to_string()]).await?;
        forwards(&space)?;
        Ok(Plot { space, address, pods })
    }
}

/// Lets a namespace forward packets between its devices.
fn forwards(space: &Space) -> Result<()> {
    space.run(|| {
        // The packet filter must ignore frames between two workers. The file is missing if the kernel does so anyway.
        let _ = std::fs::write("/proc/sys/net/bridge/bridge-nf-call-iptables", "0");
        std::fs::write("/proc/sys/net/ipv4/ip_forward", "1")
    })
}
