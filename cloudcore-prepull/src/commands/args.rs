//! The command line of cloudcore-prepull.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args, Parser, Subcommand};
use clap_complete::Shell;
use ipnet::IpNet;
use prepull_api::selector::Selector;
use prepull_api::task::NodeName;
use prepull_plan::{ConsentArgs, PlanArgs, SiteArgs};
use prepull_program::log::LogArgs;

use crate::commands::ca::CaCommand;
use crate::commands::memory::parse_memory;
use crate::commands::node::NodeCommand;
use crate::commands::otlp_endpoint::OtlpEndpoint;
use crate::commands::token::TokenCommand;
use crate::kube_api::leader::{Timing, TimingError};

/// Plans image pre-pull jobs and dispatches them to edge nodes.
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
  cloudcore-prepull node revoke edge-1
  cloudcore-prepull plan --job job.yaml --nodes nodes.yaml"
)]
pub struct Cli {
    /// The command to run.
    #[command(subcommand)]
    pub(crate) command: CloudcoreCommand,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum CloudcoreCommand {
    /// Run the controller and the tunnel.
    Run(Box<RunArgs>),
    /// Print the custom resource definitions.
    Crds(CrdsArgs),
    /// Show which images a job would pull on each node, without running it.
    Plan(PlanArgs),
    /// Create, list and revoke the tokens with which edge nodes join.
    Token {
        /// The flags of the cluster.
        #[command(flatten)]
        cluster: ClusterArgs,
        /// The command about tokens.
        #[command(subcommand)]
        command: TokenCommand,
    },
    /// Show, rotate and retire the CA of the edges' certificates.
    Ca {
        /// The flags of the cluster.
        #[command(flatten)]
        cluster: ClusterArgs,
        /// The command about the CA.
        #[command(subcommand)]
        command: CaCommand,
    },
    /// List the nodes whose edges have joined, and keep one out whose machine was stolen or copied.
    Node {
        /// The flags of the cluster.
        #[command(flatten)]
        cluster: ClusterArgs,
        /// The command about nodes.
        #[command(subcommand)]
        command: NodeCommand,
    },
    /// Print the completion script for a shell.
    #[command(
        after_help = "Example:\n  cloudcore-prepull completion bash > /etc/bash_completion.d/cloudcore-prepull"
    )]
    Completion {
        /// The shell.
        shell: Shell,
    },
}

/// The flags that select the cluster and the namespace.
#[derive(Clone, Debug, Args)]
pub(crate) struct ClusterArgs {
    /// Kubeconfig file [default: $KUBECONFIG, ~/.kube/config, or the ServiceAccount of the pod].
    #[arg(long, global = true, value_name = "FILE", env = "PREPULL_KUBECONFIG")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// The namespace of cloudcore-prepull, which holds the Secrets of its CA and its tokens.
    #[arg(long, global = true, value_name = "NAME", value_parser = parse_namespace, env = "POD_NAMESPACE", default_value = "prepull-system")]
    pub(crate) namespace: String,
}

/// The flags of `cloudcore-prepull run`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  cloudcore-prepull run --kubeconfig ~/.kube/config --advertise cloudcore.example --advertise 192.0.2.10
  cloudcore-prepull run --log-format json --log info,cloudcore_prepull=debug

