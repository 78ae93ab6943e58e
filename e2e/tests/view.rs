//! The shipped DaemonSet's view of containerd's download settings: mirrors, certificates and the CAs of the node.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use prepull_api::crd::status::JobImageStatus;
use prepull_api::task::PulledBy;
use prepull_e2e::kubernetes::{Fate, Installation, pods};
use prepull_e2e::parts::workspace;
use prepull_e2e::prelude::*;
use serde_json::json;

/// containerd's configuration, with that of registries below it.
const CONFIG: &str = "/etc/containerd/config.toml";
const HOSTS: &str = "/etc/containerd/certs.d";
/// A directory outside the pod's view.
const HIDDEN: &str = "/srv/certs.d";
/// Path of containerd's configuration under k3s.
const K3S: &str = "/var/lib/rancher/k3s/agent/etc/containerd";
/// The node's credential providers, and the patch that mounts them into the pod.
const PROVIDERS: &str = "/etc/credential-providers";
const PROVIDERS_DOC: &str = "docs/credential-providers.md";

/// Leads a registry without an address to a mirror. Returns the directory of its configuration.
fn leads(edge: &Worker, name: &str, mirror: SocketAddr, scheme: &str, more: &str) -> Result<PathBuf> {
    let dir = edge.path(HOSTS).join(name);
    std::fs::create_dir_all(&dir)?;
    let text = format!("[host.\"{scheme}://{mirror}\"]\ncapabilities = [\"pull\", \"resolve\"]\n{more}");
    std::fs::write(dir.join("hosts.toml"), text)?;
    Ok(dir)
}

/// Leads a registry to a mirror, like k3s does for those in its `registries.yaml`.
fn leads_as_k3s(edge: &Worker, name: &str, mirror: SocketAddr) -> Result<()> {
    let dir = edge.path(K3S).join("certs.d").join(name);
    std::fs::create_dir_all(&dir)?;
    let text = format!(
        "server = \"https://{name}\"\n\n[host.\"http://{mirror}/v2\"]\n  capabilities = [\"pull\", \"resolve\"]\n"
    );
    Ok(std::fs::write(dir.join("hosts.toml"), text)?)
}

/// Gives the node a credential provider for one registry. The pod has no shell: the plugin brings a static one.
fn provides(edge: &Worker, registry: &Registry, user: &str) -> Result<()> {
    let (host, user, password) = registry.login(user)?;
    let (dir, bin) = (edge.path(PROVIDERS), edge.path(PROVIDERS).join("bin"));
    std::fs::create_dir(&bin)?;
    std::fs::copy("/bin/busybox", bin.join("busybox"))?;
    let answer = json!({
        "apiVersion": "credentialprovider.kubelet.k8s.io/v1", "kind": "CredentialProviderResponse",
        "cacheKeyType": "Registry", "cacheDuration": "1h",
        "auth": {host: {"username": user, "password": password}},
    });
    let plugin = bin.join("of-node");
    std::fs::write(&plugin, format!("#!{PROVIDERS}/bin/busybox sh\necho '{answer}'\n"))?;
    std::fs::set_permissions(&plugin, PermissionsExt::from_mode(0o755))?;
    let config = json!({
        "apiVersion": "kubelet.config.k8s.io/v1", "kind": "CredentialProviderConfig",
        "providers": [{
            "name": "of-node", "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
            "matchImages": [host], "defaultCacheDuration": "0s",
        }],
    });
    Ok(std::fs::write(dir.join("config.yaml"), config.to_string())?)
}

/// The patch from the documentation that mounts credential providers.
fn documented_patch() -> Result<String> {
    let doc = std::fs::read_to_string(workspace().join(PROVIDERS_DOC))?;
    let block = doc.split("```yaml\n").find(|block| block.starts_with("patches:"));
    let block = block.with_context(|| format!("{PROVIDERS_DOC} has no patch"))?;
    Ok(block.split("```").next().unwrap_or_default().to_owned())
}

/// Makes containerd discard unpacked layers, from its next start on.
fn discards_layers(config: &Path, version: &str) -> Result<()> {
    let images = if is_at_least(version, (2, 0)) { "cri.v1.images\"" } else { "grpc.v1.cri\".containerd" };
    let text = std::fs::read_to_string(config)?;
    let more = format!("[plugins.\"io.containerd.{images}]\ndiscard_unpacked_layers = true\n");
    Ok(std::fs::write(config, text + &more)?)
}

