//! Fields that our definition has and the cluster's lacks. The API server silently drops a field that it doesn't know: under
//! the definition of an earlier release, a job with `verify` would pull unsigned images.

use std::collections::BTreeMap;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, CustomResourceDefinitionVersion, JSONSchemaProps, JSONSchemaPropsOrArray,
};

/// The paths that `ours` has and `served` hasn't, such as `spec.windows` or `status.phase=Completed` for a value of an enum;
/// the version itself, where it isn't served. Of ours, the version that is stored counts: it is the one that we use. Empty for a later release's definition, which has more.
pub fn missing_paths(served: &CustomResourceDefinition, ours: &CustomResourceDefinition) -> Vec<String> {
    let mut paths = Vec::new();
    for version in ours.spec.versions.iter().filter(|version| version.storage) {
        let found = served.spec.versions.iter().find(|served| served.name == version.name && served.served);
        let Some(found) = found else {
            paths.push(version.name.clone());
            continue;
        };
        match (schema_of(found), schema_of(version)) {
            (Some(found), Some(wanted)) => compare_schemas(found, wanted, "", &mut paths),
            _ => paths.push(version.name.clone()),
        }
    }
    paths
}

fn schema_of(version: &CustomResourceDefinitionVersion) -> Option<&JSONSchemaProps> {
    version.schema.as_ref()?.open_api_v3_schema.as_ref()
}

fn compare_schemas(served: &JSONSchemaProps, ours: &JSONSchemaProps, path: &str, paths: &mut Vec<String>) {
    if served.x_kubernetes_preserve_unknown_fields == Some(true) {
        return;
    }
    let none = BTreeMap::new();
    let known = served.properties.as_ref().unwrap_or(&none);
    for (name, wanted) in ours.properties.iter().flatten() {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        match known.get(name) {
            Some(found) => compare_schemas(found, wanted, &path, paths),
            None => paths.push(path),
        }
    }
    if let (Some(found), Some(wanted)) = (item_schema(served), item_schema(ours)) {
        compare_schemas(found, wanted, path, paths);
    }
    // Without an enum every value is taken.
    if let (Some(found), Some(wanted)) = (&served.enum_, &ours.enum_) {
        let lacking = wanted.iter().filter(|value| !found.contains(value));
        paths.extend(lacking.map(|value| format!("{path}={}", value.0.as_str().unwrap_or_default())));
    }
}

fn item_schema(schema: &JSONSchemaProps) -> Option<&JSONSchemaProps> {
    match schema.items.as_ref()? {
        JSONSchemaPropsOrArray::Schema(schema) => Some(schema),
        JSONSchemaPropsOrArray::Schemas(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::crd::{job, report};

    /// Our definition of jobs after a change to the schema of its version.
    fn changed(change: impl Fn(&mut Value)) -> CustomResourceDefinition {
        let mut definition = serde_json::to_value(job::crd()).unwrap();
        let versions = definition["spec"]["versions"].as_array_mut().unwrap();
        change(versions.iter_mut().find(|version| version["storage"] == true).unwrap());
        serde_json::from_value(definition).unwrap()
    }

    /// The properties below the root, along these fields; `[]` are the items of a list.
    fn properties<'a>(version: &'a mut Value, fields: &[&str]) -> &'a mut Value {
        let mut schema = &mut version["schema"]["openAPIV3Schema"];
        for field in fields {
            schema = if *field == "[]" { &mut schema["items"] } else { &mut schema["properties"][*field] };
        }
        &mut schema["properties"]
    }

    fn remove(version: &mut Value, fields: &[&str], name: &str) {
        let removed = properties(version, fields).as_object_mut().unwrap().remove(name);
        assert!(removed.is_some(), "{fields:?} has no {name}");
    }

    #[test]
    fn our_own_definitions_lack_nothing() {
        for definition in [job::crd(), report::crd()] {
            assert_eq!(missing_paths(&definition, &definition), Vec::<String>::new());
        }
    }

    #[test]
    fn a_field_that_is_not_served_is_named() {
        let older = changed(|version| {
            remove(version, &["spec"], "windows");
            remove(version, &["spec", "imagePrePullTemplate", "imageSources", "[]"], "digest");
        });
        let lacks = ["spec.imagePrePullTemplate.imageSources.digest", "spec.windows"];
        assert_eq!(missing_paths(&older, &job::crd()), lacks);
        assert_eq!(missing_paths(&job::crd(), &older), Vec::<String>::new(), "a later release has more");
    }

    #[test]
    fn a_value_that_is_not_allowed_is_named() {
        let older = changed(|version| {
            let phases = &mut properties(version, &["status"])["phase"]["enum"];
            phases.as_array_mut().unwrap().retain(|phase| phase != "Completed");
        });
        assert_eq!(missing_paths(&older, &job::crd()), ["status.phase=Completed"]);
    }

    #[test]
    fn a_version_that_is_not_served_is_named() {
        let other = changed(|version| version["served"] = false.into());
        assert_eq!(missing_paths(&other, &job::crd()), ["v1alpha2"]);
    }

    #[test]
    fn a_schema_that_keeps_everything_lacks_nothing() {
        let open = changed(|version| {
            version["schema"]["openAPIV3Schema"] =
                serde_json::json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
        });
        assert_eq!(missing_paths(&open, &job::crd()), Vec::<String>::new());
    }
}
