//! `kubectl prepull nodes`, `why` and `check` against a real cluster: its edges, missing parts of a node, and problems.

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Patch, PatchParams};
use prepull_e2e::cluster::NAMESPACE;
use prepull_e2e::parts::workspace;
use prepull_e2e::prelude::*;
use prepull_e2e::services::{self, make_pod, serve_by};
use serde_json::json;

/// The Service for edges.
const DOOR: &str = "cloudcore-prepull";

/// Gives a user the rights that manifests/kubectl-prepull has for viewers.
async fn may_look(cluster: &Cluster, user: &str) -> Result<()> {
    for file in ["rbac.yaml", "checker.yaml"] {
        cluster.apply_file(&workspace().join("manifests/kubectl-prepull").join(file)).await?;
    }
    let user = format!("--user={user}");
    for role in ["prepull-viewer", "prepull-checker"] {
        let role_of = format!("--clusterrole={role}");
        cluster.kubectl(&["create", "clusterrolebinding", role, &role_of, &user]).await?;
    }
    let role = "--role=prepull-checker";
    cluster.kubectl(&["create", "rolebinding", "looks", "-n", NAMESPACE, role, &user]).await?;
    Ok(())
}

async fn where_nobody_lists_edges_the_reason_is_named(
    cluster: &Cluster,
    jane: &Person,
    ann: &Person,
) -> Result<()> {
    // No cloudcore-prepull, an earlier one without the list of edges, and one without a Service.
    jane.runs("nodes")
        .await?
        .is(1, &["there is no cloudcore-prepull in namespace prepull-system", "--system-namespace"])?;
    services::apply_service(cluster, DOOR).await?;
    jane.runs("nodes").await?.is(1, &["is of an older version", "update both"])?;
    services::apply_edges(cluster).await?;
    jane.runs("nodes").await?.is(1, &["no cloudcore-prepull leads", "kubectl prepull check"])?;
    ann.runs("nodes")
        .await?
        .is(1, &["user ann lacks a right: to get services/proxy", "kubectl-prepull/rbac.yaml"])?;
    Ok(())
}

async fn what_a_node_lacks_is_named(jane: &Person, ann: &Person) -> Result<()> {
    // The missing parts of a node, and the next steps.
    let said = jane
        .runs("why edge-1")
        .await?
        .is(0, &["✓ it is Ready", "✓ its agent has been connected", "nothing is in its way"])?;
    eprintln!("why edge-1\n{}", said.out);
    let said = jane
        .runs("why edge-2")
        .await?
        .is(1, &["✗ it has never joined", "Next: kubectl prepull tokens create --node edge-2"])?;
    eprintln!("why edge-2\n{}", said.out);
    jane.runs("why plain")
        .await?
        .is(1, &["✗ it is no edge node", "Next: kubectl label node plain node-role.kubernetes.io/edge="])?;
    jane.runs("why edge-3").await?.is(1, &["✗ there is no Node edge-3"])?;
    ann.runs("why edge-1")
        .await?
        .is(1, &["! its Node cannot be read: user ann lacks a right: to get nodes"])?;
    Ok(())
}

/// Each role by itself finds nothing wrong either.
async fn each_role_checks_alone(cluster: &Cluster) -> Result<()> {
    for (name, is_of_cluster) in [
        ("prepull-viewer", true),
        ("prepull-operator", true),
        ("prepull-settings-admin", true),
        ("prepull-token-admin", false),
        ("prepull-node-admin", false),
    ] {
        let user = format!("{name}-alone");
        let kind = if is_of_cluster { "clusterrole" } else { "role" };
        let (role, flag) = (format!("--{kind}={name}"), format!("--user={user}"));
        let binding = format!("{kind}binding");
        cluster.kubectl(&["-n", NAMESPACE, "create", &binding, &user, &role, &flag]).await?;
        let person = Person::new(&cluster.kubeconfig_as(&user)?);
        person.runs("check").await?.is(0, &["Nothing is wrong, as far as could be looked"])?;
    }
    Ok(())
}

