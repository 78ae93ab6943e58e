//! etcd and kube-apiserver, with RBAC on.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail};
use rcgen::KeyPair;

use crate::certs::Authority;
use crate::cleanup::{Child, eventually};
use crate::parts;
use crate::place::CANARY;
use crate::plain_http;
use crate::ports::Port;

/// They take 2 s alone on the machine.
const START_LIMIT: Duration = Duration::from_secs(60);
/// The name and the groups that kube-apiserver gives a ServiceAccount's token.
const SERVICE_ACCOUNTS: &str = "system:serviceaccounts,system:authenticated";

/// Starts a program under a name: what decides where its log is, and how long it may live.
pub(super) type Spawn = Box<dyn Fn(&str, Command) -> Result<Child> + Send>;

/// Both servers, their data and the ways in.
pub(super) struct Server {
    spawn: Spawn,
    etcd: Child,
    apiserver: Option<Child>,
    dir: PathBuf,
    etcd_port: Port,
    port: Port,
    tls: (PathBuf, PathBuf),
    /// May do everything.
    pub(super) admin: Access,
    /// Is the ServiceAccount of cloudcore-prepull, and may do what RBAC lets it.
    pub(super) cloudcore: Access,
}

/// What runs.
#[derive(Clone, Copy, Debug)]
pub struct Servers {
    /// The PID of kube-apiserver.
    pub apiserver: u32,
    /// The PID of etcd.
    pub etcd: u32,
    /// Where etcd has its /metrics.
    pub etcd_addr: SocketAddr,
}

/// A way in.
pub(super) struct Access {
    token: String,
    /// A kubeconfig.
    pub(super) kubeconfig: PathBuf,
}

impl Server {
    /// Starts etcd, with nothing in it, and prepares the files of kube-apiserver in `dir`. `account` is
    /// `namespace:name`.
    pub(super) async fn new(dir: PathBuf, account: &str, spawn: Spawn) -> Result<Self> {
        let (etcd_port, port) = (Port::reserve()?, Port::reserve()?);
        let etcd = start_etcd(&spawn, &dir, etcd_port.number()).await?;

        let authority = Authority::within(&dir, "kubernetes")?;
        let tls = authority.server(&dir, &[])?;
        let accounts_key = KeyPair::generate()?;
        std::fs::write(dir.join("accounts.key"), accounts_key.serialize_pem())?;
        std::fs::write(dir.join("accounts.pub"), accounts_key.public_key_pem())?;

        let admin = Access::new(&dir, "admin", port.number(), &authority)?;
        let cloudcore = Access::new(&dir, "cloudcore", port.number(), &authority)?;
        let tokens = format!(
            "{},admin,admin,\"system:masters\"\n{},system:serviceaccount:{account},cloudcore,\"{SERVICE_ACCOUNTS},system:serviceaccounts:{}\"\n",
            admin.token,
            cloudcore.token,
            account.split(':').next().unwrap_or_default(),
        );
        std::fs::write(dir.join("tokens.csv"), tokens)?;
        Ok(Self { spawn, etcd, apiserver: None, dir, etcd_port, port, tls, admin, cloudcore })
    }

    /// Starts kube-apiserver, on the same port and with the same data every time.
    pub(super) fn start(&mut self) -> Result<()> {
        if self.apiserver.is_some() {
            bail!("kube-apiserver runs already");
        }
        let file = |name: &str| self.dir.join(name).display().to_string();
        let mut command = Command::new(parts::kube_apiserver()?);
        command.current_dir(&self.dir).args([
            &format!("--etcd-servers=http://{}", self.etcd_port.addr()),
            &format!("--secure-port={}", self.port.number()),
            &format!("--cert-dir={}", file("certs")),
            &format!("--tls-cert-file={}", self.tls.0.display()),
            &format!("--tls-private-key-file={}", self.tls.1.display()),
            &format!("--token-auth-file={}", file("tokens.csv")),
            &format!("--service-account-key-file={}", file("accounts.pub")),
            &format!("--service-account-signing-key-file={}", file("accounts.key")),
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--bind-address=127.0.0.1",
            "--authorization-mode=RBAC",
            // There is no controller-manager which would create the accounts that it asks for.
            "--disable-admission-plugins=ServiceAccount",
            "--allow-privileged=true",
            // One at a time takes seconds for what a fleet leaves.
            "--delete-collection-workers=16",
        ]);
        self.apiserver = Some((self.spawn)("kube-apiserver", command)?);
        Ok(())
    }

