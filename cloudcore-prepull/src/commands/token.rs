//! `cloudcore-prepull token create | list | revoke`

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use anyhow::{Context, ensure};
use clap::Subcommand;
use prepull_api::enroll::{JoinToken, TOKEN_ID_LEN};
use prepull_api::task::NodeName;
use ring::digest::{SHA256, digest};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;

use crate::edges::pki::Authority;
use crate::edges::tokens::{ListedToken, Scope, Tokens};

/// The longest life of a token. One that lies around for longer is a key to the fleet that someone forgot.
const MAX_TTL: Duration = Duration::from_secs(30 * 24 * 3600);

/// Let edges join.
#[derive(Debug, Subcommand)]
pub enum TokenCommand {
    /// Make a join token and print it.
    ///
    /// With --node it lets that node join, once; without, any node until it expires. It is shown only now:
    /// the cluster keeps a hash.
    #[command(after_help = "Examples:\n  cloudcore-prepull token create --node edge-1\n  \
                            cloudcore-prepull token create --ttl 8h   # for a whole fleet")]
    Create {
        /// The one node that may join with it, by the name of its Node object.
        #[arg(long, value_name = "NAME", value_parser = parse_node)]
        node: Option<NodeName>,
        /// How long it is good for, such as 30m, 1h or 2d; at most 30 days.
        #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = parse_ttl)]
        ttl: Duration,
        /// The certificate that `run --ca-cert` is given, where the CA is in files [default: the CA in Secret
        /// prepull-ca, made if there is none].
        #[arg(long, value_name = "FILE", env = "PREPULL_CA_CERT")]
        ca_cert: Option<PathBuf>,
    },
    /// List the tokens that are still good. None can be shown again.
    List,
    /// Make a token worthless. What has joined with it stays joined.
    Revoke {
        /// As `token list` shows it: the part of the token between the two dots.
        #[arg(value_name = "ID")]
        id: String,
    },
}

fn parse_node(text: &str) -> Result<NodeName, String> {
    let node = Some(NodeName::from(text)).filter(NodeName::is_valid);
    node.ok_or_else(|| "lower-case letters, digits, '-' and '.', as in `kubectl get nodes`".to_owned())
}

fn parse_ttl(text: &str) -> Result<Duration, String> {
    let ttl = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if ttl.is_zero() || ttl > MAX_TTL {
        return Err("more than 0 and at most 30 days".to_owned());
    }
    Ok(ttl)
}

/// Carries out the command in `namespace`. What it has to say goes to `out`; of `create` that is the token
/// and nothing else.
pub async fn run(
    command: TokenCommand,
    client: kube::Client,
    namespace: &str,
    out: &mut (dyn Write + Send),
) -> anyhow::Result<()> {
    let tokens = Tokens::in_cluster(client.clone(), namespace);
    match command {
        TokenCommand::Create { node, ttl, ca_cert } => {
            let ca = match ca_cert {
                Some(path) => fingerprint_of(&path)?,
                None => Authority::in_cluster(client, namespace).await?.fingerprint(),
            };
            let scope = node.map_or(Scope::Fleet, Scope::Node);
            let token = tokens.create(ca, scope, ttl, SystemTime::now()).await?;
            writeln!(out, "{}", token.expose())?;
        }
        TokenCommand::List => write!(out, "{}", table(&tokens.list(SystemTime::now()).await?))?,
        TokenCommand::Revoke { id } => {
            // Whoever pastes the whole token means this one.
            let id = id.parse::<JoinToken>().map_or(id, |token| token.id);
            // Whatever was pasted: it may be a secret, and is not repeated.
            let is_id = id.len() == TOKEN_ID_LEN && id.chars().all(|c| matches!(c, '0'..='9' | 'a'..='f'));
            ensure!(
                is_id,
                "no token's ID is so: {TOKEN_ID_LEN} hex digits, as `cloudcore-prepull token list` shows"
            );
            tokens.revoke(&id).await?;
            writeln!(out, "token {id} revoked")?;
        }
    }
    Ok(())
}

fn fingerprint_of(path: &std::path::Path) -> anyhow::Result<[u8; 32]> {
    let certificate = CertificateDer::from_pem_file(path)
        .with_context(|| format!("reading the CA's certificate from {} (--ca-cert)", path.display()))?;
    let mut hash = [0; 32];
    hash.copy_from_slice(digest(&SHA256, &certificate).as_ref());
    Ok(hash)
}

fn table(tokens: &[ListedToken]) -> String {
    let mut rows = vec![["ID".to_owned(), "SCOPE".to_owned(), "EXPIRES".to_owned(), "USED".to_owned()]];
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
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let (id, scope, expires) = (width(0), width(1), width(2));
    let line =
        |row: &[String; 4]| format!("{:id$}  {:scope$}  {:expires$}  {}", row[0], row[1], row[2], row[3]);
    let lines: Vec<String> = rows.iter().map(line).collect();
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::UNIX_EPOCH;

    use super::*;

    #[test]
    fn the_table_says_what_each_token_is_for() {
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
        assert_eq!(table(&tokens), expected);
    }

    #[test]
    fn a_ttl_is_positive_and_bounded() {
        assert_eq!(parse_ttl("30m"), Ok(Duration::from_secs(1800)));
        for bad in ["0s", "31d", "1 fortnight", ""] {
            assert!(parse_ttl(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_hash_of_a_file_is_the_hash_of_its_ca() {
        let (authority, _) = Authority::generate(SystemTime::now()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ca.crt");
        assert!(format!("{:#}", fingerprint_of(&path).unwrap_err()).contains("ca.crt (--ca-cert)"));
        std::fs::write(&path, authority.pem()).unwrap();
        assert_eq!(fingerprint_of(&path).unwrap(), authority.fingerprint());
    }
}
