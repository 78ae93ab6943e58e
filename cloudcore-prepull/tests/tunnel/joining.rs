//! Joining with a token, and renewing the certificate.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use cloudcore_prepull::edges::tokens::Scope;
use edgecore_prepull::cloud::identity::{Connection, Identity, IdentityError};
use edgecore_prepull::cloud::join::{self, JoinError};
use prepull_api::enroll::{CA_PATH, JoinToken};
use prepull_api::wire::Hello;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::agent::{Agent, join, join_args};
use crate::cloud::{Cloud, HOUR};
use crate::raw;

fn read(dir: &Path, name: &str) -> String {
    std::fs::read_to_string(dir.join("pki").join(name)).unwrap()
}

#[tokio::test]
async fn a_failed_join_keeps_the_identity() {
    let cloud = Cloud::start();
    let (dir, token) = (tempfile::tempdir().unwrap(), cloud.token(Scope::Node("edge-1".into())).await);
    let joined = join(&cloud, &token, "edge-1", dir.path()).await.unwrap();
    assert!(joined.to_string().starts_with("joined as node edge-1"), "{joined}");
    let month = SystemTime::now() + 30 * 24 * HOUR;
    assert!(month.duration_since(joined.not_after).unwrap() < HOUR);
    assert_eq!(read(dir.path(), "ca.crt"), cloud.cas().bundle());
    assert_eq!(Identity::load(dir.path()).unwrap().node(), "edge-1".into());
    let connection = Connection::load(dir.path()).unwrap();
    assert_eq!(connection.tunnel_urls, cloud.tunnel_url().into());
    assert_eq!(connection.enroll_urls, cloud.enroll_url().into());

    // A node's token admits no second key.
    let error = join(&cloud, &token, "edge-1", dir.path()).await.unwrap_err().to_string();
    assert!(error.contains("the token has been used with another key"), "{error}");
    let until = humantime::format_rfc3339_seconds(joined.not_after);
    assert!(error.starts_with(&format!("node edge-1 has joined until {until}")), "{error}");
    let elsewhere = tempfile::tempdir().unwrap();
    let error = join(&cloud, &token, "edge-1", elsewhere.path()).await.unwrap_err().to_string();
    assert!(error.contains("used with another key") && !error.contains("has joined until"), "{error}");
    assert_eq!(
        Identity::load(dir.path()).unwrap().node(),
        "edge-1".into(),
        "a join that fails changes nothing"
    );
}

#[tokio::test]
async fn an_unanswered_join_can_be_repeated() {
    let cloud = Cloud::start();
    let (dir, token) = (tempfile::tempdir().unwrap(), cloud.token(Scope::Node("edge-1".into())).await);
    // A proxy that forwards the request and drops the answer.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let lossy = listener.local_addr().unwrap();
    let (enroll, tokens) = (cloud.enroll, cloud.tokens.clone());
    tokio::spawn(async move {
        let (mut edge, _) = listener.accept().await.unwrap();
        let mut cloud = TcpStream::connect(enroll).await.unwrap();
        let used = async {
            while !tokens.stored().list(SystemTime::now()).await.unwrap()[0].used {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let (mut edge_in, mut edge_out) = edge.split();
        let (mut cloud_in, mut cloud_out) = cloud.split();
        let handshake = async {
            // Forwards the TLS handshake. The answer comes only after the token is used.
            let _ = tokio::io::copy(&mut cloud_in, &mut edge_out).await;
        };
        tokio::select! {
            biased;
            () = used => {}
            _ = tokio::io::copy(&mut edge_in, &mut cloud_out) => {}
            () = handshake => {}
        }
    });
    let mut args = join_args(&cloud, &token, "edge-1", dir.path());
    args.enroll_url = vec![format!("https://{lossy}")];
    let first = join::run(args).await;
    // On a busy machine the answer may get through, and nothing was lost.
    if first.is_err() {
        assert!(matches!(Identity::load(dir.path()), Err(IdentityError::NotJoined(_))));
        assert!(cloud.tokens.stored().list(SystemTime::now()).await.unwrap()[0].used);
        join(&cloud, &token, "edge-1", dir.path()).await.unwrap();
    }
    assert_eq!(Identity::load(dir.path()).unwrap().node(), "edge-1".into());
}

#[tokio::test]
async fn a_wrong_server_never_sees_the_token() {
    let cloud = Cloud::start();
    let token = cloud.token(Scope::Fleet).await;
    let dir = tempfile::tempdir().unwrap();

    // Another installation, with a valid certificate of its own CA, that records what it receives.
    let stranger = Cloud::start();
    let acceptor = TlsAcceptor::from(stranger.identity.enroll_tls());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let recording = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut heard = Vec::new();
        if let Ok(mut stream) = acceptor.accept(stream).await {
            let _ = stream.read_to_end(&mut heard).await;
        }
        heard
    });
    let mut args = join_args(&cloud, &token, "edge-1", dir.path());
    args.enroll_url = vec![format!("https://{address}")];
    let error = join::run(args).await.unwrap_err().to_string();
    assert!(error.contains("the server is not the one that the token is for"), "{error}");
    assert_eq!(recording.await.unwrap(), b"", "no byte of the request was sent");
    assert!(matches!(Identity::load(dir.path()), Err(IdentityError::NotJoined(_))));
}

