//! The Helm chart: the same objects as kustomize makes of the same folders.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::Arc;

use prepull_e2e::cluster::NAMESPACE;
use prepull_e2e::helm::Helm;
use prepull_e2e::parts::{self, workspace};
use prepull_e2e::prelude::*;
use serde_json::{Value, json};

/// Each choice for the cloud side: a component of kustomize, and the value that stands for it.
const CLOUD: [(&str, &str, &str); 7] = [
    ("disruption-budget", "disruptionBudget", r#"{"enabled": true}"#),
    ("one-replica", "replicas", "1"),
    ("kruise", "kruise", r#"{"enabled": true}"#),
    ("consent-off", "consent", r#"{"required": false}"#),
    ("network-policy", "networkPolicy", r#"{"enabled": true}"#),
    ("monitoring", "monitoring", r#"{"enabled": true}"#),
    ("metrics-secure", "metrics", r#"{"secure": true}"#),
];
const RUNTIMES: [&str; 6] = ["containerd", "k3s", "rke2", "k0s", "crio", "cri-dockerd"];

/// Objects by kind, namespace and name.
type Objects = BTreeMap<String, Value>;

fn objects(list: Vec<Value>) -> Result<Objects> {
    let mut objects = Objects::new();
    for mut object in list {
        // What only one of the two adds.
        let pod = object["spec"]["template"]["metadata"].as_object_mut();
        if let Some(annotations) = pod.and_then(|pod| pod.remove("annotations")) {
            ensure!(annotations.as_object().is_some_and(|all| all.len() == 1), "{annotations}");
        }
        let metadata = object["metadata"].as_object_mut().context("no metadata")?;
        for (map, keys) in [
            ("labels", &["app.kubernetes.io/managed-by", "app.kubernetes.io/version", "helm.sh/chart"][..]),
            ("annotations", &["helm.sh/resource-policy", "argocd.argoproj.io/sync-options"]),
        ] {
            if let Some(map) = metadata.get_mut(map).and_then(Value::as_object_mut) {
                map.retain(|key, _| !keys.contains(&key.as_str()));
            }
            if metadata.get(map).is_some_and(|map| map.as_object().is_some_and(serde_json::Map::is_empty)) {
                metadata.remove(map);
            }
        }
        let id =
            format!("{} {} {}", object["kind"], object["metadata"]["namespace"], object["metadata"]["name"]);
        ensure!(objects.insert(id.clone(), object).is_none(), "{id} is there twice");
    }
    Ok(objects)
}

/// The objects that kustomize makes of these folders, without the hashes in names.
async fn kustomized(place: &Arc<Place>, resources: &[&str], components: &[String]) -> Result<Objects> {
    let dir = place.new_dir("overlay")?.canonicalize()?;
    // Kustomize takes no absolute paths.
    let root = workspace().canonicalize()?;
    let root = format!(
        "{}{}",
        "../".repeat(dir.components().count() - 1),
        root.display().to_string().trim_start_matches('/')
    );
    let path = |folder: &str| format!("{root}/manifests/{folder}");
    let mut file = json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization",
        "resources": resources.iter().map(|folder| path(folder)).collect::<Vec<_>>(),
        "components": components.iter().map(|folder| path(folder)).collect::<Vec<_>>(),
    });
    if resources.contains(&"cloudcore-prepull") {
        file["configMapGenerator"] = json!([{
            "name": "cloudcore-prepull-settings", "namespace": NAMESPACE, "behavior": "merge",
            "literals": ["PREPULL_ADVERTISE=cloudcore.example"],
        }]);
    }
    std::fs::write(dir.join("kustomization.yaml"), file.to_string())?;
    let mut command = Command::new(parts::kubectl());
    command.arg("kustomize").arg(&dir);
    let mut yaml = parts::run_command(command).await?;
    let list: Vec<Value> = serde_saphyr::from_multiple(&yaml)?;
    for name in list.iter().filter(|object| object["kind"] == "ConfigMap") {
        let name = name["metadata"]["name"].as_str().context("no name")?;
        if let Some((plain, hash)) = name.rsplit_once('-').filter(|(_, hash)| hash.len() == 10) {
            ensure!(hash.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{name}");
            yaml = yaml.replace(name, plain);
        }
    }
    let mut objects = objects(serde_saphyr::from_multiple(&yaml)?)?;
    // Helm makes the namespace of a release.
    objects.retain(|_, object| object["kind"] != "Namespace" || object["metadata"]["name"] != NAMESPACE);
    Ok(objects)
}

/// Names the first object that differs.
fn are_equal(case: &Value, chart: &Objects, folders: &Objects) -> Result<()> {
    let keys = |objects: &Objects| objects.keys().cloned().collect::<Vec<_>>();
    ensure!(keys(chart) == keys(folders), "{case}: {:#?} and not {:#?}", keys(chart), keys(folders));
    for (id, object) in chart {
        let other = &folders[id];
        ensure!(object == other, "{case}: {id}\n{object:#}\nand not\n{other:#}");
    }
    Ok(())
}

#[tokio::test]
async fn chart_and_kustomize_agree() -> Result<()> {
    let (helm, place) = (Helm::find().await?, Place::here()?);
    let nothing = json!({
        "advertise": ["cloudcore.example"], "crds": {"enabled": false}, "disruptionBudget": {"enabled": false},
    });

    // With the definitions once, since they take most of the time.
    let mut all = nothing.clone();
    all["kruise"] = json!({"enabled": true});
    all["crds"] = json!({"enabled": true});
    let folders = kustomized(&place, &["crds", "cloudcore-prepull"], &["components/kruise".into()]).await?;
    are_equal(&all, &objects(helm.template(NAMESPACE, &all).await?)?, &folders)?;

    // What one choice changes, another may change again: in these eight rows, the orthogonal array L8, each two of the
    // seven meet in all four combinations.
    assert_eq!(CLOUD.len(), 7, "the rows are those of seven parts");
    for row in 0..=CLOUD.len() {
        let mut values = nothing.clone();
        let mut components = Vec::new();
        for ((component, name, value), column) in CLOUD.into_iter().zip(1_usize..) {
            if (row & column).count_ones() % 2 == 1 {
                values[name] = serde_json::from_str(value)?;
                components.push(format!("components/{component}"));
            }
        }
        let mut folders = kustomized(&place, &["cloudcore-prepull"], &components).await?;
        folders.retain(|_, object| object["kind"] != "CustomResourceDefinition");
        are_equal(&values, &objects(helm.template(NAMESPACE, &values).await?)?, &folders)?;
    }

    let cloud = kustomized(&place, &["cloudcore-prepull"], &[]).await?;
    for (runtime, monitoring) in RUNTIMES.map(|runtime| (runtime, false)).into_iter().chain([("k3s", true)]) {
        let mut values = nothing.clone();
        values["agents"] =
            json!({"enabled": true, "runtime": runtime, "monitoring": {"enabled": monitoring}});
        let mut components = Vec::new();
        components.extend((runtime != "containerd").then(|| format!("edgecore-prepull/runtimes/{runtime}")));
        components.extend(monitoring.then(|| "edgecore-prepull/monitoring".to_owned()));
        let mut folders = kustomized(&place, &["edgecore-prepull"], &components).await?;
        folders.extend(cloud.clone());
        are_equal(&values, &objects(helm.template(NAMESPACE, &values).await?)?, &folders)?;
    }
    Ok(())
}

/// The object of the chart, with these values on top of an address.
async fn rendered(helm: &Helm, more: Value, id: &str) -> Result<Option<Value>> {
    let mut values = json!({"advertise": ["a.example", "b.example"], "crds": {"enabled": false}});
    for (name, value) in more.as_object().into_iter().flatten() {
        values[name] = value.clone();
    }
    Ok(objects(helm.template("edge", &values).await?)?.remove(id))
}

#[allow(clippy::too_many_lines, reason = "a table")]
#[tokio::test]
async fn values_change_what_they_name() -> Result<()> {
    const DEPLOYMENT: &str = r#""Deployment" "edge" "cloudcore-prepull""#;
    const SERVICE: &str = r#""Service" "edge" "cloudcore-prepull""#;
    const SETTINGS: &str = r#""ConfigMap" "edge" "cloudcore-prepull-settings""#;
    const AGENTS: &str = r#""DaemonSet" "agents" "edgecore-prepull""#;
    const AGENT_SETTINGS: &str = r#""ConfigMap" "agents" "edgecore-prepull""#;
    let helm = Helm::find().await?;
    let digest = format!("sha256:{}", "a".repeat(64));
    let agents = |more: Value| {
        let mut agents = json!({"enabled": true, "namespace": "agents"});
        for (name, value) in more.as_object().into_iter().flatten() {
            agents[name] = value.clone();
        }
        json!({"agents": agents})
    };
    let container = "/spec/template/spec/containers/0";
    let table = [
        (json!({}), SETTINGS, "/data/PREPULL_ADVERTISE".to_owned(), json!("a.example,b.example")),
        (json!({"settings": {"PREPULL_X": 3}}), SETTINGS, "/data/PREPULL_X".into(), json!("3")),
        (json!({"settings": {"PREPULL_X": 2_000_000}}), SETTINGS, "/data/PREPULL_X".into(), json!("2000000")),
        (json!({"replicas": 1}), DEPLOYMENT, "/spec/replicas".into(), json!(1)),
        (
            json!({"image": {"tag": "9"}}),
            DEPLOYMENT,
            format!("{container}/image"),
            json!("cloudcore-prepull:9"),
        ),
        (
            json!({"image": {"repository": "r.example/c", "digest": digest}}),
            DEPLOYMENT,
            format!("{container}/image"),
            json!(format!("r.example/c@{digest}")),
        ),
        (
            json!({"image": {"pullPolicy": "Always"}}),
            DEPLOYMENT,
            format!("{container}/imagePullPolicy"),
            json!("Always"),
        ),
        (json!({"extraArgs": ["--x=1"]}), DEPLOYMENT, format!("{container}/args/6"), json!("--x=1")),
        (
            json!({"resources": {"limits": {"memory": "1Gi"}}}),
            DEPLOYMENT,
            format!("{container}/resources"),
            json!({"limits": {"memory": "1Gi"}}),
        ),
        (
            json!({"podSpec": {"priorityClassName": "p"}}),
            DEPLOYMENT,
            "/spec/template/spec/priorityClassName".into(),
            json!("p"),
        ),
        (
            json!({"service": {"spec": {"type": "NodePort"}, "nodePorts": {"enroll": 31002}}}),
            SERVICE,
            "/spec/ports/1/nodePort".into(),
            json!(31002),
        ),
        (
            json!({"service": {"annotations": {"a": "b"}}}),
            SERVICE,
            "/metadata/annotations".into(),
            json!({"a": "b"}),
        ),
        (
            json!({"service": {"spec": {"type": "ClusterIP"}}}),
            SERVICE,
            "/spec/externalTrafficPolicy".into(),
            Value::Null,
        ),
        (
            json!({"registrySecrets": {"namespaces": ["shop"]}}),
            r#""RoleBinding" "shop" "cloudcore-prepull-registry-secrets""#,
            "/subjects/0/namespace".into(),
            json!("edge"),
        ),
        (
            json!({"registrySecrets": {"namespaces": ["shop"]}}),
            r#""ClusterRole" null "cloudcore-prepull-registry-secrets""#,
            String::new(),
            Value::Null,
        ),
        // Names that hold one of ours.
        (
            json!({"registrySecrets": {"namespaces": ["prepull-edge"]}, "agents": {"namespace": "agents"}}),
            r#""Role" "prepull-edge" "cloudcore-prepull-registry-secrets""#,
            "/rules/0/verbs".into(),
            json!(["get"]),
        ),
        (
            json!({"agents": {"enabled": true, "namespace": "prepull-system-edge"}}),
            r#""DaemonSet" "prepull-system-edge" "edgecore-prepull""#,
            "/kind".into(),
            json!("DaemonSet"),
        ),
        (
            json!({"networkPolicy": {"enabled": true, "apiServers": ["192.0.2.1/32"]}}),
            r#""NetworkPolicy" "edge" "cloudcore-prepull""#,
            "/spec/ingress/2/from/1/ipBlock/cidr".into(),
            json!("192.0.2.1/32"),
        ),
        (
            json!({"monitoring": {"enabled": true, "labels": {"release": "prometheus"}}}),
            r#""PrometheusRule" "edge" "cloudcore-prepull""#,
            "/metadata/labels/release".into(),
            json!("prometheus"),
        ),
        (json!({}), r#""Namespace" null "edge""#, String::new(), Value::Null),
        (agents(json!({})), r#""Namespace" null "agents""#, "/kind".into(), json!("Namespace")),
        (
            agents(json!({"createNamespace": false})),
            r#""Namespace" null "agents""#,
            String::new(),
            Value::Null,
        ),
        (agents(json!({})), AGENT_SETTINGS, "/data/PREPULL_SERVER".into(), json!("a.example,b.example")),
        (
            agents(json!({"settings": {"PREPULL_X": true}})),
            AGENT_SETTINGS,
            "/data/PREPULL_X".into(),
            json!("true"),
        ),
        (
            agents(json!({"settings": {"PREPULL_X": 0.5}})),
            AGENT_SETTINGS,
            "/data/PREPULL_X".into(),
            json!("0.5"),
        ),
        (
            agents(json!({"image": {"tag": "9"}})),
            AGENTS,
            "/spec/template/spec/initContainers/0/image".into(),
            json!("edgecore-prepull:9"),
        ),
        (
            agents(json!({"podSpec": {"tolerations": []}})),
            AGENTS,
            "/spec/template/spec/tolerations".into(),
            json!([]),
        ),
    ];
    for (values, id, field, expected) in table {
        let object = rendered(&helm, values.clone(), id).await?.unwrap_or_default();
        let found = object.pointer(&field).cloned().unwrap_or_default();
        ensure!(found == expected, "{values}: {id} {field} is {found}, and not {expected}");
    }
    // A change of the settings replaces the pods.
    let sum = async |settings: Value| {
        let template = helm.template(NAMESPACE, &json!({"advertise": ["a"], "settings": settings})).await?;
        let pods = template.iter().find(|object| object["kind"] == "Deployment").context("no Deployment")?;
        anyhow::Ok(pods.pointer("/spec/template/metadata/annotations/checksum~1settings").cloned())
    };
    ensure!(sum(json!({"PREPULL_X": "1"})).await? != sum(json!({"PREPULL_X": "2"})).await?);
    Ok(())
}

#[tokio::test]
async fn the_chart_is_described_as_it_is() -> Result<()> {
    let chart = workspace().join("manifests/chart");
    let read = |file: &str| anyhow::Ok(std::fs::read_to_string(chart.join(file))?);
    let values: Value = serde_saphyr::from_str(&read("values.yaml")?)?;
    let schema: Value = serde_json::from_str(&read("values.schema.json")?)?;
    let readme = read("README.md")?;
    let rows: Vec<_> =
        readme.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    let names: Vec<_> = values.as_object().context("no values")?.keys().collect();
    for name in &names {
        ensure!(rows.contains(&name.as_str()), "the README has no row {name}");
        ensure!(schema["properties"][name].is_object(), "the schema lacks {name}");
    }
    ensure!(rows.len() == names.len(), "{rows:?} in the README, and {names:?}");

    let chart: Value = serde_saphyr::from_str(&read("Chart.yaml")?)?;
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!((&chart["version"], &chart["appVersion"]), (&json!(version), &json!(version)));
    let images = chart["annotations"]["artifacthub.io/images"].as_str().context("no images")?;
    assert_eq!(images.matches(&format!(":{version}\n")).count(), 2, "{images}");

    let helm = Helm::find().await?;
    let lint = helm.command(&["lint", "--strict", "manifests/chart", "--set=advertise={cloudcore.example}"]);
    parts::run_command(lint).await.map(drop)
}
