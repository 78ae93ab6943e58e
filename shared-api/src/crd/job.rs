//! The spec of an ImagePrePullJob.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSON, JSONSchemaProps, JSONSchemaPropsOrArray,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::{CustomResource, CustomResourceExt, KubeSchema};
use serde::{Deserialize, Serialize};

use super::status::ImagePrePullJobStatus;

/// Pulls images onto edge nodes ahead of the applications that need them.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "operations.kubeedge.io",
    version = "v1alpha2",
    kind = "ImagePrePullJob",
    plural = "imageprepulljobs",
    singular = "imageprepulljob",
    shortname = "ippj",
    status = "ImagePrePullJobStatus",
    doc = "Pulls images onto edge nodes ahead of the applications that need them, and says how each image fared on each node.",
    derive = "Default",
    derive = "PartialEq",
    printcolumn = r#"{"name":"Phase","type":"string","jsonPath":".status.phase"}"#,
    printcolumn = r#"{"name":"Desired","type":"integer","jsonPath":".status.summary.desired"}"#,
    printcolumn = r#"{"name":"Successful","type":"integer","jsonPath":".status.summary.successful"}"#,
    printcolumn = r#"{"name":"Failed","type":"integer","jsonPath":".status.summary.failure"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#,
    printcolumn = r#"{"name":"Reason","type":"string","priority":1,"jsonPath":".status.reason"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct ImagePrePullJobSpec {
    /// What to pull, on which nodes, and how.
    #[serde(default)]
    pub image_pre_pull_template: ImagePrePullTemplate,
    /// Replaces registry, repository, tag or secret for groups of nodes. Every entry whose nodeLabel matches a
    /// node applies to it, in this order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub image_pre_pull_overriders: Vec<OverriderEntry>,
    /// No further node starts while this is true; nodes that have started go on to their end.
    #[serde(default, skip_serializing_if = "is_false")]
    pub suspend: bool,
    /// Time for the whole job, in seconds. When it is over, what runs is stopped, nothing more starts, and the job
    /// is a Failure. Counts from the start, and anew from the end of a suspension, as in a Kubernetes Job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active_deadline_seconds: Option<i64>,
    /// The job, with its reports, is deleted this many seconds after it ended. Unset: it stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds_after_finished: Option<i64>,
    /// Waves: a part of the nodes first, then more. Unset: all nodes in one wave.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<RolloutStrategy>,
    /// Rounds of tries beyond the first. When the job has ended, raising this by one has the failed, unknown and
    /// not started nodes tried once more; an image that is there already is not pulled again. Default 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub retry: i64,
    /// Whether nodes that become eligible while the job runs join it: one that gets the label, or is Ready again.
    #[serde(default, skip_serializing_if = "is_false")]
    pub follow_nodes: bool,
}

/// Waves.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RolloutStrategy {
    /// How many nodes may have started in each wave, the earlier waves included: a percentage of all nodes, such
    /// as "5%", rounded up, or a number, such as "10". They rise, and the last wave is always all nodes. A wave
    /// ends when its nodes have ended, and the next begins if no more of them failed than failureTolerate allows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<String>,
    /// Between the end of a wave and the start of the next, in seconds.
    #[serde(default)]
    pub pause_seconds: i64,
}

/// What to pull, on which nodes, and how.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.nodeNames) && size(self.nodeNames) > 0 ? !has(self.labelSelector) : has(self.labelSelector)").message("set exactly one of nodeNames and labelSelector"),
    validation = Rule::new("(has(self.images) && size(self.images) > 0) || (has(self.imageSources) && size(self.imageSources) > 0)").message("images and imageSources are both empty: name at least one image")
)]
pub struct ImagePrePullTemplate {
    /// Images by reference, such as nginx:1.25 or registry.example/team/app@sha256:…. The registry docker.io,
    /// the namespace library/ and the tag latest are implied as usual. At most 256 images in all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<String>,
    /// Images named by their parts, each with a secret and a pull policy of its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub image_sources: Vec<ImageSource>,
    /// Secrets by registry. For an image without a secret of its own the longest match serves, against the
    /// reference after the overriders.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub registry_secrets: Vec<RegistrySecret>,
    /// One secret, {namespace}/{name}, for every image that has none otherwise. Type
    /// kubernetes.io/dockerconfigjson or kubernetes.io/dockercfg. A missing or malformed secret, or one without
    /// an entry for the registry, fails the image: it is never pulled anonymously instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_secrets: Option<String>,
    /// The nodes by name. Exactly one of nodeNames and labelSelector is set. Nodes that are unknown, not edge
    /// nodes, or not Ready are left out and listed in status.skippedNodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub node_names: Vec<String>,
    /// The nodes by label. Exactly one of nodeNames and labelSelector is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label_selector: Option<LabelSelector>,
    /// What a node checks before it pulls: disk (room on the runtime's image file system), cpu, mem.
    #[serde(default = "default_check_items")]
    pub check_items: Vec<String>,
    /// The part of the nodes that may fail, from 0 to 1. Beyond it the job is a Failure and no further node
    /// starts. With 0.1, one failed node of ten is tolerated and two are not.
    #[serde(default = "default_failure_tolerate")]
    pub failure_tolerate: String,
    /// How many nodes pull at the same time, over the whole job.
    #[serde(default = "default_concurrency")]
    pub concurrency: i64,
    /// Time for each node, counted from the moment it starts, in seconds. 0 means 300.
    #[serde(default = "default_timeout_seconds")]
    pub timeout_seconds: i64,
    /// Further tries for each image after the first. Only errors that may pass are tried again: a broken link,
    /// a 429 or a 5xx, and not a wrong password or an unknown tag.
    #[serde(default)]
    pub retry_times: i64,
    /// Always, IfNotPresent or Never, with the kubelet's meaning. Unset: Always for the tag latest or no tag,
    /// else IfNotPresent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<String>,
}

