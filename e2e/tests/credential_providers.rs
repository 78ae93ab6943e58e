//! The kubelet's credential provider plugins on the edge: the conditions for running them, the use of their answers,
//! and the reports of their failures.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

use prepull_e2e::parts;
use prepull_e2e::prelude::*;
use serde_json::json;

/// Timeout of the plugin that hangs. The others have a minute.
const TIMEOUT: [&str; 2] = ["--image-credential-provider-timeout", "3s"];

/// Plugins with their configuration and a trace of their runs.
struct Plugins {
    _place: Arc<Place>,
    dir: PathBuf,
    providers: Vec<serde_json::Value>,
}

impl Plugins {
    fn new() -> Result<Self> {
        let place = Place::here()?;
        let dir = place.new_dir("plugins")?;
        std::fs::create_dir(dir.join("bin"))?;
        std::fs::set_permissions(dir.join("bin"), PermissionsExt::from_mode(0o755))?;
        Ok(Self { _place: place, dir, providers: Vec::new() })
    }

    /// Adds a plugin that's a shell script, with the requested image in `$image`. Each run adds its name and image to
    /// the trace.
    fn plugin(mut self, name: &str, match_image: &str, script: &str) -> Result<Self> {
        let path = self.dir.join("bin").join(name);
        let trace = self.trace();
        let text = format!(
            "#!/bin/sh\nset -eu\nimage=$(sed 's/.*\"image\":\"\\([^\"]*\\)\".*/\\1/')\n\
             echo {name} \"$image\" >> {}\n{script}\n",
            trace.display()
        );
        std::fs::write(&path, text)?;
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755))?;
        self.providers.push(json!({
            "name": name,
            "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
            "matchImages": [match_image],
            "defaultCacheDuration": "0s",
            "env": [{"name": "PLUGIN_PASSWORD", "value": password(name)}],
        }));
        let config = json!({
            "apiVersion": "kubelet.config.k8s.io/v1",
            "kind": "CredentialProviderConfig",
            "providers": self.providers,
        });
        std::fs::write(self.config(), config.to_string())?;
        Ok(self)
    }

    fn config(&self) -> PathBuf {
        self.dir.join("config.yaml")
    }

    fn bin(&self) -> PathBuf {
        self.dir.join("bin")
    }

    fn trace(&self) -> PathBuf {
        self.dir.join("trace")
    }

    /// Flags for `run` and for `pull`.
    fn flags(&self) -> Vec<String> {
        let path = |path: PathBuf| path.display().to_string();
        vec![
            "--image-credential-provider-config".to_owned(),
            path(self.config()),
            "--image-credential-provider-bin-dir".to_owned(),
            path(self.bin()),
        ]
    }

    /// All runs so far: name of the plugin and image.
    fn runs(&self) -> Vec<String> {
        lines(&self.trace())
    }
}

fn lines(path: &Path) -> Vec<String> {
    std::fs::read_to_string(path).unwrap_or_default().lines().map(str::to_owned).collect()
}

/// The end of a script that returns the credential of a user.
fn gives(user: &str, cache_key_type: &str) -> String {
    let response = json!({
        "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
        "kind": "CredentialProviderResponse",
        "cacheKeyType": cache_key_type,
        "cacheDuration": "1h",
        "auth": {"*.*.*.*:PORT": {"username": user, "password": "PASSWORD"}},
    });
    // The key of the credential must include the port of the image.
    format!(
        "registry=${{image%%/*}}\nsed \"s/PORT/${{registry##*:}}/; s/PASSWORD/$PLUGIN_PASSWORD/\" <<'END'\n{response}\nEND"
    )
}

/// Starts a registry with one user.
async fn registry_of(user: &str) -> Result<Registry> {
    Registry::start().user(user, &password(user)).await
}

fn users(registry: &Registry, repository: &str) -> BTreeSet<String> {
    registry.requests().for_repository(repository).users().into_iter().map(str::to_owned).collect()
}

