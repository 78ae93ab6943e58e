//! An etcd and a kube-apiserver with RBAC.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rcgen::KeyPair;

use crate::certs::Authority;
use crate::cleanup::{Child, SOON, eventually};
use crate::ground::{self, Ground};
use crate::network::{Passage, Space};
use crate::parts;
use crate::place::CANARY;
use crate::plain_http;
use crate::ports::Port;

/// Groups that kube-apiserver gives to the token of every ServiceAccount.
const SERVICE_ACCOUNTS: &str = "system:serviceaccounts,system:authenticated";

/// Arguments for a server that has [betas by default](parts::has_betas_by_default). Without unused betas it needs three
/// quarters of the CPU time to start, and half of it to wait. Its fair queues are such a beta.
const WITHOUT_BETAS: [&str; 2] = [
    "--runtime-config=api/beta=false,batch/v1beta1=true,discovery.k8s.io/v1beta1=true,policy/v1beta1=true",
    "--enable-priority-and-fairness=false",
];

/// Records every answer once, without bodies: enough to find refusals and their users.
const AUDIT_POLICY: &str = r#"{"apiVersion": "audit.k8s.io/v1", "kind": "Policy",
"omitStages": ["RequestReceived", "ResponseStarted"], "rules": [{"level": "Metadata"}]}"#;

/// A function that starts a program under a name. It decides on the log file and on the lifetime of the program.
pub(super) type Spawn = Box<dyn Fn(&str, Command) -> Result<Child> + Send>;

/// Both servers, their data, and the access to them.
pub(super) struct Server {
    spawn: Spawn,
    etcd: Child,
    apiserver: Option<Child>,
    dir: PathBuf,
    etcd_port: Port,
    port: Port,
    tls: (PathBuf, PathBuf),
    authority: Authority,
    /// Network of the servers in a whole cluster, and the passages to them.
    ground: Option<(Ground, Vec<Passage>)>,
    /// Access with all rights.
    pub(super) admin: Access,
    /// Access with the rights of cloudcore-prepull's ServiceAccount.
    pub(super) cloudcore: Access,
}

/// The processes of a cluster.
#[derive(Clone, Copy, Debug)]
pub struct Servers {
    /// Process id of kube-apiserver.
    pub apiserver: u32,
    /// Process id of etcd.
    pub etcd: u32,
    /// Address of etcd's /metrics.
    pub etcd_addr: SocketAddr,
}

/// A token for the API server, and a kubeconfig with it.
pub(super) struct Access {
    token: String,
    /// File of the kubeconfig.
    pub(super) kubeconfig: PathBuf,
}

impl Server {
    /// Starts an empty etcd, and writes the files of kube-apiserver into `dir`. `account` is `namespace:name`.
    pub(super) async fn new(dir: PathBuf, account: &str, spawn: Spawn) -> Result<Self> {
        Self::on(None, dir, account, spawn).await
    }

    /// Starts like [`Self::new`], for a cluster with machines, in its control room.
    pub(super) async fn on(
        ground: Option<Ground>,
        dir: PathBuf,
        account: &str,
        spawn: Spawn,
    ) -> Result<Self> {
        let (etcd_port, port) = (Port::reserve()?, Port::reserve()?);
        let ground = ground.map(|ground| {
            let room = Some(ground.control());
            let etcd = Passage::between_spaces(None, room, etcd_port.addr())?;
            let apiserver = ([127, 0, 0, 1], ground::API_PORT).into();
            let apiserver = Passage::open((None, port.addr()), (room, apiserver), Duration::ZERO)?;
            anyhow::Ok((ground, vec![etcd, apiserver]))
        });
        let ground = ground.transpose()?;
        let room = ground.as_ref().map(|(ground, _)| ground.control());
        let etcd = start_etcd(&spawn, &dir, etcd_port.number(), room).await?;

        let authority = Authority::within(&dir, "kubernetes")?;
        let names = if ground.is_some() { &ground::API_NAMES[..] } else { &[] };
        let tls = authority.server(&dir, names)?;
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
        Ok(Self {
            spawn,
            etcd,
            apiserver: None,
            dir,
            etcd_port,
            port,
            tls,
            authority,
            ground,
            admin,
            cloudcore,
        })
    }

