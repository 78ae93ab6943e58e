//! The command `cloudcore-prepull plan`: what the controller would do with a job, and why it skips nodes.
//!
//! ```text
//! files or cluster ─▶ manifests, cluster ─▶ validate ─▶ plan ─▶ resolve_key ─▶ Report ─▶ table, json, yaml
//!                                                                    └─▶ sizes ──┘  (registries; with --sizes)
//! ```
//! Validation, planning and the choice of keys are the controller's own code.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, ensure};
use prepull_api::credentials::{RegistryPattern, SecretUser};
use prepull_api::overriders::SecretRef;
use prepull_api::task::{NodeName, PullPolicy};
use prepull_api::wire::Key;
use prepull_engine::prepull::plan::{
    NodePlan, Plan, PlannedImage, Resolved, SecretLookup, is_missing, plan, resolve_key, self_assigned_labels,
};
use prepull_engine::prepull::validate::{ValidatedJob, validate};
use prepull_engine::shared::node_view::NodeView;
use prepull_registry::manifest::Platform;
use serde::Serialize;

use crate::commands::shared_args::{ConsentArgs, SiteArgs};

mod cluster;
mod definition;
mod download;
mod manifests;
mod sites;
mod sizes;
mod table;
#[cfg(test)]
mod tests;

use download::DownloadReport;
use sites::SiteReport;
pub use sizes::SizeArgs;
use sizes::{ImageSize, NodeSize, Sizes, platform_of};

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
    pub output: Output,
    /// Kubeconfig file [default: $KUBECONFIG, ~/.kube/config, or the ServiceAccount of the pod]
    #[arg(long, value_name = "FILE", env = "PREPULL_KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,
}

/// The output format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Output {
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
struct Report {
    nodes: Vec<NodeReport>,
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

type Secrets = BTreeMap<SecretRef, SecretLookup>;

/// An image with what its secrets have for it; `None` where they are not known.
struct Keyed<'a> {
    planned: &'a PlannedImage,
    resolved: Option<Resolved>,
}

/// The images of each plan. Many nodes share a plan, so we choose its keys once.
struct KeyedPlans<'a>(BTreeMap<*const NodePlan, Vec<Keyed<'a>>>);

impl<'a> KeyedPlans<'a> {
    fn new(plan: &'a Plan, secrets: Option<&Secrets>, user: Option<SecretUser<'_>>) -> Self {
        let mut plans = BTreeMap::new();
        for (_, node) in &plan.nodes {
            plans.entry(Arc::as_ptr(node)).or_insert_with(|| {
                node.images.iter().map(|planned| Keyed::new(planned, secrets, user)).collect()
            });
        }
        Self(plans)
    }

    fn of(&self, node: &Arc<NodePlan>) -> &[Keyed<'a>] {
        self.0.get(&Arc::as_ptr(node)).map_or(&[], Vec::as_slice)
    }
}

/// Runs the command. A refused job is an error; so is, after the plan, an image without usable credentials.
pub async fn run(args: &PlanArgs, stdout: &mut (impl Write + Send)) -> anyhow::Result<()> {
    let PlanArgs { job, nodes, secrets, consent, sizes, sites, output, kubeconfig } = args;
    let sites = sites.settings();
    let job = manifests::read_job(job)?;
    let job = validate(&job).map_err(|refusal| anyhow::anyhow!("the job is refused: {refusal}"))?;

    let given_secrets = secrets.as_deref().map(manifests::read_secrets).transpose()?;
    let cluster = match nodes {
        Some(_) => None,
        None => Some(crate::kube_api::cluster::client(kubeconfig.as_deref()).await?),
    };
    let nodes: Vec<NodeView> = match (nodes, &cluster) {
        (Some(file), _) => manifests::read_nodes(file)?,
        (None, Some(client)) => cluster::list_nodes(client).await?,
        (None, None) => Vec::new(), // impossible: without a file there is a client
    };
    let nodes: BTreeMap<NodeName, NodeView> =
        nodes.into_iter().map(|node| (node.name.clone(), node)).collect();

    let plan = plan(&job, &nodes).map_err(|refusal| anyhow::anyhow!("the job is refused: {refusal}"))?;
    let secrets = match (given_secrets, &cluster) {
        (Some(secrets), _) => Some(secrets),
        (None, Some(client)) => Some(cluster::read_secrets(client, secret_names(&job, &plan)).await),
        (None, None) => None,
    };
    let user = consent.require_secret_consent.then_some(SecretUser::Job(&job.name));
    let mut warnings = find_warnings(&job, &nodes, &plan);
    warnings.extend(sites::warning(&job.download, &sites, &plan, &nodes));
    let keyed = KeyedPlans::new(&plan, secrets.as_ref(), user);
    let platforms = sizes.sizes.then(|| platforms(&plan, &nodes));
    let sizes = match &platforms {
        Some(platforms) => {
            let each = plan.nodes.iter().zip(platforms);
            // Nodes that share plan and platform ask the same.
            let distinct: BTreeMap<_, _> = each
                .map(|((_, node), platform)| {
                    ((Arc::as_ptr(node), platform), (keyed.of(node), platform.clone()))
                })
                .collect();
            Some(Sizes::ask(sizes, distinct.into_values()).await)
        }
        None => None,
    };
    let sizes = sizes.as_ref().zip(platforms.as_deref());
    let sites = sites::report(&job.download, &sites, &plan, &nodes, &keyed, sizes);
    let nodes = build_nodes(&plan, &keyed, sizes);
    let download = download::report(&job.download, secrets.as_ref(), user);
    let skipped = plan.skipped.iter();
    let skipped = skipped
        .map(|node| SkippedReport { name: node.node_name.clone(), reason: node.reason.clone() })
        .collect();
    let report = Report { nodes, sites, download, skipped, warnings };
    print(&report, *output, stdout).context("writing the plan to stdout")?;
    let without: BTreeSet<&str> = report
        .nodes
        .iter()
        .flat_map(|node| &node.images)
        .filter(|image| image.error.is_some())
        .map(|image| image.image.as_str())
        .collect();
    ensure!(without.is_empty(), "no usable credentials for {}", Vec::from_iter(without).join(", "));
    let verify = report.download.as_ref().and_then(|download| download.verify.as_ref());
    let unusable = verify.and_then(|verify| verify.error.as_ref());
    ensure!(unusable.is_none(), "no usable keys in spec.verify: {}", unusable.map_or("", String::as_str));
    Ok(())
}

