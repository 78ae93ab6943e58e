//! `edgecore-prepull join`: from a token to a certificate, over one connection.
//!
//! ```text
//!  key on disk ─▶ TLS: is the token's CA in the chain, and is the server of it? ─▶ token, CSR ─▶ certificate
//! ```
//!
//! The token is shown only to a server that has proved to be the one it is for.

mod pin;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use clap::Args;
use prepull_api::credentials::Sensitive;
use prepull_api::enroll::{ENROLL_PATH, EnrollRequest, IssuedCertificate, JoinToken, JoinTokenError};
use prepull_api::task::NodeName;
use prepull_api::wire::TUNNEL_PATH;

use crate::cloud::endpoint::{
    BadUrl, ENROLL_SCHEME, RequestError, TUNNEL_SCHEME, Urls, parse_host, post_to_any,
};
use crate::cloud::identity::{Connection, Identity, IdentityError, StateDir, certificate_facts};
use crate::config::{enroll_url, tunnel_url};
use pin::PinnedCa;

/// cloudcore's default port for the tunnel.
const TUNNEL_PORT: u16 = 10_000;
/// cloudcore's default port for enrolment.
const ENROLL_PORT: u16 = 10_002;

/// What `join` is told.
#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Examples:\n  edgecore-prepull join --server cloud.example --node-name edge-1 --token TOKEN\n  \
                        edgecore-prepull join --server cloud-a.example,cloud-b.example --node-name edge-1 --token TOKEN\n\n\
                        The token comes from `cloudcore-prepull token create` and is best given in PREPULL_TOKEN: \
                        arguments can be seen by every user of this machine."
)]
pub struct JoinArgs {
    /// Where cloudcore is: short for --enroll-url https://HOST:10002 and --tunnel-url wss://HOST:10000/v1/edge.
    /// Several, repeated or with commas, are tried in turn; so are several URLs.
    #[arg(long, value_name = "HOST", env = "PREPULL_SERVER", value_delimiter = ',', value_parser = server, required_unless_present_all = ["enroll_url", "tunnel_url"])]
    pub server: Vec<String>,
    /// Where to enrol [default: by --server].
    #[arg(long, value_name = "URL", env = "PREPULL_ENROLL_URL", value_delimiter = ',', value_parser = enroll_url)]
    pub enroll_url: Vec<String>,
    /// Where the tunnel is [default: by --server].
    #[arg(long, value_name = "URL", env = "PREPULL_TUNNEL_URL", value_delimiter = ',', value_parser = tunnel_url)]
    pub tunnel_url: Vec<String>,
    /// The join token.
    #[arg(long, value_name = "TOKEN", env = "PREPULL_TOKEN", hide_env_values = true)]
    pub token: SecretArg,
    /// The name of this machine's Node object.
    #[arg(long, value_name = "NAME", env = "PREPULL_NODE_NAME")]
    pub node_name: String,
    /// Where the agent keeps its state.
    #[arg(long, value_name = "DIR", env = "PREPULL_STATE_DIR", default_value = "/var/lib/edgecore-prepull")]
    pub state_dir: PathBuf,
    /// Give up the identity of another node that is in the state directory.
    #[arg(long)]
    pub force: bool,
    /// Do nothing where this node has joined already and its certificate is valid, however old the token is: for
    /// whatever runs at every start.
    #[arg(long, env = "PREPULL_UNLESS_JOINED", conflicts_with = "force")]
    pub unless_joined: bool,
}

/// A secret of the command line: wiped when dropped, never printed, not even in an error about its form.
#[derive(Clone, Debug)]
pub struct SecretArg(Sensitive);

impl From<String> for SecretArg {
    fn from(text: String) -> Self {
        Self(Sensitive::new(text))
    }
}

/// What has been achieved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joined {
    /// As whom.
    pub node: NodeName,
    /// The certificate's end; it is renewed long before.
    pub not_after: SystemTime,
    /// Where the identity is.
    pub state_dir: PathBuf,
}

impl fmt::Display for Joined {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, not_after, state_dir } = self;
        let until = humantime::format_rfc3339_seconds(*not_after);
        write!(f, "joined as node {node}; the certificate in {} is valid until {until}", state_dir.display())
    }
}

