//! The start of an edge node.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use futures::FutureExt;
use futures::future::BoxFuture;

use super::containerd::Data;
use super::eavesdropper::Eavesdropper;
use super::{Containerd, EdgeNode};
use crate::cloud::Cloud;
use crate::disk::Format;
use crate::network::{Cable, EdgeWire, Outlet, Passage, Space};
use crate::parts;
use crate::place::Place;
use crate::ports::Port;
use crate::proxy::Proxy;

/// An edge node that has not been started; `.await` starts it.
pub struct NodeStart<'a> {
    cloud: &'a Cloud,
    name: String,
    tunnel: SocketAddr,
    arguments: Vec<OsString>,
    space: Option<Space>,
    /// Whether containerd runs in the namespace as well.
    whole: bool,
    environment: Vec<(&'static str, OsString)>,
    data: Data,
    eavesdropped: bool,
    agent: bool,
    identity: Origin,
    /// Where a node joins that does it in its namespace.
    enrolls_at: Option<SocketAddr>,
}

/// The source of a node's identity.
enum Origin {
    /// A new token.
    Token,
    /// This token.
    Given(String),
    /// A copy of an earlier state directory.
    StateDir(PathBuf),
}

impl<'a> NodeStart<'a> {
    pub(super) fn new(cloud: &'a Cloud, name: &str) -> Self {
        Self {
            cloud,
            name: name.to_owned(),
            tunnel: cloud.tunnel_addr(),
            arguments: Vec::new(),
            space: None,
            whole: false,
            environment: Vec::new(),
            data: Data::Shared,
            eavesdropped: false,
            agent: true,
            identity: Origin::Token,
            enrolls_at: None,
        }
    }

    /// Connects the tunnel through a proxy in front of [`Cloud::tunnel_addr`].
    #[must_use]
    pub fn tunnel_through(mut self, proxy: &Proxy) -> Self {
        self.tunnel = proxy.addr();
        self
    }

    /// Runs the agent at the end of a cable of the cloud's network. Containerd and the registries stay outside, so the
    /// runtime pulls: the cable reaches no registry.
    #[must_use]
    pub fn on_cable(mut self, cable: &Cable) -> Self {
        self.space = Some(cable.edge_space().clone());
        let port = self.cloud.tunnel_addr().port();
        self.tunnel_at((cable.cloud_address(), port).into()).args(&["--fetch", "runtime"])
    }

    /// Runs agent and containerd in a box of a site, with the tunnel at this address.
    #[must_use]
    pub fn in_box(mut self, outlet: &Outlet, tunnel: SocketAddr) -> Self {
        self.space = Some(outlet.space().clone());
        self.whole = true;
        self.tunnel_at(tunnel)
    }

    /// Runs the agent at the end of a wire, with the tunnel at this address. Containerd stays outside, so the agent
    /// must download.
    #[must_use]
    pub fn behind_wire(mut self, wire: &EdgeWire, tunnel: SocketAddr) -> Self {
        self.space = Some(wire.edge_space().clone());
        self.tunnel_at(tunnel).args(&["--fetch", "agent"])
    }

    /// Connects the tunnel to this address.
    #[must_use]
    pub fn tunnel_at(mut self, addr: SocketAddr) -> Self {
        self.tunnel = addr;
        self
    }

    /// Joins at this address, in the namespace of the box.
    #[must_use]
    pub fn enrolls_at(mut self, addr: SocketAddr) -> Self {
        self.enrolls_at = Some(addr);
        self
    }

    /// Sets a variable of the agent's environment, and of its join.
    #[must_use]
    pub fn environment(mut self, name: &'static str, value: &str) -> Self {
        self.environment.push((name, value.into()));
        self
    }

    /// Adds flags of `edgecore-prepull run`.
    #[must_use]
    pub fn args(mut self, arguments: &[&str]) -> Self {
        self.arguments.extend(arguments.iter().map(Into::into));
        self
    }

    /// Puts the runtime's data on a disk of this many bytes.
    #[must_use]
    pub fn disk(mut self, size: u64) -> Self {
        self.data = Data::Memory(size);
        self
    }

