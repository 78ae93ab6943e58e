//! Rules, bounds and defaults of the definitions, which the derives cannot express.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    JSON, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool, ValidationRule,
};
use serde_json::{Value, json};

use super::node_image::{MAX_IMAGES, MAX_TAGS};
use crate::crd::defaults::remove_all_defaults;

/// A CEL rule of a definition: path in the schema, expression, and message in Kruise's wording.
type CelRule = (&'static [&'static str], &'static str, &'static str);

/// Rules at paths of the schema, for the kinds that have the path. A path consists of properties; `*` stands for the
/// values of a map or a list.
const RULES: &[CelRule] = &[
    (&["spec", "image"], "size(self) > 0", "image can not be empty"),
    (&["spec", "images"], "size(self) > 0", "image can not be empty"),
    (&["spec", "images"], "size(self) <= 255", "the maximum number of images cannot > 255"),
    (
        &["spec", "selector"],
        "!(has(self.names) && (has(self.matchLabels) || has(self.matchExpressions)))",
        "can not set both names and labelSelector in this spec.selector",
    ),
    (
        &["spec", "parallelism"],
        "type(self) != string || !self.endsWith('%')",
        "parallelism does not support percentage value",
    ),
    (
        &["spec", "parallelism"],
        "type(self) != string || self.endsWith('%') || self.matches('^[+-]?[0-9]+$')",
        "parallelism must be a valid integer",
    ),
    (
        &["spec", "parallelism"],
        "type(self) == int ? self >= 0 : !self.startsWith('-')",
        "parallelism must be non-negative",
    ),
    (
        &["spec", "completionPolicy"],
        "!has(self.type) || self.type != 'Never' || !(has(self.activeDeadlineSeconds) || has(self.ttlSecondsAfterFinished))",
        "activeDeadlineSeconds and ttlSecondsAfterFinished can only work with Always CompletionPolicyType",
    ),
    (
        &["spec", "images", "*", "tags", "*"],
        "has(self.tag) && size(self.tag) > 0",
        "tag for an image can not be empty",
    ),
    (
        &["spec", "images", "*", "tags", "*"],
        "!has(self.version) || self.version >= 0",
        "version can not be less than 0",
    ),
    (
        &["spec", "images", "*", "tags", "*"],
        "has(self.pullPolicy) && has(self.pullPolicy.ttlSecondsAfterFinished)",
        "pullPolicy.ttlSecondsAfterFinished must set",
    ),
];

/// Rules for the whole spec of a job.
const JOB_RULES: &[(&str, &str)] = &[
    ("!(has(self.selector) && has(self.podSelector))", "can not set both selector and podSelector"),
    (
        "has(self.pullSecrets) == has(oldSelf.pullSecrets) && (!has(self.pullSecrets) || self.pullSecrets == oldSelf.pullSecrets)",
        "spec.pullSecrets is immutable",
    ),
];

/// A default of a definition: path in the schema, and value.
type SchemaDefault = (&'static [&'static str], fn() -> Value);

/// The defaults that Kruise's webhook sets.
const DEFAULTS: &[SchemaDefault] = &[
    (&["spec", "completionPolicy"], || json!({})),
    (&["spec", "completionPolicy", "type"], || json!("Always")),
    (&["spec", "pullPolicy"], || json!({})),
    (&["spec", "pullPolicy", "timeoutSeconds"], || json!(600)),
    (&["spec", "pullPolicy", "backoffLimit"], || json!(3)),
    (&["spec", "imagePullPolicy"], || json!("IfNotPresent")),
    (&["spec", "images", "*", "tags", "*", "pullPolicy", "timeoutSeconds"], || json!(600)),
    (&["spec", "images", "*", "tags", "*", "pullPolicy", "backoffLimit"], || json!(3)),
];

/// The fields of a spec that Kruise's definitions require.
const REQUIRED: &[&str] = &["image", "images"];

