//! The last act of the demo: a whole cluster with kubelets, our unmodified manifests on it, and a pod that starts from
//! a pre-pulled image while its registry is off.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use prepull_e2e::cluster::NAMESPACE;
use prepull_e2e::images::Image;
use prepull_e2e::kubernetes::{self, Fate, Installation, Kubernetes, Worker, pods};
use prepull_e2e::parts;
use prepull_e2e::place::password;
use prepull_e2e::registry::Registry;

use super::story::Story;
use super::verdict::DemoVerdict;

/// The edge box.
const EDGE: &str = "edge-1";
/// User of the registry.
const USER: &str = "carol";

/// Shows the act, or the reason why this machine can't.
pub(super) async fn show(story: &Story, verdict: &mut DemoVerdict) -> Result<()> {
    story.begin_step("A whole cluster: kubelets, and manifests/ as they are shipped");
    if let Some(reason) = kubernetes::missing_for_worker() {
        story.print_line(&format!("Left out, since this machine can't run a kubelet: {reason}"));
        return Ok(());
    }
    if !parts::are_native()? {
        story.print_line(
            "Left out, since an image with programs of another architecture needs an emulator in it",
        );
        return Ok(());
    }
    let cluster = Kubernetes::start().await?;
    let (_server, mut edge) = tokio::try_join!(cluster.add_worker("server-1"), cluster.add_worker(EDGE))?;
    cluster.cluster().label_node(EDGE, "node-role.kubernetes.io/edge", Some("")).await?;
    let version = cluster.cluster().version().await?;
    story.print_line(&format!(
        "{version}, RBAC and NodeRestriction on; server-1 and {EDGE}, each with a kubelet and a containerd"
    ));
    let installation = Installation::copy_manifests(&cluster).await?;
    installation.set_images()?;
    installation.set_address()?;
    let began = Instant::now();
    story.print_command("kubectl apply -k manifests/cluster");
    installation.install_cloud().await?;
    story.print_command("kubectl apply -k manifests/edgecore-prepull    # and a Secret with a join token");
    installation.install_edges().await?;
    story.print_line(&format!("both rolled out after {}", format_seconds(began.elapsed())));

    story.begin_step("An image pulled ahead, its registry switched off, a pod");
    let (ahead, not) = pull_ahead(story, &cluster, &mut edge).await?;
    let began = Instant::now();
    let fate = cluster.fate(&pods::pod("ahead", EDGE, &ahead, Some("shop"))).await?;
    let took = format_seconds(began.elapsed());
    let other = cluster.fate(&pods::pod("not-ahead", EDGE, &not, Some("shop"))).await?;
    let word = |fate| if fate == Fate::Runs { "runs" } else { "waits for its image (ErrImagePull)" };
    story.print_line(&format!("pod of {ahead}: {} after {took}", word(fate)));
    story.print_line(&format!("pod of {not}, which wasn't pulled ahead: {}", word(other)));
    verdict.add_expectation(
        fate == Fate::Runs,
        format!("a pod starts from the pre-pulled image while its registry is off, after {took}"),
    );
    verdict.add_expectation(other == Fate::Asks, "a pod of an image that wasn't pulled ahead doesn't");
    let ours = cluster.refusals()?.iter().filter(|refusal| refusal.is_of(NAMESPACE)).count();
    verdict.add_expectation(ours == 0, "the API server has refused cloudcore-prepull nothing");
    Ok(())
}

/// Pulls one of two images of a registry ahead, and switches the registry off. Returns both.
async fn pull_ahead(story: &Story, cluster: &Kubernetes, edge: &mut Worker) -> Result<(String, String)> {
    let mut shop = Registry::start().user(USER, &password(USER)).await?;
    edge.reaches(&shop)?;
    let api = cluster.cluster();
    api.registry_secret("default", "shop", &[shop.login(USER)?]).await?;
    api.annotate_secret("default", "shop", prepull_api::credentials::ALLOW, Some("ahead")).await?;
    let image = shop.seed(&Image::small("ahead")?, "shop/web:v2")?;
    let other = shop.seed(&Image::small("not-ahead")?, "shop/api:v2")?;
    let words = format!("kubectl prepull run {image} --name ahead --secret default/shop");
    let mut command = Command::new(parts::program_path("kubectl-prepull")?);
    command.args(words.split(' ').skip(2)).env("KUBECONFIG", api.kubeconfig());
    let ended = story.run(&words, command).await?;
    ensure!(ended.success(), "{words} has ended with {ended}");
    shop.stop().context("the registry doesn't stop")?;
    story.print_line(&format!("{} is switched off", shop.host()));
    Ok((image, other))
}

fn format_seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}
