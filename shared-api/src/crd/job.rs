//! The spec of an ImagePrePullJob.
#![allow(clippy::struct_excessive_bools)] // the fields of the API, which the KubeSchema derive repeats

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::{CustomResource, CustomResourceExt, KubeSchema};
use serde::{Deserialize, Serialize};

use super::defaults::correct;
use super::download::{DownloadSpec, VerifySpec, WindowSpec};
use super::remove::RemoveSpec;
use super::status::ImagePrePullJobStatus;
use super::upgrade::UpgradeSpec;

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
    doc = "Pulls images onto edge nodes ahead of the applications that need them, and reports how each image fared on each node.",
    derive = "Default",
    derive = "PartialEq",
    printcolumn = r#"{"name":"Phase","type":"string","jsonPath":".status.phase"}"#,
    printcolumn = r#"{"name":"Desired","type":"integer","jsonPath":".status.summary.desired"}"#,
    printcolumn = r#"{"name":"Successful","type":"integer","jsonPath":".status.summary.successful"}"#,
    printcolumn = r#"{"name":"Failed","type":"integer","jsonPath":".status.summary.failure"}"#,
    printcolumn = r#"{"name":"Skipped","type":"integer","jsonPath":".status.summary.skipped"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#,
    printcolumn = r#"{"name":"Pending","type":"integer","priority":1,"jsonPath":".status.summary.pending"}"#,
    printcolumn = r#"{"name":"Running","type":"integer","priority":1,"jsonPath":".status.summary.inProgress"}"#,
    printcolumn = r#"{"name":"Unknown","type":"integer","priority":1,"jsonPath":".status.summary.unknown"}"#,
    printcolumn = r#"{"name":"Checked","type":"date","priority":1,"jsonPath":".status.recheck.completionTime"}"#,
    printcolumn = r#"{"name":"Reason","type":"string","priority":1,"jsonPath":".status.reason"}"#
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(oldSelf.cancel) || !oldSelf.cancel || (has(self.cancel) && self.cancel)").message("cancel cannot be taken back: create a new job")
)]
pub struct ImagePrePullJobSpec {
    /// What to pull, on which nodes, and how.
    #[serde(default)]
    pub image_pre_pull_template: ImagePrePullTemplate,
    /// Rules that replace registry, repository, tag or secret for groups of nodes. Every entry whose nodeLabel
    /// matches a node applies to it, in the order of this list.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub image_pre_pull_overriders: Vec<OverriderEntry>,
    /// While this is true, no further node starts; nodes that have started finish.
    #[serde(default, skip_serializing_if = "is_false")]
    pub suspend: bool,
    /// While this is true, no further node starts, and those that have started stop downloading and keep what they have;
    /// what has arrived is still unpacked. When it ends, they go on, and each has its whole timeoutSeconds again.
    #[serde(default, skip_serializing_if = "is_false")]
    pub pause: bool,
    /// Ends the job for good: running pulls are stopped, no further node starts, suspended or not, and the job becomes a
    /// Failure with the reason Cancelled. It can't be taken back, and no round or re-check begins any more. A job that has
    /// ended keeps its phase. Default false.
    #[serde(default, skip_serializing_if = "is_false")]
    pub cancel: bool,
    /// How long the whole job may take, in seconds. When the time is up, running pulls are stopped, no further node
    /// starts, and the job becomes a Failure. The time counts from the start over all rounds, and from zero again when a
    /// suspension ends, as in a Kubernetes Job, or when another round is asked for after the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 4_294_967_295_i64))]
    pub active_deadline_seconds: Option<i64>,
    /// The job is deleted, with its reports, this many seconds after its end. Unset: it is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 4_294_967_295_i64))]
    pub ttl_seconds_after_finished: Option<i64>,
    /// Rolls the job out in waves: some of the nodes first, then more. Unset: all nodes are in one wave.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<RolloutStrategy>,
    /// Number of retry rounds. Raising it by one when the job has ended starts another round for the nodes that
    /// failed, are unknown, or were not started; an image that is on a node already is not pulled again. What is left of
    /// it when the job ends starts nothing. At most 1000. Default 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schemars(range(min = 0, max = 1000))]
    pub retry: i64,
    /// Number of re-checks. Raising it by one when the job has ended asks the nodes that succeeded whether their images
    /// are still there; nothing is downloaded. A node that lacks one becomes a Failure with the code Removed, which a
    /// retry round brings back. A re-check ends after two minutes: nodes that have not answered by then keep their
    /// result. What is left of it when the job ends starts nothing. At most 1000. Default 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schemars(range(min = 0, max = 1000))]
    pub recheck: i64,
    /// Whether a node that becomes eligible while the job runs joins it, because it gets the label or is Ready again.
    #[serde(default, skip_serializing_if = "is_false")]
    pub follow_nodes: bool,
    /// Whether names in nodeNames may be without a Node. If false, each of them counts as a failed node; if true, they are
    /// skipped.
    #[serde(default, skip_serializing_if = "is_false")]
    pub allow_missing_nodes: bool,
    /// Limits of the download on each node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub download: Option<DownloadSpec>,
    /// When nodes may download: while any of these windows is open, and the node's own as well. Outside of them no node
    /// starts, and one that has started stops downloading, keeps what it has, and goes on when a window opens.
    /// timeoutSeconds counts only while they are open; activeDeadlineSeconds counts all the time. Unset: always.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub windows: Vec<WindowSpec>,
    /// By how much at most a node begins later than its window opens, such as 20m: each node by a time of its own, so that
    /// they do not all begin at once. Shorter than each window. Unset: all begin when it opens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = r"^([0-9]+(h|m|s))+$"))]
    pub window_jitter: Option<String>,
    /// Whether the images are kept from the kubelet's garbage collection for as long as this job exists.
    #[serde(default, skip_serializing_if = "is_false")]
    pub pin: bool,
    /// The signatures that the images must have. Unset: signatures are not looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verify: Option<VerifySpec>,
}