/// Adds rules, bounds and defaults to the schema of one kind. Paths that the kind does not have are ignored.
pub(super) fn complete_schema(root: &mut JSONSchemaProps) {
    remove_all_defaults(root);
    for (path, default) in DEFAULTS {
        if let Some(schema) = schema_at(root, path) {
            schema.default = Some(JSON(default()));
        }
    }
    // Without bounds, the API server refuses the rules below as too costly.
    if let Some(images) =
        schema_at(root, &["spec", "images"]).filter(|images| images.additional_properties.is_some())
    {
        images.max_properties = i64::try_from(MAX_IMAGES).ok();
        if let Some(tags) = schema_at(root, &["spec", "images", "*", "tags"]) {
            tags.max_items = i64::try_from(MAX_TAGS).ok();
        }
    }
    for (path, rule, message) in RULES {
        if let Some(schema) = schema_at(root, path) {
            // A list job has a list of images, which the rules are for; a NodeImage has a map.
            if *path != ["spec", "images"] || schema.additional_properties.is_none() {
                add_rule(schema, rule, message);
            }
        }
    }
    if schema_at(root, &["spec", "completionPolicy"]).is_some()
        && let Some(spec) = schema_at(root, &["spec"])
    {
        let fields = spec.properties.iter().flatten().map(|(name, _)| name);
        let required: Vec<_> = fields.filter(|name| REQUIRED.contains(&name.as_str())).cloned().collect();
        spec.required.get_or_insert_default().extend(required);
        for (rule, message) in JOB_RULES {
            add_rule(spec, rule, message);
        }
    }
    // Older API servers do not publish the schema of a kind with a nullable integer or string.
    if let Some(parallelism) = schema_at(root, &["spec", "parallelism"]) {
        parallelism.nullable = None;
    }
    // Kruise's English manual has labels outside of matchLabels, which are supported as well.
    if let Some(pods) = schema_at(root, &["spec", "podSelector"]) {
        pods.x_kubernetes_preserve_unknown_fields = Some(true);
    }
}

fn add_rule(schema: &mut JSONSchemaProps, rule: &str, message: &str) {
    let rule = ValidationRule {
        rule: rule.to_owned(),
        message: Some(message.to_owned()),
        ..ValidationRule::default()
    };
    schema.x_kubernetes_validations.get_or_insert_default().push(rule);
}

fn schema_at<'a>(root: &'a mut JSONSchemaProps, path: &[&str]) -> Option<&'a mut JSONSchemaProps> {
    path.iter().try_fold(root, |schema, step| match *step {
        "*" => match (&mut schema.additional_properties, &mut schema.items) {
            (Some(JSONSchemaPropsOrBool::Schema(values)), _) => Some(values.as_mut()),
            (_, Some(JSONSchemaPropsOrArray::Schema(items))) => Some(items.as_mut()),
            _ => None,
        },
        name => schema.properties.as_mut()?.get_mut(name),
    })
}

#[cfg(test)]
mod tests {
    use super::super::crds;
    use super::*;

    #[test]
    fn every_rule_and_default_applies_to_a_kind() {
        let mut roots: Vec<JSONSchemaProps> = crds()
            .into_iter()
            .map(|mut crd| crd.spec.versions.remove(0).schema.unwrap().open_api_v3_schema.unwrap())
            .collect();
        for path in RULES.iter().map(|(path, ..)| path).chain(DEFAULTS.iter().map(|(path, _)| path)) {
            assert!(roots.iter_mut().any(|root| schema_at(root, path).is_some()), "{path:?}");
        }
        let rules = |root: &mut JSONSchemaProps, path: &[&str]| {
            schema_at(root, path)
                .and_then(|s| s.x_kubernetes_validations.clone())
                .map_or(0, |rules| rules.len())
        };
        assert_eq!(
            roots.iter_mut().map(|root| rules(root, &["spec"])).collect::<Vec<_>>(),
            [JOB_RULES.len(), JOB_RULES.len(), 0]
        );
        let required = |root: &mut JSONSchemaProps| schema_at(root, &["spec"]).unwrap().required.clone();
        assert_eq!(
            roots.iter_mut().map(required).collect::<Vec<_>>(),
            [Some(vec!["image".to_owned()]), Some(vec!["images".to_owned()]), None]
        );
        assert_eq!(rules(&mut roots[1], &["spec", "images"]), 2);
        assert_eq!(rules(&mut roots[2], &["spec", "images"]), 0);
        assert_eq!(rules(&mut roots[2], &["spec", "images", "*", "tags", "*"]), 3);
    }
}
