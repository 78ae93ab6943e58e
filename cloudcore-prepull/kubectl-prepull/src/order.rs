//! A job that is to be made: what `run` and `from` ask for. Pure.

mod course;
mod nodes;

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Context;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use prepull_api::crd::EDGE_LABEL;
use prepull_api::crd::download::{DownloadSpec, WindowSpec};
use prepull_api::crd::job::{
    ImagePrePullJob, ImagePrePullJobSpec, ImagePrePullOverrider, ImagePrePullTemplate, ImageSource,
    OverrideRule, OverriderEntry, Overriders, RegistrySecret, RolloutStrategy,
};
use prepull_api::crd::remove::RemoveSpec;
use prepull_api::crd::upgrade::UpgradeSpec;
use prepull_api::download::Deltas;
use prepull_api::image::Reference;
use prepull_api::selector::Selector;
use prepull_api::task::PullPolicy;
use serde_json::{Value, json};

use crate::window::WindowArg;
pub(crate) use course::{Concurrency, CourseArgs, PaceArgs, SecretName, parse_deltas};
pub(crate) use nodes::ChosenNodes;

/// The waves of what can't be taken back.
pub(crate) const CAREFUL_WAVES: [&str; 3] = ["1", "10%", "100%"];

/// Longest name that also fits into the label of the job's reports.
const LONGEST_NAME: usize = 63;
/// Digits of a digest that tell images apart.
const DIGEST_DIGITS: usize = 12;
/// Digits of a digest that tell jobs of the same image name apart. Two that have the same are refused, not mixed up.
const NAME_DIGITS: usize = 6;

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct JobOrder {
    pub(crate) name: String,
    pub(crate) images: Vec<String>,
    /// Those of them that are pulled also where they are present already; absent: those that a job pulls so by default.
    pub(crate) always: Option<Vec<String>>,
    /// The nodes by name; empty: those of the selector.
    pub(crate) nodes: Vec<String>,
    /// The nodes by label.
    pub(crate) selector: LabelSelector,
    /// The secret of images without another one, `namespace/name`.
    pub(crate) secret: Option<String>,
    pub(crate) registry_secrets: Vec<(String, String)>,
    /// Further secrets to try for every image that has one.
    pub(crate) more_secrets: Vec<String>,
    /// How many nodes at a time.
    pub(crate) concurrency: Concurrency,
    /// Whether no flag says it.
    pub(crate) is_any_concurrency: bool,
    /// How many nodes may have started by the end of each wave.
    pub(crate) waves: Vec<String>,
    /// Bytes a second on each node.
    pub(crate) rate: Option<String>,
    pub(crate) node_seconds: Option<i64>,
    pub(crate) retries: i64,
    pub(crate) tolerate: Option<String>,
    /// When nodes may download.
    pub(crate) windows: Vec<WindowSpec>,
    /// Seconds between two waves, of the whole job, and from its end to its deletion.
    pub(crate) pause_seconds: i64,
    pub(crate) deadline_seconds: Option<i64>,
    pub(crate) ttl_seconds: Option<i64>,
    pub(crate) share: bool,
    /// The rule for deltas; absent: that of the API.
    pub(crate) deltas: Option<Deltas>,
    /// Bytes a second over the uplink of a site.
    pub(crate) site_rate: Option<String>,
    pub(crate) follow_nodes: bool,
    /// What to remove, in place of pulling images.
    pub(crate) removal: Option<RemoveSpec>,
    /// The agents are upgraded to the version in the image.
    pub(crate) upgrade: Option<UpgradeSpec>,
}

impl JobOrder {
    /// Names the job as the flag says, or else by the base and a digest of what it does on which nodes: the same command names the
    /// same job, and another registry or other nodes another one. Settings are not in it, since they may change.
    pub(crate) fn with_name(mut self, flag: Option<&String>, base: &str) -> Self {
        self.name = flag.cloned().unwrap_or_else(|| {
            let sorted = |texts: &[String]| texts.iter().cloned().collect::<BTreeSet<_>>();
            let nodes = if self.nodes.is_empty() { json!(self.selector) } else { json!(sorted(&self.nodes)) };
            let always = self.always.as_deref().map(sorted);
            let work = json!([sorted(&self.images), always, nodes, self.removal, self.upgrade]);
            let base = sanitized(base, LONGEST_NAME - NAME_DIGITS - 1);
            format!("{base}-{}", &hex_digest(&work)[..NAME_DIGITS])
        });
        self
    }

    /// Tells orders apart, also those whose jobs have the same name.
    pub(crate) fn digest(&self) -> String {
        // The percentage, and not what it comes to at the moment.
        hex_digest(&json!([self.to_job(0).spec, format!("{:?}", self.concurrency)]))
    }

