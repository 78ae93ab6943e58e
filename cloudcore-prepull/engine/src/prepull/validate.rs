//! The validation of a job: it becomes a [`ValidatedJob`], or a [`SpecRefusal`] that names the field and the remedy. Pure.
//!
//! The CRD's own rules cover a part of this, on API servers that know them; this step decides.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use prepull_api::crd::job::{ImagePrePullJob, ImagePrePullJobSpec, ImagePrePullTemplate, RolloutStrategy};
use prepull_api::credentials::RegistryPattern;
use prepull_api::image::{NormalizedReference, Reference};
use prepull_api::overriders::SecretRef;
use prepull_api::selector::Selector;
use prepull_api::task::{CheckItem, JobUid, NodeName, PullPolicy, Removal, Upgrade};
use prepull_api::wire::MAX_IMAGES;

mod download;
mod overriders;
mod ratio;
mod removal;
mod step;
#[cfg(test)]
mod tests;
mod upgrade;

pub use download::{DownloadPolicy, VerifyPolicy};
pub(crate) use download::{parse_rate, parse_windows};
pub use overriders::OverriderGroup;
use overriders::overrider_group;
pub(crate) use overriders::{image_rule_field, secret_rule_field};
pub use ratio::{Ratio, RatioError};
pub use step::{MAX_STEPS, WaveStep, WaveStepError};

/// The timeout of a node if the job has 0, as in KubeEdge.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);
/// The longest timeout of a node: what KubeEdge's own field can hold, so that none of its manifests is refused. We
/// don't need it to be short; a long silent node keeps its slot because the job allows it.
pub const MAX_TIMEOUT_SECONDS: i64 = u32::MAX as i64;
/// The most rounds beyond the first: each may fail within a second, and makes an event.
pub const MAX_ROUNDS: u32 = 1_000;
/// The most retries of an image: what KubeEdge's own field can hold. The node's timeout ends them long before.
pub const MAX_RETRIES: i64 = i32::MAX as i64;
/// The characters of an image's name for people that are kept: each node's record has it, and a report must stay within what
/// etcd takes. A longer one is no reason to refuse a job, which may have begun already.
const MAX_DISPLAY_NAME: usize = 253;

/// Why a job is refused: one field, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
pub struct SpecRefusal {
    /// The path of the field, such as `spec.imagePrePullTemplate.images[2]`.
    pub field: String,
    /// What is wrong with it, and the remedy.
    pub message: String,
}

/// A job that can be carried out. Everything in it has been parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValidatedJob {
    /// metadata.uid; empty for a job that the API server has not seen.
    pub uid: JobUid,
    /// metadata.name
    pub name: String,
    /// metadata.generation; 0 for a job that the API server has not seen.
    pub generation: i64,
    /// The images in the job's order, each canonical reference once; at most [`MAX_IMAGES`], and empty only for a job that
    /// removes.
    pub images: Vec<JobImage>,
    /// What the job removes, if it doesn't pull.
    pub removal: Option<Arc<Removal>>,
    /// What the agents do with the program in the only image, if the job upgrades them.
    pub upgrade: Option<Upgrade>,
    /// The nodes that the job asks for.
    pub nodes: NodeSelection,
    /// In the job's order.
    pub overriders: Vec<OverriderGroup>,
    /// In the job's order.
    pub registry_secrets: Vec<(RegistryPattern, SecretRef)>,
    /// The secret of images that have no other one.
    pub fallback_secret: Option<SecretRef>,
    /// The checks before the pulls, each once; not empty, unless the job removes.
    pub checks: Vec<CheckItem>,
    /// The share of the nodes that may fail.
    pub tolerance: Ratio,
    /// How many nodes may be in progress at the same time.
    pub concurrency: NonZeroU32,
    /// How long each node may take, from its start.
    pub timeout: Duration,
    /// How often each image is retried after the first try.
    pub retries: u32,
    /// When and in which waves nodes start, and what follows the end of the job.
    pub policy: RunPolicy,
    /// How the images are downloaded.
    pub download: DownloadPolicy,
}

