//! Mirrors, private CAs, client certificates and TLS without verification, as hosts.toml has them.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use prepull_registry::manifest::{Descriptor, OCI_MANIFEST};
use prepull_registry::{ErrorKind, digest::sha256};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;

use crate::server::{Reply, Seen, Server, client, drain, reply, repository, write_hosts};

const CONTENT: &[u8] = b"0123456789";

fn blob() -> Descriptor {
    Descriptor { digest: sha256(CONTENT), size: CONTENT.len() as u64, ..Descriptor::default() }
}

fn manifest(_: &Seen) -> Reply {
    let digest = sha256(b"m");
    reply(
        200,
        &[("Docker-Content-Digest", &digest), ("Content-Type", OCI_MANIFEST), ("Content-Length", "1")],
        "",
    )
}

struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// Certificate and key in PEM.
    fn issue(&self, name: &str) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let certificate =
            CertificateParams::new(vec![name.to_owned()]).unwrap().signed_by(&key, &self.0).unwrap();
        (certificate.pem(), key.serialize_pem())
    }

    /// A server for 127.0.0.1, which may want certificates of this authority of its clients.
    fn acceptor(&self, wants_clients: bool) -> TlsAcceptor {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
        let builder = builder.with_safe_default_protocol_versions().unwrap();
        let (certificate, key) = self.issue("127.0.0.1");
        let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()];
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(self.0.der().clone()).unwrap();
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build().unwrap();
        let builder = if wants_clients {
            builder.with_client_cert_verifier(verifier)
        } else {
            builder.with_no_client_auth()
        };
        TlsAcceptor::from(Arc::new(builder.with_single_cert(chain, key).unwrap()))
    }
}

/// Resolves `r.example/team/app:v1` with this hosts.toml.
async fn resolve(hosts: &Path, text: &str) -> Result<(), ErrorKind> {
    write_hosts(hosts, "r.example", text);
    let resolved = repository(&client(hosts), "r.example/team/app:v1", None).resolve().await;
    resolved.map(drop).map_err(|error| error.kind)
}

#[tokio::test]
async fn every_tls_setting_of_a_host_works() {
    let authority = Authority::new();
    let hosts = tempfile::tempdir().unwrap();
    let dir = hosts.path().join("r.example");
    std::fs::create_dir(&dir).unwrap();
    let (certificate, key) = authority.issue("node");
    std::fs::write(dir.join("both.pem"), format!("{certificate}{key}")).unwrap();
    std::fs::write(dir.join("client.pem"), certificate).unwrap();
    std::fs::write(dir.join("client.key"), key).unwrap();
    std::fs::write(dir.join("ca.pem"), authority.0.pem()).unwrap();
    std::fs::write(dir.join("other.pem"), Authority::new().0.pem()).unwrap();
    let open = Server::start_with(Some(authority.acceptor(false)), manifest).await;
    let closed = Server::start_with(Some(authority.acceptor(true)), manifest).await;

    for (server, text, expected) in [
        (&open, "", Err(ErrorKind::NoConnection)),
        (&open, "ca = \"other.pem\"", Err(ErrorKind::NoConnection)),
        (&open, "ca = \"ca.pem\"", Ok(())),
        (&open, "ca = [\"other.pem\", \"ca.pem\"]", Ok(())),
        (&open, "skip_verify = true", Ok(())),
        (&open, "skip_verify = false", Err(ErrorKind::NoConnection)),
        (&closed, "ca = \"ca.pem\"", Err(ErrorKind::NoConnection)),
        (&closed, "ca = \"ca.pem\"\nclient = [[\"client.pem\", \"client.key\"]]", Ok(())),
        (&closed, "ca = \"ca.pem\"\nclient = \"both.pem\"", Ok(())),
        (&closed, "ca = \"ca.pem\"\nclient = [\"both.pem\"]", Ok(())),
        (&closed, "ca = \"ca.pem\"\nclient = \"client.pem\"", Err(ErrorKind::Unsupported)),
    ] {
        let text = format!("server = \"https://{}\"\n{text}\n", server.at);
        assert_eq!(resolve(hosts.path(), &text).await, expected, "{text}");
    }
}