    /// Starts kube-apiserver, on the same port and with the same data every time.
    pub(super) fn start(&mut self) -> Result<()> {
        if self.apiserver.is_some() {
            bail!("kube-apiserver runs already");
        }
        let file = |name: &str| self.dir.join(name).display().to_string();
        let program = parts::kube_apiserver()?;
        let mut command = Command::new(&program);
        let port = if self.ground.is_some() { ground::API_PORT } else { self.port.number() };
        command.args([
            &format!("--etcd-servers=http://{}", self.etcd_port.addr()),
            &format!("--secure-port={port}"),
            &format!("--cert-dir={}", file("certs")),
            &format!("--tls-cert-file={}", self.tls.0.display()),
            &format!("--tls-private-key-file={}", self.tls.1.display()),
            &format!("--token-auth-file={}", file("tokens.csv")),
            &format!("--service-account-key-file={}", file("accounts.pub")),
            &format!("--service-account-signing-key-file={}", file("accounts.key")),
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--allow-privileged=true",
            // A single worker would take seconds to delete what a fleet leaves.
            "--delete-collection-workers=16",
        ]);
        if parts::has_betas_by_default(&program) {
            command.args(WITHOUT_BETAS);
        }
        if let Some((ground, _)) = &self.ground {
            std::fs::write(file("audit.json"), AUDIT_POLICY)?;
            command.args([
                "--authorization-mode=Node,RBAC",
                "--enable-admission-plugins=NodeRestriction",
                "--kubelet-preferred-address-types=InternalIP",
                &format!("--advertise-address={}", ground::CONTROL),
                &format!("--client-ca-file={}", self.authority.file().display()),
                &format!("--audit-policy-file={}", file("audit.json")),
                &format!("--audit-log-path={}", self.audit_log().display()),
            ]);
            command = ground.control().wrap_command(&command);
        } else {
            command.args([
                "--bind-address=127.0.0.1",
                "--authorization-mode=RBAC",
                // There is no controller-manager that would create the accounts that this plugin requires.
                "--disable-admission-plugins=ServiceAccount",
            ]);
        }
        command.current_dir(&self.dir);
        self.apiserver = Some((self.spawn)("kube-apiserver", command)?);
        Ok(())
    }

