//! The edge's end of the tunnel: the real dialler, with the test in the role of the agent.

use std::path::Path;
use std::time::Duration;

use edgecore_prepull::cloud::identity::Identity;
use edgecore_prepull::cloud::join::{self, JoinArgs, JoinError, Joined};
use edgecore_prepull::cloud::tunnel::dial::{Dial, TunnelSettings};
use edgecore_prepull::cloud::tunnel::{TunnelEvent, TunnelSender};
use prepull_api::enroll::JoinToken;
use prepull_api::wire::{CloudMessage, Hello, Welcome};
use tempfile::TempDir;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::cloud::{Cloud, SOON};

pub(crate) fn join_args(cloud: &Cloud, token: &JoinToken, node: &str, state_dir: &Path) -> JoinArgs {
    JoinArgs {
        server: Vec::new(),
        enroll_url: vec![cloud.enroll_url()],
        tunnel_url: vec![cloud.tunnel_url()],
        token: token.expose().into(),
        node_name: node.into(),
        state_dir: state_dir.into(),
        force: false,
        unless_joined: false,
    }
}

pub(crate) async fn join(
    cloud: &Cloud,
    token: &JoinToken,
    node: &str,
    dir: &Path,
) -> Result<Joined, JoinError> {
    timeout(SOON, join::run(join_args(cloud, token, node, dir))).await.unwrap()
}

/// Short waits between two attempts.
pub(crate) fn impatient() -> TunnelSettings {
    TunnelSettings {
        first_backoff: Duration::from_millis(20),
        last_backoff: Duration::from_millis(100),
        ..TunnelSettings::default()
    }
}

pub(crate) struct Agent {
    pub(crate) identity: Identity,
    pub(crate) link: TunnelSender,
    events: mpsc::Receiver<TunnelEvent>,
    pub(crate) shutdown: CancellationToken,
    _stop: DropGuard,
    _state: TempDir,
}

impl Agent {
    /// Joins, and leaves it at that.
    pub(crate) async fn join(cloud: &Cloud, node: &str) -> TempDir {
        let state = tempfile::tempdir().unwrap();
        let token = cloud.token(cloudcore_prepull::edges::tokens::Scope::Node(node.into())).await;
        join(cloud, &token, node, state.path()).await.unwrap();
        state
    }

    /// Joins and starts to dial the cloud, or `tunnel_url` if it is given.
    pub(crate) async fn start(cloud: &Cloud, node: &str, tunnel_url: Option<String>) -> Self {
        let settings = impatient();
        let url = tunnel_url.unwrap_or_else(|| cloud.tunnel_url());
        Self::dialling(cloud, node, vec![url], settings).await
    }

    /// Starts to dial the cloud with an identity that is there.
    pub(crate) fn of(cloud: &Cloud, identity: Identity) -> Self {
        let settings =
            TunnelSettings { first_backoff: Duration::from_secs(3600), ..TunnelSettings::default() };
        Self::with(identity, vec![cloud.tunnel_url()], settings, tempfile::tempdir().unwrap())
    }

    /// Joins and starts to dial these URLs.
    pub(crate) async fn dialling(
        cloud: &Cloud,
        node: &str,
        tunnel_urls: Vec<String>,
        settings: TunnelSettings,
    ) -> Self {
        Self::wake(Self::join(cloud, node).await, tunnel_urls, settings)
    }

    /// Starts to dial these URLs, with what a join has left.
    pub(crate) fn wake(state: TempDir, tunnel_urls: Vec<String>, settings: TunnelSettings) -> Self {
        let identity = Identity::load(state.path()).unwrap();
        Self::with(identity, tunnel_urls, settings, state)
    }

    fn with(identity: Identity, tunnel_urls: Vec<String>, settings: TunnelSettings, state: TempDir) -> Self {
        let (link, outgoing) = TunnelSender::new(8);
        let (sender, events) = mpsc::channel(8);
        let shutdown = CancellationToken::new();
        let dial = Dial::new(settings, identity.clone(), sender, shutdown.clone());
        tokio::spawn(dial.keep_session(tunnel_urls, outgoing));
        Self { identity, link, events, _stop: shutdown.clone().drop_guard(), shutdown, _state: state }
    }

    /// Sends `Hello` whenever it is asked to, until the shutdown.
    pub(crate) async fn say_hello_forever(mut self) {
        while let Some(event) = self.events.recv().await {
            if let TunnelEvent::Connecting(answer) = event {
                let _ = answer.send(Hello::default());
            }
        }
    }

    pub(crate) async fn event(&mut self) -> TunnelEvent {
        timeout(SOON, self.events.recv()).await.expect("no event came").unwrap()
    }

    /// Sends `Hello` until the cloud welcomes the agent.
    pub(crate) async fn connected(&mut self, hello: Hello) -> Welcome {
        loop {
            match self.event().await {
                TunnelEvent::Connecting(answer) => answer.send(hello.clone()).unwrap(),
                TunnelEvent::Connected(welcome) => return welcome,
                TunnelEvent::Disconnected => {}
                other @ TunnelEvent::Message(_) => panic!("{other:?}"),
            }
        }
    }

    pub(crate) async fn message(&mut self) -> CloudMessage {
        match self.event().await {
            TunnelEvent::Message(message) => message,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn disconnected(&mut self) {
        match self.event().await {
            TunnelEvent::Disconnected => {}
            other => panic!("{other:?}"),
        }
    }
}
