//! The start of a cloud.

use std::ffi::OsString;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use futures::FutureExt;
use futures::future::BoxFuture;

use super::{Cloud, PROGRAM, WITHOUT_CONSENT};
use crate::api_proxy::ApiProxy;
use crate::cluster::Cluster;
use crate::network::{Network, Space};
use crate::parts::Programs;
use crate::ports::Port;

/// Times of the leader election: short, since tests wait for them, and long enough for a busy machine.
const ELECTION: [&str; 3] =
    ["--lease-duration=4s", "--lease-renew-deadline=3s", "--lease-retry-period=500ms"];

/// A cloud that has not been started; `.await` starts it.
pub struct Start<'a> {
    cluster: &'a Cluster,
    kubeconfig: PathBuf,
    name: String,
    arguments: Vec<OsString>,
    requires_consent: bool,
    /// Flags of the leader election, if there is one.
    election: Option<&'static [&'static str]>,
    standby: bool,
    pod: Option<String>,
    space: Option<Space>,
    edges_at: Option<Ipv4Addr>,
    clock: Option<PathBuf>,
    programs: Programs,
}

impl<'a> Start<'a> {
    pub(super) fn new(cluster: &'a Cluster) -> Self {
        let kubeconfig = cluster.cloudcore_kubeconfig().to_owned();
        Self {
            cluster,
            kubeconfig,
            name: PROGRAM.to_owned(),
            arguments: Vec::new(),
            requires_consent: false,
            space: None,
            edges_at: None,
            election: None,
            standby: false,
            pod: None,
            clock: None,
            programs: Programs::Built,
        }
    }

    /// Adds a flag of `run`.
    #[must_use]
    pub fn arg(mut self, argument: &str) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// Adds flags of `run`.
    #[must_use]
    pub fn args(mut self, arguments: &[&str]) -> Self {
        self.arguments.extend(arguments.iter().map(Into::into));
        self
    }

    /// Uses a secret only for jobs that its owner allows, as in a release.
    #[must_use]
    pub fn requires_consent(mut self) -> Self {
        self.requires_consent = true;
        self
    }

    /// Connects to the API server through a proxy.
    #[must_use]
    pub fn through(mut self, api: &ApiProxy) -> Self {
        api.kubeconfig().clone_into(&mut self.kubeconfig);
        self
    }

    /// Runs the cloud in its namespace of the network.
    #[must_use]
    pub fn within(mut self, network: &Network) -> Self {
        self.space = Some(network.cloud_space().clone());
        self
    }

    /// Lists the edges at this address.
    #[must_use]
    pub fn lists_edges_at(mut self, address: Ipv4Addr) -> Self {
        self.edges_at = Some(address);
        self
    }

    /// Runs the cloud with leader election, with times that replace a leader that hangs within seconds.
    #[must_use]
    pub fn replica(mut self) -> Self {
        self.election = Some(&ELECTION);
        self
    }

    /// Starts a [`Self::replica`] that need not lead: it counts as started when /healthz answers.
    #[must_use]
    pub fn standby(mut self) -> Self {
        self.standby = true;
        self.replica()
    }

    /// Elects the leader with the program's default times, which a busy machine can meet.
    #[must_use]
    pub fn default_election_times(mut self) -> Self {
        self.election = Some(&[]);
        self
    }

    /// Lets the cloud act as the container of this pod, which the test has created.
    #[must_use]
    pub fn in_pod(mut self, pod: &str) -> Self {
        self.pod = Some(pod.to_owned());
        self
    }

    /// Uses the programs of an earlier release, until [`Cloud::upgrade`].
    #[must_use]
    pub fn of_before(mut self, dir: &Path) -> Self {
        self.programs = Programs::Before(dir.to_owned());
        self.requires_consent = true;
        self
    }

    /// Sets the kubeconfig.
    #[must_use]
    pub fn kubeconfig(mut self, file: &Path) -> Self {
        file.clone_into(&mut self.kubeconfig);
        self
    }

    /// Sets the clock by this file, which says by how much it's ahead, like `+6h`. It may change at any time.
    #[must_use]
    pub fn clock_of(mut self, file: &Path) -> Self {
        self.clock = Some(file.to_owned());
        self
    }

    /// Sets the name of the log, so that there can be a second cloud.
    #[must_use]
    pub fn named(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        self
    }

    async fn start(self) -> Result<Cloud> {
        let place = Arc::clone(self.cluster.place());
        let mut arguments = self.arguments;
        if !self.requires_consent {
            arguments.push(WITHOUT_CONSENT.into());
        }
        match self.election {
            Some(times) => arguments.extend(times.iter().map(Into::into)),
            None => arguments.push("--leader-elect=false".into()),
        }
        // `make test` plays every recording again, and looks for credentials in it.
        if std::env::var_os("PREPULL_E2E_RECORD").is_some() {
            let file = place.logs().join(format!("{}.recording", self.name));
            arguments.extend(["--record".into(), file.into()]);
        }
        let mut cloud = Cloud {
            dir: place.new_dir("cloud")?,
            place,
            name: self.name,
            kubeconfig: self.kubeconfig,
            tunnel: Port::reserve()?,
            enroll: Port::reserve()?,
            metrics: Port::reserve()?,
            edges: Port::reserve()?,
            edges_at: self.edges_at,
            front: None,
            arguments,
            standby: self.standby,
            pod: self.pod,
            clock: self.clock,
            space: None,
            process: None,
            hold: self.cluster.hold(),
            programs: self.programs,
        };
        if let Some(space) = self.space {
            cloud.space = Some((space.clone(), cloud.passages(&space)?));
        }
        cloud.restart().await?;
        Ok(cloud)
    }
}

impl<'a> IntoFuture for Start<'a> {
    type Output = Result<Cloud>;
    type IntoFuture = BoxFuture<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        self.start().boxed()
    }
}
