//! The records of some of the nodes, as one ConfigMap holds them: a key of `data` is a node's name, its value the record.

use std::collections::{BTreeMap, HashMap};

use prepull_api::task::NodeName;
use ring::digest::{SHA256, digest};

use super::record::{NodeRecord, Revocation};

/// The ConfigMaps. Ten thousand nodes make about 100 KiB each, of the 1 MiB that an object may have; and there are few
/// enough to be named in a Role.
pub const SHARDS: usize = 16;
/// The most bytes of a shard: 1 MiB is what the API server takes, and the metadata need some of it.
const MAX_BYTES: usize = 1_000_000;

/// Number of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShardId(usize);

/// The records of a shard, and the version of the ConfigMap that they were read from or written to; no version where
/// there is no ConfigMap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shard {
    /// By the names of the nodes.
    pub records: HashMap<NodeName, NodeRecord>,
    /// The version.
    pub version: Option<String>,
}

impl ShardId {
    /// The shard of a node.
    pub fn for_node(node: &NodeName) -> Self {
        Self(usize::from(digest(&SHA256, node.as_str().as_bytes()).as_ref()[0]) % SHARDS)
    }

    /// All shards.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..SHARDS).map(Self)
    }

    /// Its number.
    pub fn index(self) -> usize {
        self.0
    }

    /// The name of the ConfigMap.
    pub fn name(self) -> String {
        format!("prepull-nodes-{:x}", self.0)
    }

    /// The shard of a ConfigMap, if it is one of ours.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::all().find(|shard| shard.name() == name)
    }
}

impl Shard {
    /// Reads the content of a ConfigMap. A node with an unreadable record counts as revoked: it may have been.
    pub fn decode(data: BTreeMap<String, String>, version: Option<String>) -> Self {
        let read = |(node, text): (String, String)| {
            let record = serde_json::from_str(&text).unwrap_or_else(|error| {
                tracing::error!(node, %error, "the record of this node cannot be read, so it counts as revoked; `kubectl prepull node allow` ends that");
                let at = "its record cannot be read".to_owned();
                NodeRecord { revoked: Some(Revocation { at, rejoined: false }), ..NodeRecord::default() }
            });
            (NodeName(node), record)
        };
        Self { records: data.into_iter().map(read).collect(), version }
    }

    /// The content of the ConfigMap; nothing if it would be too large.
    pub fn encode(&self) -> Option<BTreeMap<String, String>> {
        let written = |(node, record): (&NodeName, &NodeRecord)| {
            // A record is strings, flags and times, which always serialize.
            (node.to_string(), serde_json::to_string(record).unwrap_or_default())
        };
        let data: BTreeMap<_, _> = self.records.iter().map(written).collect();
        // In the JSON of the object every quotation mark is escaped.
        let size = |text: &String| text.len() + text.matches('"').count() + 6;
        (data.iter().map(|(node, text)| size(node) + size(text)).sum::<usize>() <= MAX_BYTES).then_some(data)
    }

    /// Replaces a record; an empty one is removed. Returns whether anything has changed.
    pub fn put(&mut self, node: &NodeName, record: NodeRecord) -> bool {
        let before = self.records.get(node);
        if before.is_none_or(|before| *before != record) && !(before.is_none() && record.is_empty()) {
            if record.is_empty() {
                self.records.remove(node);
            } else {
                self.records.insert(node.clone(), record);
            }
            return true;
        }
        false
    }

    /// The node's record, empty if there is none.
    pub fn record(&self, node: &NodeName) -> NodeRecord {
        self.records.get(node).cloned().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;
    use crate::key_hash::KeyHash;
    use crate::records::record::HeldKey;

    fn record(revoked: Option<Revocation>) -> NodeRecord {
        let held = |byte| HeldKey {
            sha256: KeyHash::new([byte; 32]),
            not_after: UNIX_EPOCH + Duration::from_secs(1_800_000_000),
            seen: byte == 1,
            ca: Some([byte; 32].into()),
            old_subject: true,
        };
        NodeRecord { key: Some(held(1)), next: Some(held(2)), revoked }
    }

    #[test]
    fn an_unreadable_record_counts_as_revoked() {
        let mut shard = Shard::default();
        let revoked = Revocation { at: "2026-11-22T04:00:00Z".to_owned(), rejoined: true };
        assert!(shard.put(&"edge-1".into(), record(None)));
        assert!(shard.put(&"edge-2".into(), record(Some(revoked))));
        assert!(!shard.put(&"edge-2".into(), shard.record(&"edge-2".into())), "nothing has changed");
        let mut data = shard.encode().unwrap();
        assert_eq!(Shard::decode(data.clone(), None), shard);
        data.insert("edge-1".to_owned(), "{\"key\":7}".to_owned());
        let spoilt = Shard::decode(data, None).record(&"edge-1".into());
        assert!(spoilt.check_standing(&"edge-1".into(), KeyHash::new([1; 32])).is_err());
    }

    #[test]
    fn shards_are_bounded() {
        let mut shard = Shard::default();
        assert!(!shard.put(&"edge-1".into(), NodeRecord::default()));
        shard.put(&"edge-1".into(), record(None));
        assert!(shard.put(&"edge-1".into(), NodeRecord::default()));
        assert_eq!(shard, Shard::default());
        // A sixteenth of ten thousand nodes with the longest names, all of them in the middle of a renewal.
        for n in 0..625 {
            let name = format!("{n:0>61}.{}", vec!["a".repeat(62); 3].join("."));
            shard.put(&NodeName(name), record(None));
        }
        assert!(shard.encode().is_some());
        for n in 0..3000 {
            shard.put(&NodeName(format!("{n}-{}", "a".repeat(60))), record(None));
        }
        assert!(shard.encode().is_none());
    }

    #[test]
    fn nodes_are_spread_over_all_shards() {
        let mut counts = [0; SHARDS];
        for n in 0..10_000 {
            counts[ShardId::for_node(&NodeName(format!("edge-{n}"))).index()] += 1;
        }
        assert!(counts.iter().all(|count| (500..750).contains(count)), "{counts:?}");
        assert!(ShardId::all().all(|shard| ShardId::of_name(&shard.name()) == Some(shard)));
    }
}
