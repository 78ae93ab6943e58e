//! The rate limit of failed tokens, per address and over all.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use tokio::time::Instant;

use prepull_engine::shared::pacing::TokenBucket;

/// Failed tokens of one address, per second and at once. A person who mistypes needs three; a script that keeps trying
/// an expired token is slowed down to one look-up in ten seconds.
const PER_ADDRESS: (f64, f64) = (0.1, 10.0);
/// Failed tokens of all addresses together, per second and at once. Each costs a read from the API server.
const OVERALL: (f64, f64) = (20.0, 200.0);
/// The most addresses that have a bucket of their own, a hundred bytes each. All others share one.
const MAX_ADDRESSES: usize = 4096;

type Bucket = TokenBucket<std::time::Instant>;

/// Limits the rate of failed tokens. Good tokens cost nothing: a fleet behind one address may join at once.
#[derive(Debug)]
pub(super) struct FailedTokens {
    addresses: HashMap<IpAddr, Bucket>,
    others: Bucket,
    overall: Bucket,
}

impl FailedTokens {
    pub(super) fn new() -> Self {
        let bucket = |(per_second, burst)| Bucket::new(per_second, burst);
        Self { addresses: HashMap::new(), others: bucket(PER_ADDRESS), overall: bucket(OVERALL) }
    }

    /// Whether a token may be tried now; the error says how long to wait.
    pub(super) fn check(&mut self, address: IpAddr, now: Instant) -> Result<(), Duration> {
        let now = now.into_std();
        let has_room = self.addresses.len() < MAX_ADDRESSES;
        let own = match self.addresses.get_mut(&network_of(address)) {
            Some(bucket) => bucket.wait_for(1.0, now),
            None if !has_room => self.others.wait_for(1.0, now),
            None => Duration::ZERO,
        };
        let wait = own.max(self.overall.wait_for(1.0, now));
        if wait.is_zero() { Ok(()) } else { Err(wait) }
    }

    /// Records that a token was refused.
    pub(super) fn record(&mut self, address: IpAddr, now: Instant) {
        let (address, now) = (network_of(address), now.into_std());
        if self.addresses.len() >= MAX_ADDRESSES && !self.addresses.contains_key(&address) {
            self.addresses.retain(|_, bucket| !bucket.is_full(now));
        }
        let has_room = self.addresses.len() < MAX_ADDRESSES;
        let (per_second, burst) = PER_ADDRESS;
        let own = match self.addresses.get_mut(&address) {
            Some(bucket) => bucket,
            None if has_room => self.addresses.entry(address).or_insert(Bucket::new(per_second, burst)),
            None => &mut self.others,
        };
        own.take(1.0, now);
        self.overall.take(1.0, now);
    }
}

/// The network whose addresses count as one: a holder of one IPv6 address controls the whole /64.
fn network_of(address: IpAddr) -> IpAddr {
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
    fn failures_of_one_address_delay_no_other() {
        let start = Instant::now();
        let mut failed = FailedTokens::new();
        for _ in 0..10 {
            failed.check(v4(1), start).unwrap();
            failed.record(v4(1), start);
        }
        assert_eq!(failed.check(v4(1), start), Err(Duration::from_secs(10)));
        assert_eq!(failed.check(v4(2), start), Ok(()));
        assert_eq!(failed.check(v4(1), start + Duration::from_secs(10)), Ok(()));
        let neighbours =
            ["2001:db8::1", "2001:db8::2", "::ffff:0.0.0.1"].map(|a| network_of(a.parse().unwrap()));
        assert_eq!(neighbours, ["2001:db8::", "2001:db8::", "0.0.0.1"].map(|a| a.parse::<IpAddr>().unwrap()));
    }

    #[test]
    fn failures_of_many_addresses_are_limited_and_take_bounded_memory() {
        let start = Instant::now();
        let mut failed = FailedTokens::new();
        for n in 0..200 {
            failed.check(v4(n), start).unwrap();
            failed.record(v4(n), start);
        }
        assert!(failed.check(v4(1000), start).is_err());
        for n in 0..10_000 {
            failed.record(v4(n), start);
        }
        assert_eq!(failed.addresses.len(), MAX_ADDRESSES);
    }
}
