//! The node's credential providers: the kubelet's plugins, with its configuration, protocol and rules (Kubernetes'
//! `pkg/credentialprovider/plugin`).
//!
//! ```text
//!  image ─▶ providers that match ─▶ cache, or else one run of the plugin for all who wait ─▶ credentials that match
//! ```
//!
//! Credentials are kept only in memory, and wiped once they have expired.

mod cache;
mod config;
mod duration;
mod exec;
pub mod protocol;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, Shared, WeakShared, join_all};
use prepull_api::credentials::{RegistryConfig, RegistryCredential};
use prepull_api::image::NormalizedReference;
use tokio::time::Instant;
use tracing::{debug, warn};

use crate::metrics::{AgentMetrics, PluginOutcome};
use cache::{Cache, CacheKey, ImageName};
use config::ProviderConfig;
use exec::ExecError;
use protocol::{CacheKeyType, Response};

pub(crate) use config::ProvidersError;
pub(crate) use exec::Stderr;

/// The files that `--image-credential-provider-config` and `--image-credential-provider-bin-dir` name: both or neither.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProviderSettings {
    /// The kubelet's `CredentialProviderConfig`, or a directory of such files.
    pub(crate) config: Option<PathBuf>,
    /// The directory of the programs.
    pub(crate) bin_dir: Option<PathBuf>,
    /// The limit for one run of a program; none for the kubelet's limit.
    pub(crate) timeout: Option<Duration>,
}

/// The answer of all matching providers for one image.
#[derive(Debug, Default)]
pub(crate) struct ProvidersAnswer {
    /// The credentials, in the order in which to try them.
    pub(crate) credentials: Vec<RegistryCredential>,
    /// The names of the providers that the credentials come from.
    pub(crate) given_by: Vec<String>,
    /// Failures and missing answers, explained to the operator.
    pub(crate) problems: Vec<String>,
    /// Whether a plugin failed; it may answer another time.
    pub(crate) failed: bool,
    /// Whether a part of the answer comes from the cache.
    pub(crate) cached: bool,
}

/// All providers of the node, in the order of the configuration.
#[derive(Default)]
pub(crate) struct Providers {
    providers: Vec<Arc<CredentialProvider>>,
}

struct CredentialProvider {
    config: ProviderConfig,
    run: Runner,
    metrics: Option<Arc<AgentMetrics>>,
    state: Mutex<ProviderState>,
}

/// Runs the plugin for an image. It's a value, so that tests need no programs.
type Runner = Box<
    dyn Fn(Arc<CredentialProvider>, ImageName) -> BoxFuture<'static, Result<Response, PluginFailure>>
        + Send
        + Sync,
>;

#[derive(Default)]
struct ProviderState {
    cache: Cache,
    /// The cache key type of the last answer: the next one most likely has the same.
    last_key_type: Option<CacheKeyType>,
    /// The runs in progress.
    runs: HashMap<CacheKey, WeakShared<PluginRun>>,
}

/// A run of the plugin, shared by all who need its answer. It stops when the last of them is gone.
type PluginRun = BoxFuture<'static, Arc<FinishedRun>>;

/// The end of a run for `image`.
struct FinishedRun {
    image: ImageName,
    result: Result<(CacheKeyType, Arc<RegistryConfig>), PluginFailure>,
}

/// Reason why a plugin gave no answer.
#[derive(Debug, thiserror::Error)]
enum PluginFailure {
    #[error(transparent)]
    Exec(ExecError),
    #[error("wrote no valid CredentialProviderResponse: {0}")]
    Malformed(String),
}

impl PluginFailure {
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
    /// Loads the providers; there are none if neither of the two flags is set.
    pub(crate) fn load(
        settings: &ProviderSettings,
        stderr: Stderr,
        metrics: Option<&Arc<AgentMetrics>>,
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
        let run = move |provider: Arc<CredentialProvider>, image: ImageName| {
            async move { provider.exec(&image, timeout, stderr).await }.boxed()
        };
        let provider = |config| CredentialProvider::new(config, Box::new(run), metrics.cloned());
        Ok(Self { providers: providers.into_iter().map(provider).collect() })
    }

    /// The names of all providers.
    pub(crate) fn names(&self) -> Vec<&str> {
        self.providers.iter().map(|provider| &*provider.config.name).collect()
    }

    /// Whether any provider matches the image.
    pub(crate) fn any_match(&self, reference: &NormalizedReference) -> bool {
        self.matching(reference).next().is_some()
    }

