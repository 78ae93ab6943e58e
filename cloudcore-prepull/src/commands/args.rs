//! The command line.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use prepull_api::selector::Selector;
use prepull_api::task::NodeName;

use crate::commands::plan::PlanArgs;
use crate::commands::token::TokenCommand;
use crate::kube_api::leader::{Timing, TimingError};

/// Plans image pre-pull jobs and hands them to edge nodes.
#[derive(Debug, Parser)]
#[command(
    version,
    about,
    propagate_version = true,
    after_help = "\
Examples:
  cloudcore-prepull crds | kubectl apply -f -
  cloudcore-prepull run --kubeconfig ~/.kube/config --advertise cloudcore.example
  cloudcore-prepull token create --node edge-1 --ttl 1h
  cloudcore-prepull plan --job job.yaml --nodes nodes.yaml"
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the controller and the tunnel.
    Run(Box<RunArgs>),
    /// Print the custom resource definitions.
    Crds(CrdsArgs),
    /// Print what a job would do, node by node, without doing it.
    Plan(PlanArgs),
    /// Make, list and revoke the tokens with which edge nodes join.
    Token {
        /// How to reach the cluster.
        #[command(flatten)]
        cluster: ClusterArgs,
        /// What to do with them.
        #[command(subcommand)]
        command: TokenCommand,
    },
    /// Print the completion script of a shell.
    #[command(
        after_help = "Example:\n  cloudcore-prepull completion bash > /etc/bash_completion.d/cloudcore-prepull"
    )]
    Completion {
        /// Which one.
        shell: Shell,
    },
}

/// How to reach the cluster.
#[derive(Clone, Debug, Args)]
pub struct ClusterArgs {
    /// The kubeconfig. Without it: KUBECONFIG, ~/.kube/config, or the pod's own ServiceAccount.
    #[arg(long, global = true, value_name = "FILE", env = "PREPULL_KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,
    /// The namespace of cloudcore-prepull itself: its CA and its tokens are Secrets there.
    #[arg(long, global = true, value_name = "NAME", value_parser = namespace, env = "POD_NAMESPACE", default_value = "prepull-system")]
    pub namespace: String,
}

/// Settings of the controller.
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  cloudcore-prepull run --kubeconfig ~/.kube/config --advertise cloudcore.example --advertise 192.0.2.10
  cloudcore-prepull run --log-format json --log info,cloudcore_prepull=debug

The edges reach the tunnel and the enrolment port by one of the --advertise names: they are in the server's
certificate.")]
pub struct RunArgs {
    /// How to reach the cluster.
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// Where edges open their tunnel (TLS, client certificates).
    #[arg(long, value_name = "ADDR", env = "PREPULL_TUNNEL_LISTEN", default_value = "0.0.0.0:10000")]
    pub tunnel_listen: SocketAddr,
    /// Where edges join and renew their certificate (TLS).
    #[arg(long, value_name = "ADDR", env = "PREPULL_ENROLL_LISTEN", default_value = "0.0.0.0:10002")]
    pub enroll_listen: SocketAddr,
    /// Metrics and health (plain HTTP).
    #[arg(long, value_name = "ADDR", env = "PREPULL_METRICS_LISTEN", default_value = "0.0.0.0:10003")]
    pub metrics_listen: SocketAddr,
    /// A DNS name or IP address by which edges reach this server; may be repeated.
    #[arg(long, value_name = "NAME", value_parser = advertised, env = "PREPULL_ADVERTISE", value_delimiter = ',')]
    pub advertise: Vec<String>,
    /// The certificate of the CA, instead of the Secret prepull-ca.
    #[arg(long, value_name = "FILE", requires = "ca_key", env = "PREPULL_CA_CERT")]
    pub ca_cert: Option<PathBuf>,
    /// The key of the CA, instead of the Secret prepull-ca.
    #[arg(long, value_name = "FILE", requires = "ca_cert", env = "PREPULL_CA_KEY")]
    pub ca_key: Option<PathBuf>,
    /// How long an edge's certificate lives. Edges renew at two thirds of it.
    #[arg(long, value_name = "TIME", value_parser = certificate_ttl, default_value = "30d", env = "PREPULL_EDGE_CERT_TTL")]
    pub edge_cert_ttl: Duration,
    /// How often both sides ping. Silence for two of them ends a session.
    #[arg(long, value_name = "TIME", value_parser = heartbeat, default_value = "15s", env = "PREPULL_HEARTBEAT")]
    pub heartbeat: Duration,
    /// Serves OpenKruise's ImagePullJob, ImageListPullJob and NodeImage as well. Needs manifests/kruise, and a
    /// cluster where Kruise's own controller does not run.
    #[arg(long, env = "PREPULL_ENABLE_KRUISE_API", value_parser = clap::builder::FalseyValueParser::new())]
    pub enable_kruise_api: bool,
    /// The nodes that get a NodeImage, by labels; empty: all nodes.
    #[arg(
        long, value_name = "SELECTOR", env = "PREPULL_KRUISE_NODE_SELECTOR", value_parser = Selector::parse,
        default_value = prepull_api::crd::EDGE_LABEL
    )]
    pub kruise_node_selector: Selector,
    /// Which of several replicas leads.
    #[command(flatten)]
    pub election: ElectionArgs,
    /// Appends what the engine takes in to this file, at most 1 GiB, to replay a problem in a test (docs/testing.md).
    /// It holds names, labels and reasons, and never a credential.
    #[arg(long, value_name = "FILE", env = "PREPULL_RECORD")]
    pub record: Option<PathBuf>,
    /// Writes the addresses that were really bound as JSON, once all listen.
    #[arg(long, value_name = "FILE", hide = true)]
    pub ports_file: Option<PathBuf>,
    /// How to log.
    #[command(flatten)]
    pub log: LogArgs,
}

