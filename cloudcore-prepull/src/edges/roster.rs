//! The roster: which key each node has, and which nodes are revoked. It is stored in the cluster, in ConfigMaps.
//!
//! ```text
//!  node revoke, allow ─▶ ConfigMaps ◀──writer (one per shard)◀── join, renew, handshake
//!                            └──watch──▶ view ──▶ handshake, live sessions
//! ```
//!
//! The ConfigMap of a node orders concurrent changes: a change applies to the stored version, or fails.
//! So a renewal comes either before a revocation, which ends what it issued, or after it, and is
//! refused; no clock decides that.

mod alarm;
mod view;
mod writer;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::StreamExt;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{Event, watcher};
use prepull_admission::ca::CaFingerprint;
use prepull_admission::records::record::{Recorded, Standing};
use prepull_admission::records::shard::ShardId;
use prepull_admission::records::store::{self, ShardStore};
use prepull_api::task::NodeName;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::edges::pki::KeyHash;
use crate::edges::pki::peer::PeerIdentity;
use crate::kube_api::cluster::read_with_retry;
use crate::kube_api::events::Events;
use crate::kube_api::refusal::{FailureLog, explain_error};
use crate::kube_api::watch::{self, lasting_problem};
use alarm::{AlarmPlace, Alarms};
use view::RosterView;
use writer::ShardWriter;

pub use alarm::RosterMetrics;
pub(crate) use prepull_admission::records::record::{HeldKey, JoinScope, NodeRefusal, RecordChange};

/// How long we wait for the watch to show a Node before we refuse its edge: an agent may start a moment after its Node
/// was made, and the watch lags behind.
const NODE_PATIENCE: Duration = Duration::from_secs(2);
/// Those that wait for a Node at a time: half of the slots of either port. Each has a valid certificate or token. The
/// edges of many Nodes that were deleted are refused at once beyond it.
const NODE_WAITS: usize = 64;

/// The roster. All clones share it.
#[derive(Clone, Debug)]
pub struct Roster {
    shared: Arc<SharedRoster>,
}

#[derive(Debug)]
struct SharedRoster {
    store: ShardStore,
    view: Arc<RosterView>,
    writers: Vec<Arc<ShardWriter>>,
    alarms: Alarms,
    node_waits: Semaphore,
}

impl Roster {
    /// The roster in the ConfigMaps of `namespace`. Nothing is known of it before [`Self::load`]. The client is fenced: who
    /// no longer leads records nothing.
    pub(crate) fn in_cluster(
        client: kube::Client,
        namespace: &str,
        events: Events,
        metrics: RosterMetrics,
    ) -> Self {
        Self::new(ShardStore::in_cluster(client, namespace), Alarms::new(Some(events), metrics))
    }

    /// A roster in this process, for tests. Every Node exists.
    pub fn in_memory() -> Self {
        Self::new(ShardStore::in_memory(), Alarms::new(None, RosterMetrics::default()))
    }

    fn new(store: ShardStore, alarms: Alarms) -> Self {
        let view = Arc::new(RosterView::new());
        let writer = |id| ShardWriter::new(id, store.clone(), Arc::clone(&view));
        let writers = ShardId::all().map(writer).collect();
        Self {
            shared: Arc::new(SharedRoster {
                store,
                view,
                writers,
                alarms,
                node_waits: Semaphore::new(NODE_WAITS),
            }),
        }
    }

    /// Reads all of it; tries until it succeeds.
    pub(crate) async fn load(&self) {
        let read = || self.shared.store.read_all();
        for (id, shard) in read_with_retry("the records of nodes", explain_error::<ConfigMap>, read).await {
            self.shared.view.take_over(id, shard);
        }
    }