#[tokio::test]
async fn containing_the_ca_earns_no_trust() {
    let cloud = Cloud::start();
    let token = cloud.token(Scope::Fleet).await;
    let dir = tempfile::tempdir().unwrap();
    // The CA's certificate is public: here it is in the chain of a leaf that it did not sign.
    let own =
        rcgen::generate_simple_self_signed(vec!["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
    let key = rustls_pki_types::PrivatePkcs8KeyDer::from(own.signing_key.serialize_der());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(
            vec![own.cert.der().clone(), cloud.cas().signer().certificate().clone()],
            key.into(),
        )
        .unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let accepted = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        TlsAcceptor::from(Arc::new(config)).accept(stream).await.is_ok()
    });
    let mut args = join_args(&cloud, &token, "edge-1", dir.path());
    args.enroll_url = vec![format!("https://{address}")];
    assert!(matches!(join::run(args).await, Err(JoinError::Request(_))));
    assert!(!accepted.await.unwrap(), "the handshake was refused");
}

#[tokio::test]
async fn a_failed_join_names_its_cause() {
    let cloud = Cloud::start();
    let dir = tempfile::tempdir().unwrap();
    let fleet = cloud.token(Scope::Fleet).await;
    let edge_1 = cloud.token(Scope::Node("edge-1".into())).await;
    let unknown = JoinToken { id: "0".repeat(12), ..fleet.clone() };
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let plain = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let plain_address = plain.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = plain.accept().await {
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
        }
    });
    let port = cloud.enroll.port();
    for (token, node, url, reason) in [
        (&edge_1, "edge-2", None, "the token is for node edge-1"),
        (&unknown, "edge-1", None, "unknown token"),
        (&fleet, "Edge", None, "--node-name \"Edge\" is not a node's name"),
        (&fleet, "edge-1", Some(format!("https://{free}")), "connection refused: is cloudcore running there"),
        (&fleet, "edge-1", Some(format!("https://{plain_address}")), "does not speak TLS"),
        (&fleet, "edge-1", Some(format!("http://127.0.0.1:{port}")), "not a URL of the form https://"),
        (&fleet, "edge-1", Some(format!("https://127.0.0.2:{port}")), "connection refused"),
    ] {
        let mut args = join_args(&cloud, token, node, dir.path());
        args.enroll_url = url.map_or(args.enroll_url, |url| vec![url]);
        let error = join::run(args).await.unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
        assert!(!error.contains(token.secret.expose()), "{error}");
    }
}

#[tokio::test]
async fn a_name_mismatch_lists_the_certificates_names() {
    let cloud = Cloud::start();
    let token = cloud.token(Scope::Fleet).await;
    let dir = tempfile::tempdir().unwrap();
    // The same server at an address that is not in its certificate.
    let listener = TcpListener::bind("127.0.0.2:0").await.unwrap();
    let (other, enroll) = (listener.local_addr().unwrap(), cloud.enroll);
    tokio::spawn(async move {
        let (mut edge, _) = listener.accept().await.unwrap();
        let mut cloud = TcpStream::connect(enroll).await.unwrap();
        let _ = tokio::io::copy_bidirectional(&mut edge, &mut cloud).await;
    });
    let mut args = join_args(&cloud, &token, "edge-1", dir.path());
    args.enroll_url = vec![format!("https://{other}")];
    let error = join::run(args).await.unwrap_err().to_string();
    assert!(error.contains("not for 127.0.0.2 but for localhost, 127.0.0.1, ::1, cloud.example"), "{error}");
    assert!(error.contains("--advertise 127.0.0.2"), "{error}");
}

