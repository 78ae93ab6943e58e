//! Incomplete upgrades: a definition or a right that this version needs is missing. cloudcore names the missing part
//! and the remedy, once, and continues by itself when it's there. A standby does the same, so that a rollout waits for
//! it.

use std::time::Duration;

use prepull_e2e::prelude::*;
use serde_json::json;

const REPORTS: &str = "imageprepullreports.operations.kubeedge.io";
const JOBS: &str = "imageprepulljobs.operations.kubeedge.io";
const ROLE: &str = "manifests/cloudcore-prepull/rbac.yaml";
const DEFINITION: &str = "manifests/crds/operations.kubeedge.io_imageprepullreports.yaml";
const JOB_DEFINITION: &str = "manifests/crds/operations.kubeedge.io_imageprepulljobs.yaml";
const EDGES: usize = 20;
/// Longest wait of an edge before it dials again.
const REDIAL: Duration = Duration::from_secs(2);
/// Time for several retries of cloudcore, which come every 2 s before its work begins, and at least every 5 s later.
const SEVERAL_TRIES: Duration = Duration::from_secs(7);

async fn remove_definition(cluster: &Cluster) -> Result<()> {
    cluster.kubectl(&["delete", "crd", REPORTS, "--timeout=30s"]).await.map(drop)
}

/// Gives the role of cloudcore these verbs on reports, or no rule for them, as in the role of another version.
async fn rights_to_reports(cluster: &Cluster, verbs: &[&str]) -> Result<()> {
    let role = cluster.kubectl(&["get", "clusterrole", "cloudcore-prepull", "-o", "json"]).await?;
    let mut role: serde_json::Value = serde_json::from_str(&role)?;
    let rules = role["rules"].as_array_mut().context("no rules")?;
    let before = rules.len();
    rules.retain(|rule| rule["resources"] != json!(["imageprepullreports"]));
    ensure!(rules.len() == before - 1, "the role has no such rule any more");
    if !verbs.is_empty() {
        rules.push(json!({
            "apiGroups": ["operations.kubeedge.io"], "resources": ["imageprepullreports"], "verbs": verbs,
        }));
    }
    let role = json!({ "apiVersion": role["apiVersion"], "kind": role["kind"], "rules": role["rules"],
        "metadata": { "name": "cloudcore-prepull" } });
    cluster.apply(&role.to_string()).await
}

async fn apply(cluster: &Cluster, manifest: &str) -> Result<()> {
    cluster.apply_file(&prepull_e2e::parts::workspace().join(manifest)).await
}

/// Number of lines in the log that contain all of these words.
fn lines(cloud: &Cloud, words: &[&str]) -> usize {
    cloud.log().lines().filter(|line| words.iter().all(|word| line.contains(word))).count()
}

/// Edges that are soon back after a restart of cloudcore.
async fn fleet(cluster: &Cluster, cloud: &Cloud) -> Result<Fleet> {
    let behaviour = Behaviour { redial_within: Some(REDIAL), ..Behaviour::default() };
    Fleet::start(cluster, cloud, EDGES).behaves(behaviour).await
}

/// Starts a cloudcore that was ended. Checks that it names the missing part once, and works when it's there.
async fn starts_after_the_repair(
    cluster: &Cluster,
    cloud: &mut Cloud,
    fleet: &Fleet,
    says: &[&str],
    remedy: &str,
) -> Result<()> {
    cloud.restart().await?;
    eventually("/readyz says what is missing", SOON, async || {
        let (status, body) = cloud.readiness().await?;
        ensure!(status == 503 && says.iter().all(|word| body.contains(word)), "{status} {body}");
        Ok(())
    })
    .await?;
    tokio::time::sleep(SEVERAL_TRIES).await;
    assert_eq!(lines(cloud, says), 1, "{}", cloud.log());
    ensure!(!cloud.is_ready().await?);

    apply(cluster, remedy).await?;
    cloud.leads(SOON).await?;
    fleet.all_connected().await?;
    carries_out_a_job(cluster, fleet).await
}

async fn carries_out_a_job(cluster: &Cluster, fleet: &Fleet) -> Result<()> {
    let name = format!("after-{}", fleet.pulls());
    let job = cluster.job(&name).images([format!("harbor.example/{name}:v1")]).on(fleet.names());
    let job = job.concurrency(20);
    assert_eq!(job.completes().await?.summary.successful, 20);
    fleet.all_acknowledged().await
}

