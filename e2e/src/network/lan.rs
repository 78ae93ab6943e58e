//! The network of one site: boxes at a switch, behind one thin uplink.
//!
//! ```text
//!      outside                     router of the site                       boxes
//!  doors: registry, cloud  ══ uplink ══ forwards ── switch (office) ──┬── edge-1   10.77.0.11
//!  10.76.0.1:port             rate         │                          └── edge-2   10.77.0.12
//!       │                     loss         └────── switch (guests) ────── edge-3   10.78.0.13
//!    Passage (delay)
//!       ▼
//!  127.0.0.1:port of this process's namespace
//! ```
//!
//! Each name is a network namespace, each line a veth pair; a switch is a bridge. The traffic of the uplink is counted
//! by `tc`, with the headers of every packet. The kernel's token bucket limits the rate and `iptables` drops packets.
//! Many kernels lack `netem` for delays, so the doors delay their traffic instead: each request waits, but TCP on the
//! uplink has the short round trip of this machine.

mod uplink;

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Result, ensure};

use super::{Passage, Space, space};
pub use uplink::Uplink;

/// Address of the doors for the site.
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(10, 76, 0, 1);
/// Address of the router on the uplink.
const ROUTER: Ipv4Addr = Ipv4Addr::new(10, 76, 0, 2);
/// The device of the uplink, at both of its ends.
const DEVICE: &str = "uplink";
/// The device of a box.
const BOX_DEVICE: &str = "lan";
/// Limit for a connection attempt that may fail: long enough for one lost packet.
const CONNECT_LIMIT: Duration = Duration::from_millis(1500);
/// Boxes of a site: the last part of an address.
const MOST: u8 = 200;
/// Last part of the address of the box before the first one. The router has 1.
const BEFORE_FIRST: u8 = 10;

/// One of the two networks of a site. The router forwards nothing from one to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vlan {
    /// The network of the boxes.
    Office,
    /// The network of a box in a wrong port.
    Guests,
}

impl Vlan {
    const ALL: [Self; 2] = [Self::Office, Self::Guests];

    /// Name of the bridge.
    fn switch(self) -> &'static str {
        match self {
            Self::Office => "office",
            Self::Guests => "guests",
        }
    }

    fn address(self, host: u8) -> Ipv4Addr {
        match self {
            Self::Office => Ipv4Addr::new(10, 77, 0, host),
            Self::Guests => Ipv4Addr::new(10, 78, 0, host),
        }
    }
}

/// The network of a site. It is removed when dropped, once its boxes are.
pub struct Lan {
    outside: Space,
    router: Space,
    uplink: Uplink,
    boxes: AtomicU8,
    doors: Mutex<Vec<Passage>>,
}

/// The place of one box at the switch.
pub struct Outlet {
    space: Space,
    router: Space,
    /// Device at the switch.
    port: String,
    vlan: Vlan,
    address: Ipv4Addr,
}

impl Lan {
    /// Creates a site without boxes behind an uplink.
    pub async fn new(uplink: Uplink) -> Result<Self> {
        let (outside, router) = (Space::new().await?, Space::new().await?);
        for space in [&outside, &router] {
            // Packets that a device sends by itself when it comes up would count. The files are missing if the kernel
            // has no IPv6.
            space.run(|| {
                for of in ["all", "default"] {
                    let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{of}/disable_ipv6"), "1");
                }
                Ok(())
            })?;
        }
        let (there, here) = (outside.name(), router.name());
        space::ip(&[
            "link", "add", DEVICE, "netns", there, "type", "veth", "peer", "name", DEVICE, "netns", here,
        ])
        .await?;
        for (space, address) in [(&outside, OUTSIDE), (&router, ROUTER)] {
            space.ip(&["address", "add", &format!("{address}/30"), "dev", DEVICE]).await?;
            space.ip(&["link", "set", DEVICE, "up"]).await?;
        }
        for vlan in Vlan::ALL {
            let switch = vlan.switch();
            router.ip(&["link", "add", switch, "type", "bridge"]).await?;
            router.ip(&["address", "add", &format!("{}/24", vlan.address(1)), "dev", switch]).await?;
            router.ip(&["link", "set", switch, "up"]).await?;
            let net = format!("{}/24", vlan.address(0));
            outside.ip(&["route", "add", &net, "via", &ROUTER.to_string()]).await?;
        }
        router.run(|| {
            // The packet filter must ignore frames between two boxes. The file is missing if the kernel does so anyway.
            let _ = std::fs::write("/proc/sys/net/bridge/bridge-nf-call-iptables", "0");
            std::fs::write("/proc/sys/net/ipv4/ip_forward", "1")
        })?;
        for (from, to) in [(Vlan::Office, Vlan::Guests), (Vlan::Guests, Vlan::Office)] {
            let rule = ["-A", "FORWARD", "-i", from.switch(), "-o", to.switch(), "-j", "DROP"];
            router.iptables(&rule).await?;
        }
        uplink::shape(&uplink, &outside, &router).await?;
        Ok(Self { outside, router, uplink, boxes: AtomicU8::new(0), doors: Mutex::default() })
    }

