//! Pods, and their fate.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::Kubernetes;
use crate::cleanup::eventually;

/// Limit for a pod to start, or for the kubelet to report why it doesn't.
const LIMIT: Duration = Duration::from_secs(60);

/// The fate of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Its container runs.
    Runs,
    /// The kubelet tries to pull the image from the registry, and can't.
    Asks,
}

/// A pod on a worker, from an image that has a busybox. It may pull with the secret `secret` of its namespace, `default`.
pub fn pod(name: &str, worker: &str, image: &str, secret: Option<&str>) -> Value {
    let secrets: Vec<_> = secret.iter().map(|secret| json!({"name": secret})).collect();
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "nodeName": worker, "imagePullSecrets": secrets, "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": false, "enableServiceLinks": false,
            "containers": [{
                "name": "app", "image": image, "imagePullPolicy": "IfNotPresent",
                "command": ["/bin/sleep", "1000000"],
            }],
        },
    })
}

impl Kubernetes {
    /// Creates a pod, waits for its fate, and deletes it.
    pub async fn fate(&self, pod: &Value) -> Result<Fate> {
        let name = pod["metadata"]["name"].as_str().context("a pod has a name")?;
        self.cluster.apply(&pod.to_string()).await?;
        let what = format!("the fate of pod {name}");
        let fate = eventually(&what, LIMIT, async || {
            let status = ["get", "pod", name, "--output=jsonpath={.status}"];
            let status: Value = serde_json::from_str(&self.cluster.kubectl(&status).await?)?;
            let waiting = &status["containerStatuses"][0]["state"]["waiting"];
            match (status["phase"].as_str(), waiting["reason"].as_str()) {
                (Some("Running"), _) => Ok(Fate::Runs),
                (_, Some("ErrImagePull" | "ImagePullBackOff")) => Ok(Fate::Asks),
                _ => bail!("{status}"),
            }
        });
        let fate = fate.await?;
        self.delete_pod(name).await?;
        Ok(fate)
    }

    /// Deletes a pod immediately.
    pub async fn delete_pod(&self, name: &str) -> Result<()> {
        self.cluster.kubectl(&["delete", "pod", name, "--force", "--grace-period=0"]).await.map(drop)
    }
}
