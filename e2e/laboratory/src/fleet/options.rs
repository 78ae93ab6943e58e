//! The command line of `fleet`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use prepull_e2e::sim::{Behaviour, PullDurations};
use serde::Serialize;

use super::measure::MeasuredJob;

const EXAMPLES: &str = "\
Examples:
  make fleet NODES=10000
      10,000 nodes that pull at once: what the cloud side can do at most
  make fleet NODES=2000 ARGS='--images 4 --pull 20s~3m --image-size 400000000 --concurrency 200'
      a rollout over links of all kinds, 200 nodes at a time, with progress
  make fleet NODES=5000 ARGS='--pull 5s..30s --disconnect-every 2m --restart-every 10m --fail-rate 0.01'
      bad links, power cuts, a registry that sometimes fails
  make fleet NODES=10000 ARGS='--pull 2s..20s --kill-cloud --json killed.json'
      cloudcore is killed when half of the images are there, and started again
  make fleet NODES=10000 ARGS='--idle 60s --disconnect-every 10m'
      what the list of the edges costs while links flap
  make fleet NODES=10000 ARGS='--people --fail-rate 0.03'
      what kubectl prepull, its page and a Prometheus cost (as root)
  make fleet NODES=1000 ARGS='--kruise'
      OpenKruise's API: how many writes a node and an image cost
  make fleet NODES=1000 ARGS='--rotate'
      a rotation of the CA, of which a tenth of the nodes learns only afterwards
  make fleet NODES=10000 ARGS='--old-jobs 10000'
      how soon a leader that starts serves edges where jobs have piled up, and what memory it takes

Everything runs on this machine, the edges too: take their part off when you size a cluster. The program is
target/release/laboratory fleet; it needs the environment that e2e/setup/with-parts.sh makes.";

/// Measures cloudcore-prepull with a fleet of simulated edges: real tunnel, real TLS, a certificate for each edge, the
/// agent's own logic, a real API server and etcd; only the pulls are simulated.
#[allow(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
#[derive(Clone, Debug, Parser, Serialize)]
#[command(version, after_help = EXAMPLES)]
#[serde(rename_all = "camelCase")]
pub(crate) struct FleetOptions {
    /// Simulated edge nodes
    #[arg(long, short, default_value_t = 1000)]
    pub nodes: usize,
    /// Images of the job
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub images: u32,
    /// Duration of one pull: 100ms, 1s..10s (uniform), or 5s~60s (log-normal: the median, and what 19 of 20 stay
    /// below). A node pulls its images one after another
    #[arg(long, default_value = "0", value_name = "TIME")]
    #[serde(serialize_with = "as_text")]
    pub pull: PullDurations,
    /// Bytes of each image, for the progress that edges report. With 0 they report none
    #[arg(long, default_value_t = 0, value_name = "BYTES")]
    pub image_size: u64,
    /// Fraction of the images that fail, from 0 to 1
    #[arg(long, default_value_t = 0.0, value_name = "PART", value_parser = part)]
    pub fail_rate: f64,
    /// Average time that an edge's connection lasts
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    #[serde(serialize_with = "as_time")]
    pub disconnect_every: Option<Duration>,
    /// Average time between an edge's first connection after a restart and its next restart
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    #[serde(serialize_with = "as_time")]
    pub restart_every: Option<Duration>,
    /// The job's concurrency. Default: all nodes
    #[arg(long)]
    pub concurrency: Option<i64>,
    /// The job's failureTolerate
    #[arg(long, default_value = "1", value_name = "PART")]
    pub tolerate: String,
    /// The job's timeoutSeconds, for each node
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    pub timeout_seconds: i64,
    /// Kill cloudcore (SIGKILL) when half of the images are pulled, and start it again
    #[arg(long)]
    pub kill_cloud: bool,
    /// Measure OpenKruise's API instead: the writes for each node and image that an ImagePullJob takes, or an
    /// ImageListPullJob of several images. Not with --tolerate, --kill-cloud or --idle
    #[arg(long, conflicts_with_all = ["tolerate", "kill_cloud", "idle"])]
    pub kruise: bool,
    /// Measure a rotation of the CA instead, while a tenth of the nodes is away. Of the other options only --nodes and
    /// --json matter
    #[arg(long)]
    pub rotate: bool,
    /// Measure a leader that starts instead, with this number of old jobs, and with jobs that run on all nodes. Of the
    /// other options only --nodes, --old-nodes and --json matter
    #[arg(long, value_name = "NUMBER", conflicts_with_all = ["kruise", "rotate"])]
    pub old_jobs: Option<usize>,
    /// Nodes in the status of each old job, of 0.5 KiB each
    #[arg(long, default_value_t = 40, value_name = "NUMBER")]
    pub old_nodes: usize,
    /// Before the job, measure the idle sessions for this long, and the list of the edges after it
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    #[serde(serialize_with = "as_time")]
    pub idle: Option<Duration>,
    /// Let a Prometheus scrape cloudcore during the job, and measure kubectl prepull and its page after it. Not with
    /// --kruise and --rotate
    #[arg(long, conflicts_with_all = ["kruise", "rotate"])]
    pub people: bool,
    /// Give up if the job has not ended after this time
    #[arg(long, default_value = "15m", value_name = "TIME", value_parser = humantime::parse_duration)]
    #[serde(skip)]
    pub limit: Duration,
    /// Seed of the random numbers. The same seed gives each node the same durations, failures and faults
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Additional flag of `cloudcore-prepull run`, such as --cloud-arg=--heartbeat=30s; repeatable
    #[arg(long, value_name = "FLAG", allow_hyphen_values = true)]
    pub cloud_arg: Vec<String>,
    /// Write the figures to this file, as one line of JSON, instead of after the table
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub json: Option<PathBuf>,
}

