//! The node's credential providers: plugins of the kubelet, with its configuration, its protocol and its rules
//! (Kubernetes' `pkg/credentialprovider/plugin`).
//!
//! ```text
//!  image ─▶ which providers match ─▶ cache ─▶ one run of the plugin for all who ask ─▶ logins that match
//! ```
//!
//! Credentials are in memory only, and are wiped when they expire.

mod cache;
mod config;
mod duration;
mod exec;
mod protocol;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, Shared, WeakShared, join_all};
use prepull_api::credentials::{RegistryConfig, RegistryCredential};
use prepull_api::image::NormalizedReference;
use tokio::time::Instant;
use tracing::{debug, warn};

use crate::config::ProviderSettings;
use crate::metrics::{Metrics, PluginOutcome};
use cache::{Cache, CacheKey, ImageName};
use config::ProviderConfig;
use exec::ExecError;
use protocol::{CacheKeyType, Response};

pub use config::ProvidersError;
pub use exec::Stderr;

/// What the providers have for an image.
#[derive(Debug, Default)]
pub struct Answer {
    /// To be tried in this order.
    pub credentials: Vec<RegistryCredential>,
    /// Names of the providers that they are from.
    pub given_by: Vec<String>,
    /// What went wrong, or was not there, in words for a person.
    pub problems: Vec<String>,
    /// A plugin did not answer. It may another time.
    pub failed: bool,
    /// Something of it was known from before.
    pub cached: bool,
}

/// All providers of the node, in the order of the configuration.
#[derive(Default)]
pub struct Providers {
    providers: Vec<Arc<Provider>>,
}

struct Provider {
    config: ProviderConfig,
    run: Runner,
    metrics: Option<Arc<Metrics>>,
    state: Mutex<State>,
}

/// Runs the plugin for an image. A value, so that tests need no programs.
type Runner =
    Box<dyn Fn(Arc<Provider>, ImageName) -> BoxFuture<'static, Result<Response, Failure>> + Send + Sync>;

#[derive(Default)]
struct State {
    cache: Cache,
    /// How the last answer was to be kept: most likely the next one is as well.
    kind: Option<CacheKeyType>,
    flights: HashMap<CacheKey, WeakShared<Flight>>,
}

/// A run of the plugin that everybody who wants its answer waits for. It stops when nobody does any more.
type Flight = BoxFuture<'static, Arc<Landed>>;

struct Landed {
    image: ImageName,
    result: Result<(CacheKeyType, Arc<RegistryConfig>), Failure>,
}

/// Why a plugin has no answer.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Exec(ExecError),
    #[error("wrote no valid CredentialProviderResponse: {0}")]
    Malformed(String),
}

impl Failure {
    fn outcome(&self) -> PluginOutcome {
        match self {
            Self::Exec(ExecError::Timeout(_)) => PluginOutcome::Timeout,
            Self::Exec(ExecError::TooLong) | Self::Malformed(_) => PluginOutcome::Malformed,
            Self::Exec(ExecError::Start(_) | ExecError::Read(_) | ExecError::Exit(_)) => {
                PluginOutcome::Failed
            }
        }
    }
}

impl fmt::Debug for Providers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.providers.iter().map(|provider| &provider.config)).finish()
    }
}

impl Providers {
    /// Reads the configuration. Neither file nor directory: there are no providers.
    pub fn load(
        settings: &ProviderSettings,
        stderr: Stderr,
        metrics: Option<&Arc<Metrics>>,
    ) -> Result<Self, ProvidersError> {
        const CONFIG: &str = "--image-credential-provider-config";
        const BIN_DIR: &str = "--image-credential-provider-bin-dir";
        let ProviderSettings { config, bin_dir, timeout } = settings;
        let timeout = timeout.unwrap_or(exec::TIMEOUT);
        let providers = match (config, bin_dir) {
            (None, None) => Vec::new(),
            (Some(config), Some(bin_dir)) => config::load(config, bin_dir)?,
            (Some(_), None) => return Err(ProvidersError::HalfSet { given: CONFIG, missing: BIN_DIR }),
            (None, Some(_)) => return Err(ProvidersError::HalfSet { given: BIN_DIR, missing: CONFIG }),
        };
        let run = move |provider: Arc<Provider>, image: ImageName| {
            async move { provider.exec(&image, timeout, stderr).await }.boxed()
        };
        let provider = |config| Provider::new(config, Box::new(run), metrics.cloned());
        Ok(Self { providers: providers.into_iter().map(provider).collect() })
    }

    /// Names of all providers.
    pub fn names(&self) -> Vec<&str> {
        self.providers.iter().map(|provider| &*provider.config.name).collect()
    }

    /// Whether any provider is for this image.
    pub fn any_for(&self, reference: &NormalizedReference) -> bool {
        self.matching(reference).next().is_some()
    }

