//! How this program reaches the API server.

use anyhow::Context;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use crate::args::ClusterArgs;

/// A client from --kubeconfig, the environment, or the pod's ServiceAccount.
pub async fn client(args: &ClusterArgs) -> anyhow::Result<Client> {
    let config = match &args.kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path).with_context(|| format!("read --kubeconfig {}", path.display()))?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                .await
                .with_context(|| format!("use --kubeconfig {}", path.display()))?
        }
        None => Config::infer().await.context(
            "no cluster found: give --kubeconfig, set KUBECONFIG, or run in a pod with a ServiceAccount",
        )?,
    };
    Client::try_from(config).context("make a client of the API server")
}