impl FleetOptions {
    /// Options with this number of nodes, and defaults for everything else.
    pub(crate) fn with_nodes(nodes: usize) -> Self {
        Self { nodes, ..Self::parse_from(["fleet"]) }
    }

    /// Behaviour of the edges.
    pub(super) fn behaviour(&self) -> Behaviour {
        Behaviour {
            pull: self.pull,
            fail_rate: self.fail_rate,
            image_bytes: self.image_size,
            disconnect_every: self.disconnect_every,
            restart_every: self.restart_every,
            most_faults: None,
            redial_within: None,
            seed: self.seed,
        }
    }

    /// The job to measure.
    pub(crate) fn job_to_measure(&self, name: &str) -> MeasuredJob {
        MeasuredJob {
            name: name.to_owned(),
            images: self.images,
            concurrency: self.concurrency.unwrap_or_else(|| i64::try_from(self.nodes).unwrap_or(i64::MAX)),
            tolerate: self.tolerate.clone(),
            timeout_seconds: self.timeout_seconds,
            kill_cloud: self.kill_cloud,
            limit: self.limit,
        }
    }
}

fn part(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(part) if (0.0..=1.0).contains(&part) => Ok(part),
        _ => Err("a number from 0 to 1 is expected".to_owned()),
    }
}

#[allow(clippy::ref_option)] // serde's signature
fn as_time<S: serde::Serializer>(time: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    time.map(|time| humantime::format_duration(time).to_string()).serialize(serializer)
}

fn as_text<S: serde::Serializer>(pull: &PullDurations, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(pull)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_examples_of_the_help_are_accepted() {
        FleetOptions::command().debug_assert();
        let defaults = FleetOptions::with_nodes(7).job_to_measure("x");
        assert_eq!((defaults.images, defaults.concurrency, defaults.tolerate.as_str()), (1, 7, "1"));
        for example in EXAMPLES.lines().filter_map(|line| line.split_once("ARGS='")) {
            let arguments = example.1.trim_end_matches('\'').split(' ');
            FleetOptions::try_parse_from(std::iter::once("fleet").chain(arguments)).unwrap();
        }
        for bad in ["--fail-rate=2", "--images=0", "--pull=soon", "--disconnect-every=1"] {
            assert!(FleetOptions::try_parse_from(["fleet", bad]).is_err(), "{bad}");
        }
    }
}
