//! Private registries on loopback, each a process of docker-registry.

mod access_log;
mod pull_through;
mod storage;
mod token_server;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures::FutureExt;
use futures::future::BoxFuture;
use serde_json::{Value, json};

pub use access_log::{RegistryRequest, RegistryRequests};
pub use pull_through::PullThrough;
pub use token_server::{TokenGrant, TokenServer};

use crate::certs::Authority;
use crate::cleanup::{Child, SOON, eventually};
use crate::images::Image;
use crate::images::delta::Delta;
use crate::parts;
use crate::place::Place;
use crate::ports::Port;
use crate::proxy::Proxy;

/// A registry, with its storage, its users and the log of its requests.
pub struct Registry {
    place: Arc<Place>,
    /// Host in references.
    host: String,
    port: Port,
    dir: PathBuf,
    users: Vec<(String, String)>,
    ca: Option<PathBuf>,
    process: Option<Child>,
}

/// A registry that has not been started; `.await` starts it.
#[derive(Default)]
pub struct RegistryStart {
    name: Option<String>,
    users: Vec<(String, String)>,
    authority: Option<(PathBuf, PathBuf, PathBuf)>,
    tokens: Option<Value>,
    client_ca: Option<PathBuf>,
    error: Option<anyhow::Error>,
}

impl Registry {
    /// Starts a registry: `Registry::start().user("alice", "…").await?`. By default it has plain HTTP and no users.
    pub fn start() -> RegistryStart {
        RegistryStart::default()
    }

    /// Host in references: `127.0.0.1:<port>`, or the name of the registry.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Address on which the registry listens.
    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// Reference to an image of the registry: `image("team/app:v1")`.
    pub fn image(&self, path: &str) -> String {
        format!("{}/{path}", self.host)
    }

    /// Host, user and password, the arguments of [`crate::cluster::Cluster::registry_secret`].
    pub fn login(&self, user: &str) -> Result<(&str, &str, &str)> {
        let found = self.users.iter().find(|(name, _)| name == user);
        let (user, password) = found.with_context(|| format!("{} has no user {user}", self.host))?;
        Ok((&self.host, user, password))
    }

    /// Stores an image under a name such as `team/app:v1`, and returns its reference with the host. It's written
    /// directly into the storage of the registry, which takes a millisecond; [`Self::push`] goes through its API.
    pub fn seed(&self, image: &Image, path: &str) -> Result<String> {
        storage::seed(&self.dir.join("storage"), image, path)?;
        Ok(self.image(path))
    }

    /// Adds a delta to a repository.
    pub fn seed_delta(&self, repository: &str, delta: &Delta) -> Result<()> {
        storage::seed_delta(&self.dir.join("storage"), repository, delta)
    }

    /// Points a tag of a repository to the image of another tag.
    pub fn retag(&self, repository: &str, from: &str, to: &str) -> Result<()> {
        storage::retag(&self.dir.join("storage"), repository, from, to)
    }

    /// Pushes an image as a user, with skopeo, and returns its reference with the host.
    pub async fn push(&self, image: &Image, path: &str, user: &str) -> Result<String> {
        let (_, user, password) = self.login(user)?;
        let auth = STANDARD.encode(format!("{user}:{password}"));
        let auth_file = self.dir.join(format!("{user}.json"));
        let addr = self.addr().to_string();
        std::fs::write(&auth_file, json!({"auths": {addr.as_str(): {"auth": auth}}}).to_string())?;
        let mut command = Command::new("skopeo");
        command.args([
            "--insecure-policy",
            "copy",
            "--quiet",
            "--all",
            "--preserve-digests",
            "--dest-authfile",
        ]);
        command.arg(auth_file);
        match &self.ca {
            Some(ca) => command.arg("--dest-cert-dir").arg(ca.parent().unwrap_or(ca)),
            None => command.arg("--dest-tls-verify=false"),
        };
        command.arg(format!("oci:{}", image.dir().display())).arg(format!("docker://{addr}/{path}"));
        parts::run_command(command).await.with_context(|| format!("cannot push {path} to {}", self.host))?;
        Ok(self.image(path))
    }

    /// All requests so far, in the order of their responses.
    pub fn requests(&self) -> RegistryRequests {
        access_log::parse(
            &std::fs::read_to_string(self.place.log_file(&log_name(&self.host))).unwrap_or_default(),
        )
    }

    /// Makes the containerds of this test reach the registry through a proxy, under the same host.
    pub fn route_through(&self, proxy: &Proxy) -> Result<()> {
        self.route_to(proxy.addr())
    }