Edges must reach the tunnel and the enrolment port by an --advertise name: only those are in the
server's certificate.")]
pub(crate) struct RunArgs {
    /// The flags of the cluster.
    #[command(flatten)]
    pub(crate) cluster: ClusterArgs,
    /// Address on which edges open their tunnel (TLS with client certificates).
    #[arg(long, value_name = "ADDR", env = "PREPULL_TUNNEL_LISTEN", default_value = "0.0.0.0:10000")]
    pub(crate) tunnel_listen: SocketAddr,
    /// Address on which edges join and renew their certificate (TLS).
    #[arg(long, value_name = "ADDR", env = "PREPULL_ENROLL_LISTEN", default_value = "0.0.0.0:10002")]
    pub(crate) enroll_listen: SocketAddr,
    /// Address of metrics and health probes (plain HTTP; see --metrics-secure).
    #[arg(long, value_name = "ADDR", env = "PREPULL_METRICS_LISTEN", default_value = "0.0.0.0:10003")]
    pub(crate) metrics_listen: SocketAddr,
    /// Serve metrics over TLS only, and only to bearers of a token that may `get` /metrics. Health probes stay open,
    /// over TLS and without. Requires manifests/components/metrics-secure.
    #[arg(long, env = "PREPULL_METRICS_SECURE", value_parser = clap::builder::FalseyValueParser::new())]
    pub(crate) metrics_secure: bool,
    /// PEM file of the metrics' certificate, which is read again when it changes [default: self-signed].
    #[arg(long, value_name = "FILE", requires_all = ["metrics_key", "metrics_secure"], env = "PREPULL_METRICS_CERT")]
    pub(crate) metrics_cert: Option<PathBuf>,
    /// PEM file of the metrics' key.
    #[arg(long, value_name = "FILE", requires = "metrics_cert", env = "PREPULL_METRICS_KEY")]
    pub(crate) metrics_key: Option<PathBuf>,
    /// Address of the list of edges (plain HTTP), which people read through the API server: `kubectl prepull nodes`
    /// [default: it is not served].
    #[arg(long, value_name = "ADDR", env = "PREPULL_EDGES_LISTEN")]
    pub(crate) edges_listen: Option<SocketAddr>,
    /// Networks from which the list of edges is served: the addresses of the API servers, where no NetworkPolicy keeps
    /// others out [default: any].
    #[arg(
        long,
        value_name = "CIDR",
        env = "PREPULL_EDGES_FROM",
        value_delimiter = ',',
        requires = "edges_listen"
    )]
    pub(crate) edges_from: Vec<IpNet>,
    /// The flags of sites.
    #[command(flatten)]
    pub(crate) sites: SiteArgs,
    /// DNS name or IP address by which edges reach this server; may be repeated.
    #[arg(long, value_name = "NAME", value_parser = parse_advertised, env = "PREPULL_ADVERTISE", value_delimiter = ',')]
    pub(crate) advertise: Vec<String>,
    /// PEM file of the CA certificate, and of others that are trusted beside it [default: the CA in the Secret
    /// prepull-ca].
    #[arg(long, value_name = "FILE", requires = "ca_key", env = "PREPULL_CA_CERT")]
    pub(crate) ca_cert: Option<PathBuf>,
    /// PEM file of the CA key [default: the CA in the Secret prepull-ca].
    #[arg(long, value_name = "FILE", requires = "ca_cert", env = "PREPULL_CA_KEY")]
    pub(crate) ca_key: Option<PathBuf>,
    /// Lifetime of an edge's certificate, which the edge renews after two thirds of it.
    #[arg(long, value_name = "TIME", value_parser = parse_certificate_ttl, default_value = "30d", env = "PREPULL_EDGE_CERT_TTL")]
    pub(crate) edge_cert_ttl: Duration,
    /// Accept the certificates of release 0.1, whose subject is a kubelet's (O=system:nodes), and issue them to its
    /// agents: while a fleet is upgraded from it.
    #[arg(long, value_name = "BOOL", action = ArgAction::Set, default_value_t = false, env = "PREPULL_ACCEPT_SYSTEM_NODES")]
    pub(crate) accept_system_nodes: bool,
    /// How long ago an edge's certificate may have expired and still be renewed: how long a machine may be switched off
    /// and come back by itself. 0s: not at all.
    #[arg(long, value_name = "TIME", value_parser = parse_grace, default_value = "90d", env = "PREPULL_RENEW_GRACE")]
    pub(crate) renew_grace: Duration,
    /// Interval of pings in both directions. A session ends after two intervals of silence.
    #[arg(long, value_name = "TIME", value_parser = parse_heartbeat, default_value = "15s", env = "PREPULL_HEARTBEAT")]
    pub(crate) heartbeat: Duration,
    /// Also serve OpenKruise's ImagePullJob, ImageListPullJob and NodeImage. Requires manifests/kruise, and a
    /// cluster where Kruise's own controller does not run.
    #[arg(long, env = "PREPULL_ENABLE_KRUISE_API", value_parser = clap::builder::FalseyValueParser::new())]
    pub(crate) enable_kruise_api: bool,
    /// Label selector of the nodes that get a NodeImage; empty selects all nodes.
    #[arg(
        long, value_name = "SELECTOR", env = "PREPULL_KRUISE_NODE_SELECTOR", value_parser = Selector::parse,
        default_value = prepull_api::crd::EDGE_LABEL
    )]
    pub(crate) kruise_node_selector: Selector,
    /// Memory that may be taken by what is known of sites and their layers, from 16MiB to 16GiB. A layer beyond it is not
    /// shared. Ten thousand nodes that share forty layers need 128MiB.
    #[arg(long, value_name = "BYTES", value_parser = parse_memory, default_value = "256MiB", env = "PREPULL_SITE_MEMORY")]
    pub(crate) site_memory: usize,
    /// The flag of the consent.
    #[command(flatten)]
    pub(crate) consent: ConsentArgs,
    /// The flags of the leader election.
    #[command(flatten)]
    pub(crate) election: ElectionArgs,
    /// Send a trace of each task that has ended to this OpenTelemetry collector (OTLP over HTTP)
    /// [default: traces are not sent].
    #[arg(long, value_name = "URL", env = "PREPULL_OTLP_ENDPOINT")]
    pub(crate) otlp_endpoint: Option<OtlpEndpoint>,
    /// Append the engine's inputs to this file, at most 1 GiB, to replay a problem in a test (docs/testing.md). It
    /// contains names, labels and reasons, but no credentials.
    #[arg(long, value_name = "FILE", env = "PREPULL_RECORD")]
    pub(crate) record: Option<PathBuf>,
    /// Write the bound addresses as JSON once all listeners are up.
    #[arg(long, value_name = "FILE", hide = true)]
    pub(crate) ports_file: Option<PathBuf>,
    /// The flags of the log.
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