/// Rollout of a job in waves.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RolloutStrategy {
    /// How many nodes may have started by each wave, earlier waves included: a percentage of all nodes, such as
    /// "5%", rounded up, or a number, such as "10". The values must rise; the last wave always has all nodes. A wave
    /// ends when its nodes have ended, and the next one begins if no more of them failed than failureTolerate allows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20))]
    pub steps: Vec<String>,
    /// Pause between the end of a wave and the start of the next one, in seconds.
    #[serde(default)]
    #[schemars(range(min = 0, max = 4_294_967_295_i64))]
    pub pause_seconds: i64,
}

/// What to pull or to remove, on which nodes, and how.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.nodeNames) && size(self.nodeNames) > 0 ? !has(self.labelSelector) : has(self.labelSelector)").message("set exactly one of nodeNames and labelSelector"),
    validation = Rule::new("has(self.remove) || (has(self.images) && size(self.images) > 0) || (has(self.imageSources) && size(self.imageSources) > 0)").message("images and imageSources are both empty: name at least one image, or set remove"),
    validation = Rule::new("!has(self.remove) || !((has(self.images) && size(self.images) > 0) || (has(self.imageSources) && size(self.imageSources) > 0))").message("remove excludes images and imageSources: make a job of each"),
    validation = Rule::new("!has(self.upgrade) || !has(self.remove)").message("upgrade excludes remove: make a job of each")
)]
pub struct ImagePrePullTemplate {
    /// Images by reference, such as nginx:1.25 or registry.example/team/app@sha256:…. The registry docker.io,
    /// the namespace library/ and the tag latest are implied as usual. At most 256 different images, imageSources
    /// included.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    pub images: Vec<String>,
    /// Images by their parts. Each may have a secret and a pull policy of its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    pub image_sources: Vec<ImageSource>,
    /// What to remove. Excludes images and imageSources, and all that is about pulling. Needs agents of this release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remove: Option<RemoveSpec>,
    /// Upgrades the agents to the version in the image of the job, which is the only one. Needs agents of this release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upgrade: Option<UpgradeSpec>,
    /// Secrets by registry. An image without a secret of its own uses the most specific entry that matches. What is
    /// matched is the reference after the overriders.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub registry_secrets: Vec<RegistrySecret>,
    /// Secret, {namespace}/{name}, for every image that no other field gives one. Its type must be
    /// kubernetes.io/dockerconfigjson or kubernetes.io/dockercfg. If the secret is missing, is malformed, or has no
    /// entry for the registry, the image fails: it is never pulled anonymously instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_secrets: Option<String>,
    /// Nodes by name. Exactly one of nodeNames and labelSelector must be set. Nodes that are not edge nodes,
    /// or not Ready, are skipped and listed in status.skippedNodes. A name without a Node counts as a failed node, unless
    /// allowMissingNodes is true.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub node_names: Vec<String>,
    /// Nodes by label. Exactly one of nodeNames and labelSelector must be set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label_selector: Option<LabelSelector>,
    /// What each node checks before it pulls: disk (free space on the runtime's image file system), cpu, mem.
    #[serde(default = "default_check_items")]
    pub check_items: Vec<String>,
    /// Fraction of the nodes that may fail, from 0 to 1. If more fail, the job becomes a Failure and no further node
    /// starts. With 0.1, one failed node out of ten is tolerated and two are not.
    #[serde(default = "default_failure_tolerate")]
    pub failure_tolerate: String,
    /// How many nodes of the job pull at the same time.
    #[serde(default = "default_concurrency")]
    #[schemars(range(min = 0, max = 2_147_483_647))]
    pub concurrency: i64,
    /// How long each node may take, in seconds from its start. 0 means 300.
    #[serde(default = "default_timeout_seconds")]
    #[schemars(range(min = 0, max = 4_294_967_295_i64))]
    pub timeout_seconds: i64,
    /// How often the pull of each image is retried. Only transient errors are: a broken connection, a 429 or a 5xx,
    /// but not a wrong password or an unknown tag.
    #[serde(default)]
    #[schemars(range(min = 0, max = 2_147_483_647))]
    pub retry_times: i64,
    /// Always, IfNotPresent or Never, with the kubelet's meaning. Unset: Always for the tag latest and for an image
    /// with neither tag nor digest, otherwise IfNotPresent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<String>,
}

