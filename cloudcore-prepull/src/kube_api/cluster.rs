//! The clients of the API server, and reads that are retried until they succeed.

use std::future::Future;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use hyper::header::{HeaderValue, USER_AGENT};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config, Error};
use prepull_engine::shared::pacing::Backoff;
use rustls_pki_types::CertificateDer;
use tracing::info;

use crate::kube_api::connection::client_builder;
use crate::kube_api::leader::{Fence, Leadership};
use crate::kube_api::refusal::FailureLog;

/// A client from the given kubeconfig, or else from the environment, or else from the pod's ServiceAccount.
pub(crate) async fn client(kubeconfig: Option<&Path>) -> anyhow::Result<Client> {
    let config = client_config(kubeconfig).await?;
    info!(server = %config.cluster_url, "the API server");
    Ok(client_builder(config).context(PREPARE)?.build())
}

/// The CAs by which the API server is verified; none where the machine's own are.
pub(crate) async fn api_server_cas(
    kubeconfig: Option<&Path>,
) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let roots = read_config(kubeconfig).await?.root_cert.unwrap_or_default();
    Ok(roots.into_iter().map(CertificateDer::from).collect())
}

/// Adds the API server's address to an error that comes from the network.
pub(crate) async fn name_where_unreachable<T>(
    outcome: anyhow::Result<T>,
    kubeconfig: Option<&Path>,
) -> anyhow::Result<T> {
    let Err(error) = outcome else { return outcome };
    let of_network = |cause: &(dyn std::error::Error + 'static)| {
        matches!(cause.downcast_ref::<Error>(), Some(Error::Service(_) | Error::HyperError(_)))
            || matches!(cause.downcast_ref::<Box<Error>>().map(AsRef::as_ref), Some(Error::Service(_)))
    };
    if !error.chain().any(of_network) {
        return Err(error);
    }
    let server = client_config(kubeconfig).await?.cluster_url;
    Err(error.context(format!("the API server {server} of the kubeconfig cannot be reached")))
}

/// Like [`client`], but its writes pass only while this replica leads.
pub(crate) async fn leaders_client(
    kubeconfig: Option<&Path>,
    leadership: Leadership,
) -> anyhow::Result<Client> {
    let mut config = client_config(kubeconfig).await?;
    // A retry of a write would be made behind the fence. The callers retry.
    config.default_retry = false;
    Ok(client_builder(config).context(PREPARE)?.with_layer(&Fence(leadership)).build())
}

/// What the API server's audit log calls us.
const AGENT: &str = concat!("cloudcore-prepull/", env!("CARGO_PKG_VERSION"));
/// The waits between two attempts while the API server does not answer.
pub(crate) const READ_RETRY: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(5));
const PREPARE: &str = "prepare the connection to the cluster";

/// Retries a read until it succeeds. For a deadline, drop the future: that loses nothing. `explain` names a problem that
/// lasts.
pub(crate) async fn read_with_retry<T, F>(
    what: &str,
    explain: fn(&Error) -> Option<String>,
    read: impl Fn() -> F,
) -> T
where
    F: Future<Output = Result<T, Error>>,
{
    let (mut backoff, log) = (READ_RETRY, FailureLog::default());
    loop {
        match read().await {
            Ok(found) => return found,
            Err(error) => {
                log.record("read", what, explain(&error).as_deref(), &error);
                tokio::time::sleep(backoff.next_wait()).await;
            }
        }
    }
}

async fn client_config(kubeconfig: Option<&Path>) -> anyhow::Result<Config> {
    let mut config = read_config(kubeconfig).await?;
    config.headers.push((USER_AGENT, HeaderValue::from_static(AGENT)));
    Ok(config)
}

async fn read_config(kubeconfig: Option<&Path>) -> anyhow::Result<Config> {
    match kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path)
                .with_context(|| format!("read --kubeconfig {}", path.display()))?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                .await
                .with_context(|| format!("use --kubeconfig {}", path.display()))
        }
        None => Config::infer().await.context(
            "no cluster found: give --kubeconfig, set KUBECONFIG, or run in a pod with a ServiceAccount",
        ),
    }
}