fn only(user: &str) -> BTreeSet<String> {
    BTreeSet::from([user.to_owned()])
}

/// Starts a cluster, a cloud and an edge with these plugins.
async fn site(plugins: &Plugins, flags: &[&str]) -> Result<(EdgeNode, Cloud, Cluster)> {
    let cluster = Cluster::start().await?;
    let cloud = Cloud::start(&cluster).await?;
    cluster.edge_nodes(&["edge-1"]).await?;
    let of_plugins = plugins.flags();
    let of_plugins: Vec<_> = of_plugins.iter().map(String::as_str).collect();
    let edge = EdgeNode::start(&cluster, &cloud, "edge-1").args(&of_plugins).args(flags).await?;
    Ok((edge, cloud, cluster))
}

fn reason(status: &prepull_api::crd::status::ImagePrePullJobStatus, image: &str) -> Result<String> {
    Ok(status.image("edge-1", image).context("not in the status")?.reason.clone())
}

#[tokio::test]
async fn a_plugin_runs_only_without_a_secret() -> Result<()> {
    let registry = Registry::start().user("vault", &password("vault")).user("own", &password("own")).await?;
    let plugins = Plugins::new()?.plugin("vault", registry.host(), &gives("vault", "Image"))?;
    let (edge, _cloud, cluster) = site(&plugins, &[]).await?;
    let image = Image::small("plugin")?;
    let by_plugin = registry.seed(&image, "team/by-plugin:v1")?;
    let by_secret = registry.seed(&image, "team/by-secret:v1")?;
    let refused = registry.seed(&image, "team/refused:v1")?;
    cluster.registry_secret("default", "own", &[registry.login("own")?]).await?;
    cluster.registry_secret("default", "stale", &[(registry.host(), "own", "changed-since")]).await?;

    cluster.job("by-secret").on(["edge-1"]).images([&by_secret]).secret("default/own").completes().await?;
    assert_eq!(users(&registry, "team/by-secret"), only("own"));
    assert_eq!(plugins.runs(), [""; 0], "a secret was enough");

    let status = cluster.job("by-plugin").on(["edge-1"]).images([&by_plugin]).completes().await?;
    let shown = status.image("edge-1", &by_plugin).context("not in the status")?;
    assert_eq!((shown.status, shown.attempts), (Tristate::True, 1), "{shown:?}");
    assert_eq!(users(&registry, "team/by-plugin"), only("vault"));
    let run = format!("vault {}", registry.image("team/by-plugin"));
    assert_eq!(plugins.runs(), [run.as_str()], "without the tag, as the kubelet asks");

    // A secret is tried first; if the registry refuses it, the plugin is run.
    cluster.job("refused").on(["edge-1"]).images([&refused]).secret("default/stale").completes().await?;
    assert_eq!(users(&registry, "team/refused"), only("vault"));
    assert_eq!(plugins.runs().len(), 2);

    let runs = "edgecore_prepull_credential_provider_execs_total";
    let metrics = edge.metrics().await?;
    assert!((metrics.sum(runs, &[("provider", "vault"), ("outcome", "ok")]) - 2.0).abs() < 0.5);
    let found = Command::new("grep").args(["-rlaF", CANARY]).arg(edge.state_dir()).output()?;
    assert_eq!(String::from_utf8_lossy(&found.stdout), "", "a credential in the state directory");
    ensure!(!edge.agent_log().contains(CANARY), "a credential in the log");
    Ok(())
}

