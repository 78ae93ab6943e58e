//! The nodes and secrets of a live cluster.

use std::collections::BTreeSet;

use anyhow::Context;
use k8s_openapi::api::core::v1::{Node, Secret};
use kube::api::ListParams;
use kube::{Api, Client};
use prepull_api::overriders::SecretRef;
use prepull_engine::prepull::plan::SecretLookup;

use super::SecretLookups;
use super::nodes::ListedNode;

/// The most nodes in one page, which is also kubectl's chunk size.
const PAGE: u32 = 500;

/// Lists the Nodes of the cluster, page by page.
pub async fn list_nodes(client: &Client) -> anyhow::Result<Vec<ListedNode>> {
    let api: Api<Node> = Api::all(client.clone());
    let mut nodes = Vec::new();
    let mut page = ListParams::default().limit(PAGE);
    loop {
        let list = api.list(&page).await.context("listing the cluster's nodes")?;
        nodes.extend(list.items.iter().map(ListedNode::from_node));
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => return Ok(nodes),
        }
    }
}

/// Reads the secrets by name; a failure is part of the result.
pub(super) async fn read_secrets(client: &Client, names: BTreeSet<SecretRef>) -> SecretLookups {
    let mut secrets = SecretLookups::new();
    for name in names {
        let api: Api<Secret> = Api::namespaced(client.clone(), name.namespace());
        let found = match api.get_opt(name.name()).await {
            Ok(Some(secret)) => SecretLookup::from_secret(&secret),
            Ok(None) => SecretLookup::Missing,
            Err(kube::Error::Api(status)) if status.code == 403 => {
                SecretLookup::Forbidden(status.message.clone())
            }
            Err(kube::Error::Api(status)) => SecretLookup::Error(status.message.clone()),
            Err(error) => SecretLookup::Error(error.to_string()),
        };
        secrets.insert(name, found);
    }
    secrets
}
