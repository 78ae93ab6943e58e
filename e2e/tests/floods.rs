//! Floods against the real program, by a client without certificate and token. Honest edges must be connected within
//! ten seconds, joins succeed, and the kubelet's probes are answered. cloudcore-prepull/tests/tunnel/floods.rs tests
//! each kind alone, with figures.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use futures::future::join_all;
use k8s_openapi::api::core::v1::Secret;
use kube::api::Api;
use prepull_e2e::api_proxy::Verb;
use prepull_e2e::flood::{Flood, connect_from, elsewhere};
use prepull_e2e::prelude::*;
use prepull_e2e::{parts, plain_http};
use rcgen::{CertificateParams, KeyPair};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;

/// Edges that come back at the same time.
const EDGES: usize = 100;
/// The bar: all honest edges are connected within this time.
const IN_TIME: Duration = Duration::from_secs(10);
/// Most connections of one flood: together the floods share the open files of this process.
const HELD: usize = 3000;
/// The timeout of the liveness probe in deployment.yaml, and a second for this machine.
const PROBE_TIMEOUT: Duration = Duration::from_secs(4);

/// A client that trusts a CA and has no certificate.
fn trusting(ca: &[u8]) -> Result<Arc<ClientConfig>> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca)?)?;
    Ok(Arc::new(ClientConfig::builder().with_root_certificates(roots).with_no_client_auth()))
}

/// A client that trusts the cloud's CA and has no certificate.
async fn anybody(cluster: &Cluster) -> Result<Arc<ClientConfig>> {
    let secret = Api::<Secret>::namespaced(cluster.client(), "prepull-system").get("prepull-ca").await?;
    let certificate = secret.data.unwrap_or_default().remove("tls.crt").context("the CA has no tls.crt")?;
    trusting(&certificate.0)
}

/// A whole ClientHello.
fn client_hello(tls: &Arc<ClientConfig>) -> Result<Vec<u8>> {
    let mut client = rustls::ClientConnection::new(Arc::clone(tls), ServerName::try_from("localhost")?)?;
    let mut hello = Vec::new();
    client.write_tls(&mut hello)?;
    Ok(hello)
}

/// Sends a request over TLS from an address of this machine, and returns the whole answer.
async fn request(tls: &Arc<ClientConfig>, from: u8, to: SocketAddr, request: &str) -> Result<String> {
    let exchange = async {
        let stream = connect_from(elsewhere(from), to).await?;
        let name = ServerName::try_from("localhost")?;
        let mut stream = TlsConnector::from(Arc::clone(tls)).connect(name, stream).await?;
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        // The server may close without the alert for it.
        let _ = stream.read_to_string(&mut answer).await;
        anyhow::Ok(answer)
    };
    timeout(IN_TIME, exchange).await.context("no answer")?
}

/// A certificate signing request, valid in form.
fn signing_request() -> Result<String> {
    Ok(CertificateParams::default().serialize_request(&KeyPair::generate()?)?.pem()?)
}