#[tokio::test]
async fn what_is_missing_at_start_is_named() -> Result<()> {
    let cluster = Cluster::for_changes().await?;
    let mut cloud = Cloud::start(&cluster).standby().await?;
    cloud.leads(SOON).await?;
    let fleet = fleet(&cluster, &cloud).await?;

    cloud.terminate().await?;
    remove_definition(&cluster).await?;
    let says = [&format!("the definition {REPORTS} is missing"), "kubectl apply -f manifests/crds"];
    starts_after_the_repair(&cluster, &mut cloud, &fleet, &says, DEFINITION).await?;

    cloud.terminate().await?;
    serve_older_definition(&cluster).await?;
    let says = [JOBS, "drops spec.verify, spec.windows: kubectl apply -f manifests/crds"];
    starts_after_the_repair(&cluster, &mut cloud, &fleet, &says, JOB_DEFINITION).await?;

    cloud.terminate().await?;
    rights_to_reports(&cluster, &[]).await?;
    let says = [
        "a right is missing: User ",
        "system:serviceaccount:prepull-system:cloudcore-prepull",
        "cannot list resource ",
        "kubectl apply -f manifests/cloudcore-prepull/rbac.yaml",
    ];
    starts_after_the_repair(&cluster, &mut cloud, &fleet, &says, ROLE).await
}

/// Patches the schema of jobs, in the stored version: the operation, the path below the properties of the root, and the
/// value.
async fn patch_schema(cluster: &Cluster, changes: &[(&str, &str, serde_json::Value)]) -> Result<()> {
    let crd = cluster.kubectl(&["get", "crd", JOBS, "-o", "json"]).await?;
    let crd: serde_json::Value = serde_json::from_str(&crd)?;
    let versions = crd["spec"]["versions"].as_array().context("no versions")?;
    let at = versions.iter().position(|version| version["storage"] == true).context("none is stored")?;
    let root = format!("/spec/versions/{at}/schema/openAPIV3Schema/properties");
    let patch: Vec<_> = changes
        .iter()
        .map(|(op, path, value)| json!({"op": op, "path": format!("{root}/{path}"), "value": value}))
        .collect();
    let patch = json!(patch).to_string();
    cluster.kubectl(&["patch", "crd", JOBS, "--type=json", "-p", &patch]).await.map(drop)
}

/// Installs the definition of a release without windows and signatures.
async fn serve_older_definition(cluster: &Cluster) -> Result<()> {
    let remove = |path| ("remove", path, json!(null));
    patch_schema(cluster, &[remove("spec/properties/windows"), remove("spec/properties/verify")]).await
}

#[tokio::test]
async fn a_leader_stops_under_an_older_definition() -> Result<()> {
    let cluster = Cluster::for_changes().await?;
    let cloud = Cloud::start(&cluster).standby().await?;
    cloud.leads(SOON).await?;
    let fleet = Fleet::start(&cluster, &cloud, EDGES).await?;
    serve_older_definition(&cluster).await?;
    eventually("it works no more", 2 * SOON, async || {
        let (status, body) = cloud.readiness().await?;
        ensure!(status == 503 && body.contains("drops spec.verify, spec.windows"), "{status} {body}");
        Ok(())
    })
    .await?;
    cloud.has_sessions(0).await?;
    apply(&cluster, JOB_DEFINITION).await?;
    cloud.leads(SOON).await?;
    carries_out_a_job(&cluster, &fleet).await
}

/// Installs a definition that has every field, and refuses a phase that we write.
#[tokio::test]
async fn a_status_that_is_refused_is_explained() -> Result<()> {
    let cluster = Cluster::for_changes().await?;
    let cloud = Cloud::start(&cluster).await?;
    let fleet = Fleet::start(&cluster, &cloud, 1).await?;
    let most = "status/properties/summary/properties/desired/maximum";
    patch_schema(&cluster, &[("add", most, json!(0))]).await?;
    let job = cluster.job("refused").images(["harbor.example/a:v1"]).on(fleet.names()).apply().await?;
    let (_, note) = job.event("NotWritten").await?;
    ensure!(
        note.contains("status.summary.desired") && note.contains("kubectl apply -f manifests/crds"),
        "{note}"
    );
    patch_schema(&cluster, &[("remove", most, json!(null))]).await?;
    job.completes().await?;
    fleet.all_acknowledged().await
}