    /// Adds what the flags say. Secrets without a namespace are in this one.
    pub(crate) fn with_course(mut self, course: &CourseArgs, namespace: &str) -> Self {
        let CourseArgs { secret, registry_secret, pace, rate, max_site_rate, share, deltas, retries } =
            course;
        if let Some(secret) = secret {
            self.secret = Some(secret.in_namespace(namespace));
        }
        // What is said by hand comes first: of equals, the first counts.
        let by_hand = registry_secret
            .iter()
            .map(|login| (login.registry.clone(), login.secret.in_namespace(namespace)));
        let found = std::mem::take(&mut self.registry_secrets);
        self.registry_secrets = by_hand.collect();
        let named: Vec<_> = self.registry_secrets.iter().map(|(registry, _)| registry.clone()).collect();
        self.registry_secrets.extend(found.into_iter().filter(|(registry, _)| !named.contains(registry)));
        self.rate.clone_from(rate);
        self.share = *share;
        self.deltas = *deltas;
        self.site_rate.clone_from(max_site_rate);
        self.retries = (*retries).into();
        self.with_pace(pace)
    }

    /// In waves also without --wave: what goes wrong stops at one node.
    pub(crate) fn in_waves(mut self) -> Self {
        if self.waves.is_empty() {
            self.waves = CAREFUL_WAVES.map(str::to_owned).to_vec();
        }
        self
    }

    /// Adds what the flags of any job say.
    pub(crate) fn with_pace(mut self, pace: &PaceArgs) -> Self {
        let PaceArgs {
            concurrency,
            wave,
            pause,
            window,
            node_timeout,
            deadline,
            ttl,
            tolerate,
            follow_nodes,
        } = pace;
        let seconds = |time: Duration| i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
        self.concurrency = concurrency.unwrap_or_default();
        self.is_any_concurrency = concurrency.is_none();
        self.waves.clone_from(wave);
        self.node_seconds = node_timeout.map(seconds);
        self.pause_seconds = pause.map_or(0, seconds);
        self.deadline_seconds = deadline.map(seconds);
        self.ttl_seconds = ttl.map(seconds);
        self.windows = window.iter().map(|WindowArg(window)| window.clone()).collect();
        self.follow_nodes = *follow_nodes;
        self.tolerate.clone_from(tolerate);
        self
    }

    /// Adds the images, with a pull policy only where that of the job would be another one.
    fn add_images(&self, template: &mut ImagePrePullTemplate) {
        let by_default = |image: &str| Reference::parse(image).ok().map(|image| image.default_pull_policy());
        let wanted = |image: &String| match &self.always {
            None => by_default(image),
            Some(always) if always.contains(image) => Some(PullPolicy::Always),
            // Also for Never: such a pod needs an image that it doesn't have to pull.
            Some(_) => Some(PullPolicy::IfNotPresent),
        };
        let differs = |image: &&String| wanted(image) != by_default(image);
        let first = self.images.first().and_then(wanted);
        if self.images.iter().all(|image| wanted(image) == first) {
            let differs = self.images.iter().any(|image| differs(&image));
            template.image_pull_policy = first.filter(|_| differs).map(|policy| policy.to_string());
            template.images.clone_from(&self.images);
            return;
        }
        let (by_parts, whole): (Vec<_>, Vec<_>) = self.images.iter().partition(differs);
        template.images = whole.into_iter().cloned().collect();
        template.image_sources =
            by_parts.into_iter().filter_map(|image| source_of(image, wanted(image)?)).collect();
    }

    /// Whether [`Self::to_job`] needs to know how many nodes there are.
    pub(crate) fn needs_count(&self) -> bool {
        matches!(self.concurrency, Concurrency::Percent(_))
    }

    pub(crate) fn node_selector(&self) -> anyhow::Result<Selector> {
        let mut selector = self.selector.clone();
        let is_there = |expression: &LabelSelectorRequirement| expression.key == EDGE_LABEL;
        if !selector.match_expressions.iter().flatten().any(is_there) {
            selector.match_expressions.get_or_insert_default().push(edge_requirement());
        }
        Selector::try_from(&selector).context("the label selector")
    }

