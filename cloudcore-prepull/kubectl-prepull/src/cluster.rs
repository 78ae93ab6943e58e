//! The cluster of the kubeconfig.

use std::time::Duration;

use anyhow::{Context, anyhow};
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};
use prepull_registry::{Proxies, Proxy};

use crate::problem::{ClusterPlace, explain};
use crate::session::GlobalArgs;

/// How long a watch may go without a byte. While nothing changes, the API server sends a bookmark about once a minute, which kube's
/// watches ask for: one that is silent for longer has lost its connection, and what it shows is old.
const WATCH_TIMEOUT: Duration = Duration::from_secs(90);
/// How long an answer may take with --request-timeout 0.
const LONGEST_PATIENCE: Duration = Duration::from_secs(300);

pub(crate) struct Cluster {
    client: Client,
    watching: Client,
    namespace: String,
    system: String,
    place: ClusterPlace,
}

impl Cluster {
    /// Prepares the connection that the flags name. Nothing is sent yet.
    pub(crate) async fn connect(global: &GlobalArgs) -> anyhow::Result<Self> {
        let (mut config, context) = read_config(global).await?;
        let patience =
            Some(global.request_timeout).filter(|time| !time.is_zero()).unwrap_or(LONGEST_PATIENCE);
        config.connect_timeout = Some(patience);
        config.read_timeout = Some(patience);
        // It would try for minutes, without a word. A watch tries again by itself.
        config.default_retry = false;
        // The timeout counts from the request, not from the last use of the connection.
        config.reset_reader_on_write = true;
        let namespace = global.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
        let place = ClusterPlace { server: config.cluster_url.to_string(), context, patience };
        let prepare = |config: Config| {
            Client::try_from(config)
                .map_err(|error: kube::Error| explain(error.into(), &place))
                .context("the connection to the cluster cannot be prepared")
        };
        let mut of_watches = config.clone();
        of_watches.read_timeout = Some(WATCH_TIMEOUT);
        let watching = prepare(of_watches)?;
        let client = prepare(config)?;
        let system = global.system_namespace.clone();
        Ok(Self { client, watching, namespace, system, place })
    }

    pub(crate) fn client(&self) -> Client {
        self.client.clone()
    }

    /// A client for watches, which may be silent while nothing changes.
    pub(crate) fn watch_client(&self) -> Client {
        self.watching.clone()
    }

    pub(crate) fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The namespace of cloudcore-prepull.
    pub(crate) fn system_namespace(&self) -> &str {
        &self.system
    }

    pub(crate) fn place(&self) -> &ClusterPlace {
        &self.place
    }
}

/// What to do where there is no usable kubeconfig.
const REMEDY: &str = "give --kubeconfig FILE, set KUBECONFIG, or put one at ~/.kube/config";

async fn read_config(global: &GlobalArgs) -> anyhow::Result<(Config, Option<String>)> {
    let GlobalArgs { kubeconfig, context, .. } = global;
    let read = match kubeconfig {
        Some(file) => Kubeconfig::read_from(file),
        None => Kubeconfig::read(),
    };
    let file = match read {
        Ok(file) => file,
        Err(error) => {
            let is_missing = match &error {
                KubeconfigError::FindPath => true,
                KubeconfigError::ReadConfig(error, _) => error.kind() == std::io::ErrorKind::NotFound,
                _ => false,
            };
            if is_missing && kubeconfig.is_none() && context.is_none() {
                // In a pod there is none.
                if let Ok(config) = Config::incluster() {
                    return Ok((config, None));
                }
                return Err(anyhow!(error).context(format!("there is no kubeconfig: {REMEDY}")));
            }
            let what = kubeconfig.as_ref().map_or_else(
                || "the kubeconfig cannot be used".to_owned(),
                |file| format!("--kubeconfig {} cannot be used", file.display()),
            );
            return Err(anyhow!(error).context(what));
        }
    };
    let names: Vec<_> = file.contexts.iter().map(|context| context.name.clone()).collect();
    let chosen = context.clone().or_else(|| file.current_context.clone()).filter(|name| !name.is_empty());
    match (&chosen, context) {
        (Some(name), asked) if !names.contains(name) => {
            let flag = if asked.is_some() { "--context" } else { "current-context" };
            let known = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            return Err(anyhow!("{flag} {name}: the kubeconfig has no such context; it has {known}"));
        }
        (None, _) => {
            return Err(anyhow!(
                "the kubeconfig has no current context: give --context, or `kubectl config use-context NAME`"
            ));
        }
        _ => {}
    }
    let is_proxy_given = |name: &str| {
        let cluster = file.clusters.iter().find(|cluster| cluster.name == name);
        cluster
            .and_then(|cluster| cluster.cluster.as_ref()?.proxy_url.as_ref())
            .is_some_and(|url| !url.is_empty())
    };
    let context_of =
        chosen.as_ref().and_then(|name| file.contexts.iter().find(|context| context.name == *name));
    let cluster =
        context_of.and_then(|context| context.context.as_ref()).map(|context| context.cluster.as_str());
    let has_own_proxy = cluster.is_some_and(is_proxy_given);
    let options = KubeConfigOptions { context: chosen.clone(), ..KubeConfigOptions::default() };
    let config = Config::from_custom_kubeconfig(file, &options).await;
    let mut config = config.with_context(|| {
        format!("context {} of the kubeconfig cannot be used", chosen.as_deref().unwrap_or(""))
    })?;
    if !has_own_proxy {
        // kube compares NO_PROXY with the proxy's host and not with the API server's.
        config.proxy_url = Proxies::from_env().for_uri(&config.cluster_url).map(Proxy::uri_with_user);
    }
    Ok((config, chosen))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::Parser;
    use futures::StreamExt;
    use kube::Api;
    use kube::api::WatchParams;
    use prepull_api::crd::job::ImagePrePullJob;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio::time::Instant;

    use super::*;

    #[derive(Parser)]
    struct ConnectionFlags {
        #[command(flatten)]
        global: GlobalArgs,
    }

    #[tokio::test]
    async fn a_watch_ends_after_90_silent_seconds() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let kubeconfig = tempfile::NamedTempFile::new().unwrap();
        let text = serde_json::json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c", "users": [{ "name": "u", "user": {} }],
            "clusters": [{ "name": "c", "cluster": { "server": format!("http://{}", listener.local_addr().unwrap()) } }],
            "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "u" } }],
        });
        std::fs::write(kubeconfig.path(), text.to_string()).unwrap();
        let file = kubeconfig.path().to_str().unwrap();
        let ConnectionFlags { global } =
            ConnectionFlags::try_parse_from(["kubectl-prepull", "--kubeconfig", file]).unwrap();
        let cluster = Cluster::connect(&global).await.unwrap();
        let answer = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.read(&mut [0; 4096]).await.unwrap();
            let head =
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
            stream.write_all(head.as_bytes()).await.unwrap();
            stream
        };
        let jobs = Api::<ImagePrePullJob>::all(cluster.watch_client());
        let parameters = WatchParams::default();
        let (watch, _open) = tokio::join!(jobs.watch(&parameters, "1"), answer);
        let mut watch = Box::pin(watch.unwrap());
        tokio::time::pause();
        let begun = Instant::now();
        assert!(!matches!(watch.next().await, Some(Ok(_))));
        assert!((89..=90).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
    }
}
