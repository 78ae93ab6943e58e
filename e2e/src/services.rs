//! Services of the manifests, and their endpoints.
//!
//! There is no kubelet and no controller for endpoints: the harness creates the pods and the endpoints of a Service. An
//! API server connects only to pods, and to no loopback address: the cloud listens in a network namespace, or at an
//! address of [`Network::uplink_here`].

use std::net::Ipv4Addr;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Endpoints, Pod};
use kube::api::{Api, Patch, PatchParams};
use prepull_api::edges::SERVICE;
use serde_json::{Value, json};

use crate::cloud::{Cloud, Start};
use crate::cluster::{Cluster, NAMESPACE};
use crate::network::Network;
use crate::parts::workspace;

const MANIFESTS: &str = "manifests/cloudcore-prepull";
/// The pod of a single cloud.
const POD: &str = "cloudcore-prepull-1";

/// Starts a cloud with a list of edges that people can read through the API server, while the network exists.
pub async fn with_edges_listed(cluster: &Cluster, cloud: Start<'_>) -> Result<(Cloud, Network)> {
    let network = Network::new().await?;
    let address = network.uplink_here().await?;
    let cloud = cloud.lists_edges_at(address).await?;
    apply_edges(cluster).await?;
    make_pod(cluster, POD, address).await?;
    serve_by(cluster, SERVICE, POD, address, &cloud).await?;
    Ok((cloud, network))
}

/// Applies the Service of the list of the edges, and the rights to read it.
pub async fn apply_edges(cluster: &Cluster) -> Result<()> {
    apply_service(cluster, SERVICE).await?;
    cluster.apply_file(&workspace().join(MANIFESTS).join("optional/edges-reader.yaml")).await
}

/// Applies a Service of the manifests.
pub async fn apply_service(cluster: &Cluster, name: &str) -> Result<()> {
    let services = std::fs::read_to_string(workspace().join(MANIFESTS).join("service.yaml"))?;
    let named = format!("  name: {name}\n");
    let service = services.split("\n---\n").find(|yaml| yaml.contains(&named)).context("no such Service")?;
    cluster.apply(service).await
}

/// Makes a pod with this address.
pub async fn make_pod(cluster: &Cluster, name: &str, address: Ipv4Addr) -> Result<()> {
    cluster.create_pod(NAMESPACE, name, "a-machine", &[]).await?;
    let status = json!({"status": {"podIP": address, "podIPs": [{"ip": address}]}});
    let api: Api<Pod> = Api::namespaced(cluster.client(), NAMESPACE);
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await?;
    Ok(())
}

/// Puts this replica behind the Service, like the two controllers of endpoints.
pub async fn serve_by(
    cluster: &Cluster,
    service: &str,
    pod: &str,
    address: Ipv4Addr,
    cloud: &Cloud,
) -> Result<()> {
    let pod = json!({"kind": "Pod", "namespace": NAMESPACE, "name": pod});
    let port = json!({"port": cloud.edges_addr().port(), "protocol": "TCP"});
    let endpoints = json!({
        "apiVersion": "v1", "kind": "Endpoints", "metadata": {"name": service},
        "subsets": [{"addresses": [{"ip": address, "targetRef": pod}], "ports": [port]}],
    });
    let api: Api<Endpoints> = Api::namespaced(cluster.client(), NAMESPACE);
    api.patch(service, &PatchParams::apply("e2e").force(), &Patch::Apply(endpoints)).await?;
    let endpoints = vec![json!({"addresses": [address], "conditions": {"ready": true}, "targetRef": pod})];
    apply_slice(cluster, service, &endpoints, &port).await
}

/// Applies the one EndpointSlice of a Service.
async fn apply_slice(cluster: &Cluster, service: &str, endpoints: &[Value], port: &Value) -> Result<()> {
    // Kubernetes 1.20 has no other version.
    let version = match cluster.client().list_api_group_resources("discovery.k8s.io/v1").await {
        Ok(_) => "discovery.k8s.io/v1",
        Err(_) => "discovery.k8s.io/v1beta1",
    };
    let slice = json!({
        "apiVersion": version, "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {
            "name": format!("{service}-1"), "namespace": NAMESPACE,
            "labels": {"kubernetes.io/service-name": service},
        },
        "endpoints": endpoints, "ports": [port],
    });
    cluster.apply(&slice.to_string()).await
}
