//! The parts that the demo runs on.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result};
use futures::future::try_join_all;
use prepull_api::credentials::ALLOW;
use prepull_e2e::certs::Authority;
use prepull_e2e::cloud::Cloud;
use prepull_e2e::cluster::Cluster;
use prepull_e2e::images::Image;
use prepull_e2e::network::Network;
use prepull_e2e::node::EdgeNode;
use prepull_e2e::parts;
use prepull_e2e::place::{Place, password};
use prepull_e2e::registry::Registry;
use prepull_e2e::services;

use super::scenario::{
    CLOUD_NODE, HANGZHOU, HANGZHOU_USER, HARBOR, HARBOR_USER, IMAGES, MAIN, NODES, OFFLINE_NODE, REGION,
    SECOND,
};
use super::story::{Story, align_columns, megabytes};

/// Everything that runs. Fields are dropped in order, so that each part comes before those that it uses.
pub(super) struct DemoStage {
    pub(super) nodes: Vec<EdgeNode>,
    cloud: Cloud,
    /// Connects the API server to the cloud.
    _network: Network,
    pub(super) harbor: Registry,
    pub(super) hangzhou: Registry,
    pub(super) cluster: Cluster,
    images: Vec<(&'static str, Image)>,
    place: Arc<Place>,
}

impl DemoStage {
    /// Starts all parts, and reports each step.
    pub(super) async fn start(story: &Story) -> Result<Self> {
        let place = Place::here()?;

        story.begin_step("A Kubernetes API");
        let cluster = Cluster::own().await?;
        story.print_line(&format!("{} and etcd, RBAC on, on loopback", cluster.version().await?));

        story.begin_step("Two private registries, with different users");
        let authority = Authority::new("the CA of hangzhou.example")?;
        let harbor = Registry::start().with_host(HARBOR).user(HARBOR_USER, &password(HARBOR_USER));
        let hangzhou = Registry::start()
            .with_host(HANGZHOU)
            .user(HANGZHOU_USER, &password(HANGZHOU_USER))
            .tls(&authority);
        let (harbor, hangzhou) = tokio::try_join!(harbor, hangzhou)?;
        // The first run generates the layers, which takes some seconds; later ones find them in the cache.
        let images = tokio::task::spawn_blocking(|| {
            let image = |image: &super::scenario::DemoImage| {
                anyhow::Ok((image.path, Image::of_layers(image.path, image.layers)?))
            };
            IMAGES.iter().map(image).collect::<Result<Vec<_>>>()
        });
        let images = images.await??;
        tokio::try_join!(
            push_all(&harbor, &images, HARBOR_USER),
            push_all(&hangzhou, &images, HANGZHOU_USER)
        )?;
        let bytes = images.iter().map(|(_, image)| image.size()).sum();
        let pushed = format!("{} images, {}", images.len(), megabytes(bytes));
        let row = |cells: [&str; 4]| cells.map(str::to_owned).to_vec();
        for line in align_columns(&[
            row([HARBOR, "plain HTTP", "user alice", &pushed]),
            row([HANGZHOU, "TLS, a CA of its own", "user bob", &pushed]),
        ]) {
            story.print_line(&line);
        }
        let wrong = password("mallory");
        cluster.registry_secret("default", "harbor", &[harbor.login(HARBOR_USER)?]).await?;
        cluster.registry_secret("default", "hangzhou", &[hangzhou.login(HANGZHOU_USER)?]).await?;
        cluster.registry_secret("default", "wrong", &[(HARBOR, HARBOR_USER, &wrong)]).await?;
        story
            .print_line("Secrets: default/harbor, default/hangzhou, and default/wrong with a wrong password");
        let jobs = format!("{},{}", MAIN.name, SECOND.name);
        for secret in ["harbor", "hangzhou", "wrong"] {
            cluster.annotate_secret("default", secret, ALLOW, Some(&jobs)).await?;
        }
        story.print_line(&format!("each for the jobs that its owner allows: {ALLOW}={jobs}"));

        story.begin_step("cloudcore-prepull");
        let cloud = Cloud::start(&cluster).requires_consent();
        let (cloud, network) = services::with_edges_listed(&cluster, cloud).await?;
        story.print_line(&format!(
            "acts as its ServiceAccount with the rights of manifests/; edges dial wss://{}",
            cloud.tunnel_addr()
        ));

        story.begin_step("Three edge nodes, each with its own containerd and agent");
        let nodes = Self::start_nodes(story, &cluster, &cloud).await?;
        Ok(Self { nodes, cloud, _network: network, harbor, hangzhou, cluster, images, place })
    }