#[tokio::test]
async fn a_person_sees_edges_and_problems() -> Result<()> {
    let cluster = Cluster::for_changes().await?;
    let network = Network::new().await?;
    let address = network.uplink().await?;
    let mut cloud = Cloud::start(&cluster).within(&network).replica().await?;
    may_look(&cluster, "jane").await?;
    let jane = Person::new(&cluster.kubeconfig_as("jane")?);
    let ann = Person::new(&cluster.kubeconfig_as("ann")?);

    where_nobody_lists_edges_the_reason_is_named(&cluster, &jane, &ann).await?;

    // Two edge nodes (one has never joined), and a node that isn't an edge.
    cluster.edge_nodes(&["edge-1", "edge-2"]).await?;
    cluster.node("plain").ready().create().await?;
    // A separate disk: the free space of this machine must not matter.
    let mut node = EdgeNode::start(&cluster, &cloud, "edge-1").disk(512 * MIB).await?;
    node.is_connected().await?;
    make_pod(&cluster, "a", address).await?;
    for service in [DOOR, prepull_api::edges::SERVICE] {
        serve_by(&cluster, service, "a", address, &cloud).await?;
    }
    let said = eventually("the edges are listed", SOON, async || {
        jane.runs("nodes").await?.is(0, &["NAME", "CONNECTED", "edge-1", "edge-2", "1 of 2 edges connected"])
    })
    .await?;
    eprintln!("nodes\n{}", said.out);
    let names = jane.runs("nodes --away -o name").await?.is(0, &[])?;
    assert_eq!(names.out, "node/edge-2\n");
    jane.runs("nodes revoke edge-1").await?.is(1, &["kubectl prepull node revoke NAME"])?;
    jane.runs("nodes edge-1 edge-9").await?.is(1, &["no edge is called edge-9"])?;
    let json = jane.runs("nodes edge-1 -o json").await?.is(0, &[])?;
    let json: serde_json::Value = serde_json::from_str(&json.out)?;
    assert_eq!((&json["total"], &json["items"][0]["connected"]), (&1.into(), &true.into()));
    jane.runs("nodes -o wide").await?.is(0, &["linux", "containerd "])?;

    what_a_node_lacks_is_named(&jane, &ann).await?;

    // A job that fails on one node, and waits for the other.
    let job = cluster
        .job("web")
        .images(["127.0.0.1:1/team/web:v1"])
        .on(["edge-1", "edge-2"])
        .concurrency(2)
        .retries(0);
    let job = job.tolerate("0").apply().await?;
    job.until("edge-1 has failed", |status| {
        status.node("edge-1").is_some_and(|node| node.phase == NodePhase::Failure)
    })
    .await?;
    let said = jane
        .runs("why edge-1 web")
        .await?
        .is(1, &["✗ job web has failed on it, Unreachable", "kubectl prepull retry web"])?;
    eprintln!("why edge-1 web\n{}", said.out);
    jane.runs("why plain web").await?.is(1, &["✗ job web names its nodes, and not this one"])?;
    jane.runs("why edge-1 wev").await?.is(1, &["there is no ImagePrePullJob wev"])?;

    // All is well, except for the offline parts.
    let ready = json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}});
    let pods: Api<Pod> = Api::namespaced(cluster.client(), NAMESPACE);
    pods.patch_status("a", &PatchParams::default(), &Patch::Merge(ready)).await?;
    cluster
        .kubectl(&["-n", NAMESPACE, "label", "pod", "a", "app.kubernetes.io/name=cloudcore-prepull"])
        .await?;
    let me = Person::new(cluster.kubeconfig());
    let well = [
        "✓ the definition of ImagePrePullJob has every field",
        "✓ you may look",
        " leads",
        "✓ 1 pod ready",
        "✓ the Service cloudcore-prepull leads to one pod",
        "✓ the CA",
        "! 1 of 2 edges",
    ];
    let said = me.runs("check").await?.is(0, &well)?;
    eprintln!("check\n{}", said.out);
    let said = jane.runs("check").await?.is(
        0,
        &["! you lack the right to create imageprepulljobs", "✓ the definition of ImagePrePullReport"],
    )?;
    ensure!(!said.out.contains("not known"), "jane may look at everything: {}", said.out);

    each_role_checks_alone(&cluster).await?;

    // The agent ends, and then the leader.
    node.terminate_agent().await?;
    eventually("edge-1 is away", SOON, async || {
        jane.runs("why edge-1")
            .await?
            .is(1, &["✗ its agent is not connected: it was last seen", "Next: on edge-1: systemctl status"])
    })
    .await?;
    cloud.terminate().await?;
    let said = me.runs("check").await?.is(
        1,
        &[
            "✗ no replica leads: the last leader gave its Lease back",
            "✗ the edges are not listed: the API server cannot connect",
        ],
    )?;
    eprintln!("check, without a leader\n{}", said.out);
    ann.runs("check")
        .await?
        .is(0, &["! you lack the right to get imageprepulljobs", "! whether a replica leads is not known"])?;
    Ok(())
}
