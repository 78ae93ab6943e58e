//! The addresses to which no registry may lead us.
//!
//! The operator of a registry chooses where it sends a client, by a redirect or by the realm of its tokens. That must not be
//! an address that only the node itself can reach: its own services, and the metadata service of its cloud, which hands
//! out credentials.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use http::Uri;

use crate::location::HostPort;

/// How far a request may reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Reach {
    /// To any address: a person has named the host with this port, in a reference or in hosts.toml.
    Any,
    /// To where a registry leads: not to the node itself, and not to metadata services.
    Led {
        /// The registry itself is on a loopback address, so what it names may be as well.
        loopback: bool,
    },
}

impl Reach {
    /// How far a request to a URL may reach. What a person has named counts with its port: beside a mirror on the node,
    /// the node's own services listen at other ports.
    pub(crate) fn toward(uri: &Uri, named: &[HostPort], loopback: bool) -> Self {
        let place = HostPort::of(uri);
        let is_named = place.is_some_and(|place| named.contains(&place));
        if is_named { Self::Any } else { Self::Led { loopback } }
    }

    /// Why the address must not be connected to, as "a … address".
    pub(crate) fn refuses(self, address: IpAddr) -> Option<&'static str> {
        let Self::Led { loopback } = self else { return None };
        let class = address_class(address)?;
        (class != LOOPBACK || !loopback).then_some(class)
    }
}

const LOOPBACK: &str = "loopback";

/// Metadata services at addresses that are not link-local.
const METADATA_V4: [Ipv4Addr; 3] = [
    Ipv4Addr::new(100, 100, 100, 200), // Alibaba Cloud
    Ipv4Addr::new(168, 63, 129, 16),   // Azure's host agent
    Ipv4Addr::new(192, 0, 0, 192),     // Oracle Cloud
];
const METADATA_V6: [Ipv6Addr; 2] = [
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254), // AWS
    Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254),  // Google Cloud
];

/// The prefix of a network's own NAT64 (RFC 8215). Each network chooses where in it the IPv4 address is, so all of it is
/// refused.
const LOCAL_NAT64: [u16; 3] = [0x64, 0xff9b, 1];

fn address_class(address: IpAddr) -> Option<&'static str> {
    match address {
        IpAddr::V4(v4) => class_v4(v4),
        IpAddr::V6(v6) => class_v6(v6),
    }
}

fn class_v4(address: Ipv4Addr) -> Option<&'static str> {
    if address.is_loopback() {
        Some(LOOPBACK)
    } else if address.octets()[0] == 0 {
        Some("unspecified")
    } else if address.is_link_local() {
        Some("link-local")
    } else if address.is_multicast() || address.is_broadcast() {
        Some("multicast")
    } else if METADATA_V4.contains(&address) {
        Some("metadata")
    } else {
        None
    }
}

fn class_v6(address: Ipv6Addr) -> Option<&'static str> {
    if address.is_loopback() {
        return Some(LOOPBACK);
    }
    if address.is_unspecified() {
        return Some("unspecified");
    }
    if address.is_unicast_link_local() {
        return Some("link-local");
    }
    if address.is_multicast() {
        return Some("multicast");
    }
    if METADATA_V6.contains(&address) {
        return Some("metadata");
    }
    if address.segments()[..3] == LOCAL_NAT64 {
        return Some("translated");
    }
    embedded(address).and_then(class_v4)
}

/// The IPv4 address to which an IPv6 address leads: mapped, compatible, by SIIT, NAT64 or 6to4.
fn embedded(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let v4 = |high: u16, low: u16| Some(Ipv4Addr::from((u32::from(high) << 16) | u32::from(low)));
    match address.segments() {
        [0, 0, 0, 0, 0, 0 | 0xffff, high, low]
        | [0, 0, 0, 0, 0xffff, 0, high, low]
        | [0x64, 0xff9b, 0, 0, 0, 0, high, low]
        | [0x2002, high, low, ..] => v4(high, low),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn forbidden_addresses_are_refused_in_every_spelling() {
        let led = Reach::Led { loopback: false };
        for (address, class) in [
            ("127.0.0.1", Some("loopback")),
            ("127.9.9.9", Some("loopback")),
            ("::1", Some("loopback")),
            ("::ffff:127.0.0.1", Some("loopback")),
            ("::127.0.0.1", Some("loopback")),
            ("64:ff9b::7f00:1", Some("loopback")),
            ("2002:7f00:1::", Some("loopback")),
            ("::ffff:0:127.0.0.1", Some("loopback")),
            ("0.0.0.0", Some("unspecified")),
            ("0.1.2.3", Some("unspecified")),
            ("::", Some("unspecified")),
            ("169.254.169.254", Some("link-local")),
            ("::ffff:169.254.169.254", Some("link-local")),
            ("64:ff9b::a9fe:a9fe", Some("link-local")),
            ("2002:a9fe:a9fe::1", Some("link-local")),
            ("fe80::1", Some("link-local")),
            ("224.0.0.1", Some("multicast")),
            ("255.255.255.255", Some("multicast")),
            ("ff02::1", Some("multicast")),
            ("100.100.100.200", Some("metadata")),
            ("168.63.129.16", Some("metadata")),
            ("fd00:ec2::254", Some("metadata")),
            ("fd20:ce::254", Some("metadata")),
            ("64:ff9b:1::a9fe:a9fe", Some("translated")),
            ("64:ff9b:1:a9fe:a9:fe00::", Some("translated")),
            // A registry and its storage may well be in a private network.
            ("10.0.0.1", None),
            ("192.168.1.1", None),
            ("100.64.0.1", None),
            ("fd00::1", None),
            ("93.184.216.34", None),
            ("2606:2800:220:1::1", None),
            ("::ffff:0:93.184.216.34", None),
        ] {
            let address: IpAddr = address.parse().unwrap();
            assert_eq!(led.refuses(address), class, "{address}");
            assert_eq!(Reach::Any.refuses(address), None, "{address}");
            let beside = Reach::Led { loopback: true }.refuses(address);
            assert_eq!(beside, class.filter(|class| *class != LOOPBACK), "{address}");
        }
    }
}