    /// Like [`Self::route_through`], for one containerd only.
    pub fn route_node_through(&self, containerd: &crate::node::Containerd, proxy: &Proxy) -> Result<()> {
        self.route_node(containerd, proxy.addr())
    }

    /// Like [`Self::route_to`], for one containerd only.
    pub fn route_node(&self, containerd: &crate::node::Containerd, to: SocketAddr) -> Result<()> {
        containerd
            .own_registry_host(&self.host, |hosts| write_hosts(hosts, &self.host, to, self.ca.as_deref()))
    }

    /// Makes the containerds of this test reach the registry directly again.
    pub fn route_directly(&self) -> Result<()> {
        self.route_to(self.addr())
    }

    /// Makes the containerds of this test reach the registry at this address, under the same host.
    pub fn route_to(&self, to: SocketAddr) -> Result<()> {
        write_hosts(&self.place.registry_hosts(), &self.host, to, self.ca.as_deref())?;
        self.place.share_registry_hosts()
    }

    /// Makes the machines of this test send a credential of their own to the registry at this address, by `hosts.toml`.
    pub fn route_with_credential(&self, to: SocketAddr) -> Result<()> {
        let host = format!(
            "[host.\"http://{to}\"]\ncapabilities = [\"pull\", \"resolve\"]\n\
             [host.\"http://{to}\".header]\nauthorization = \"Basic b3duOnNlY3JldA==\"\n"
        );
        write_hosts_with(&self.place.registry_hosts(), &self.host, to, self.ca.as_deref(), &host)?;
        self.place.share_registry_hosts()
    }

    /// Makes the containerds of this test ask a mirror first, and then the registry at the address `to`.
    pub fn route_by_mirror(&self, mirror: SocketAddr, to: SocketAddr) -> Result<()> {
        self.route_by_mirrors(&[mirror], to)
    }

    /// The same with several mirrors, in this order.
    pub fn route_by_mirrors(&self, mirrors: &[SocketAddr], to: SocketAddr) -> Result<()> {
        let one = |mirror: &SocketAddr| {
            format!("[host.\"http://{mirror}\"]\ncapabilities = [\"pull\", \"resolve\"]\n")
        };
        let mirrors: String = mirrors.iter().map(one).collect();
        write_hosts_with(&self.place.registry_hosts(), &self.host, to, self.ca.as_deref(), &mirrors)?;
        self.place.share_registry_hosts()
    }

    /// Kills the registry with SIGKILL: connections are refused from now on.
    pub fn stop(&mut self) -> Result<()> {
        self.process.take().map_or(Ok(()), |mut process| process.kill9())
    }

    /// Restarts the registry on the same port and with the same storage.
    pub async fn restart(&mut self) -> Result<()> {
        self.stop()?;
        let mut command = Command::new("docker-registry");
        command.arg("serve").arg(self.dir.join("config.json"));
        let mut process = Child::spawn(&self.place, &log_name(&self.host), command)?;
        let addr = self.addr();
        let listens = async || Ok(tokio::net::TcpStream::connect(addr).await.map(drop)?);
        if let Err(error) = eventually(&format!("registry {} listens", self.host), SOON, listens).await {
            process.check_running()?;
            return Err(error);
        }
        self.process = Some(process);
        Ok(())
    }

    /// Freezes the registry with SIGSTOP: connections are accepted and nothing is answered.
    pub fn pause(&self) -> Result<()> {
        self.running()?.stop()
    }

    /// Resumes the registry after [`Self::pause`].
    pub fn resume(&self) -> Result<()> {
        self.running()?.cont()
    }

    fn running(&self) -> Result<&Child> {
        self.process.as_ref().with_context(|| format!("registry {} is stopped", self.host))
    }
}

impl RegistryStart {
    /// Gives the registry a host name for references (`harbor.example`), instead of address and port. Only the
    /// containerds of this test can resolve it.
    #[must_use]
    pub fn with_host(mut self, name: &str) -> Self {
        self.name = Some(name.to_owned());
        self
    }

    /// Adds a user. With a user, the registry rejects all others.
    #[must_use]
    pub fn user(mut self, name: &str, password: &str) -> Self {
        self.users.push((name.to_owned(), password.to_owned()));
        self
    }

    /// Requires bearer tokens of the given server, instead of users and passwords.
    #[must_use]
    pub fn tokens_of(mut self, server: &TokenServer) -> Self {
        self.tokens = Some(server.registry_auth());
        self
    }

