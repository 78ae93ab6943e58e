//! `cloudcore-prepull plan`: what the controller would do with a job, and why it leaves nodes out.
//!
//! ```text
//! files or cluster ─▶ manifests, cluster ─▶ validate ─▶ plan ─▶ resolve_key ─▶ Report ─▶ table, json, yaml
//! ```
//! Everything between reading and printing is the controller's own code.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use prepull_api::overriders::SecretRef;
use prepull_api::task::{NodeName, PullPolicy};
use prepull_api::wire::Key;
use prepull_engine::prepull::plan::{Plan, PlannedImage, SecretLookup, plan, resolve_key};
use prepull_engine::prepull::validate::validate;
use prepull_engine::shared::node_view::NodeView;
use serde::Serialize;

mod cluster;
mod manifests;
mod table;
#[cfg(test)]
mod tests;

/// Shows what a job would pull on which node, without doing it
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cloudcore-prepull plan --job job.yaml --nodes nodes.yaml
  kubectl get nodes -o yaml > nodes.yaml && cloudcore-prepull plan --job job.yaml --nodes nodes.yaml -o json
  cloudcore-prepull plan --job job.yaml                     # nodes and secrets of the cluster

Exit status: 0 the job can be carried out, 1 it is refused (the reason is on stderr), 2 wrong usage.")]
pub struct PlanArgs {
    /// YAML or JSON with one ImagePrePullJob (documents of other kinds are ignored)
    #[arg(long, value_name = "FILE")]
    pub job: PathBuf,
    /// YAML or JSON with Nodes: documents, or a List as `kubectl get nodes -o yaml` prints it. Without it, the
    /// cluster is asked
    #[arg(long, value_name = "FILE", env = "PREPULL_NODES")]
    pub nodes: Option<PathBuf>,
    /// YAML or JSON with Secrets, in which credentials are looked up; only whether there are any is shown. Without
    /// it, the cluster's are looked up where the nodes are the cluster's, and none where they come from a file
    #[arg(long, value_name = "FILE", env = "PREPULL_SECRETS")]
    pub secrets: Option<PathBuf>,
    /// How to print
    #[arg(short, long, value_enum, default_value_t)]
    pub output: Output,
    /// Which cluster to ask; default: $KUBECONFIG, ~/.kube/config, or the cluster that this runs in
    #[arg(long, value_name = "FILE", env = "PREPULL_KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,
}

/// The form of what is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Output {
    /// For people
    #[default]
    Table,
    /// One JSON object
    Json,
    /// The same in YAML
    Yaml,
}

/// What is printed. Free of credentials.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    nodes: Vec<NodeReport>,
    skipped: Vec<SkippedReport>,
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
    /// As the job names it.
    image: String,
    /// What is pulled, normalised.
    pull: String,
    /// To be tried in this order.
    secrets: Vec<String>,
    pull_policy: PullPolicy,
    /// Why there are no credentials for it. Absent as well where none were looked for.
    error: Option<String>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
struct SkippedReport {
    name: String,
    reason: String,
}

type Secrets = BTreeMap<SecretRef, SecretLookup>;

/// Carries out the command. An error is for stderr and exit status 1; a refused job is one.
pub async fn run(args: &PlanArgs, stdout: &mut (impl Write + Send)) -> anyhow::Result<()> {
    let PlanArgs { job, nodes, secrets, output, kubeconfig } = args;
    let job = manifests::job(job)?;
    let job = validate(&job).map_err(|refusal| anyhow::anyhow!("the job is refused: {refusal}"))?;

    let given_secrets = secrets.as_deref().map(manifests::secrets).transpose()?;
    let cluster = match nodes {
        Some(_) => None,
        None => Some(crate::kube_api::cluster::client(kubeconfig.as_deref()).await?),
    };
    let nodes: Vec<NodeView> = match (nodes, &cluster) {
        (Some(file), _) => manifests::nodes(file)?,
        (None, Some(client)) => cluster::nodes(client).await?,
        (None, None) => Vec::new(), // there is a client wherever there is no file
    };
    let nodes: BTreeMap<NodeName, NodeView> =
        nodes.into_iter().map(|node| (node.name.clone(), node)).collect();

    let plan = plan(&job, &nodes).map_err(|refusal| anyhow::anyhow!("the job is refused: {refusal}"))?;
    let secrets = match (given_secrets, &cluster) {
        (Some(secrets), _) => Some(secrets),
        (None, Some(client)) => Some(cluster::secrets(client, needed(&plan)).await),
        (None, None) => None,
    };
    print(&report(&plan, secrets.as_ref()), *output, stdout).context("writing the plan to stdout")
}

fn needed(plan: &Plan) -> BTreeSet<SecretRef> {
    let images = plan.nodes.iter().flat_map(|(_, node)| &node.images);
    images.flat_map(|image| image.secrets.iter().cloned()).collect()
}

fn report(plan: &Plan, secrets: Option<&Secrets>) -> Report {
    let Plan { nodes, skipped } = plan;
    // Nodes share plans: each is resolved once.
    let mut resolved: BTreeMap<*const prepull_engine::prepull::plan::NodePlan, Vec<ImageReport>> =
        BTreeMap::new();
    Report {
        nodes: nodes
            .iter()
            .map(|(name, node)| {
                let images = resolved.entry(std::sync::Arc::as_ptr(node)).or_insert_with(|| {
                    node.images.iter().map(|image| image_report(image, secrets)).collect()
                });
                NodeReport { name: name.0.clone(), images: images.clone() }
            })
            .collect(),
        skipped: skipped
            .iter()
            .map(|node| SkippedReport { name: node.node_name.clone(), reason: node.reason.clone() })
            .collect(),
    }
}

fn image_report(planned: &PlannedImage, known: Option<&Secrets>) -> ImageReport {
    let PlannedImage { image, name: _, pull, policy, secrets } = planned;
    let error = known.and_then(|known| {
        let lookup = |secret: &SecretRef| known.get(secret).cloned().unwrap_or(SecretLookup::Missing);
        match resolve_key(secrets, pull, lookup) {
            Key::Anonymous { .. } | Key::Credentials { .. } => None,
            Key::Unavailable { reason } => Some(reason),
        }
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
