//! Join tokens: create, list and revoke.

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use anyhow::{Context, ensure};
use clap::Args;
use prepull_api::enroll::{JoinToken, TOKEN_ID_LEN};
use prepull_api::task::NodeName;
use prepull_program::errors::with_causes;
use prepull_program::table::align_columns;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;

use super::node::{Installation, node_exists, parse_node};
use crate::ca::{self, CA_CONFIG_MAP, CaFingerprint};
use crate::records::Records;
use crate::records::record::{NodeRecord, Revocation};
use crate::tokens::{JoinTokens, ListedToken, Scope};

/// The longest lifetime of a token. A longer-lived one would be a forgotten key to the fleet.
const MAX_TTL: Duration = Duration::from_secs(30 * 24 * 3600);

/// The arguments of `create`.
#[derive(Debug, Args)]
pub struct CreateArgs {
    /// The only node that may join with the token, by the name of its Node object.
    #[arg(long, value_name = "NAME", value_parser = parse_node)]
    pub node: Option<NodeName>,
    /// Lifetime of the token, such as 30m, 1h or 2d; at most 30 days.
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = parse_ttl)]
    pub ttl: Duration,
    /// The CA certificate [default: the one that cloudcore-prepull publishes in the ConfigMap prepull-ca].
    #[arg(long, value_name = "FILE", env = "PREPULL_CA_CERT")]
    pub ca_cert: Option<PathBuf>,
    /// Host of cloudcore, for the command that is shown; several are separated by commas.
    #[arg(long, value_name = "HOST", env = "PREPULL_ADVERTISE", value_delimiter = ',')]
    pub server: Vec<String>,
    /// Print the whole line that installs the agent on a node, with the token in it, in place of the token alone. It needs
    /// --server: a line for nowhere would still hold a token that is good.
    #[arg(long, requires = "server")]
    pub install_line: bool,
}

/// The arguments of `revoke`.
#[derive(Debug, Args)]
pub struct RevokeTokenArgs {
    /// The ID that `token list` shows: the part of the token between the two dots.
    #[arg(value_name = "ID")]
    pub id: String,
}

fn parse_ttl(text: &str) -> Result<Duration, String> {
    let ttl = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if ttl.is_zero() || ttl > MAX_TTL {
        return Err("more than 0 and at most 30 days".to_owned());
    }
    Ok(ttl)
}

/// Creates a token and writes it to `out`, and nothing else; returns what [`list`] shows of it. What a person should know
/// besides goes to `hints`. `first_ca`: the hash of the CA where none is published, since cloudcore-prepull has never led.
pub async fn create(
    args: CreateArgs,
    at: &Installation,
    first_ca: impl AsyncFnOnce() -> anyhow::Result<CaFingerprint>,
    out: &mut (dyn Write + Send),
    hints: &mut (dyn Write + Send),
) -> anyhow::Result<ListedToken> {
    let (CreateArgs { node, ttl, ca_cert, server, install_line }, Installation { client, namespace, .. }) =
        (args, at);
    let ca = match ca_cert {
        Some(path) => read_fingerprint(&path)?,
        None => match ca::published_fingerprint(client.clone(), namespace).await {
            Ok(Some(published)) => published,
            Ok(None) => first_ca().await.with_context(|| {
                format!(
                    "there is no ConfigMap {namespace}/{CA_CONFIG_MAP} with the CA yet (cloudcore-prepull makes it when it \
                     leads), and the CA itself cannot be used"
                )
            })?,
            Err(error) => {
                return Err(error).with_context(|| format!("reading ConfigMap {namespace}/{CA_CONFIG_MAP}"));
            }
        },
    };
    let is_missing = match &node {
        // Who may not list nodes is not warned.
        Some(node) => matches!(node_exists(client.clone(), node).await, Ok(false)),
        None => false,
    };
    let record = match &node {
        Some(node) => find_record(client.clone(), namespace, node, hints).await,
        None => NodeRecord::default(),
    };
    let rejoins = record.key.is_some();
    let scope = node.map_or(Scope::Fleet, Scope::Node);
    let now = SystemTime::now();
    let revocation = record.revoked.map(|revocation| revocation.at);
    let created = tokens(at).create_after(revocation, ca, scope.clone(), ttl, now).await?;
    let token = created.expose();
    let line = |token: &str| render_line(token, &scope, &server, rejoins);
    writeln!(out, "{}", if install_line { line(&token) } else { token })?;
    // The token exists: a closed stderr is no failure.
    let line = (!install_line).then(|| line("TOKEN"));
    let _ = write!(hints, "{}", render_hints(&scope, now + ttl, line.as_deref(), is_missing));
    Ok(ListedToken { id: created.id, scope, expires: now + ttl, used: false })
}

