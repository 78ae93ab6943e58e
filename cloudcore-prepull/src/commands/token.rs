//! The commands `cloudcore-prepull token create`, `list` and `revoke`.

use std::io::Write;

use clap::Subcommand;
use prepull_admission::commands::node::Installation;
use prepull_admission::commands::token::{CreateArgs, RevokeTokenArgs, create, list, render_table, revoke};

use crate::edges::pki::store::CaStore;

/// How these commands begin.
pub(super) const TOKENS: &str = "cloudcore-prepull token";
pub(super) const NODES: &str = "cloudcore-prepull node list";

/// The commands about join tokens.
#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Create a join token and print it.
    ///
    /// With --node it admits that node, once, also one that has joined before or is revoked. Without, it admits each
    /// edge node of the cluster that has never joined, until it expires. It cannot be shown again: the
    /// cluster keeps only a hash. Only the token goes to stdout, or with --install-line the whole command for the node; how
    /// to use it, and until when, goes to stderr.
    #[command(after_help = "Examples:\n  cloudcore-prepull token create --node edge-1\n  \
                            cloudcore-prepull token create --node edge-1 --install-line --server cloud.example\n  \
                            cloudcore-prepull token create --ttl 8h   # for a whole fleet")]
    Create(CreateArgs),
    /// List the valid tokens, without their secrets.
    List,
    /// Revoke a token. Nodes that have joined with it stay joined.
    Revoke(RevokeTokenArgs),
}

/// Runs the command in `namespace`, and writes its output to `out`: for `create`, the token and nothing else. What a
/// person should know besides goes to `hints`.
pub(crate) async fn run(
    command: TokenCommand,
    client: kube::Client,
    namespace: &str,
    out: &mut (dyn Write + Send),
    hints: &mut (dyn Write + Send),
) -> anyhow::Result<()> {
    let at = Installation { client, namespace: namespace.to_owned(), tokens: TOKENS, nodes: NODES };
    match command {
        TokenCommand::Create(args) => {
            // Before cloudcore has run for the first time: the CA in the Secret, which is created if there is none. That
            // needs the rights of cloudcore.
            let first_ca = async || {
                let stored = CaStore::new(at.client.clone(), namespace).load_or_create().await?;
                Ok(stored.rotation.set.signer().fingerprint())
            };
            create(args, &at, first_ca, out, hints).await?;
        }
        TokenCommand::List => write!(out, "{}", render_table(&list(&at).await?))?,
        TokenCommand::Revoke(args) => writeln!(out, "token {} revoked", revoke(args, &at).await?)?,
    }
    Ok(())
}