    /// Follows the changes that others make, for ever.
    pub(crate) async fn watch(self, client: kube::Client, namespace: String) {
        let maps: Api<ConfigMap> = Api::namespaced(client, &namespace);
        let config = watch::watcher_config().labels(store::LABEL);
        let mut events = std::pin::pin!(watcher(maps, config).default_backoff());
        let (mut listed, log) = (Vec::new(), FailureLog::default());
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Init) => listed.clear(),
                Ok(Event::InitApply(map)) => listed.extend(self.take_over(map)),
                Ok(Event::InitDone) => {
                    for id in ShardId::all().filter(|id| !listed.contains(id)) {
                        self.restore(id);
                    }
                }
                Ok(Event::Apply(map)) => _ = self.take_over(map),
                Ok(Event::Delete(map)) => {
                    if let (Some(id), _) = store::decode(map) {
                        self.restore(id);
                    }
                }
                Err(error) => {
                    let problem = lasting_problem::<ConfigMap>(&error);
                    log.record("watch", "ConfigMap", problem.as_deref(), &error);
                }
            }
        }
    }

    fn take_over(&self, map: ConfigMap) -> Option<ShardId> {
        let id = ShardId::of_name(map.metadata.name.as_deref()?)?;
        // Mostly what this process has written itself: a thousand records that need no second reading.
        if !self.shared.view.is_known(id, map.metadata.resource_version.as_deref()) {
            self.shared.view.take_over(id, store::decode(map).1);
        }
        Some(id)
    }

    /// Writes a deleted ConfigMap again: deleting it must not readmit a revoked node.
    fn restore(&self, id: ShardId) {
        if self.shared.view.forget_version(id) {
            tracing::warn!(config_map = id.name(), "the record of nodes was deleted, and is written again");
            self.shared.writers[id.index()].restore();
        }
    }

    /// Takes over the list of all Nodes, each with whether it is an edge node.
    pub(crate) fn set_nodes(&self, nodes: impl Iterator<Item = (NodeName, bool)>) {
        self.shared.view.set_nodes(nodes.collect());
    }

    /// Takes over a Node that has changed; none if it was deleted.
    pub(crate) fn set_node(&self, node: &NodeName, is_edge: Option<bool>) {
        self.shared.view.set_node(node, is_edge);
    }

    pub(crate) fn recorded(&self, node: &NodeName) -> Recorded {
        self.shared.view.recorded(node)
    }

    /// Waits until something has changed that may end a session.
    pub(crate) async fn wait_for_change(&self) {
        self.shared.view.wait_for_change().await;
    }

    /// Waits a moment for a Node that is not known: it may have been made just now.
    pub(crate) async fn wait_for_node(&self, node: &NodeName) {
        let SharedRoster { view, node_waits, .. } = &*self.shared;
        if view.find_node(node).is_err()
            && let Ok(_place) = node_waits.try_acquire()
        {
            let _ = timeout(NODE_PATIENCE, view.node_arrives(node)).await;
        }
    }

    /// Whether the holder of this key is served on.
    pub(crate) fn check_key(&self, node: &NodeName, key: KeyHash) -> Result<(), NodeRefusal> {
        self.shared.view.key_standing(node, key).map(drop)
    }

    /// Counts a session that is ended for what [`Self::check_key`] has found.
    pub(crate) fn count_ended(&self, refusal: &NodeRefusal) {
        self.shared.alarms.count_refused(refusal);
    }

    /// Decides on a handshake of the tunnel with a certificate of this CA, and records that the key is in use.
    pub(crate) fn admit(&self, peer: &PeerIdentity, ca: CaFingerprint) -> Result<(), NodeRefusal> {
        let PeerIdentity { node, key, not_after, form } = peer;
        match self
            .shared
            .view
            .key_standing(node, *key)
            .inspect_err(|refusal| self.shared.alarms.count_refused(refusal))?
        {
            Standing::Known => {}
            Standing::ToBeRecorded => {
                let used = HeldKey::new(*key, *not_after).with_certificate(Some(ca.into()), *form);
                self.shard_writer(node).note_use(node.clone(), used);
            }
            Standing::Superseded { newest } => {
                self.shared.alarms.raise_superseded(node, *key, newest, AlarmPlace::Tunnel);
            }
        }
        Ok(())
    }

    /// Records the key of a node that joins, or refuses it.
    pub(crate) async fn join(
        &self,
        node: &NodeName,
        by: JoinScope,
        requested: HeldKey,
    ) -> Result<(), Option<NodeRefusal>> {
        let recorded = async {
            if by == JoinScope::Fleet {
                self.wait_for_node(node).await;
                self.shared.view.find_edge(node)?;
            }
            self.shard_writer(node).store_change(node.clone(), RecordChange::Joined { by, requested }).await
        };
        recorded.await.inspect_err(|refusal| self.count_refusal(refusal.as_ref()))
    }

    /// Records the new key of a renewed certificate, or refuses it.
    pub(crate) async fn renew(
        &self,
        peer: &PeerIdentity,
        requested: HeldKey,
        now: SystemTime,
    ) -> Result<(), Option<NodeRefusal>> {
        let PeerIdentity { node, key, not_after, form } = peer;
        let recorded = async {
            self.wait_for_node(node).await;
            self.shared.view.find_node(node)?;
            let by = HeldKey::new(*key, *not_after).with_certificate(None, *form);
            self.shard_writer(node).store_change(node.clone(), RecordChange::Renewed { by, requested }).await
        };
        recorded.await.inspect_err(|refusal| {
            self.count_refusal(refusal.as_ref());
            if let Some(NodeRefusal::Superseded { newest, .. }) = refusal {
                self.shared.alarms.raise_superseded(node, *key, *newest, AlarmPlace::Renewal);
            }
        })?;
        if *not_after <= now {
            self.shared.alarms.renewed_late(node, *not_after);
        }
        Ok(())
    }

    fn count_refusal(&self, refusal: Option<&NodeRefusal>) {
        if let Some(refusal) = refusal {
            self.shared.alarms.count_refused(refusal);
        }
    }

    fn shard_writer(&self, node: &NodeName) -> &Arc<ShardWriter> {
        &self.shared.writers[ShardId::for_node(node).index()]
    }
}

#[cfg(test)]
mod tests;
