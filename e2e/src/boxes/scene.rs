//! The parts of a site behind an uplink.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt};

use crate::cleanup::eventually;
use crate::cloud::Cloud;
use crate::cluster::Cluster;
use crate::images::Image;
use crate::network::lan::Vlan;
use crate::network::{Lan, Outlet, Uplink};
use crate::node::{EdgeNode, NodeStart};
use crate::registry::Registry;

/// Flag of an agent that serves the other boxes.
pub const SERVING: &str = "--peer-listen=0.0.0.0:10006";
/// Label that names a node's site, and the site.
pub const SITE: (&str, &str) = ("topology.kubernetes.io/zone", "store-1");
/// Name of the registry in references.
const REGISTRY: &str = "registry.example";
/// The repository and tag of the image.
const IMAGE: &str = "shop/app:v1";
/// Boxes that start at the same time: a containerd takes half a second of CPU time to start.
const STARTING: usize = 4;
/// Limit for the runtime to remove unused content, which it does in the background.
const REMOVAL: Duration = Duration::from_secs(60);

/// The plan of a site.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Number of boxes, `edge-1` and so on.
    pub boxes: u8,
    /// The uplink of the site.
    pub uplink: Uplink,
    /// Bytes of the image's layers.
    pub layers: Vec<u64>,
    /// Additional flags of the agents.
    pub agent: Vec<String>,
    /// Additional flags of the cloud.
    pub cloud: Vec<String>,
}

/// A box of the site: its place in the network, agent and containerd.
pub struct SiteBox {
    // Fields are dropped in this order.
    /// Agent and containerd.
    pub node: EdgeNode,
    /// Place of the box in the network.
    pub outlet: Outlet,
}

/// A site behind an uplink, with one image in the registry at the other end. Fields are dropped in this order.
pub struct Boxes {
    /// The boxes, in the order of their names.
    pub all: Vec<SiteBox>,
    /// cloudcore-prepull, at the other end of the uplink.
    pub cloud: Cloud,
    /// The registry, at the other end of the uplink.
    pub registry: Registry,
    /// The network of the site.
    pub lan: Lan,
    /// The API server, which only the cloud reaches.
    pub cluster: Cluster,
    /// The image that jobs pull.
    pub image: Image,
    /// Its reference.
    pub reference: String,
    /// Address of the tunnel for boxes.
    tunnel: SocketAddr,
    /// Address of the registry for boxes.
    upstream: SocketAddr,
    agent: Vec<String>,
}

impl Boxes {
    /// Starts a site, and waits until every box is connected.
    pub async fn start(plan: &Plan) -> Result<Self> {
        let lan = Lan::new(plan.uplink.clone()).await?;
        let (cluster, registry) =
            tokio::try_join!(Cluster::start(), Registry::start().with_host(REGISTRY).into_future())?;
        if plan.cloud.iter().any(|flag| flag == "--enable-kruise-api") {
            cluster.install_kruise().await?;
        }
        let mut cloud = Cloud::start(&cluster).arg("--advertise").arg(&Lan::outside().to_string());
        for flag in &plan.cloud {
            cloud = cloud.arg(flag);
        }
        let cloud = cloud.await?;
        let (tunnel, upstream) = (lan.open_door(cloud.tunnel_addr())?, lan.open_door(registry.addr())?);
        registry.route_to(upstream)?;
        let image = Image::of_layers("site", &plan.layers)?;
        let reference = registry.seed(&image, IMAGE)?;
        let agent = plan.agent.clone();
        let all = Vec::new();
        let mut boxes =
            Self { all, cloud, registry, lan, cluster, image, reference, tunnel, upstream, agent };
        let numbers = futures::stream::iter(1..=plan.boxes);
        let started = numbers.map(|number| boxes.start_box(number)).buffered(STARTING).try_collect().await?;
        boxes.all = started;
        for SiteBox { node, .. } in &boxes.all {
            node.is_connected().await?;
        }
        Ok(boxes)
    }

    async fn start_box(&self, number: u8) -> Result<SiteBox> {
        self.make_box(&format!("edge-{number}"), Vlan::Office, |start, _| Ok(start)).await
    }

    /// Has the boxes send a credential of their own to the registry, by `hosts.toml`.
    pub fn send_credential(&self) -> Result<()> {
        self.registry.route_with_credential(self.upstream)
    }

    /// Adds a box that differs from the others to the site, and waits until it's connected.
    pub async fn add(
        &mut self,
        name: &str,
        vlan: Vlan,
        how: impl for<'a> FnOnce(NodeStart<'a>, &Outlet) -> Result<NodeStart<'a>>,
    ) -> Result<()> {
        let added = self.make_box(name, vlan, how).await?;
        added.node.is_connected().await?;
        self.all.push(added);
        Ok(())
    }

    /// Removes the box that [`Self::add`] has added last, for good.
    pub async fn remove(&mut self) -> Result<()> {
        let Some(removed) = self.all.pop() else { return Ok(()) };
        self.cluster.delete_node(removed.node.name()).await
    }

    async fn make_box(
        &self,
        name: &str,
        vlan: Vlan,
        how: impl for<'a> FnOnce(NodeStart<'a>, &Outlet) -> Result<NodeStart<'a>>,
    ) -> Result<SiteBox> {
        let outlet = self.lan.outlet_in(vlan).await?;
        self.cluster.node(name).edge().ready().label(SITE.0, SITE.1).create().await?;
        let flags: Vec<_> = self.agent.iter().map(String::as_str).collect();
        let start = EdgeNode::start(&self.cluster, &self.cloud, name).in_box(&outlet, self.tunnel);
        let node = how(start.args(&flags), &outlet)?.await?;
        Ok(SiteBox { node, outlet })
    }

    /// Address of the registry for boxes.
    pub fn upstream(&self) -> SocketAddr {
        self.upstream
    }

    /// Names of the first boxes.
    pub fn names(&self, count: usize) -> Vec<String> {
        self.all.iter().take(count).map(|found| found.node.name().to_owned()).collect()
    }

    /// The box of this name.
    pub fn get(&self, name: &str) -> Result<&SiteBox> {
        self.all.iter().find(|found| found.node.name() == name).with_context(|| format!("no box {name}"))
    }

    /// Bytes of the image, as a box downloads it: layers, configuration and manifest.
    pub fn image_bytes(&self) -> Result<u64> {
        let all = self.image.manifests().iter().chain(self.image.blobs());
        let size = |digest: &String| Ok(std::fs::metadata(self.image.blob_file(digest))?.len());
        all.map(size).sum()
    }

    /// Removes the image from all boxes, with everything that was downloaded for it.
    pub async fn forget_image(&self) -> Result<()> {
        futures::future::try_join_all(self.all.iter().map(|found| self.forget_on(&found.node))).await?;
        Ok(())
    }

    async fn forget_on(&self, node: &EdgeNode) -> Result<()> {
        node.forgets_all_tasks().await?;
        // A box outside the job may not have the image, which isn't an error.
        node.remove_image(&self.reference).await?;
        eventually(&format!("{} has nothing of the image", node.name()), REMOVAL, async || {
            let content = node.containerd().content_labels().await?;
            let left = self.image.blobs().iter().filter(|blob| content.contains_key(*blob)).count();
            let begun = node.containerd().ingests().await?;
            ensure!(left == 0 && begun.is_empty(), "{left} blobs are there, and the beginnings of {begun:?}");
            Ok(())
        })
        .await
    }
}
