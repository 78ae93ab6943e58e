//! Our own manifests on a whole cluster, installed by the README's instructions.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::Kubernetes;
use crate::cleanup::{SOON, eventually};
use crate::cluster::NAMESPACE;
use crate::parts;

/// Label of the pod that leads, by which the Service selects it.
const LEADER_LABEL: &str = "prepull.kubeedge.io/leader";
/// Namespace of the DaemonSet.
pub const EDGE_NAMESPACE: &str = "prepull-edge";

/// A copy of `manifests/`, with the settings that an operator must make.
pub struct Installation<'a> {
    kubernetes: &'a Kubernetes,
    dir: PathBuf,
}

impl<'a> Installation<'a> {
    /// Copies the manifests. Nothing is applied yet.
    pub async fn copy_manifests(kubernetes: &'a Kubernetes) -> Result<Self> {
        let dir = kubernetes.cluster().place().new_dir("manifests")?;
        let mut command = Command::new("cp");
        command.arg("-r").arg(parts::workspace().join("manifests/.")).arg(&dir);
        parts::run_command(command).await?;
        Ok(Self { kubernetes, dir })
    }

    /// The copy.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Replaces a text in a file of the copy. Fails if it isn't there exactly once.
    pub fn replace_text(&self, file: &str, from: &str, to: &str) -> Result<()> {
        let path = self.dir.join(file);
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let found = text.matches(from).count();
        ensure!(found == 1, "{file} has {from:?} {found} times");
        Ok(std::fs::write(path, text.replacen(from, to, 1))?)
    }

    /// Sets the image of one of our programs in the kustomization that names it.
    pub fn set_image(&self, program: &str, image: &str) -> Result<()> {
        let folder = if program == "cloudcore-prepull" { "cluster" } else { "edgecore-prepull" };
        let file = format!("{folder}/kustomization.yaml");
        self.replace_text(&file, &format!("newName: {program}"), &format!("newName: {image}"))
    }

    /// Sets the address of the Service for edges, on both sides, and the agents' limits for the disk: by default they
    /// are percentages, which a build machine may exceed.
    pub fn set_address(&self) -> Result<()> {
        let address = self.kubernetes.balancer();
        let (cloud, edge) = ("cluster/kustomization.yaml", "edgecore-prepull/kustomization.yaml");
        self.replace_text(
            cloud,
            "PREPULL_ADVERTISE=cloudcore.example",
            &format!("PREPULL_ADVERTISE={address}"),
        )?;
        let indent = "\n      - ";
        let room = format!("{indent}PREPULL_DISK_MIN_FREE=64MiB{indent}PREPULL_IMAGE_GC_HIGH_THRESHOLD=100%");
        self.replace_text(
            edge,
            "PREPULL_SERVER=cloudcore.example",
            &format!("PREPULL_SERVER={address}{room}"),
        )
    }

    /// Applies a folder with `kubectl apply -k`. A warning of the API server is a failure.
    pub async fn apply_folder(&self, folder: &str) -> Result<String> {
        let folder = self.dir.join(folder).display().to_string();
        self.kubernetes.cluster().kubectl(&["apply", "--warnings-as-errors", "-k", &folder]).await
    }

    /// Waits with `kubectl rollout status` until the Deployment, or the DaemonSet, is rolled out.
    pub async fn is_rolled_out(&self, namespace: &str, what: &str) -> Result<()> {
        let limit = format!("--timeout={}s", SOON.as_secs());
        let cluster = self.kubernetes.cluster();
        let waited = cluster.kubectl(&["--namespace", namespace, "rollout", "status", what, &limit]).await;
        if let Err(error) = waited {
            let pods = cluster.kubectl(&["--namespace", namespace, "describe", "pods"]).await?;
            let logs = ["logs", "--all-containers", "--prefix", "--tail=20", "--selector", SELECTOR];
            let logs = cluster.kubectl(&[&["--namespace", namespace], &logs[..]].concat()).await;
            return Err(error.context(format!("{pods}\n{}", logs.unwrap_or_default())));
        }
        Ok(())
    }

    /// Creates the Secret with a join token, with the command in the DaemonSet's kustomization.
    pub async fn lets_edges_join(&self) -> Result<()> {
        let cluster = self.kubernetes.cluster();
        let create = ["cloudcore-prepull", "token", "create", "--ttl", "8h"];
        let exec = ["--namespace", NAMESPACE, "exec", "deploy/cloudcore-prepull", "--"];
        let token = cluster.kubectl(&[&exec[..], &create[..]].concat()).await?;
        let literal = format!("--from-literal=token={}", token.trim());
        let secret = ["create", "secret", "generic", "edgecore-prepull-join", &literal];
        cluster.kubectl(&[&["--namespace", EDGE_NAMESPACE], &secret[..]].concat()).await.map(drop)
    }

    /// Installs both sides with the commands of the README and of the DaemonSet's kustomization, and waits until
    /// they're rolled out. Then every worker with the label of an edge node has an agent.
    pub async fn install_on(kubernetes: &'a Kubernetes) -> Result<Self> {
        let installation = Self::copy_manifests(kubernetes).await?;
        installation.set_images()?;
        installation.set_address()?;
        installation.install_cloud().await?;
        installation.install_edges().await?;
        Ok(installation)
    }

    /// Publishes images of both programs, and names them in the manifests.
    pub fn set_images(&self) -> Result<()> {
        for program in ["cloudcore-prepull", "edgecore-prepull"] {
            self.set_image(program, &self.kubernetes.publish(program)?)?;
        }
        Ok(())
    }

    /// Installs the cloud side, and waits until it's rolled out.
    pub async fn install_cloud(&self) -> Result<()> {
        self.apply_folder("cluster").await?;
        self.is_rolled_out(NAMESPACE, "deployment/cloudcore-prepull").await
    }

    /// Installs the agents, lets them join, and waits until they're rolled out.
    pub async fn install_edges(&self) -> Result<()> {
        self.apply_folder("edgecore-prepull").await?;
        self.lets_edges_join().await?;
        self.is_rolled_out(EDGE_NAMESPACE, "daemonset/edgecore-prepull").await
    }

    /// Name of the leader's pod, once it differs from `before`.
    pub async fn leader_after(&self, before: &str) -> Result<String> {
        eventually("another pod leads", SOON, async || {
            let selector = format!("--selector={LEADER_LABEL}=true");
            let pods = [
                "--namespace",
                NAMESPACE,
                "get",
                "pods",
                &selector,
                "--output=jsonpath={.items[*].metadata.name}",
            ];
            let pods = self.kubernetes.cluster().kubectl(&pods).await?;
            let leader = pods.trim();
            ensure!(!leader.is_empty() && leader != before && !leader.contains(' '), "leaders: {pods:?}");
            Ok(leader.to_owned())
        })
        .await
    }
}

/// Pods of either program.
const SELECTOR: &str = "app.kubernetes.io/part-of=image-prepull";
