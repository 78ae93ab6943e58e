//! The Kubernetes API of a test.

mod apply;
mod dump;
mod existing;
mod objects;
mod pool;
mod restore;
mod server;
mod sweep;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::Api;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::{conditions, wait::await_condition};
use kube::{Client, Config};
use server::Server;
pub use server::Servers;

pub use apply::documents;
pub use objects::NodeBuilder;

use crate::cleanup::{Child, SOON, eventually};
use crate::ground::Ground;
use crate::keep::keeps_everything;
use crate::parts;
use crate::place::Place;

/// The namespace of cloudcore-prepull in the manifests.
pub const NAMESPACE: &str = "prepull-system";
/// The ServiceAccount of cloudcore-prepull in the manifests, `namespace:name`.
const ACCOUNT: &str = "prepull-system:cloudcore-prepull";
/// The manifests that give cloudcore-prepull its rights; the workload itself is started by [`crate::cloud`].
const RIGHTS: [&str; 2] =
    ["manifests/cloudcore-prepull/namespace.yaml", "manifests/cloudcore-prepull/rbac.yaml"];
/// The names of the definitions of Kruise's image API.
pub const KRUISE_DEFINITIONS: [&str; 3] =
    ["imagepulljobs.apps.kruise.io", "imagelistpulljobs.apps.kruise.io", "nodeimages.apps.kruise.io"];

/// An etcd and a kube-apiserver with RBAC, our CRDs and cloudcore's rights. Its start takes 3 s and 310 MB, so that tests
/// share clusters, one after the other, if they can: see [`Self::start`] and [`Self::own`].
///
/// There is no kubelet, no scheduler and no controller-manager: the test creates Node objects, and nothing is garbage
/// collected.
pub struct Cluster {
    place: Arc<Place>,
    serving: Arc<Serving>,
    client: Client,
    kubeconfig: PathBuf,
    cloudcore_kubeconfig: PathBuf,
}

