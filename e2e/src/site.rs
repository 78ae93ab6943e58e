//! What the tests of faults begin with: a cluster with its cloud, and a private registry behind a link that can be
//! slowed and cut.

use std::time::Duration;

use anyhow::{Result, ensure};
use prepull_api::crd::kruise::ImagePullJob;

use crate::api_proxy::ApiProxy;
use crate::cleanup::eventually;
use crate::cloud::Cloud;
use crate::cluster::Cluster;
use crate::images::Image;
use crate::jobs::JobBuilder;
use crate::kruise::Builder;
use crate::network::Network;
use crate::node::{EdgeNode, Start};
use crate::place::password;
use crate::proxy::Proxy;
use crate::registry::{Registry, Request};

/// For what happens within a second on an idle machine.
pub const SOON: Duration = Duration::from_secs(30);
/// Who may pull.
const USER: &str = "alice";
/// Its password, as a job names it.
const SECRET: (&str, &str) = ("default", "registry");

async fn registry() -> Result<Registry> {
    Registry::start().user(USER, &password(USER)).await
}

/// The cluster, the cloud and the registry. Nodes are added by the test: it is the test that kills them.
pub struct Site {
    /// The Kubernetes API.
    pub cluster: Cluster,
    /// cloudcore-prepull.
    pub cloud: Cloud,
    /// Only for a user, whose password is in a secret.
    pub registry: Registry,
    /// Through which every node of the site reaches the registry.
    pub link: Proxy,
}

impl Site {
    /// Starts all of it.
    pub async fn start() -> Result<Self> {
        Self::with(&[]).await
    }

    /// Starts all of it, the cloud with these flags.
    pub async fn with(cloud: &[&str]) -> Result<Self> {
        let (cluster, registry) = Self::parts().await?;
        Self::of(cluster, registry, cloud).await
    }

    /// Starts all of it, in a cluster of its own.
    pub async fn own() -> Result<Self> {
        let (cluster, registry) = tokio::try_join!(Cluster::own(), registry())?;
        Self::of(cluster, registry, &[]).await
    }

    /// Starts all of it, with Kruise's API, the cloud with these flags.
    pub async fn with_kruise(cloud: &[&str]) -> Result<Self> {
        let (cluster, registry) = Self::parts().await?;
        cluster.install_kruise().await?;
        let cloud = Cloud::with_kruise(&cluster).args(cloud).await?;
        Self::around(cluster, registry, cloud).await
    }

    /// Starts all of it in this cluster, with a proxy between the cloud and the API server.
    pub async fn with_api_proxy(cluster: Cluster, cloud: &[&str], seed: u64) -> Result<(Self, ApiProxy)> {
        let registry = registry().await?;
        let api = ApiProxy::start(&cluster, seed)?;
        let cloud = Cloud::start(&cluster).through(&api).args(cloud).await?;
        Ok((Self::around(cluster, registry, cloud).await?, api))
    }

    /// Starts all of it, the cloud in a network of its own, to which so many cables may lead.
    pub async fn in_network(cloud: &[&str], cables: u8) -> Result<(Self, Network)> {
        let (cluster, registry) = Self::parts().await?;
        let network = Network::new().await?;
        let mut start = Cloud::start(&cluster).within(&network).args(cloud);
        for address in Network::cloud_addresses(cables) {
            start = start.arg("--advertise").arg(&address);
        }
        let cloud = start.await?;
        Ok((Self::around(cluster, registry, cloud).await?, network))
    }

    async fn parts() -> Result<(Cluster, Registry)> {
        tokio::try_join!(Cluster::start(), registry())
    }

    async fn of(cluster: Cluster, registry: Registry, cloud: &[&str]) -> Result<Self> {
        let cloud = Cloud::start(&cluster).args(cloud).await?;
        Self::around(cluster, registry, cloud).await
    }

    async fn around(cluster: Cluster, registry: Registry, cloud: Cloud) -> Result<Self> {
        let link = Proxy::http(registry.addr())?;
        registry.route_through(&link)?;
        cluster.registry_secret(SECRET.0, SECRET.1, &[registry.login(USER)?]).await?;
        Ok(Self { cluster, cloud, registry, link })
    }

    /// A Node that is Ready, and its edge node, to be started with `.await`.
    pub async fn node(&self, name: &str) -> Result<Start<'_>> {
        self.cluster.edge_nodes(&[name]).await?;
        Ok(EdgeNode::start(&self.cluster, &self.cloud, name))
    }

    /// A job that may pull from the registry. Unless told otherwise, it waits no longer for a node than a test does.
    pub fn job(&self, name: &str) -> JobBuilder<'_> {
        self.cluster.job(name).secret(&format!("{}/{}", SECRET.0, SECRET.1)).timeout_seconds(55)
    }

    /// A job of Kruise's API that may pull from the registry.
    pub fn pull_job(&self, name: &str, image: &str) -> Builder<'_, ImagePullJob> {
        self.cluster.pull_job(name, image).secrets(&[SECRET.1])
    }

    /// An image of random layers of these sizes, and its reference.
    pub fn image(&self, name: &str, layers: &[u64]) -> Result<(Image, String)> {
        let image = Image::of_layers(name, layers)?;
        let reference = self.registry.seed(&image, &format!("team/{name}:v1"))?;
        Ok((image, reference))
    }

    /// Waits until the link has carried so many bytes more than it had at the call.
    pub async fn carries(&self, bytes: u64) -> Result<()> {
        let begin = self.link.bytes();
        eventually(&format!("the link carries {bytes} bytes"), SOON, async || {
            let carried = self.link.bytes() - begin;
            ensure!(carried >= bytes, "it has carried {carried}");
            Ok(())
        })
        .await
    }

    /// How often somebody asked the registry for something of this image's content and got it.
    pub fn fetches(&self, image: &Image) -> usize {
        let of_image =
            |request: &Request| image.blobs().iter().any(|blob| request.path.ends_with(blob.as_str()));
        self.registry.requests().blob_fetches().filter(of_image).len()
    }
}
