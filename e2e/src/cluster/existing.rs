//! An existing cluster that the user lends to the tests (`PREPULL_E2E_KUBECONFIG`). One test at a time uses it. At the
//! end of each test and before the next one, the tests delete all ImagePrePullJobs, all objects and definitions of
//! Kruise's image API, all Secrets and Leases of cloudcore's namespace, and the nodes with [`MARK`].

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Secret, ServiceAccount};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use kube::config::{AuthInfo, Kubeconfig};
use prepull_api::crd::job::ImagePrePullJob;

use super::{KRUISE_DEFINITIONS, settled};
use crate::parts;

/// Label of nodes that a test has created.
pub(super) const MARK: &str = "prepull-e2e";
/// Lifetime of a token, longer than any test.
const TOKEN_SECONDS: i64 = 3600;

/// The turn of one test, which ends when this value is dropped or the process ends.
pub(super) struct Turn(#[expect(dead_code, reason = "held for its lock")] File);

impl Turn {
    pub(super) async fn wait() -> Result<Self> {
        let directory = parts::cache_dir();
        let path = directory.join("cluster.lock");
        let problem = format!("cannot lock {}", path.display());
        let locked = tokio::task::spawn_blocking(move || {
            std::fs::create_dir_all(directory)?;
            let file = File::options().create(true).append(true).open(path)?;
            file.lock().map(|()| file)
        });
        Ok(Self(locked.await?.context(problem)?))
    }
}

/// Deletes leftovers of a test.
pub(super) async fn sweep(client: &Client, namespace: &str) -> Result<()> {
    let (now, all) = (DeleteParams::default(), ListParams::default());
    let jobs: Api<ImagePrePullJob> = Api::all(client.clone());
    // Before the first test, the kind does not exist.
    if jobs.delete_collection(&now, &all).await.is_ok() {
        settled("the jobs are gone", async || {
            let left = jobs.list(&all).await?.items.len();
            anyhow::ensure!(left == 0, "{left} are there");
            Ok(())
        })
        .await?;
    }
    // Deleting a definition deletes its objects.
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    for name in KRUISE_DEFINITIONS {
        if definitions.delete(name, &now).await.is_ok() {
            settled(&format!("{name} is gone"), async || {
                anyhow::ensure!(definitions.get_opt(name).await?.is_none(), "it is there");
                Ok(())
            })
            .await?;
        }
    }
    Api::<Node>::all(client.clone()).delete_collection(&now, &all.clone().labels(MARK)).await?;
    Api::<Secret>::namespaced(client.clone(), namespace).delete_collection(&now, &all).await?;
    Api::<Lease>::namespaced(client.clone(), namespace).delete_collection(&now, &all).await?;
    Ok(())
}

/// Writes a kubeconfig for an existing ServiceAccount, `namespace:name`.
pub(super) async fn account_kubeconfig(
    admin: &Path,
    client: &Client,
    account: &str,
    dir: &Path,
) -> Result<PathBuf> {
    let (namespace, name) = account.split_once(':').context("an account is namespace:name")?;
    let spec = TokenRequestSpec { expiration_seconds: Some(TOKEN_SECONDS), ..TokenRequestSpec::default() };
    let request = TokenRequest { spec: Some(spec), ..TokenRequest::default() };
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    let answer = accounts.create_token_request(name, &PostParams::default(), &request).await;
    let answer = answer.with_context(|| format!("no token for ServiceAccount {namespace}/{name}"))?;
    let token = answer.status.and_then(|status| status.token).context("the answer has no token")?;

    let mut config = Kubeconfig::read_from(admin)?;
    for user in &mut config.auth_infos {
        user.auth_info = Some(AuthInfo::default());
    }
    let file = dir.join("cloudcore.kubeconfig");
    // Through a Value, since kube's own type does not serialise the token.
    let mut text = serde_json::to_value(&config)?;
    for user in text["users"].as_array_mut().into_iter().flatten() {
        user["user"]["token"] = token.clone().into();
    }
    std::fs::write(&file, text.to_string())?;
    Ok(file)
}
