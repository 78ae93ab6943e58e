//! The command lines of `install` and `uninstall`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::cloud::join::{TokenArgs, parse_server};
use crate::config::AgentSettings;

/// The arguments of `install`.
#[derive(Clone, Debug, Args)]
#[command(
    // The unit lets the agent write only there.
    mut_arg("state_dir", |state_dir| state_dir.hide(true)),
    after_help = "\
Examples:
  PREPULL_TOKEN=TOKEN ./edgecore-prepull install --server cloud.example --node-name edge-1
  edgecore-prepull install --server cloud-a.example,cloud-b.example --token-file - <token
  edgecore-prepull install --parallel-pulls 2      # a node that has joined: changes a setting
  edgecore-prepull install --server cloud.example --dry-run
  edgecore-prepull install --upgrade-key cosign.pub      # for `kubectl prepull upgrade`

It must run as root. It may be repeated: what is there already stays as it is, and the agent is
restarted only where something has changed. The token, which `kubectl prepull tokens create`
prints, is not needed once the node has joined; as an argument every user of this machine could see
it.

Settings go into /etc/edgecore-prepull/config.yaml, the addresses of cloudcore into
/var/lib/edgecore-prepull.

Exit status: 0 if the agent is connected, 1 if not, 2 for wrong usage, 3 if all is in place and no
systemd runs here, so that what is left to be done was printed."
)]
pub(crate) struct InstallArgs {
    /// Host of cloudcore: short for --enroll-url https://HOST:10002 and --tunnel-url wss://HOST:10000/v1/edge. Several,
    /// repeated or separated by commas, are tried in turn [default: as the node has joined]
    #[arg(long, value_name = "HOST", env = "PREPULL_SERVER", value_delimiter = ',', value_parser = parse_server)]
    pub(crate) server: Vec<String>,
    /// The join token
    #[command(flatten)]
    pub(crate) token: TokenArgs,
    /// Name of this machine's Node object [default: as the node has joined, or this machine's host name]
    #[arg(long, value_name = "NAME", env = "PREPULL_NODE_NAME")]
    pub(crate) node_name: Option<String>,
    /// Public key of releases, as `cosign generate-key-pair` writes it: only programs signed with it upgrade this agent.
    /// Goes to /etc/edgecore-prepull/upgrade.pub
    #[arg(long, value_name = "FILE", env = "PREPULL_UPGRADE_KEY")]
    pub(crate) upgrade_key: Option<PathBuf>,
    /// Join again with a new token, although the certificate is valid: of a node that was revoked, or of another node
    #[arg(long)]
    pub(crate) rejoin: bool,
    /// How long to wait for the connection
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = humantime::parse_duration)]
    pub(crate) timeout: Duration,
    /// Print what would be done, and do nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// The settings of `run`
    #[command(flatten)]
    pub(crate) settings: AgentSettings,
}

/// The arguments of `uninstall`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  edgecore-prepull uninstall
  edgecore-prepull uninstall --purge
  edgecore-prepull uninstall --dry-run

It must run as root. The node's certificate is deleted here and stays valid until it expires:
to have cloudcore refuse it from now on, run `kubectl prepull node revoke NODE` there. Images that
were pulled stay in the runtime.")]
pub(crate) struct UninstallArgs {
    /// Remove what others have put into /etc/edgecore-prepull, and drop-ins of the unit, as well
    #[arg(long)]
    pub(crate) purge: bool,
    /// Print what would be done, and do nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}