    async fn start_nodes(story: &Story, cluster: &Cluster, cloud: &Cloud) -> Result<Vec<EdgeNode>> {
        for (name, region) in NODES {
            let node = cluster.node(name).edge().ready();
            match region {
                Some(region) => node.label(REGION, region).create().await?,
                None => node.create().await?,
            }
        }
        cluster.node(CLOUD_NODE).ready().create().await?;
        cluster.node(OFFLINE_NODE).edge().create().await?;
        let nodes =
            try_join_all(NODES.map(|(name, _)| EdgeNode::start(cluster, cloud, name).into_future())).await?;
        for node in &nodes {
            node.is_connected().await?;
        }
        let mut rows = Vec::new();
        for (name, region) in NODES {
            let region = region.map_or_else(String::new, |region| format!("region={region}"));
            rows.push(vec![name.to_owned(), "joined with a token, connected".to_owned(), region]);
        }
        rows.push(vec![CLOUD_NODE.to_owned(), "not an edge node".to_owned()]);
        rows.push(vec![OFFLINE_NODE.to_owned(), "an edge node that is NotReady".to_owned()]);
        for line in align_columns(&rows) {
            story.print_line(&line);
        }
        Ok(nodes)
    }

    /// Prints the jobs as `kubectl get` shows them.
    pub(super) async fn print_jobs(&self, story: &Story) -> Result<()> {
        let arguments = ["get", "imageprepulljobs", "-o", "wide"];
        story.print_output(
            &format!("kubectl {}", arguments.join(" ")),
            &self.cluster.kubectl(&arguments).await?,
        );
        Ok(())
    }

    /// A command line that begins with kubectl, with this kubeconfig and our programs in the PATH.
    pub(super) fn typed_command(&self, line: &str) -> Result<Command> {
        let mut command = Command::new(parts::kubectl());
        command.args(line.split_whitespace().skip(1));
        command.env("KUBECONFIG", self.cluster.kubeconfig());
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path = std::iter::once(programs()?).chain(std::env::split_paths(&path));
        command.env("PATH", std::env::join_paths(path)?);
        Ok(command)
    }

    /// Digest of an image, which is the same in both registries.
    pub(super) fn image_digest(&self, path: &str) -> &str {
        self.images.iter().find(|(known, _)| *known == path).map_or("", |(_, image)| image.digest())
    }

    pub(super) fn logs(&self) -> &Path {
        self.place.logs()
    }

    pub(super) fn log_tails(&self) -> String {
        self.place.log_tails(&["cloudcore-prepull", "agent-"])
    }

    pub(super) fn print_how_to_go_on(&self, story: &Story, keeper: u32) -> Result<()> {
        story.print_note("KEEP=1: everything stays up.");
        let row = |name: &str, value: String| vec![name.to_owned(), value];
        let mut rows = vec![
            row("kubeconfig", format!("export KUBECONFIG={}", self.cluster.kubeconfig().display())),
            row("plugin", format!("export PATH={}:$PATH", programs()?.display())),
            row("page", "kubectl prepull ui".to_owned()),
            row("logs", self.logs().display().to_string()),
            row("metrics", format!("curl http://{}/metrics", self.cloud.metrics_addr())),
        ];
        for node in &self.nodes {
            let socket = node.containerd().socket();
            rows.push(row(
                node.name(),
                format!("ctr --address {} --namespace k8s.io images list", socket.display()),
            ));
        }
        rows.push(row("stop it all", format!("kill {keeper}")));
        for line in align_columns(&rows) {
            story.print_line(&line);
        }
        Ok(())
    }
}

/// The directory of our programs.
fn programs() -> Result<PathBuf> {
    let plugin = parts::program_path("kubectl-prepull")?;
    Ok(plugin.parent().context("a program is in no directory")?.to_owned())
}

async fn push_all(registry: &Registry, images: &[(&str, Image)], user: &str) -> Result<()> {
    for (path, image) in images {
        registry.push(image, path, user).await?;
    }
    Ok(())
}
