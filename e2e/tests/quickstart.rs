//! docs/quickstart.md on a whole cluster: its script installs, pulls ahead, starts a pod, and removes all of it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use prepull_e2e::kubernetes::Installation;
use prepull_e2e::parts;
use prepull_e2e::prelude::*;
use prepull_e2e::recording::{OutputRecording, record_command};

/// Where the agent keeps its certificate on a node.
const STATE: &str = "/var/lib/edgecore-prepull";
/// The agents' limits for the disk are percentages by default, which a build machine may exceed.
const ROOM: [&str; 4] =
    ["--set", "PREPULL_DISK_MIN_FREE=64MiB", "--set", "PREPULL_IMAGE_GC_HIGH_THRESHOLD=100%"];

/// A person with the script, kubectl and the plugin.
struct Reader<'a> {
    cluster: &'a Cluster,
    script: &'a Path,
}

impl Reader<'_> {
    async fn runs(&self, arguments: &[&str]) -> Result<OutputRecording> {
        let mut command = Command::new(self.script);
        command.args(arguments).env("KUBECONFIG", self.cluster.kubeconfig()).stdin(Stdio::null());
        command.env("HOME", self.cluster.place().dir()).env("NO_COLOR", "1").env("COLUMNS", "100");
        let programs = [parts::kubectl(), parts::program_path("kubectl-prepull")?];
        let dirs = programs.iter().filter_map(|program| program.parent()).map(Path::to_owned);
        let path = std::env::var_os("PATH").unwrap_or_default();
        command.env("PATH", std::env::join_paths(dirs.chain(std::env::split_paths(&path)))?);
        record_command(command).await
    }
}

/// Draws the run for the docs, if `PREPULL_PICTURES` is set, and otherwise beside the logs.
fn draw(run: &OutputRecording, replaced: &[(&str, &str)]) -> Result<()> {
    let command = "manifests/quickstart/quickstart.sh --registry registry.example/team --node edge-1 \
                   --image registry.example/shop/web:v1";
    let svg = run.draw(command, replaced)?;
    ensure!(!svg.contains("127.0.0.1"), "an address of the test is in the picture");
    let dir = std::env::var_os("PREPULL_PICTURES").map(PathBuf::from);
    let dir = dir.map_or_else(|| Place::here().map(|place| place.logs().to_owned()), Ok)?;
    Ok(std::fs::write(dir.join("quickstart.svg"), svg)?)
}

#[tokio::test]
async fn the_quickstart_leads_to_an_offline_pod() -> Result<()> {
    let kubernetes = Kubernetes::start().await?;
    let cluster = kubernetes.cluster();
    let (_server, mut edge) =
        tokio::try_join!(kubernetes.add_worker("server-1"), kubernetes.add_worker("edge-1"))?;
    let installation = Installation::copy_manifests(&kubernetes).await?;
    // The harness forwards one address of Services.
    let own_address = format!("type: LoadBalancer\n  clusterIP: {}", kubernetes.service_address());
    installation.replace_text(
        "cloudcore-prepull/service.yaml",
        "type: LoadBalancer\n",
        &format!("{own_address}\n"),
    )?;
    for program in ["cloudcore-prepull", "edgecore-prepull"] {
        kubernetes.publish(program)?;
    }
    let mut shop = Registry::start().await?;
    edge.reaches(&shop)?;
    let image = shop.seed(&Image::running("quickstart", 24 * MIB)?, "shop/web:v1")?;
    let script = installation.dir().join("quickstart/quickstart.sh");
    let reader = Reader { cluster, script: &script };

    // What is missing is named before anything is made.
    reader.runs(&[]).await?.is(1, &["name the registry that has both images with --registry"])?;
    let registry = kubernetes.registry().host().to_owned();
    let common = [&["--registry", &registry, "--image", &image], &ROOM[..]].concat();
    let missing =
        "no Ready node has the label node-role.kubernetes.io/edge: name one with --node, of edge-1, server-1";
    reader.runs(&common).await?.is(1, &[missing])?;
    cluster.kubectl(&["create", "namespace", "prepull-edge"]).await?;
    let full = [&common[..], &["--node", "edge-1"]].concat();
    reader.runs(&full).await?.is(1, &["the namespace prepull-edge, and the quickstart didn't make it"])?;
    cluster.kubectl(&["delete", "namespace", "prepull-edge"]).await?;

    let done = "the pod has started without the registry";
    let run = reader.runs(&full).await?;
    run.is(0, &["Completed", "pod/quickstart condition met", done])?;
    let folder = installation.dir().display().to_string();
    let replaced = [
        (folder.as_str(), "manifests"),
        (registry.as_str(), "registry.example/team"),
        (shop.host(), "registry.example"),
    ];
    draw(&run, &replaced)?;
    let asked = shop.requests().for_repository("shop/web").len();

    // Again, without the registry and without the pod.
    shop.stop()?;
    kubernetes.delete_pod("quickstart").await?;
    let again = reader.runs(&full).await?;
    again.is(0, &["it has the label of edge nodes", "pod/quickstart condition met", done])?;
    assert_eq!(shop.requests().for_repository("shop/web").len(), asked, "no further request");

    // A pod of the same name that the script didn't make stays.
    kubernetes.delete_pod("quickstart").await?;
    let foreign = ["run", "quickstart", "--image", &image, "--image-pull-policy=Never"];
    cluster.kubectl(&foreign).await?;

    // Nothing else is left, and so it works from the start.
    reader.runs(&["--clean"]).await?.is(0, &["nothing is left of the quickstart"])?;
    ensure!(!edge.path(STATE).exists(), "{STATE} is left");
    let left = "namespaces,customresourcedefinitions,clusterroles,clusterrolebindings";
    let left = cluster.kubectl(&["get", left, "--output=name"]).await?;
    ensure!(!left.contains("prepull"), "{left}");
    let node = cluster.kubectl(&["get", "node", "edge-1", "--output=jsonpath={.metadata}"]).await?;
    ensure!(!node.contains("node-role.kubernetes.io/edge") && !node.contains("quickstart"), "{node}");
    kubernetes.delete_pod("quickstart").await?;
    reader.runs(&full).await?.is(0, &[done])?;
    Ok(())
}
