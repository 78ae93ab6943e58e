//! `manifests/gitops`: objects that an API server takes, which name what is there.

use std::collections::BTreeSet;

use prepull_e2e::helm::Helm;
use prepull_e2e::parts::{run_command, workspace};
use prepull_e2e::prelude::*;
use serde_json::Value;

const GITOPS: &str = "manifests/gitops";
const WAVE: &str = "argocd.argoproj.io/sync-wave";

fn documents(file: &str) -> Result<Vec<Value>> {
    let path = workspace().join(GITOPS).join(file);
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    Ok(serde_saphyr::from_multiple(&text)?)
}

/// The only object of this kind and name in a file.
fn object(file: &str, kind: &str, name: &str) -> Result<Value> {
    let found = documents(file)?
        .into_iter()
        .find(|object| object["kind"] == kind && object["metadata"]["name"] == name);
    found.with_context(|| format!("{file} has no {kind} {name}"))
}

fn wave(object: &Value) -> Result<i64> {
    Ok(object["metadata"]["annotations"][WAVE].as_str().context("no wave")?.parse()?)
}

#[tokio::test]
async fn the_rollout_comes_after_its_images() -> Result<()> {
    let cluster = Cluster::start().await?;
    for file in ["prepull/job.yaml", "rollout/web.yaml"] {
        let path = workspace().join(GITOPS).join("app").join(file);
        let path = path.to_str().context("not UTF-8")?;
        cluster.kubectl(&["apply", "--server-side", "--dry-run=server", "-f", path]).await?;
    }
    let [job, web] =
        [documents("app/prepull/job.yaml")?.remove(0), documents("app/rollout/web.yaml")?.remove(0)];
    ensure!(wave(&job)? < wave(&web)?, "Argo CD applies both at once");
    let pod = &web["spec"]["template"]["spec"];
    let template = &job["spec"]["imagePrePullTemplate"];
    let of_pod: BTreeSet<_> = pod["containers"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|one| &one["image"])
        .map(Value::to_string)
        .collect();
    let of_job: BTreeSet<_> =
        template["images"].as_array().into_iter().flatten().map(Value::to_string).collect();
    assert_eq!(of_pod, of_job);
    assert_eq!(pod["nodeSelector"], template["labelSelector"]["matchLabels"]);
    Ok(())
}

#[test]
fn health_checks_are_of_the_jobs_kind() -> Result<()> {
    let job = documents("app/prepull/job.yaml")?.remove(0);
    let (version, kind) =
        (job["apiVersion"].as_str().context("no version")?, job["kind"].as_str().context("no kind")?);
    let group = version.split('/').next().unwrap_or_default();
    let argocd = object("argocd-health.yaml", "ConfigMap", "argocd-cm")?;
    let key = format!("resource.customizations.health.{group}_{kind}");
    ensure!(argocd["data"][&key].is_string(), "Argo CD looks for {key}");

    let flux = object("flux-kustomization.yaml", "Kustomization", "prepull")?;
    let checks = flux["spec"]["healthCheckExprs"].as_array().context("no checks")?;
    ensure!(checks.iter().any(|check| check["apiVersion"] == version && check["kind"] == kind), "{checks:?}");
    assert_eq!(flux["spec"]["wait"], true);
    let rollout = object("flux-kustomization.yaml", "Kustomization", "rollout")?;
    assert_eq!(rollout["spec"]["dependsOn"][0]["name"], flux["metadata"]["name"]);
    Ok(())
}

#[tokio::test]
async fn paths_and_values_of_the_examples_exist() -> Result<()> {
    let helm = Helm::find().await?;
    let argocd = |name| object("argocd-applications.yaml", "Application", name);
    let flux = |name| object("flux-kustomization.yaml", "Kustomization", name);
    let release = object("flux-helmrelease.yaml", "HelmRelease", "prepull")?;
    let chart = argocd("image-prepull")?;
    for path in [
        &chart["spec"]["source"]["path"],
        &argocd("shop")?["spec"]["source"]["path"],
        &flux("prepull")?["spec"]["path"],
        &flux("rollout")?["spec"]["path"],
    ] {
        let path = path.as_str().context("no path")?;
        ensure!(workspace().join(path).is_dir(), "{path} is no folder");
    }
    // The release names the source beside it, and that names the chart.
    let name = &release["spec"]["chartRef"]["name"];
    let source = object("flux-helmrelease.yaml", "OCIRepository", name.as_str().context("no source")?)?;
    let (url, chart_name) = (&source["spec"]["url"], &documents("../chart/Chart.yaml")?.remove(0)["name"]);
    assert_eq!(url.as_str().and_then(|url| url.rsplit('/').next()), chart_name.as_str());
    // The chart's schema knows the values, and it renders with them.
    for (values, namespace) in [
        (&chart["spec"]["source"]["helm"]["valuesObject"], &chart["spec"]["destination"]["namespace"]),
        (&release["spec"]["values"], &release["spec"]["targetNamespace"]),
    ] {
        let objects = helm.template(namespace.as_str().context("no namespace")?, values).await?;
        ensure!(objects.iter().any(|object| object["kind"] == "DaemonSet"), "{values} has no agents");
    }
    // Each example is listed.
    let readme = std::fs::read_to_string(workspace().join(GITOPS).join("README.md"))?;
    let mut list = std::process::Command::new("git");
    list.args(["ls-files", GITOPS]).current_dir(workspace());
    for file in run_command(list).await?.lines() {
        let file = file.trim_start_matches(GITOPS).trim_start_matches('/');
        ensure!(
            file == "README.md" || readme.contains(&format!("({file})")),
            "README.md doesn't list {file}"
        );
    }
    Ok(())
}