/// An image named by its parts.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageSource {
    /// A name for people, shown in the status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Host and port of the registry. Unset: docker.io.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub registry: Option<String>,
    /// The repository, such as team/app.
    pub repository: String,
    /// The tag. With neither tag nor digest: latest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// The manifest digest, sha256:….
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// The secret of this image, {namespace}/{name}.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_secret: Option<String>,
    /// The pull policy of this image; wins over the template's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<String>,
}

/// A secret for a registry.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RegistrySecret {
    /// host[:port][/path], where * stands for any text within one label of the host.
    pub registry: String,
    /// The secret, {namespace}/{name}.
    pub image_secret: String,
}

/// The list item of imagePrePullOverriders, in the shape of KubeEdge's proposal.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OverriderEntry {
    /// The rules of one group of nodes.
    pub image_pre_pull_overrider: ImagePrePullOverrider,
}

/// The rules of one group of nodes.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImagePrePullOverrider {
    /// Which nodes: any label selector in its string form, such as region=hangzhou, "region in (a,b)", gpu, !gpu.
    pub node_label: String,
    /// What is replaced for them.
    #[serde(default)]
    pub overriders: Overriders,
}

/// Rules, applied in order, each to the result of the one before.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Overriders {
    /// Rules for parts of the reference as it is written: nginx:1.25 has no registry part, so that replacing
    /// the registry by r.io gives r.io/nginx:1.25.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub image_overriders: Vec<OverrideRule>,
    /// Rules for the secrets of the image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secret_overriders: Vec<OverrideRule>,
}

/// One rule.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.operator == 'remove' || (has(self.value) && size(self.value) > 0)").message("value is required for add and replace"))]
pub struct OverrideRule {
    /// Registry, Repository or Tag of an image; SecretName or Namespace of a secret.
    pub component: String,
    /// add, replace or remove.
    pub operator: String,
    /// Required for add and replace. A Tag takes a tag, sha256:… or @sha256:….
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_false(value: &bool) -> bool {
    !value
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_zero(value: &i64) -> bool {
    *value == 0
}

fn default_check_items() -> Vec<String> {
    vec!["disk".to_owned()]
}

fn default_failure_tolerate() -> String {
    "0.1".to_owned()
}

fn default_concurrency() -> i64 {
    1
}

fn default_timeout_seconds() -> i64 {
    300
}

/// What an absent template is: the same as an empty one. It is the default that the definition shows.
impl Default for ImagePrePullTemplate {
    fn default() -> Self {
        Self {
            images: Vec::new(),
            image_sources: Vec::new(),
            registry_secrets: Vec::new(),
            image_secrets: None,
            node_names: Vec::new(),
            label_selector: None,
            check_items: default_check_items(),
            failure_tolerate: default_failure_tolerate(),
            concurrency: default_concurrency(),
            timeout_seconds: default_timeout_seconds(),
            retry_times: 0,
            image_pull_policy: None,
        }
    }
}

/// The definition with both versions: the same schema, `v1alpha2` stored, so that no conversion is needed.
pub fn crd() -> CustomResourceDefinition {
    let mut crd = ImagePrePullJob::crd();
    for version in &mut crd.spec.versions {
        if let Some(root) = version.schema.as_mut().and_then(|schema| schema.open_api_v3_schema.as_mut()) {
            keep_plain_defaults(root);
            root.properties
                .iter_mut()
                .flatten()
                .filter(|(name, _)| *name == "status")
                .for_each(|(_, s)| drop_defaults(s));
        }
    }
    let mut old = crd.spec.versions[0].clone();
    "v1alpha1".clone_into(&mut old.name);
    old.storage = false;
    crd.spec.versions.insert(0, old);
    crd
}

/// The definition as the server completes it is what a user reads back: a default is worth writing down where
/// it is a value, and not where it only says that an object may be left out.
fn keep_plain_defaults(schema: &mut JSONSchemaProps) {
    if schema.default.as_ref().is_some_and(|JSON(value)| value.is_object() || value.is_null() || value == "")
    {
        schema.default = None;
    }
    children(schema).for_each(keep_plain_defaults);
}

/// Nobody fills in a status but cloudcore.
pub(super) fn drop_defaults(schema: &mut JSONSchemaProps) {
    schema.default = None;
    children(schema).for_each(drop_defaults);
}

fn children(schema: &mut JSONSchemaProps) -> impl Iterator<Item = &mut JSONSchemaProps> {
    let items = schema.items.iter_mut().filter_map(|items| match items {
        JSONSchemaPropsOrArray::Schema(schema) => Some(schema.as_mut()),
        JSONSchemaPropsOrArray::Schemas(_) => None, // not structural, so never made
    });
    schema.properties.iter_mut().flatten().map(|(_, schema)| schema).chain(items)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_are_served_with_one_schema() {
        let crd = crd();
        let versions: Vec<_> =
            crd.spec.versions.iter().map(|v| (v.name.as_str(), v.served, v.storage)).collect();
        assert_eq!(versions, [("v1alpha1", true, false), ("v1alpha2", true, true)]);
        assert_eq!(crd.spec.versions[0].schema, crd.spec.versions[1].schema);
    }

    #[test]
    fn an_absent_field_has_the_documented_default() {
        let template: ImagePrePullTemplate = serde_json::from_str("{}").unwrap();
        assert_eq!(template, ImagePrePullTemplate::default());
        assert_eq!(
            (template.check_items, template.failure_tolerate.as_str(), template.concurrency),
            (vec!["disk".to_owned()], "0.1", 1)
        );
        assert_eq!((template.timeout_seconds, template.retry_times), (300, 0));
    }
}
