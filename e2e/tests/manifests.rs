//! The folders for operators: each is rendered by kubectl, and a real API server accepts every object of it under the
//! strict rules of a server-side apply.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{ConfigMap, Container, PodSpec};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use prepull_e2e::parts::workspace;
use prepull_e2e::prelude::*;
use serde::de::DeserializeOwned;
use serde_json::Value;

const CLOUD: &str = "manifests/cluster";
const EDGE: &str = "manifests/edgecore-prepull";

/// The folders of a directory, sorted.
fn folders(dir: &str) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(workspace().join(dir))?.flatten().map(|entry| entry.path());
    let mut folders: Vec<_> = entries.filter(|path| path.is_dir()).collect();
    folders.sort();
    ensure!(!folders.is_empty(), "{dir} has no folders");
    Ok(folders)
}

/// A folder of the test that's like one of the repository's, with these components and files in addition.
fn overlay(cluster: &Cluster, folder: &str, more: &[PathBuf]) -> Result<PathBuf> {
    let dir = cluster.place().new_dir("overlay")?.canonicalize()?;
    // Kustomize takes no absolute paths.
    let up = "../".repeat(dir.components().count() - 1);
    let relative = |path: &Path| format!("{up}{}", path.display().to_string().trim_start_matches('/'));
    let (components, files): (Vec<_>, Vec<_>) = more.iter().partition(|path| path.is_dir());
    let components: Vec<_> = components.into_iter().map(|path| relative(path)).collect();
    let mut resources = vec![relative(&workspace().join(folder).canonicalize()?)];
    for file in files {
        // Nor files of other folders.
        let name = file.file_name().and_then(|name| name.to_str()).context("not UTF-8")?;
        std::fs::copy(file, dir.join(name))?;
        resources.push(name.to_owned());
    }
    let text = serde_json::json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization",
        "resources": resources, "components": components,
    });
    std::fs::write(dir.join("kustomization.yaml"), text.to_string())?;
    Ok(dir)
}

/// The content of a folder's files, before kustomize changes anything.
#[derive(Default)]
struct Written {
    objects: Vec<Value>,
    /// Names of the ConfigMaps and Secrets that kustomize generates.
    generated: BTreeSet<String>,
}

impl Written {
    fn of(folder: &Path) -> Result<Self> {
        let mut written = Self::default();
        written.read(folder)?;
        Ok(written)
    }

    fn read(&mut self, folder: &Path) -> Result<()> {
        let file = ["kustomization.yaml", "Kustomization"].map(|name| folder.join(name));
        let file = file
            .iter()
            .find(|file| file.exists())
            .with_context(|| format!("no kustomization in {}", folder.display()))?;
        let listed: Value = serde_saphyr::from_str(&std::fs::read_to_string(file)?)?;
        let entries = |key: &str| listed[key].as_array().cloned().unwrap_or_default();
        for entry in [entries("resources"), entries("components")].concat() {
            let path = folder.join(entry.as_str().context("not a path")?);
            if path.is_dir() {
                self.read(&path)?;
            } else {
                let objects: Vec<Value> = serde_saphyr::from_multiple(&std::fs::read_to_string(path)?)?;
                self.objects.extend(objects);
            }
        }
        for generator in [entries("configMapGenerator"), entries("secretGenerator")].concat() {
            self.generated.insert(generator["name"].as_str().context("no name")?.to_owned());
        }
        Ok(())
    }
}

/// All rules of RBAC objects, by kind, namespace and name.
fn rights(objects: &[Value]) -> BTreeMap<String, [&Value; 3]> {
    let rbac = |object: &&Value| {
        object["apiVersion"].as_str().is_some_and(|version| version.starts_with("rbac.authorization.k8s.io/"))
    };
    let id = |object: &Value| {
        let metadata = &object["metadata"];
        format!("{} {} {}", object["kind"], metadata["namespace"], metadata["name"])
    };
    let rights = objects.iter().filter(rbac);
    rights.map(|object| (id(object), ["rules", "roleRef", "subjects"].map(|field| &object[field]))).collect()
}

/// The output of kubectl for a folder.
struct Rendered {
    objects: Vec<Value>,
}

impl Rendered {
    async fn of(cluster: &Cluster, folder: &Path) -> Result<Self> {
        let yaml = cluster.kubectl(&["kustomize", folder.to_str().context("not UTF-8")?]).await?;
        let objects: Vec<Value> = serde_saphyr::from_multiple(&yaml)?;
        Ok(Self { objects })
    }