/// Whether a version such as `1.6.20~ds1` or `v2.2.9` is this release or a later one.
fn is_at_least(version: &str, release: (u32, u32)) -> bool {
    let mut numbers = version.trim_start_matches('v').split('.').map_while(|number| number.parse().ok());
    (numbers.next(), numbers.next()) >= (Some(release.0), Some(release.1))
}

/// Pulls an image ahead, and returns its status.
async fn status_of(cluster: &Cluster, name: &str, image: &str) -> Result<JobImageStatus> {
    let status = cluster.job(name).images([image]).on(["edge-1"]).completes().await?;
    status.image("edge-1", image).cloned().context("no status")
}

/// Pulls an image of a registry under a name that leads there. The agent must download it from there.
async fn agent_downloads(
    cluster: &Cluster,
    edge: &Worker,
    (name, registry, reference): (&str, &Registry, &str),
) -> Result<Image> {
    let image = Image::small(name)?;
    let path = reference.split_once('/').context("a reference has a host")?.1;
    registry.seed(&image, path)?;
    let status = status_of(cluster, name, reference).await?;
    let by = (status.facts.pulled_by, status.facts.pulled_by_reason.as_str());
    assert_eq!(by, (Some(PulledBy::Agent), ""), "{name}");
    let repository = path.split(':').next().unwrap_or(path);
    assert!(
        !registry.requests().for_repository(repository).blob_fetches().is_empty(),
        "{name}: from elsewhere"
    );
    assert!(edge.containerd().has_image(reference).await?, "{name}");
    Ok(image)
}

#[tokio::test]
async fn a_pod_downloads_as_containerd_does() -> Result<()> {
    let kubernetes = Kubernetes::start().await?;
    let cluster = kubernetes.cluster();
    let (_server, mut edge) =
        tokio::try_join!(kubernetes.add_worker("server-1"), kubernetes.add_worker("edge-1"))?;
    cluster.label_node("edge-1", "node-role.kubernetes.io/edge", Some("")).await?;

    let (own, of_node, clients) =
        (Authority::new("own")?, Authority::new("node")?, Authority::new("clients")?);
    let plain = Registry::start().await?;
    let private = Registry::start().with_host("private").tls(&own).clients_of(&clients).await?;
    let trusted = Registry::start().with_host("trusted").tls(&of_node).await?;
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
    // In the form of update-ca-certificates: a bundle, and a link to a file outside the pod's view.
    let store = edge.path("/etc/ssl/certs");
    std::fs::write(store.join("ca-certificates.crt"), of_node.pem())?;
    std::os::unix::fs::symlink("/usr/local/share/ca-certificates/node.crt", store.join("0123abcd.0"))?;
    let _installation = Installation::install_on(&kubernetes).await?;

    for (name, mirror) in [("plain", &plain), ("private", &private), ("trusted", &trusted)] {
        let reference = format!("{name}.example/team/app:v1");
        agent_downloads(cluster, &edge, (name, mirror, &reference)).await?;
    }

    // containerd gets another directory: the agent can't follow, and reports that.
    let config = edge.path(CONFIG);
    let text = std::fs::read_to_string(&config)?;
    ensure!(text.contains(HOSTS), "{text}");
    std::fs::write(&config, text.replace(HOSTS, HIDDEN))?;
    edge.containerd_mut().restart().await?;
    let image = plain.seed(&Image::small("hidden")?, "team/hidden:v1")?;
    let status = status_of(cluster, "hidden", &image).await?;
    assert_eq!(status.facts.pulled_by, Some(PulledBy::Runtime));
    let reason = &status.facts.pulled_by_reason;
    assert!(reason.contains(HIDDEN) && reason.contains("mount it"), "{reason}");
    // With a limit it fails, with the same reason.
    let image = plain.seed(&Image::small("limited")?, "team/limited:v1")?;
    let download = serde_json::from_value(json!({"maxRate": "1M"}))?;
    let job = cluster.job("limited").images([&image]).on(["edge-1"]);
    let status = job.spec(|spec| spec.download = Some(download)).fails().await?;
    let reason = status.image("edge-1", &image).context("no status")?.reason.clone();
    assert!(reason.contains(HIDDEN) && !edge.containerd().has_image(&image).await?, "{reason}");

    // Without a config_path, containerd has a default since 2.2, and earlier ones look nowhere.
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
        assert_eq!(status.facts.pulled_by, Some(PulledBy::Agent), "{status:?}");
        let by_containerd = edge.containerd().pull("plain.example/team/hidden:v1", None).await;
        println!("containerd itself, with its default: {by_containerd:?}");
    } else {
        job.fails().await?;
        assert!(plain.requests().for_repository("team/default").0.is_empty());
    }
    Ok(())
}