/// Overriders that match none of the nodes, registry secrets that match none of the images, and names without a Node:
/// perhaps misspelt.
fn find_warnings(job: &ValidatedJob, nodes: &BTreeMap<NodeName, NodeView>, plan: &Plan) -> Vec<String> {
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

fn secret_names(job: &ValidatedJob, plan: &Plan) -> BTreeSet<SecretRef> {
    let images = plan.nodes.iter().flat_map(|(_, node)| &node.images);
    let keys = job.download.verify.iter().flat_map(|verify| verify.keys.iter().cloned());
    images.flat_map(|image| image.secrets.iter().cloned()).chain(keys).collect()
}

fn platforms(plan: &Plan, nodes: &BTreeMap<NodeName, NodeView>) -> Vec<Platform> {
    let labels = |name: &NodeName| nodes.get(name).map(|node| platform_of(&node.labels)).unwrap_or_default();
    plan.nodes.iter().map(|(name, _)| labels(name)).collect()
}

/// `sizes`: with the platform of each node.
fn build_nodes(plan: &Plan, keyed: &KeyedPlans<'_>, sizes: Option<(&Sizes, &[Platform])>) -> Vec<NodeReport> {
    // Many nodes share plan and platform.
    let mut built: BTreeMap<_, (Vec<ImageReport>, Option<NodeSize>)> = BTreeMap::new();
    let node = |(index, (name, node)): (usize, &(NodeName, Arc<NodePlan>))| {
        let sizes = sizes.and_then(|(sizes, platforms)| Some((sizes, platforms.get(index)?)));
        let key = (Arc::as_ptr(node), sizes.map(|(_, platform)| platform));
        let (images, size) = built.entry(key).or_insert_with(|| {
            let images = keyed.of(node);
            let size = sizes.map(|(sizes, platform)| sizes.of_node(images, platform));
            (images.iter().map(|image| build_image(image, sizes)).collect(), size)
        });
        NodeReport { name: name.0.clone(), images: images.clone(), size: *size }
    };
    plan.nodes.iter().enumerate().map(node).collect()
}

impl<'a> Keyed<'a> {
    fn new(planned: &'a PlannedImage, known: Option<&Secrets>, user: Option<SecretUser<'_>>) -> Self {
        let resolved = known.map(|known| {
            let lookup = |secret: &SecretRef| known.get(secret).cloned().unwrap_or(SecretLookup::Missing);
            resolve_key(&planned.secrets, &planned.pull, user, lookup)
        });
        Self { planned, resolved }
    }

    /// Why it has no credentials, in detail: the user who runs this can read the secrets.
    fn error(&self) -> Option<String> {
        let resolved = self.resolved.as_ref()?;
        matches!(resolved.key, Key::Unavailable { .. }).then(|| resolved.details.join("; "))
    }
}

fn build_image(keyed: &Keyed<'_>, sizes: Option<(&Sizes, &Platform)>) -> ImageReport {
    let PlannedImage { image, name: _, pull, policy, secrets } = keyed.planned;
    let error = keyed.error();
    let size = sizes.map(|(sizes, platform)| sizes.of_image(keyed, platform)).transpose();
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

fn print(report: &Report, output: Output, stdout: &mut impl Write) -> anyhow::Result<()> {
    let text = match output {
        Output::Table => table::render(report),
        Output::Json => serde_json::to_string_pretty(report)? + "\n",
        Output::Yaml => serde_saphyr::to_string(report)?,
    };
    stdout.write_all(text.as_bytes())?;
    stdout.flush()?;
    Ok(())
}
