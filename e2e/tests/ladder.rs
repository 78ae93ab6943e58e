//! The ladder of real links: on each, the tunnel connects and an image arrives.

use std::time::{Duration, Instant};

use futures::future::try_join_all;
use prepull_e2e::network::EdgeWire;
use prepull_e2e::network::profiles::{
    ASYMMETRIC, BLACK_HOLE, BLACK_HOLE_NO_PROBING, BURSTS, FLAPPING, GUEST_WIFI, IPV6_ONLY, JITTER, KBITS_64,
    LTE_CELL_EDGE, Profile, SATELLITE,
};
use prepull_e2e::prelude::*;

const KIB: u64 = 1024;
/// Each link, with the number of bytes that it carries in some seconds.
const LADDER: [(Profile, u64); 11] = [
    (BURSTS, MIB),
    (JITTER, MIB),
    (ASYMMETRIC, 2 * MIB),
    (KBITS_64, 64 * KIB),
    (SATELLITE, 512 * KIB),
    (LTE_CELL_EDGE, 512 * KIB),
    (FLAPPING, 2 * MIB),
    (BLACK_HOLE, MIB),
    (BLACK_HOLE_NO_PROBING, MIB),
    (IPV6_ONLY, MIB),
    (GUEST_WIFI, MIB),
];
/// Limit for each link in seconds. All are tested at the same time.
const LIMIT: i64 = 75;
/// Seed of losses and jitter.
const SEED: u64 = 1;

/// A node behind a link, and its image.
struct Rung {
    profile: Profile,
    node: EdgeNode,
    reference: String,
    portal: Proxy,
    _wire: EdgeWire,
}

impl Rung {
    async fn new(cluster: &Cluster, cloud: &Cloud, registry: &Registry, number: usize) -> Result<Self> {
        let (profile, size) = LADDER[number];
        let name = format!("edge-{number}");
        let image = Image::of_layers(&name, &[size / 4, size - size / 4])?;
        let reference = registry.seed(&image, &format!("team/{name}:v1"))?;
        let wire = EdgeWire::new(&profile, SEED.wrapping_add(2 * number as u64)).await?;
        let portal = Proxy::for_http(registry.addr())?;
        portal.be_portal(profile.name == GUEST_WIFI.name);
        let tunnel = wire.open_door(cloud.tunnel_addr())?;
        let start = EdgeNode::start(cluster, cloud, &name).behind_wire(&wire, tunnel).without_agent();
        let mut node = start.await?;
        registry.route_node(node.containerd(), wire.open_door(portal.addr())?)?;
        node.restart_agent()?;
        Ok(Self { profile, node, reference, portal, _wire: wire })
    }

    /// Pulls the image over the link, and returns the duration.
    async fn climb(&self, cluster: &Cluster) -> Result<Duration> {
        let (begun, name) = (Instant::now(), self.node.name());
        let job = cluster.job(name).on([name]).images([&self.reference]).retries(20).policy("Always");
        let job = job.timeout_seconds(LIMIT).apply().await?;
        if self.profile.name == GUEST_WIFI.name {
            job.until("the portal is named", |status| {
                let image = status.image(name, &self.reference);
                image.is_some_and(|image| image.reason.contains("answered with HTML: a captive portal?"))
            })
            .await?;
            self.portal.be_portal(false);
        }
        job.completes().await?;
        ensure!(self.node.has_image(&self.reference).await?, "{} is not there", self.reference);
        Ok(begun.elapsed())
    }
}

#[tokio::test]
async fn an_image_arrives_over_each_link() -> Result<()> {
    let (cluster, registry) = tokio::try_join!(Cluster::start(), Registry::start().into_future())?;
    let mut cloud = Cloud::start(&cluster);
    for address in EdgeWire::far_addresses() {
        cloud = cloud.arg("--advertise").arg(&address);
    }
    let cloud = cloud.await?;
    let names: Vec<String> = (0..LADDER.len()).map(|number| format!("edge-{number}")).collect();
    cluster.edge_nodes(&names.iter().map(String::as_str).collect::<Vec<_>>()).await?;
    let rungs = (0..LADDER.len()).map(|number| Rung::new(&cluster, &cloud, &registry, number));
    let rungs = try_join_all(rungs).await?;
    let climbs = rungs.iter().map(async |rung| (rung.profile.name, rung.climb(&cluster).await));
    let mut broken = Vec::new();
    for (name, took) in futures::future::join_all(climbs).await {
        match took {
            Ok(took) => println!("{name}: {:.1} s", took.as_secs_f64()),
            Err(error) => broken.push(format!("{name}: {error:#}")),
        }
    }
    ensure!(broken.is_empty(), "{}", broken.join("\n"));
    Ok(())
}