/// Edges look once a minute whether their certificate is to be renewed, and a link may be down for a while:
/// below this they would drop out.
const SHORTEST_CERTIFICATE: Duration = Duration::from_secs(300);

fn certificate_ttl(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(ttl) if ttl >= SHORTEST_CERTIFICATE => Ok(ttl),
        Ok(_) => Err("edges need 5m at the least to renew it; the usual is 30d".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// More often than once a second keeps the links of metered edges busy; NATs forget a connection that was silent for
/// some minutes, and edges do not take more.
const HEARTBEATS: std::ops::RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(300);

fn heartbeat(text: &str) -> Result<Duration, String> {
    let period = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    let usable = HEARTBEATS.contains(&period).then_some(period);
    usable.ok_or_else(|| "from 1s to 5m; the usual is 15s".to_owned())
}

/// RFC 1123, as the API server has it.
fn namespace(text: &str) -> Result<String, String> {
    let valid = text.len() <= 63 && !text.contains('.') && NodeName::from(text).is_valid();
    let reason = "not a namespace's name: at most 63 lower-case letters, digits and '-'";
    valid.then(|| text.to_owned()).ok_or_else(|| reason.to_owned())
}

/// It becomes part of the server's certificate, but only when this replica leads: too late to notice.
fn advertised(text: &str) -> Result<String, String> {
    let valid = crate::edges::pki::is_server_name(text);
    let reason = "neither a DNS name nor an IP address; a port is not part of it";
    valid.then(|| text.to_owned()).ok_or_else(|| reason.to_owned())
}

/// Which of several replicas leads.
#[derive(Clone, Copy, Debug, Args)]
pub struct ElectionArgs {
    /// One of several replicas leads, by the Lease cloudcore-prepull in --namespace; `false` where there is only one.
    #[arg(
        long, value_name = "BOOL", env = "PREPULL_LEADER_ELECT", action = ArgAction::Set, default_value_t = true,
        num_args = 0..=1, require_equals = true, default_missing_value = "true"
    )]
    pub leader_elect: bool,
    /// How long the other replicas wait for a leader that is not heard of.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "15s", env = "PREPULL_LEASE_DURATION")]
    pub lease_duration: Duration,
    /// A leader that could not renew the Lease for so long ends.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "10s", env = "PREPULL_LEASE_RENEW_DEADLINE")]
    pub lease_renew_deadline: Duration,
    /// How often the Lease is renewed, and looked at.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "2s", env = "PREPULL_LEASE_RETRY_PERIOD")]
    pub lease_retry_period: Duration,
}

