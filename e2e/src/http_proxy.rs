//! A real HTTP proxy, Debian's tinyproxy, on a machine of a site.

use std::fs::Permissions;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Result, ensure};

use crate::cleanup::{Child, SOON, eventually};
use crate::network::{Lan, Outlet};
use crate::place::{Place, password};

const PORT: u16 = 3128;
/// The user that the proxy knows.
const USER: &str = "store";

/// A proxy that asks for a user and a password. Fields are dropped in this order.
pub struct HttpProxy {
    process: Child,
    outlet: Outlet,
    config: PathBuf,
    place: Arc<Place>,
}

impl HttpProxy {
    /// Starts a proxy at the switch of a site, and waits until it listens.
    pub async fn start(lan: &Lan) -> Result<Self> {
        let (place, outlet) = (Place::here()?, lan.add_outlet().await?);
        let file = place.new_dir("tinyproxy")?.join("tinyproxy.conf");
        let config = format!(
            "User root\nGroup root\nPort {PORT}\nListen {}\nTimeout 600\nMaxClients 100\nLogLevel Connect\n\
             BasicAuth {USER} {}\n",
            outlet.address(),
            password(USER),
        );
        std::fs::write(&file, config)?;
        std::fs::set_permissions(&file, Permissions::from_mode(0o600))?;
        let process = spawn(&place, &outlet, &file)?;
        let proxy = Self { process, outlet, config: file, place };
        proxy.listens().await?;
        Ok(proxy)
    }

    /// Kills the proxy, and starts it again.
    pub async fn restart(&mut self) -> Result<()> {
        self.process.kill9()?;
        self.process = spawn(&self.place, &self.outlet, &self.config)?;
        self.listens().await
    }

    async fn listens(&self) -> Result<()> {
        let addr = SocketAddr::from((self.outlet.address(), PORT));
        eventually("the proxy listens", SOON, async || self.outlet.try_connect(addr)).await
    }

    /// The proxy, without its user.
    pub fn shown(&self) -> String {
        format!("http://{}:{PORT}", self.outlet.address())
    }

    /// The value of `HTTPS_PROXY`.
    pub fn url(&self) -> String {
        self.url_of(&password(USER))
    }

    /// The value of `HTTPS_PROXY` with another password.
    pub fn url_of(&self, password: &str) -> String {
        format!("http://{USER}:{password}@{}:{PORT}", self.outlet.address())
    }

    /// Fails unless the proxy was asked to connect to this address.
    pub fn has_connected(&self, addr: SocketAddr) -> Result<()> {
        let asked = format!("CONNECT {addr} HTTP");
        ensure!(self.process.log().contains(&asked), "the proxy was not asked for {addr}");
        Ok(())
    }
}

fn spawn(place: &Place, outlet: &Outlet, config: &Path) -> Result<Child> {
    let mut command = Command::new("tinyproxy");
    command.arg("-d").arg("-c").arg(config);
    Child::spawn(place, "tinyproxy", outlet.space().wrap_command(&command))
}
