//! The rules of Kruise's objects, which are refused in Kruise's words: each is parsed once, into a validated form.
//!
//! What Kruise's webhook accepts although its controller cannot carry it out is refused in our words.

use std::collections::{BTreeSet, HashSet};
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use prepull_api::crd::kruise::{
    CompletionPolicy, ImageListPullJobSpec, ImagePullJobSpec, MAX_IMAGES_IN_LIST, NodeSelector, PodSelector,
    PullJobTemplate, PullLimits, SandboxConfig,
};
use prepull_api::image::Reference;
use prepull_api::overriders::SecretRef;
use prepull_api::selector::Selector;
use prepull_api::task::{NodeName, PullPolicy};

use super::TagKey;
use super::stored_text::stored_len;

mod node_image;
#[cfg(test)]
mod tests;

#[cfg(test)]
use node_image::tag_rules;
pub(super) use node_image::{ValidTag, image_rules};

/// `timeoutSeconds` unless it is set: for each try.
pub(super) const DEFAULT_TIMEOUT: u32 = 600;
/// `backoffLimit` unless it is set: tries after the first one.
pub(super) const DEFAULT_BACKOFF_LIMIT: u32 = 3;
/// `parallelism` unless it is set: nodes at a time.
pub(super) const DEFAULT_PARALLELISM: u32 = 1;

/// Most `pullSecrets`: each is written into the NodeImages of all nodes, and tried in its turn.
pub(super) const MAX_SECRETS: usize = 16;
/// Most bytes of the labels and annotations of `sandboxConfig`, as [`sandbox_bytes`] counts them: it is written into the
/// NodeImages of all nodes, whose room is bounded as well.
const MAX_SANDBOX: usize = 16 << 10;
/// Most `selector.names`: twice the nodes that we measure with. A name takes a hundred bytes in memory, even one of four
/// letters, and an object of 1.5 MiB has room for 200,000 of these.
const MAX_NAMES: usize = 20_000;
/// Most bytes that the children of a list repeat of its spec, all together: each child has the selectors of the list. It
/// leaves 64 KiB to a list of 255 images, and anything that etcd takes to one of ten; without it, six lists of 1.3 MiB
/// would fill etcd.
const MAX_REPEATED: usize = 16 << 20;

/// An ImagePullJob that can be carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ValidPullJob {
    pub(super) image: TagKey,
    /// What it has in common with an ImageListPullJob.
    pub(super) template: ValidTemplate,
}

/// An ImageListPullJob that can be carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ValidListJob {
    /// The images as the spec writes them, in its order. There is at least one, and none is there twice.
    pub(super) images: Vec<String>,
    /// What it has in common with an ImagePullJob, for each of its images.
    pub(super) template: ValidTemplate,
}

/// What ImagePullJob and ImageListPullJob have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ValidTemplate {
    pub(super) nodes: NodeChoice,
    /// How many nodes may pull at a time; 0 pauses the job.
    pub(super) parallelism: u32,
    /// Seconds for one try, at least 1.
    pub(super) timeout: u32,
    /// Tries after the first one.
    pub(super) backoff_limit: u32,
    pub(super) completion: Completion,
    /// Whether to pull an image that is on the node already.
    pub(super) policy: PullPolicy,
    /// Names of secrets in the job's namespace, in the order in which they are tried.
    pub(super) secrets: Vec<String>,
    /// Labels and annotations for the container runtime.
    pub(super) sandbox: Option<SandboxConfig>,
}

/// The nodes of a job, among those that have a NodeImage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NodeChoice {
    All,
    Names(BTreeSet<NodeName>),
    Labels(Selector),
    /// Those on which active pods of the job's namespace with these labels run.
    Pods(Selector),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Completion {
    /// Once each node has succeeded or failed.
    Always {
        /// How long the job may take; not shorter than one try.
        deadline: Option<Duration>,
        /// How long the job is kept after its end; for ever if `None`.
        ttl: Option<Duration>,
    },
    /// Each node pulls again every day.
    Never,
}

pub(super) fn pull_job(spec: &ImagePullJobSpec) -> Result<ValidPullJob, String> {
    let ImagePullJobSpec { image, template } = spec;
    let nodes = node_choice(template)?;
    let image = image_of(image)?;
    Ok(ValidPullJob { image, template: validate_template(template, nodes)? })
}

/// Validates an ImageListPullJob. Its template must be valid for an ImagePullJob too, which Kruise finds out only when it
/// creates one.
pub(super) fn list_job(spec: &ImageListPullJobSpec) -> Result<ValidListJob, String> {
    let ImageListPullJobSpec { images, template } = spec;
    let nodes = node_choice(template)?;
    if images.is_empty() {
        return Err(EMPTY_IMAGE.to_owned());
    }
    let mut seen = HashSet::new();
    if !images.iter().all(|image| seen.insert(image)) {
        return Err("images cannot have duplicate values".to_owned());
    }
    if images.len() > MAX_IMAGES_IN_LIST {
        return Err(format!("the maximum number of images cannot > {MAX_IMAGES_IN_LIST}"));
    }
    for image in images {
        image_of(image)?;
    }
    let valid = ValidListJob { images: images.clone(), template: validate_template(template, nodes)? };
    check_repeated(template, images.len())?;
    Ok(valid)
}

