//! The plan of a job: what the controller would do with it, and why it skips nodes. It's the command `plan` of
//! cloudcore-prepull and of the plugin.
//!
//! ```text
//! files or cluster ─▶ manifests, cluster ─▶ validate ─▶ plan ─▶ resolve_key ─▶ Report ─▶ table, json, yaml
//!                                                                    └─▶ sizes ──┘  (registries; with --sizes)
//! ```
//! Validation, planning and the choice of keys are the controller's own code.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, ensure};
use kube::Client;
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::credentials::{RegistryPattern, SecretUser};
use prepull_api::overriders::SecretRef;
use prepull_api::task::{NodeName, PullPolicy};
use prepull_api::wire::PullKey;
use prepull_engine::fleet::node_view::NodeView;
use prepull_engine::prepull::plan::{
    JobPlan, NodePlan, PlannedImage, ResolvedKey, SecretLookup, is_missing, plan_job, resolve_key,
    select_nodes, self_assigned_labels,
};
use prepull_engine::prepull::validate::{ValidatedJob, validate};
use serde::Serialize;

mod args;
mod cluster;
mod definition;
mod download;
mod manifests;
mod nodes;
mod removal;
mod sites;
mod sizes;
mod table;
#[cfg(test)]
mod tests;

pub use args::{ConsentArgs, SiteArgs};
pub use cluster::list_nodes;
use download::DownloadReport;
pub use manifests::read_job;
pub use nodes::ListedNode;
use nodes::{Receiver, receivers};
use removal::RemovalReport;
use sites::SiteReport;
pub use sizes::SizeArgs;
use sizes::{ImageSize, NodeSize, Sizes};

/// Show which images a job would pull on each node, without running it
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cloudcore-prepull plan --job job.yaml --nodes nodes.yaml
  kubectl get nodes -o yaml > nodes.yaml && cloudcore-prepull plan --job job.yaml --nodes nodes.yaml -o json
  cloudcore-prepull plan --job job.yaml                     # with the cluster's nodes and secrets
  cloudcore-prepull plan --job job.yaml --sizes             # and what each node and each site would download

--sizes asks the registries that the job names, with the credentials that the nodes would get, from this machine.

Exit status: 0 the job is valid and, where secrets are known, each image has credentials; 1 it is refused, an image has
none, or the command failed (reason on stderr); 2 wrong usage. A size that is not known changes nothing of it: what this
machine cannot reach, a node may.")]
pub struct PlanArgs {
    /// YAML or JSON file with one ImagePrePullJob; objects of other kinds are ignored
    #[arg(long, value_name = "FILE")]
    pub job: PathBuf,
    /// YAML or JSON file with Nodes, such as `kubectl get nodes -o yaml` prints [default: the cluster's nodes]
    #[arg(long, value_name = "FILE", env = "PREPULL_NODES")]
    pub nodes: Option<PathBuf>,
    /// YAML or JSON file with Secrets, to check that each image has credentials; they are never shown [default: the
    /// cluster's Secrets, or no check with --nodes]
    #[arg(long, value_name = "FILE", env = "PREPULL_SECRETS")]
    pub secrets: Option<PathBuf>,
    /// The flag of the consent.
    #[command(flatten)]
    pub consent: ConsentArgs,
    /// The flags of the sizes.
    #[command(flatten)]
    pub sizes: SizeArgs,
    /// The flags of sites, as cloudcore-prepull has them.
    #[command(flatten)]
    pub sites: SiteArgs,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    pub output: PlanFormat,
    /// Kubeconfig file [default: $KUBECONFIG, ~/.kube/config, or the ServiceAccount of the pod]
    #[arg(long, value_name = "FILE", env = "PREPULL_KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,
}

/// The output format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum PlanFormat {
    /// A table for people
    #[default]
    Table,
    /// One JSON object
    Json,
    /// The same object in YAML
    Yaml,
}

