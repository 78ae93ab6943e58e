//! Ports of our own, also across restarts of whoever listens on them.

use std::hash::{BuildHasher, RandomState};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};

use anyhow::{Result, bail};

/// The lowest that we take.
const FIRST: u16 = 15_000;
/// One beyond the highest where the kernel does not say where its own range begins.
const END: u16 = 32_768;
/// More failures in a row than this mean that something else is wrong.
const TRIES: usize = 1000;

/// A free TCP port of 127.0.0.1. It is ours as long as this lives, whether something listens on it or not.
///
/// Port 0 would not do: between two starts of one server the kernel may give the number away, most likely to
/// somebody's outgoing connection. Ours are below the range from which it gives, and a socket with the number in
/// its name keeps other test processes off: the kernel removes it with the process.
#[derive(Debug)]
pub struct Port {
    number: u16,
    _mark: UnixListener,
}

impl Port {
    /// A port that nobody uses.
    pub fn reserve() -> Result<Self> {
        let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
        let low = range
            .split_whitespace()
            .next()
            .and_then(|low| low.parse().ok())
            .filter(|low| *low > FIRST + 1000);
        let span = u64::from(low.unwrap_or(END) - FIRST);
        for attempt in 0..TRIES {
            // A hash of a random key: the standard library's source of chance.
            let offset = u16::try_from(RandomState::new().hash_one(attempt) % span)?;
            if let Some(port) = Self::take(FIRST + offset) {
                return Ok(port);
            }
        }
        bail!("no free port between {FIRST} and {}", u64::from(FIRST) + span);
    }

    fn take(number: u16) -> Option<Self> {
        let mark = UnixAddr::from_abstract_name(format!("prepull-e2e-port-{number}")).ok()?;
        let mark = UnixListener::bind_addr(&mark).ok()?;
        TcpListener::bind((Ipv4Addr::LOCALHOST, number)).ok()?;
        Some(Self { number, _mark: mark })
    }

    /// The number.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// `127.0.0.1:<number>`.
    pub fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.number).into()
    }
}