/// The fields of a job that are about its course alone. All of them may change while the job runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)] // the fields of the API
pub struct RunPolicy {
    /// Whether no further node may start.
    pub suspend: bool,
    /// Whether nodes that have started may not download either.
    pub paused: bool,
    /// Whether the job ends now.
    pub cancel: bool,
    /// How long the whole job may take.
    pub active_deadline: Option<Duration>,
    /// How long after its end the job is deleted.
    pub ttl: Option<Duration>,
    /// The waves; without any all nodes may start at once.
    pub steps: Vec<WaveStep>,
    /// The pause between two waves.
    pub pause: Duration,
    /// How many further rounds there are for nodes that did not succeed.
    pub retry: u32,
    /// How many re-checks there are of the nodes that succeeded.
    pub recheck: u32,
    /// Whether nodes that become eligible join the running job.
    pub follow_nodes: bool,
    /// Whether names without a Node are skipped, and do not count as failed.
    pub allow_missing_nodes: bool,
}

/// An image of the job, before the overriders.
///
/// An image that is named twice is pulled once, where it stands first. What the first entry leaves open (name,
/// secret, policy) is taken from the later ones; where both say something, the first one counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobImage {
    /// The image as the job names it; of an `imageSources` entry, its parts put together.
    pub image: String,
    /// The name of the `imageSources` entry, if it is one and has a name.
    pub name: Option<String>,
    /// The parsed reference, before the overriders.
    pub reference: Reference,
    /// The secret of the image itself.
    pub secret: Option<SecretRef>,
    /// The image's own policy, else the template's. With neither, Kubernetes' default for the reference after the
    /// overriders.
    pub policy: Option<PullPolicy>,
}

/// The nodes that a job asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeSelection {
    /// The nodes of these names.
    Names(NodeNames),
    /// The nodes that the selector selects.
    Labels(Selector),
}

/// The names that a job lists: in its order, each once, and for look-ups. A job that follows nodes looks up each node of
/// the fleet with each re-list, and may list half of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeNames {
    listed: Vec<NodeName>,
    known: HashSet<NodeName>,
}

impl NodeNames {
    /// These names; a repeated one counts where it comes first.
    pub fn new(mut listed: Vec<NodeName>) -> Self {
        let mut known = HashSet::with_capacity(listed.len());
        listed.retain(|name| known.insert(name.clone()));
        Self { listed, known }
    }

    /// The names in the job's order.
    pub fn listed(&self) -> &[NodeName] {
        &self.listed
    }

    /// Whether the job lists this name.
    pub fn contains(&self, name: &NodeName) -> bool {
        self.known.contains(name)
    }
}

impl SpecRefusal {
    /// A mistake in this field.
    pub fn new(field: impl Into<String>, message: impl fmt::Display) -> Self {
        Self { field: field.into(), message: message.to_string() }
    }
}