    fn all(&self, kind: &str) -> Vec<&Value> {
        self.objects.iter().filter(|object| object["kind"] == kind).collect()
    }

    /// The only object of this kind.
    fn one<K: DeserializeOwned>(&self, kind: &str) -> Result<K> {
        let all = self.all(kind);
        ensure!(all.len() == 1, "{} objects of kind {kind}", all.len());
        Ok(serde_json::from_value(all[0].clone())?)
    }

    /// The value that the containers of this kind of workload get for a variable.
    fn variable(&self, name: &str) -> Result<Option<String>> {
        let pod = self.pod()?;
        let containers = pod.containers.iter().chain(pod.init_containers.iter().flatten());
        let from = |container: &Container| container.env_from.clone().unwrap_or_default();
        let from: Vec<_> = containers.flat_map(from).filter_map(|from| from.config_map_ref).collect();
        let maps = self
            .all("ConfigMap")
            .into_iter()
            .filter(|map| from.iter().any(|from| map["metadata"]["name"] == from.name));
        let [settings] = maps.collect::<Vec<_>>()[..] else { bail!("not one ConfigMap of {from:?}") };
        let settings: ConfigMap = serde_json::from_value(settings.clone())?;
        Ok(settings.data.and_then(|mut data| data.remove(name)))
    }

    fn pod(&self) -> Result<PodSpec> {
        let template = match self.one::<Deployment>("Deployment") {
            Ok(deployment) => deployment.spec.template,
            Err(_) => self.one::<DaemonSet>("DaemonSet")?.spec.template,
        };
        template.spec.context("no pod")
    }

    /// Lets the API server check all objects and store them, except for kinds that it doesn't serve.
    async fn is_accepted(&self, cluster: &Cluster) -> Result<()> {
        // This server may know less than the definitions require; they are checked separately.
        let objects = self.objects.iter().filter(|object| object["kind"] != "CustomResourceDefinition");
        let (perhaps, sure): (Vec<_>, Vec<_>) = objects.partition(|object| may_be_unknown(object));
        apply(cluster, &sure).await?;
        for object in perhaps {
            match apply(cluster, &[object]).await {
                Err(error) if format!("{error:#}").contains("no matches for kind") => {}
                applied => applied?,
            }
        }
        Ok(())
    }
}

async fn apply(cluster: &Cluster, objects: &[&Value]) -> Result<()> {
    let file = cluster.place().new_dir("objects")?.join("list.json");
    let list = serde_json::json!({"apiVersion": "v1", "kind": "List", "items": objects});
    std::fs::write(&file, list.to_string())?;
    let file = file.to_str().context("not UTF-8")?;
    // Other tests need the server as it is. Only a namespace must exist before its contents.
    for namespace in objects.iter().filter(|object| object["kind"] == "Namespace") {
        cluster.apply(&namespace.to_string()).await?;
    }
    let dry = ["apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", file];
    let applied = cluster.kubectl(&dry).await?;
    ensure!(applied.matches("serverside-applied").count() == objects.len(), "{applied}");
    Ok(())
}

/// Whether the kind is another program's, or one that API servers know since 1.21.
fn may_be_unknown(object: &Value) -> bool {
    ["ServiceMonitor", "PodMonitor", "PrometheusRule", "PodDisruptionBudget"]
        .iter()
        .any(|kind| object["kind"] == *kind)
}

/// Whether a pod may run under the Pod Security Standard "restricted".
fn is_restricted(pod: &PodSpec) -> bool {
    let of_pod = pod.security_context.clone().unwrap_or_default();
    let confined = pod.containers.iter().all(|container| {
        let of_container = container.security_context.clone().unwrap_or_default();
        let dropped = of_container.capabilities.and_then(|capabilities| capabilities.drop);
        of_container.allow_privilege_escalation == Some(false) && dropped == Some(vec!["ALL".to_owned()])
    });
    let profile = of_pod.seccomp_profile.map(|profile| profile.type_);
    let shared = [pod.host_network, pod.host_pid, pod.host_ipc].contains(&Some(true));
    let host = pod.volumes.iter().flatten().any(|volume| volume.host_path.is_some());
    confined
        && of_pod.run_as_non_root == Some(true)
        && profile.as_deref() == Some("RuntimeDefault")
        && !shared
        && !host
}