#[tokio::test]
async fn a_pod_downloads_as_k3s_does() -> Result<()> {
    let kubernetes = Kubernetes::start().await?;
    let cluster = kubernetes.cluster();
    let edge = kubernetes.worker_of_k3s("edge-1");
    let (_server, mut edge) = tokio::try_join!(kubernetes.add_worker("server-1"), edge)?;
    cluster.label_node("edge-1", "node-role.kubernetes.io/edge", Some("")).await?;

    let of_node = Authority::new("node")?;
    let (mirror, near) = (Registry::start().await?, Registry::start().await?);
    let far = Registry::start().with_host("far.example").tls(&of_node).await?;
    let closed = Registry::start().user("node", &password("node")).await?;
    let proxy = Proxy::for_connect(far.addr())?;
    for addr in [mirror.addr(), closed.addr(), proxy.addr()] {
        edge.reaches_at(addr)?;
    }
    let nearby = edge.reaches_nearby(&near)?;
    leads_as_k3s(&edge, "mirrored.example", mirror.addr())?;
    leads_as_k3s(&edge, "near.example", nearby)?;
    std::fs::write(edge.path("/etc/ssl/certs/ca-certificates.crt"), of_node.pem())?;
    provides(&edge, &closed, "node")?;
    let installation = Installation::copy_manifests(&kubernetes).await?;
    installation.set_images()?;
    installation.set_address()?;
    let edges = "edgecore-prepull/kustomization.yaml";
    installation.replace_text(
        edges,
        "# components:\n#   - runtimes/k3s\n",
        "components:\n  - runtimes/k3s\n",
    )?;
    installation.replace_text(edges, "#   - monitoring\n", &documented_patch()?)?;
    let (proxied, direct, server) = (proxy.addr(), nearby.ip(), "PREPULL_SERVER=");
    let proxies = ["HTTPS_PROXY", "HTTP_PROXY"].map(|name| format!("{name}=http://{proxied}\n      - "));
    let proxies = format!("{}NO_PROXY={direct}\n      - {server}", proxies.concat());
    installation.replace_text(edges, server, &proxies)?;
    installation.install_cloud().await?;
    installation.install_edges().await?;

    let of_closed = closed.image("team/closed:v1");
    for case in [
        ("mirrored", &mirror, "mirrored.example/team/mirrored:v1"),
        ("closed", &closed, of_closed.as_str()),
        ("far", &far, "far.example/team/far:v1"),
        ("near", &near, "near.example/team/near:v1"),
    ] {
        agent_downloads(cluster, &edge, case).await?;
    }
    assert_eq!(Vec::from_iter(closed.requests().for_repository("team/closed").users()), ["node"]);
    // Requests to other hosts go through the proxy, and no others.
    let asked: Vec<_> = proxy.records().into_iter().map(|record| (record.method, record.path)).collect();
    let far_only = asked.iter().all(|(method, to)| method == "CONNECT" && to == "far.example:443");
    assert!(far_only && !asked.is_empty(), "{asked:?}");

    // Layers are discarded from now on: the agent keeps none, and the image runs.
    let config = edge.path(K3S).join("config.toml");
    discards_layers(&config, &edge.containerd().version().await?)?;
    edge.containerd_mut().restart().await?;
    let reference = "mirrored.example/team/discarded:v1";
    let image = agent_downloads(cluster, &edge, ("discarded", &mirror, reference)).await?;
    let layer = image.blobs().last().context("no layer")?;
    eventually("the layer is discarded", SOON, async || {
        ensure!(!edge.containerd().content_labels().await?.contains_key(layer), "it is kept");
        Ok(())
    })
    .await?;
    assert_eq!(kubernetes.fate(&pods::pod("discarded", "edge-1", reference, None)).await?, Fate::Runs);
    Ok(())
}
