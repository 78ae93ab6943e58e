//! A whole cluster: a control plane with its controllers, and machines that run pods.
//!
//! ```text
//!   control room (a network namespace)                          worker: namespaces of its own
//!   etcd, kube-apiserver, -controller-manager, -scheduler        /run /etc /var, this system's /usr
//!     10.79.0.1:443, 10.0.0.1:443 ═════ switch ═════ 10.79.0.11  containerd, kubelet
//!     10.79.0.200:10000, :10002                          │
//!        └─ Balancer: to the pod behind the Service      └── pods 10.80.11.0/24 (CNI's bridge)
//! ```
//!
//! A worker reaches the test's registries on its own loopback, under their addresses in the test. Each kubelet has a
//! certificate for its Node, so that the API server limits it to a kubelet's rights (`NodeRestriction`). Every request
//! is in the audit log.

mod balancer;
mod installation;
pub mod pods;
mod refusals;
mod worker;

use anyhow::{Context, Result};

pub use installation::{EDGE_NAMESPACE, Installation};
pub use pods::Fate;
pub use refusals::RefusedRequest;
pub use worker::{Worker, missing_for_worker};

use crate::cleanup::Child;
use crate::cluster::Cluster;
use crate::ground::{self, Ground};
use crate::images::Image;
use crate::registry::Registry;
use balancer::Balancer;
use worker::WorkerKind;

/// Controllers for a Deployment, a DaemonSet, a drained node and a namespace. The others would only cost time.
const CONTROLLERS: &str = "--controllers=daemonset-controller,deployment-controller,disruption-controller,\
    endpoints-controller,endpointslice-controller,garbage-collector-controller,namespace-controller,node-lifecycle-controller,\
    pod-garbage-collector-controller,replicaset-controller,root-ca-certificate-publisher-controller,\
    serviceaccount-controller,taint-eviction-controller";

/// A whole cluster, with its workers' registry.
pub struct Kubernetes {
    cluster: Cluster,
    ground: Ground,
    registry: Registry,
    sandbox: String,
    #[expect(dead_code, reason = "held until the end")]
    balancer: Balancer,
    #[expect(dead_code, reason = "held until the end")]
    controllers: Vec<Child>,
}

impl Kubernetes {
    /// Starts the control plane of an empty cluster, and a registry without users.
    pub async fn start() -> Result<Self> {
        let ground = Ground::new().await?;
        let registry = Registry::start();
        let (cluster, registry) =
            tokio::try_join!(Cluster::start_on(ground.clone()), async { registry.await })?;
        let dir = cluster.server_dir()?;
        let file = |name: &str| dir.join(name).display().to_string();
        let manager = cluster.start_beside(
            "kube-controller-manager",
            &[
                CONTROLLERS,
                "--use-service-account-credentials",
                &format!("--service-account-private-key-file={}", file("accounts.key")),
                &format!("--root-ca-file={}", file("ca.crt")),
            ],
        )?;
        let scheduler = cluster.start_beside("kube-scheduler", &[])?;
        let sandbox = registry.seed(&Image::sandbox()?, "pause:1")?;
        let balancer = Balancer::start(&cluster, &ground)?;
        Ok(Self { cluster, ground, registry, sandbox, balancer, controllers: vec![manager, scheduler] })
    }

    /// The API, as for clusters without machines.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// The registry of the cluster's own images.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Address at which edges reach the Service `cloudcore-prepull`, as a load balancer's.
    pub fn balancer(&self) -> String {
        ground::BALANCER.to_string()
    }

    /// Address at which nodes reach the Service `cloudcore-prepull`, if its `clusterIP` is set to it.
    pub fn service_address(&self) -> String {
        ground::CLOUD_SERVICE.to_string()
    }

    /// Adds a worker with a ready Node.
    pub async fn add_worker(&self, name: &str) -> Result<Worker> {
        self.worker_of(name, WorkerKind::Plain).await
    }

    /// Adds a worker like [`Self::add_worker`], with a separate disk of `size` bytes for its images.
    pub async fn worker_with_disk(&self, name: &str, size: u64) -> Result<Worker> {
        self.worker_of(name, WorkerKind::OwnDisk(size)).await
    }

    /// Adds a worker like [`Self::add_worker`], with a containerd that has the paths of k3s.
    pub async fn worker_of_k3s(&self, name: &str) -> Result<Worker> {
        self.worker_of(name, WorkerKind::K3s).await
    }

    async fn worker_of(&self, name: &str, kind: WorkerKind) -> Result<Worker> {
        let worker = Worker::start(&self.cluster, &self.ground, name, &self.sandbox, &self.registry, kind);
        worker.await.with_context(|| format!("no worker {name}"))
    }

    /// Requests that the API server has refused so far.
    pub fn refusals(&self) -> Result<Vec<RefusedRequest>> {
        refusals::parse(&self.cluster.audit_log()?)
    }

    /// Builds an image of one of our programs, with its libraries from this system, and stores it in the registry under
    /// the tag of the manifests. Returns its name without the tag.
    pub fn publish(&self, program: &str) -> Result<String> {
        self.registry.seed(&Image::of_program(program)?, &format!("{program}:0.1.0"))?;
        Ok(self.registry.image(program))
    }

    /// Stores the image of one of our programs under another tag as well.
    pub fn publish_as(&self, program: &str, tag: &str) -> Result<()> {
        self.registry.retag(program, "0.1.0", tag)
    }
}
