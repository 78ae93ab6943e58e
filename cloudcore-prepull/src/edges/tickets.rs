//! The tickets by which the nodes of a site let each other read blobs. They are signed with a key that only this process
//! has. Each session sends its node the public key; after a failover it is another one.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prepull_api::enroll::hex;
use prepull_api::sites::{BlobPeer, BlobSource, BlobSources, From, Grant, TicketTerms};
use prepull_api::task::NodeName;
use prepull_api::wire::CloudMessage;
use prepull_engine::sites::{Direction, Directions};
use ring::rand::SystemRandom;
use ring::signature::{Ed25519KeyPair, KeyPair};

/// How long a ticket is good for: a node asks with it at once, and once more when the connection breaks. The thief
/// of a node and its key can read for that long, and only blobs that the node was assigned.
const LIFETIME: Duration = Duration::from_secs(600);

/// The key that signs. `None` where the machine has no randomness for one: then nothing is shared.
pub(crate) struct Tickets(Option<Ed25519KeyPair>);

impl std::fmt::Debug for Tickets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tickets")
    }
}

impl Default for Tickets {
    fn default() -> Self {
        let pkcs8 = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new());
        Self(pkcs8.ok().and_then(|key| Ed25519KeyPair::from_pkcs8(key.as_ref()).ok()))
    }
}

impl Tickets {
    /// What a node has to know of them.
    pub(crate) fn terms(&self, now: SystemTime) -> Option<TicketTerms> {
        let key = hex(self.0.as_ref()?.public_key().as_ref());
        Some(TicketTerms { key, now: since_1970(now) })
    }

    /// The message with a node's sources and a ticket for each neighbour. `None` if nothing can be signed.
    pub(crate) fn issue(&self, directions: Directions, now: SystemTime) -> Option<(NodeName, CloudMessage)> {
        let key = self.0.as_ref()?;
        let Directions { node: reader, task, blobs } = directions;
        let expires = (since_1970(now) + LIFETIME).as_secs();
        let source = |(digest, direction): (String, Direction)| {
            let from = match direction {
                Direction::Wait => From::Wait,
                Direction::Registry { alone, max_rate } => {
                    From::Registry { alone: alone.to_owned(), max_rate }
                }
                Direction::Peers(peers) => {
                    let peer = |(server, addresses): (NodeName, std::sync::Arc<[String]>)| {
                        let grant = Grant { reader: &reader, server: &server, digest: &digest, expires };
                        let ticket =
                            grant.to_ticket(&hex(key.sign(grant.to_signed_text().as_bytes()).as_ref()));
                        BlobPeer { addresses: addresses.to_vec(), node: server, ticket }
                    };
                    From::Peers { peers: peers.into_iter().map(peer).collect() }
                }
            };
            BlobSource { digest, from }
        };
        let blobs = blobs.into_iter().map(source).collect();
        Some((reader.clone(), CloudMessage::Sources(BlobSources { task, blobs })))
    }
}

fn since_1970(now: SystemTime) -> Duration {
    now.duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use prepull_api::enroll::unhex;
    use prepull_api::sites::split_ticket;
    use prepull_api::task::{JobUid, TaskId};
    use ring::signature::{ED25519, UnparsedPublicKey};

    use super::*;

    #[test]
    fn a_ticket_binds_reader_server_and_blob() {
        let (tickets, now) = (Tickets::default(), UNIX_EPOCH + Duration::from_secs(1000));
        let terms = tickets.terms(now).unwrap();
        assert_eq!(terms.now, Duration::from_secs(1000));
        let (reader, server) = (NodeName::from("a"), NodeName::from("b"));
        let peers = vec![(server.clone(), vec!["10.0.0.2:1".to_owned()].into())];
        let directions = Directions {
            node: reader.clone(),
            task: TaskId { job: JobUid("uid".to_owned()), attempt: 1 },
            blobs: vec![
                ("sha256:x".to_owned(), Direction::Peers(peers)),
                ("sha256:y".to_owned(), Direction::Wait),
            ],
        };
        let (node, message) = tickets.issue(directions, now).unwrap();
        let CloudMessage::Sources(sources) = message else { panic!("{message:?}") };
        assert_eq!((&node, &sources.blobs[1].from), (&reader, &From::Wait));
        let From::Peers { peers } = &sources.blobs[0].from else { panic!("{sources:?}") };
        let (expires, signature) = split_ticket(&peers[0].ticket).unwrap();
        assert_eq!(expires, 1600);
        let key = UnparsedPublicKey::new(&ED25519, unhex::<32>(&terms.key).unwrap());
        let is_signed = |grant: Grant<'_>| {
            key.verify(grant.to_signed_text().as_bytes(), &unhex::<64>(signature).unwrap()).is_ok()
        };
        let grant = Grant { reader: &reader, server: &server, digest: "sha256:x", expires };
        assert!(is_signed(grant.clone()));
        assert!(!is_signed(Grant { reader: &server, ..grant.clone() }));
        assert!(!is_signed(Grant { server: &reader, ..grant.clone() }));
        assert!(!is_signed(Grant { digest: "sha256:y", ..grant.clone() }));
        assert!(!is_signed(Grant { expires: expires + 1, ..grant }));
    }
}
