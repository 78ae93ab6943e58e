//! The custom resources. The manifests are generated from these types (`cloudcore-prepull crds`).
//!
//! The types accept any value of the right JSON type. Whether the value is valid is decided by cloudcore's validate
//! step, which reports it in the job's status. On API servers that support CEL (1.25 and later), the CEL rules refuse
//! the same mistakes at once.

mod defaults;
pub mod download;
pub mod job;
pub mod kruise;
pub mod remove;
pub mod report;
pub mod served;
pub mod settings;
pub mod status;
pub mod upgrade;

/// KubeEdge's API group.
pub const GROUP: &str = "operations.kubeedge.io";
/// Label that KubeEdge sets on edge nodes.
pub const EDGE_LABEL: &str = "node-role.kubernetes.io/edge";

#[cfg(test)]
mod tests {
    use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
    use serde_json::Value;

    /// The formats that OpenAPI and Kubernetes define. Newer API servers warn of others whenever a definition is applied.
    const FORMATS: [&str; 3] = ["int32", "int64", "date-time"];

    fn formats<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
        match value {
            Value::Object(object) => {
                // A property may have this name, and is no text.
                found.extend(object.get("format").and_then(Value::as_str));
                object.values().for_each(|value| formats(value, found));
            }
            Value::Array(values) => values.iter().for_each(|value| formats(value, found)),
            _ => {}
        }
    }

    #[test]
    fn every_format_in_the_definitions_is_known_to_api_servers() {
        let [pull_job, list_job, node_image] = super::kruise::crds();
        let ours = [super::job::crd(), super::report::crd(), super::settings::crd()];
        let kruises: [CustomResourceDefinition; 3] = [pull_job, list_job, node_image];
        for crd in ours.into_iter().chain(kruises) {
            let json = serde_json::to_value(&crd).unwrap_or_default();
            let mut found = Vec::new();
            formats(&json, &mut found);
            assert!(!found.is_empty());
            found.retain(|format| !FORMATS.contains(format));
            assert!(found.is_empty(), "{:?}: {found:?}", crd.metadata.name);
        }
    }
}
