//! By what this node knows the tickets of its neighbours: the keys of the clouds that it had sessions with.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use prepull_api::enroll::unhex;
use prepull_api::sites::{Grant, split_ticket};
use prepull_api::task::NodeName;
use ring::signature::{ED25519, UnparsedPublicKey};

/// Keys that are known at a time: that of the cloud now, and of the one before, whose tickets go on after a failover.
const KEYS: usize = 2;

/// The keys that tickets may be signed with.
#[derive(Debug, Default)]
pub(super) struct TicketKeys(Mutex<VecDeque<[u8; 32]>>);

impl TicketKeys {
    /// Accepts tickets that are signed with this key, in hex.
    pub(super) fn accept_key(&self, key: &str) {
        let Some(key) = unhex(key) else { return };
        let mut keys = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !keys.contains(&key) {
            keys.push_front(key);
            keys.truncate(KEYS);
        }
    }

    /// The end of a ticket that lets this reader have the blob from this node, both in seconds since 1970. `None`: it doesn't.
    pub(super) fn check(
        &self,
        ticket: &str,
        (reader, server): (&NodeName, &NodeName),
        digest: &str,
        now: u64,
    ) -> Option<u64> {
        let (expires, signature) = split_ticket(ticket)?;
        let signature = unhex::<64>(signature)?;
        let text = Grant { reader, server, digest, expires }.to_signed_text();
        let keys = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_signed = |key: &[u8; 32]| {
            UnparsedPublicKey::new(&ED25519, key).verify(text.as_bytes(), &signature).is_ok()
        };
        (now < expires && keys.iter().any(is_signed)).then_some(expires)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use prepull_api::enroll::hex;
    use ring::signature::{Ed25519KeyPair, KeyPair};

    use super::*;

    fn pair(seed: u8) -> Ed25519KeyPair {
        Ed25519KeyPair::from_seed_unchecked(&[seed; 32]).unwrap()
    }

    fn ticket(pair: &Ed25519KeyPair, reader: &str, server: &str, digest: &str, expires: u64) -> String {
        let (reader, server) = (NodeName::from(reader), NodeName::from(server));
        let grant = Grant { reader: &reader, server: &server, digest, expires };
        grant.to_ticket(&hex(pair.sign(grant.to_signed_text().as_bytes()).as_ref()))
    }

    #[test]
    fn forged_expired_and_foreign_tickets_open_nothing() {
        let keys = TicketKeys::default();
        let allow = |ticket: &str, reader: &str, digest: &str, now| {
            keys.check(ticket, (&reader.into(), &"server".into()), digest, now).is_some()
        };
        let good = ticket(&pair(1), "reader", "server", "sha256:a", 100);
        assert!(!allow(&good, "reader", "sha256:a", 99), "no cloud has said by which key");
        keys.accept_key(&hex(pair(1).public_key().as_ref()));
        assert!(allow(&good, "reader", "sha256:a", 99));
        assert!(!allow(&good, "reader", "sha256:a", 100), "expired");
        assert!(!allow(&good, "other", "sha256:a", 99), "another reader, who has copied it");
        assert!(!allow(&good, "reader", "sha256:b", 99), "another blob");
        assert!(!allow(&good.replacen("100", "101", 1), "reader", "sha256:a", 99), "prolonged");
        assert!(!allow(&ticket(&pair(1), "reader", "else", "sha256:a", 100), "reader", "sha256:a", 99));
        assert!(!allow(&ticket(&pair(9), "reader", "server", "sha256:a", 100), "reader", "sha256:a", 99));
        for bad in ["", "100", "100.", "100.zz", "x"] {
            assert!(!allow(bad, "reader", "sha256:a", 99), "{bad}");
        }
    }

    #[test]
    fn the_tickets_of_the_cloud_before_go_on_after_a_failover() {
        let keys = TicketKeys::default();
        for seed in [1, 2, 2, 3] {
            keys.accept_key(&hex(pair(seed).public_key().as_ref()));
        }
        let allow = |seed| {
            let ticket = ticket(&pair(seed), "reader", "server", "sha256:a", 100);
            keys.check(&ticket, (&"reader".into(), &"server".into()), "sha256:a", 1).is_some()
        };
        assert_eq!([1, 2, 3].map(allow), [false, true, true]);
    }
}