/// An image by its parts.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageSource {
    /// Display name, shown in the status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Host and port of the registry. Default: docker.io.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub registry: Option<String>,
    /// The repository, such as team/app.
    pub repository: String,
    /// The tag. With neither tag nor digest, latest is implied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// The manifest digest, sha256:….
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Secret of this image, {namespace}/{name}.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_secret: Option<String>,
    /// Pull policy of this image; takes precedence over that of the template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<String>,
}

/// The secret of a registry.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RegistrySecret {
    /// The registry, host[:port][/path], where * stands for any text within one label of the host.
    pub registry: String,
    /// The secret, {namespace}/{name}.
    pub image_secret: String,
}

/// An item of imagePrePullOverriders, in the shape of KubeEdge's proposal.
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
    /// The nodes, as a label selector in string form, such as region=hangzhou, "region in (a,b)", gpu, !gpu.
    pub node_label: String,
    /// What is replaced for these nodes.
    #[serde(default)]
    pub overriders: Overriders,
}

/// Rules, applied in order, each to the result of the previous one.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Overriders {
    /// Rules for parts of the image reference as it is written: nginx:1.25 has no registry part, so that replacing
    /// the registry with r.io gives r.io/nginx:1.25.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub image_overriders: Vec<OverrideRule>,
    /// Rules for the secrets of the image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secret_overriders: Vec<OverrideRule>,
}

/// One rule of an overrider.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.operator == 'remove' || (has(self.value) && size(self.value) > 0)").message("the operator add or replace needs a value"))]
pub struct OverrideRule {
    /// The part to change: Registry, Repository or Tag of an image; SecretName or Namespace of a secret.
    pub component: String,
    /// add, replace or remove.
    pub operator: String,
    /// The value to add or to put in place; required for add and replace. A Tag takes a tag, sha256:… or @sha256:….
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

/// An absent template equals an empty one, so that the defaults here must be those of the fields.
impl Default for ImagePrePullTemplate {
    fn default() -> Self {
        Self {
            images: Vec::new(),
            image_sources: Vec::new(),
            remove: None,
            upgrade: None,
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

/// What KubeEdge wrote into v1alpha1: without it in the schema, a job that KubeEdge has carried out looks like a new one.
fn keep_state_of_kubeedge(status: &mut JSONSchemaProps) {
    let state = JSONSchemaProps {
        type_: Some("string".to_owned()),
        description: Some(
            "Written by KubeEdge before 1.21 only. A job that has it is left to KubeEdge.".to_owned(),
        ),
        ..JSONSchemaProps::default()
    };
    status.properties.get_or_insert_default().insert("state".to_owned(), state);
}

/// The definition of ImagePrePullJob. `v1alpha2` is stored, and `v1alpha1` has the same schema, so no conversion is needed.
pub fn crd() -> CustomResourceDefinition {
    let mut crd = ImagePrePullJob::crd();
    correct(&mut crd, keep_state_of_kubeedge);
    let mut old = crd.spec.versions[0].clone();
    "v1alpha1".clone_into(&mut old.name);
    old.storage = false;
    crd.spec.versions.insert(0, old);
    crd
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