/// Checks that the children of a list of so many images have room for what they repeat of its spec.
fn check_repeated(template: &PullJobTemplate, images: usize) -> Result<(), String> {
    let size = serde_json::to_string(template).map_or(usize::MAX, |text| text.len());
    let most = MAX_REPEATED / images;
    if size <= most {
        return Ok(());
    }
    Err(format!(
        "the spec without its images takes {size} bytes, which each of the {images} ImagePullJobs repeats: give it at most {most}, for example by labels instead of names in selector, or name fewer images"
    ))
}

const EMPTY_IMAGE: &str = "image can not be empty";

fn image_of(image: &str) -> Result<TagKey, String> {
    if image.is_empty() {
        return Err(EMPTY_IMAGE.to_owned());
    }
    let reference = Reference::parse(image).map_err(|error| format!("invalid image {image}: {error}"))?;
    let (image, tag) = reference.normalized().familiar_name_and_tag();
    Ok(TagKey { image, tag })
}

fn node_choice(template: &PullJobTemplate) -> Result<NodeChoice, String> {
    match (&template.selector, &template.pod_selector) {
        (None, None) => Ok(NodeChoice::All),
        (Some(selector), pods) => {
            let choice = node_selector(selector)?;
            if pods.is_some() {
                return Err("can not set both selector and podSelector".to_owned());
            }
            Ok(choice)
        }
        (None, Some(pods)) => pod_selector(pods).map(NodeChoice::Pods),
    }
}

fn node_selector(selector: &NodeSelector) -> Result<NodeChoice, String> {
    let NodeSelector { names, match_labels, match_expressions } = selector;
    let by_labels = match_labels.is_some() || match_expressions.is_some();
    let Some(names) = names else {
        let selector = LabelSelector {
            match_labels: match_labels.clone(),
            match_expressions: match_expressions.clone(),
        };
        let selector = Selector::try_from(&selector).map_err(|error| format!("invalid selector: {error}"))?;
        // `selector: {}` selects every node, as in Kruise.
        return Ok(if selector.selects_everything() {
            NodeChoice::All
        } else {
            NodeChoice::Labels(selector)
        });
    };
    if by_labels {
        return Err("can not set both names and labelSelector in this spec.selector".to_owned());
    }
    let chosen: BTreeSet<NodeName> = names.iter().map(|name| NodeName(name.clone())).collect();
    if chosen.len() != names.len() {
        return Err("duplicated name in selector names".to_owned());
    }
    if names.len() > MAX_NAMES {
        return Err(format!(
            "selector has {} names: name at most {MAX_NAMES}, or select the nodes by labels",
            names.len()
        ));
    }
    Ok(NodeChoice::Names(chosen))
}

fn pod_selector(selector: &PodSelector) -> Result<Selector, String> {
    let PodSelector { match_labels, match_expressions, plain } = selector;
    let mut labels = match_labels.clone().unwrap_or_default();
    for (key, value) in plain {
        if labels.get(key).is_some_and(|other| other != value) {
            return Err(format!(
                "invalid podSelector: label {key} stands there twice, with different values: keep the one in matchLabels"
            ));
        }
        labels.insert(key.clone(), value.clone());
    }
    let selector = LabelSelector { match_labels: Some(labels), match_expressions: match_expressions.clone() };
    Selector::try_from(&selector).map_err(|error| format!("invalid podSelector: {error}"))
}

/// Validates in the order of Kruise's webhook, so that of several errors the same is reported.
fn validate_template(template: &PullJobTemplate, nodes: NodeChoice) -> Result<ValidTemplate, String> {
    // All fields are named, so that none is forgotten here.
    let PullJobTemplate {
        pull_secrets,
        selector: _,
        pod_selector: _,
        parallelism,
        pull_policy,
        completion_policy,
        sandbox_config,
        image_pull_policy,
    } = template;
    let parallelism = parallelism_of(parallelism.as_ref())?;
    let PullLimits { timeout_seconds, backoff_limit } = pull_policy.clone().unwrap_or_default();
    let timeout = timeout_of(timeout_seconds, "pullPolicy.timeoutSeconds")?;
    Ok(ValidTemplate {
        nodes,
        parallelism,
        timeout,
        backoff_limit: backoff_limit_of(backoff_limit),
        completion: completion(completion_policy, timeout)?,
        policy: policy_of(image_pull_policy.as_deref(), "imagePullPolicy")?,
        secrets: check_secrets(pull_secrets)?,
        sandbox: check_sandbox(sandbox_config.as_ref())?,
    })
}