/// Starts a replica beside a working leader. Checks that it isn't available and names the missing part, once; and that
/// it's available after the repair.
async fn a_standby_waits_for(cluster: &Cluster, leader: &Cloud, says: &[&str], remedy: &str) -> Result<()> {
    let standby = Cloud::start(cluster).named("cloudcore-prepull-2").standby().await?;
    eventually("/availablez says what is missing", SOON, async || {
        let (status, body) = standby.availability().await?;
        let named = says.iter().all(|word| body.contains(word)) && body.contains("could not take over");
        ensure!(status == 503 && named, "{status} {body}");
        Ok(())
    })
    .await?;
    tokio::time::sleep(SEVERAL_TRIES).await;
    assert_eq!(lines(&standby, says), 1, "{}", standby.log());
    assert_eq!(standby.availability().await?.0, 503);
    ensure!(leader.is_ready().await? && leader.availability().await?.0 == 200, "the leader is disturbed");

    apply(cluster, remedy).await?;
    eventually("it is available", SOON, async || {
        let (status, body) = standby.availability().await?;
        ensure!(status == 200 && body.starts_with("standing by: "), "{status} {body}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_standby_that_could_not_lead_is_unavailable() -> Result<()> {
    let cluster = Cluster::for_changes().await?;
    let leader = Cloud::start(&cluster).standby().await?;
    leader.leads(SOON).await?;
    rights_to_reports(&cluster, &[]).await?;
    let right = [
        "a right is missing: User ",
        "cannot list resource ",
        "imageprepullreports",
        "kubectl apply -f manifests/cloudcore-prepull/rbac.yaml",
    ];
    a_standby_waits_for(&cluster, &leader, &right, ROLE).await?;
    remove_definition(&cluster).await?;
    let definition = [&format!("the definition {REPORTS} is missing"), "kubectl apply -f manifests/crds"];
    a_standby_waits_for(&cluster, &leader, &definition, DEFINITION).await
}

/// Checks that a job that can't continue has the reason in its status, that the log has it once, and that the job
/// completes after the repair.
async fn waits_for(
    cluster: &Cluster,
    cloud: &Cloud,
    fleet: &Fleet,
    says: &[&str],
    remedy: &str,
) -> Result<()> {
    let pulls = fleet.pulls();
    let name = format!("waits-{pulls}");
    let job = cluster.job(&name).images([format!("harbor.example/{name}:v1")]).on(fleet.names());
    let job = job.concurrency(5).apply().await?;
    let (kind, note) = job.event("NotWritten").await?;
    assert_eq!(kind, "Warning");
    ensure!(note.starts_with("the job waits, because its report cannot be written: "), "{note}");
    ensure!(says.iter().all(|word| note.contains(word)), "{note}");
    tokio::time::sleep(SEVERAL_TRIES).await;
    // The watch of reports may name it, too.
    let of_writes = [says, &["refused", "write a report of a job"]].concat();
    assert_eq!(lines(cloud, &of_writes), 1, "{}", cloud.log());
    assert_eq!(fleet.pulls(), pulls, "nothing is sent that is not written");
    let told = job.events().await?.into_iter().filter(|(_, reason, _)| reason == "NotWritten").count();
    assert_eq!(told, 1);

    apply(cluster, remedy).await?;
    assert_eq!(job.completes().await?.summary.successful, 20);
    assert_eq!((fleet.pulls(), fleet.pulled_twice()), (pulls + 20, 0));
    fleet.all_acknowledged().await
}

#[tokio::test]
async fn what_goes_missing_is_named_on_the_job() -> Result<()> {
    let cluster = Cluster::for_changes().await?;
    let mut cloud = Cloud::start(&cluster).await?;
    let fleet = fleet(&cluster, &cloud).await?;
    remove_definition(&cluster).await?;
    let says = [&format!("the definition {REPORTS} is missing"), "kubectl apply -f manifests/crds"];
    waits_for(&cluster, &cloud, &fleet, &says, DEFINITION).await?;

    // The API server may know the role of before for a moment, so the next job comes after a restart.
    cloud.terminate().await?;
    rights_to_reports(&cluster, &["get", "list"]).await?;
    cloud.restart().await?;
    fleet.all_connected().await?;
    let says = [
        "a right is missing: User ",
        "cannot create resource ",
        "imageprepullreports",
        "kubectl apply -f manifests/cloudcore-prepull/rbac.yaml",
    ];
    waits_for(&cluster, &cloud, &fleet, &says, ROLE).await
}