/// The value of `--advertise` in manifests/cluster, which is to be replaced.
const PLACEHOLDER: &str = "cloudcore.example";

impl RunArgs {
    /// Fails in a pod whose manifests name nothing by which edges could reach it: they would refuse its certificate.
    pub(crate) fn check_advertised(&self, is_in_pod: bool) -> anyhow::Result<()> {
        let problem = if self.advertise.is_empty() {
            "--advertise is not set".to_owned()
        } else if self.advertise.iter().any(|name| name == PLACEHOLDER) {
            format!("--advertise {PLACEHOLDER} is the placeholder of the manifests")
        } else {
            return Ok(());
        };
        anyhow::ensure!(
            !is_in_pod,
            "{problem}: set PREPULL_ADVERTISE in manifests/cluster/kustomization.yaml to the name or address by which the \
             edges reach the Service, and apply it again"
        );
        Ok(())
    }
}

/// The shortest certificate lifetime. Edges check once a minute whether renewal is due, and their link may be down for
/// a while; with a shorter lifetime, certificates would expire before they are renewed.
const MIN_CERTIFICATE_TTL: Duration = Duration::from_secs(300);

fn parse_certificate_ttl(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(ttl) if ttl >= MIN_CERTIFICATE_TTL => Ok(ttl),
        Ok(_) => Err("edges need at least 5m to renew it; the default is 30d".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// The longest grace, beyond any life of a machine. Any time has to stay within the calendar.
const MAX_GRACE: Duration = Duration::from_secs(20 * 365 * 24 * 3600);

fn parse_grace(text: &str) -> Result<Duration, String> {
    let grace = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    (grace <= MAX_GRACE).then_some(grace).ok_or_else(|| "at most 20 years; the default is 90d".to_owned())
}

/// The valid heartbeat intervals. Below one second, pings would burden metered links; above five minutes, NATs drop the
/// idle connection, and edges do not accept more.
const HEARTBEAT_RANGE: std::ops::RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(300);

fn parse_heartbeat(text: &str) -> Result<Duration, String> {
    let period = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    let usable = HEARTBEAT_RANGE.contains(&period).then_some(period);
    usable.ok_or_else(|| "must be from 1s to 5m; the default is 15s".to_owned())
}

/// Parses an RFC 1123 label, as the API server requires it.
fn parse_namespace(text: &str) -> Result<String, String> {
    let valid = text.len() <= 63 && !text.contains('.') && NodeName::from(text).is_valid();
    let reason = "not a valid namespace: at most 63 lower-case letters, digits and '-'";
    valid.then(|| text.to_owned()).ok_or_else(|| reason.to_owned())
}

/// Parses a name for the server's certificate. That is issued only when this replica leads, which would be too late to
/// report an error.
fn parse_advertised(text: &str) -> Result<String, String> {
    let valid = crate::edges::pki::is_server_name(text);
    let reason = "neither a DNS name nor an IP address (without a port)";
    valid.then(|| text.to_owned()).ok_or_else(|| reason.to_owned())
}

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct ElectionArgs {
    /// Elect a leader among replicas by the Lease cloudcore-prepull in --namespace; `false` for a single replica.
    #[arg(
        long, value_name = "BOOL", env = "PREPULL_LEADER_ELECT", action = ArgAction::Set, default_value_t = true,
        num_args = 0..=1, require_equals = true, default_missing_value = "true"
    )]
    pub(crate) leader_elect: bool,
    /// How long standby replicas wait after the leader's last renewal before they take over.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "15s", env = "PREPULL_LEASE_DURATION")]
    pub(crate) lease_duration: Duration,
    /// How long a leader may fail to renew the Lease before it exits.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "10s", env = "PREPULL_LEASE_RENEW_DEADLINE")]
    pub(crate) lease_renew_deadline: Duration,
    /// Interval at which the leader renews the Lease and standby replicas check it.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "2s", env = "PREPULL_LEASE_RETRY_PERIOD")]
    pub(crate) lease_retry_period: Duration,
}

