//! What the shipped DaemonSet sees of what containerd downloads with: mirrors, certificates and the CAs of the node.

use std::net::SocketAddr;
use std::path::PathBuf;

use prepull_api::crd::status::ImageStatus;
use prepull_api::task::PulledBy;
use prepull_e2e::kubernetes::Installation;
use prepull_e2e::prelude::*;

/// containerd's configuration, and below it that of registries.
const CONFIG: &str = "/etc/containerd/config.toml";
const HOSTS: &str = "/etc/containerd/certs.d";
/// A directory that no pod sees.
const HIDDEN: &str = "/srv/certs.d";

/// Leads a registry that has no address to a mirror. Returns the directory of its configuration.
fn leads(edge: &Worker, name: &str, mirror: SocketAddr, scheme: &str, more: &str) -> Result<PathBuf> {
    let dir = edge.path(HOSTS).join(name);
    std::fs::create_dir_all(&dir)?;
    let text = format!("[host.\"{scheme}://{mirror}\"]\ncapabilities = [\"pull\", \"resolve\"]\n{more}");
    std::fs::write(dir.join("hosts.toml"), text)?;
    Ok(dir)
}

/// Whether a version such as `1.6.20~ds1` or `v2.2.9` is this release or a later one.
fn is_at_least(version: &str, release: (u32, u32)) -> bool {
    let mut numbers = version.trim_start_matches('v').split('.').map_while(|number| number.parse().ok());
    (numbers.next(), numbers.next()) >= (Some(release.0), Some(release.1))
}

/// Pulls an image ahead, and returns what the status says of it.
async fn status_of(cluster: &Cluster, name: &str, image: &str) -> Result<ImageStatus> {
    let status = cluster.job(name).images([image]).on(["edge-1"]).completes().await?;
    status.image("edge-1", image).cloned().context("no status")
}

#[tokio::test]
async fn a_pod_downloads_as_containerd_does() -> Result<()> {
    let kubernetes = Kubernetes::start().await?;
    let cluster = kubernetes.cluster();
    let (_server, mut edge) = tokio::try_join!(kubernetes.worker("server-1"), kubernetes.worker("edge-1"))?;
    cluster.label_node("edge-1", "node-role.kubernetes.io/edge", Some("")).await?;

    let (own, of_node, clients) =
        (Authority::new("own")?, Authority::new("node")?, Authority::new("clients")?);
    let plain = Registry::start().await?;
    let private = Registry::start().named("private").tls(&own).clients_of(&clients).await?;
    let trusted = Registry::start().named("trusted").tls(&of_node).await?;
    for registry in [&plain, &private, &trusted] {
        edge.reaches(registry)?;
    }
    leads(&edge, "plain.example", plain.addr(), "http", "")?;
    leads(&edge, "trusted.example", trusted.addr(), "https", "")?;
    let files = "ca = \"own.crt\"\nclient = [[\"client.crt\", \"client.key\"]]\n";
    let dir = leads(&edge, "private.example", private.addr(), "https", files)?;
    let (certificate, key) = clients.server(&clients.place().new_dir("client")?, &["edge-1"])?;
    std::fs::copy(own.file(), dir.join("own.crt"))?;
    std::fs::copy(certificate, dir.join("client.crt"))?;
    std::fs::copy(key, dir.join("client.key"))?;
    // As update-ca-certificates leaves it: a bundle, and a link to what a pod doesn't see.
    let store = edge.path("/etc/ssl/certs");
    std::fs::write(store.join("ca-certificates.crt"), of_node.pem())?;
    std::os::unix::fs::symlink("/usr/local/share/ca-certificates/node.crt", store.join("0123abcd.0"))?;
    let _installation = Installation::on(&kubernetes).await?;

    for (name, mirror) in [("plain", &plain), ("private", &private), ("trusted", &trusted)] {
        let image = Image::small(name)?;
        mirror.seed(&image, "team/app:v1")?;
        let reference = format!("{name}.example/team/app:v1");
        let status = status_of(cluster, name, &reference).await?;
        assert_eq!(
            (status.pulled_by, status.pulled_by_reason.as_str()),
            (Some(PulledBy::Agent), ""),
            "{name}"
        );
        let fetches = mirror.requests().of("team/app").blob_fetches();
        assert!(!fetches.is_empty(), "{name}: past the mirror");
        assert!(edge.containerd().has_image(&reference).await?, "{name}");
    }

    // containerd is led elsewhere: the agent can't follow, and says so.
    let config = edge.path(CONFIG);
    let text = std::fs::read_to_string(&config)?;
    ensure!(text.contains(HOSTS), "{text}");
    std::fs::write(&config, text.replace(HOSTS, HIDDEN))?;
    edge.containerd_mut().restart().await?;
    let image = plain.seed(&Image::small("hidden")?, "team/hidden:v1")?;
    let status = status_of(cluster, "hidden", &image).await?;
    assert_eq!(status.pulled_by, Some(PulledBy::Runtime));
    let reason = &status.pulled_by_reason;
    assert!(reason.contains(HIDDEN) && reason.contains("mount it"), "{reason}");
    // With a limit it fails, with the same reason.
    let image = plain.seed(&Image::small("limited")?, "team/limited:v1")?;
    let download = serde_json::from_value(serde_json::json!({"maxRate": "1M"}))?;
    let job = cluster.job("limited").images([&image]).on(["edge-1"]);
    let status = job.spec(|spec| spec.download = Some(download)).fails().await?;
    let reason = status.image("edge-1", &image).context("no status")?.reason.clone();
    assert!(reason.contains(HIDDEN) && !edge.containerd().has_image(&image).await?, "{reason}");

    // Without a config_path, containerd from 2.2 on has a default, and earlier ones look nowhere.
    std::fs::write(
        &config,
        text.lines().filter(|line| !line.contains(HOSTS)).collect::<Vec<_>>().join("\n"),
    )?;
    edge.containerd_mut().restart().await?;
    plain.seed(&Image::small("default")?, "team/default:v1")?;
    let image = "plain.example/team/default:v1";
    let job = cluster.job("default").images([image]).on(["edge-1"]).retries(0);
    let has_default = is_at_least(&edge.containerd().version().await?, (2, 2));
    if has_default {
        let status = job.completes().await?;
        let status = status.image("edge-1", image).context("no status")?;
        assert_eq!(status.pulled_by, Some(PulledBy::Agent), "{status:?}");
        let by_containerd = edge.containerd().pull("plain.example/team/hidden:v1", None).await;
        println!("containerd itself, with its default: {by_containerd:?}");
    } else {
        job.fails().await?;
        assert!(plain.requests().of("team/default").0.is_empty());
    }
    Ok(())
}