/// A request to join with a token of the right form that was never issued.
fn wrong_join(csr: &str, n: u32) -> String {
    let token = format!("{n:012x}.{}", "0".repeat(64));
    let body = serde_json::json!({ "node": "edge-1", "token": token, "csr": csr }).to_string();
    format!("POST /v1/enroll HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

/// Sends wrong tokens from an address, a few at a time, until it is dropped. Counts them.
async fn wrong_tokens(tls: &Arc<ClientConfig>, from: u8, to: SocketAddr, sent: &AtomicU32) {
    let Ok(csr) = signing_request() else { return };
    loop {
        let n = sent.fetch_add(1, Ordering::Relaxed);
        if request(tls, from, to, &wrong_join(&csr, n)).await.is_err() {
            sleep(Duration::from_millis(10)).await;
        }
    }
}

/// Creates a token and joins with it immediately, like a person.
async fn join(cloud: &Cloud, node: &str, state_dir: &Path) -> Result<Duration> {
    let token = cloud.token(node).await?;
    let begun = Instant::now();
    cloud.join(&token, node, state_dir).await?;
    Ok(begun.elapsed())
}

/// Probes like the kubelet, `count` times, and returns the longest time.
async fn probe(cloud: &Cloud, count: usize) -> Result<Duration> {
    let mut longest = Duration::ZERO;
    for _ in 0..count {
        for path in ["/healthz", "/readyz"] {
            let begun = Instant::now();
            let (status, body) = timeout(PROBE_TIMEOUT, plain_http::get(cloud.metrics_addr(), path))
                .await
                .with_context(|| format!("{path}: the kubelet kills the pod"))??;
            ensure!(status == 200, "{path}: {status} {body}");
            longest = longest.max(begun.elapsed());
        }
        sleep(Duration::from_millis(200)).await;
    }
    Ok(longest)
}

/// With few open files, as many systems allow. The leader's probes count, and edges that connect during the flood.
#[tokio::test]
async fn idle_connections_delay_no_probe() -> Result<()> {
    let cluster = Cluster::start().await?;
    cluster.edge_nodes(&["honest"]).await?;
    let cloud = Cloud::start(&cluster).await?;
    let few = Rlimit { current: Some(1024), maximum: Some(1024) };
    prlimit(Pid::from_raw(cloud.process()?.pid().try_into()?), Resource::Nofile, few)?;
    let flood = Flood::start(elsewhere(66), cloud.metrics_addr(), 1000, Vec::new(), HELD)?;
    // More than its limit of open files.
    flood.has_opened(1500).await?;
    let longest = probe(&cloud, 10).await?;
    let begun = Instant::now();
    Intruder::of(&cluster, &cloud, "honest").await?.open_session().await.context("an edge is kept out")?;
    let let_in = begun.elapsed();
    eprintln!(
        "beside {:.0} idle connections a second: probes took up to {longest:?}, an edge {let_in:?}",
        flood.rate()
    );
    ensure!(let_in < IN_TIME && flood.rate() > 300.0);
    Ok(())
}

/// Silent connections, half handshakes, idle metric connections and wrong tokens, each from an address of its own, and
/// some from that of the edges as well. Then a fleet connects at once, a node joins, and we probe.
#[tokio::test]
async fn all_floods_keep_no_edge_out() -> Result<()> {
    let cluster = Cluster::start().await?;
    let cloud = Cloud::start(&cluster).await?;
    let (tls, dir) = (anybody(&cluster).await?, Place::here()?.new_dir("edge-1")?);
    let hello = client_hello(&tls)?;
    let (tunnel, enroll, metrics) = (cloud.tunnel_addr(), cloud.enroll_addr(), cloud.metrics_addr());
    let fleet = Fleet::start(&cluster, &cloud, EDGES).prepare().await?;
    let floods = [
        Flood::start(elsewhere(66), tunnel, 500, Vec::new(), HELD)?,
        Flood::start(elsewhere(1), tunnel, 500, Vec::new(), HELD)?,
        Flood::start(elsewhere(67), tunnel, 300, hello.clone(), HELD)?,
        Flood::start(elsewhere(68), enroll, 300, Vec::new(), HELD)?,
        Flood::start(elsewhere(69), enroll, 100, hello, HELD)?,
        Flood::start(elsewhere(70), metrics, 300, Vec::new(), HELD)?,
    ];
    let sent = AtomicU32::new(0);
    let honest = async {
        // As many as the tunnel has places for silent ones, together.
        for (flood, opened) in floods.iter().zip([1700, 1700, 1000]) {
            flood.has_opened(opened).await?;
        }
        let begun = Instant::now();
        let connected = async {
            let fleet = timeout(IN_TIME, fleet.connect()).await.context("the fleet is kept out")??;
            Ok((fleet, begun.elapsed()))
        };
        tokio::try_join!(connected, join(&cloud, "edge-1", &dir), probe(&cloud, 10))
    };
    let ((_fleet, connected), joined, probed) = tokio::select! {
        honest = honest => honest?,
        () = wrong_tokens(&tls, 71, enroll, &sent) => bail!("no flood of tokens"),
        () = wrong_tokens(&tls, 1, enroll, &sent) => bail!("no flood of tokens"),
    };
    let rates: Vec<_> = floods.iter().map(|flood| flood.rate().round()).collect();
    let memory = cloud.process()?.memory()? / MIB;
    eprintln!(
        "beside {rates:?} connections a second and {sent:?} wrong tokens: {EDGES} edges {connected:?}, a join \
         {joined:?}, probes up to {probed:?}; {memory} MiB"
    );
    ensure!(joined < IN_TIME, "the join took {joined:?}");
    ensure!(rates.iter().sum::<f64>() > 600.0 && sent.into_inner() > 10, "too weak an attack");
    // Far below the limit of the Deployment, although a build without optimisation takes more.
    ensure!(memory < 200, "{memory} MiB");
    Ok(())
}

/// The API server gets a bounded number of them, and a new token still works.
#[tokio::test]
async fn wrong_tokens_refuse_no_valid_one() -> Result<()> {
    let cluster = Cluster::start().await?;
    let api = ApiProxy::start(&cluster, 1)?;
    let cloud = Cloud::start(&cluster).through(&api).await?;
    let (tls, place, sent) = (anybody(&cluster).await?, Place::here()?, AtomicU32::new(0));
    let enroll = cloud.enroll_addr();
    let begun = Instant::now();
    let reads = || api.count(Requests::verbs(&[Verb::Get]).on("secrets"));
    let before = reads();
    let honest = async {
        // More than were ever allowed from one address, and more than may be looked up at the same time.
        while sent.load(Ordering::Relaxed) < 250 {
            sleep(Duration::from_millis(20)).await;
        }
        join(&cloud, "edge-1", &place.new_dir("edge-1")?).await
    };
    let joined = tokio::select! {
        joined = honest => joined?,
        // Enough at a time to exceed the allowed rate of requests to the API server.
        _ = join_all([66, 67, 1].repeat(4).into_iter().map(|from| wrong_tokens(&tls, from, enroll, &sent))) => {
            bail!("no flood of tokens")
        }
    };
    let (sent, reads, took) = (sent.into_inner(), reads() - before, begun.elapsed());
    eprintln!(
        "{sent} wrong tokens in {took:?}, {reads} reads of Secrets; a join beside them took {joined:?}"
    );
    ensure!(joined < IN_TIME);
    // A hundred at the start and twenty a second, and the reads of the test's commands.
    ensure!(f64::from(u32::try_from(reads)?) < 120.0 + 20.0 * took.as_secs_f64(), "{reads} reads");
    Ok(())
}

/// The rights are those of components/metrics-secure, and the tokens those of the API server.
#[tokio::test]
async fn protected_metrics_need_a_right() -> Result<()> {
    let cluster = Cluster::start().await?;
    cluster.apply_file(&parts::workspace().join("manifests/components/metrics-secure/rbac.yaml")).await?;
    let (authority, dir) = (Authority::new("metrics")?, Place::here()?.new_dir("metrics")?);
    let (certificate, key) = authority.server(&dir, &[])?;
    let files =
        [format!("--metrics-cert={}", certificate.display()), format!("--metrics-key={}", key.display())];
    let cloud = Cloud::start(&cluster).args(&["--metrics-secure", &files[0], &files[1]]).await?;
    let tls = trusting(authority.pem().as_bytes())?;
    let token = |kubeconfig: &Path| -> Result<String> {
        let kubeconfig: serde_json::Value = serde_saphyr::from_str(&std::fs::read_to_string(kubeconfig)?)?;
        Ok(kubeconfig["users"][0]["user"]["token"].as_str().context("no token")?.to_owned())
    };
    let (admin, own) = (token(cluster.kubeconfig())?, token(cluster.cloudcore_kubeconfig())?);
    let get = async |path: &str, token: Option<&str>| {
        let header = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
        let text = format!("GET {path} HTTP/1.1\r\nHost: x\r\n{header}\r\n");
        request(&tls, 1, cloud.metrics_addr(), &text).await
    };
    for (path, token, status, text) in [
        ("/metrics", Some(admin.as_str()), "200", "cloudcore_prepull_edge_sessions 0"),
        ("/metrics", Some(own.as_str()), "403", "may not get /metrics"),
        ("/metrics", Some("made-up"), "401", "does not know this token"),
        ("/metrics", None, "401", "a bearer token of the cluster is needed"),
        ("/healthz", None, "200", "ok"),
        ("/readyz", None, "200", "ok"),
    ] {
        let answer = get(path, token).await?;
        ensure!(
            answer.starts_with(&format!("HTTP/1.1 {status}")) && answer.contains(text),
            "{path}: {answer}"
        );
    }
    // The kubelet probes as before, and the metrics can't be read in plain text.
    probe(&cloud, 1).await?;
    let (status, body) = plain_http::get(cloud.metrics_addr(), "/metrics").await?;
    ensure!(status == 403 && body.contains("https"), "{status} {body}");
    ensure!(!cloud.log().contains(&admin), "a token is in the log");
    Ok(())
}