impl ElectionArgs {
    /// The validated timing; `None` without an election.
    pub(crate) fn timing(self) -> Result<Option<Timing>, TimingError> {
        let Self { leader_elect, lease_duration, lease_renew_deadline, lease_retry_period } = self;
        let timing = Timing::new(lease_duration, lease_renew_deadline, lease_retry_period)?;
        Ok(leader_elect.then_some(timing))
    }
}

/// The flags of `cloudcore-prepull crds`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cloudcore-prepull crds | kubectl apply -f -
  cloudcore-prepull crds --kruise | kubectl apply -f -
  cloudcore-prepull crds --out manifests/crds")]
pub(crate) struct CrdsArgs {
    /// Print the definitions of OpenKruise's kinds instead, for --enable-kruise-api. Not for a cluster where Kruise runs.
    #[arg(long)]
    pub(crate) kruise: bool,
    /// Directory to write one file per definition to [default: print to stdout].
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn a_certificate_ttl_leaves_time_to_renew() {
        assert_eq!(parse_certificate_ttl("30d"), Ok(Duration::from_secs(30 * 24 * 3600)));
        assert!(parse_certificate_ttl("60s").unwrap_err().contains("5m"));
        assert!(parse_certificate_ttl("soon").is_err());
    }

    #[test]
    fn a_grace_is_bounded_and_may_be_none() {
        assert_eq!(parse_grace("0s"), Ok(Duration::ZERO));
        assert!(parse_grace("21y").unwrap_err().contains("90d"));
    }

    #[test]
    fn a_heartbeat_is_within_its_range() {
        assert_eq!(parse_heartbeat("15s"), Ok(Duration::from_secs(15)));
        for bad in ["0s", "999ms", "6m", "15", "soon"] {
            assert!(parse_heartbeat(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn namespaces_and_advertised_names_are_validated() {
        for good in ["prepull-system", "a1"] {
            assert_eq!(parse_namespace(good).as_deref(), Ok(good));
        }
        for bad in ["", "Bad", "a.b", "a b", "-a", &"a".repeat(64)] {
            assert!(parse_namespace(bad).is_err(), "{bad}");
        }
        for good in ["cloud.example", "192.0.2.1", "2001:db8::1"] {
            assert_eq!(parse_advertised(good).as_deref(), Ok(good));
        }
        for bad in ["", "cloud.example:10000", "https://cloud.example", "a b", "[::1]"] {
            assert!(parse_advertised(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn leader_election_has_defaults_and_valid_timings() {
        let timing = |flags: &[&str]| {
            let line = ["c", "run"].iter().chain(flags);
            let CloudcoreCommand::Run(args) = Cli::try_parse_from(line).unwrap().command else {
                panic!("not run")
            };
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
    fn consent_is_required_by_default() {
        for (flags, is_required) in [
            (&[][..], true),
            (&["--require-secret-consent"], true),
            (&["--require-secret-consent=true"], true),
            (&["--require-secret-consent=false"], false),
        ] {
            let line = ["c", "run"].iter().chain(flags);
            let CloudcoreCommand::Run(args) = Cli::try_parse_from(line).unwrap().command else {
                panic!("not run")
            };
            assert_eq!(args.consent.require_secret_consent, is_required, "{flags:?}");
        }
    }

    #[test]
    fn cluster_flags_work_before_and_after_token() {
        let before = ["c", "token", "--kubeconfig", "f", "--namespace", "n", "create", "--node", "edge-1"];
        let after = ["c", "token", "create", "--node", "edge-1", "--kubeconfig", "f", "--namespace", "n"];
        for line in [before, after] {
            let CloudcoreCommand::Token { cluster, command: _ } = Cli::try_parse_from(line).unwrap().command
            else {
                panic!("not a token command")
            };
            assert_eq!((cluster.kubeconfig, cluster.namespace.as_str()), (Some(PathBuf::from("f")), "n"));
        }
    }
}
