//! The client of a process: its connections and its tokens.

use std::sync::Arc;

use prepull_api::credentials::RegistryCredential;
use prepull_api::image::NormalizedReference;
use rustls::time_provider::{DefaultTimeProvider, TimeProvider};

use crate::auth::TokenCache;
use crate::error::RegistryError;
use crate::hosts::{self, HostsFiles};
use crate::proxy::Proxies;
use crate::repository::{Repository, SharedClient};
use crate::transport::Transport;

/// The settings of the client's surroundings.
#[derive(Clone, Debug, Default)]
pub struct ClientSettings {
    /// Where the endpoints of registries are written.
    pub hosts: HostsFiles,
    /// `User-Agent` of each request.
    pub user_agent: String,
    /// The proxies to go through.
    pub proxies: Proxies,
    /// The time by which certificates are valid or not; `None` for this machine's clock.
    pub time: Option<Arc<dyn TimeProvider>>,
}

/// A client of registries. Cheap to clone; the clones share connections and tokens.
#[derive(Clone)]
pub struct RegistryClient {
    shared: Arc<SharedClient>,
    hosts: Arc<HostsFiles>,
}

impl RegistryClient {
    /// Makes a client. It connects to nothing yet.
    pub fn new(settings: ClientSettings) -> Self {
        let ClientSettings { hosts, user_agent, proxies, time } = settings;
        let time = time.unwrap_or_else(|| Arc::new(DefaultTimeProvider));
        let transport = Transport::new(proxies, &user_agent, time);
        let shared = SharedClient { transport, tokens: TokenCache::default() };
        Self { shared: Arc::new(shared), hosts: Arc::new(hosts) }
    }

    /// The repository of a reference. Reads hosts.toml each time, as containerd does.
    pub fn repository(
        &self,
        reference: &NormalizedReference,
        credential: Option<&RegistryCredential>,
    ) -> Result<Repository, RegistryError> {
        let endpoints = hosts::endpoints(&self.hosts, reference.registry())?;
        Ok(Repository::new(Arc::clone(&self.shared), reference, endpoints, credential))
    }
}