#[tokio::test]
async fn an_answer_is_cached_for_its_scope() -> Result<()> {
    let (shared, each) = (registry_of("shared").await?, registry_of("each").await?);
    let plugins = Plugins::new()?.plugin("shared", shared.host(), &gives("shared", "Registry"))?.plugin(
        "each",
        each.host(),
        &gives("each", "Image"),
    )?;
    let (_edge, _cloud, cluster) = site(&plugins, &[]).await?;
    let image = Image::small("cache")?;
    let mut references = Vec::new();
    for registry in [&shared, &each] {
        for path in ["team/a:v1", "team/b:v1", "team/b:v2"] {
            references.push(registry.seed(&image, path)?);
        }
    }
    let expected = |mut runs: Vec<String>| {
        runs.sort();
        let of_shared = runs.iter().filter(|run| run.starts_with("shared ")).count();
        assert_eq!(of_shared, 1, "one for the registry: {runs:?}");
        let of_each = ["a", "b"].map(|name| format!("each {}", each.image(&format!("team/{name}"))));
        assert_eq!(runs[..2], of_each, "one for each repository");
        assert_eq!(runs.len(), 3);
    };
    // The images are pulled in parallel, and again when every answer is in the cache.
    for name in ["first", "second"] {
        let job = cluster.job(name).on(["edge-1"]).images(&references).policy("Always");
        let status = job.completes().await?;
        for reference in &references {
            let image = status.image("edge-1", reference).context("not in the status")?;
            assert_eq!(image.status, Tristate::True, "{image:?}");
        }
        expected(plugins.runs());
    }
    Ok(())
}

#[tokio::test]
async fn a_hanging_plugin_delays_no_other_pull() -> Result<()> {
    let (locked, open) = (registry_of("alice").await?, Registry::start().await?);
    let plugins = Plugins::new()?;
    let pids = plugins.dir.join("pids");
    let hang = format!("sleep 1000 &\necho $$ $! >> {}\nwait", pids.display());
    let plugins = plugins.plugin("hangs", locked.host(), &hang)?;
    let (mut edge, _cloud, cluster) = site(&plugins, &TIMEOUT).await?;
    let image = Image::small("hangs")?;
    let (needs_it, public) = (locked.seed(&image, "team/app:v1")?, open.seed(&image, "team/app:v1")?);

    let status = cluster.job("hangs").on(["edge-1"]).images([&needs_it, &public]).retries(0).fails().await?;
    assert_eq!(reason(&status, &public)?, "");
    let reason = reason(&status, &needs_it)?;
    let expected = format!("credential provider hangs gave no answer within {} and was killed", TIMEOUT[1]);
    ensure!(reason.contains(&expected) && reason.contains("pulled anonymously"), "{reason}");
    ensure!(edge.agent_log().contains(&expected.replace("credential provider hangs ", "")), "not in the log");
    all_are_gone(&pids, 1).await?;

    // The plugin ends with the agent.
    let _job = cluster.job("again").on(["edge-1"]).images([&needs_it]).retries(0).apply().await?;
    eventually("the plugin runs", SOON, async || {
        ensure!(lines(&pids).len() == 2, "{:?}", lines(&pids));
        Ok(())
    })
    .await?;
    edge.terminate_agent().await?;
    all_are_gone(&pids, 2).await
}

