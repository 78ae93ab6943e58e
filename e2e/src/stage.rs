//! What most tests begin with.

use anyhow::{Context, Result};

use crate::cloud::Cloud;
use crate::cluster::Cluster;
use crate::node::EdgeNode;

/// A cluster, the cloud in it, and edge nodes that have joined: see [`Self::with_edges`]. The registries are the
/// test's own.
pub struct Stage {
    // In the order in which they stop.
    edges: Vec<EdgeNode>,
    /// The cloud side.
    pub cloud: Cloud,
    /// The cluster.
    pub cluster: Cluster,
}

impl Stage {
    /// With these nodes: edge nodes that are Ready, each with an agent and a containerd.
    pub async fn with_edges(names: &[&str]) -> Result<Self> {
        let cluster = Cluster::start().await?;
        let cloud = Cloud::start(&cluster).await?;
        Self::around(cluster, cloud, names).await
    }

    /// As [`Self::with_edges`], with Kruise's API.
    pub async fn with_kruise(names: &[&str]) -> Result<Self> {
        let cluster = Cluster::with_kruise().await?;
        let cloud = Cloud::with_kruise(&cluster).await?;
        Self::around(cluster, cloud, names).await
    }

    /// In this cluster, with this cloud.
    pub async fn around(cluster: Cluster, cloud: Cloud, names: &[&str]) -> Result<Self> {
        cluster.edge_nodes(names).await?;
        let starts = names.iter().map(|name| EdgeNode::start(&cluster, &cloud, name).into_future());
        let edges = futures::future::try_join_all(starts).await?;
        Ok(Self { edges, cloud, cluster })
    }

    /// One of the nodes.
    pub fn edge(&self, name: &str) -> Result<&EdgeNode> {
        self.edges.iter().find(|edge| edge.name() == name).with_context(|| format!("no edge {name}"))
    }

    /// All nodes, in the order of [`Self::with_edges`].
    pub fn edges(&self) -> &[EdgeNode] {
        &self.edges
    }
}