#[tokio::test]
async fn docker_certificates_count_without_hosts_toml() {
    let authority = Authority::new();
    let closed = Server::start_with(Some(authority.acceptor(true)), manifest).await;
    let hosts = tempfile::tempdir().unwrap();
    let dir = hosts.path().join(closed.at.to_string().replace(':', "_") + "_");
    std::fs::create_dir(&dir).unwrap();
    let (certificate, key) = authority.issue("node");
    std::fs::write(dir.join("client.cert"), certificate).unwrap();
    std::fs::write(dir.join("client.key"), key).unwrap();
    std::fs::write(dir.join("ca.crt"), authority.0.pem()).unwrap();
    let image = format!("{}/team/app:v1", closed.at);
    let repository = repository(&client(hosts.path()), &image, None);
    repository.resolve().await.unwrap();
    assert!(repository.has_machine_credential());
}

#[tokio::test]
async fn plain_http_is_tried_as_containerd_does() {
    let server = Server::start(manifest).await;
    let hosts = tempfile::tempdir().unwrap();
    // No hosts.toml: the registry is on the node itself.
    let image = format!("{}/team/app:v1", server.at);
    repository(&client(hosts.path()), &image, None).resolve().await.unwrap();
    // For any other, TLS means TLS.
    let text = format!("server = \"https://{}\"\n", server.at);
    assert_eq!(resolve(hosts.path(), &text).await, Err(ErrorKind::NoConnection));
}

#[tokio::test]
async fn capable_mirrors_are_asked_first() {
    let mirror = Server::start(|seen| {
        if seen.target.contains("/blobs/") { reply(200, &[], CONTENT) } else { reply(500, &[], "") }
    })
    .await;
    let registry = Server::start(manifest).await;
    let hosts = tempfile::tempdir().unwrap();
    let of_mirror = "capabilities = [\"pull\"]\n[host.\"http://MIRROR\".header]\nx-own = \"canary\"\n";
    let text = format!("server = \"http://{}\"\n[host.\"http://MIRROR\"]\n{of_mirror}", registry.at);
    let at = mirror.at.to_string();
    write_hosts(hosts.path(), "r.example_5000_", &text.replace("MIRROR", &at));
    let repository = repository(&client(hosts.path()), "r.example:5000/team/app:v1", None);

    repository.resolve().await.unwrap();
    assert_eq!(
        (mirror.seen().len(), registry.seen().len()),
        (0, 1),
        "a tag is not asked of a mirror that only pulls"
    );
    let stream = repository.fetch_blob(&blob(), 0, &[]).await.unwrap();
    assert_eq!(stream.host().to_string(), at);
    let host = stream.host().clone();
    assert_eq!(drain(stream).await.0, CONTENT);
    let target = format!("/v2/team/app/blobs/{}?ns=r.example%3A5000", sha256(CONTENT));
    let seen = mirror.seen();
    assert_eq!((seen[0].target.as_str(), seen[0].header("x-own")), (target.as_str(), "canary"));

    // A mirror that has sent wrong content is asked last; here the registry does not have the blob.
    let stream = repository.fetch_blob(&blob(), 0, std::slice::from_ref(&host)).await.unwrap();
    assert_eq!((stream.host(), registry.seen().len(), mirror.seen().len()), (&host, 2, 2));
    assert_eq!(registry.seen()[1].header("x-own"), "");
}

#[tokio::test]
async fn a_mirror_that_fails_is_followed_by_the_next_endpoint() {
    for status in [401, 403, 404, 429, 500] {
        let mirror = Server::start(move |_| reply(status, &[], "")).await;
        let registry = Server::start(|seen| {
            if seen.target.contains("/blobs/") { reply(200, &[], CONTENT) } else { manifest(seen) }
        })
        .await;
        let hosts = tempfile::tempdir().unwrap();
        let text = format!("server = \"http://{}\"\n[host.\"http://{}\"]\n", registry.at, mirror.at);
        write_hosts(hosts.path(), "r.example", &text);
        let repository = repository(&client(hosts.path()), "r.example/team/app:v1", None);
        repository.resolve().await.unwrap();
        let stream = repository.fetch_blob(&blob(), 0, &[]).await.unwrap();
        assert_eq!(stream.host().to_string(), registry.at.to_string(), "{status}");
        assert_eq!(mirror.seen().len(), 2, "{status}");
    }
}

