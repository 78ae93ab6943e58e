//! Set-up for tests of faults: a cluster with its cloud, and a private registry behind a link that can be slowed and
//! cut.

use std::path::Path;

use anyhow::{Result, ensure};
use prepull_api::crd::kruise::ImagePullJob;

use crate::api_proxy::ApiProxy;
use crate::cleanup::{SOON, eventually};
use crate::cloud::Cloud;
use crate::cluster::Cluster;
use crate::images::Image;
use crate::jobs::JobBuilder;
use crate::kruise::Builder;
use crate::network::Network;
use crate::node::{EdgeNode, NodeStart};
use crate::place::password;
use crate::proxy::Proxy;
use crate::registry::{Registry, RegistryRequest};

/// User that may pull from the registry.
const USER: &str = "alice";
/// Namespace and name of the Secret with the password of [`USER`].
const SECRET: (&str, &str) = ("default", "registry");

async fn registry() -> Result<Registry> {
    Registry::start().user(USER, &password(USER)).await
}

/// A cluster, a cloud and a registry. The test adds the nodes itself, because it will kill them.
pub struct Site {
    /// Cluster of the site.
    pub cluster: Cluster,
    /// cloudcore-prepull of the site.
    pub cloud: Cloud,
    /// Registry of the site. It requires the user with the password in the site's Secret.
    pub registry: Registry,
    /// Proxy through which every node of the site reaches the registry.
    pub link: Proxy,
    /// Whether Kruise's API is served.
    has_kruise: bool,
}

impl Site {
    /// Starts a site.
    pub async fn start() -> Result<Self> {
        Self::with_cloud_args(&[]).await
    }

    /// Starts a site with these flags for its cloud.
    pub async fn with_cloud_args(cloud: &[&str]) -> Result<Self> {
        let (cluster, registry) = Self::start_parts().await?;
        Self::start_in(cluster, registry, cloud).await
    }

    /// Starts a site with the programs of an earlier release.
    pub async fn with_old_programs(programs: &Path) -> Result<Self> {
        let (cluster, registry) = Self::start_parts().await?;
        let cloud = Cloud::start(&cluster).of_before(programs).await?;
        Self::assemble(cluster, registry, cloud).await
    }

    /// Starts a site in a cluster that it shares with no other test.
    pub async fn in_own_cluster() -> Result<Self> {
        let (cluster, registry) = tokio::try_join!(Cluster::own(), registry())?;
        Self::start_in(cluster, registry, &[]).await
    }

    /// Starts a site with Kruise's API and with these flags for its cloud.
    pub async fn with_kruise(cloud: &[&str]) -> Result<Self> {
        let (cluster, registry) = Self::start_parts().await?;
        cluster.install_kruise().await?;
        let cloud = Cloud::with_kruise(&cluster).args(cloud).await?;
        Ok(Self { has_kruise: true, ..Self::assemble(cluster, registry, cloud).await? })
    }

    /// Starts a site in the given cluster, with a proxy between the cloud and the API server.
    pub async fn with_api_proxy(cluster: Cluster, cloud: &[&str], seed: u64) -> Result<(Self, ApiProxy)> {
        let registry = registry().await?;
        let api = ApiProxy::start(&cluster, seed)?;
        let cloud = Cloud::start(&cluster).through(&api).args(cloud).await?;
        Ok((Self::assemble(cluster, registry, cloud).await?, api))
    }

    /// Starts a site with its cloud in a separate network, for up to `cables` cables.
    pub async fn in_network(cloud: &[&str], cables: u8) -> Result<(Self, Network)> {
        let (cluster, registry) = Self::start_parts().await?;
        let network = Network::new().await?;
        let mut start = Cloud::start(&cluster).within(&network).args(cloud);
        for address in Network::cloud_addresses(cables) {
            start = start.arg("--advertise").arg(&address);
        }
        let cloud = start.await?;
        Ok((Self::assemble(cluster, registry, cloud).await?, network))
    }

    async fn start_parts() -> Result<(Cluster, Registry)> {
        tokio::try_join!(Cluster::start(), registry())
    }

    async fn start_in(cluster: Cluster, registry: Registry, cloud: &[&str]) -> Result<Self> {
        let cloud = Cloud::start(&cluster).args(cloud).await?;
        Self::assemble(cluster, registry, cloud).await
    }

    async fn assemble(cluster: Cluster, registry: Registry, cloud: Cloud) -> Result<Self> {
        let link = Proxy::for_http(registry.addr())?;
        registry.route_through(&link)?;
        cluster.registry_secret(SECRET.0, SECRET.1, &[registry.login(USER)?]).await?;
        Ok(Self { cluster, cloud, registry, link, has_kruise: false })
    }

    /// Creates a Node that's Ready, and returns its edge node, which `.await` starts. With Kruise's API it also waits
    /// for its NodeImage: an earlier job would find no node. Current API servers accept no objects of a definition for
    /// two seconds after it's established.
    pub async fn add_node(&self, name: &str) -> Result<NodeStart<'_>> {
        self.cluster.edge_nodes(&[name]).await?;
        if self.has_kruise {
            self.cluster.node_image(name).exists().await?;
        }
        Ok(EdgeNode::start(&self.cluster, &self.cloud, name))
    }

    /// A job that may pull from the registry. Its nodes have a shorter deadline than the test, unless it sets another.
    pub fn job(&self, name: &str) -> JobBuilder<'_> {
        self.cluster.job(name).secret(&format!("{}/{}", SECRET.0, SECRET.1)).timeout_seconds(55)
    }

    /// An ImagePullJob that may pull from the registry.
    pub fn pull_job(&self, name: &str, image: &str) -> Builder<'_, ImagePullJob> {
        self.cluster.pull_job(name, image).secrets(&[SECRET.1])
    }

    /// Puts an image of random layers of the given sizes into the registry, and returns it with its reference.
    pub fn seed_image(&self, name: &str, layers: &[u64]) -> Result<(Image, String)> {
        let image = Image::of_layers(name, layers)?;
        let reference = self.registry.seed(&image, &format!("team/{name}:v1"))?;
        Ok((image, reference))
    }

    /// Waits until the link has carried this many more bytes than at the time of the call.
    pub async fn link_carries(&self, bytes: u64) -> Result<()> {
        let begin = self.link.bytes();
        eventually(&format!("the link carries {bytes} bytes"), SOON, async || {
            let carried = self.link.bytes() - begin;
            ensure!(carried >= bytes, "it has carried {carried}");
            Ok(())
        })
        .await
    }

    /// Number of successful requests to the registry for layers and configuration of an image.
    pub fn fetches(&self, image: &Image) -> usize {
        let of_image = |request: &RegistryRequest| {
            image.blobs().iter().any(|blob| request.path.ends_with(blob.as_str()))
        };
        self.registry.requests().blob_fetches().filter(of_image).len()
    }
}