    /// Uses TLS with a certificate of the authority, which the containerds of this test trust for this registry.
    #[must_use]
    pub fn tls(mut self, authority: &Authority) -> Self {
        let name = self.name.clone();
        let made = authority.place().new_dir("tls").and_then(|dir| {
            // In its own directory, with the name that skopeo expects: skopeo reads every file there.
            let ca = dir.join("ca.crt");
            std::fs::write(&ca, authority.pem())?;
            let names: Vec<_> = name.as_deref().into_iter().collect();
            let (cert, key) = authority.server(&authority.place().new_dir("tls-key")?, &names)?;
            Ok((ca, cert, key))
        });
        match made {
            Ok(files) => self.authority = Some(files),
            Err(error) => self.error = Some(error),
        }
        self
    }

    /// Accepts only clients with a certificate of the authority. Needs [`Self::tls`].
    #[must_use]
    pub fn clients_of(mut self, authority: &Authority) -> Self {
        self.client_ca = Some(authority.file().to_owned());
        self
    }

    async fn start(self) -> Result<Registry> {
        let Self { name, users, authority, tokens, client_ca, error } = self;
        if let Some(error) = error {
            return Err(error);
        }
        let place = Place::here()?;
        let port = Port::reserve()?;
        let dir = place.new_dir("registry")?;
        let host = name.unwrap_or_else(|| port.addr().to_string());
        let mut config = json!({
            "version": "0.1",
            // Only this level logs the user.
            "log": {"level": "debug", "formatter": "json"},
            "storage": {
                "filesystem": {"rootdirectory": dir.join("storage")},
                "delete": {"enabled": true},
                "cache": {"blobdescriptor": "inmemory"},
            },
            "http": {"addr": port.addr().to_string(), "secret": "of one process, so of no use to anybody"},
        });
        if !users.is_empty() {
            let file = dir.join("htpasswd");
            std::fs::write(&file, htpasswd(&users).await?)?;
            config["auth"] = json!({"htpasswd": {"realm": "e2e", "path": file}});
        }
        if let Some(tokens) = tokens {
            config["auth"] = tokens;
        }
        if let Some((_, certificate, key)) = &authority {
            config["http"]["tls"] =
                json!({"certificate": certificate, "key": key, "clientcas": Vec::from_iter(client_ca)});
        }
        // The registry reads YAML, which includes JSON.
        std::fs::write(dir.join("config.json"), config.to_string())?;
        let ca = authority.map(|(ca, _, _)| ca);
        let mut registry = Registry { place, host, port, dir, users, ca, process: None };
        registry.route_directly()?;
        registry.restart().await?;
        Ok(registry)
    }
}

impl IntoFuture for RegistryStart {
    type Output = Result<Registry>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        self.start().boxed()
    }
}

async fn htpasswd(users: &[(String, String)]) -> Result<String> {
    let mut text = String::new();
    for (user, password) in users {
        let mut command = Command::new("htpasswd");
        // -C 4 is the cheapest bcrypt, which the registry computes for every request.
        command.args(["-Bbn", "-C", "4", user, password]);
        text += parts::run_command(command).await.context("htpasswd (package apache2-utils)")?.trim();
        text.push('\n');
    }
    ensure!(!text.trim().is_empty(), "htpasswd printed nothing");
    Ok(text)
}

/// Writes the file with a registry's address for containerd. `[host]` stays empty: otherwise containerd would ask
/// twice, its hosts and then the server.
fn write_hosts(dir: &Path, host: &str, addr: SocketAddr, ca: Option<&Path>) -> Result<()> {
    // containerd 1.6 ignores a file without [host].
    write_hosts_with(dir, host, addr, ca, "[host]\n")
}

fn write_hosts_with(
    dir: &Path,
    host: &str,
    addr: SocketAddr,
    ca: Option<&Path>,
    mirrors: &str,
) -> Result<()> {
    let dir = dir.join(host);
    std::fs::create_dir_all(&dir)?;
    let scheme = if ca.is_some() { "https" } else { "http" };
    let ca = ca.map_or_else(String::new, |ca| format!("ca = \"{}\"\n", ca.display()));
    let text =
        format!("server = \"{scheme}://{addr}\"\ncapabilities = [\"pull\", \"resolve\"]\n{ca}{mirrors}");
    // Renamed into place, since a containerd may read it at any moment.
    let scratch = dir.join("hosts.toml.new");
    std::fs::write(&scratch, text)?;
    Ok(std::fs::rename(scratch, dir.join("hosts.toml"))?)
}

fn log_name(host: &str) -> String {
    format!("registry-{}", host.replace(':', "-"))
}
