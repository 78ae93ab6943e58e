//! Pods for podSelector. Without kubelet and scheduler, the test sets node and phase of a pod.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::json;

use crate::cluster::Cluster;

impl Cluster {
    /// Creates a pod that runs on the node, with these labels.
    pub async fn create_pod(
        &self,
        namespace: &str,
        name: &str,
        node: &str,
        labels: &[(&str, &str)],
    ) -> Result<()> {
        self.namespace(namespace).await?;
        let labels: serde_json::Map<_, _> =
            labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).into())).collect();
        let pod: Pod = serde_json::from_value(json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "nodeName": node,
                "automountServiceAccountToken": false,
                // The namespace of cloudcore-prepull requires these.
                "securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
                "containers": [{
                    "name": "app", "image": "registry.example/app:v1",
                    "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
                }],
            },
        }))?;
        let created = self.pods(namespace).create(&PostParams::default(), &pod).await;
        created.with_context(|| format!("cannot create pod {namespace}/{name}"))?;
        self.set_pod_phase(namespace, name, "Running").await
    }

    /// Sets the phase of a pod, as its kubelet would.
    pub async fn set_pod_phase(&self, namespace: &str, name: &str, phase: &str) -> Result<()> {
        let patch = Patch::Merge(json!({"status": {"phase": phase}}));
        self.pods(namespace).patch_status(name, &PatchParams::default(), &patch).await?;
        Ok(())
    }

    /// Deletes a pod without grace period: no kubelet is there to end it.
    pub async fn delete_pod(&self, namespace: &str, name: &str) -> Result<()> {
        self.pods(namespace).delete(name, &DeleteParams::default().grace_period(0)).await?;
        Ok(())
    }

    fn pods(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.client(), namespace)
    }
}