    pub(crate) fn to_job(&self, nodes: usize) -> ImagePrePullJob {
        let mut spec = ImagePrePullJobSpec::default();
        let template = &mut spec.image_pre_pull_template;
        self.add_images(template);
        template.remove.clone_from(&self.removal);
        template.upgrade.clone_from(&self.upgrade);
        if self.nodes.is_empty() {
            template.label_selector = Some(self.selector.clone());
        } else {
            template.node_names.clone_from(&self.nodes);
        }
        template.image_secrets.clone_from(&self.secret);
        let logins = self.registry_secrets.iter();
        template.registry_secrets = logins
            .map(|(registry, secret)| RegistrySecret {
                registry: registry.clone(),
                image_secret: secret.clone(),
            })
            .collect();
        template.concurrency = self.concurrency.for_nodes(nodes);
        template.retry_times = self.retries;
        if let Some(seconds) = self.node_seconds {
            template.timeout_seconds = seconds;
        }
        if let Some(tolerate) = &self.tolerate {
            template.failure_tolerate.clone_from(tolerate);
        }
        if !self.more_secrets.is_empty() {
            let add = |secret: &String| OverrideRule {
                component: "SecretName".to_owned(),
                operator: "add".to_owned(),
                value: Some(secret.clone()),
            };
            let overriders = Overriders {
                secret_overriders: self.more_secrets.iter().map(add).collect(),
                ..Overriders::default()
            };
            let overrider = ImagePrePullOverrider { node_label: EDGE_LABEL.to_owned(), overriders };
            spec.image_pre_pull_overriders.push(OverriderEntry { image_pre_pull_overrider: overrider });
        }
        if !self.waves.is_empty() {
            spec.rollout =
                Some(RolloutStrategy { steps: self.waves.clone(), pause_seconds: self.pause_seconds });
        }
        let download = DownloadSpec {
            max_rate: self.rate.clone(),
            max_site_rate: self.site_rate.clone(),
            share_within_site: self.share.then_some(true),
            deltas: self.deltas.map(|rule| rule.as_str().to_owned()),
        };
        spec.download = Some(download).filter(|download| *download != DownloadSpec::default());
        spec.windows.clone_from(&self.windows);
        spec.active_deadline_seconds = self.deadline_seconds;
        spec.ttl_seconds_after_finished = self.ttl_seconds;
        spec.follow_nodes = self.follow_nodes;
        ImagePrePullJob::new(&self.name, spec)
    }
}

/// The image by its parts, which may have a policy of its own.
fn source_of(image: &str, policy: PullPolicy) -> Option<ImageSource> {
    let image = Reference::parse(image).ok()?;
    Some(ImageSource {
        registry: image.registry().map(str::to_owned),
        repository: image.repository().to_owned(),
        tag: image.tag().map(str::to_owned),
        digest: image.digest().map(str::to_owned),
        image_pull_policy: Some(policy.to_string()),
        ..ImageSource::default()
    })
}

pub(crate) fn edge_selector() -> LabelSelector {
    LabelSelector { match_expressions: Some(vec![edge_requirement()]), match_labels: None }
}

fn edge_requirement() -> LabelSelectorRequirement {
    LabelSelectorRequirement { key: EDGE_LABEL.to_owned(), operator: "Exists".to_owned(), values: None }
}

fn hex_digest(value: &Value) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, value.to_string().as_bytes());
    prepull_api::enroll::hex(digest.as_ref())
}

/// How the name of a job for an image begins: with that of the workload, or of the image, and the tag or the beginning of the
/// digest.
pub(crate) fn name_base(workload: Option<&str>, image: &str) -> String {
    let Ok(reference) = Reference::parse(image) else { return image.to_owned() };
    let repository = reference.repository();
    let base = workload.unwrap_or_else(|| repository.rsplit('/').next().unwrap_or(repository));
    let version = match (reference.tag(), reference.digest()) {
        (Some(tag), _) => Some(tag.to_owned()),
        (None, Some(digest)) => digest.split(':').nth(1).map(|hex| hex.chars().take(DIGEST_DIGITS).collect()),
        (None, None) => None,
    };
    version.map_or_else(|| base.to_owned(), |version| format!("{base}-{version}"))
}

