//! Sharing of layers within a site: the nodes' reports about their layers, the sources that the cloud assigns, and the
//! tickets that neighbours show each other.
//!
//! ```text
//!  edge ── Blobs: wanted, carried, fetched, here ──▶ cloud
//!  edge ◀── Sources: registry, neighbours with tickets, wait ── cloud
//!  edge ── GET /blobs/<digest>, ticket ──▶ neighbour
//! ```
//!
//! Both messages describe a state and may be repeated, lost or late. An edge sends [`Blobs`] only to a cloud that
//! announces them with [`crate::wire::Welcome::tickets`], and the cloud sends [`BlobSources`] only in answer.

use std::num::NonZeroU64;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::task::{NodeName, TaskId, millis};

/// Most blobs of one message.
pub const MAX_BLOBS: usize = 256;
/// Most addresses of one node: one for each network that it has.
pub const MAX_ADDRESSES: usize = 4;
/// Longest address in bytes: a name in the DNS and a port.
pub const MAX_ADDRESS: usize = 260;
/// Most neighbours that are named for one blob: the one to ask, and two for the case that it is gone.
pub const MAX_PEERS: usize = 3;
/// Smallest blob that is shared, in bytes: to ask for a smaller one costs as much as to download it.
pub const LEAST_SHARED: u64 = 64 * 1024;
/// Path below which an agent serves blobs, each by its digest.
pub const BLOBS_PATH: &str = "/blobs/";

/// A node's report about the blobs of one task that it wants to share: those that have changed, and in a new session all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blobs {
    /// The task that names the image that they are of.
    pub task: TaskId,
    /// At most [`MAX_BLOBS`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blobs: Vec<BlobNews>,
    /// Neighbours that did not deliver. At most [`MAX_BLOBS`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<PeerFailure>,
    /// Whether the node can read a blob from a neighbour that is still receiving it. Agents of release 0.1 can't.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reads_streams: bool,
}

/// What a node has to do with a blob.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlobNews {
    /// `sha256:…`
    pub digest: String,
    /// Bytes of the whole blob, from the manifest.
    pub size: u64,
    /// What the node does about it.
    pub state: BlobState,
    /// Bytes that are there, in every state: a download that was interrupted counts too.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub done: u64,
}

/// What a node does about a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum BlobState {
    /// It waits for sources.
    Wanted,
    /// It downloads it from the registry.
    Carrying,
    /// It downloads it from a neighbour.
    Fetching,
    /// It has it, and its digest was checked.
    Here,
    /// It does not want it any more. What only a newer version knows is taken for this.
    #[serde(other)]
    Dropped,
}

/// A neighbour that did not deliver a blob.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerFailure {
    /// `sha256:…`
    pub digest: String,
    /// The neighbour.
    pub peer: NodeName,
    /// What is wrong with it.
    pub fault: PeerFault,
}

/// What is wrong with a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum PeerFault {
    /// No connection to it, or it broke.
    Unreachable,
    /// It has too much to do.
    Busy,
    /// It does not have the blob.
    Gone,
    /// What it sent has another digest.
    Damaged,
    /// Its bytes stopped coming, or came too slowly. A cloud of release 0.1 reads this as `Refused`.
    Stalled,
    /// It does not accept the ticket, or anything that only a newer version knows.
    #[serde(other)]
    Refused,
}

/// Where a node gets blobs from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlobSources {
    /// The task of [`Blobs`].
    pub task: TaskId,
    /// At most [`MAX_BLOBS`]. What is not named stays as it was; any message is a sign that the others are waited for.
    pub blobs: Vec<BlobSource>,
}

/// Where a node gets a blob from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlobSource {
    /// `sha256:…`
    pub digest: String,
    /// The place.
    pub from: From,
}

/// The place that a node gets a blob from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum From {
    /// The registry: the node is the one that carries the blob into the site, or gets it from no neighbour.
    Registry {
        /// Why no neighbour can serve the node; empty for the carrier of the site.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        alone: String,
        /// Most bytes a second, of the site's limit.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        max_rate: Option<NonZeroU64>,
    },
    /// A neighbour: the first of these that delivers. At most [`MAX_PEERS`].
    Peers {
        /// The neighbours.
        peers: Vec<BlobPeer>,
    },
    /// Nowhere yet: another node is getting it. What only a newer version knows is taken for this.
    #[serde(other)]
    Wait,
}

/// A neighbour that has a blob.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlobPeer {
    /// Its name, which its certificate must show.
    pub node: NodeName,
    /// Where it listens, each as HOST:PORT. At most [`MAX_ADDRESSES`].
    pub addresses: Vec<String>,
    /// What to show it.
    pub ticket: String,
}

/// Where a node serves its neighbours.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerDoor {
    /// Each as HOST:PORT. At most [`MAX_ADDRESSES`], each of at most [`MAX_ADDRESS`] bytes.
    pub addresses: Vec<String>,
    /// Whether the node also serves blobs that are still arriving. Agents of release 0.1 serve whole blobs only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub streams: bool,
}

