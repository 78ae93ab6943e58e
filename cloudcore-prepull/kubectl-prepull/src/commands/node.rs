//! `kubectl prepull node revoke` and `allow`.

use clap::{Args, Subcommand};
use prepull_admission::commands::node::{AllowNodeArgs, RevokeNodeArgs, allow, revoke};
use serde_json::json;

use super::tokens::{explain, installation};
use crate::cluster::Cluster;
use crate::session::{CommandOutcome, Session};

const ROLE: &str = "An administrator of the cluster can grant it: the role prepull-node-admin in manifests/kubectl-prepull/rbac.yaml";

/// The arguments of `node`.
#[derive(Debug, Args)]
#[command(after_help = "\
`kubectl prepull nodes` lists the edges, and which of them are revoked.

Examples:
  kubectl prepull node revoke edge-7
  kubectl prepull node revoke edge-7 && kubectl prepull tokens create --node edge-7    # a new machine in its place")]
pub(crate) struct NodeArgs {
    #[command(subcommand)]
    command: NodeCommand,
}

/// The commands about the keys of nodes.
#[derive(Debug, Subcommand)]
enum NodeCommand {
    /// Keep a node out: end its session within seconds, and refuse every certificate that it has, for ever.
    ///
    /// The same machine, or a new one in its place, is let in again by a join with a token that is made afterwards
    /// (`tokens create --node NAME`). The certificates of before stay refused.
    #[command(after_help = "Example:\n  kubectl prepull node revoke edge-7")]
    Revoke(RevokeNodeArgs),
    /// Take a revocation back, after a false alarm: every certificate that has not expired is good again.
    ///
    /// It is refused after the node has joined again: then the revocation keeps out nothing but the keys of before.
    #[command(after_help = "Example:\n  kubectl prepull node allow edge-7")]
    Allow(AllowNodeArgs),
}

pub(crate) async fn run(
    session: &Session,
    cluster: &Cluster,
    args: NodeArgs,
) -> anyhow::Result<CommandOutcome> {
    let at = installation(cluster);
    let (node, revoked, done) = match args.command {
        NodeCommand::Revoke(args) => (args.node.clone(), true, revoke(args, &at).await),
        NodeCommand::Allow(args) => (args.node.clone(), false, allow(args, &at).await),
    };
    let said = done.map_err(|error| explain(error, ROLE))?;
    let object = json!({"node": node, "revoked": revoked, "message": said});
    session.print(&object, [format!("node/{node}")], |_| format!("{said}\n"))?;
    Ok(CommandOutcome::Done)
}