    /// Puts the runtime's data on an ext4 of this many bytes.
    #[must_use]
    pub fn ext4(mut self, size: u64) -> Self {
        self.data = Data::Disk(Format::Ext4, size);
        self
    }

    /// Puts the data of the runtime and of the agent on a disk that records its writes.
    #[must_use]
    pub fn recorded(mut self, format: Format) -> Self {
        self.data = Data::Recorded(format);
        self
    }

    /// Records the agent's requests to its runtime.
    #[must_use]
    pub fn eavesdropped(mut self) -> Self {
        self.eavesdropped = true;
        self
    }

    /// Sets the agent's wall clock ahead by this many seconds, or behind; its monotonic clock doesn't change.
    pub fn clock_off_by(mut self, seconds: i64) -> Result<Self> {
        self.environment = clock_off_by(seconds)?;
        Ok(self)
    }

    /// Joins without starting the agent, which [`EdgeNode::restart_agent`] then does.
    #[must_use]
    pub fn without_agent(mut self) -> Self {
        self.agent = false;
        self
    }

    /// Joins with this token instead of a new one.
    #[must_use]
    pub fn with_token(mut self, token: &str) -> Self {
        self.identity = Origin::Given(token.to_owned());
        self
    }

    /// Takes a copy of this state directory instead of joining. [`Self::args`] must give the addresses of the cloud.
    #[must_use]
    pub fn joined_before(mut self, state: &Path) -> Self {
        self.identity = Origin::StateDir(state.to_owned());
        self
    }

    async fn start(self) -> Result<EdgeNode> {
        let Self {
            cloud,
            name,
            tunnel,
            arguments,
            space,
            whole,
            environment,
            data,
            eavesdropped,
            agent,
            identity,
            enrolls_at,
        } = self;
        let token = async {
            Ok(match &identity {
                Origin::Token => Some(cloud.token(&name).await?),
                Origin::Given(token) => Some(token.clone()),
                Origin::StateDir(_) => None,
            })
        };
        let of_runtime = space.clone().filter(|_| whole);
        let is_recorded = matches!(data, Data::Recorded(_));
        let (containerd, token) = tokio::try_join!(Containerd::start_in(&name, data, of_runtime), token)?;
        let place = Place::here()?;
        let state = if is_recorded { containerd.root() } else { containerd.dir().to_owned() }.join("agent");
        if let Some(token) = token {
            let enroll = enrolls_at.unwrap_or_else(|| cloud.enroll_addr());
            let mut command = cloud.join_command(&token, &name, &state, (tunnel, enroll))?;
            command.envs(environment.iter().cloned());
            if let Some(space) = space.as_ref().filter(|_| enrolls_at.is_some()) {
                command = space.wrap_command(&command);
            }
            parts::run_command(command).await.with_context(|| format!("{name} cannot join"))?;
        } else if let Origin::StateDir(from) = &identity {
            let mut copy = Command::new("cp");
            copy.arg("-r").arg(from).arg(&state);
            parts::run_command(copy).await?;
        }
        let metrics = Port::reserve()?;
        let space = match space {
            Some(space) => {
                let passage = Passage::between_spaces(None, Some(&space), metrics.addr())?;
                Some((space, passage))
            }
            None => None,
        };
        let eavesdropper = eavesdropped.then(|| Eavesdropper::in_front_of(&containerd)).transpose()?;
        let mut node = EdgeNode {
            place,
            name,
            containerd,
            state,
            metrics,
            arguments,
            space,
            environment,
            eavesdropper,
            agent: None,
            programs: cloud.programs().clone(),
        };
        if agent {
            node.restart_agent()?;
        }
        Ok(node)
    }
}

/// The environment that sets a program's wall clock off.
pub(super) fn clock_off_by(seconds: i64) -> Result<Vec<(&'static str, OsString)>> {
    let mut environment = parts::faketime()?;
    environment.push(("FAKETIME", format!("{seconds:+}s").into()));
    Ok(environment)
}

impl<'a> IntoFuture for NodeStart<'a> {
    type Output = Result<EdgeNode>;
    type IntoFuture = BoxFuture<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        self.start().boxed()
    }
}