    /// Asks all providers that match the image, in parallel.
    pub(crate) async fn ask(&self, reference: &NormalizedReference) -> ProvidersAnswer {
        let image = plugin_image(reference);
        let asked = join_all(self.matching(reference).map(|provider| async {
            (&*provider.config.name, provider.clone().cached_or_asked(&image).await)
        }));
        let mut answer = ProvidersAnswer::default();
        let mut logins = RegistryConfig::default();
        for (name, asked) in asked.await {
            let (own, cached) = match asked {
                ProviderReply::Cached(own) => (own, true),
                ProviderReply::Finished(run) => match &run.result {
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

    /// Removes the cached answers for the image, because the registry refused them.
    pub(crate) fn forget(&self, reference: &NormalizedReference) {
        let image = plugin_image(reference);
        for provider in self.matching(reference) {
            provider.lock().cache.forget(&image);
        }
    }

    fn matching<'a>(
        &'a self,
        reference: &'a NormalizedReference,
    ) -> impl Iterator<Item = &'a Arc<CredentialProvider>> {
        let matches = |provider: &&Arc<CredentialProvider>| {
            provider.config.matches.iter().any(|pattern| pattern.matches(reference))
        };
        self.providers.iter().filter(matches)
    }
}

/// The image as the kubelet passes it to a plugin: without tag and digest.
fn plugin_image(reference: &NormalizedReference) -> ImageName {
    ImageName { registry: reference.registry().to_owned(), name: reference.name() }
}

/// The source of one provider's answer.
enum ProviderReply {
    Cached(Arc<RegistryConfig>),
    Finished(Arc<FinishedRun>),
}

impl CredentialProvider {
    fn new(config: ProviderConfig, run: Runner, metrics: Option<Arc<AgentMetrics>>) -> Arc<Self> {
        Arc::new(Self { config, run, metrics, state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, ProviderState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers from the cache or from the plugin. If the plugin runs for another image and its answer is likely to
    /// cover this image too, waits for that run; if the answer doesn't cover it, runs the plugin for this image.
    async fn cached_or_asked(self: Arc<Self>, image: &ImageName) -> ProviderReply {
        // A plugin that hasn't answered yet may answer for all images together.
        let key_type = self.lock().last_key_type.unwrap_or(CacheKeyType::Global);
        let finished = match self.cached_or_run(CacheKey::new(key_type, image), image) {
            Ok(cached) => return ProviderReply::Cached(cached),
            Err(run) => run.await,
        };
        let covers_image = finished.image == *image
            || finished.result.as_ref().is_ok_and(|(key_type, _)| {
                CacheKey::new(*key_type, &finished.image) == CacheKey::new(*key_type, image)
            });
        if covers_image {
            return ProviderReply::Finished(finished);
        }
        match self.cached_or_run(CacheKey::new(CacheKeyType::Image, image), image) {
            Ok(cached) => ProviderReply::Cached(cached),
            Err(run) => ProviderReply::Finished(run.await),
        }
    }

    /// The cached answer, or else a run of the plugin: the one in progress for this key, or a new one.
    fn cached_or_run(
        self: &Arc<Self>,
        key: CacheKey,
        image: &ImageName,
    ) -> Result<Arc<RegistryConfig>, Shared<PluginRun>> {
        let mut state = self.lock();
        if let Some(cached) = state.cache.get(image, Instant::now()) {
            return Ok(cached);
        }
        if let Some(run) = state.runs.get(&key).and_then(WeakShared::upgrade) {
            return Err(run);
        }
        let run = self.clone().finish_run(image.clone()).boxed().shared();
        // Drop runs that have ended or have no waiters.
        state.runs.retain(|_, run| run.upgrade().is_some());
        state.runs.extend(run.downgrade().map(|run| (key, run)));
        Err(run)
    }

    /// Runs the plugin once, counts and logs the outcome, and caches the answer.
    async fn finish_run(self: Arc<Self>, image: ImageName) -> Arc<FinishedRun> {
        let name = &self.config.name;
        let begun = Instant::now();
        let result = (self.run)(self.clone(), image.clone()).await;
        let took = begun.elapsed();
        let outcome = result.as_ref().map_or_else(PluginFailure::outcome, |_| PluginOutcome::Ok);
        if let Some(metrics) = &self.metrics {
            metrics.count_plugin_run(name, outcome, took);
        }
        let result = match result {
            Ok(Response { key_type, cache_for, logins }) => {
                debug!(provider = %name, image = %image.name, ?key_type, ?took, "credential provider answered");
                let logins = Arc::new(logins);
                let keep = cache_for.unwrap_or(self.config.default_cache_duration);
                let mut state = self.lock();
                state.last_key_type = Some(key_type);
                state.cache.put(CacheKey::new(key_type, &image), logins.clone(), keep, Instant::now());
                Ok((key_type, logins))
            }
            Err(failure) => {
                warn!(provider = %name, image = %image.name, %failure, ?took, "credential provider failed; its stderr is not logged, because it may hold credentials: `edgecore-prepull pull` with the same two flags shows it");
                Err(failure)
            }
        };
        Arc::new(FinishedRun { image, result })
    }

    async fn exec(
        &self,
        image: &ImageName,
        timeout: Duration,
        stderr: Stderr,
    ) -> Result<Response, PluginFailure> {
        let ProviderConfig { name: _, program, matches: _, default_cache_duration: _, version, args, env } =
            &self.config;
        let plugin = exec::Plugin { program, args, env, timeout, stderr };
        let request = protocol::encode_request(*version, &image.name);
        let output = exec::run(plugin, &request).await.map_err(PluginFailure::Exec)?;
        protocol::decode_response(*version, output.bytes()).map_err(PluginFailure::Malformed)
    }
}