/// The plan as it is printed, without credentials.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanReport {
    nodes: Vec<NodeReport>,
    /// What the nodes remove, if the job doesn't pull.
    #[serde(skip_serializing_if = "Option::is_none")]
    remove: Option<RemovalReport>,
    /// Empty if no node has a site.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    sites: Vec<SiteReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    download: Option<DownloadReport>,
    skipped: Vec<SkippedReport>,
    /// Fields of the job that have no effect on these nodes.
    warnings: Vec<String>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeReport {
    name: String,
    images: Vec<ImageReport>,
    /// With `--sizes`: what all images take together.
    #[serde(skip_serializing_if = "Option::is_none")]
    size: Option<NodeSize>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct ImageReport {
    /// The image as the job names it.
    image: String,
    /// The normalized reference that is pulled.
    pull: String,
    /// The secrets, in the order in which they are tried.
    secrets: Vec<String>,
    pull_policy: PullPolicy,
    /// Why the image has no credentials; absent as well if they were not checked.
    error: Option<String>,
    /// With `--sizes`: what the image takes on a node that has nothing of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    size: Option<ImageSize>,
    /// With `--sizes`: why that is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    size_error: Option<String>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
struct SkippedReport {
    name: String,
    reason: String,
}

type SecretLookups = BTreeMap<SecretRef, SecretLookup>;

/// A job, and how cloudcore-prepull would look at it.
pub struct PlanRequest<'a> {
    /// The job.
    pub job: &'a ImagePrePullJob,
    /// Whether secrets need their owners' consent.
    pub consent: ConsentArgs,
    /// Whether and how sizes are asked for.
    pub sizes: &'a SizeArgs,
    /// How nodes are grouped into sites.
    pub sites: &'a SiteArgs,
}

/// Where the secrets of the images are read.
pub enum SecretSource<'a> {
    /// Nowhere: no credentials are checked.
    None,
    /// In a file.
    File(&'a Path),
    /// In the cluster, with the rights of cloudcore-prepull.
    Cluster(&'a Client),
    /// In the cluster, with the rights of a person: nothing is said of the credentials in those that they may not read.
    Person(&'a Client),
}

/// What is known of the secrets.
struct KnownSecrets<'a> {
    secrets: &'a SecretLookups,
    /// Those that the person may not read.
    unread: &'a BTreeSet<SecretRef>,
    /// Needs the consent of their owners.
    user: Option<SecretUser<'a>>,
}

impl KnownSecrets<'_> {
    /// Whether all of these were read.
    fn has_read(&self, secrets: &[SecretRef]) -> bool {
        !secrets.iter().any(|secret| self.unread.contains(secret))
    }

    fn lookup(&self, secret: &SecretRef) -> SecretLookup {
        self.secrets.get(secret).cloned().unwrap_or(SecretLookup::Missing)
    }
}

/// An image with what its secrets have for it; `None` where they are not known.
struct Keyed<'a> {
    planned: &'a PlannedImage,
    resolved: Option<ResolvedKey>,
}

/// The images of each plan. Many nodes share a plan, so we choose its keys once.
struct KeyedPlans<'a>(BTreeMap<*const NodePlan, Vec<Keyed<'a>>>);

impl<'a> KeyedPlans<'a> {
    fn new(plan: &'a JobPlan, known: Option<&KnownSecrets<'_>>) -> Self {
        let mut plans = BTreeMap::new();
        for (_, node) in &plan.nodes {
            plans
                .entry(Arc::as_ptr(node))
                .or_insert_with(|| node.images.iter().map(|planned| Keyed::new(planned, known)).collect());
        }
        Self(plans)
    }

    fn images_of(&self, node: &Arc<NodePlan>) -> &[Keyed<'a>] {
        self.0.get(&Arc::as_ptr(node)).map_or(&[], Vec::as_slice)
    }
}

