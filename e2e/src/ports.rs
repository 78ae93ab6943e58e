//! Reserved ports, which a server keeps across its restarts.

use std::hash::{BuildHasher, RandomState};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};

use anyhow::{Result, bail};

/// Lowest port to reserve.
const FIRST: u16 = 15_000;
/// End of the ports to reserve, unless the kernel's ephemeral range begins before it.
const END: u16 = 32_768;
/// Ports to try before giving up: this many failures in a row have another cause.
const TRIES: usize = 1000;

/// A TCP port of 127.0.0.1, reserved as long as this value lives, whether something listens on it or not.
///
/// Port 0 wouldn't do: between two starts of a server the kernel may give the number to another process, most likely to
/// an outgoing connection. Reserved ports are below the kernel's ephemeral range, and an abstract socket with the
/// number in its name keeps other test processes off; the kernel removes it with the process.
#[derive(Debug)]
pub struct Port {
    number: u16,
    _mark: UnixListener,
}

impl Port {
    /// Reserves a free port.
    pub fn reserve() -> Result<Self> {
        let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
        let low = range
            .split_whitespace()
            .next()
            .and_then(|low| low.parse().ok())
            .filter(|low| *low > FIRST + 1000);
        let span = u64::from(low.unwrap_or(END) - FIRST);
        for attempt in 0..TRIES {
            // A hash with a random key is the standard library's source of random numbers.
            let offset = u16::try_from(RandomState::new().hash_one(attempt) % span)?;
            if let Some(port) = Self::try_reserve(FIRST + offset) {
                return Ok(port);
            }
        }
        bail!("no free port between {FIRST} and {}", u64::from(FIRST) + span);
    }

    fn try_reserve(number: u16) -> Option<Self> {
        let mark = UnixAddr::from_abstract_name(format!("prepull-e2e-port-{number}")).ok()?;
        let mark = UnixListener::bind_addr(&mark).ok()?;
        TcpListener::bind((Ipv4Addr::LOCALHOST, number)).ok()?;
        Some(Self { number, _mark: mark })
    }

    /// Number of the port.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Address of the port, `127.0.0.1:<number>`.
    pub fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.number).into()
    }
}
