//! Nodes, secrets and namespaces of a test.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Namespace, Node, NodeCondition, NodeStatus, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{Api, DeleteParams, ObjectMeta, Patch, PatchParams, PostParams};
use prepull_api::crd::EDGE_LABEL;
use serde_json::{Value, json};

use super::Cluster;
use super::existing::MARK;

/// A Node that has not been created. Without kubelets, the test sets the status of a Node.
pub struct NodeBuilder<'a> {
    cluster: &'a Cluster,
    name: String,
    labels: BTreeMap<String, String>,
    ready: bool,
}

impl Cluster {
    /// Builds a Node, which by default is not an edge node and not Ready.
    pub fn node(&self, name: &str) -> NodeBuilder<'_> {
        let node =
            NodeBuilder { cluster: self, name: name.to_owned(), labels: BTreeMap::new(), ready: false };
        if self.is_lent() { node.label(MARK, "true") } else { node }
    }

    /// Creates edge nodes that are Ready.
    pub async fn edge_nodes(&self, names: &[&str]) -> Result<()> {
        for name in names {
            self.node(name).edge().ready().create().await?;
        }
        Ok(())
    }

    /// Sets the `Ready` condition of a Node, as its kubelet or the node controller would.
    pub async fn mark_ready(&self, node: &str, ready: bool) -> Result<()> {
        let patch = json!({"status": {"conditions": [ready_condition(ready)]}});
        let nodes: Api<Node> = Api::all(self.client());
        nodes
            .patch_status(node, &PatchParams::default(), &Patch::Strategic(patch))
            .await
            .with_context(|| format!("cannot mark node {node}"))?;
        Ok(())
    }

    /// Sets a label of a Node, or removes it with None.
    pub async fn label_node(&self, node: &str, key: &str, value: Option<&str>) -> Result<()> {
        let patch = json!({"metadata": {"labels": {key: value}}});
        Api::<Node>::all(self.client()).patch(node, &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(())
    }

    /// Lists an image of a Node in its status, as its kubelet would.
    pub async fn list_image(&self, node: &str, names: &[&str]) -> Result<()> {
        let patch = json!({"status": {"images": [{"names": names}]}});
        let nodes: Api<Node> = Api::all(self.client());
        nodes.patch_status(node, &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(())
    }

    /// Deletes a Node.
    pub async fn delete_node(&self, node: &str) -> Result<()> {
        Api::<Node>::all(self.client()).delete(node, &DeleteParams::default()).await?;
        Ok(())
    }

    /// Creates a `kubernetes.io/dockerconfigjson` secret with entries of registry, user and password, as
    /// `kubectl create secret docker-registry` does.
    pub async fn registry_secret(
        &self,
        namespace: &str,
        name: &str,
        entries: &[(&str, &str, &str)],
    ) -> Result<()> {
        let entry = |(registry, user, password): &(&str, &str, &str)| {
            let auth = STANDARD.encode(format!("{user}:{password}"));
            ((*registry).to_owned(), json!({"username": user, "password": password, "auth": auth}))
        };
        let auths: serde_json::Map<_, _> = entries.iter().map(entry).collect();
        self.docker_config_secret(namespace, name, &json!({"auths": auths})).await
    }

    /// Creates a `kubernetes.io/dockerconfigjson` secret with any configuration, such as identity tokens or an unpadded
    /// `auth`.
    pub async fn docker_config_secret(&self, namespace: &str, name: &str, config: &Value) -> Result<()> {
        let data = config.to_string();
        self.secret(
            namespace,
            name,
            "kubernetes.io/dockerconfigjson",
            &[(".dockerconfigjson", data.as_bytes())],
        )
        .await
    }

    /// Creates a `kubernetes.io/dockercfg` secret, the older form without `auths`.
    pub async fn dockercfg_secret(&self, namespace: &str, name: &str, entries: &Value) -> Result<()> {
        let data = entries.to_string();
        self.secret(namespace, name, "kubernetes.io/dockercfg", &[(".dockercfg", data.as_bytes())]).await
    }

    /// Creates any secret, and its namespace if it does not exist. The API server itself refuses a dockerconfigjson that
    /// is not JSON.
    pub async fn secret(
        &self,
        namespace: &str,
        name: &str,
        kind: &str,
        data: &[(&str, &[u8])],
    ) -> Result<()> {
        self.namespace(namespace).await?;
        let data = data.iter().map(|(key, value)| ((*key).to_owned(), ByteString(value.to_vec()))).collect();
        let secret = Secret {
            metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
            type_: Some(kind.to_owned()),
            data: Some(data),
            ..Secret::default()
        };
        Api::<Secret>::namespaced(self.client(), namespace)
            .patch(name, &PatchParams::apply("prepull-e2e").force(), &Patch::Apply(&secret))
            .await
            .with_context(|| format!("cannot apply secret {namespace}/{name}"))?;
        Ok(())
    }

    /// Sets an annotation of a secret, or removes it with None.
    pub async fn annotate_secret(
        &self,
        namespace: &str,
        name: &str,
        key: &str,
        value: Option<&str>,
    ) -> Result<()> {
        let patch = json!({"metadata": {"annotations": {key: value}}});
        let secrets = Api::<Secret>::namespaced(self.client(), namespace);
        secrets.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(())
    }

    /// Deletes a secret.
    pub async fn delete_secret(&self, namespace: &str, name: &str) -> Result<()> {
        Api::<Secret>::namespaced(self.client(), namespace).delete(name, &DeleteParams::default()).await?;
        Ok(())
    }

    /// Creates a namespace if it does not exist.
    pub async fn namespace(&self, name: &str) -> Result<()> {
        let namespace = Namespace {
            metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
            ..Namespace::default()
        };
        Api::<Namespace>::all(self.client())
            .patch(name, &PatchParams::apply("prepull-e2e").force(), &Patch::Apply(&namespace))
            .await
            .with_context(|| format!("cannot apply namespace {name}"))?;
        Ok(())
    }
}

impl NodeBuilder<'_> {
    /// Adds the label of edge nodes.
    #[must_use]
    pub fn edge(self) -> Self {
        self.label(EDGE_LABEL, "")
    }

    /// Sets the `Ready` condition to True.
    #[must_use]
    pub fn ready(mut self) -> Self {
        self.ready = true;
        self
    }

    /// Adds a label.
    #[must_use]
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.labels.insert(key.to_owned(), value.to_owned());
        self
    }

    /// Creates the Node.
    pub async fn create(self) -> Result<()> {
        let Self { cluster, name, labels, ready } = self;
        let metadata = ObjectMeta { name: Some(name.clone()), labels: Some(labels), ..ObjectMeta::default() };
        // Of the kinds in these tests, the API server accepts a status on creation only for Nodes.
        let status = NodeStatus { conditions: Some(vec![ready_condition(ready)]), ..NodeStatus::default() };
        let node = Node { metadata, status: Some(status), ..Node::default() };
        let created = Api::all(cluster.client()).create(&PostParams::default(), &node).await;
        created.with_context(|| format!("cannot create node {name}"))?;
        Ok(())
    }
}

fn ready_condition(ready: bool) -> NodeCondition {
    let now = Time(jiff::Timestamp::now());
    NodeCondition {
        type_: "Ready".to_owned(),
        status: if ready { "True" } else { "False" }.to_owned(),
        reason: Some("E2e".to_owned()),
        message: Some("as the test says".to_owned()),
        last_heartbeat_time: Some(now.clone()),
        last_transition_time: Some(now),
    }
}
