//! `edgecore-prepull join`: the exchange of a join token for a certificate.
//!
//! ```text
//!  key on disk ─▶ TLS: is the token's CA in the chain, and did it issue the server's certificate? ─▶ token, CSR
//!              ─▶ certificate
//! ```
//!
//! The token is sent only to a server that has proved to be the one it is for.

mod pin;
mod token;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use clap::Args;
use prepull_api::enroll::{ENROLL_PATH, EnrollRequest, IssuedCertificate, JoinTokenError, SubjectForm};
use prepull_api::task::NodeName;
use prepull_api::wire::TUNNEL_PATH;
use prepull_registry::Proxies;

use crate::cloud::endpoint::{
    BadUrl, ENROLL_SCHEME, RequestError, TUNNEL_SCHEME, Urls, parse_enroll_url, parse_host, parse_tunnel_url,
    post_to_any,
};
use crate::cloud::identity::{
    Connection, DEFAULT_STATE_DIR, Identity, IdentityError, StateDir, check_issued,
};
use pin::PinnedCa;
pub use token::{SecretArg, TokenArgs};

/// cloudcore's default port for the tunnel.
const TUNNEL_PORT: u16 = 10_000;
/// cloudcore's default port for enrolment.
const ENROLL_PORT: u16 = 10_002;

/// How often a join waits for a cloud that asks for it by `Retry-After`.
const MOST_WAITS: usize = 3;
/// Longest such wait. The cloud admits a node once a minute; if it asks for more, the caller decides.
const LONGEST_WAIT: Duration = Duration::from_secs(120);

/// The arguments of `join`.
#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Examples:\n  edgecore-prepull join --server cloud.example --node-name edge-1 --token TOKEN\n  \
                        edgecore-prepull join --server cloud-a.example,cloud-b.example --node-name edge-1 --token-file -\n\n\
                        The token comes from `kubectl prepull tokens create` and is best given in PREPULL_TOKEN or \
                        in a file: arguments can be seen by every user of this machine."
)]
pub struct JoinArgs {
    /// Host of cloudcore: short for --enroll-url https://HOST:10002 and --tunnel-url wss://HOST:10000/v1/edge.
    /// Several, repeated or separated by commas, are tried in turn; so are several URLs.
    #[arg(long, value_name = "HOST", env = "PREPULL_SERVER", value_delimiter = ',', value_parser = parse_server)]
    pub server: Vec<String>,
    /// URL for enrolling [default: from --server].
    #[arg(long, value_name = "URL", env = "PREPULL_ENROLL_URL", value_delimiter = ',', value_parser = parse_enroll_url)]
    pub enroll_url: Vec<String>,
    /// URL of the tunnel [default: from --server].
    #[arg(long, value_name = "URL", env = "PREPULL_TUNNEL_URL", value_delimiter = ',', value_parser = parse_tunnel_url)]
    pub tunnel_url: Vec<String>,
    /// The join token.
    #[command(flatten)]
    pub token: TokenArgs,
    /// Name of this machine's Node object.
    #[arg(long, value_name = "NAME", env = "PREPULL_NODE_NAME")]
    pub node_name: String,
    /// Directory for the agent's state.
    #[arg(long, value_name = "DIR", env = "PREPULL_STATE_DIR", default_value = DEFAULT_STATE_DIR)]
    pub state_dir: PathBuf,
    /// Replace the identity of another node in the state directory.
    #[arg(long)]
    pub force: bool,
    /// Ask for no other certificate if this node has joined already and its own is valid, or can still be renewed, even if
    /// the token has expired: for scripts that run at every start. An expired one is renewed, and a changed address of cloudcore
    /// is stored.
    #[arg(long, env = "PREPULL_UNLESS_JOINED", conflicts_with = "force")]
    pub unless_joined: bool,
}

impl JoinArgs {
    /// What is missing on the command line, if there is neither a host nor both URLs. clap would name only one of the two ways.
    pub(crate) fn missing_cloud(&self) -> Option<&'static str> {
        let is_named = !self.server.is_empty() || !(self.enroll_url.is_empty() || self.tunnel_url.is_empty());
        (!is_named).then_some(
            "no cloudcore is named: give --server HOST, or both --enroll-url URL and --tunnel-url URL",
        )
    }
}

