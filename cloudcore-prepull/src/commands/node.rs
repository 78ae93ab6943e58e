//! The commands `cloudcore-prepull node list`, `revoke` and `allow`.

use std::io::Write;

use clap::Subcommand;
use prepull_admission::commands::node::{AllowNodeArgs, Installation, RevokeNodeArgs, allow, list, revoke};

use super::token::{NODES, TOKENS};

/// The commands about nodes and their keys.
#[derive(Debug, Subcommand)]
pub(crate) enum NodeCommand {
    /// List the nodes whose edges have joined, with the end of their certificates, their keys and revocations.
    ///
    /// CERTIFICATE UNTIL is the end of the newest certificate. KEY is the start of the SHA-256 of the key in use, CA
    /// that of the CA that has signed its certificate, as `ca show` shows it. SUBJECT is `old` for a certificate with
    /// the subject of release 0.1, and `own` for that of newer ones.
    /// An edge that joined before its cloudcore-prepull kept this record is in it from its next connection on.
    #[command(after_help = "Example:\n  cloudcore-prepull node list")]
    List,
    /// Keep a node out: end its session within seconds, and refuse every certificate that it has, for ever.
    ///
    /// The same machine, or a new one in its place, is let in again by a join with a token that is made afterwards
    /// (`token create --node NAME`). The certificates of before stay refused.
    #[command(after_help = "Examples:\n  cloudcore-prepull node revoke edge-1\n  \
                            cloudcore-prepull node revoke edge-1 && cloudcore-prepull token create --node edge-1   # a new machine")]
    Revoke(RevokeNodeArgs),
    /// Take a revocation back, after a false alarm: every certificate that has not expired is good again.
    ///
    /// It is refused after the node has joined again: then the revocation keeps out nothing but the keys of before.
    #[command(after_help = "Example:\n  cloudcore-prepull node allow edge-1")]
    Allow(AllowNodeArgs),
}

pub(crate) async fn run(
    command: NodeCommand,
    client: kube::Client,
    namespace: &str,
    out: &mut (dyn Write + Send),
) -> anyhow::Result<()> {
    let at = Installation { client, namespace: namespace.to_owned(), tokens: TOKENS, nodes: NODES };
    match command {
        NodeCommand::List => write!(out, "{}", list(&at).await?)?,
        NodeCommand::Revoke(args) => writeln!(out, "{}", revoke(args, &at).await?)?,
        NodeCommand::Allow(args) => writeln!(out, "{}", allow(args, &at).await?)?,
    }
    Ok(())
}