fn check_secrets(names: &[String]) -> Result<Vec<String>, String> {
    if names.len() > MAX_SECRETS {
        return Err(format!("pullSecrets has {} names: name at most {MAX_SECRETS}", names.len()));
    }
    names.iter().enumerate().map(|(i, name)| check_secret_name(i, name)).collect()
}

fn check_sandbox(config: Option<&SandboxConfig>) -> Result<Option<SandboxConfig>, String> {
    let Some(config) = config else { return Ok(None) };
    let size = sandbox_bytes(config);
    if size > MAX_SANDBOX {
        return Err(format!(
            "sandboxConfig takes {size} bytes in a NodeImage: give it at most {MAX_SANDBOX}"
        ));
    }
    Ok(Some(config.clone()))
}

/// Bytes of a sandbox's labels and annotations in a NodeImage, which has each key in its managedFields as well.
pub(super) fn sandbox_bytes(config: &SandboxConfig) -> usize {
    /// The quotes and the signs around a key and its value, in both places.
    const SIGNS: usize = 16;
    let texts = config.labels.iter().chain(&config.annotations).flatten();
    texts.map(|(key, value)| SIGNS + 2 * stored_len(key) + stored_len(value)).sum()
}

fn parallelism_of(value: Option<&IntOrString>) -> Result<u32, String> {
    let number = match value {
        None => return Ok(DEFAULT_PARALLELISM),
        Some(IntOrString::Int(number)) => *number,
        Some(IntOrString::String(text)) if text.ends_with('%') => {
            return Err("parallelism does not support percentage value".to_owned());
        }
        Some(IntOrString::String(text)) => {
            text.parse().map_err(|error| format!("parallelism must be a valid integer: {text:?}: {error}"))?
        }
    };
    u32::try_from(number).map_err(|_| "parallelism must be non-negative".to_owned())
}

fn timeout_of(seconds: Option<i32>, field: &str) -> Result<u32, String> {
    match seconds.map(u32::try_from) {
        None => Ok(DEFAULT_TIMEOUT),
        Some(Ok(seconds)) if seconds > 0 => Ok(seconds),
        _ => Err(format!("{field} must be at least 1")),
    }
}

/// A negative limit counts as not set, as for Kruise's daemon.
fn backoff_limit_of(limit: Option<i32>) -> u32 {
    limit.and_then(|limit| u32::try_from(limit).ok()).unwrap_or(DEFAULT_BACKOFF_LIMIT)
}

fn completion(policy: &CompletionPolicy, timeout: u32) -> Result<Completion, String> {
    let CompletionPolicy { type_, active_deadline_seconds, ttl_seconds_after_finished } = policy;
    match type_.as_deref().unwrap_or_default() {
        "" | "Always" => {
            // Equal is allowed, as in Kruise. What is not less than a timeout is positive.
            if active_deadline_seconds.is_some_and(|deadline| i64::from(timeout) > deadline) {
                let reason = "completionPolicy.activeDeadlineSeconds must be greater than pullPolicy.timeoutSeconds(default 600)";
                return Err(reason.to_owned());
            }
            let deadline =
                active_deadline_seconds.map(|deadline| Duration::from_secs(deadline.unsigned_abs()));
            let ttl = ttl_seconds_after_finished
                .map(|ttl| duration(ttl, "completionPolicy.ttlSecondsAfterFinished"))
                .transpose()?;
            Ok(Completion::Always { deadline, ttl })
        }
        "Never" if active_deadline_seconds.is_some() || ttl_seconds_after_finished.is_some() => {
            let reason = "activeDeadlineSeconds and ttlSecondsAfterFinished can only work with Always CompletionPolicyType";
            Err(reason.to_owned())
        }
        "Never" => Ok(Completion::Never),
        other => Err(format!("unknown type of completionPolicy: {other}")),
    }
}

fn duration(seconds: i32, field: &str) -> Result<Duration, String> {
    let seconds = u32::try_from(seconds).map_err(|_| format!("{field} must be non-negative"))?;
    Ok(Duration::from_secs(seconds.into()))
}

fn policy_of(text: Option<&str>, field: &str) -> Result<PullPolicy, String> {
    match text.unwrap_or_default() {
        "" | "IfNotPresent" => Ok(PullPolicy::IfNotPresent),
        "Always" => Ok(PullPolicy::Always),
        other => Err(format!("unknown {field} {other:?}: use Always or IfNotPresent")),
    }
}

/// Validates the name of a secret: it becomes a part of a URL path, so nothing else may pass.
fn check_secret_name(index: usize, name: &str) -> Result<String, String> {
    SecretRef::new("default", name)
        .map(|secret| secret.name().to_owned())
        .map_err(|error| format!("pullSecrets[{index}]: {error}"))
}
