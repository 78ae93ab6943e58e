//! Storage of the shards: ConfigMaps, or memory in tests.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::future::try_join_all;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::ObjectMeta;
use prepull_api::task::NodeName;

use super::record::{NodeRecord, NodeRefusal, RecordChange};
use super::shard::{Shard, ShardId};
use crate::post_params;

/// The label of the ConfigMaps, by which they are watched.
pub const LABEL: &str = "prepull.kubeedge.io/node-records";
/// The most attempts of a change. One fails only where a shard was changed at the same moment, by a person or by a
/// leader that is being deposed.
pub const ATTEMPTS: usize = 10;

/// Why a change was not made.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the text of each explains it")]
pub enum RosterError {
    #[error(transparent)]
    Refused(#[from] NodeRefusal),
    #[error("{operation} ConfigMap {name}")]
    Request { operation: &'static str, name: String, source: Box<kube::Error> },
    #[error("ConfigMap {0} keeps changing under this change: try again")]
    Contended(String),
    #[error(
        "ConfigMap {0} is full: delete its entries of nodes that do not exist any more and are not revoked"
    )]
    Full(String),
    #[error("ConfigMap {0}: the API server does not answer")]
    TooSlow(String),
}

/// The shards of tests: version and entries of each.
type Memory = BTreeMap<ShardId, (u64, BTreeMap<String, String>)>;

/// Storage of the shards.
#[derive(Clone, Debug)]
pub enum ShardStore {
    /// In the cluster.
    ConfigMaps(Box<Api<ConfigMap>>),
    /// In this process.
    Memory(Arc<Mutex<Memory>>),
}

impl ShardStore {
    /// Storage in the ConfigMaps of `namespace`.
    pub fn in_cluster(client: kube::Client, namespace: &str) -> Self {
        Self::ConfigMaps(Box::new(Api::namespaced(client, namespace)))
    }

    /// Storage in this process, for tests.
    pub fn in_memory() -> Self {
        Self::Memory(Arc::default())
    }

    /// Reads a shard; an empty one if there is none.
    pub async fn read(&self, id: ShardId) -> Result<Shard, RosterError> {
        match self {
            Self::ConfigMaps(maps) => {
                let map = maps.get_opt(&id.name()).await.map_err(request_error("reading", id))?;
                Ok(map.map(|map| decode(map).1).unwrap_or_default())
            }
            Self::Memory(memory) => {
                Ok(lock(memory).get(&id).map_or_else(Shard::default, |(version, data)| {
                    Shard::decode(data.clone(), Some(version.to_string()))
                }))
            }
        }
    }

    /// Reads all shards that there are.
    pub async fn read_all(&self) -> Result<Vec<(ShardId, Shard)>, kube::Error> {
        match self {
            Self::ConfigMaps(maps) => {
                // By name, not by the label: removing the label must not readmit a node.
                let reads = ShardId::all().map(async |id| maps.get_opt(&id.name()).await);
                let found = try_join_all(reads).await?.into_iter().flatten();
                Ok(found.map(decode).filter_map(|(id, shard)| Some((id?, shard))).collect())
            }
            Self::Memory(memory) => {
                let ids: Vec<_> = lock(memory).keys().copied().collect();
                let mut shards = Vec::new();
                for id in ids {
                    shards.extend(self.read(id).await.map(|shard| (id, shard)));
                }
                Ok(shards)
            }
        }
    }

    /// Writes the shard in place of the version that it was read from. Returns the new version, or none if the stored
    /// one is another.
    pub async fn write(&self, id: ShardId, shard: &Shard) -> Result<Option<String>, RosterError> {
        let data = shard.encode().ok_or_else(|| RosterError::Full(id.name()))?;
        match self {
            Self::ConfigMaps(maps) => {
                let map = ConfigMap {
                    metadata: ObjectMeta {
                        name: Some(id.name()),
                        resource_version: shard.version.clone(),
                        labels: Some([(LABEL.to_owned(), String::new())].into()),
                        ..ObjectMeta::default()
                    },
                    data: Some(data),
                    ..ConfigMap::default()
                };
                let params = post_params();
                let written = match shard.version {
                    Some(_) => maps.replace(&id.name(), &params, &map).await,
                    None => maps.create(&params, &map).await,
                };
                match written {
                    Ok(map) => Ok(map.metadata.resource_version),
                    // 404: deleted since, as the next read finds out.
                    Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(None),
                    Err(error) => Err(request_error("writing", id)(error)),
                }
            }
            Self::Memory(memory) => {
                let mut memory = lock(memory);
                let stored = memory.get(&id).map(|(version, _)| *version);
                if stored.map(|version| version.to_string()) != shard.version {
                    return Ok(None);
                }
                let version = stored.unwrap_or(0) + 1;
                memory.insert(id, (version, data));
                Ok(Some(version.to_string()))
            }
        }
    }

    /// Makes one change. Returns the record before and after it.
    pub async fn change(
        &self,
        node: &NodeName,
        change: &RecordChange,
    ) -> Result<(NodeRecord, NodeRecord), RosterError> {
        let id = ShardId::for_node(node);
        for _ in 0..ATTEMPTS {
            let mut shard = self.read(id).await?;
            let before = shard.record(node);
            let after = before.with_change(node, change)?;
            if !shard.put(node, after.clone()) || self.write(id, &shard).await?.is_some() {
                return Ok((before, after));
            }
        }
        Err(RosterError::Contended(id.name()))
    }
}

/// Reads a ConfigMap; no id if it is none of ours.
pub fn decode(map: ConfigMap) -> (Option<ShardId>, Shard) {
    let id = map.metadata.name.as_deref().and_then(ShardId::of_name);
    (id, Shard::decode(map.data.unwrap_or_default(), map.metadata.resource_version))
}

fn lock<T>(memory: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that holds the lock can leave the map half changed.
    memory.lock().unwrap_or_else(PoisonError::into_inner)
}

fn request_error(operation: &'static str, id: ShardId) -> impl FnOnce(kube::Error) -> RosterError {
    move |source| RosterError::Request { operation, name: id.name(), source: Box::new(source) }
}
