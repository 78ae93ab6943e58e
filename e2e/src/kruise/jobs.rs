//! ImagePullJobs and ImageListPullJobs of a test.

use anyhow::{Context, Result};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::Resource;
use kube::api::{Api, ListParams, PostParams};
use prepull_api::crd::kruise::{
    ImageListPullJob, ImageListPullJobSpec, ImageListPullJobStatus, ImagePullJob, ImagePullJobSpec,
    ImagePullJobStatus, PullJobTemplate,
};

use super::object::{KruiseObject, KruiseResource};
use crate::cluster::{Cluster, documents};

/// An ImagePullJob.
pub type KruisePullJob = KruiseObject<ImagePullJob>;
/// An ImageListPullJob.
pub type KruiseListJob = KruiseObject<ImageListPullJob>;

/// The common parts of ImagePullJob and ImageListPullJob.
pub trait PullJobKind: KruiseResource + Resource<Scope = NamespaceResourceScope> {
    /// Status of the kind.
    type Status;
    /// Fields of the spec that both kinds have.
    fn template(&mut self) -> &mut PullJobTemplate;
    /// The status, if the job has ended.
    fn ended(&self) -> Option<Self::Status>;
    /// Message of the status.
    fn message(&self) -> &str;
}

impl PullJobKind for ImagePullJob {
    type Status = ImagePullJobStatus;

    fn template(&mut self) -> &mut PullJobTemplate {
        &mut self.spec.template
    }

    fn ended(&self) -> Option<ImagePullJobStatus> {
        self.status.clone().filter(|status| status.completion_time.is_some())
    }

    fn message(&self) -> &str {
        self.status.as_ref().map_or("", |status| &status.message)
    }
}

impl PullJobKind for ImageListPullJob {
    type Status = ImageListPullJobStatus;

    fn template(&mut self) -> &mut PullJobTemplate {
        &mut self.spec.template
    }

    fn ended(&self) -> Option<ImageListPullJobStatus> {
        self.status.clone().filter(|status| status.completion_time.is_some())
    }

    fn message(&self) -> &str {
        self.status.as_ref().map_or("", |status| &status.message)
    }
}

impl Cluster {
    /// Builds an ImagePullJob, which [`Builder::apply`] applies.
    pub fn pull_job(&self, name: &str, image: &str) -> Builder<'_, ImagePullJob> {
        let spec = ImagePullJobSpec { image: image.to_owned(), ..ImagePullJobSpec::default() };
        Builder { cluster: self, namespace: "default".to_owned(), job: ImagePullJob::new(name, spec) }
    }

    /// Builds an ImageListPullJob, which [`Builder::apply`] applies.
    pub fn list_job<S: ToString>(
        &self,
        name: &str,
        images: impl IntoIterator<Item = S>,
    ) -> Builder<'_, ImageListPullJob> {
        let images = images.into_iter().map(|image| image.to_string()).collect();
        let spec = ImageListPullJobSpec { images, ..ImageListPullJobSpec::default() };
        Builder { cluster: self, namespace: "default".to_owned(), job: ImageListPullJob::new(name, spec) }
    }

    /// A job that something else applies.
    pub fn applied_job<K: PullJobKind>(&self, namespace: &str, name: &str) -> KruiseObject<K> {
        KruiseObject::new(self, Api::namespaced(self.client(), namespace), name)
    }

    /// Applies YAML that contains a job of this kind.
    pub async fn apply_yaml<K: PullJobKind>(&self, yaml: &str) -> Result<KruiseObject<K>> {
        let objects = documents(yaml)?;
        let job = objects.iter().find(|object| object["kind"] == *K::kind(&()));
        let metadata = job.map(|job| &job["metadata"]).context("the YAML has no such job")?;
        let name = metadata["name"].as_str().context("the job has no name")?;
        let namespace = metadata["namespace"].as_str().unwrap_or("default");
        self.apply(yaml).await?;
        Ok(self.applied_job(namespace, name))
    }
}

/// A job that hasn't been applied. Unset fields have the default of the API.
pub struct Builder<'a, K> {
    cluster: &'a Cluster,
    namespace: String,
    job: K,
}

