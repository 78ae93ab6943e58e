//! The keys and revocations of nodes: ConfigMaps, each with the records of some of the nodes.

pub mod record;
pub mod shard;
pub mod store;

use std::collections::BTreeMap;

use prepull_api::task::NodeName;

use record::{NodeRecord, RecordChange};
use shard::ShardId;
use store::{RosterError, ShardStore};

/// The records, for a command that makes a change and ends.
#[derive(Clone, Debug)]
pub struct Records(ShardStore);

impl Records {
    /// The records in the ConfigMaps of `namespace`.
    pub fn in_cluster(client: kube::Client, namespace: &str) -> Self {
        Self(ShardStore::in_cluster(client, namespace))
    }

    /// All records, by the nodes' names.
    pub async fn list(&self) -> Result<BTreeMap<NodeName, NodeRecord>, kube::Error> {
        let shards = self.0.read_all().await?;
        Ok(shards.into_iter().flat_map(|(_, shard)| shard.records).collect())
    }

    /// The node's record, empty if there is none.
    pub async fn get(&self, node: &NodeName) -> Result<NodeRecord, RosterError> {
        Ok(self.0.read(ShardId::for_node(node)).await?.record(node))
    }

    /// Makes a change. Returns the record before and after it.
    pub async fn change(
        &self,
        node: &NodeName,
        change: &RecordChange,
    ) -> Result<(NodeRecord, NodeRecord), RosterError> {
        self.0.change(node, change).await
    }
}