    /// Asks the providers that match the image, all at once.
    pub async fn ask(&self, reference: &NormalizedReference) -> Answer {
        let image = name_of(reference);
        let asked = join_all(
            self.matching(reference)
                .map(|provider| async { (&*provider.config.name, provider.clone().ask(&image).await) }),
        );
        let mut answer = Answer::default();
        let mut logins = RegistryConfig::default();
        for (name, asked) in asked.await {
            let (own, cached) = match asked {
                Asked::Cached(own) => (own, true),
                Asked::Landed(landed) => match &landed.result {
                    Ok((_, own)) => (own.clone(), false),
                    Err(failure) => {
                        answer.failed = true;
                        answer.problems.push(format!("credential provider {name} {failure}"));
                        continue;
                    }
                },
            };
            let found = own.lookup(reference);
            for problem in &found.broken {
                answer.problems.push(format!("credential provider {name}: {problem}"));
            }
            if !found.credentials.is_empty() {
                answer.given_by.push(name.to_owned());
            } else if found.broken.is_empty() {
                answer.problems.push(format!("credential provider {name} has no credential for it"));
            }
            answer.cached |= cached;
            logins.extend((*own).clone());
        }
        answer.credentials = logins.credentials_for(reference);
        answer
    }

    /// What is known for the image is not to be used again: the registry refused it.
    pub fn forget(&self, reference: &NormalizedReference) {
        let image = name_of(reference);
        for provider in self.matching(reference) {
            provider.lock().cache.forget(&image);
        }
    }

    fn matching<'a>(&'a self, reference: &'a NormalizedReference) -> impl Iterator<Item = &'a Arc<Provider>> {
        let matches = |provider: &&Arc<Provider>| {
            provider.config.matches.iter().any(|pattern| pattern.matches(reference))
        };
        self.providers.iter().filter(matches)
    }
}

/// As the kubelet gives an image to a plugin.
fn name_of(reference: &NormalizedReference) -> ImageName {
    ImageName { registry: reference.registry().to_owned(), name: reference.name() }
}

enum Asked {
    Cached(Arc<RegistryConfig>),
    Landed(Arc<Landed>),
}

impl Provider {
    fn new(config: ProviderConfig, run: Runner, metrics: Option<Arc<Metrics>>) -> Arc<Self> {
        Arc::new(Self { config, run, metrics, state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From the cache, or from the plugin. Who comes while the plugin runs waits for that run, where its answer will
    /// most likely hold for both; if it then does not, the plugin is run for this very image.
    async fn ask(self: Arc<Self>, image: &ImageName) -> Asked {
        // Nothing is known of a plugin that has not answered yet: its first answer may be for everything.
        let kind = self.lock().kind.unwrap_or(CacheKeyType::Global);
        let landed = match self.flight(CacheKey::new(kind, image), image) {
            Ok(known) => return Asked::Cached(known),
            Err(flight) => flight.await,
        };
        let is_for_us = landed.image == *image
            || landed
                .result
                .as_ref()
                .is_ok_and(|(kind, _)| CacheKey::new(*kind, &landed.image) == CacheKey::new(*kind, image));
        if is_for_us {
            return Asked::Landed(landed);
        }
        match self.flight(CacheKey::new(CacheKeyType::Image, image), image) {
            Ok(known) => Asked::Cached(known),
            Err(flight) => Asked::Landed(flight.await),
        }
    }

    /// What the cache knows, or else a run of the plugin: one that is under way for this key, or a new one.
    fn flight(
        self: &Arc<Self>,
        key: CacheKey,
        image: &ImageName,
    ) -> Result<Arc<RegistryConfig>, Shared<Flight>> {
        let mut state = self.lock();
        if let Some(known) = state.cache.get(image, Instant::now()) {
            return Ok(known);
        }
        if let Some(flight) = state.flights.get(&key).and_then(WeakShared::upgrade) {
            return Err(flight);
        }
        let flight = self.clone().fly(image.clone()).boxed().shared();
        // Those that have landed, or were left.
        state.flights.retain(|_, flight| flight.upgrade().is_some());
        state.flights.extend(flight.downgrade().map(|flight| (key, flight)));
        Err(flight)
    }

    async fn fly(self: Arc<Self>, image: ImageName) -> Arc<Landed> {
        let name = &self.config.name;
        let begun = Instant::now();
        let result = (self.run)(self.clone(), image.clone()).await;
        let took = begun.elapsed();
        let outcome = result.as_ref().map_or_else(Failure::outcome, |_| PluginOutcome::Ok);
        if let Some(metrics) = &self.metrics {
            metrics.plugin_ended(name, outcome, took);
        }
        let result = match result {
            Ok(Response { key_type, cache_for, logins }) => {
                debug!(provider = %name, image = %image.name, ?key_type, ?took, "credential provider answered");
                let logins = Arc::new(logins);
                let keep = cache_for.unwrap_or(self.config.default_cache_duration);
                let mut state = self.lock();
                state.kind = Some(key_type);
                state.cache.put(CacheKey::new(key_type, &image), logins.clone(), keep, Instant::now());
                Ok((key_type, logins))
            }
            Err(failure) => {
                warn!(provider = %name, image = %image.name, %failure, ?took, "credential provider failed; what it wrote on stderr may hold credentials and is not logged: `edgecore-prepull pull` with the same two flags shows it");
                Err(failure)
            }
        };
        Arc::new(Landed { image, result })
    }

    async fn exec(&self, image: &ImageName, timeout: Duration, stderr: Stderr) -> Result<Response, Failure> {
        let ProviderConfig { name: _, program, matches: _, default_cache_duration: _, version, args, env } =
            &self.config;
        let plugin = exec::Plugin { program, args, env, timeout, stderr };
        let request = protocol::request(*version, &image.name);
        let output = exec::run(plugin, &request).await.map_err(Failure::Exec)?;
        protocol::decode(*version, output.bytes()).map_err(Failure::Malformed)
    }
}
