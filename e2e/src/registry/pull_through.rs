//! A docker-registry as a pull-through cache: it fetches requested content from another one, and keeps it.

use std::net::SocketAddr;
use std::process::Command;

use anyhow::Result;
use serde_json::json;

use crate::cleanup::{Child, SOON, eventually};
use crate::network::Outlet;
use crate::place::Place;

/// Port in the box, which has a namespace of its own.
const PORT: u16 = 5000;

/// A pull-through cache on a box of a site. It is empty at first.
pub struct PullThrough {
    addr: SocketAddr,
    _process: Child,
}

impl PullThrough {
    /// Starts a cache in a box. `upstream` is the registry's address for the box.
    pub async fn start(outlet: &Outlet, upstream: SocketAddr) -> Result<Self> {
        let place = Place::here()?;
        let dir = place.new_dir("cache")?;
        let addr = SocketAddr::from((outlet.address(), PORT));
        let config = json!({
            "version": "0.1",
            "log": {"level": "info", "formatter": "json"},
            "storage": {
                "filesystem": {"rootdirectory": dir.join("storage")},
                "cache": {"blobdescriptor": "inmemory"},
            },
            "http": {"addr": addr.to_string(), "secret": "of one process, so of no use to anybody"},
            "proxy": {"remoteurl": format!("http://{upstream}")},
        });
        // The registry reads YAML, which includes JSON.
        let file = dir.join("config.json");
        std::fs::write(&file, config.to_string())?;
        let mut command = Command::new("docker-registry");
        command.arg("serve").arg(file);
        let mut process = Child::spawn(&place, "pull-through", outlet.space().wrap_command(&command))?;
        let listens = async || outlet.try_connect(addr);
        if let Err(error) = eventually("the pull-through cache listens", SOON, listens).await {
            process.check_running()?;
            return Err(error);
        }
        Ok(Self { addr, _process: process })
    }

    /// Address in the site.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}
