//! How this program reaches the API server.

use std::path::Path;

use anyhow::Context;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

/// A client from the given kubeconfig, else from the environment, else from the pod's ServiceAccount.
pub async fn client(kubeconfig: Option<&Path>) -> anyhow::Result<Client> {
    let config = match kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path)
                .with_context(|| format!("read --kubeconfig {}", path.display()))?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                .await
                .with_context(|| format!("use --kubeconfig {}", path.display()))?
        }
        None => Config::infer().await.context(
            "no cluster found: give --kubeconfig, set KUBECONFIG, or run in a pod with a ServiceAccount",
        )?,
    };
    Client::try_from(config).context("prepare the connection to the cluster")
}