#[tokio::test]
async fn only_force_replaces_another_nodes_identity() {
    let cloud = Cloud::start();
    let (dir, token) = (tempfile::tempdir().unwrap(), cloud.token(Scope::Fleet).await);
    join(&cloud, &token, "edge-1", dir.path()).await.unwrap();
    let error = join(&cloud, &token, "edge-2", dir.path()).await.unwrap_err().to_string();
    assert!(error.contains("holds the identity of node edge-1, and not of edge-2"), "{error}");
    assert_eq!(Identity::load(dir.path()).unwrap().node(), "edge-1".into());
    let mut args = join_args(&cloud, &token, "edge-2", dir.path());
    args.force = true;
    join::run(args).await.unwrap();
    assert_eq!(Identity::load(dir.path()).unwrap().node(), "edge-2".into());
    // Who has joined joins again with a token of its own.
    let error = join(&cloud, &token, "edge-2", dir.path()).await.unwrap_err().to_string();
    assert!(error.contains("node edge-2 has joined before"), "{error}");
    let own = cloud.token(Scope::Node("edge-2".into())).await;
    join(&cloud, &own, "edge-2", dir.path()).await.unwrap();
}

#[tokio::test]
async fn a_renewed_certificate_needs_no_restart() {
    let mut cloud = Cloud::start();
    let mut agent = Agent::start(&cloud, "edge-1", None).await;
    agent.connected(Hello::default()).await;
    let (_, first, _) = cloud.up().await;
    let not_after = agent.identity.not_after();
    tokio::time::sleep(Duration::from_millis(1100)).await; // certificates have whole seconds
    agent.identity.renew(&cloud.enroll_url()).await.unwrap();
    assert!(agent.identity.not_after() > not_after);
    agent.disconnected().await;
    agent.connected(Hello::default()).await;
    // The old session's end and the new one's beginning, in either order.
    let mut sessions = Vec::new();
    for _ in 0..2 {
        match cloud.event().await {
            prepull_engine::fleet::session::SessionEvent::Up { session, .. } => {
                sessions.push(("up", session > first));
            }
            prepull_engine::fleet::session::SessionEvent::Down { session, .. } => {
                sessions.push(("down", session > first));
            }
            other @ prepull_engine::fleet::session::SessionEvent::Message { .. } => panic!("{other:?}"),
        }
    }
    sessions.sort_unstable();
    assert_eq!(sessions, [("down", false), ("up", true)]);
}

