//! Access to registries for the agent's downloads: credentials of each kind, tokens and URLs that expire in the middle
//! of a blob, and certificates.

use std::path::PathBuf;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use prepull_e2e::prelude::*;
use serde_json::{Value, json};

use crate::fetch::{Hand, said};

const USER: &str = "alice";

/// A file for `--docker-config` with one entry for the registry.
fn docker_config(hand: &Hand, registry: &Registry, name: &str, entry: &Value) -> Result<String> {
    let file = hand.containerd.dir().join(format!("{name}.json"));
    std::fs::write(&file, json!({"auths": {registry.host(): entry}}).to_string())?;
    Ok(file.display().to_string())
}

fn auth(password: &str) -> Value {
    json!({"auth": STANDARD.encode(format!("{USER}:{password}"))})
}

/// Pulls an image in one attempt. `happens` is called when half of it has arrived, and the rest needs a new token or
/// URL. Nothing is downloaded twice.
async fn pulls_on_after(
    hand: &Hand,
    through: &Proxy,
    arguments: &[&str],
    happens: impl FnOnce(&str) -> Result<()>,
) -> Result<()> {
    const SIZE: u64 = 16 * MIB;
    let (image, reference) = hand.image("half", &[SIZE])?;
    let layer = image.blobs().last().context("no layer")?;
    through.throttle(Some(8 * MIB));
    let arguments = [arguments, &["--retries", "0", &reference]].concat();
    let pulling = hand.pull(&arguments)?.spawn()?;
    eventually("a half has arrived", SOON, async || {
        let fetched = through.bytes_of(layer);
        ensure!(fetched > SIZE / 2, "{fetched} bytes so far");
        Ok(())
    })
    .await?;
    happens(layer)?;
    through.cut();
    let output = pulling.wait_with_output().await?;
    ensure!(output.status.success(), "{}", said(&output));
    let fetched = through.bytes_of(layer);
    ensure!(fetched <= SIZE * 105 / 100, "{fetched} bytes of {SIZE}");
    let asked = through.records().into_iter().filter(|record| record.path.ends_with(layer.as_str()));
    let asked: Vec<_> = asked.collect();
    let last = asked.last().context("no request")?;
    ensure!(last.range.is_some() && last.status == 206, "{asked:#?}");
    ensure!(hand.containerd.has_image(&reference).await?);
    Ok(())
}

#[tokio::test]
async fn an_expired_token_is_replaced() -> Result<()> {
    let refresh = password("refresh-token");
    let tokens = TokenServer::start(USER, &refresh).await?;
    let hand = Hand::start_on(Registry::start().tokens_of(&tokens), None).await?;
    let config = docker_config(&hand, &hand.registry, "config", &json!({"identitytoken": refresh}))?;
    let mut before = 0;
    pulls_on_after(&hand, &hand.link, &["--docker-config", &config], |_| {
        before = tokens.grants().len();
        hand.link.expire_authorizations();
        Ok(())
    })
    .await?;
    let refused = hand.blob_requests().into_iter().filter(|record| record.status == 401).count();
    ensure!(refused > 0, "the old token was not refused");
    let grants = tokens.grants();
    ensure!(grants.len() > before && grants.iter().all(|grant| grant.given), "{before}, then {grants:?}");
    Ok(())
}

#[tokio::test]
async fn an_expired_url_is_replaced() -> Result<()> {
    let hand = Hand::start().await?;
    let storage = Proxy::for_http(hand.registry.addr())?;
    hand.link.redirect_blobs_to(&storage);
    pulls_on_after(&hand, &storage, &[], |layer| {
        storage.expire_urls();
        // The next one has also expired before it's used.
        storage.fail_next_on(layer, 1, 403);
        Ok(())
    })
    .await?;
    let redirected = hand.blob_requests();
    ensure!(redirected.iter().all(|record| record.status == 307), "{redirected:#?}");
    let refused = storage.records().into_iter().filter(|record| record.status == 403).count();
    assert_eq!(refused, 1, "{:#?}", storage.records());
    Ok(())
}

