//! `kubectl prepull run`.

use anyhow::Context;
use clap::Args;
use prepull_api::image::Reference;

use crate::cluster::Cluster;
use crate::order::{ChosenNodes, CourseArgs, JobOrder, edge_selector, name_base};
use crate::session::{CommandOutcome, Session};
use crate::start::{WaitArgs, make_and_follow};

/// The arguments of `run`.
#[derive(Debug, Args)]
#[command(after_help = "\
Without --selector and --node the job is for all edge nodes. It is followed to its end; Ctrl-C leaves it running. Run again,
the same line follows the same job.

Examples:
  kubectl prepull run nginx:1.25
  kubectl prepull run harbor.example/shop/web:v2 -l site=factory --secret shop/harbor --concurrency 10%
  kubectl prepull run harbor.example/shop/web:v2 harbor.example/shop/api:v2 --wave 5%,25%,100% --rate 2Mi --wait=2h
  kubectl prepull run harbor.example/shop/web:v2 --window Mon-Fri,22:00-05:00 --share --max-site-rate 8Mi --deadline 3d
  kubectl prepull run nginx:1.25 --node edge-1 --node edge-2 --wait=0
  kubectl prepull run nginx:1.25 --dry-run > job.yaml

Exit status: 0 if the job is Completed, 1 if it is a Failure, 2 for wrong usage, 3 if it is not over in time, 130 after
Ctrl-C.")]
pub(crate) struct RunArgs {
    /// The images, as in a pod.
    #[arg(required = true, value_name = "IMAGE", value_parser = parse_image)]
    images: Vec<String>,
    /// Name of the job [default: that of the first image, its tag, and a digest of all images and the nodes].
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// The nodes [default: all edge nodes].
    #[command(flatten)]
    on: ChosenNodes,
    /// The flags of how the job goes.
    #[command(flatten)]
    pub(crate) course: CourseArgs,
    /// Whether to create and to follow.
    #[command(flatten)]
    wait: WaitArgs,
}

pub(super) fn parse_image(text: &str) -> Result<String, String> {
    if is_value(text) {
        return Err(format!(
            "it looks like the value of a flag (--wait=2m has a =); an image of this name is docker.io/library/{text}"
        ));
    }
    Reference::parse(text).map(|_| text.to_owned()).map_err(|error| error.to_string())
}

/// Whether the text is a time, a number, a percentage or a rate. Each of them is also a valid reference of an image.
fn is_value(text: &str) -> bool {
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic() || c == '%');
    let unit = &text[number.len()..];
    let is_number = !number.is_empty() && number.chars().all(|c| c.is_ascii_digit() || c == '.');
    let is_unit = ["", "%", "k", "Ki", "M", "Mi", "G", "Gi", "T", "Ti"].contains(&unit);
    (is_number && is_unit) || humantime::parse_duration(text).is_ok()
}

pub(crate) async fn run(
    session: &Session,
    cluster: &Cluster,
    args: &RunArgs,
) -> anyhow::Result<CommandOutcome> {
    let order = pull_order(args, cluster.namespace())?;
    make_and_follow(session, cluster, &order, &args.wait).await
}

fn pull_order(args: &RunArgs, namespace: &str) -> anyhow::Result<JobOrder> {
    // There is one: clap demands it.
    let first = args.images.first().context("no image is named")?;
    Ok(JobOrder {
        images: args.images.clone(),
        nodes: args.on.nodes.clone(),
        selector: args.on.selector()?.unwrap_or_else(edge_selector),
        ..JobOrder::default()
    }
    .with_name(args.name.as_ref(), &name_base(None, first))
    .with_course(&args.course, namespace))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};
    use crate::snapshot::assert_snapshot;

    /// The manifest of the job of a command line, for 45 nodes.
    fn manifest(line: &str) -> anyhow::Result<String> {
        let words = format!("kubectl-prepull run {line}");
        let Command::Run(args) = Cli::try_parse_from(words.split(' ')).unwrap().command else {
            panic!("{line}")
        };
        Ok(serde_saphyr::to_string(&pull_order(&args, "shop")?.to_job(45))?)
    }

    #[test]
    fn a_default_job_has_only_required_fields() {
        assert_snapshot("commands/run/minimal.yaml", &manifest("nginx:1.25").unwrap());
    }

    #[test]
    fn every_flag_is_a_field_of_the_job() {
        let line = "harbor.example/shop/web:v2 nginx:1.25 --name spring -l site=factory,!canary --secret harbor \
                    --registry-secret quay.io=ops/quay --concurrency 10% --wave 5%,25%,100% --rate 2Mi \
                    --node-timeout 1h --retries 5 --tolerate 0.25 --pause 10m --window Mon-Fri,22:00-04:00@Europe/Berlin \
                    --window Sat,00:00+24h --deadline 8h --ttl 1d --share --max-site-rate 8Mi --deltas require --follow-nodes";
        let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_snapshot("commands/run/all-flags.yaml", &manifest(&line).unwrap());
        assert_snapshot("commands/run/nodes.yaml", &manifest("nginx --node edge-1 --node edge-2").unwrap());
    }

    #[test]
    fn values_of_flags_are_no_images() {
        for value in ["2m", "1h30m", "30", "10%", "2Mi", "0.5"] {
            assert!(parse_image(value).unwrap_err().contains("--wait=2m"), "{value}");
        }
        for image in ["nginx", "nginx:1.25", "2048", "r.io/2m", "k3s", "docker.io/library/2m"] {
            assert_eq!(parse_image(image).is_ok(), image != "2048", "{image}");
        }
    }

    #[test]
    fn an_unsupported_selector_is_wrong_usage() {
        let error = manifest("nginx -l cores>4").unwrap_err();
        assert!(error.is::<crate::problem::WrongUsage>(), "{error}");
        assert!(error.to_string().contains("--selector cores>4: "), "{error}");
    }
}
