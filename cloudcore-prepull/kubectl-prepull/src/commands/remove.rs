//! `kubectl prepull remove`.

use std::time::Duration;

use anyhow::Context;
use clap::Args;
use prepull_api::crd::remove::RemoveSpec;
use prepull_api::image::Reference;

use super::run::parse_image;
use crate::cluster::Cluster;
use crate::order::{ChosenNodes, JobOrder, PaceArgs, edge_selector, name_base};
use crate::session::{CommandOutcome, Session};
use crate::start::{WaitArgs, make_and_follow};

/// The arguments of `remove`.
#[derive(Debug, Args)]
#[command(after_help = "\
An image stays where a container uses it, where a job or the container runtime pins it, and where it has a name that the job
doesn't remove. With --older-than or --keep-last, a NAME without a tag is a repository, and its images are removed under any
tag. --preview removes nothing, and shows what would be freed. Without --wave, one node goes first, then a tenth of them, and
then the others.

Examples:
  kubectl prepull remove harbor.example/shop/web:v1 --preview
  kubectl prepull remove harbor.example/shop/web:v1 -l site=factory --wave 5%,100%
  kubectl prepull remove harbor.example/shop/web harbor.example/shop/api --keep-last 3 --older-than 720h
  kubectl prepull remove harbor.example/shop/web:v1 --node edge-1 --wait=2m

Exit status: 0 if the job is Completed, 1 if it is a Failure, 2 for wrong usage, 3 if it is not over in time, 130 after
Ctrl-C.")]
pub(crate) struct RemoveArgs {
    /// Images by reference, or repositories with --older-than or --keep-last.
    #[arg(required = true, value_name = "NAME", value_parser = parse_image)]
    names: Vec<String>,
    /// Of repositories, only images that the node has had for longer than this.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    older_than: Option<Duration>,
    /// How many images of each repository stay on each node, those that it got last.
    #[arg(long, value_name = "N")]
    keep_last: Option<u32>,
    /// Remove nothing, and show what would be removed and freed.
    #[arg(long)]
    preview: bool,
    /// Name of the job [default: remove-, that of the first image, its tag, and a digest of all images and the nodes].
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// The nodes [default: all edge nodes].
    #[command(flatten)]
    on: ChosenNodes,
    /// The flags of how the job goes.
    #[command(flatten)]
    pace: PaceArgs,
    /// Whether to create and to follow.
    #[command(flatten)]
    wait: WaitArgs,
}

pub(crate) async fn run(
    session: &Session,
    cluster: &Cluster,
    args: &RemoveArgs,
) -> anyhow::Result<CommandOutcome> {
    let order = removal_order(args)?;
    make_and_follow(session, cluster, &order, &args.wait).await
}

fn removal_order(args: &RemoveArgs) -> anyhow::Result<JobOrder> {
    let RemoveArgs { names, older_than, keep_last, preview, name, on, pace, wait: _ } = args;
    let has_rule = older_than.is_some() || keep_last.is_some();
    let is_repository = |name: &&String| {
        let reference = Reference::parse(name).ok();
        has_rule && reference.is_some_and(|name| name.tag().is_none() && name.digest().is_none())
    };
    let (repositories, images): (Vec<_>, Vec<_>) = names.iter().partition(is_repository);
    let removal = RemoveSpec {
        images: images.into_iter().cloned().collect(),
        repositories: repositories.into_iter().cloned().collect(),
        older_than: older_than.map(|age| format!("{}s", age.as_secs())),
        keep_last: keep_last.map(i64::from),
        dry_run: *preview,
    };
    // There is one: clap demands it.
    let first = names.first().context("no image is named")?;
    let end = if *preview { "-preview" } else { "" };
    let order = JobOrder {
        nodes: on.nodes.clone(),
        selector: on.selector()?.unwrap_or_else(edge_selector),
        removal: Some(removal),
        ..JobOrder::default()
    }
    .with_name(name.as_ref(), &format!("remove-{}{end}", name_base(None, first)))
    .with_pace(pace);
    Ok(if *preview { order } else { order.in_waves() })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::Parser;
    use prepull_api::crd::job::ImagePrePullJob;

    use super::*;
    use crate::cli::{Cli, Command};
    use crate::order::CAREFUL_WAVES;
    use crate::start::check_job;

    fn job(line: &str) -> ImagePrePullJob {
        let words = format!("kubectl-prepull remove {line}");
        let Command::Remove(args) = Cli::try_parse_from(words.split(' ')).unwrap().command else {
            panic!("{line}")
        };
        let job = removal_order(&args).unwrap().to_job(45);
        check_job(&job).unwrap();
        job
    }

    fn removal(line: &str) -> (String, RemoveSpec) {
        let job = job(line);
        (job.metadata.name.unwrap(), job.spec.image_pre_pull_template.remove.unwrap())
    }

    #[test]
    fn images_go_in_waves_and_a_preview_doesnt() {
        let waves = |line| job(line).spec.rollout.map(|rollout| rollout.steps).unwrap_or_default();
        assert_eq!(waves("r.io/web:v1"), CAREFUL_WAVES);
        assert_eq!(waves("r.io/web:v1 --wave 5%,100%"), ["5%", "100%"]);
        assert_eq!(waves("r.io/web:v1 --preview"), [""; 0]);
    }

    #[test]
    fn names_are_images_or_repositories() {
        let (name, spec) = removal("r.io/web:v1 nginx --preview");
        assert!(name.starts_with("remove-web-v1-preview-"), "{name}");
        assert_eq!((spec.images.len(), spec.dry_run), (2, true));
        let (name, spec) = removal("r.io/web r.io/api:v1 --keep-last 3 --older-than 30d --wave 5%,100%");
        assert!(name.starts_with("remove-web-"), "{name}");
        assert_eq!(spec.keep_last, Some(3));
        assert_eq!(spec.older_than.as_deref(), Some("2592000s"));
        assert_eq!(
            (&spec.images[..], &spec.repositories[..]),
            (&["r.io/api:v1".to_owned()][..], &["r.io/web".to_owned()][..])
        );
    }
}
