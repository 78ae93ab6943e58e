//! The command line of `site`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use prepull_e2e::boxes::{Fault, Plan, SERVING};
use prepull_e2e::network::Uplink;
use serde::Serialize;

const EXAMPLES: &str = "\
Examples:
  make site NODES=10
      ten boxes behind an uplink of 10 Mbit/s
  make site NODES=10 ARGS='--rate 20mbit --delay 40ms --loss 0.5% --image-size 48MiB --layers 4'
      the uplink and the image of your own site
  make site NODES=50 ARGS='--apart 0 --rate 4mbit --image-size 24MiB'
      fifty boxes, without the rows in which each pulls for itself, which take fifty times as long
  make site NODES=50 ARGS='--apart 0 --share --delta-size 8MiB'
      fifty boxes with three versions, which an update of 8 MiB brings to the fourth

Everything runs on this machine: a box is a network namespace with an agent and a containerd of its own, about 100 MiB of
memory and three times the image on the disk. Where many boxes unpack at the same time, this machine is slower than they
would be: choose a rate at which one box alone takes a minute. It must be root. The program is target/release/laboratory site; it
needs the environment that e2e/setup/with-parts.sh makes.";

/// Measures what one image costs a site: real agents, real containerds, a real registry and API server, and an uplink with
/// a rate, a delay and losses, in network namespaces on this machine.
#[derive(Clone, Debug, Parser, Serialize)]
#[command(version, after_help = EXAMPLES)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SiteOptions {
    /// Boxes of the site
    #[arg(long, short, default_value_t = 10, value_parser = clap::value_parser!(u8).range(1..=150))]
    pub nodes: u8,
    /// Bits a second of the uplink in each direction, as 20mbit or 512kbit
    #[arg(long, default_value = "10mbit", value_name = "RATE", value_parser = rate)]
    pub rate: u64,
    /// Time from one end of the uplink to the other. Traffic to registry and cloud is delayed; TCP on the uplink
    /// itself has a short round trip
    #[arg(long, default_value = "0ms", value_name = "TIME", value_parser = humantime::parse_duration)]
    #[serde(serialize_with = "as_time")]
    pub delay: Duration,
    /// Packets that the uplink loses, in each direction
    #[arg(long, default_value = "0%", value_name = "PERCENT", value_parser = percent)]
    pub loss: f64,
    /// Bytes of the image, which cannot be compressed
    #[arg(long, default_value = "48MiB", value_name = "SIZE", value_parser = size)]
    pub image_size: u64,
    /// Layers of the image; the first is the largest
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=60))]
    pub layers: u8,
    /// Boxes in the rows in which the image crosses the uplink for each box, which take that many times as long; 0 leaves
    /// these rows out
    #[arg(long, default_value_t = 3, value_name = "BOXES")]
    pub apart: u8,
    /// Let the boxes share what they have, as a last row
    #[arg(long)]
    pub share: bool,
    /// A further row, in which boxes with three versions of an image are updated by deltas of this size
    #[arg(long, value_name = "SIZE", value_parser = size, requires = "share")]
    pub delta_size: Option<u64>,
    /// A further row for each of these faults, over all boxes
    #[arg(long, value_name = "FAULT", value_delimiter = ',')]
    pub fault: Vec<Fault>,
    /// Give up if a job has not ended after this time
    #[arg(long, default_value = "1h", value_name = "TIME", value_parser = humantime::parse_duration)]
    #[serde(skip)]
    pub limit: Duration,
    /// Additional flag of `edgecore-prepull run`, such as --agent-arg=--parallel-pulls=1; repeatable
    #[arg(long, value_name = "FLAG", allow_hyphen_values = true)]
    pub agent_arg: Vec<String>,
    /// Additional flag of `cloudcore-prepull run`; repeatable
    #[arg(long, value_name = "FLAG", allow_hyphen_values = true)]
    pub cloud_arg: Vec<String>,
    /// Write the figures to this file, as one line of JSON
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub json: Option<PathBuf>,
}

impl SiteOptions {
    /// The site that was ordered.
    pub(super) fn site_plan(&self) -> Plan {
        let mut agent = self.agent_arg.clone();
        if self.share {
            agent.push(SERVING.to_owned());
        }
        Plan {
            boxes: self.nodes,
            uplink: Uplink { rate: self.rate, delay: self.delay, loss: self.loss },
            layers: layers(self.image_size, self.layers.into()),
            agent,
            cloud: self.cloud_arg.clone(),
        }
    }
}

/// Sizes of the layers: as most images have them, one large, one smaller, and the rest alike.
fn layers(size: u64, count: u64) -> Vec<u64> {
    let parts: Vec<u64> =
        [5, 3].into_iter().chain(std::iter::repeat(2)).zip(0..count).map(|(n, _)| n).collect();
    let all: u64 = parts.iter().sum();
    parts.into_iter().map(|part| (size * part / all).max(1)).collect()
}

/// A number with one of these units behind it.
fn parse_amount(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let (_, factor) = units.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit.trim()))?;
    number.parse::<u64>().ok()?.checked_mul(*factor).filter(|amount| *amount > 0)
}

fn rate(text: &str) -> Result<u64, String> {
    let units = [("bit", 1), ("kbit", 1_000), ("mbit", 1_000_000), ("gbit", 1_000_000_000)];
    parse_amount(text, &units).ok_or_else(|| "a rate such as 20mbit or 512kbit is expected".to_owned())
}

fn size(text: &str) -> Result<u64, String> {
    let units = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];
    parse_amount(text, &units).ok_or_else(|| "a size such as 48MiB is expected".to_owned())
}

fn percent(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('%').parse::<f64>() {
        Ok(percent) if (0.0..100.0).contains(&percent) && text.ends_with('%') => Ok(percent / 100.0),
        _ => Err("a percentage such as 0.5% is expected".to_owned()),
    }
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn as_time<S: serde::Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_duration(*time))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::CommandFactory;

    use super::*;
    use prepull_e2e::images::MIB;

    #[test]
    fn the_examples_of_the_help_are_accepted() {
        SiteOptions::command().debug_assert();
        for example in EXAMPLES.lines().filter_map(|line| line.split_once("ARGS='")) {
            let arguments = example.1.trim_end_matches('\'').split(' ');
            SiteOptions::try_parse_from(std::iter::once("site").chain(arguments)).unwrap();
        }
        for bad in ["--rate=20", "--rate=0mbit", "--loss=0.5", "--loss=100%", "--image-size=48", "--layers=0"]
        {
            assert!(SiteOptions::try_parse_from(["site", bad]).is_err(), "{bad}");
        }
    }

    #[test]
    fn amounts_have_their_units() {
        assert_eq!((rate("20mbit"), rate("512kbit")), (Ok(20_000_000), Ok(512_000)));
        assert_eq!((size("48MiB"), percent("0.5%")), (Ok(48 * MIB), Ok(0.005)));
    }

    #[test]
    fn the_layers_are_the_image() {
        assert_eq!(layers(48 * MIB, 4), [20 * MIB, 12 * MIB, 8 * MIB, 8 * MIB]);
        assert_eq!(layers(48 * MIB, 1), [48 * MIB]);
    }
}