/// Parses a job. The first thing that is wrong with it is the refusal.
pub fn validate(job: &ImagePrePullJob) -> Result<ValidatedJob, SpecRefusal> {
    let ImagePrePullTemplate {
        images: _,
        image_sources: _,
        // See `removal`.
        remove: _,
        // See `upgrade`.
        upgrade: _,
        registry_secrets,
        image_secrets,
        node_names: _,
        label_selector: _,
        check_items,
        failure_tolerate,
        concurrency,
        timeout_seconds,
        retry_times,
        image_pull_policy: _,
    } = &job.spec.image_pre_pull_template;
    let template = &job.spec.image_pre_pull_template;
    let removal = removal::parse_removal(&job.spec)?.map(Arc::new);
    let timeout = match bounded_number("timeoutSeconds", *timeout_seconds, MAX_TIMEOUT_SECONDS)? {
        0 => DEFAULT_TIMEOUT,
        seconds => Duration::from_secs(seconds.into()),
    };
    let upgrade = upgrade::parse_upgrade(&job.spec, timeout)?;
    Ok(ValidatedJob {
        uid: JobUid(job.metadata.uid.clone().unwrap_or_default()),
        name: job.metadata.name.clone().unwrap_or_default(),
        generation: job.metadata.generation.unwrap_or_default(),
        images: if removal.is_some() { Vec::new() } else { parse_images(template)? },
        nodes: parse_node_selection(TEMPLATE, &template.node_names, template.label_selector.as_ref())?,
        overriders: parse_each(&job.spec.image_pre_pull_overriders, overrider_group)?,
        registry_secrets: parse_each(registry_secrets, |i, entry| {
            let field = format!("{TEMPLATE}.registrySecrets[{i}]");
            let pattern = RegistryPattern::parse(&entry.registry)
                .map_err(|e| SpecRefusal::new(format!("{field}.registry"), e))?;
            let secret = SecretRef::parse(&entry.image_secret)
                .map_err(|e| SpecRefusal::new(format!("{field}.imageSecret"), e))?;
            Ok((pattern, secret))
        })?,
        fallback_secret: parse_secret(image_secrets.as_ref(), || format!("{TEMPLATE}.imageSecrets"))?,
        checks: parse_checks(check_items, removal.is_some())?,
        tolerance: Ratio::parse(failure_tolerate)
            .map_err(|e| SpecRefusal::new(format!("{TEMPLATE}.failureTolerate"), e))?,
        concurrency: concurrency_of(*concurrency)?,
        timeout,
        retries: bounded_number("retryTimes", *retry_times, MAX_RETRIES)?,
        removal,
        upgrade,
        policy: run_policy(&job.spec)?,
        download: download::download_policy(&job.spec)?,
    })
}

const TEMPLATE: &str = "spec.imagePrePullTemplate";

fn run_policy(spec: &ImagePrePullJobSpec) -> Result<RunPolicy, SpecRefusal> {
    // With all fields, so that none is forgotten here.
    let ImagePrePullJobSpec {
        image_pre_pull_template: _,
        image_pre_pull_overriders: _,
        suspend,
        pause,
        cancel,
        active_deadline_seconds,
        ttl_seconds_after_finished,
        rollout,
        retry,
        recheck,
        follow_nodes,
        allow_missing_nodes,
        // See `download`.
        download: _,
        windows: _,
        window_jitter: _,
        pin: _,
        verify: _,
    } = spec;
    let seconds = |field: &str, value: i64, least: i64| {
        u32::try_from(value)
            .ok()
            .filter(|_| value >= least)
            .map(|value| Duration::from_secs(value.into()))
            .ok_or_else(|| {
                SpecRefusal::new(
                    format!("spec.{field}"),
                    format!("{value} is not allowed: write {least} to {}", u32::MAX),
                )
            })
    };
    let RolloutStrategy { steps, pause_seconds } = rollout.clone().unwrap_or_default();
    if steps.len() > MAX_STEPS {
        let message = format!("{} steps; at most {MAX_STEPS} are allowed", steps.len());
        return Err(SpecRefusal::new("spec.rollout.steps", message));
    }
    let steps = parse_each(&steps, |i, text| {
        WaveStep::parse(text).map_err(|error| SpecRefusal::new(format!("spec.rollout.steps[{i}]"), error))
    })?;
    if let Some(at) = steps.windows(2).position(|pair| !pair[1].follows(pair[0])) {
        let message =
            format!("{} is not more than the step before, {}: steps rise", steps[at + 1], steps[at]);
        return Err(SpecRefusal::new(format!("spec.rollout.steps[{}]", at + 1), message));
    }
    let rounds = |field: &str, value: i64| {
        u32::try_from(value).ok().filter(|rounds| *rounds <= MAX_ROUNDS).ok_or_else(|| {
            SpecRefusal::new(field, format!("{value} is not allowed: write 0 to {MAX_ROUNDS}"))
        })
    };
    let (retry, recheck) = (rounds("spec.retry", *retry)?, rounds("spec.recheck", *recheck)?);
    Ok(RunPolicy {
        suspend: *suspend || *pause,
        paused: *pause,
        cancel: *cancel,
        active_deadline: active_deadline_seconds
            .map(|value| seconds("activeDeadlineSeconds", value, 1))
            .transpose()?,
        ttl: ttl_seconds_after_finished
            .map(|value| seconds("ttlSecondsAfterFinished", value, 0))
            .transpose()?,
        steps,
        pause: seconds("rollout.pauseSeconds", pause_seconds, 0)?,
        retry,
        recheck,
        follow_nodes: *follow_nodes,
        allow_missing_nodes: *allow_missing_nodes,
    })
}

