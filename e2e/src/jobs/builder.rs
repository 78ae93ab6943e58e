//! Builder of ImagePrePullJobs.

use anyhow::Result;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use prepull_api::crd::job::{
    ImagePrePullJob, ImagePrePullJobSpec, ImagePrePullOverrider, ImagePrePullTemplate, ImageSource,
    OverrideRule, OverriderEntry, Overriders, RegistrySecret, RolloutStrategy,
};
use prepull_api::crd::status::ImagePrePullJobStatus;

use super::Job;
use crate::cluster::Cluster;

/// A job that hasn't been applied. Unset fields have the default of the API.
pub struct JobBuilder<'a> {
    cluster: &'a Cluster,
    job: ImagePrePullJob,
}

impl<'a> JobBuilder<'a> {
    pub(super) fn new(cluster: &'a Cluster, name: &str) -> Self {
        // The defaults that the API server would set, from the types of the API.
        let template: ImagePrePullTemplate = serde_json::from_str("{}").unwrap_or_default();
        let spec =
            ImagePrePullJobSpec { image_pre_pull_template: template, ..ImagePrePullJobSpec::default() };
        Self { cluster, job: ImagePrePullJob::new(name, spec) }
    }

    fn template(mut self, change: impl FnOnce(&mut ImagePrePullTemplate)) -> Self {
        change(&mut self.job.spec.image_pre_pull_template);
        self
    }

    /// Adds images by reference.
    #[must_use]
    pub fn images<S: ToString>(self, images: impl IntoIterator<Item = S>) -> Self {
        self.template(|template| template.images.extend(images.into_iter().map(|image| image.to_string())))
    }

    /// Adds an image by its parts.
    #[must_use]
    pub fn source(self, source: ImageSource) -> Self {
        self.template(|template| template.image_sources.push(source))
    }

    /// Adds nodes by name.
    #[must_use]
    pub fn on<S: ToString>(self, nodes: impl IntoIterator<Item = S>) -> Self {
        self.template(|template| template.node_names.extend(nodes.into_iter().map(|node| node.to_string())))
    }

    /// Selects the nodes with this label.
    #[must_use]
    pub fn on_label(self, key: &str, value: &str) -> Self {
        self.template(|template| {
            let selector = template.label_selector.get_or_insert_with(LabelSelector::default);
            selector.match_labels.get_or_insert_default().insert(key.to_owned(), value.to_owned());
        })
    }

    /// Sets the secret, `namespace/name`, for images without one of their own.
    #[must_use]
    pub fn secret(self, secret: &str) -> Self {
        self.template(|template| template.image_secrets = Some(secret.to_owned()))
    }

    /// Adds a secret, `namespace/name`, for images of a registry.
    #[must_use]
    pub fn registry_secret(self, registry: &str, secret: &str) -> Self {
        let entry = RegistrySecret { registry: registry.to_owned(), image_secret: secret.to_owned() };
        self.template(|template| template.registry_secrets.push(entry))
    }

    /// Sets how many nodes pull at the same time.
    #[must_use]
    pub fn concurrency(self, nodes: i64) -> Self {
        self.template(|template| template.concurrency = nodes)
    }

    /// Sets the deadline of each node in seconds.
    #[must_use]
    pub fn timeout_seconds(self, seconds: i64) -> Self {
        self.template(|template| template.timeout_seconds = seconds)
    }

    /// Sets the number of retries of each image.
    #[must_use]
    pub fn retries(self, times: i64) -> Self {
        self.template(|template| template.retry_times = times)
    }

    /// Sets the fraction of nodes that may fail, such as `"0.5"`.
    #[must_use]
    pub fn tolerate(self, ratio: &str) -> Self {
        self.template(|template| ratio.clone_into(&mut template.failure_tolerate))
    }

    /// Sets the pull policy: Always, IfNotPresent or Never.
    #[must_use]
    pub fn policy(self, policy: &str) -> Self {
        self.template(|template| template.image_pull_policy = Some(policy.to_owned()))
    }

    /// Sets the checks, instead of `disk`.
    #[must_use]
    pub fn checks(self, items: &[&str]) -> Self {
        self.template(|template| template.check_items = items.iter().map(ToString::to_string).collect())
    }

    /// Adds an overrider for nodes with a label (`region=hangzhou`). Each rule is (component, operator, value), an empty
    /// value meaning none. Rules for `SecretName` and `Namespace` are secret rules, all others are image rules.
    #[must_use]
    pub fn overrider(mut self, node_label: &str, rules: &[(&str, &str, &str)]) -> Self {
        let rule = |(component, operator, value): &(&str, &str, &str)| OverrideRule {
            component: (*component).to_owned(),
            operator: (*operator).to_owned(),
            value: (!value.is_empty()).then(|| (*value).to_owned()),
        };
        let (secret, image): (Vec<_>, Vec<_>) = rules
            .iter()
            .map(rule)
            .partition(|rule| ["SecretName", "Namespace"].contains(&rule.component.as_str()));
        let overriders = Overriders { image_overriders: image, secret_overriders: secret };
        let overrider = ImagePrePullOverrider { node_label: node_label.to_owned(), overriders };
        self.job.spec.image_pre_pull_overriders.push(OverriderEntry { image_pre_pull_overrider: overrider });
        self
    }

    /// Changes fields outside of the template: suspend, deadlines, waves.
    #[must_use]
    pub fn spec(mut self, change: impl FnOnce(&mut ImagePrePullJobSpec)) -> Self {
        change(&mut self.job.spec);
        self
    }

    /// Sets the waves of the rollout.
    #[must_use]
    pub fn waves(self, steps: &[&str], pause_seconds: i64) -> Self {
        let steps = steps.iter().map(ToString::to_string).collect();
        self.spec(|spec| spec.rollout = Some(RolloutStrategy { steps, pause_seconds }))
    }

    /// Returns the job without applying it.
    pub fn build(self) -> ImagePrePullJob {
        self.job
    }

    /// Applies the job.
    pub async fn apply(self) -> Result<Job> {
        Job::create(self.cluster, &self.job).await
    }

    /// Applies the job, and waits until it is Completed.
    pub async fn completes(self) -> Result<ImagePrePullJobStatus> {
        self.apply().await?.completes().await
    }

    /// Applies the job, and waits until it is a Failure.
    pub async fn fails(self) -> Result<ImagePrePullJobStatus> {
        self.apply().await?.fails().await
    }
}