/// The servers behind a cluster.
enum Serving {
    /// Servers that only this test uses.
    Own(Box<Mutex<Server>>),
    /// Servers that the tests of a run share, one after the other.
    Shared(#[expect(dead_code, reason = "held until the end")] pool::Turn),
    /// An existing cluster of the user.
    Lent(#[expect(dead_code, reason = "held until the end")] existing::Turn),
}

/// Held by everything that writes to a cluster: the next test gets the cluster only when all holds are dropped.
pub(crate) struct Hold(#[expect(dead_code, reason = "held until the end")] Arc<Serving>);

impl Cluster {
    /// Returns a cluster with the minimum that cloudcore-prepull needs: that of `PREPULL_E2E_KUBECONFIG`, or one that
    /// the tests of this run share (`PREPULL_E2E_POOL`), or a new one. A test that changes definitions, rights or
    /// admission needs [`Self::for_changes`] instead, and one that stops the API server [`Self::own`].
    pub async fn start() -> Result<Self> {
        Self::shared_or_own(false).await
    }

    /// Returns a cluster like [`Self::start`], whose definitions, rights and admission the test may change.
    pub async fn for_changes() -> Result<Self> {
        Self::shared_or_own(true).await
    }

    async fn shared_or_own(changes: bool) -> Result<Self> {
        match std::env::var_os("PREPULL_E2E_POOL") {
            Some(pool) if lent().is_none() => Self::shared(Path::new(&pool), changes).await,
            _ => Self::own().await,
        }
    }

    /// Starts a cluster that no other test uses, unless `PREPULL_E2E_KUBECONFIG` names an existing one.
    pub async fn own() -> Result<Self> {
        if let Some(kubeconfig) = lent() {
            return Self::existing(Path::new(&kubeconfig)).await;
        }
        let cluster = Self::start_empty().await?;
        cluster.install().await?;
        Ok(cluster)
    }

    /// Starts a cluster of this test without definitions and rights.
    pub async fn start_empty() -> Result<Self> {
        let place = Place::here()?;
        let spawn = {
            let place = Arc::clone(&place);
            Box::new(move |name: &str, command| Child::spawn(&place, name, command))
        };
        Self::serve(Server::new(place.new_dir("cluster")?, ACCOUNT, spawn).await?).await
    }

    /// Starts the API server of a [whole cluster](crate::kubernetes), without definitions and rights.
    pub(crate) async fn start_on(ground: Ground) -> Result<Self> {
        let place = Place::here()?;
        let spawn = {
            let place = Arc::clone(&place);
            Box::new(move |name: &str, command| Child::spawn(&place, name, command))
        };
        Self::serve(Server::on(Some(ground), place.new_dir("cluster")?, ACCOUNT, spawn).await?).await
    }

    /// Starts a program of the control plane beside the API server of a whole cluster.
    pub(crate) fn start_beside(&self, program: &str, arguments: &[&str]) -> Result<Child> {
        self.server()?.start_beside(program, arguments)
    }

    /// Text of a kubeconfig with a certificate of this user, to reach the API server of a whole cluster at this address.
    pub(crate) fn kubeconfig_for(&self, user: &str, group: Option<&str>, host: &str) -> Result<String> {
        self.server()?.kubeconfig_for(user, group, host)
    }

    /// The audit log of a whole cluster's API server, a line of JSON each.
    pub fn audit_log(&self) -> Result<String> {
        Ok(std::fs::read_to_string(self.server()?.audit_log())?)
    }

    /// Directory of the files of a cluster that only this test uses.
    pub(crate) fn server_dir(&self) -> Result<PathBuf> {
        Ok(self.server()?.dir().to_owned())
    }

    /// Starts kube-apiserver, and waits until it is ready.
    async fn serve(mut server: Server) -> Result<Self> {
        install_crypto();
        server.start()?;
        let (kubeconfig, cloudcore_kubeconfig) =
            (server.admin.kubeconfig.clone(), server.cloudcore.kubeconfig.clone());
        let client = client(&kubeconfig).await?;
        let serving = Arc::new(Serving::Own(Box::new(Mutex::new(server))));
        let cluster = Self { place: Place::here()?, serving, client, kubeconfig, cloudcore_kubeconfig };
        cluster.is_ready().await?;
        Ok(cluster)
    }

    /// Takes a cluster of the pool in this directory, without leftovers of the previous test: see [`pool`]. `changes`: the
    /// test may change definitions, rights and admission.
    pub async fn shared(pool: &Path, changes: bool) -> Result<Self> {
        install_crypto();
        let place = Place::here()?;
        let turn = pool::Turn::take(pool, changes).await?;
        turn.link_logs(place.logs())?;
        let kubeconfig = turn.kubeconfig("admin");
        Ok(Self {
            place,
            client: client(&kubeconfig).await?,
            kubeconfig,
            cloudcore_kubeconfig: turn.kubeconfig("cloudcore"),
            serving: Arc::new(Serving::Shared(turn)),
        })
    }

    /// Uses an existing cluster, which can't be stopped: [`existing`] lists the changes that the tests make to it.
    pub async fn existing(kubeconfig: &Path) -> Result<Self> {
        install_crypto();
        let place = Place::here()?;
        let turn = existing::Turn::wait().await?;
        let (client, kubeconfig) = (client(kubeconfig).await?, kubeconfig.to_owned());
        existing::sweep(&client, NAMESPACE).await?;
        let dir = place.new_dir("cluster")?;
        let mut cluster = Self {
            place,
            serving: Arc::new(Serving::Lent(turn)),
            client,
            kubeconfig,
            cloudcore_kubeconfig: PathBuf::new(),
        };
        cluster.install().await?;
        cluster.cloudcore_kubeconfig =
            existing::account_kubeconfig(&cluster.kubeconfig, &cluster.client, ACCOUNT, &dir).await?;
        Ok(cluster)
    }

    /// Applies definitions and rights as an operator does.
    async fn install(&self) -> Result<()> {
        for file in apply::manifests(&parts::workspace().join("manifests/crds"))? {
            self.apply_file(&file).await?;
        }
        for file in RIGHTS {
            self.apply_file(&parts::workspace().join(file)).await?;
        }
        self.definitions_are_established().await
    }

    /// Holds the cluster for something that may write to it after this value is dropped.
    pub(crate) fn hold(&self) -> Hold {
        Hold(Arc::clone(&self.serving))
    }

    /// Place of the test.
    pub fn place(&self) -> &Arc<Place> {
        &self.place
    }

    /// A client with all rights.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// A client with the rights of cloudcore-prepull.
    pub async fn cloudcore_client(&self) -> Result<Client> {
        client(&self.cloudcore_kubeconfig).await
    }

    /// A kubeconfig file with all rights.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// A kubeconfig file with the rights of cloudcore-prepull.
    pub fn cloudcore_kubeconfig(&self) -> &Path {
        &self.cloudcore_kubeconfig
    }

    /// A kubeconfig file with the rights of this user.
    pub fn kubeconfig_as(&self, user: &str) -> Result<PathBuf> {
        let text = std::fs::read_to_string(&self.kubeconfig)?;
        let mut config: serde_json::Value = serde_saphyr::from_str(&text)?;
        config["users"][0]["user"]["as"] = user.into();
        let file = self.place.new_dir("kubeconfig")?.join("impersonated");
        std::fs::write(&file, config.to_string())?;
        Ok(file)
    }

    /// A client with the rights of a kubeconfig file.
    pub async fn client_of(kubeconfig: &Path) -> Result<Client> {
        client(kubeconfig).await
    }

    /// Runs kubectl with all rights, and returns its output.
    pub async fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(parts::kubectl());
        command.arg("--kubeconfig").arg(&self.kubeconfig);
        // With its own cache: the user's may be for another cluster.
        command.arg("--cache-dir").arg(self.place.dir().join("kubectl-cache")).args(arguments);
        parts::run_command(command).await.with_context(|| format!("kubectl {}", arguments.join(" ")))
    }

    /// Version of the API server, such as `Kubernetes v1.20.2`.
    pub async fn version(&self) -> Result<String> {
        Ok(format!("Kubernetes {}", self.client.apiserver_version().await?.git_version))
    }

    /// Kills kube-apiserver. etcd keeps all acknowledged writes.
    pub fn stop_api(&self) -> Result<()> {
        self.server()?.stop()
    }

    /// Restarts kube-apiserver on the same port and with the same data.
    pub async fn start_api(&self) -> Result<()> {
        self.server()?.start()?;
        self.is_ready().await
    }

    /// Freezes kube-apiserver with SIGSTOP: connections are accepted and nothing is answered.
    pub fn pause_api(&self) -> Result<()> {
        self.server()?.apiserver()?.stop()
    }

    /// Resumes kube-apiserver after [`Self::pause_api`].
    pub fn resume_api(&self) -> Result<()> {
        self.server()?.apiserver()?.cont()
    }

    /// Kills etcd, which keeps its data. kube-apiserver then answers with errors or not at all.
    pub fn stop_etcd(&self) -> Result<()> {
        self.server()?.stop_etcd()
    }

    /// Restarts etcd with its data, and waits until kube-apiserver is ready again.
    pub async fn start_etcd(&self) -> Result<()> {
        self.server()?.start_etcd()?;
        self.is_ready().await
    }

    /// Processes of the cluster, to measure them. None if only other tests or the user may stop them.
    pub fn servers(&self) -> Option<Servers> {
        self.server().and_then(|server| server.processes()).ok()
    }

    async fn is_ready(&self) -> Result<()> {
        eventually("kube-apiserver is ready", SOON, async || {
            let request = http::Request::get("/readyz").body(Vec::new())?;
            let answer = self.client.request_text(request).await;
            // A process that has ended does not become ready.
            if let Err(error) = self.server()?.check_running() {
                return Ok(Err(error));
            }
            match answer?.as_str() {
                "ok" => Ok(Ok(())),
                other => bail!("/readyz: {other}"),
            }
        })
        .await??;
        // A new API server reports that it is ready a moment before it has created its namespaces.
        let namespaces: Api<Namespace> = Api::all(self.client());
        settled("the namespace default is there", async || Ok(namespaces.get("default").await.map(drop)?))
            .await
    }

    /// Waits until all definitions are established.
    pub async fn definitions_are_established(&self) -> Result<()> {
        definitions_are_established(&self.client).await
    }

    fn server(&self) -> Result<MutexGuard<'_, Server>> {
        match &*self.serving {
            Serving::Own(server) => Ok(server.lock().unwrap_or_else(PoisonError::into_inner)),
            Serving::Shared(_) => {
                bail!("other tests need this cluster as well: begin this one with Cluster::own")
            }
            Serving::Lent(_) => {
                bail!("this cluster is not ours to stop: unset PREPULL_E2E_KUBECONFIG for this test")
            }
        }
    }

    fn is_lent(&self) -> bool {
        matches!(*self.serving, Serving::Lent(_))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if keeps_everything() {
            return;
        }
        let lent = self.is_lent();
        // A frozen API server must be resumed for the dump; a stopped one cannot be dumped.
        if matches!(*self.serving, Serving::Own(_)) && self.resume_api().is_err() {
            return;
        }
        let (kubeconfig, logs) = (self.kubeconfig.clone(), self.place.logs().to_owned());
        // The runtime of the test must not be blocked here, and may be gone. So use a thread with its own runtime.
        let last = std::thread::spawn(move || -> Result<()> {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let client = client(&kubeconfig).await?;
                let dumped = dump::write(&client, &logs).await;
                if lent {
                    existing::sweep(&client, NAMESPACE).await?;
                }
                dumped
            })
        });
        if let Ok(Err(error)) = last.join() {
            let _ = std::fs::write(self.place.log_file("dump-failed"), format!("{error:#}\n"));
        }
    }
}

/// Kubeconfig of an existing cluster for the tests.
fn lent() -> Option<OsString> {
    std::env::var_os("PREPULL_E2E_KUBECONFIG")
}

/// Installs the rustls provider. An error means that it is installed already.
fn install_crypto() {
    let _ = rustls::crypto::ring::default_provider().install_default();
}

async fn definitions_are_established(client: &Client) -> Result<()> {
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    for definition in api.list(&kube::api::ListParams::default()).await? {
        let name = definition.metadata.name.unwrap_or_default();
        let established = await_condition(api.clone(), &name, conditions::is_crd_established());
        tokio::time::timeout(SOON, established)
            .await
            .with_context(|| format!("{name} is not established"))??;
    }
    Ok(())
}

async fn client(kubeconfig: &Path) -> Result<Client> {
    let kubeconfig = Kubeconfig::read_from(kubeconfig)?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

/// Repeats an attempt until it succeeds, within [`SOON`].
async fn settled<T, F: Future<Output = Result<T>>>(what: &str, attempt: impl FnMut() -> F) -> Result<T> {
    eventually(what, SOON, attempt).await
}
