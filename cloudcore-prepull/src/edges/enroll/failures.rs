//! How often a token may be wrong.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use tokio::time::Instant;

use crate::edges::tunnel::throttle::Bucket;

/// Failures of one address, per second and at once. A person who mistypes needs three; a script that runs on
/// with an expired token is slowed to one look-up in ten seconds.
const PER_ADDRESS: (f64, f64) = (0.1, 10.0);
/// Failures of all addresses together: each is a read at the API server.
const OVERALL: (f64, f64) = (20.0, 200.0);
/// Addresses that are remembered, a hundred bytes each. Those beyond share one bucket.
const MAX_ADDRESSES: usize = 4096;

/// Counts failed tokens. Tokens that are good cost nothing: a fleet behind one address may join at once.
#[derive(Debug)]
pub(super) struct Failures {
    addresses: HashMap<IpAddr, Bucket>,
    others: Bucket,
    overall: Bucket,
}

impl Failures {
    pub(super) fn new(now: Instant) -> Self {
        let bucket = |(per_second, burst)| Bucket::new(per_second, burst, now);
        Self { addresses: HashMap::new(), others: bucket(PER_ADDRESS), overall: bucket(OVERALL) }
    }

    /// Whether another try may be made; otherwise, after how long.
    pub(super) fn check(&mut self, address: IpAddr, now: Instant) -> Result<(), Duration> {
        let room = self.addresses.len() < MAX_ADDRESSES;
        let own = match self.addresses.get_mut(&network(address)) {
            Some(bucket) => bucket.wait_for(1.0, now),
            None if !room => self.others.wait_for(1.0, now),
            None => Duration::ZERO,
        };
        let wait = own.max(self.overall.wait_for(1.0, now));
        if wait.is_zero() { Ok(()) } else { Err(wait) }
    }

    /// A try has failed.
    pub(super) fn count(&mut self, address: IpAddr, now: Instant) {
        let address = network(address);
        if self.addresses.len() >= MAX_ADDRESSES && !self.addresses.contains_key(&address) {
            self.addresses.retain(|_, bucket| !bucket.is_full(now));
        }
        let room = self.addresses.len() < MAX_ADDRESSES;
        let (per_second, burst) = PER_ADDRESS;
        let own = match self.addresses.get_mut(&address) {
            Some(bucket) => bucket,
            None if room => self.addresses.entry(address).or_insert(Bucket::new(per_second, burst, now)),
            None => &mut self.others,
        };
        own.take(1.0, now);
        self.overall.take(1.0, now);
    }
}

/// Whoever has an IPv6 address has the /64 around it.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
        v4 @ IpAddr::V4(_) => v4,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn v4(n: u32) -> IpAddr {
        IpAddr::V4(n.into())
    }

    #[test]
    fn an_address_that_fails_waits_and_no_other_does() {
        let start = Instant::now();
        let mut failures = Failures::new(start);
        for _ in 0..10 {
            failures.check(v4(1), start).unwrap();
            failures.count(v4(1), start);
        }
        assert_eq!(failures.check(v4(1), start), Err(Duration::from_secs(10)));
        assert_eq!(failures.check(v4(2), start), Ok(()));
        assert_eq!(failures.check(v4(1), start + Duration::from_secs(10)), Ok(()));
        let neighbours =
            ["2001:db8::1", "2001:db8::2", "::ffff:0.0.0.1"].map(|a| network(a.parse().unwrap()));
        assert_eq!(neighbours, ["2001:db8::", "2001:db8::", "0.0.0.1"].map(|a| a.parse::<IpAddr>().unwrap()));
    }

    #[test]
    fn many_addresses_share_what_the_api_server_can_bear_and_a_bounded_memory() {
        let start = Instant::now();
        let mut failures = Failures::new(start);
        for n in 0..200 {
            failures.check(v4(n), start).unwrap();
            failures.count(v4(n), start);
        }
        assert!(failures.check(v4(1000), start).is_err());
        for n in 0..10_000 {
            failures.count(v4(n), start);
        }
        assert_eq!(failures.addresses.len(), MAX_ADDRESSES);
    }
}