    /// Address of the outside for a site, for the certificate of the cloud.
    pub fn outside() -> Ipv4Addr {
        OUTSIDE
    }

    /// Lets the site reach a server on loopback, over the uplink. Returns the address for the boxes.
    pub fn open_door(&self, server: SocketAddr) -> Result<SocketAddr> {
        let door = SocketAddr::from((OUTSIDE, server.port()));
        let passage = Passage::open((Some(&self.outside), door), (None, server), self.uplink.delay)?;
        self.doors.lock().unwrap_or_else(PoisonError::into_inner).push(passage);
        Ok(door)
    }

    /// Plugs a new box into the switch of the office.
    pub async fn add_outlet(&self) -> Result<Outlet> {
        self.outlet_in(Vlan::Office).await
    }

    /// Plugs a new box into one of the switches.
    pub async fn outlet_in(&self, vlan: Vlan) -> Result<Outlet> {
        let number = self.boxes.fetch_add(1, Ordering::SeqCst) + 1;
        ensure!(number <= MOST, "a site has at most {MOST} boxes");
        let space = Space::new().await?;
        let port = format!("box{number}");
        space::ip(&[
            "link",
            "add",
            &port,
            "netns",
            self.router.name(),
            "type",
            "veth",
            "peer",
            "name",
            BOX_DEVICE,
            "netns",
            space.name(),
        ])
        .await?;
        let address = vlan.address(BEFORE_FIRST + number);
        space.ip(&["address", "add", &format!("{address}/24"), "dev", BOX_DEVICE]).await?;
        space.ip(&["link", "set", BOX_DEVICE, "up"]).await?;
        space.ip(&["route", "add", "default", "via", &vlan.address(1).to_string()]).await?;
        let outlet = Outlet { space, router: self.router.clone(), port, vlan, address };
        outlet.plug().await?;
        outlet.router.ip(&["link", "set", &outlet.port, "up"]).await?;
        Ok(outlet)
    }

    /// Bytes that the uplink has carried to the site, with the headers of every packet.
    pub async fn carried_down(&self) -> Result<u64> {
        uplink::sent_bytes(&self.outside).await
    }

    /// Bytes that the uplink has carried from the site.
    pub async fn carried_up(&self) -> Result<u64> {
        uplink::sent_bytes(&self.router).await
    }

    /// Drops everything on the uplink from now on, without a sign to either end.
    pub async fn cut(&self) -> Result<()> {
        self.change_cut_rules("-I").await
    }

    /// Ends [`Self::cut`].
    pub async fn mend(&self) -> Result<()> {
        self.change_cut_rules("-D").await
    }

    /// Adds or removes the rules of a cut. They come before the bucket, so dropped packets aren't counted.
    async fn change_cut_rules(&self, how: &str) -> Result<()> {
        for (chain, direction) in [("OUTPUT", "-o"), ("INPUT", "-i")] {
            self.outside.iptables(&[how, chain, direction, DEVICE, "-j", "DROP"]).await?;
        }
        Ok(())
    }
}

impl Outlet {
    /// Namespace for the box.
    pub fn space(&self) -> &Space {
        &self.space
    }

    /// Address of the box.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Tries to connect to an address from the box.
    pub fn try_connect(&self, addr: SocketAddr) -> Result<()> {
        self.open(addr).map(drop)
    }

    /// Opens a connection as the box does.
    pub fn open(&self, addr: SocketAddr) -> Result<TcpStream> {
        self.space.run(move || TcpStream::connect_timeout(&addr, CONNECT_LIMIT))
    }

    /// Listens in the box.
    pub fn listen(&self, port: u16) -> Result<TcpListener> {
        let addr = SocketAddr::from((self.address, port));
        self.space.run(move || TcpListener::bind(addr))
    }

    /// Pulls the plug: the box reaches no other machine, and its own device stays up.
    pub async fn unplug(&self) -> Result<()> {
        self.router.ip(&["link", "set", &self.port, "nomaster"]).await
    }

    /// Ends [`Self::unplug`].
    pub async fn plug(&self) -> Result<()> {
        self.router.ip(&["link", "set", &self.port, "master", self.vlan.switch()]).await
    }

    /// Lets the router forward nothing of the box: it reaches its neighbours, and nothing beyond the uplink.
    pub async fn fence(&self) -> Result<()> {
        self.router.iptables(&["-I", "FORWARD", "-s", &self.address.to_string(), "-j", "DROP"]).await?;
        Ok(())
    }

    /// Isolates the box from other isolated boxes, like an access point with client isolation, or ends that. It always
    /// reaches the uplink.
    pub async fn isolate(&self, isolated: bool) -> Result<()> {
        let isolated = if isolated { "on" } else { "off" };
        self.router.ip(&["link", "set", &self.port, "type", "bridge_slave", "isolated", isolated]).await
    }
}
