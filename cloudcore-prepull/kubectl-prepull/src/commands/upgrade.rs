//! `kubectl prepull upgrade`.

use std::time::Duration;

use clap::Args;
use prepull_api::crd::upgrade::UpgradeSpec;

use super::run::parse_image;
use crate::cluster::Cluster;
use crate::order::{ChosenNodes, CourseArgs, JobOrder, edge_selector, name_base};
use crate::session::{CommandOutcome, Session};
use crate::start::{WaitArgs, make_and_follow};

/// The arguments of `upgrade`.
#[derive(Debug, Args)]
#[command(after_help = "\
Each node pulls the image, checks its signature with the key in /etc/edgecore-prepull/upgrade.pub, and tries its program: it
has to connect, with a container runtime that answers. Otherwise the node goes back by itself, and counts as failed. Without
--wave, one node comes first, then a tenth of them, and then the others. Agents in containers fail: Kubernetes upgrades them.

Examples:
  kubectl prepull upgrade registry.example/edgecore-prepull:0.2.0
  kubectl prepull upgrade registry.example/edgecore-prepull:0.2.0 -l site=factory --wave 1,50%,100% --pause 10m
  kubectl prepull upgrade registry.example/edgecore-prepull:0.2.0 --window 22:00-04:00 --share --secret ops/registry
  kubectl prepull nodes --outdated

Exit status: 0 if the job is Completed, 1 if it is a Failure, 2 for wrong usage, 3 if it is not over in time, 130 after
Ctrl-C.")]
pub(crate) struct UpgradeArgs {
    /// The image of the agent, as it's released for the DaemonSet.
    #[arg(value_name = "IMAGE", value_parser = parse_image)]
    image: String,
    /// Time that the new version has on each node to connect, from 10s to 24h [default: 2m].
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    within: Option<Duration>,
    /// Upgrade agents that a package installed too.
    #[arg(long)]
    packages: bool,
    /// Name of the job [default: upgrade-, that of the image, its tag, and a digest of image and nodes].
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// The nodes [default: all edge nodes].
    #[command(flatten)]
    on: ChosenNodes,
    /// The flags of how the job goes.
    #[command(flatten)]
    course: CourseArgs,
    /// Whether to create and to follow.
    #[command(flatten)]
    wait: WaitArgs,
}

pub(crate) async fn run(
    session: &Session,
    cluster: &Cluster,
    args: &UpgradeArgs,
) -> anyhow::Result<CommandOutcome> {
    let order = upgrade_order(args, cluster.namespace())?;
    make_and_follow(session, cluster, &order, &args.wait).await
}

fn upgrade_order(args: &UpgradeArgs, namespace: &str) -> anyhow::Result<JobOrder> {
    let UpgradeArgs { image, within, packages, name, on, course, wait: _ } = args;
    let within = within.map(|time| format!("{}s", time.as_secs()));
    let order = JobOrder {
        images: vec![image.clone()],
        nodes: on.nodes.clone(),
        selector: on.selector()?.unwrap_or_else(edge_selector),
        upgrade: Some(UpgradeSpec { within, packages: *packages }),
        ..JobOrder::default()
    }
    .with_name(name.as_ref(), &format!("upgrade-{}", name_base(None, image)))
    .with_course(course, namespace);
    Ok(order.in_waves())
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

    fn job(line: &str, nodes: usize) -> ImagePrePullJob {
        let words = format!("kubectl-prepull upgrade {line}");
        let Command::Upgrade(args) = Cli::try_parse_from(words.split(' ')).unwrap().command else {
            panic!("{line}")
        };
        let job = upgrade_order(&args, "shop").unwrap().to_job(nodes);
        check_job(&job).unwrap();
        job
    }

    #[test]
    fn an_upgrade_goes_in_waves() {
        for nodes in [1, 3, 10_000] {
            let job = job("r.io/edgecore-prepull:0.2.0 --within 90s", nodes);
            let name = job.metadata.name.unwrap();
            assert!(name.starts_with("upgrade-edgecore-prepull-0.2.0-"), "{name}");
            assert_eq!(job.spec.rollout.unwrap().steps, CAREFUL_WAVES);
            let upgrade = job.spec.image_pre_pull_template.upgrade.unwrap();
            assert_eq!((upgrade.within.as_deref(), upgrade.packages), (Some("90s"), false));
        }
        let job = job("r.io/edgecore-prepull:0.2.0 --wave 50%,100% --packages", 45);
        assert_eq!(job.spec.rollout.unwrap().steps, ["50%", "100%"]);
    }
}