/// Runs the command of cloudcore-prepull. A refused job is an error; so is, after the plan, an image without usable
/// credentials. `connect`: makes a client of the kubeconfig.
pub async fn run(
    args: &PlanArgs,
    connect: impl AsyncFnOnce(Option<&Path>) -> anyhow::Result<Client>,
    stdout: &mut (impl Write + Send),
) -> anyhow::Result<()> {
    let PlanArgs { job, nodes, secrets, consent, sizes, sites, output, kubeconfig } = args;
    let job = read_job(job)?;
    let request = PlanRequest { job: &job, consent: *consent, sizes, sites };
    request.validate()?;
    let client = match nodes {
        Some(_) => None,
        None => Some(connect(kubeconfig.as_deref()).await?),
    };
    let source = match (secrets, &client) {
        (Some(file), _) => SecretSource::File(file),
        (None, Some(client)) => SecretSource::Cluster(client),
        (None, None) => SecretSource::None,
    };
    let nodes = match (nodes, &client) {
        (Some(file), _) => manifests::read_nodes(file)?,
        (None, Some(client)) => list_nodes(client).await?,
        (None, None) => Vec::new(), // impossible: without a file there is a client
    };
    let report = request.plan(nodes, source).await?;
    print_report(&report, *output, stdout).context("writing the plan to stdout")?;
    report.check_credentials()
}

impl PlanRequest<'_> {
    fn validate(&self) -> anyhow::Result<ValidatedJob> {
        validate(self.job).map_err(|refusal| anyhow::anyhow!("the job is refused: {refusal}"))
    }

    /// Plans the job for these nodes. A refused job is an error.
    pub async fn plan(&self, nodes: Vec<ListedNode>, source: SecretSource<'_>) -> anyhow::Result<PlanReport> {
        let (job, sites) = (self.validate()?, self.sites.settings());
        let named = |ListedNode { view, images }: ListedNode| {
            ((view.name.clone(), images), (view.name.clone(), view))
        };
        let (images, nodes): (BTreeMap<_, _>, BTreeMap<NodeName, NodeView>) =
            nodes.into_iter().map(named).unzip();
        let (plan, waits) = plan_or_wait(&job, &nodes)?;
        let names = secret_names(&job, &plan);
        let (secrets, unread) = match source {
            SecretSource::None => (None, BTreeSet::new()),
            SecretSource::File(file) => (Some(manifests::read_secrets(file)?), BTreeSet::new()),
            SecretSource::Cluster(client) => {
                (Some(cluster::read_secrets(client, names).await), BTreeSet::new())
            }
            SecretSource::Person(client) => {
                let mut secrets = cluster::read_secrets(client, names).await;
                let forbidden =
                    secrets.extract_if(.., |_, found| matches!(found, SecretLookup::Forbidden(_)));
                let unread = forbidden.map(|(name, _)| name).collect();
                (Some(secrets), unread)
            }
        };
        let user = self.consent.require_secret_consent.then_some(SecretUser::Job(&job.name));
        let known = secrets.as_ref().map(|secrets| KnownSecrets { secrets, unread: &unread, user });
        let mut warnings = match waits {
            Some(warning) => vec![warning],
            None => find_warnings(&job, &nodes, &plan),
        };
        warnings.extend(sites::warning(&job.download, &sites, &plan, &nodes));
        warnings.extend(unread.iter().map(|secret| {
            format!(
                "you lack the right to read secret {secret}: whether it has the credentials was not checked"
            )
        }));
        let keyed = KeyedPlans::new(&plan, known.as_ref());
        let receivers = self.sizes.sizes.then(|| receivers(&plan, &nodes, &images));
        let sizes = match &receivers {
            Some(receivers) => {
                let each = plan.nodes.iter().zip(receivers);
                // Nodes that share plan, platform and earlier images ask the same.
                let distinct: BTreeMap<_, _> = each
                    .map(|((_, node), receiver)| {
                        ((Arc::as_ptr(node), receiver), (keyed.images_of(node), receiver))
                    })
                    .collect();
                Some(Sizes::ask_registries(self.sizes, job.download.deltas, distinct.into_values()).await)
            }
            None => None,
        };
        let sizes = sizes.as_ref().zip(receivers.as_deref());
        let sites = sites::report(&job.download, &sites, &plan, &nodes, &keyed, sizes);
        let nodes = build_nodes(&plan, &keyed, sizes);
        let remove = job.removal.as_deref().map(removal::report);
        let download = download::report(&job.download, known.as_ref());
        let skipped = plan.skipped.iter();
        let skipped = skipped
            .map(|node| SkippedReport { name: node.node_name.clone(), reason: node.reason.clone() })
            .collect();
        Ok(PlanReport { nodes, remove, sites, download, skipped, warnings })
    }
}