    /// Kills etcd. What it has answered is on the disk.
    pub(super) fn stop_etcd(&mut self) -> Result<()> {
        self.etcd.kill9()
    }

    /// Starts etcd, on the same port and with the same data.
    pub(super) fn start_etcd(&mut self) -> Result<()> {
        self.etcd = spawn_etcd(&self.spawn, &self.dir, self.etcd_port.number())?;
        Ok(())
    }

    /// Ends early where kube-apiserver has ended.
    pub(super) fn check_running(&mut self) -> Result<()> {
        self.etcd.check_running()?;
        self.apiserver.as_mut().map_or(Ok(()), Child::check_running)
    }

    /// The process of kube-apiserver, while it runs.
    pub(super) fn apiserver(&self) -> Result<&Child> {
        self.apiserver.as_ref().ok_or_else(|| anyhow::anyhow!("kube-apiserver is stopped"))
    }

    /// What runs now.
    pub(super) fn processes(&self) -> Result<Servers> {
        let apiserver = self.apiserver()?.pid();
        Ok(Servers { apiserver, etcd: self.etcd.pid(), etcd_addr: self.etcd_port.addr() })
    }

    /// Both go on when this is dropped.
    pub(super) fn outlive_us(&mut self) {
        self.etcd.outlive_us();
        self.apiserver.iter_mut().for_each(Child::outlive_us);
    }

    /// Kills kube-apiserver; etcd keeps the data.
    pub(super) fn stop(&mut self) -> Result<()> {
        self.apiserver.take().map_or(Ok(()), |mut apiserver| apiserver.kill9())
    }
}

async fn start_etcd(spawn: &Spawn, dir: &Path, port: u16) -> Result<Child> {
    let mut etcd = spawn_etcd(spawn, dir, port)?;
    let addr = ([127, 0, 0, 1], port).into();
    eventually("etcd is healthy", START_LIMIT, async || {
        let (status, body) = plain_http::get(addr, "/health").await?;
        if status == 200 { Ok(()) } else { bail!("{status} {body}") }
    })
    .await
    .map_err(|error| etcd.check_running().err().unwrap_or(error))?;
    Ok(etcd)
}

fn spawn_etcd(spawn: &Spawn, dir: &Path, port: u16) -> Result<Child> {
    let url = format!("http://127.0.0.1:{port}");
    let mut command = Command::new(parts::etcd()?);
    command.arg("--data-dir").arg(dir.join("etcd")).args(["--listen-client-urls", &url]).args([
        "--advertise-client-urls",
        &url,
        // There is one member and nobody dials it: any port will do.
        "--listen-peer-urls",
        "http://127.0.0.1:0",
        "--log-level",
        "warn",
    ]);
    spawn("etcd", command)
}

/// The kubeconfig in a server's directory for `admin` or `cloudcore`.
pub(super) fn kubeconfig(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}.kubeconfig"))
}

impl Access {
    fn new(dir: &Path, name: &str, port: u16, authority: &Authority) -> Result<Self> {
        // With the canary: a kubeconfig's token is a credential, too.
        let token = format!("{CANARY}{name}-token");
        let config = serde_json::json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "e2e",
            "clusters": [{"name": "e2e", "cluster": {
                "server": format!("https://127.0.0.1:{port}"),
                "certificate-authority": authority.file(),
            }}],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": name}}],
        });
        let kubeconfig = kubeconfig(dir, name);
        std::fs::write(&kubeconfig, serde_json::to_string_pretty(&config)?)?;
        Ok(Self { token, kubeconfig })
    }
}