/// The valid tokens, by their ends.
pub async fn list(at: &Installation) -> anyhow::Result<Vec<ListedToken>> {
    Ok(tokens(at).list(SystemTime::now()).await?)
}

/// Revokes a token. Returns its ID.
pub async fn revoke(args: RevokeTokenArgs, at: &Installation) -> anyhow::Result<String> {
    // The whole token is accepted in place of its ID.
    let id = args.id.parse::<JoinToken>().map_or(args.id, |token| token.id);
    // The error does not quote the text, which may contain a secret.
    let is_id = id.len() == TOKEN_ID_LEN && id.chars().all(|c| matches!(c, '0'..='9' | 'a'..='f'));
    ensure!(is_id, "not the ID of a token: {TOKEN_ID_LEN} hex digits, as `{} list` shows", at.tokens);
    tokens(at).revoke(&id).await?;
    Ok(id)
}

fn tokens(at: &Installation) -> JoinTokens {
    JoinTokens::in_cluster(at.client.clone(), &at.namespace)
}

/// The record of the node, with the revocation that its token must name. A user who may not read it gets a token that admits
/// the node unless it is revoked.
async fn find_record(
    client: kube::Client,
    namespace: &str,
    node: &NodeName,
    hints: &mut (dyn Write + Send),
) -> NodeRecord {
    match Records::in_cluster(client, namespace).get(node).await {
        Ok(record) => {
            if let Some(Revocation { at, .. }) = &record.revoked {
                let _ = writeln!(
                    hints,
                    "note: node {node} is revoked ({at}): a join with this token lets it in again, under a new key"
                );
            }
            record
        }
        Err(error) => {
            let error = with_causes(&error);
            let _ = writeln!(
                hints,
                "warning: whether node {node} is revoked could not be read ({error}); if it is, this token does not let \
                 it in"
            );
            NodeRecord::default()
        }
    }
}

/// The line that installs the agent on a node. The token stands in the environment, because every user of the node can
/// see arguments. `rejoins`: the node has joined, so that a machine with its certificate would keep that one.
fn render_line(token: &str, scope: &Scope, servers: &[String], rejoins: bool) -> String {
    let server = if servers.is_empty() { "CLOUDCORE".to_owned() } else { servers.join(",") };
    let line = format!("PREPULL_TOKEN={token} edgecore-prepull install --server {server}");
    match scope {
        // Each takes its host name.
        Scope::Fleet => line,
        Scope::Node(node) => format!("{line} --node-name {node}{}", if rejoins { " --rejoin" } else { "" }),
    }
}

/// What to do with the token, without the token: stderr may end up in a log.
fn render_hints(scope: &Scope, expires: SystemTime, line: Option<&str>, is_missing: bool) -> String {
    let until = humantime::format_rfc3339_seconds(expires);
    let (whom, place, remark) = match scope {
        Scope::Fleet => {
            let remark = "(add --node-name NAME where the Node is not called as the machine)\n".to_owned();
            ("each edge node that has never joined", "each node", remark)
        }
        Scope::Node(node) => {
            let warning = format!(
                "warning: the cluster has no Node {node} yet, and no job selects the node before: check the name with \
                 `kubectl get nodes`\n"
            );
            ("this node, once", "the node", if is_missing { warning } else { String::new() })
        }
    };
    let line = line.map(|line| format!(", with the token in place of TOKEN:\n  {line}"));
    format!(
        "Valid until {until}, for {whom}. On {place}, as root{}\n{remark}",
        line.as_deref().unwrap_or(".")
    )
}

fn read_fingerprint(path: &std::path::Path) -> anyhow::Result<CaFingerprint> {
    let certificate = CertificateDer::from_pem_file(path)
        .with_context(|| format!("reading the CA's certificate from {} (--ca-cert)", path.display()))?;
    Ok(crate::sha256(&certificate))
}

