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
            ("annotations", &["helm.sh/resource-policy"]),
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
    let mut yaml = parts::output(command).await?;
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

    // Each choice, and each two: what one changes, another may change again.
    let mut choices = vec![vec![], (0..CLOUD.len()).collect()];
    choices.extend(
        (0..CLOUD.len())
            .flat_map(|one| (0..=one).map(move |two| if one == two { vec![one] } else { vec![two, one] })),
    );
    for choice in choices {
        let mut values = nothing.clone();
        let mut components = Vec::new();
        for (component, name, value) in choice.into_iter().map(|at| CLOUD[at]) {
            values[name] = serde_json::from_str(value)?;
            components.push(format!("components/{component}"));
        }
        let mut folders = kustomized(&place, &["cloudcore-prepull"], &components).await?;
        folders.retain(|_, object| object["kind"] != "CustomResourceDefinition");
        are_equal(&values, &objects(helm.template(NAMESPACE, &values).await?)?, &folders)?;
    }

    let cloud = kustomized(&place, &["cloudcore-prepull"], &[]).await?;
    for runtime in RUNTIMES {
        for monitoring in [false, true] {
            let mut values = nothing.clone();
            values["agents"] =
                json!({"enabled": true, "runtime": runtime, "monitoring": {"enabled": monitoring}});
            let mut components = Vec::new();
            components
                .extend((runtime != "containerd").then(|| format!("edgecore-prepull/runtimes/{runtime}")));
            components.extend(monitoring.then(|| "edgecore-prepull/monitoring".to_owned()));
            let mut folders = kustomized(&place, &["edgecore-prepull"], &components).await?;
            folders.extend(cloud.clone());
            are_equal(&values, &objects(helm.template(NAMESPACE, &values).await?)?, &folders)?;
        }
    }
    Ok(())
}