fn parse_images(template: &ImagePrePullTemplate) -> Result<Vec<JobImage>, SpecRefusal> {
    let default_policy =
        parse_pull_policy(template.image_pull_policy.as_ref(), || format!("{TEMPLATE}.imagePullPolicy"))?;
    let plain = parse_each(&template.images, |i, text| {
        let reference =
            Reference::parse(text).map_err(|e| SpecRefusal::new(format!("{TEMPLATE}.images[{i}]"), e))?;
        Ok(JobImage { image: text.clone(), name: None, reference, secret: None, policy: None })
    })?;
    let sources = parse_each(&template.image_sources, |i, source| {
        let field = || format!("{TEMPLATE}.imageSources[{i}]");
        let reference = Reference::from_parts(
            non_empty(source.registry.as_ref()),
            &source.repository,
            non_empty(source.tag.as_ref()),
            non_empty(source.digest.as_ref()),
        )
        .map_err(|e| SpecRefusal::new(field(), e))?;
        Ok(JobImage {
            image: reference.to_string(),
            name: non_empty(source.name.as_ref()).map(|name| name.chars().take(MAX_DISPLAY_NAME).collect()),
            reference,
            secret: parse_secret(source.image_secret.as_ref(), || field() + ".imageSecret")?,
            policy: parse_pull_policy(source.image_pull_policy.as_ref(), || field() + ".imagePullPolicy")?,
        })
    })?;

    let mut places: HashMap<NormalizedReference, usize> = HashMap::new();
    let mut images: Vec<JobImage> = Vec::new();
    for image in plain.into_iter().chain(sources) {
        if let Some(first) = places.get(&image.reference.normalized()).and_then(|at| images.get_mut(*at)) {
            let JobImage { image: _, name, reference: _, secret, policy } = image;
            first.name = first.name.take().or(name);
            first.secret = first.secret.take().or(secret);
            first.policy = first.policy.or(policy);
        } else {
            places.insert(image.reference.normalized(), images.len());
            images.push(image);
        }
    }
    for image in &mut images {
        image.policy = image.policy.or(default_policy);
    }
    match images.len() {
        0 => Err(SpecRefusal::new(
            format!("{TEMPLATE}.images"),
            "images and imageSources are both empty: name at least one image",
        )),
        1..=MAX_IMAGES => Ok(images),
        count => Err(SpecRefusal::new(
            format!("{TEMPLATE}.images"),
            format!("{count} different images; at most {MAX_IMAGES} are allowed: split the job"),
        )),
    }
}

