//! `kubectl prepull tokens create`, `list` and `revoke`.

use std::io::Write;

use anyhow::{anyhow, bail};
use clap::{Args, Subcommand};
use prepull_admission::commands::node::Installation;
use prepull_admission::commands::token::{self, CreateArgs, RevokeTokenArgs, create, render_table, revoke};
use prepull_admission::tokens::{ListedToken, Scope};
use serde::Serialize;
use serde_json::json;

use crate::cluster::Cluster;
use crate::output::OutputFormat;
use crate::output::print_object;
use crate::problem::{self, MissingRight};
use crate::session::{CommandOutcome, Session};

/// The arguments of `tokens`.
#[derive(Debug, Args)]
#[command(after_help = "\
Tokens are Secrets in the namespace of cloudcore-prepull. To create one needs no right to read Secrets
(prepull-token-admin in manifests/kubectl-prepull/rbac.yaml); `list` and `revoke` do, and the right to read these Secrets gives the
key of the CA as well.

Examples:
  kubectl prepull tokens create --node edge-7 --install-line --server cloud.example
  kubectl prepull tokens list")]
pub(crate) struct TokensArgs {
    #[command(subcommand)]
    command: TokensCommand,
}

/// The commands about join tokens.
#[derive(Debug, Subcommand)]
enum TokensCommand {
    /// Create a join token and print it.
    ///
    /// With --node it admits that node, once, also one that has joined before or is revoked. Without, it admits each edge node
    /// of the cluster that has never joined, until it expires. It cannot be shown again: the cluster keeps only a hash. Only the
    /// token goes to stdout, or with --install-line the whole command for the node; how to use it, and until when, goes to
    /// stderr. With -o json or yaml, stdout has an object of it, with its ID and its end.
    #[command(after_help = "\
Examples:
  kubectl prepull tokens create --node edge-7
  kubectl prepull tokens create --node edge-7 --install-line --server cloud.example
  kubectl prepull tokens create --ttl 8h    # for a whole fleet
  kubectl prepull tokens create --node edge-7 -o json | jq -r .token")]
    Create(CreateArgs),
    /// List the valid tokens, without their secrets.
    #[command(after_help = "Example:\n  kubectl prepull tokens list -o json")]
    List,
    /// Revoke a token. Nodes that have joined with it stay joined.
    #[command(after_help = "Example:\n  kubectl prepull tokens revoke 0123456789ab")]
    Revoke(RevokeTokenArgs),
}

#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct TokenRow {
    id: String,
    /// The only node that may join with it; none: any.
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<String>,
    expires: String,
    used: bool,
}

impl From<ListedToken> for TokenRow {
    fn from(token: ListedToken) -> Self {
        let node = match token.scope {
            Scope::Node(node) => Some(node.to_string()),
            Scope::Fleet => None,
        };
        let expires = humantime::format_rfc3339_seconds(token.expires).to_string();
        Self { id: token.id, node, expires, used: token.used }
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Created {
    #[serde(flatten)]
    listed: TokenRow,
    /// The token, unless the line was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    install_line: Option<String>,
}

impl Created {
    /// `said` is what a person gets: the token, or the line with the token.
    fn new(token: ListedToken, said: &[u8], is_line: bool) -> Self {
        let said = String::from_utf8_lossy(said).trim_end().to_owned();
        let (token_text, install_line) = if is_line { (None, Some(said)) } else { (Some(said), None) };
        Self { listed: token.into(), token: token_text, install_line }
    }
}

pub(super) fn installation(cluster: &Cluster) -> Installation {
    let namespace = cluster.system_namespace().to_owned();
    let (tokens, nodes) = ("kubectl prepull tokens", "kubectl prepull nodes");
    Installation { client: cluster.client(), namespace, tokens, nodes }
}

/// What went wrong, with the role that grants a right that is missing.
pub(super) fn explain(error: anyhow::Error, role: &str) -> anyhow::Error {
    match problem::server_answer(&error).and_then(MissingRight::from_answer) {
        Some(right) => {
            anyhow!("{right}. {role}")
        }
        None => error,
    }
}

pub(crate) async fn run(
    session: &Session,
    cluster: &Cluster,
    args: TokensArgs,
) -> anyhow::Result<CommandOutcome> {
    let (mut out, mut hints) = (std::io::stdout(), std::io::stderr());
    let output = session.global.output;
    match args.command {
        TokensCommand::Create(args) => {
            let at = installation(cluster);
            let first_ca = async || bail!("it makes it with its own rights");
            let format = output.and_then(OutputFormat::format);
            let is_line = args.install_line;
            let mut said = Vec::new();
            let out: &mut (dyn Write + Send) = if format.is_some() { &mut said } else { &mut out };
            let created = create(args, &at, first_ca, out, &mut hints).await;
            let created = created.map_err(|error| {
                explain(error, "An administrator of the cluster can grant it: the role prepull-token-admin in manifests/kubectl-prepull/rbac.yaml")
            })?;
            if let Some(format) = format {
                print_object(&Created::new(created, &said, is_line), format)?;
            }
        }
        TokensCommand::List => {
            let listed = token::list(&installation(cluster)).await;
            let listed = listed.map_err(|error| explain_read_refusal(error, cluster.system_namespace()))?;
            let ids = listed.iter().map(|token| token.id.clone());
            let objects: Vec<_> = listed.iter().cloned().map(TokenRow::from).collect();
            session.print(&objects, ids, |_| render_table(&listed))?;
        }
        TokensCommand::Revoke(args) => {
            let id = revoke(args, &installation(cluster)).await;
            let id = id.map_err(|error| explain_read_refusal(error, cluster.system_namespace()))?;
            let object = json!({"id": id, "revoked": true});
            session.print(&object, [id.clone()], |_| format!("token {id} revoked\n"))?;
        }
    }
    Ok(CommandOutcome::Done)
}

fn explain_read_refusal(error: anyhow::Error, namespace: &str) -> anyhow::Error {
    let role = format!(
        "With it one could read the key of the CA as well, so that no role of ours has it. cloudcore-prepull lists and revokes \
         them itself: kubectl -n {namespace} exec deploy/cloudcore-prepull -- cloudcore-prepull token list"
    );
    explain(error, &role)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    #[test]
    fn token_documents_hold_no_secret() {
        let token = |scope| ListedToken {
            id: "0123456789ab".to_owned(),
            scope,
            expires: UNIX_EPOCH + Duration::from_secs(1_800_000_000),
            used: false,
        };
        let listed = [Scope::Node("edge-1".into()), Scope::Fleet].map(|scope| TokenRow::from(token(scope)));
        let expected = json!([
            { "id": "0123456789ab", "node": "edge-1", "expires": "2027-01-15T08:00:00Z", "used": false },
            { "id": "0123456789ab", "expires": "2027-01-15T08:00:00Z", "used": false },
        ]);
        assert_eq!(json!(listed), expected);
        let created = |said: &[u8], is_line| Created::new(token(Scope::Fleet), said, is_line);
        let end = "2027-01-15T08:00:00Z";
        let expected =
            json!({ "id": "0123456789ab", "expires": end, "used": false, "token": "ca.0123456789ab.secret" });
        assert_eq!(json!(created(b"ca.0123456789ab.secret\n", false)), expected);
        let expected =
            json!({ "id": "0123456789ab", "expires": end, "used": false, "installLine": "run this" });
        assert_eq!(json!(created(b"run this\n", true)), expected);
    }
}