/// Waits until no process of this many runs is left.
async fn all_are_gone(pids: &Path, runs: usize) -> Result<()> {
    let runs_seen = lines(pids);
    assert_eq!(runs_seen.len(), runs);
    for pid in runs_seen.iter().flat_map(|line| line.split_whitespace()) {
        eventually(&format!("process {pid} is gone"), SOON, async || {
            let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            ensure!(state.is_empty() || state.contains(") Z "), "{state}");
            Ok(())
        })
        .await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_failing_plugin_is_named_and_rerun() -> Result<()> {
    let (flaky, broken, babbles) =
        (registry_of("flaky").await?, registry_of("broken").await?, registry_of("babbles").await?);
    let first_fails = format!("[ $(grep -c ^flaky TRACE) -gt 1 ] || exit 1\n{}", gives("flaky", "Image"));
    let plugins = Plugins::new()?;
    let first_fails = first_fails.replace("TRACE", &plugins.trace().display().to_string());
    let fails = "set -x\necho \"$PLUGIN_PASSWORD\" \"$PLUGIN_PASSWORD\" >&2\nexit 7";
    let plugins = plugins
        .plugin("flaky", flaky.host(), &first_fails)?
        .plugin("broken", broken.host(), fails)?
        .plugin("babbles", babbles.host(), "echo \"the password is $PLUGIN_PASSWORD\"")?;
    let (edge, _cloud, cluster) = site(&plugins, &[]).await?;
    let image = Image::small("fails")?;
    let path = "team/app:v1";
    let [flaky, broken, babbles] =
        [flaky.seed(&image, path)?, broken.seed(&image, path)?, babbles.seed(&image, path)?];

    let status =
        cluster.job("fails").on(["edge-1"]).images([&flaky, &broken, &babbles]).retries(1).fails().await?;
    let served = status.image("edge-1", &flaky).context("not in the status")?;
    assert_eq!((served.status, served.attempts), (Tristate::True, 2), "{served:?}");
    for (image, expected) in [
        (&broken, "credential provider broken ended with exit status: 7"),
        (&babbles, "credential provider babbles wrote no valid CredentialProviderResponse: it is not JSON"),
    ] {
        let reason = reason(&status, image)?;
        ensure!(reason.contains(expected) && !reason.contains(CANARY), "{reason}");
    }
    let log = edge.agent_log();
    ensure!(log.contains("provider=broken") && log.contains("exit status: 7"), "not in the log");
    ensure!(!log.contains(CANARY), "a credential in the log");
    Ok(())
}

/// Runs `edgecore-prepull pull`.
async fn pull_by_hand(containerd: &Containerd, flags: &[String], image: &str) -> Result<Output> {
    let mut command = tokio::process::Command::new(parts::program_path("edgecore-prepull")?);
    command.args(["pull", "--retries", "0", "--runtime-endpoint", &containerd.endpoint()]);
    command.args(flags).arg(image).kill_on_drop(true);
    Ok(tokio::time::timeout(Duration::from_secs(60), command.output()).await??)
}

#[tokio::test]
async fn the_pull_command_shows_plugins_stderr() -> Result<()> {
    let (good, bad) = (registry_of("good").await?, registry_of("bad").await?);
    let plugins = Plugins::new()?.plugin("good", good.host(), &gives("good", "Global"))?.plugin(
        "bad",
        bad.host(),
        "echo no such role >&2\nexit 1",
    )?;
    let containerd = Containerd::start("by-hand").await?;
    let image = Image::small("by-hand")?;
    let (served, refused) = (good.seed(&image, "team/app:v1")?, bad.seed(&image, "team/app:v1")?);

    let output = pull_by_hand(&containerd, &plugins.flags(), &served).await?;
    ensure!(output.status.success(), "{output:?}");
    ensure!(containerd.has_image(&served).await?);
    assert_eq!(users(&good, "team/app"), only("good"));

    let output = pull_by_hand(&containerd, &plugins.flags(), &refused).await?;
    assert_eq!(output.status.code(), Some(1));
    let shown = String::from_utf8_lossy(&output.stderr);
    ensure!(shown.contains("no such role"), "{shown}");
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(said.contains("credential provider bad ended with exit status: 1"), "{said}");

    // An invalid configuration is refused before anything is pulled.
    let runs = plugins.runs().len();
    let output = pull_by_hand(&containerd, &plugins.flags()[..2], &served).await?;
    let shown = String::from_utf8_lossy(&output.stderr);
    ensure!(shown.contains("--image-credential-provider-bin-dir is not: set both"), "{shown}");
    std::fs::set_permissions(plugins.bin(), PermissionsExt::from_mode(0o777))?;
    let output = pull_by_hand(&containerd, &plugins.flags(), &served).await?;
    let shown = String::from_utf8_lossy(&output.stderr);
    ensure!(shown.contains("is writable by others than root (mode 777)"), "{shown}");
    assert_eq!((output.status.code(), plugins.runs().len()), (Some(1), runs));
    Ok(())
}
