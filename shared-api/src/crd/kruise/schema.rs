//! What the derived schemas lack: rules, bounds and defaults.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    JSON, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool, ValidationRule,
};
use serde_json::{Value, json};

use super::{MAX_IMAGES, MAX_TAGS};

/// A rule of a definition: where, what, and Kruise's words for it.
type Rule = (&'static [&'static str], &'static str, &'static str);

/// Below these paths, where they are. A path goes through properties; `*` stands for the values of a map or a list.
const RULES: &[Rule] = &[
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
    (&["spec", "parallelism"], "type(self) != int || self >= 0", "parallelism must be non-negative"),
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

/// Rules about the whole spec of a job.
const JOB_RULES: &[(&str, &str)] = &[
    ("!(has(self.selector) && has(self.podSelector))", "can not set both selector and podSelector"),
    (
        "has(self.pullSecrets) == has(oldSelf.pullSecrets) && (!has(self.pullSecrets) || self.pullSecrets == oldSelf.pullSecrets)",
        "spec.pullSecrets is immutable",
    ),
];

/// A default of a definition: where, and what.
type Filled = (&'static [&'static str], fn() -> Value);

/// The defaults that Kruise's webhook fills in.
const DEFAULTS: &[Filled] = &[
    (&["spec", "completionPolicy"], || json!({})),
    (&["spec", "completionPolicy", "type"], || json!("Always")),
    (&["spec", "pullPolicy"], || json!({})),
    (&["spec", "pullPolicy", "timeoutSeconds"], || json!(600)),
    (&["spec", "pullPolicy", "backoffLimit"], || json!(3)),
    (&["spec", "imagePullPolicy"], || json!("IfNotPresent")),
    (&["spec", "images", "*", "tags", "*", "pullPolicy", "timeoutSeconds"], || json!(600)),
    (&["spec", "images", "*", "tags", "*", "pullPolicy", "backoffLimit"], || json!(3)),
];

/// Completes the schema of one kind. What a kind does not have is passed over.
pub(super) fn complete(root: &mut JSONSchemaProps) {
    forget_defaults(root);
    for (path, default) in DEFAULTS {
        if let Some(schema) = at(root, path) {
            schema.default = Some(JSON(default()));
        }
    }
    // Without bounds the API server takes the rules below for too costly.
    if let Some(images) =
        at(root, &["spec", "images"]).filter(|images| images.additional_properties.is_some())
    {
        images.max_properties = i64::try_from(MAX_IMAGES).ok();
        if let Some(tags) = at(root, &["spec", "images", "*", "tags"]) {
            tags.max_items = i64::try_from(MAX_TAGS).ok();
        }
    }
    for (path, rule, message) in RULES {
        if let Some(schema) = at(root, path) {
            // Those for a list of images are none for the map of a NodeImage.
            if *path != ["spec", "images"] || schema.additional_properties.is_none() {
                require(schema, rule, message);
            }
        }
    }
    if at(root, &["spec", "completionPolicy"]).is_some()
        && let Some(spec) = at(root, &["spec"])
    {
        for (rule, message) in JOB_RULES {
            require(spec, rule, message);
        }
    }
    // Older servers publish no schema of a kind that has an integer or string that may be null.
    if let Some(parallelism) = at(root, &["spec", "parallelism"]) {
        parallelism.nullable = None;
    }
    // The form of Kruise's English manual, labels without matchLabels, is understood as well.
    if let Some(pods) = at(root, &["spec", "podSelector"]) {
        pods.x_kubernetes_preserve_unknown_fields = Some(true);
    }
}

fn require(schema: &mut JSONSchemaProps, rule: &str, message: &str) {
    let rule = ValidationRule {
        rule: rule.to_owned(),
        message: Some(message.to_owned()),
        ..ValidationRule::default()
    };
    schema.x_kubernetes_validations.get_or_insert_default().push(rule);
}

fn at<'a>(root: &'a mut JSONSchemaProps, path: &[&str]) -> Option<&'a mut JSONSchemaProps> {
    path.iter().try_fold(root, |schema, step| match *step {
        "*" => match (&mut schema.additional_properties, &mut schema.items) {
            (Some(JSONSchemaPropsOrBool::Schema(values)), _) => Some(values.as_mut()),
            (_, Some(JSONSchemaPropsOrArray::Schema(items))) => Some(items.as_mut()),
            _ => None,
        },
        name => schema.properties.as_mut()?.get_mut(name),
    })
}

/// The derived defaults say only that a field may be left out.
fn forget_defaults(schema: &mut JSONSchemaProps) {
    schema.default = None;
    schema.properties.iter_mut().flatten().for_each(|(_, property)| forget_defaults(property));
    if let Some(JSONSchemaPropsOrArray::Schema(items)) = &mut schema.items {
        forget_defaults(items);
    }
    if let Some(JSONSchemaPropsOrBool::Schema(values)) = &mut schema.additional_properties {
        forget_defaults(values);
    }
}

#[cfg(test)]
mod tests {
    use super::super::crds;
    use super::*;

    #[test]
    fn every_rule_and_default_has_its_place() {
        let mut roots: Vec<JSONSchemaProps> = crds()
            .into_iter()
            .map(|mut crd| crd.spec.versions.remove(0).schema.unwrap().open_api_v3_schema.unwrap())
            .collect();
        for path in RULES.iter().map(|(path, ..)| path).chain(DEFAULTS.iter().map(|(path, _)| path)) {
            assert!(roots.iter_mut().any(|root| at(root, path).is_some()), "{path:?}");
        }
        let rules = |root: &mut JSONSchemaProps, path: &[&str]| {
            at(root, path).and_then(|s| s.x_kubernetes_validations.clone()).map_or(0, |rules| rules.len())
        };
        assert_eq!(
            roots.iter_mut().map(|root| rules(root, &["spec"])).collect::<Vec<_>>(),
            [JOB_RULES.len(), JOB_RULES.len(), 0]
        );
        assert_eq!(rules(&mut roots[1], &["spec", "images"]), 2);
        assert_eq!(rules(&mut roots[2], &["spec", "images"]), 0);
        assert_eq!(rules(&mut roots[2], &["spec", "images", "*", "tags", "*"]), 3);
    }
}
