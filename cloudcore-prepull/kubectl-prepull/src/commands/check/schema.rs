//! The fields of this version's definitions that the cluster's definitions lack.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::Value;

/// The fields of `ours`, by their paths, that the definition in the cluster does not have: the API server drops them.
pub(super) fn missing_fields(
    ours: &CustomResourceDefinition,
    theirs: &CustomResourceDefinition,
) -> Vec<String> {
    let [ours, theirs] = [ours, theirs].map(|definition| {
        let stored = definition.spec.versions.iter().find(|version| version.storage);
        let schema = stored.and_then(|version| version.schema.as_ref()?.open_api_v3_schema.as_ref());
        serde_json::to_value(schema).unwrap_or_default()
    });
    let mut lacking = Vec::new();
    compare(&ours, &theirs, "", &mut lacking);
    lacking
}

fn compare(ours: &Value, theirs: &Value, path: &str, lacking: &mut Vec<String>) {
    if theirs["x-kubernetes-preserve-unknown-fields"] == true {
        return;
    }
    for (name, field) in ours["properties"].as_object().into_iter().flatten() {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        match theirs["properties"].get(name) {
            Some(theirs) => compare(field, theirs, &path, lacking),
            None => lacking.push(path),
        }
    }
    for inner in ["items", "additionalProperties"] {
        if ours[inner].is_object() {
            compare(&ours[inner], &theirs[inner], &format!("{path}[]"), lacking);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use prepull_api::crd::job;

    use super::*;

    #[test]
    fn an_older_definition_lacks_newer_fields() {
        let ours = job::crd();
        assert!(missing_fields(&ours, &ours).is_empty());
        let mut value = serde_json::to_value(&ours).unwrap();
        for version in value["spec"]["versions"].as_array_mut().unwrap() {
            let spec = version.pointer_mut("/schema/openAPIV3Schema/properties/spec/properties").unwrap();
            spec.as_object_mut().unwrap().remove("windows").unwrap();
            spec["imagePrePullTemplate"]["properties"]["imageSources"]["items"]["properties"]
                .as_object_mut()
                .unwrap()
                .remove("digest")
                .unwrap();
        }
        let older: CustomResourceDefinition = serde_json::from_value(value).unwrap();
        assert_eq!(
            missing_fields(&ours, &older),
            ["spec.imagePrePullTemplate.imageSources[].digest", "spec.windows"]
        );
        assert!(missing_fields(&older, &ours).is_empty(), "a newer one has more, and lacks nothing");
    }
}