    /// Text of a kubeconfig with a certificate of this user, to reach the API server at this address.
    pub(super) fn kubeconfig_for(&self, user: &str, group: Option<&str>, host: &str) -> Result<String> {
        let (certificate, key) = self.authority.client(user, group)?;
        let encoded = |pem: &str| STANDARD.encode(pem);
        let config = serde_json::json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "e2e",
            "clusters": [{"name": "e2e", "cluster": {
                "server": format!("https://{host}:{}", ground::API_PORT),
                "certificate-authority-data": encoded(&self.authority.pem()),
            }}],
            "users": [{"name": user, "user": {
                "client-certificate-data": encoded(&certificate), "client-key-data": encoded(&key),
            }}],
            "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": user}}],
        });
        Ok(config.to_string())
    }

    /// Starts a program of the control plane beside kube-apiserver.
    pub(super) fn start_beside(&self, program: &str, arguments: &[&str]) -> Result<Child> {
        let (ground, _) = self.ground.as_ref().context("this cluster has no control room")?;
        let kubeconfig = self.dir.join(format!("{program}.kubeconfig"));
        std::fs::write(&kubeconfig, self.kubeconfig_for(&format!("system:{program}"), None, "127.0.0.1")?)?;
        let mut command = Command::new(parts::kubernetes_program(program)?);
        command.arg("--kubeconfig").arg(kubeconfig);
        command.args(["--leader-elect=false", "--bind-address=127.0.0.1"]).args(arguments);
        let mut command = ground.control().wrap_command(&command);
        command.current_dir(&self.dir);
        (self.spawn)(program, command)
    }

    /// Directory of its files.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Network of the servers in a whole cluster.
    fn ground(&self) -> Option<&Ground> {
        self.ground.as_ref().map(|(ground, _)| ground)
    }

    /// The audit log of a whole cluster's API server, a line of JSON each.
    pub(super) fn audit_log(&self) -> PathBuf {
        self.dir.join("audit.log")
    }

    /// Kills etcd. Acknowledged writes are on disk.
    pub(super) fn stop_etcd(&mut self) -> Result<()> {
        self.etcd.kill9()
    }

    /// Starts etcd, on the same port and with the same data.
    pub(super) fn start_etcd(&mut self) -> Result<()> {
        let room = self.ground().map(Ground::control);
        self.etcd = spawn_etcd(&self.spawn, &self.dir, self.etcd_port.number(), room)?;
        Ok(())
    }

    /// Fails if etcd or kube-apiserver has ended by itself.
    pub(super) fn check_running(&mut self) -> Result<()> {
        self.etcd.check_running()?;
        self.apiserver.as_mut().map_or(Ok(()), Child::check_running)
    }

    /// The process of kube-apiserver, while it runs.
    pub(super) fn apiserver(&self) -> Result<&Child> {
        self.apiserver.as_ref().ok_or_else(|| anyhow::anyhow!("kube-apiserver is stopped"))
    }

    /// Ids of the running processes.
    pub(super) fn processes(&self) -> Result<Servers> {
        let apiserver = self.apiserver()?.pid();
        Ok(Servers { apiserver, etcd: self.etcd.pid(), etcd_addr: self.etcd_port.addr() })
    }

    /// Lets both servers continue when this value is dropped.
    pub(super) fn outlive_us(&mut self) {
        self.etcd.outlive_us();
        self.apiserver.iter_mut().for_each(Child::outlive_us);
    }

    /// Kills kube-apiserver. etcd keeps the data.
    pub(super) fn stop(&mut self) -> Result<()> {
        self.apiserver.take().map_or(Ok(()), |mut apiserver| apiserver.kill9())
    }
}

async fn start_etcd(spawn: &Spawn, dir: &Path, port: u16, room: Option<&Space>) -> Result<Child> {
    let mut etcd = spawn_etcd(spawn, dir, port, room)?;
    let addr = ([127, 0, 0, 1], port).into();
    eventually("etcd is healthy", SOON, async || {
        let (status, body) = plain_http::get(addr, "/health").await?;
        if status == 200 { Ok(()) } else { bail!("{status} {body}") }
    })
    .await
    .map_err(|error| etcd.check_running().err().unwrap_or(error))?;
    Ok(etcd)
}

fn spawn_etcd(spawn: &Spawn, dir: &Path, port: u16, room: Option<&Space>) -> Result<Child> {
    let url = format!("http://127.0.0.1:{port}");
    let mut command = Command::new(parts::etcd()?);
    command.arg("--data-dir").arg(dir.join("etcd")).args(["--listen-client-urls", &url]).args([
        "--advertise-client-urls",
        &url,
        // There is only one member, so that any port will do.
        "--listen-peer-urls",
        "http://127.0.0.1:0",
        "--log-level",
        "warn",
    ]);
    if let Some(room) = room {
        command = room.wrap_command(&command);
    }
    spawn("etcd", command)
}

/// Path of the kubeconfig for `admin` or `cloudcore` in the directory of a server.
pub(super) fn kubeconfig(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}.kubeconfig"))
}

impl Access {
    fn new(dir: &Path, name: &str, port: u16, authority: &Authority) -> Result<Self> {
        // The token of a kubeconfig is a credential as well, so that it contains the canary.
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