impl<K: PullJobKind> Builder<'_, K> {
    /// Sets the namespace instead of `default`; creates it if it does not exist.
    #[must_use]
    pub fn in_namespace(mut self, namespace: &str) -> Self {
        namespace.clone_into(&mut self.namespace);
        self
    }

    /// Selects nodes by name.
    #[must_use]
    pub fn on_nodes<S: ToString>(self, nodes: impl IntoIterator<Item = S>) -> Self {
        let names = nodes.into_iter().map(|node| node.to_string()).collect();
        self.change_template(|template| template.selector.get_or_insert_default().names = Some(names))
    }

    /// Selects the nodes that run pods with this label.
    #[must_use]
    pub fn where_pods_are(self, key: &str, value: &str) -> Self {
        self.change_template(|template| {
            let labels = template.pod_selector.get_or_insert_default().match_labels.get_or_insert_default();
            labels.insert(key.to_owned(), value.to_owned());
        })
    }

    /// Sets how many nodes pull at the same time.
    #[must_use]
    pub fn parallelism(self, nodes: i32) -> Self {
        self.change_template(|template| template.parallelism = Some(IntOrString::Int(nodes)))
    }

    /// Sets the seconds for one try, and the number of retries.
    #[must_use]
    pub fn limits(self, timeout_seconds: i32, backoff_limit: i32) -> Self {
        self.change_template(|template| {
            let limits = template.pull_policy.get_or_insert_default();
            (limits.timeout_seconds, limits.backoff_limit) = (Some(timeout_seconds), Some(backoff_limit));
        })
    }

    /// Sets the pull secrets, in the job's namespace.
    #[must_use]
    pub fn secrets(self, names: &[&str]) -> Self {
        self.change_template(|template| {
            template.pull_secrets = names.iter().map(ToString::to_string).collect();
        })
    }

    /// Sets the pull policy: Always or IfNotPresent.
    #[must_use]
    pub fn policy(self, policy: &str) -> Self {
        self.change_template(|template| template.image_pull_policy = Some(policy.to_owned()))
    }

    /// Sets the time to live in seconds after its end.
    #[must_use]
    pub fn ttl(self, seconds: i32) -> Self {
        self.change_template(|template| template.completion_policy.ttl_seconds_after_finished = Some(seconds))
    }

    /// Sets the deadline of the whole job in seconds.
    #[must_use]
    pub fn deadline(self, seconds: i64) -> Self {
        self.change_template(|template| template.completion_policy.active_deadline_seconds = Some(seconds))
    }

    /// Makes it a job that never ends.
    #[must_use]
    pub fn never_ends(self) -> Self {
        self.change_template(|template| template.completion_policy.type_ = Some("Never".to_owned()))
    }

    /// Changes any other field.
    #[must_use]
    pub fn change_template(mut self, change: impl FnOnce(&mut PullJobTemplate)) -> Self {
        change(self.job.template());
        self
    }

    /// Applies the job.
    pub async fn apply(self) -> Result<KruiseObject<K>> {
        let Self { cluster, namespace, job } = self;
        if namespace != "default" {
            cluster.namespace(&namespace).await?;
        }
        let object = cluster.applied_job(&namespace, job.meta().name.as_deref().unwrap_or_default());
        let created = object.api.create(&PostParams::default(), &job).await;
        created.with_context(|| format!("cannot create {}", object.title()))?;
        Ok(object)
    }

    /// Applies the job, and waits until it has ended.
    pub async fn completes(self) -> Result<K::Status> {
        self.apply().await?.completes().await
    }
}

impl<K: PullJobKind> KruiseObject<K> {
    /// Waits until the job has ended.
    pub async fn completes(&self) -> Result<K::Status> {
        self.until_some("is over", PullJobKind::ended).await
    }

    /// Waits until the message contains these words, and returns it.
    pub async fn message_contains(&self, words: &str) -> Result<String> {
        let found = |job: &K| job.message().contains(words).then(|| job.message().to_owned());
        self.until_some(&format!("says {words}"), found).await
    }
}

impl KruisePullJob {
    /// Reads the current status, which is the default one if the job has none yet.
    pub async fn status(&self) -> Result<ImagePullJobStatus> {
        Ok(self.get().await?.status.unwrap_or_default())
    }
}

impl KruiseListJob {
    /// Reads the ImagePullJobs that the list owns, sorted by image.
    pub async fn children(&self) -> Result<Vec<ImagePullJob>> {
        let (list, client) = (self.get().await?, self.api.clone().into_client());
        let namespace = list.metadata.namespace.as_deref().unwrap_or("default");
        let jobs: Api<ImagePullJob> = Api::namespaced(client, namespace);
        let mut children = jobs.list(&ListParams::default()).await?.items;
        children.retain(|job| {
            let owners = job.metadata.owner_references.iter().flatten();
            owners.map(|owner| &owner.uid).any(|uid| Some(uid) == list.metadata.uid.as_ref())
        });
        children.sort_by(|a, b| a.spec.image.cmp(&b.spec.image));
        Ok(children)
    }
}