/// The nodes that the fields `nodeNames` and `labelSelector` of this part of an object choose.
pub(crate) fn parse_node_selection(
    part: &str,
    names: &[String],
    selector: Option<&LabelSelector>,
) -> Result<NodeSelection, SpecRefusal> {
    match (names, selector) {
        ([], None) => {
            Err(SpecRefusal::new(part, "neither nodeNames nor labelSelector is set: set exactly one of them"))
        }
        ([_, ..], Some(_)) => {
            Err(SpecRefusal::new(part, "nodeNames and labelSelector are both set: keep exactly one of them"))
        }
        (names, None) => Ok(NodeSelection::Names(NodeNames::new(parse_each(names, |i, name| {
            if name.is_empty() {
                return Err(SpecRefusal::new(format!("{part}.nodeNames[{i}]"), "the node name is empty"));
            }
            // Reports have the name of each node, and must stay within what etcd takes.
            if name.len() > NodeName::MAX {
                let message =
                    format!("{} bytes; the name of a Node has at most {}", name.len(), NodeName::MAX);
                return Err(SpecRefusal::new(format!("{part}.nodeNames[{i}]"), message));
            }
            Ok(NodeName(name.clone()))
        })?))),
        ([], Some(selector)) => Selector::try_from(selector)
            .map(NodeSelection::Labels)
            .map_err(|e| SpecRefusal::new(format!("{part}.labelSelector"), e)),
    }
}

fn parse_checks(items: &[String], removes: bool) -> Result<Vec<CheckItem>, SpecRefusal> {
    let mut checks = Vec::new();
    for (i, item) in items.iter().enumerate() {
        let check = match item.as_str() {
            "disk" => CheckItem::Disk,
            "cpu" => CheckItem::Cpu,
            "mem" => CheckItem::Mem,
            other => {
                return Err(SpecRefusal::new(
                    format!("{TEMPLATE}.checkItems[{i}]"),
                    format!("unknown check item {other:?}: use disk, cpu or mem"),
                ));
            }
        };
        if !checks.contains(&check) {
            checks.push(check);
        }
    }
    if removes {
        // A full disk is the very reason to remove images.
        checks.retain(|check| *check != CheckItem::Disk);
    } else if checks.is_empty() {
        checks.push(CheckItem::Disk); // KubeEdge's default
    }
    Ok(checks)
}

/// 0, which Go's clients write for an unset field, is the default.
fn concurrency_of(value: i64) -> Result<NonZeroU32, SpecRefusal> {
    if value < 0 {
        return Err(SpecRefusal::new(
            format!("{TEMPLATE}.concurrency"),
            format!("{value} is negative: write how many nodes pull at the same time"),
        ));
    }
    // More nodes than u32 can count do not exist: the largest u32 means all of them.
    Ok(NonZeroU32::new(u32::try_from(value).unwrap_or(u32::MAX)).unwrap_or(NonZeroU32::MIN))
}

fn bounded_number(field: &str, value: i64, max: i64) -> Result<u32, SpecRefusal> {
    u32::try_from(value).ok().filter(|_| value <= max).ok_or_else(|| {
        SpecRefusal::new(format!("{TEMPLATE}.{field}"), format!("{value} is not allowed: write 0 to {max}"))
    })
}

fn parse_pull_policy(
    text: Option<&String>,
    field: impl Fn() -> String,
) -> Result<Option<PullPolicy>, SpecRefusal> {
    match non_empty(text) {
        None => Ok(None),
        Some("Always") => Ok(Some(PullPolicy::Always)),
        Some("IfNotPresent") => Ok(Some(PullPolicy::IfNotPresent)),
        Some("Never") => Ok(Some(PullPolicy::Never)),
        Some(other) => Err(SpecRefusal::new(
            field(),
            format!("unknown pull policy {other:?}: use Always, IfNotPresent or Never"),
        )),
    }
}

fn parse_secret(text: Option<&String>, field: impl Fn() -> String) -> Result<Option<SecretRef>, SpecRefusal> {
    non_empty(text).map(SecretRef::parse).transpose().map_err(|e| SpecRefusal::new(field(), e))
}

/// An empty text is an unset field, as Go's clients write it.
fn non_empty(text: Option<&String>) -> Option<&str> {
    text.map(String::as_str).filter(|text| !text.is_empty())
}

fn parse_each<T, U>(
    items: &[T],
    mut read: impl FnMut(usize, &T) -> Result<U, SpecRefusal>,
) -> Result<Vec<U>, SpecRefusal> {
    items.iter().enumerate().map(|(index, item)| read(index, item)).collect()
}