/// The result of joining.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joined {
    /// The node as which this machine joined.
    pub node: NodeName,
    /// The end of the certificate's validity; it is renewed long before.
    pub not_after: SystemTime,
    /// The directory that holds the identity.
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
    /// `--node-name` is not a valid name of a node.
    #[error(
        "--node-name {0:?} is not a node's name: lower-case letters, digits, '-' and '.', as in `kubectl get nodes`"
    )]
    NodeName(String),
    /// `--token` is not a join token.
    #[error("--token: {0}")]
    Token(#[from] JoinTokenError),
    /// `--token-file` has no join token.
    #[error("--token-file {}: {reason}", file.display())]
    TokenFile {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// There is no token.
    #[error(
        "no join token is given: set PREPULL_TOKEN, or give --token-file FILE (`kubectl prepull tokens create` prints \
         one)"
    )]
    NoToken,
    /// A URL cannot be dialled, or there is none.
    #[error(transparent)]
    Url(#[from] BadUrl),
    /// This machine has joined as another node.
    #[error(
        "{} holds the identity of node {node}, and not of {wanted}: give --node-name {node}, or {wanted} a --state-dir \
         of its own, or --force to give {node} up",
        dir.display()
    )]
    OtherNode {
        /// The node as which it has joined.
        node: NodeName,
        /// The node as which it should join now.
        wanted: NodeName,
        /// The state directory.
        dir: PathBuf,
    },
    /// The server refused the token, and this node has a valid certificate already.
    #[error(
        "node {node} has joined until {}, when the certificate in {} ends; the agent renews it long before, so there is nothing \
         to do. To join again anyway, use a new token: {refusal}",
        humantime::format_rfc3339_seconds(*not_after), dir.display()
    )]
    JoinedAlready {
        /// The node as which it has joined.
        node: NodeName,
        /// The end of the certificate's validity.
        not_after: SystemTime,
        /// The state directory.
        dir: PathBuf,
        /// Why the server issued no other certificate.
        refusal: RequestError,
    },
    /// No server answered, or one refused.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The files of the identity cannot be read or written.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The certificate request could not be made.
    #[error("making a certificate request: {0}")]
    Csr(#[from] rcgen::Error),
    /// The certificate that the server issued cannot be used.
    #[error("the certificate that the server issued cannot be used: {0}")]
    Answer(&'static str),
    /// rustls could not be set up.
    #[error("setting up TLS: {0}")]
    Tls(#[from] rustls::Error),
}

/// Joins at the first server that answers, directly or through the environment's proxy. It's safe to repeat: the key
/// stays the same until a certificate has arrived, so any server repeats an answer that was lost.
pub async fn run(args: JoinArgs) -> Result<Joined, JoinError> {
    run_through(args, &Proxies::from_env()).await
}

/// As [`run`], with these proxies.
pub(crate) async fn run_through(args: JoinArgs, proxies: &Proxies) -> Result<Joined, JoinError> {
    let JoinArgs { server, enroll_url, tunnel_url, token, node_name, state_dir, force, unless_joined } = args;
    let node = NodeName(node_name);
    if !node.is_valid() {
        return Err(JoinError::NodeName(node.0));
    }
    let (enroll_urls, tunnel_urls) = resolve_urls(&server, enroll_url, tunnel_url);
    if unless_joined
        && let Ok(identity) = Identity::load(&state_dir)
        && identity.node() == node
        // Renew an expired certificate here: the token may have expired long ago, and a token for the fleet doesn't
        // admit a node twice.
        && (!identity.has_expired() || identity.renew(enroll_urls.clone()).await.is_ok())
    {
        // The address of cloudcore may have changed since.
        if !enroll_urls.is_empty() && !tunnel_urls.is_empty() {
            enroll_urls.endpoints_to_dial(ENROLL_SCHEME, proxies)?;
            tunnel_urls.parse_endpoints(TUNNEL_SCHEME)?;
            let connection = Connection { tunnel_urls, enroll_urls, node_name: node.clone() };
            // A full disk keeps no agent from starting with the address that it knows.
            if let Err(error) = StateDir::new(&state_dir).follow_urls(&connection) {
                tracing::warn!(%error, "the changed address of cloudcore is not stored");
            }
        }
        return Ok(Joined { node, not_after: identity.not_after(), state_dir });
    }
    let token = token.read()?.ok_or(JoinError::NoToken)?;
    let endpoints = enroll_urls.endpoints_to_dial(ENROLL_SCHEME, proxies)?;
    tunnel_urls.parse_endpoints(TUNNEL_SCHEME)?;
    let dir = StateDir::new(&state_dir);
    if !force
        && let Some(other) = dir.joined_as()?
        && other != node
    {
        return Err(JoinError::OtherNode { node: other, wanted: node, dir: state_dir });
    }

    let key = dir.requested_key()?;
    let pinned = Arc::new(PinnedCa::new(token.ca));
    let request = EnrollRequest {
        node: node.clone(),
        token: token.bearer(),
        csr: key.csr()?,
        organisation: Some(SubjectForm::Own.organisation().to_owned()),
    };
    let tls = pinned.client_tls()?;
    let answer =
        repeat_after_waits(async || post_to_any(&endpoints, ENROLL_PATH, tls.clone(), &request).await).await;
    let IssuedCertificate { certificate, ca: _, not_after: _ } =
        answer.map_err(|error| explain_refusal(error, &node, state_dir.clone()))?;

    let facts = check_issued(&certificate, &node, &key).map_err(JoinError::Answer)?;
    // Use the CA from the handshake, with its checked hash, rather than the one in the answer.
    let ca = pinned.found_pem().ok_or(JoinError::Answer("the connection had no CA"))?;
    dir.store_connection(&ca, &Connection { tunnel_urls, enroll_urls, node_name: node.clone() })?;
    dir.store_certificate(&certificate)?;
    Ok(Joined { node, not_after: facts.not_after, state_dir })
}

/// Asks again, after the wait, as long as the server asks us to wait.
async fn repeat_after_waits<T>(
    mut ask: impl AsyncFnMut() -> Result<T, RequestError>,
) -> Result<T, RequestError> {
    for _ in 0..MOST_WAITS {
        let answer = ask().await;
        let wait = answer.as_ref().err().and_then(RequestError::retry_after);
        match wait.filter(|wait| *wait <= LONGEST_WAIT) {
            Some(wait) => tokio::time::sleep(wait).await,
            None => return answer,
        }
    }
    ask().await
}

/// Explains a refused token to a node that has already joined.
fn explain_refusal(error: RequestError, node: &NodeName, dir: PathBuf) -> JoinError {
    let is_refused = matches!(error, RequestError::Refused { .. });
    match Identity::load(&dir) {
        Ok(identity) if is_refused && identity.node() == *node && !identity.has_expired() => {
            JoinError::JoinedAlready {
                node: node.clone(),
                not_after: identity.not_after(),
                dir,
                refusal: error,
            }
        }
        _ => JoinError::Request(error),
    }
}

/// Checks `--server`. Accepts an empty text, because an environment variable that is set to nothing counts as unset.
pub(crate) fn parse_server(text: &str) -> Result<String, String> {
    let host = text.trim();
    if host.is_empty() || parse_host(host).is_some() {
        return Ok(host.to_owned());
    }
    Err(format!(
        "--server takes a host, a name or an address, as in cloud.example or 192.0.2.1. URLs, and other ports, are \
         given with --enroll-url https://HOST:PORT and --tunnel-url wss://HOST:PORT{TUNNEL_PATH}"
    ))
}

/// The URLs for enrolling and of the tunnel: as given, or else derived from the servers.
pub(crate) fn resolve_urls(
    servers: &[String],
    enroll_urls: Vec<String>,
    tunnel_urls: Vec<String>,
) -> (Urls, Urls) {
    let derive = |url: fn(&str) -> String| {
        let host = |server: &String| match server.trim() {
            v6 if v6.parse::<std::net::Ipv6Addr>().is_ok() => format!("[{v6}]"),
            other => other.to_owned(),
        };
        let hosts = servers.iter().map(host).filter(|host| !host.is_empty());
        hosts.map(|host| url(&host)).collect::<Urls>()
    };
    let given = |urls: Vec<String>| Some(Urls::from(urls)).filter(|urls| !urls.is_empty());
    (
        given(enroll_urls).unwrap_or_else(|| derive(|host| format!("https://{host}:{ENROLL_PORT}"))),
        given(tunnel_urls)
            .unwrap_or_else(|| derive(|host| format!("wss://{host}:{TUNNEL_PORT}{TUNNEL_PATH}"))),
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Arguments with an invalid token and a server that doesn't exist.
    fn args(state_dir: &std::path::Path, node: &str) -> JoinArgs {
        JoinArgs {
            server: vec!["localhost".into()],
            enroll_url: Vec::new(),
            tunnel_url: Vec::new(),
            token: "expired and forgotten".to_owned().into(),
            node_name: node.into(),
            state_dir: state_dir.to_owned(),
            force: false,
            unless_joined: true,
        }
    }

    /// Stores an identity as `join` does, with a certificate that's valid until the end of the year `until`.
    fn store_identity(state_dir: &std::path::Path, node: &str, until: i32) {
        let dir = StateDir::new(state_dir);
        dir.requested_key().unwrap();
        let mut subject = rcgen::DistinguishedName::new();
        subject.push(rcgen::DnType::CommonName, format!("system:node:{node}"));
        let mut params = rcgen::CertificateParams::default();
        params.distinguished_name = subject;
        params.not_after = rcgen::date_time_ymd(until, 12, 31);
        let pair = std::fs::read_to_string(state_dir.join("pki/client.key.new")).unwrap();
        let certificate = params.self_signed(&rcgen::KeyPair::from_pem(&pair).unwrap()).unwrap().pem();
        let (enroll_urls, tunnel_urls) = resolve_urls(&["localhost".to_owned()], Vec::new(), Vec::new());
        let connection = Connection { tunnel_urls, enroll_urls, node_name: node.into() };
        dir.store_connection(&certificate, &connection).unwrap();
        dir.store_certificate(&certificate).unwrap();
    }

    #[tokio::test]
    async fn unless_joined_needs_no_token_while_valid() {
        let dir = tempfile::tempdir().unwrap();
        assert!(
            matches!(run(args(dir.path(), "edge-1")).await, Err(JoinError::Token(_))),
            "it has not joined"
        );
        store_identity(dir.path(), "edge-1", 2999);
        assert_eq!(run(args(dir.path(), "edge-1")).await.unwrap().node, "edge-1".into());
        let moved = JoinArgs { server: vec!["new.example".to_owned()], ..args(dir.path(), "edge-1") };
        run(moved).await.unwrap();
        let known = Connection::load(dir.path()).unwrap();
        assert_eq!(known.enroll_urls, "https://new.example:10002".into(), "cloudcore has another name");
        let asked = JoinArgs { unless_joined: false, ..args(dir.path(), "edge-1") };
        assert!(matches!(run(asked).await, Err(JoinError::Token(_))), "it was asked to join again");
        assert!(run(args(dir.path(), "edge-2")).await.is_err(), "another node has joined");
        store_identity(dir.path(), "edge-1", 2020);
        assert!(matches!(run(args(dir.path(), "edge-1")).await, Err(JoinError::Token(_))), "it has expired");
    }

    #[tokio::test(start_paused = true)]
    async fn waits_as_long_as_the_cloud_asks() {
        let refused = |seconds| RequestError::Refused {
            authority: "cloud:10002".to_owned(),
            status: hyper::StatusCode::TOO_MANY_REQUESTS,
            reason: "wait".to_owned(),
            retry_after: Some(Duration::from_secs(seconds)),
        };
        for (waits, is_answered, seconds) in [
            (vec![], true, 0),
            (vec![40, 2], true, 42),
            (vec![1; MOST_WAITS], true, 3),
            (vec![1; MOST_WAITS + 1], false, 3),
            (vec![121], false, 0),
        ] {
            let (begun, mut asked) = (tokio::time::Instant::now(), waits.iter());
            let answer =
                repeat_after_waits(async || asked.next().map_or(Ok(()), |wait| Err(refused(*wait)))).await;
            assert_eq!((answer.is_ok(), begun.elapsed().as_secs()), (is_answered, seconds), "{waits:?}");
        }
    }

    #[test]
    fn missing_urls_derive_from_the_server() {
        for (servers, enroll_urls, enroll, tunnel) in [
            ("cloud.example", "", "https://cloud.example:10002", "wss://cloud.example:10000/v1/edge"),
            ("2001:db8::1", "", "https://[2001:db8::1]:10002", "wss://[2001:db8::1]:10000/v1/edge"),
            ("a", "https://b,https://c", "https://b,https://c", "wss://a:10000/v1/edge"),
            ("a,b", "", "https://a:10002,https://b:10002", "wss://a:10000/v1/edge,wss://b:10000/v1/edge"),
        ] {
            let list = |text: &str| -> Vec<String> { text.split(',').map(str::to_owned).collect() };
            let (enrolling, tunnelling) = resolve_urls(&list(servers), list(enroll_urls), Vec::new());
            assert_eq!((enrolling.to_string().as_str(), tunnelling.to_string().as_str()), (enroll, tunnel));
        }
    }

    /// What clap makes of these words.
    fn parsed(words: &str) -> JoinArgs {
        use clap::Parser;
        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            join: JoinArgs,
        }
        let rest = ["--token", "t", "--node-name", "n"];
        Line::try_parse_from(["join"].into_iter().chain(words.split_whitespace()).chain(rest)).unwrap().join
    }

    #[test]
    fn servers_are_repeated_or_separated_by_commas() {
        for words in ["--server a,b", "--server a --server b"] {
            assert_eq!(parsed(words).server, ["a", "b"]);
        }
    }

    #[test]
    fn a_cloud_is_a_host_or_both_urls() {
        for (words, is_missing) in [
            ("", true),
            ("--enroll-url https://a", true),
            ("--tunnel-url wss://a", true),
            ("--enroll-url https://a --tunnel-url wss://a", false),
            ("--server a", false),
            ("--server a --tunnel-url wss://b", false),
        ] {
            assert_eq!(parsed(words).missing_cloud().is_some(), is_missing, "{words}");
        }
    }
}