/// Why this node has not joined.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// `--node-name`
    #[error(
        "--node-name {0:?} is not a node's name: lower-case letters, digits, '-' and '.', as in `kubectl get nodes`"
    )]
    NodeName(String),
    /// `--token`
    #[error("--token: {0}")]
    Token(#[from] JoinTokenError),
    /// One of the URLs.
    #[error(transparent)]
    Url(#[from] BadUrl),
    /// It has joined already.
    #[error(
        "{} holds the identity of node {node}, and not of {wanted}: give --node-name {node}, or {wanted} a --state-dir \
         of its own, or --force to give {node} up",
        dir.display()
    )]
    OtherNode {
        /// Which node has joined.
        node: NodeName,
        /// Which one is to join.
        wanted: NodeName,
        /// The state directory.
        dir: PathBuf,
    },
    /// The server, or the way there.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The files.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The request could not be made.
    #[error("making a certificate request: {0}")]
    Csr(#[from] rcgen::Error),
    /// The answer is of no use.
    #[error("the certificate that the server gave cannot be used: {0}")]
    Answer(&'static str),
    /// rustls itself.
    #[error("setting up TLS: {0}")]
    Tls(#[from] rustls::Error),
}

/// Joins, at the first server that answers. May be repeated: until it has succeeded the same key is used, so that
/// an answer that was lost is given again, by whichever server.
pub async fn run(args: JoinArgs) -> Result<Joined, JoinError> {
    let JoinArgs { server, enroll_url, tunnel_url, token, node_name, state_dir, force, unless_joined } = args;
    let node = NodeName(node_name);
    if !node.is_valid() {
        return Err(JoinError::NodeName(node.0));
    }
    if unless_joined
        && let Ok(identity) = Identity::load(&state_dir)
        && identity.node() == node
    {
        return Ok(Joined { node, not_after: identity.not_after(), state_dir });
    }
    let token: JoinToken = token.0.expose().parse()?;
    let (enroll_urls, tunnel_urls) = urls(&server, enroll_url, tunnel_url);
    let endpoints = enroll_urls.endpoints(ENROLL_SCHEME)?;
    tunnel_urls.endpoints(TUNNEL_SCHEME)?;
    let dir = StateDir::new(&state_dir);
    if !force
        && let Some(other) = dir.joined_as()?
        && other != node
    {
        return Err(JoinError::OtherNode { node: other, wanted: node, dir: state_dir });
    }

    let key = dir.new_key()?;
    let pinned = Arc::new(PinnedCa::new(token.ca));
    let request = EnrollRequest { node: node.clone(), token: token.bearer(), csr: key.csr()? };
    let IssuedCertificate { certificate, ca: _, not_after: _ } =
        post_to_any(&endpoints, ENROLL_PATH, pinned.client_tls()?, &request).await?;

    let facts = certificate_facts(&certificate).map_err(JoinError::Answer)?;
    if facts.node != node {
        return Err(JoinError::Answer("it is for another node"));
    }
    if facts.public_key != key.public_key() {
        return Err(JoinError::Answer("it is for another key"));
    }
    // The CA of the handshake, whose hash was checked, rather than the one of the answer.
    let ca = pinned.found_pem().ok_or(JoinError::Answer("the connection had no CA"))?;
    dir.store_connection(&ca, &Connection { tunnel_urls, enroll_urls, node_name: node.clone() })?;
    dir.store_certificate(&certificate)?;
    Ok(Joined { node, not_after: facts.not_after, state_dir })
}

/// Reads `--server`. An empty one counts as none, as a variable that is set to nothing.
fn server(text: &str) -> Result<String, String> {
    let host = text.trim();
    if host.is_empty() || parse_host(host).is_some() {
        return Ok(host.to_owned());
    }
    Err(format!(
        "--server takes a host, a name or an address, as in cloud.example or 192.0.2.1. URLs, and other ports, are \
         given with --enroll-url https://HOST:PORT and --tunnel-url wss://HOST:PORT{TUNNEL_PATH}"
    ))
}

/// Where to enrol, and where the tunnel is.
fn urls(servers: &[String], enroll_urls: Vec<String>, tunnel_urls: Vec<String>) -> (Urls, Urls) {
    let at_servers = |url: fn(&str) -> String| {
        let host = |server: &String| match server.trim() {
            v6 if v6.parse::<std::net::Ipv6Addr>().is_ok() => format!("[{v6}]"),
            other => other.to_owned(),
        };
        let hosts = servers.iter().map(host).filter(|host| !host.is_empty());
        hosts.map(|host| url(&host)).collect::<Urls>()
    };
    let given = |urls: Vec<String>| Some(Urls::from(urls)).filter(|urls| !urls.is_empty());
    (
        given(enroll_urls).unwrap_or_else(|| at_servers(|host| format!("https://{host}:{ENROLL_PORT}"))),
        given(tunnel_urls)
            .unwrap_or_else(|| at_servers(|host| format!("wss://{host}:{TUNNEL_PORT}{TUNNEL_PATH}"))),
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// For a server that is not there, with a token that is none.
    fn args(state_dir: &std::path::Path, node: &str) -> JoinArgs {
        JoinArgs {
            server: vec!["localhost".into()],
            enroll_url: Vec::new(),
            tunnel_url: Vec::new(),
            token: SecretArg::from("expired and forgotten".to_owned()),
            node_name: node.into(),
            state_dir: state_dir.to_owned(),
            force: false,
            unless_joined: true,
        }
    }

    /// What joining leaves behind, with a certificate until the end of that year.
    fn joined(state_dir: &std::path::Path, node: &str, until: i32) {
        let dir = StateDir::new(state_dir);
        dir.new_key().unwrap();
        let mut subject = rcgen::DistinguishedName::new();
        subject.push(rcgen::DnType::CommonName, format!("system:node:{node}"));
        let mut params = rcgen::CertificateParams::default();
        params.distinguished_name = subject;
        params.not_after = rcgen::date_time_ymd(until, 12, 31);
        let pair = std::fs::read_to_string(state_dir.join("pki/client.key.new")).unwrap();
        let certificate = params.self_signed(&rcgen::KeyPair::from_pem(&pair).unwrap()).unwrap().pem();
        let (enroll_urls, tunnel_urls) = urls(&["localhost".to_owned()], Vec::new(), Vec::new());
        let connection = Connection { tunnel_urls, enroll_urls, node_name: node.into() };
        dir.store_connection(&certificate, &connection).unwrap();
        dir.store_certificate(&certificate).unwrap();
    }

    #[tokio::test]
    async fn a_node_that_has_joined_needs_no_token_any_more() {
        let dir = tempfile::tempdir().unwrap();
        assert!(
            matches!(run(args(dir.path(), "edge-1")).await, Err(JoinError::Token(_))),
            "it has not joined"
        );
        joined(dir.path(), "edge-1", 2999);
        assert_eq!(run(args(dir.path(), "edge-1")).await.unwrap().node, "edge-1".into());
        let asked = JoinArgs { unless_joined: false, ..args(dir.path(), "edge-1") };
        assert!(matches!(run(asked).await, Err(JoinError::Token(_))), "it was asked to join again");
        assert!(run(args(dir.path(), "edge-2")).await.is_err(), "another node has joined");
        joined(dir.path(), "edge-1", 2020);
        assert!(matches!(run(args(dir.path(), "edge-1")).await, Err(JoinError::Token(_))), "it has expired");
    }

    #[test]
    fn a_server_stands_for_both_urls_where_they_are_not_given() {
        for (servers, enroll_urls, enroll, tunnel) in [
            ("cloud.example", "", "https://cloud.example:10002", "wss://cloud.example:10000/v1/edge"),
            ("2001:db8::1", "", "https://[2001:db8::1]:10002", "wss://[2001:db8::1]:10000/v1/edge"),
            ("a", "https://b,https://c", "https://b,https://c", "wss://a:10000/v1/edge"),
            ("a,b", "", "https://a:10002,https://b:10002", "wss://a:10000/v1/edge,wss://b:10000/v1/edge"),
        ] {
            let list = |text: &str| -> Vec<String> { text.split(',').map(str::to_owned).collect() };
            let (enrolling, tunnelling) = urls(&list(servers), list(enroll_urls), Vec::new());
            assert_eq!((enrolling.to_string().as_str(), tunnelling.to_string().as_str()), (enroll, tunnel));
        }
    }

    #[test]
    fn several_are_given_with_commas_or_by_repetition() {
        use clap::Parser;
        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            join: JoinArgs,
        }
        let rest = ["--token", "t", "--node-name", "n"];
        for servers in [vec!["--server", "a,b"], vec!["--server", "a", "--server", "b"]] {
            let line = Line::try_parse_from(["join"].into_iter().chain(servers).chain(rest)).unwrap();
            assert_eq!(line.join.server, ["a", "b"]);
        }
        assert!(Line::try_parse_from(["join"].into_iter().chain(rest)).is_err(), "where to?");
    }

    #[test]
    fn the_token_shows_in_no_debug_output() {
        assert_eq!(format!("{:?}", SecretArg::from("s3cret".to_owned())), "SecretArg(<redacted>)");
    }
}