#[tokio::test]
async fn a_due_certificate_is_renewed() {
    let cloud = Cloud::start();
    let (dir, token) = (tempfile::tempdir().unwrap(), cloud.token(Scope::Fleet).await);
    join(&cloud, &token, "edge-1", dir.path()).await.unwrap();
    // Ten minutes old because it is backdated, with 200 s left: past two thirds of its lifetime.
    let key = rcgen::KeyPair::from_pem(&read(dir.path(), "client.key")).unwrap();
    let csr = rcgen::CertificateParams::default().serialize_request(&key).unwrap().pem().unwrap();
    let aged = cloud.certificate(&csr, "edge-1", Duration::from_secs(200), SystemTime::now());
    std::fs::write(dir.path().join("pki/client.crt"), aged).unwrap();
    let identity = Identity::load(dir.path()).unwrap();
    let soon = SystemTime::now() + HOUR;
    assert!(identity.not_after() < soon);
    let keeping = tokio::spawn(identity.clone().keep_renewed(cloud.enroll_url(), cloud.shutdown.clone()));
    let renewed = async {
        while identity.not_after() < soon {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(crate::cloud::SOON, renewed).await.unwrap();
    assert_eq!(Identity::load(dir.path()).unwrap().not_after(), identity.not_after());
    cloud.shutdown.cancel();
    keeping.await.unwrap();
}

/// Replaces the node's certificate by one for the same key that expired so long ago.
fn expire(cloud: &Cloud, dir: &Path, ago: Duration) {
    let key = rcgen::KeyPair::from_pem(&read(dir, "client.key")).unwrap();
    let csr = rcgen::CertificateParams::default().serialize_request(&key).unwrap().pem().unwrap();
    let expired = cloud.certificate(&csr, "edge-1", HOUR, SystemTime::now() - HOUR - ago);
    std::fs::write(dir.join("pki/client.crt"), expired).unwrap();
}

const DAY: Duration = Duration::from_secs(24 * 3600);

#[tokio::test]
async fn an_expired_certificate_renews_within_the_grace() {
    let mut cloud = Cloud::start();
    let (dir, token) = (tempfile::tempdir().unwrap(), cloud.token(Scope::Fleet).await);
    join(&cloud, &token, "edge-1", dir.path()).await.unwrap();
    expire(&cloud, dir.path(), 89 * DAY);
    let mut agent = Agent::of(&cloud, Identity::load(dir.path()).unwrap());
    assert!(agent.identity.has_expired());
    let keeping = agent.identity.clone().keep_renewed(cloud.enroll_url(), cloud.shutdown.clone());
    tokio::spawn(keeping);
    agent.connected(Hello::default()).await;
    assert_eq!(cloud.up().await.0, "edge-1".into());
    assert!(!Identity::load(dir.path()).unwrap().has_expired());
}

#[tokio::test]
async fn expiry_beyond_the_grace_needs_a_join() {
    let cloud = Cloud::start();
    let (dir, token) = (tempfile::tempdir().unwrap(), cloud.token(Scope::Fleet).await);
    join(&cloud, &token, "edge-1", dir.path()).await.unwrap();
    expire(&cloud, dir.path(), 91 * DAY);
    let identity = Identity::load(dir.path()).unwrap();
    let error = identity.renew(&cloud.enroll_url()).await.unwrap_err().to_string();
    assert!(error.contains("edge-1 expired at") && error.contains("join again with a new token"), "{error}");
    let own = cloud.token(Scope::Node("edge-1".into())).await;
    join(&cloud, &own, "edge-1", dir.path()).await.unwrap();
    assert!(!Identity::load(dir.path()).unwrap().has_expired());
}

#[tokio::test]
async fn another_cas_expired_certificate_renews_nothing() {
    let (cloud, stranger) = (Cloud::start(), Cloud::start());
    let refused = async |credentials: &raw::Credentials| {
        let stream = TcpStream::connect(cloud.enroll).await.unwrap();
        let name = rustls_pki_types::ServerName::try_from("localhost").unwrap();
        let tls = raw::tls(&cloud, Some(credentials));
        let mut stream = TlsConnector::from(tls).connect(name, stream).await.unwrap();
        let _ = stream.write_all(b"POST /v1/renew HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}").await;
        let mut answer = Vec::new();
        // With TLS 1.3, the alert is met when something is read.
        stream.read_to_end(&mut answer).await.is_err() && answer.is_empty()
    };
    let past = SystemTime::now() - 2 * HOUR;
    assert!(refused(&raw::Credentials::until(&stranger, "edge-1", HOUR, past)).await);
    let own = raw::Credentials::until(&cloud, "edge-1", HOUR, past);
    assert!(!refused(&own).await, "otherwise the rest proves nothing");
}

#[tokio::test]
async fn unless_joined_renews_without_a_token() {
    let cloud = Cloud::start();
    let (dir, token) = (tempfile::tempdir().unwrap(), cloud.token(Scope::Fleet).await);
    join(&cloud, &token, "edge-1", dir.path()).await.unwrap();
    expire(&cloud, dir.path(), DAY);
    let mut args = join_args(&cloud, &token, "edge-1", dir.path());
    args.token = "expired and forgotten".to_owned().into();
    args.unless_joined = true;
    let joined = join::run(args).await.unwrap();
    assert!(joined.not_after > SystemTime::now() + DAY, "{joined}");
}

#[tokio::test]
async fn a_resumed_session_cannot_renew() {
    let cloud = Cloud::start();
    let tls = raw::tls(&cloud, Some(&raw::Credentials::of(&cloud, "edge-1")));
    for _ in 0..2 {
        let stream = TcpStream::connect(cloud.enroll).await.unwrap();
        let name = rustls_pki_types::ServerName::try_from("localhost").unwrap();
        let mut stream = TlsConnector::from(tls.clone()).connect(name, stream).await.unwrap();
        stream.write_all(b"GET /v1/ca HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        let _ = stream.read_to_end(&mut Vec::new()).await;
        assert_eq!(stream.get_ref().1.handshake_kind(), Some(rustls::HandshakeKind::Full));
    }
}

#[tokio::test]
async fn only_renewing_needs_a_client_certificate() {
    let cloud = Cloud::start();
    let request = |head: &'static str, tls| async move {
        let stream = TcpStream::connect(cloud.enroll).await.unwrap();
        let name = rustls_pki_types::ServerName::try_from("localhost").unwrap();
        let mut stream = TlsConnector::from(tls).connect(name, stream).await.unwrap();
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer).await;
        answer
    };
    let nobody = raw::tls(&cloud, None);
    let renew = "POST /v1/renew HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}";
    let answer = request(renew, nobody.clone()).await;
    assert!(answer.starts_with("HTTP/1.1 403") && answer.contains("no client certificate"), "{answer}");
    let get = "GET /v1/ca HTTP/1.1\r\nHost: x\r\n\r\n";
    assert!(get.contains(CA_PATH));
    let answer = request(get, nobody).await;
    assert!(answer.ends_with(&cloud.cas().bundle()), "{answer}");
}
