//! The command `cloudcore-prepull plan`: what the controller would do with a job, and why it skips nodes.
//!
//! ```text
//! files or cluster ─▶ manifests, cluster ─▶ validate ─▶ plan ─▶ resolve_key ─▶ Report ─▶ table, json, yaml
//! ```
//! Validation, planning and the choice of keys are the controller's own code.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use prepull_api::credentials::{RegistryPattern, SecretUser};
use prepull_api::overriders::SecretRef;
use prepull_api::task::{NodeName, PullPolicy};
use prepull_api::wire::Key;
use prepull_engine::prepull::plan::{
    Plan, PlannedImage, SecretLookup, is_missing, plan, resolve_key, self_assigned_labels,
};
use prepull_engine::prepull::validate::{ValidatedJob, validate};
use prepull_engine::shared::node_view::NodeView;
use serde::Serialize;

use crate::commands::args::ConsentArgs;

mod cluster;
mod definition;
mod download;
mod manifests;
mod table;
#[cfg(test)]
mod tests;

use download::DownloadReport;

/// Show which images a job would pull on each node, without running it
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cloudcore-prepull plan --job job.yaml --nodes nodes.yaml
  kubectl get nodes -o yaml > nodes.yaml && cloudcore-prepull plan --job job.yaml --nodes nodes.yaml -o json
  cloudcore-prepull plan --job job.yaml                     # with the cluster's nodes and secrets

Exit status: 0 the job is valid and, where secrets are known, each image has credentials; 1 it is refused, an image has
none, or the command failed (stderr says why); 2 wrong usage.")]
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
    #[serde(skip_serializing_if = "Option::is_none")]
    download: Option<DownloadReport>,
    skipped: Vec<SkippedReport>,
    /// What the job says and what has no effect on these nodes.
    warnings: Vec<String>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeReport {
    name: String,
    images: Vec<ImageReport>,
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
}

#[derive(Debug, PartialEq, Eq, Serialize)]
struct SkippedReport {
    name: String,
    reason: String,
}

type Secrets = BTreeMap<SecretRef, SecretLookup>;

/// Runs the command. A refused job is an error; so is, after the plan, an image without usable credentials.
pub async fn run(args: &PlanArgs, stdout: &mut (impl Write + Send)) -> anyhow::Result<()> {
    let PlanArgs { job, nodes, secrets, consent, output, kubeconfig } = args;
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
    let warnings = find_warnings(&job, &nodes, &plan);
    let report = build_report(&job, &plan, secrets.as_ref(), user, warnings);
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

fn build_report(
    job: &ValidatedJob,
    plan: &Plan,
    secrets: Option<&Secrets>,
    user: Option<SecretUser<'_>>,
    warnings: Vec<String>,
) -> Report {
    let Plan { nodes, skipped } = plan;
    // Many nodes share one plan, which is resolved once.
    let mut resolved: BTreeMap<*const prepull_engine::prepull::plan::NodePlan, Vec<ImageReport>> =
        BTreeMap::new();
    Report {
        nodes: nodes
            .iter()
            .map(|(name, node)| {
                let images = resolved.entry(std::sync::Arc::as_ptr(node)).or_insert_with(|| {
                    node.images.iter().map(|image| build_image_report(image, secrets, user)).collect()
                });
                NodeReport { name: name.0.clone(), images: images.clone() }
            })
            .collect(),
        download: download::report(&job.download, secrets, user),
        skipped: skipped
            .iter()
            .map(|node| SkippedReport { name: node.node_name.clone(), reason: node.reason.clone() })
            .collect(),
        warnings,
    }
}

fn build_image_report(
    planned: &PlannedImage,
    known: Option<&Secrets>,
    user: Option<SecretUser<'_>>,
) -> ImageReport {
    let PlannedImage { image, name: _, pull, policy, secrets } = planned;
    let error = known.and_then(|known| {
        let lookup = |secret: &SecretRef| known.get(secret).cloned().unwrap_or(SecretLookup::Missing);
        let resolved = resolve_key(secrets, pull, user, lookup);
        // In detail: whoever runs this has read the secrets.
        matches!(resolved.key, Key::Unavailable { .. }).then(|| resolved.details.join("; "))
    });
    ImageReport {
        image: image.clone(),
        pull: pull.to_string(),
        secrets: secrets.iter().map(SecretRef::to_string).collect(),
        pull_policy: *policy,
        error,
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
