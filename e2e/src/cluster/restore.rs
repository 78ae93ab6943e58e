//! Restores a shared API server after a test that has changed definitions, rights or admission.

use anyhow::{Context, Result, ensure};
use http::header::CONTENT_TYPE;
use http::{Method, Request};
use kube::Client;
use serde_json::{Value, json};

use super::{ACCOUNT, RIGHTS, apply, documents, sweep};
use crate::cleanup::{SOON, eventually};
use crate::parts::workspace;

/// What may stand in the way of the next test's writes, or answer in its place: path of the group, and plural.
const IN_THE_WAY: [(&str, &str); 10] = [
    ("/apis/admissionregistration.k8s.io/v1", "validatingwebhookconfigurations"),
    ("/apis/admissionregistration.k8s.io/v1", "mutatingwebhookconfigurations"),
    ("/apis/admissionregistration.k8s.io/v1", "validatingadmissionpolicybindings"),
    ("/apis/admissionregistration.k8s.io/v1", "validatingadmissionpolicies"),
    ("/apis/admissionregistration.k8s.io/v1", "mutatingadmissionpolicybindings"),
    ("/apis/admissionregistration.k8s.io/v1", "mutatingadmissionpolicies"),
    ("/api/v1", "resourcequotas"),
    ("/api/v1", "services"),
    ("/api/v1", "endpoints"),
    ("/apis/discovery.k8s.io/v1", "endpointslices"),
];
/// The Service of the API server itself, and what belongs to it.
const OWN: &str = "kubernetes";
const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1";
const KRUISE: &str = "manifests/kruise/crds.yaml";

/// Deletes everything like [`sweep::everything`], and makes our definitions and rights those of a new server, without further
/// admission. Kruise's definitions are as we ship them if there are any. Returns once all of that is in force.
pub(super) async fn everything(client: &Client) -> Result<()> {
    for (group, plural) in IN_THE_WAY {
        for item in sweep::list(client, &format!("{group}/{plural}")).await? {
            if item["metadata"]["namespace"] == "default" && item["metadata"]["name"] == OWN {
                continue;
            }
            sweep::delete(client, group, plural, &item).await?;
        }
    }
    sweep::everything(client).await?;
    let mut definitions = Vec::new();
    for file in apply::manifests(&workspace().join("manifests/crds"))? {
        definitions.extend(documents(&std::fs::read_to_string(file)?)?);
    }
    let kruise = documents(&std::fs::read_to_string(workspace().join(KRUISE))?)?;
    for item in sweep::list(client, DEFINITIONS).await? {
        let name = &item["metadata"]["name"];
        let known = kruise.iter().find(|definition| definition["metadata"]["name"] == *name);
        definitions.extend(known.cloned());
    }
    for definition in &definitions {
        put(client, DEFINITIONS, definition).await?;
    }
    super::definitions_are_established(client).await?;
    let mut rules = Vec::new();
    for object in documents(&std::fs::read_to_string(workspace().join(RIGHTS[1]))?)? {
        let kind = object["kind"].as_str().unwrap_or_default();
        let plural = format!("{}s", kind.to_lowercase());
        if kind == "ServiceAccount" {
            continue;
        }
        put(client, &sweep::path(RBAC, &plural, &object), &object).await?;
        let namespace = &object["metadata"]["namespace"];
        rules.extend(
            object["rules"].as_array().into_iter().flatten().map(|rule| (namespace.clone(), rule.clone())),
        );
    }
    eventually("the rights are in force", SOON, async || {
        for (namespace, rule) in &rules {
            is_allowed(client, namespace, rule).await?;
        }
        Ok(())
    })
    .await
}

/// Creates or replaces an object below the path of its kind.
async fn put(client: &Client, path: &str, object: &Value) -> Result<()> {
    let name = object["metadata"]["name"].as_str().context("an object has a name")?;
    let one = format!("{path}/{name}");
    eventually(&format!("{one} is as it was"), SOON, async || {
        let request = |method, path: &str, object: &Value| {
            let request =
                Request::builder().method(method).uri(path).header(CONTENT_TYPE, "application/json");
            request.body(object.to_string().into_bytes())
        };
        let found = client.request::<Value>(Request::get(&one).body(Vec::new())?).await;
        match found {
            Ok(found) => {
                ensure!(found["metadata"]["deletionTimestamp"].is_null(), "it is being deleted");
                let mut object = object.clone();
                object["metadata"]["resourceVersion"] = found["metadata"]["resourceVersion"].clone();
                client.request_text(request(Method::PUT, &one, &object)?).await?;
            }
            Err(kube::Error::Api(status)) if status.code == 404 => {
                client.request_text(request(Method::POST, path, object)?).await?;
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    })
    .await
}

/// Fails until the authorizer lets cloudcore-prepull use the first right of a rule.
async fn is_allowed(client: &Client, namespace: &Value, rule: &Value) -> Result<()> {
    // A rule about a path of the API server has no resource.
    let Some(resource) = rule["resources"][0].as_str() else { return Ok(()) };
    let (resource, part) = resource.split_once('/').unwrap_or((resource, ""));
    let attributes = json!({
        "namespace": namespace, "group": rule["apiGroups"][0], "resource": resource, "subresource": part,
        "verb": rule["verbs"][0], "name": rule["resourceNames"][0],
    });
    let review = json!({
        "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
        "spec": {"user": format!("system:serviceaccount:{ACCOUNT}"), "resourceAttributes": attributes},
    });
    let request = Request::post("/apis/authorization.k8s.io/v1/subjectaccessreviews");
    let request = request.header(CONTENT_TYPE, "application/json").body(review.to_string().into_bytes())?;
    let answer: Value = client.request(request).await?;
    ensure!(answer["status"]["allowed"] == true, "{attributes} isn't allowed yet");
    Ok(())
}
