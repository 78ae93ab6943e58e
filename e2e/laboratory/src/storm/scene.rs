//! The parts of a storm.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use prepull_api::crd::EDGE_LABEL;
use prepull_e2e::api_proxy::ApiProxy;
use prepull_e2e::cloud::Cloud;
use prepull_e2e::cluster::Cluster;
use prepull_e2e::front::Front;
use prepull_e2e::images::Image;
use prepull_e2e::node::EdgeNode;
use prepull_e2e::place::password;
use prepull_e2e::proxy::Proxy;
use prepull_e2e::registry::Registry;
use prepull_e2e::sim::{Behaviour, Fleet, PullDurations};

use super::StormOptions;
use super::diary::Diary;

/// Real nodes.
pub(super) const NODES: [&str; 3] = ["edge-1", "edge-2", "edge-3"];
/// The node with the disk that gets filled, and its size, which is enough for all images.
const SMALL_DISK: (&str, u64) = ("edge-3", 512 << 20);
/// Label of the nodes that selectors choose, on all real nodes and some simulated ones.
pub(super) const ZONE: (&str, &str) = ("zone", "storm");
/// Simulated nodes with [`ZONE`] at the beginning.
const IN_ZONE: usize = 20;
/// Users of the registries, one each.
const USERS: [&str; 2] = ["alice", "bob"];
/// Images of each registry, and the size of the layer that each image has for itself.
const IMAGES: [(&str, u64); 4] =
    [("shop/web:v1", 64 << 10), ("shop/api:v2", 1 << 20), ("ai/model:v3", 12 << 20), ("db/main:v4", 4 << 20)];

/// Everything that runs. Fields are dropped in this order, so that each part comes before those that it uses.
pub(super) struct StormScene {
    pub(super) fleet: Fleet,
    pub(super) trouble: StormParts,
    pub(super) images: Images,
    pub(super) cluster: Cluster,
}

/// The parts that faults can hit.
pub(super) struct StormParts {
    pub(super) nodes: Vec<EdgeNode>,
    /// The proxy in the tunnel of each node.
    pub(super) links: Vec<Proxy>,
    pub(super) clouds: Vec<Cloud>,
    #[expect(dead_code, reason = "held until the end")]
    front: Front,
    pub(super) api: ApiProxy,
    /// The proxy before each registry.
    pub(super) ways: Vec<Proxy>,
    pub(super) registries: Vec<Registry>,
    /// Directory with the agent of an earlier release.
    pub(super) before: Option<PathBuf>,
}

/// The images in jobs, and their secrets.
pub(super) struct Images {
    pub(super) references: Vec<String>,
    /// Host, user and password of each registry.
    pub(super) logins: Vec<(String, String, String)>,
}

/// Namespace of the secrets.
pub(super) const NAMESPACE: &str = "default";

impl Images {
    /// Name of the secret for a registry.
    pub(super) fn secret_of(registry: usize) -> String {
        format!("registry-{registry}")
    }

    /// Makes the secret of a registry, with the right password or a wrong one.
    pub(super) async fn make_secret(&self, cluster: &Cluster, registry: usize, right: bool) -> Result<()> {
        let Some((host, user, password)) = self.logins.get(registry) else { return Ok(()) };
        let password = if right { password.clone() } else { prepull_e2e::place::password("wrong") };
        cluster.registry_secret(NAMESPACE, &Self::secret_of(registry), &[(host, user, &password)]).await
    }
}

impl StormScene {
    pub(super) async fn start(options: &StormOptions, seed: u64, diary: &Diary) -> Result<Self> {
        diary.note_event("etcd, kube-apiserver, and a proxy before it");
        let cluster = Cluster::own().await?;
        cluster.install_kruise().await?;
        let api = ApiProxy::start(&cluster, seed)?;
        diary.note_event("two replicas of cloudcore-prepull, and a front before them");
        let flags = ["--heartbeat", "2s"];
        let replica =
            || Cloud::with_kruise(&cluster).through(&api).standby().default_election_times().args(&flags);
        let mut first = replica().await?;
        first.leads(Duration::from_secs(60)).await?;
        let mut second = replica().named("cloudcore-prepull-2").await?;
        let front = Front::of(&[first.backend(), second.backend()])?;
        first.behind(&front);
        second.behind(&front);

        diary.note_event("two private registries, a proxy before each");
        let (mut registries, mut ways, mut logins, mut references) = (vec![], vec![], vec![], vec![]);
        for (number, user) in USERS.into_iter().enumerate() {
            let name = format!("registry-{number}");
            let registry = Registry::start().with_host(&name).user(user, &password(user)).await?;
            let way = Proxy::for_http(registry.addr())?;
            registry.route_through(&way)?;
            for (path, size) in IMAGES {
                let image = Image::of_layers(
                    &format!("storm-{number}-{path}").replace(['/', ':'], "-"),
                    &[size, 64 << 10],
                )?;
                references.push(registry.seed(&image, path)?);
            }
            let (host, user, password) = registry.login(user)?;
            logins.push((host.to_owned(), user.to_owned(), password.to_owned()));
            registries.push(registry);
            ways.push(way);
        }
        let images = Images { references, logins };
        for registry in 0..images.logins.len() {
            images.make_secret(&cluster, registry, true).await?;
        }

        diary.note_event("three nodes with containerd, a proxy in the tunnel of each");
        let (mut nodes, mut links) = (vec![], vec![]);
        for name in NODES {
            make_node(&cluster, name).await?;
            let link = Proxy::for_tcp(first.tunnel_addr())?;
            let node = EdgeNode::start(&cluster, &first, name).tunnel_through(&link);
            let node = if name == SMALL_DISK.0 { node.disk(SMALL_DISK.1) } else { node };
            nodes.push(node.await?);
            links.push(link);
        }
        for node in &nodes {
            node.is_connected().await?;
        }

        diary.note_event(&format!("{} simulated edges", options.edges));
        let behaviour = Behaviour {
            pull: PullDurations::LogNormal(Duration::from_millis(500), Duration::from_secs(4)),
            fail_rate: 0.02,
            image_bytes: 10 << 20,
            disconnect_every: Some(Duration::from_secs(120)),
            restart_every: Some(Duration::from_secs(180)),
            most_faults: None,
            redial_within: Some(Duration::from_secs(5)),
            seed,
        };
        let fleet = Fleet::start(&cluster, &first, options.edges.into()).behaves(behaviour).await?;
        for name in fleet.names().iter().take(IN_ZONE) {
            cluster.label_node(name, ZONE.0, Some(ZONE.1)).await?;
        }
        let trouble = StormParts {
            nodes,
            links,
            clouds: vec![first, second],
            front,
            api,
            ways,
            registries,
            before: options.before.clone(),
        };
        Ok(Self { fleet, trouble, images, cluster })
    }
}

/// Creates the Node of a real node.
async fn make_node(cluster: &Cluster, name: &str) -> Result<()> {
    cluster.node(name).edge().ready().label(ZONE.0, ZONE.1).create().await
}

/// Creates the Node of an edge again, after it was deleted.
pub(super) async fn remake_node(cluster: &Cluster, name: &str) -> Result<()> {
    if NODES.contains(&name) {
        make_node(cluster, name).await
    } else {
        cluster.node(name).edge().ready().create().await
    }
}

/// All nodes have the label of edges.
pub(super) fn edge_label() -> (&'static str, &'static str) {
    (EDGE_LABEL, "")
}