/// The tokens as a table.
pub fn render_table(tokens: &[ListedToken]) -> String {
    let mut rows = vec![["ID", "SCOPE", "EXPIRES", "USED"].map(str::to_owned)];
    rows.extend(tokens.iter().map(|ListedToken { id, scope, expires, used }| {
        let used = match (scope, used) {
            (Scope::Fleet, _) => "-",
            (Scope::Node(_), true) => "yes",
            (Scope::Node(_), false) => "no",
        };
        [
            id.clone(),
            scope.to_string(),
            humantime::format_rfc3339_seconds(*expires).to_string(),
            used.to_owned(),
        ]
    }));
    align_columns(&rows, 2)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::UNIX_EPOCH;

    use super::*;

    #[test]
    fn the_table_shows_each_token() {
        let token = |id: &str, scope, used| ListedToken {
            id: id.into(),
            scope,
            expires: UNIX_EPOCH + Duration::from_secs(1_800_000_000),
            used,
        };
        let tokens = [
            token("0123456789ab", Scope::Fleet, false),
            token("1123456789ab", Scope::Node("edge-1".into()), true),
            token("2123456789ab", Scope::Node("e".into()), false),
        ];
        let expected = "\
ID            SCOPE        EXPIRES               USED
0123456789ab  fleet        2027-01-15T08:00:00Z  -
1123456789ab  node edge-1  2027-01-15T08:00:00Z  yes
2123456789ab  node e       2027-01-15T08:00:00Z  no
";
        assert_eq!(render_table(&tokens), expected);
    }

    #[test]
    fn the_install_line_hides_the_token() {
        let line =
            |rejoins| render_line("abc", &Scope::Node("edge-1".into()), &["a.example".to_owned()], rejoins);
        let expected = "PREPULL_TOKEN=abc edgecore-prepull install --server a.example --node-name edge-1";
        assert_eq!((line(false), line(true)), (expected.to_owned(), format!("{expected} --rejoin")));
    }

    #[test]
    fn creation_hints_omit_the_token() {
        let expires = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let servers = ["a.example".to_owned(), "b.example".to_owned()];
        let render_hints = |scope: &Scope, servers: &[String], is_missing| {
            render_hints(scope, expires, Some(&render_line("TOKEN", scope, servers, false)), is_missing)
        };
        assert_eq!(
            render_hints(&Scope::Node("edge-1".into()), &servers, false),
            "Valid until 2027-01-15T08:00:00Z, for this node, once. On the node, as root, with the token in place of \
             TOKEN:\n  PREPULL_TOKEN=TOKEN edgecore-prepull install --server a.example,b.example --node-name edge-1\n"
        );
        assert_eq!(
            render_hints(&Scope::Fleet, &[], false),
            "Valid until 2027-01-15T08:00:00Z, for each edge node that has never joined. On each node, as root, with the token in place of TOKEN:\n  \
             PREPULL_TOKEN=TOKEN edgecore-prepull install --server CLOUDCORE\n(add --node-name NAME where the Node is not called as the machine)\n"
        );
        let hints = render_hints(&Scope::Node("edge-1".into()), &servers, true);
        assert!(hints.contains("\nwarning: the cluster has no Node edge-1 yet"), "{hints}");
    }

    #[test]
    fn a_ttl_is_positive_and_bounded() {
        assert_eq!(parse_ttl("30m"), Ok(Duration::from_secs(1800)));
        for bad in ["0s", "31d", "1 fortnight", ""] {
            assert!(parse_ttl(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_files_fingerprint_is_its_cas() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ca.crt");
        assert!(format!("{:#}", read_fingerprint(&path).unwrap_err()).contains("ca.crt (--ca-cert)"));
        let pem = "-----BEGIN CERTIFICATE-----\nMAMCAQE=\n-----END CERTIFICATE-----\n";
        std::fs::write(&path, pem).unwrap();
        let der = [0x30, 3, 2, 1, 1];
        assert_eq!(read_fingerprint(&path).unwrap(), crate::sha256(&der));
        assert_eq!(ca::signer_of(&format!("{pem}{pem}")), Some(crate::sha256(&der)));
        assert_eq!(ca::signer_of("no certificate"), None);
    }
}