/// The text as a name of an object: lower-case letters, digits, `-` and `.`, with a letter or a digit at both ends.
fn sanitized(text: &str, longest: usize) -> String {
    let fits = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c.to_ascii_lowercase() } else { '-' };
    let name: String = text.chars().map(fits).take(longest).collect();
    // Between dots, too, a name begins and ends with a letter or a digit.
    let parts = name.split('.').map(|part| part.trim_matches('-')).filter(|part| !part.is_empty());
    parts.collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn image_names_become_valid_job_names() {
        for (image, name) in [
            ("nginx:1.25", "nginx-1.25"),
            ("nginx", "nginx"),
            ("harbor.example:5000/shop/web_app:V2_rc.1", "web-app-v2-rc.1"),
            (
                "r.io/app@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
                "app-0123456789ab",
            ),
            ("r.io/app:v1.-x", "app-v1.x"),
        ] {
            assert_eq!(sanitized(&name_base(None, image), LONGEST_NAME), name);
        }
        assert_eq!(name_base(Some("frontend"), "r.io/web:v2"), "frontend-v2");
        let long = name_base(None, &format!("r.io/{}:v1", "a".repeat(100)));
        assert_eq!(JobOrder::default().with_name(None, &long).name.len(), LONGEST_NAME);
    }

    #[test]
    fn a_default_name_tells_work_apart() {
        let texts = |texts: &[&str]| texts.iter().map(ToString::to_string).collect::<Vec<_>>();
        let order = || JobOrder { images: texts(&["r.io/web:v1", "nginx:1"]), ..JobOrder::default() };
        let name = |order: JobOrder| order.with_name(None, "web-v1").name;
        let first = name(order());
        assert!(first.starts_with("web-v1-") && first.len() == "web-v1-".len() + NAME_DIGITS, "{first}");
        for same in [
            JobOrder { images: texts(&["nginx:1", "r.io/web:v1"]), ..order() },
            JobOrder { rate: Some("1Mi".to_owned()), secret: Some("shop/harbor".to_owned()), ..order() },
        ] {
            assert_eq!(name(same), first);
        }
        let digests = [
            JobOrder { images: texts(&["mirror.local/web:v1", "nginx:1"]), ..order() },
            JobOrder { images: texts(&["r.io/web:v1", "nginx:2"]), ..order() },
            JobOrder { nodes: texts(&["edge-1"]), ..order() },
            JobOrder { selector: edge_selector(), ..order() },
            JobOrder { always: Some(Vec::new()), ..order() },
            JobOrder { upgrade: Some(UpgradeSpec::default()), ..order() },
            order(),
        ];
        let names: BTreeSet<_> = digests.into_iter().map(name).collect();
        assert_eq!(names.len(), 7);
        assert_eq!(order().with_name(Some(&"spring".to_owned()), "web-v1").name, "spring");
        // As the README has it.
        let minimal =
            JobOrder { images: texts(&["nginx:1.25"]), selector: edge_selector(), ..JobOrder::default() };
        let name = minimal.with_name(None, "nginx-1.25").name;
        assert!(include_str!("../../../README.md").contains(&format!("failures {name} ")), "{name}");
    }

    #[test]
    fn a_job_has_policies_where_needed() {
        let template = |images: &[&str], always: Option<&[&str]>| {
            let texts = |texts: &[&str]| texts.iter().map(ToString::to_string).collect::<Vec<_>>();
            let order = JobOrder { images: texts(images), always: always.map(texts), ..JobOrder::default() };
            order.to_job(1).spec.image_pre_pull_template
        };
        for (images, always, policy) in [
            (&["a:1", "b"][..], None, None),
            (&["a:1"], Some(&[][..]), None),
            (&["a:1", "b"], Some(&["b"]), None),
            (&["a:1"], Some(&["a:1"]), Some("Always")),
            (&["a:1", "b"], Some(&["a:1", "b"]), Some("Always")),
            (&["b:latest"], Some(&[]), Some("IfNotPresent")),
        ] {
            let template = template(images, always);
            assert_eq!(
                (template.images.as_slice(), template.image_sources.len()),
                (&images.iter().map(ToString::to_string).collect::<Vec<_>>()[..], 0)
            );
            assert_eq!(template.image_pull_policy.as_deref(), policy, "{images:?} {always:?}");
        }
        let digest = format!("sha256:{}", "a".repeat(64));
        let pinned = format!("localhost:5000/team/c:1@{digest}");
        let mixed =
            template(&["a:stable", "b:latest", "d:1", "e", &pinned], Some(&["a:stable", "e", &pinned]));
        assert_eq!((mixed.images, mixed.image_pull_policy), (vec!["d:1".to_owned(), "e".to_owned()], None));
        let sources = mixed.image_sources.iter().map(|source| {
            let text = |text: &Option<String>| text.clone().unwrap_or_default();
            let policy = text(&source.image_pull_policy);
            (
                text(&source.registry),
                source.repository.clone(),
                text(&source.tag),
                text(&source.digest),
                policy,
            )
        });
        let source = |registry: &str, repository: &str, tag: &str, digest: &str, policy: &str| {
            let [registry, repository, tag, digest, policy] =
                [registry, repository, tag, digest, policy].map(str::to_owned);
            (registry, repository, tag, digest, policy)
        };
        assert_eq!(
            sources.collect::<Vec<_>>(),
            [
                source("", "a", "stable", "", "Always"),
                source("", "b", "latest", "", "IfNotPresent"),
                source("localhost:5000", "team/c", "1", &digest, "Always"),
            ]
        );
    }
}