#[tokio::test]
async fn each_credential_kind_opens_a_registry() -> Result<()> {
    let (secret, refresh) = (password(USER), password("refresh-token"));
    let wrong = password("of-somebody-else");
    let hand = Hand::start_on(Registry::start().user(USER, &secret), None).await?;
    let by_password = &hand.registry;
    let tokens = TokenServer::with_password(USER, &refresh, &secret).await?;
    let by_token = &Registry::start().tokens_of(&tokens).await?;

    let identity = json!({"auth": STANDARD.encode(format!("{USER}:")), "identitytoken": refresh});
    let handed_on = json!({"registrytoken": tokens.pull_token("team/registry-token")?});
    for (name, registry, entry, grants) in [
        ("password", by_password, auth(&secret), &[][..]),
        ("password-for-token", by_token, auth(&secret), &["password"][..]),
        ("identity-token", by_token, identity, &["refresh_token"][..]),
        // A token obtained for another client, which containerd itself couldn't present.
        ("registry-token", by_token, handed_on, &[][..]),
    ] {
        let repository = format!("team/{name}");
        let reference = registry.seed(&Image::small(name)?, &format!("{repository}:v1"))?;
        let config = docker_config(&hand, registry, name, &entry)?;
        let before = tokens.grants().len();
        let summary = hand.pulls(&["--retries", "0", "--docker-config", &config, &reference]).await?;
        ensure!(summary.contains("1 pulled"), "{name}: {summary}");
        let requests = registry.requests().for_repository(&repository);
        assert_eq!(requests.users().into_iter().collect::<Vec<_>>(), [USER], "{name}");
        ensure!(!requests.blob_fetches().is_empty(), "{name}: {requests:?}");
        let granted: std::collections::BTreeSet<_> =
            tokens.grants().split_off(before).into_iter().map(|grant| grant.grant_type).collect();
        assert_eq!(granted.into_iter().collect::<Vec<_>>(), grants, "{name}");
    }

    for (name, registry, entry, says) in [
        ("wrong-password", by_password, auth(&wrong), "401"),
        ("wrong-password-for-token", by_token, auth(&wrong), "401"),
    ] {
        let repository = format!("team/{name}");
        let reference = registry.seed(&Image::small(name)?, &format!("{repository}:v1"))?;
        let config = docker_config(&hand, registry, name, &entry)?;
        let arguments = ["--retries", "0", "--docker-config", &config, &reference];
        let text = said(&hand.pull(&arguments)?.output().await?);
        ensure!(text.contains(": failed: ") && text.contains(says), "{name}: {text}");
        ensure!(!text.contains(CANARY), "{name}: a credential is shown");
        let requests = registry.requests().for_repository(&repository);
        ensure!(requests.blob_fetches().is_empty(), "{name}: {requests:?}");
    }
    Ok(())
}

#[tokio::test]
async fn a_mirror_with_its_own_ca_serves() -> Result<()> {
    let (servers, clients) = (Authority::new("servers")?, Authority::new("clients")?);
    let mirror = Registry::start().with_host("mirror.example").tls(&servers).clients_of(&clients).await?;
    let containerd = Containerd::start("edge-1").await?;
    let link = Proxy::for_tcp(mirror.addr())?;
    let hand = Hand { registry: mirror, link, containerd };
    let image = Image::small("mirrored")?;
    hand.registry.seed(&image, "team/mirrored:v1")?;
    let reference = "upstream.example/team/mirrored:v1";
    let pair: (PathBuf, PathBuf) = clients.server(&clients.place().new_dir("client")?, &["edge-1"])?;
    // The registry itself has no listener.
    let closed = prepull_e2e::ports::Port::reserve()?;
    let route = |client: &str| {
        hand.containerd.own_registry_host("upstream.example", |hosts| {
            let dir = hosts.join("upstream.example");
            std::fs::create_dir_all(&dir)?;
            let (upstream, mirror, ca) = (closed.addr(), hand.link.addr(), servers.file().display());
            let text = format!(
                "server = \"https://{upstream}\"\n[host.\"https://{mirror}\"]\n\
                 capabilities = [\"pull\", \"resolve\"]\nca = \"{ca}\"\n{client}"
            );
            Ok(std::fs::write(dir.join("hosts.toml"), text)?)
        })
    };
    let begun = hand.link.bytes();
    route("")?;
    let text = said(&hand.pull(&["--retries", "0", reference])?.output().await?);
    ensure!(text.contains(": failed: ") && hand.link.bytes() > begun, "without a certificate: {text}");
    assert_eq!(hand.registry.requests().0, [], "without a certificate");

    route(&format!("client = [[\"{}\", \"{}\"]]\n", pair.0.display(), pair.1.display()))?;
    let summary = hand.pulls(&["--retries", "0", reference]).await?;
    ensure!(summary.contains("1 pulled"), "{summary}");
    assert_eq!(hand.containerd.images().await?.get(reference).map(String::as_str), Some(image.digest()));
    let fetches = hand.registry.requests().for_repository("team/mirrored").blob_fetches();
    assert_eq!(fetches.len(), image.blobs().len(), "{fetches:?}");
    Ok(())
}