#[tokio::test]
async fn the_cloud_side_renders_each_choice() -> Result<()> {
    let cluster = Cluster::start().await?;
    let plain = Rendered::of(&cluster, &workspace().join(CLOUD)).await?;
    assert_eq!(plain.all("CustomResourceDefinition").len(), 3);
    assert_eq!(plain.variable("PREPULL_ADVERTISE")?.as_deref(), Some("cloudcore.example"));
    assert_eq!(plain.variable("PREPULL_REQUIRE_SECRET_CONSENT")?.as_deref(), Some("true"));
    assert_eq!(plain.variable("PREPULL_ENABLE_KRUISE_API")?, None);
    assert!(is_restricted(&plain.pod()?), "{:?}", plain.pod()?);
    plain.is_accepted(&cluster).await?;

    let components = folders("manifests/components")?;
    for component in &components {
        let name = component.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        // The folder chooses this one itself.
        if name == "disruption-budget" {
            let [budget] = plain.all("PodDisruptionBudget")[..] else { bail!("not one budget") };
            assert_eq!(budget["spec"]["unhealthyPodEvictionPolicy"], "AlwaysAllow");
            continue;
        }
        let chosen =
            Rendered::of(&cluster, &overlay(&cluster, CLOUD, std::slice::from_ref(component))?).await?;
        let variable = |name: &str| chosen.variable(name);
        match name {
            "consent-off" => {
                assert_eq!(variable("PREPULL_REQUIRE_SECRET_CONSENT")?.as_deref(), Some("false"));
            }
            "kruise" => {
                assert_eq!(variable("PREPULL_ENABLE_KRUISE_API")?.as_deref(), Some("true"));
                assert_eq!(chosen.all("CustomResourceDefinition").len(), 6);
            }
            "metrics-secure" => {
                assert_eq!(variable("PREPULL_METRICS_SECURE")?.as_deref(), Some("true"));
                assert!(chosen.all("ServiceMonitor").is_empty());
                let pod = chosen.pod()?;
                let volumes = pod.volumes.iter().flatten().filter_map(|volume| volume.secret.as_ref());
                let secrets: Vec<_> = volumes.filter_map(|secret| secret.secret_name.as_deref()).collect();
                assert_eq!(secrets, ["cloudcore-prepull-metrics"]);
                let certificate = variable("PREPULL_METRICS_CERT")?.context("no certificate")?;
                let mounts = pod.containers[0].volume_mounts.iter().flatten();
                assert!(
                    mounts
                        .map(|mount| &mount.mount_path)
                        .any(|path| certificate == format!("{path}/tls.crt"))
                );
            }
            "monitoring" => {
                assert_eq!(chosen.all("ServiceMonitor").len(), 1);
                // The same rules for a Prometheus without the operator.
                let plain = std::fs::read_to_string(workspace().join("manifests/monitoring/alerts.yaml"))?;
                let plain: Value = serde_saphyr::from_str(&plain)?;
                assert_eq!(chosen.all("PrometheusRule")[0]["spec"]["groups"], plain["groups"]);
                let is_board = |map: &&Value| map["metadata"]["labels"]["grafana_dashboard"] == "1";
                assert_eq!(chosen.all("ConfigMap").into_iter().filter(is_board).count(), 1);
            }
            "network-policy" => assert_eq!(chosen.all("NetworkPolicy").len(), 1),
            "one-replica" => {
                assert_eq!(chosen.one::<Deployment>("Deployment")?.spec.replicas, Some(1));
            }
            other => bail!("what manifests/components/{other} is for is not tested"),
        }
        assert!(is_restricted(&chosen.pod()?), "{name}");
    }

    let chosen: Vec<_> = components.into_iter().filter(|path| !path.ends_with("disruption-budget")).collect();
    // If both are chosen, the one that secures comes last.
    let (secure, mut chosen): (Vec<_>, Vec<_>) =
        chosen.into_iter().partition(|path| path.ends_with("metrics-secure"));
    chosen.extend(secure);
    let all = Rendered::of(&cluster, &overlay(&cluster, CLOUD, &chosen)?).await?;
    let endpoint = &all.all("ServiceMonitor")[0]["spec"]["endpoints"][0];
    assert_eq!((&endpoint["scheme"], &endpoint["port"]), (&"https".into(), &"metrics".into()));
    // No impostor gets the token.
    assert_eq!(endpoint["tlsConfig"]["ca"]["secret"]["key"], "ca.crt");
    assert_eq!(endpoint["tlsConfig"]["serverName"], "cloudcore-prepull.prepull-system.svc");
    all.is_accepted(&cluster).await
}