impl PlanReport {
    /// The plan as a table for people.
    pub fn to_table(&self) -> String {
        table::render(self)
    }

    /// The names of the nodes that would pull.
    pub fn node_names(&self) -> impl Iterator<Item = &str> {
        self.nodes.iter().map(|node| node.name.as_str())
    }

    /// Fails if an image has no usable credentials, or if the keys for signatures are of no use.
    pub fn check_credentials(&self) -> anyhow::Result<()> {
        let images = self.nodes.iter().flat_map(|node| &node.images);
        let without: BTreeSet<&str> =
            images.filter(|image| image.error.is_some()).map(|image| image.image.as_str()).collect();
        ensure!(without.is_empty(), "no usable credentials for {}", Vec::from_iter(without).join(", "));
        let verify = self.download.as_ref().and_then(|download| download.verify.as_ref());
        let unusable = verify.and_then(|verify| verify.error.as_ref());
        ensure!(unusable.is_none(), "no usable keys in spec.verify: {}", unusable.map_or("", String::as_str));
        Ok(())
    }
}

/// The plan, or that of a job that waits, which has no nodes, and a warning of that. The warnings about fields without effect
/// say nothing where there is no node.
fn plan_or_wait(
    job: &ValidatedJob,
    nodes: &BTreeMap<NodeName, NodeView>,
) -> anyhow::Result<(JobPlan, Option<String>)> {
    let refusal = match plan_job(job, nodes) {
        Ok(plan) => return Ok((plan, None)),
        Err(refusal) => refusal,
    };
    let selection = select_nodes(job, nodes);
    ensure!(selection.waits_for_ready(), "the job is refused: {refusal}");
    let warning = format!("the job waits for a Ready node: {}", refusal.message);
    Ok((JobPlan { nodes: Vec::new(), skipped: selection.skipped }, Some(warning)))
}

/// Overriders that match none of the nodes, registry secrets that match none of the images, and names without a Node:
/// perhaps misspelt.
fn find_warnings(job: &ValidatedJob, nodes: &BTreeMap<NodeName, NodeView>, plan: &JobPlan) -> Vec<String> {
    let chosen: Vec<&NodeView> = plan.nodes.iter().filter_map(|(name, _)| nodes.get(name)).collect();
    let mut warnings = Vec::new();
    for (index, group) in job.overriders.iter().enumerate() {
        if !chosen.iter().any(|node| group.selector.matches(&node.labels)) {
            warnings.push(format!(
                "spec.imagePrePullOverriders[{index}] applies to no node: none of the {} has {:?}",
                chosen.len(),
                group.label_text
            ));
        }
    }
    let images: BTreeSet<_> = plan.nodes.iter().flat_map(|(_, node)| &node.images).map(|i| &i.pull).collect();
    for (index, (pattern, _)) in job.registry_secrets.iter().enumerate() {
        let alone = std::slice::from_ref(pattern);
        if images.iter().all(|image| RegistryPattern::select(alone, |pattern| pattern, image).is_empty()) {
            warnings.push(format!(
                "spec.imagePrePullTemplate.registrySecrets[{index}] serves no image: none is at {pattern}"
            ));
        }
    }
    warnings.extend(
        self_assigned_labels(job)
            .map(|warning| warning.strip_prefix("warning: ").unwrap_or(&warning).to_owned()),
    );
    let missing = plan.skipped.iter().filter(|node| !job.policy.allow_missing_nodes && is_missing(node));
    let missing: Vec<_> = missing.map(|node| node.node_name.as_str()).collect();
    if let Some(first) = missing.first() {
        warnings.push(format!(
            "spec.imagePrePullTemplate.nodeNames: {} names have no Node and would count as failed, such as {first}: \
             correct them, or set spec.allowMissingNodes",
            missing.len()
        ));
    }
    warnings
}

