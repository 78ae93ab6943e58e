//! `kubectl prepull plan`.

use std::path::{Path, PathBuf};

use clap::{ArgGroup, Args};
use prepull_plan::{ConsentArgs, PlanRequest, SecretSource, SiteArgs, SizeArgs, list_nodes, read_job};

use crate::cluster::Cluster;
use crate::jobs;
use crate::problem;
use crate::session::{CommandOutcome, Session};

/// The arguments of `plan`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("source").args(["job", "filename"]).required(true), after_help = "\
Nothing is applied. The images, secrets and nodes are chosen by the rules of cloudcore-prepull. Secrets are read with your own
rights, and never shown; of those that you may not read, nothing is checked. --sizes asks the registries from this machine,
with the credentials that the nodes would get.

Examples:
  kubectl prepull run harbor.example/shop/web:v2 --dry-run > job.yaml && kubectl prepull plan -f job.yaml
  kubectl prepull run nginx:1.25 --dry-run | kubectl prepull plan -f - --sizes
  kubectl prepull plan spring-release -o json | jq -r '.skipped[].name'

Exit status: 0; 1 if the job would be refused, or if an image has no credentials in secrets that you may read.")]
pub(crate) struct PlanCommandArgs {
    /// A job of the cluster.
    #[arg(value_name = "JOB")]
    job: Option<String>,
    /// A file with a job, in its place; - for the standard input.
    #[arg(short, long, value_name = "FILE")]
    filename: Option<PathBuf>,
    /// A file with Secrets, to check the credentials by [default: those of the cluster that you may read].
    #[arg(long, value_name = "FILE")]
    secrets: Option<PathBuf>,
    #[command(flatten)]
    consent: ConsentArgs,
    #[command(flatten)]
    sizes: SizeArgs,
    #[command(flatten)]
    sites: SiteArgs,
}

pub(crate) async fn run(
    session: &Session,
    cluster: &Cluster,
    args: &PlanCommandArgs,
) -> anyhow::Result<CommandOutcome> {
    let job = match (&args.filename, &args.job) {
        (Some(file), _) if file == Path::new("-") => read_job(Path::new("/dev/stdin"))?,
        (Some(file), _) => read_job(file)?,
        (None, name) => jobs::get(cluster, name.as_deref().unwrap_or_default()).await?,
    };
    let client = cluster.client();
    let source = args.secrets.as_deref().map_or(SecretSource::Person(&client), SecretSource::File);
    let request = PlanRequest { job: &job, consent: args.consent, sizes: &args.sizes, sites: &args.sites };
    let report = request.plan(list_nodes(&client).await?, source).await?;
    let names = report.node_names().map(|node| format!("node/{node}"));
    problem::unless_unread(session.print(&report, names, |_| report.to_table()))?;
    Ok(match report.check_credentials() {
        Ok(()) => CommandOutcome::Done,
        Err(error) => {
            problem::print_note(&error.to_string());
            CommandOutcome::Failed
        }
    })
}