#[tokio::test]
async fn a_refusal_decides_for_no_silent_endpoint() {
    let lacks = Server::start(|_| reply(404, &[], "")).await;
    let busy = Server::start(|_| reply(503, &[], "")).await;
    let silent = SocketAddr::from(([127, 0, 0, 1], 1));
    for (status, registry, undecided) in [
        (404, silent, true),
        (401, silent, true),
        (403, busy.at, true),
        (401, lacks.at, false),
        (404, lacks.at, false),
    ] {
        let mirror = Server::start(move |_| reply(status, &[], "")).await;
        let hosts = tempfile::tempdir().unwrap();
        let text = format!("server = \"http://{registry}\"\n[host.\"http://{}\"]\n", mirror.at);
        write_hosts(hosts.path(), "r.example", &text);
        let repository = repository(&client(hosts.path()), "r.example/team/app:v1", None);
        let expected = if status == 404 { ErrorKind::NotFound } else { ErrorKind::Unauthorized };
        for error in [
            repository.resolve().await.unwrap_err(),
            repository.fetch_manifest(&blob()).await.unwrap_err(),
            repository.fetch_blob(&blob(), 0, &[]).await.map(drop).unwrap_err(),
        ] {
            assert_eq!((error.kind, error.undecided), (expected, undecided), "{error:?}");
            let names = |at: SocketAddr| error.message.contains(&at.to_string());
            assert_eq!(names(mirror.at) && names(registry), undecided, "{error:?}");
        }
    }
    // The registry itself decides.
    let hosts = tempfile::tempdir().unwrap();
    let text = format!("server = \"http://{}\"\n[host.\"http://{silent}\"]\n", lacks.at);
    write_hosts(hosts.path(), "r.example", &text);
    let error = repository(&client(hosts.path()), "r.example/team/app:v1", None).resolve().await.unwrap_err();
    assert_eq!((error.kind, error.undecided), (ErrorKind::NotFound, false), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn a_mirror_that_trickles_gives_way() {
    let large = Descriptor { digest: sha256(CONTENT), size: 1 << 20, ..Descriptor::default() };
    let trickle = |_: &Seen| Reply::Trickle(b"HTTP/1.1 200 OK\r\nContent-Length: 1048576\r\n\r\n".to_vec());
    let (mirror, registry) = (Server::start(trickle).await, Server::start(trickle).await);
    let hosts = tempfile::tempdir().unwrap();
    let text = format!("server = \"http://{}\"\n[host.\"http://{}\"]\n", registry.at, mirror.at);
    write_hosts(hosts.path(), "r.example", &text);
    let repository = repository(&client(hosts.path()), "r.example/team/app:v1", None);

    let stream = repository.fetch_blob(&large, 0, &[]).await.unwrap();
    let slow = stream.host().clone();
    let begun = Instant::now();
    let (_, error) = drain(stream).await;
    let error = error.unwrap();
    assert_eq!(error.kind, ErrorKind::TooSlow, "{error}");
    assert!(begun.elapsed() < Duration::from_secs(150), "after {:?}", begun.elapsed());

    // The last endpoint may be as slow as it likes.
    let mut stream = repository.fetch_blob(&large, 0, &[slow]).await.unwrap();
    assert_eq!(stream.host().to_string(), registry.at.to_string());
    while begun.elapsed() < Duration::from_secs(1000) {
        assert_eq!(stream.next().await.unwrap().unwrap().len(), 1);
    }
}

#[test]
fn an_authorization_header_is_the_machines_credential() {
    let hosts = tempfile::tempdir().unwrap();
    for (header, expected) in [("x-own", false), ("authorization", true)] {
        let text = format!(
            "[host.\"http://mirror.example\"]\n[host.\"http://mirror.example\".header]\n{header} = \"a\"\n"
        );
        write_hosts(hosts.path(), "r.example", &text);
        let repository = repository(&client(hosts.path()), "r.example/team/app:v1", None);
        assert_eq!(repository.has_machine_credential(), expected, "{header}");
    }
}