impl ElectionArgs {
    /// The times, where there is to be an election.
    pub fn timing(self) -> Result<Option<Timing>, TimingError> {
        let Self { leader_elect, lease_duration, lease_renew_deadline, lease_retry_period } = self;
        let timing = Timing::new(lease_duration, lease_renew_deadline, lease_retry_period)?;
        Ok(leader_elect.then_some(timing))
    }
}

/// How to log.
#[derive(Clone, Debug, Args)]
pub struct LogArgs {
    /// The form of a log line.
    #[arg(long, value_enum, default_value_t = LogFormat::Text, env = "PREPULL_LOG_FORMAT")]
    pub log_format: LogFormat,
    /// What is logged, in the syntax of RUST_LOG: info, debug, cloudcore_prepull::tunnel=debug,info.
    #[arg(long, value_name = "FILTER", default_value = "info", env = "PREPULL_LOG")]
    pub log: String,
}

/// The form of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Where the definitions go.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cloudcore-prepull crds | kubectl apply -f -
  cloudcore-prepull crds --kruise | kubectl apply -f -
  cloudcore-prepull crds --out manifests/crds")]
pub struct CrdsArgs {
    /// Those of OpenKruise's kinds, for --enable-kruise-api, instead. Not for a cluster where Kruise itself runs.
    #[arg(long)]
    pub kruise: bool,
    /// A folder that gets a file per definition, instead of the standard output.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn a_certificate_lives_long_enough_to_be_renewed() {
        assert_eq!(certificate_ttl("30d"), Ok(Duration::from_secs(30 * 24 * 3600)));
        assert!(certificate_ttl("60s").unwrap_err().contains("5m"));
        assert!(certificate_ttl("soon").is_err());
    }

    #[test]
    fn a_heartbeat_keeps_a_link_and_does_not_fill_it() {
        assert_eq!(heartbeat("15s"), Ok(Duration::from_secs(15)));
        for bad in ["0s", "999ms", "6m", "15", "soon"] {
            assert!(heartbeat(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_are_checked_before_anybody_is_asked() {
        for good in ["prepull-system", "a1"] {
            assert_eq!(namespace(good).as_deref(), Ok(good));
        }
        for bad in ["", "Bad", "a.b", "a b", "-a", &"a".repeat(64)] {
            assert!(namespace(bad).is_err(), "{bad}");
        }
        for good in ["cloud.example", "192.0.2.1", "2001:db8::1"] {
            assert_eq!(advertised(good).as_deref(), Ok(good));
        }
        for bad in ["", "cloud.example:10000", "https://cloud.example", "a b", "[::1]"] {
            assert!(advertised(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn there_is_an_election_unless_it_is_refused() {
        let timing = |flags: &[&str]| {
            let line = ["c", "run"].iter().chain(flags);
            let Command::Run(args) = Cli::try_parse_from(line).unwrap().command else { panic!("not run") };
            args.election.timing()
        };
        let seconds = Duration::from_secs;
        let usual = Timing::new(seconds(15), seconds(10), seconds(2)).unwrap();
        assert_eq!(timing(&[]), Ok(Some(usual)));
        assert_eq!(timing(&["--leader-elect"]), Ok(Some(usual)));
        assert_eq!(timing(&["--leader-elect=false"]), Ok(None));
        timing(&["--lease-duration", "10s"]).unwrap_err();
    }

    #[test]
    fn the_cluster_may_be_named_before_and_after_what_is_done_with_a_token() {
        let before = ["c", "token", "--kubeconfig", "f", "--namespace", "n", "create", "--node", "edge-1"];
        let after = ["c", "token", "create", "--node", "edge-1", "--kubeconfig", "f", "--namespace", "n"];
        for line in [before, after] {
            let Command::Token { cluster, command: _ } = Cli::try_parse_from(line).unwrap().command else {
                panic!("not a token command")
            };
            assert_eq!((cluster.kubeconfig, cluster.namespace.as_str()), (Some(PathBuf::from("f")), "n"));
        }
    }
}
