//! Deletes all leftovers of a test from a shared API server.
//!
//! Definitions are kept, and of the rights those that the pool has installed: some tests must not have others. Empty
//! namespaces are kept as well, since no controller could delete one.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use http::header::{ACCEPT, CONTENT_TYPE};
use http::{Method, Request};
use kube::Client;
use serde_json::{Value, json};

use crate::cleanup::{SOON, eventually};
use crate::parts::workspace;

/// Namespace of Kubernetes itself, which is spared.
const SYSTEM: &str = "kube-system";
/// Media type of lists that have only metadata.
const METADATA: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
/// Kinds of objects that tests leave: path of the group, and plural.
const KINDS: [(&str, &str); 13] = [
    ("/apis/operations.kubeedge.io/v1alpha2", "imageprepulljobs"),
    ("/apis/operations.kubeedge.io/v1alpha2", "imageprepullreports"),
    ("/apis/operations.kubeedge.io/v1alpha2", "imageprepullsettings"),
    ("/apis/apps.kruise.io/v1beta1", "imagelistpulljobs"),
    ("/apis/apps.kruise.io/v1beta1", "imagepulljobs"),
    ("/apis/apps.kruise.io/v1beta1", "nodeimages"),
    ("/api/v1", "nodes"),
    ("/apis/apps/v1", "deployments"),
    ("/api/v1", "pods"),
    ("/api/v1", "secrets"),
    ("/api/v1", "configmaps"),
    ("/apis/coordination.k8s.io/v1", "leases"),
    ("/api/v1", "events"),
];
/// Kinds of rights, without those that the API server makes for itself.
const RIGHTS: [&str; 4] = ["clusterrolebindings", "clusterroles", "rolebindings", "roles"];

/// Deletes everything, and returns when the objects are gone from the API server's cache as well. The authorizer may know
/// the rights for a moment longer.
pub(super) async fn everything(client: &Client) -> Result<()> {
    rights(client).await?;
    for (group, plural) in KINDS {
        for namespace in namespaces(client, &format!("{group}/{plural}")).await? {
            let path = match namespace {
                Some(namespace) => format!("{group}/namespaces/{namespace}/{plural}"),
                None => format!("{group}/{plural}"),
            };
            // With a grace period, a pod's kubelet would need to confirm the deletion.
            let options = json!({"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0});
            let request = Request::builder().method(Method::DELETE).uri(&path);
            let request =
                request.header(CONTENT_TYPE, "application/json").body(options.to_string().into())?;
            client.request_text(request).await.with_context(|| format!("DELETE {path}"))?;
        }
        let cached = format!("{group}/{plural}?resourceVersion=0");
        eventually(&format!("the {plural} are gone"), SOON, async || {
            let left = namespaces(client, &cached).await?;
            ensure!(left.is_empty(), "some are left in the namespaces {left:?}");
            Ok(())
        })
        .await?;
    }
    Ok(())
}

/// Deletes the rights that a test has added.
async fn rights(client: &Client) -> Result<()> {
    let mut installed = BTreeSet::new();
    for file in super::RIGHTS {
        for object in super::documents(&std::fs::read_to_string(workspace().join(file))?)? {
            installed.insert(object["metadata"]["name"].as_str().unwrap_or_default().to_owned());
        }
    }
    for plural in RIGHTS {
        let group = "/apis/rbac.authorization.k8s.io/v1";
        let added = format!("{group}/{plural}?labelSelector=kubernetes.io/bootstrapping%21=rbac-defaults");
        for item in list(client, &added).await? {
            let name = item["metadata"]["name"].as_str().unwrap_or_default();
            if !installed.contains(name) && item["metadata"]["namespace"] != SYSTEM {
                delete(client, group, plural, &item).await?;
            }
        }
    }
    Ok(())
}

/// Path of the objects of a kind, in the namespace of this one if it has one.
pub(super) fn path(group: &str, plural: &str, object: &Value) -> String {
    match object["metadata"]["namespace"].as_str() {
        Some(namespace) => format!("{group}/namespaces/{namespace}/{plural}"),
        None => format!("{group}/{plural}"),
    }
}

/// Deletes one object.
pub(super) async fn delete(client: &Client, group: &str, plural: &str, object: &Value) -> Result<()> {
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    let path = format!("{}/{name}", path(group, plural, object));
    let request = Request::delete(&path).body(Vec::new())?;
    client.request_text(request).await.map(drop).with_context(|| format!("DELETE {path}"))
}

/// Reads the namespaces that have objects of a kind; None stands for objects without a namespace. A kind without a
/// definition has no objects.
async fn namespaces(client: &Client, path: &str) -> Result<BTreeSet<Option<String>>> {
    let items = list(client, path).await?;
    let namespaces = items.iter().map(|item| item["metadata"]["namespace"].as_str());
    Ok(namespaces.filter(|namespace| *namespace != Some(SYSTEM)).map(|n| n.map(str::to_owned)).collect())
}

/// Reads the metadata of the objects below a path; none of a kind that isn't served.
pub(super) async fn list(client: &Client, path: &str) -> Result<Vec<Value>> {
    let request = Request::get(path).header(ACCEPT, METADATA).body(Vec::new())?;
    let mut list: Value = match client.request_text(request).await {
        Err(kube::Error::Api(status)) if status.code == 404 => return Ok(Vec::new()),
        answer => serde_json::from_str(&answer.with_context(|| format!("GET {path}"))?)?,
    };
    ensure!(list["kind"] == "PartialObjectMetadataList", "GET {path}: {list}");
    // An empty list may be null.
    Ok(list["items"].as_array_mut().map(std::mem::take).unwrap_or_default())
}
