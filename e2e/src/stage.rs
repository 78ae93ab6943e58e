//! Set-up of most tests: a cluster, a cloud and edge nodes.

use anyhow::{Context, Result};

use crate::cloud::Cloud;
use crate::cluster::Cluster;
use crate::node::EdgeNode;

/// A cluster with its cloud, and edge nodes that have joined. The test starts its registries itself.
pub struct Stage {
    // Fields are dropped in this order.
    edges: Vec<EdgeNode>,
    /// cloudcore-prepull of the stage.
    pub cloud: Cloud,
    /// Cluster of the stage.
    pub cluster: Cluster,
}

impl Stage {
    /// Starts a stage with these edge nodes, which are Ready, each with an agent and a containerd.
    pub async fn with_edges(names: &[&str]) -> Result<Self> {
        let cluster = Cluster::start().await?;
        let cloud = Cloud::start(&cluster).await?;
        Self::from_parts(cluster, cloud, names).await
    }

    /// Starts a stage like [`Self::with_edges`], with Kruise's API. The nodes have their NodeImages: a job takes the nodes
    /// that have one when it begins.
    pub async fn with_kruise(names: &[&str]) -> Result<Self> {
        let cluster = Cluster::with_kruise().await?;
        let cloud = Cloud::with_kruise(&cluster).await?;
        let stage = Self::from_parts(cluster, cloud, names).await?;
        for name in names {
            stage.cluster.node_image(name).exists().await?;
        }
        Ok(stage)
    }

    /// Starts edge nodes for a cluster and a cloud that are running.
    pub async fn from_parts(cluster: Cluster, cloud: Cloud, names: &[&str]) -> Result<Self> {
        cluster.edge_nodes(names).await?;
        let starts = names.iter().map(|name| EdgeNode::start(&cluster, &cloud, name).into_future());
        let edges = futures::future::try_join_all(starts).await?;
        Ok(Self { edges, cloud, cluster })
    }

    /// The edge node with this name.
    pub fn edge(&self, name: &str) -> Result<&EdgeNode> {
        self.edges.iter().find(|edge| edge.name() == name).with_context(|| format!("no edge {name}"))
    }

    /// All edge nodes, in the order of [`Self::with_edges`].
    pub fn edges(&self) -> &[EdgeNode] {
        &self.edges
    }
}