fn secret_names(job: &ValidatedJob, plan: &JobPlan) -> BTreeSet<SecretRef> {
    let images = plan.nodes.iter().flat_map(|(_, node)| &node.images);
    let keys = job.download.verify.iter().flat_map(|verify| verify.keys.iter().cloned());
    images.flat_map(|image| image.secrets.iter().cloned()).chain(keys).collect()
}

/// `sizes`: with the receiver of each node.
fn build_nodes(
    plan: &JobPlan,
    keyed: &KeyedPlans<'_>,
    sizes: Option<(&Sizes, &[Receiver])>,
) -> Vec<NodeReport> {
    // Many nodes share plan, platform and earlier images.
    let mut built: BTreeMap<_, (Vec<ImageReport>, Option<NodeSize>)> = BTreeMap::new();
    let node = |(index, (name, node)): (usize, &(NodeName, Arc<NodePlan>))| {
        let sizes = sizes.and_then(|(sizes, receivers)| Some((sizes, receivers.get(index)?)));
        let key = (Arc::as_ptr(node), sizes.map(|(_, receiver)| receiver));
        let (images, size) = built.entry(key).or_insert_with(|| {
            let images = keyed.images_of(node);
            let size = sizes.map(|(sizes, receiver)| sizes.of_node(images, receiver));
            (images.iter().map(|image| build_image(image, sizes)).collect(), size)
        });
        NodeReport { name: name.0.clone(), images: images.clone(), size: *size }
    };
    plan.nodes.iter().enumerate().map(node).collect()
}

impl<'a> Keyed<'a> {
    fn new(planned: &'a PlannedImage, known: Option<&KnownSecrets<'_>>) -> Self {
        let known = known.filter(|known| known.has_read(&planned.secrets));
        let resolved = known.map(|known| {
            resolve_key(&planned.secrets, &planned.pull, known.user, |secret| known.lookup(secret))
        });
        Self { planned, resolved }
    }

    /// Why it has no credentials, in detail: the user who runs this can read the secrets.
    fn error(&self) -> Option<String> {
        let resolved = self.resolved.as_ref()?;
        matches!(resolved.key, PullKey::Unavailable { .. }).then(|| resolved.details.join("; "))
    }
}

fn build_image(keyed: &Keyed<'_>, sizes: Option<(&Sizes, &Receiver)>) -> ImageReport {
    let PlannedImage { image, name: _, pull, policy, secrets } = keyed.planned;
    let error = keyed.error();
    let size = sizes.map(|(sizes, receiver)| sizes.of_image(keyed, receiver)).transpose();
    let (size, size_error) = match size {
        Ok(size) => (size, None),
        // Without credentials, which is said already.
        Err(_) if error.is_some() => (None, None),
        Err(reason) => (None, Some(reason)),
    };
    ImageReport {
        image: image.clone(),
        pull: pull.to_string(),
        secrets: secrets.iter().map(SecretRef::to_string).collect(),
        pull_policy: *policy,
        error,
        size,
        size_error,
    }
}

fn print_report(report: &PlanReport, output: PlanFormat, stdout: &mut impl Write) -> anyhow::Result<()> {
    let text = match output {
        PlanFormat::Table => table::render(report),
        PlanFormat::Json => serde_json::to_string_pretty(report)? + "\n",
        PlanFormat::Yaml => serde_saphyr::to_string(report)?,
    };
    stdout.write_all(text.as_bytes())?;
    stdout.flush()?;
    Ok(())
}