#[tokio::test]
async fn rendering_changes_no_right() -> Result<()> {
    let cluster = Cluster::start().await?;
    let sorted = |more: &[PathBuf]| {
        // The folder chooses the first one itself; the one that secures comes last.
        let mut more: Vec<_> =
            more.iter().filter(|path| !path.ends_with("disruption-budget")).cloned().collect();
        more.sort_by_key(|path| path.ends_with("metrics-secure"));
        more
    };
    let components = folders("manifests/components")?;
    let optional = std::fs::read_dir(workspace().join("manifests/cloudcore-prepull/optional"))?;
    let all: Vec<_> = components.iter().cloned().chain(optional.flatten().map(|file| file.path())).collect();
    let alone = components.iter().map(std::slice::from_ref);
    let choices = [&[][..], &all].into_iter().chain(alone).map(|more| (CLOUD, sorted(more)));
    let edge = [vec![], vec![workspace().join(EDGE).join("monitoring")]].map(|more| (EDGE, more));
    for (folder, more) in choices.chain(edge) {
        let folder = overlay(&cluster, folder, &more)?;
        let (written, rendered) = (Written::of(&folder)?, Rendered::of(&cluster, &folder).await?);
        let written_rights = rights(&written.objects);
        assert_eq!(rights(&rendered.objects), written_rights, "{more:?}");
        // Kustomize gives a generated name a hash, and since 5.5 also in a rule that names an object of any kind. The
        // kubectl here may be older.
        let rules = written_rights.values().flat_map(|[rules, ..]| rules.as_array().into_iter().flatten());
        for name in rules.flat_map(|rule| rule["resourceNames"].as_array().into_iter().flatten()) {
            ensure!(!name.as_str().is_some_and(|name| written.generated.contains(name)), "{more:?}: {name}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn the_agents_are_one_folder() -> Result<()> {
    let cluster = Cluster::start().await?;
    let plain = Rendered::of(&cluster, &workspace().join(EDGE)).await?;
    assert_eq!(plain.variable("PREPULL_SERVER")?.as_deref(), Some("cloudcore.example"));
    plain.is_accepted(&cluster).await?;
    let mut endpoints = BTreeSet::new();
    for runtime in [None].into_iter().chain(folders(&format!("{EDGE}/runtimes"))?.into_iter().map(Some)) {
        let component: Vec<_> = runtime.clone().into_iter().collect();
        let rendered = Rendered::of(&cluster, &overlay(&cluster, EDGE, &component)?).await?;
        rendered.is_accepted(&cluster).await?;
        let pod = rendered.pod()?;
        let agent = &pod.containers[0];
        let endpoint =
            agent.args.iter().flatten().find_map(|arg| arg.strip_prefix("--runtime-endpoint=unix://"));
        let endpoint = endpoint.context("no endpoint")?;
        // The socket is accessible under its path on the node, and so is the store.
        let mounts = agent.volume_mounts.iter().flatten();
        let mounts: Vec<_> = mounts.map(|mount| (mount.name.as_str(), mount.mount_path.as_str())).collect();
        for (name, path) in &mounts {
            let volume = pod.volumes.iter().flatten().find(|volume| volume.name == *name);
            let on_node = volume.and_then(|volume| volume.host_path.as_ref()).map(|host| host.path.as_str());
            assert_eq!(on_node, Some(*path), "{runtime:?}: {name}");
        }
        assert!(
            mounts.iter().any(|(_, path)| endpoint.starts_with(&format!("{path}/"))),
            "{endpoint}: {mounts:?}"
        );
        endpoints.insert(endpoint.to_owned());
        // The kubelet's records are where the agent looks for them, and it can't write them.
        let dir = agent.args.iter().flatten().find_map(|arg| arg.strip_prefix("--kubelet-dir="));
        let records = format!("{}/image_manager", dir.unwrap_or("/var/lib/kubelet"));
        let mount = agent.volume_mounts.iter().flatten().find(|mount| mount.mount_path == records);
        assert_eq!(mount.and_then(|mount| mount.read_only), Some(true), "{runtime:?}: {records}");
        // The agent that downloads sees containerd's configuration, and can't write it.
        let name = runtime.as_deref().and_then(Path::file_name).and_then(|name| name.to_str());
        let of_runtime = match name {
            None => &["/etc/containerd", "/etc/docker/certs.d"][..],
            Some("k3s") => &["/var/lib/rancher/k3s/agent/etc/containerd"],
            Some("rke2") => &["/var/lib/rancher/rke2/agent/etc/containerd"],
            Some("k0s") => &["/etc/k0s", "/etc/containerd", "/run/k0s"],
            Some(_) => &[],
        };
        for path in of_runtime {
            let mount = agent.volume_mounts.iter().flatten().find(|mount| mount.mount_path == **path);
            let mount = mount.with_context(|| format!("{runtime:?}: {path}"))?;
            assert!(mount.read_only == Some(true) || mount.name == "runtime", "{runtime:?}: {path}");
        }
        let sees_ca = mounts.iter().any(|(_, path)| *path == "/etc/ssl/certs");
        assert_eq!(sees_ca, !of_runtime.is_empty(), "{runtime:?}");
    }
    // k3s and RKE2 have the same.
    assert_eq!(endpoints.len(), 5, "{endpoints:?}");
    Ok(())
}

#[tokio::test]
async fn scraped_agents_listen_for_monitor_and_probes() -> Result<()> {
    let cluster = Cluster::start().await?;
    let monitoring = workspace().join(EDGE).join("monitoring");
    // Also beside a runtime, which changes the same container.
    let k3s = workspace().join(EDGE).join("runtimes/k3s");
    for components in [vec![monitoring.clone()], vec![k3s, monitoring]] {
        let rendered = Rendered::of(&cluster, &overlay(&cluster, EDGE, &components)?).await?;
        rendered.is_accepted(&cluster).await?;
        let pod = rendered.pod()?;
        let agent = &pod.containers[0];
        let listen = agent.env.iter().flatten().find(|variable| variable.name == "PREPULL_METRICS_LISTEN");
        let listen = listen.and_then(|variable| variable.value.clone()).context("it listens on loopback")?;
        let ports = agent.ports.iter().flatten().map(|port| (port.name.clone(), port.container_port));
        let port = ports.collect::<Vec<_>>();
        assert_eq!((listen.as_str(), port), ("$(NODE_IP):10004", vec![(Some("metrics".to_owned()), 10004)]));
        for probe in [&agent.liveness_probe, &agent.readiness_probe] {
            let http = probe.as_ref().and_then(|probe| probe.http_get.as_ref()).context("no probe")?;
            assert_eq!((&http.host, &http.port), (&None, &IntOrString::Int(10004)));
        }
        let [monitor] = rendered.all("PodMonitor")[..] else { bail!("not one PodMonitor") };
        assert_eq!(monitor["spec"]["podMetricsEndpoints"][0]["port"], "metrics");
        let set: DaemonSet = rendered.one("DaemonSet")?;
        let labels = set.spec.template.metadata.and_then(|pod| pod.labels).context("no labels")?;
        let selector = monitor["spec"]["selector"]["matchLabels"].as_object().context("no selector")?;
        for (key, value) in selector {
            assert_eq!(labels.get(key).map(String::as_str), value.as_str());
        }
        assert_eq!(monitor["metadata"]["namespace"], set.metadata.namespace.context("no namespace")?);
    }
    Ok(())
}

#[tokio::test]
async fn missing_settings_are_named_at_start() -> Result<()> {
    let cluster = Cluster::start().await?;
    let rendered = Rendered::of(&cluster, &workspace().join(CLOUD)).await?;
    let placeholder = rendered.variable("PREPULL_ADVERTISE")?.context("no placeholder")?;
    let cloud = Cloud::start(&cluster).in_pod("a").args(&["--advertise", &placeholder, "--log-format=json"]);
    let error = format!("{:#}", cloud.await.err().context("it starts")?);
    let said = std::fs::read_to_string(cluster.place().log_file("cloudcore-prepull"))?;
    let last: Value = serde_json::from_str(said.lines().last().unwrap_or_default()).context(error)?;
    let words = last["fields"]["error"].as_str().context("no error")?;
    ensure!(words.contains("--advertise cloudcore.example is the placeholder"), "{words}");
    ensure!(words.contains("PREPULL_ADVERTISE in manifests/cluster/kustomization.yaml"), "{words}");
    Ok(())
}