#[tokio::test]
async fn the_runtime_pulls_where_the_agent_cannot_connect() -> Result<()> {
    let trusted_by_runtime = Authority::new("servers")?;
    let secure = Registry::start().with_host("secure.example").tls(&trusted_by_runtime).await?;
    let hand = Hand::start_on(Registry::start().with_host("harbor.example"), None).await?;
    // The agent's own view leads to an address without a listener, and to a certificate that it doesn't trust.
    let (closed, seen) = (prepull_e2e::ports::Port::reserve()?, hand.containerd.dir().join("seen"));
    for (registry, addr) in [(&hand.registry, closed.addr()), (&secure, secure.addr())] {
        let dir = seen.join(registry.host());
        std::fs::create_dir_all(&dir)?;
        std::fs::write(dir.join("hosts.toml"), format!("server = \"https://{addr}\"\n[host]\n"))?;
    }
    let pull = |retries: &str, more: &[&str], reference: &str| {
        let mut command = tokio::process::Command::new(prepull_e2e::parts::program_path("edgecore-prepull")?);
        command.args(["pull", "--retries", retries, "--runtime-endpoint", &hand.containerd.endpoint()]);
        command.arg("--registry-config-path").arg(&seen).args(more).arg(reference).kill_on_drop(true);
        Ok::<_, anyhow::Error>(command)
    };
    for (registry, error) in [(&hand.registry, "onnection refused"), (&secure, "certificate")] {
        let reference = registry.seed(&Image::small(error)?, "team/seen:v1")?;
        // A limit and `--fetch=agent` still apply.
        for more in [["--max-download-rate", "1MiB"], ["--fetch", "agent"]] {
            let output = pull("0", &more, &reference)?.output().await?;
            let text = said(&output);
            ensure!(output.status.code() == Some(1) && text.contains(error), "{more:?}: {text}");
            ensure!(registry.requests().for_repository("team/seen").blob_fetches().is_empty(), "{more:?}");
        }
        let output = pull("0", &[], &reference)?.output().await?;
        ensure!(output.status.success() && said(&output).contains("1 pulled"), "{}", said(&output));
        ensure!(hand.containerd.has_image(&reference).await?);
    }
    // If the runtime fails as well, we report the agent's error, and a further attempt doesn't ask the runtime again.
    hand.containerd.own_registry_host("harbor.example", |hosts| {
        let dir = hosts.join("harbor.example");
        std::fs::create_dir_all(&dir)?;
        Ok(std::fs::write(
            dir.join("hosts.toml"),
            format!("server = \"http://{}\"\n[host]\n", closed.addr()),
        )?)
    })?;
    let output = pull("1", &[], "harbor.example/team/other:v1")?.output().await?;
    let text = said(&output);
    ensure!(output.status.code() == Some(1) && text.contains("onnection refused"), "{text}");
    ensure!(!text.contains("/v2/"), "these are containerd's words: {text}");
    Ok(())
}

#[tokio::test]
async fn a_snapshotter_elsewhere_can_be_limited() -> Result<()> {
    let containerd = Containerd::start_unpacking_elsewhere("edge-1");
    let hand = Hand::start_with(Registry::start(), containerd).await?;
    let (image, reference) = hand.image("elsewhere", &[MIB, MIB])?;
    let summary = hand.pulls(&["--max-download-rate", "8MiB", &reference]).await?;
    ensure!(summary.contains("1 pulled"), "{summary}");
    ensure!(hand.containerd.dir().join("snapshots/snapshots").read_dir()?.count() >= 2);
    assert_eq!(hand.containerd.images().await?.get(&reference).map(String::as_str), Some(image.digest()));
    Ok(())
}

#[tokio::test]
async fn a_server_alone_is_read_like_containerd() -> Result<()> {
    let hand = Hand::start().await?;
    let image = Image::small("alone")?;
    hand.registry.seed(&image, "team/alone:v1")?;
    // The registry itself refuses, the server has it.
    let upstream = prepull_e2e::ports::Port::reserve()?;
    let host = upstream.addr().to_string();
    hand.containerd.own_registry_host(&host, |hosts| {
        let dir = hosts.join(&host);
        std::fs::create_dir_all(&dir)?;
        Ok(std::fs::write(dir.join("hosts.toml"), format!("server = \"http://{}\"\n", hand.link.addr()))?)
    })?;
    let reference = format!("{host}/team/alone:v1");
    let by_runtime = hand.containerd.pull(&reference, None).await.is_ok();
    let by_agent = hand.pull(&["--retries", "0", &reference])?.output().await?;
    assert_eq!(by_agent.status.success(), by_runtime, "{}", said(&by_agent));
    assert_eq!(by_runtime, !hand.containerd.version().await?.trim_start_matches('v').starts_with("1."));
    Ok(())
}
