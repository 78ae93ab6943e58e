//! Deletes all leftovers of a test from a shared API server.
//!
//! Definitions and rights are kept, except for Kruise's rights, which some tests must not have. Empty namespaces are
//! kept as well, since no controller could delete one.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use http::header::{ACCEPT, CONTENT_TYPE};
use http::{Method, Request};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use kube::Client;
use kube::api::{Api, DeleteParams};
use serde_json::{Value, json};

use crate::cleanup::{SOON, eventually};

/// Namespace of Kubernetes itself, which is spared.
const SYSTEM: &str = "kube-system";
/// Media type of lists that have only metadata.
const METADATA: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
/// Kinds of objects that tests leave: path of the group, and plural.
const KINDS: [(&str, &str); 11] = [
    ("/apis/operations.kubeedge.io/v1alpha2", "imageprepulljobs"),
    ("/apis/operations.kubeedge.io/v1alpha2", "imageprepullreports"),
    ("/apis/apps.kruise.io/v1beta1", "imagelistpulljobs"),
    ("/apis/apps.kruise.io/v1beta1", "imagepulljobs"),
    ("/apis/apps.kruise.io/v1beta1", "nodeimages"),
    ("/api/v1", "nodes"),
    ("/api/v1", "pods"),
    ("/api/v1", "secrets"),
    ("/api/v1", "configmaps"),
    ("/apis/coordination.k8s.io/v1", "leases"),
    ("/api/v1", "events"),
];
/// Name of Kruise's ClusterRole and its binding.
const KRUISE_RIGHTS: &str = "cloudcore-prepull-kruise";

/// Deletes everything, and returns when the objects are gone from the API server's cache as well. The authorizer may know
/// the rights for a moment longer.
pub(super) async fn everything(client: &Client) -> Result<()> {
    let now = DeleteParams::default();
    let (bindings, roles) =
        (Api::<ClusterRoleBinding>::all(client.clone()), Api::<ClusterRole>::all(client.clone()));
    let deleted = [
        bindings.delete(KRUISE_RIGHTS, &now).await.map(drop),
        roles.delete(KRUISE_RIGHTS, &now).await.map(drop),
    ];
    for deleted in deleted {
        match deleted {
            // Few tests install them.
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            deleted => deleted.context("Kruise's rights cannot be deleted")?,
        }
    }
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

/// Reads the namespaces that have objects of a kind; None stands for objects without a namespace. A kind without a
/// definition has no objects.
async fn namespaces(client: &Client, path: &str) -> Result<BTreeSet<Option<String>>> {
    let request = Request::get(path).header(ACCEPT, METADATA).body(Vec::new())?;
    let list = match client.request_text(request).await {
        Err(kube::Error::Api(status)) if status.code == 404 => return Ok(BTreeSet::new()),
        answer => answer.with_context(|| format!("GET {path}"))?,
    };
    let list: Value = serde_json::from_str(&list)?;
    ensure!(list["kind"] == "PartialObjectMetadataList", "GET {path}: {list}");
    // An empty list may be null.
    let items = list["items"].as_array();
    let namespaces = items.into_iter().flatten().map(|item| item["metadata"]["namespace"].as_str());
    Ok(namespaces.filter(|namespace| *namespace != Some(SYSTEM)).map(|n| n.map(str::to_owned)).collect())
}