impl PeerDoor {
    /// Whether it keeps to the limits, and there is an address.
    pub fn is_valid(&self) -> bool {
        (1..=MAX_ADDRESSES).contains(&self.addresses.len())
            && self.addresses.iter().all(|address| is_address(address))
    }
}

/// Whether a text is HOST:PORT, without anything that could not stand in a URL.
pub fn is_address(text: &str) -> bool {
    let is_host = |host: &str| {
        let of_address = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | ':' | '[' | ']');
        !host.is_empty() && host.chars().all(of_address)
    };
    text.len() <= MAX_ADDRESS
        && text.rsplit_once(':').is_some_and(|(host, port)| is_host(host) && port.parse::<u16>().is_ok())
}

/// By what a node knows the tickets of this session's cloud.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TicketTerms {
    /// The Ed25519 public key, in hex.
    pub key: String,
    /// The cloud's time in milliseconds since 1970: tickets expire by it, and not by the node's clock.
    #[serde(with = "millis")]
    pub now: Duration,
}

/// What a ticket allows: one node may read one blob from one neighbour, for some minutes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant<'a> {
    /// The node that reads.
    pub reader: &'a NodeName,
    /// The neighbour that serves.
    pub server: &'a NodeName,
    /// `sha256:…`
    pub digest: &'a str,
    /// The end, in seconds since 1970 by the clock of the cloud.
    pub expires: u64,
}

impl Grant<'_> {
    /// What is signed. Names of nodes and digests contain no line feed.
    pub fn to_signed_text(&self) -> String {
        let Self { reader, server, digest, expires } = self;
        format!("prepull ticket 1\n{reader}\n{server}\n{digest}\n{expires}")
    }

    /// The ticket with this signature, in hex. The neighbour knows everything else.
    pub fn to_ticket(&self, signature: &str) -> String {
        format!("{}.{signature}", self.expires)
    }
}

/// Takes a ticket apart, into the end and the signature in hex.
pub fn split_ticket(ticket: &str) -> Option<(u64, &str)> {
    let (expires, signature) = ticket.split_once('.')?;
    Some((expires.parse().ok()?, signature))
}

/// Whether a text is a digest by which blobs are shared.
pub fn is_digest(text: &str) -> bool {
    let hex = |c: u8| c.is_ascii_digit() || (b'a'..=b'f').contains(&c);
    text.strip_prefix("sha256:").is_some_and(|rest| rest.len() == 64 && rest.bytes().all(hex))
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_zero(value: &u64) -> bool {
    *value == 0
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_ticket_is_taken_apart_as_it_was_put_together() {
        let (reader, server) = (NodeName::from("a"), NodeName::from("b"));
        let grant = Grant { reader: &reader, server: &server, digest: "sha256:x", expires: 12 };
        assert_eq!(grant.to_signed_text(), "prepull ticket 1\na\nb\nsha256:x\n12");
        assert_eq!(split_ticket(&grant.to_ticket("ab")), Some((12, "ab")));
        for bad in ["", "12", ".", "x.ab", "-1.ab"] {
            assert_eq!(split_ticket(bad), None, "{bad}");
        }
    }

    #[test]
    fn an_address_is_a_host_and_a_port() {
        for good in ["10.0.0.1:10006", "[fe80::1]:1", "box-7.site.example:65535"] {
            assert!(is_address(good), "{good}");
        }
        for bad in ["", "10.0.0.1", ":1", "a b:1", "a/b:1", "a@b:1", "host:65536", "host:"] {
            assert!(!is_address(bad), "{bad}");
        }
        let door = |addresses: &[&str]| PeerDoor {
            addresses: addresses.iter().map(|a| (*a).to_owned()).collect(),
            streams: false,
        };
        assert!(door(&["a:1"]).is_valid());
        assert!(!door(&[]).is_valid() && !door(&["a:1"; 5]).is_valid() && !door(&["a"]).is_valid());
    }

    #[test]
    fn a_digest_is_of_sha256_in_small_letters() {
        assert!(is_digest(&format!("sha256:{}", "0a".repeat(32))));
        for bad in ["sha256:", "sha512:00", &format!("sha256:{}", "0A".repeat(32)), &"0a".repeat(32)] {
            assert!(!is_digest(bad), "{bad}");
        }
    }

    #[test]
    fn unknown_values_of_newer_versions_are_kept_apart() {
        assert_eq!(serde_json::from_str::<BlobState>("\"newer\"").unwrap(), BlobState::Dropped);
        assert_eq!(serde_json::from_str::<PeerFault>("\"newer\"").unwrap(), PeerFault::Refused);
        assert_eq!(serde_json::from_str::<From>(r#"{"kind":"newer","x":1}"#).unwrap(), From::Wait);
    }
}
