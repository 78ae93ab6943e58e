//! What Prometheus can see of the agent, and its health.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Response, StatusCode, header};
use hyper_util::rt::{TokioIo, TokioTimer};
use prepull_api::task::TaskOutcome;
use prometheus_client::encoding::{EncodeLabelSet, text::encode};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tracing::debug;

/// Requests at a time: one collector and one person.
const CONNECTIONS: usize = 4;
/// A client that takes longer to say what it wants is let go.
const HEADER_DEADLINE: Duration = Duration::from_secs(5);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Address {
    address: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Provider {
    provider: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ProviderOutcome {
    provider: String,
    outcome: &'static str,
}

/// How a run of a credential provider's plugin ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PluginOutcome {
    /// It answered.
    Ok,
    /// It could not be started, or said that it failed.
    Failed,
    /// It was killed.
    Timeout,
    /// It wrote something else than an answer.
    Malformed,
}

/// Seconds. A plugin asks a server on the same machine, or one in its cloud; at a minute it is killed.
const PLUGIN_BUCKETS: [f64; 7] = [0.05, 0.2, 0.5, 2.0, 5.0, 15.0, 60.0];

/// All metrics of edgecore-prepull.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    connected: Gauge,
    session: Family<Address, Gauge>,
    open_tasks: Gauge,
    tasks: Family<Outcome, Counter>,
    images: Family<Outcome, Counter>,
    plugins: Family<ProviderOutcome, Counter>,
    plugin_seconds: Family<Provider, Histogram, fn() -> Histogram>,
    runtime_up: AtomicBool,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("edgecore_prepull");
        let connected = Gauge::default();
        let session = Family::default();
        let open_tasks = Gauge::default();
        let tasks = Family::default();
        let images = Family::default();
        registry.register("connected", "1 while the tunnel is up", connected.clone());
        registry.register("session", "1 for the address that the session is with", session.clone());
        registry.register("open_tasks", "Tasks in the ledger", open_tasks.clone());
        registry.register("tasks", "Tasks that ended, by outcome", tasks.clone());
        registry.register("images", "Images that ended, by outcome", images.clone());
        let plugins = Family::default();
        let plugin_seconds =
            Family::new_with_constructor((|| Histogram::new(PLUGIN_BUCKETS)) as fn() -> Histogram);
        registry.register(
            "credential_provider_execs",
            "Runs of credential providers' plugins, by outcome",
            plugins.clone(),
        );
        registry.register(
            "credential_provider_exec_duration_seconds",
            "How long a run of a credential provider's plugin took",
            plugin_seconds.clone(),
        );
        Self {
            registry,
            connected,
            session,
            open_tasks,
            tasks,
            images,
            plugins,
            plugin_seconds,
            runtime_up: AtomicBool::new(false),
        }
    }
}

impl Metrics {
    /// The tunnel came up or went down.
    pub fn connected(&self, up: bool) {
        self.connected.set(i64::from(up));
    }

    /// With which of its addresses the node has a session, if with any.
    pub fn session(&self, address: Option<String>) {
        self.session.clear();
        if let Some(address) = address {
            self.session.get_or_create(&Address { address }).set(1);
        }
    }

    /// How many tasks the ledger holds.
    pub fn open_tasks(&self, count: usize) {
        self.open_tasks.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// A task ended.
    pub fn task_ended(&self, outcome: TaskOutcome) {
        let outcome = match outcome {
            TaskOutcome::Succeeded => "succeeded",
            TaskOutcome::Failed => "failed",
            TaskOutcome::DeadlineExceeded => "deadline_exceeded",
            TaskOutcome::Cancelled => "cancelled",
        };
        self.tasks.get_or_create(&Outcome { outcome }).inc();
    }

    /// An image ended.
    pub fn image_ended(&self, there: bool) {
        let outcome = if there { "there" } else { "failed" };
        self.images.get_or_create(&Outcome { outcome }).inc();
    }

    /// A run of a credential provider's plugin ended. Providers are as many as the configuration has.
    pub fn plugin_ended(&self, provider: &str, outcome: PluginOutcome, took: Duration) {
        let outcome = match outcome {
            PluginOutcome::Ok => "ok",
            PluginOutcome::Failed => "failed",
            PluginOutcome::Timeout => "timeout",
            PluginOutcome::Malformed => "malformed",
        };
        let provider = provider.to_owned();
        self.plugin_seconds
            .get_or_create(&Provider { provider: provider.clone() })
            .observe(took.as_secs_f64());
        self.plugins.get_or_create(&ProviderOutcome { provider, outcome }).inc();
    }

    /// Whether the container runtime answers.
    pub fn runtime_up(&self, up: bool) {
        self.runtime_up.store(up, Ordering::Relaxed);
    }

    fn answer(&self, path: &str) -> (StatusCode, &'static str, String) {
        const TEXT: &str = "text/plain; charset=utf-8";
        match path {
            "/healthz" => (StatusCode::OK, TEXT, "ok\n".to_owned()),
            "/readyz" if self.runtime_up.load(Ordering::Relaxed) => (StatusCode::OK, TEXT, "ok\n".to_owned()),
            "/readyz" => {
                (StatusCode::SERVICE_UNAVAILABLE, TEXT, "the container runtime does not answer\n".to_owned())
            }
            "/metrics" => {
                let mut text = String::new();
                // Writing to a String cannot fail.
                let _ = encode(&mut text, &self.registry);
                (StatusCode::OK, "application/openmetrics-text; version=1.0.0; charset=utf-8", text)
            }
            _ => (StatusCode::NOT_FOUND, TEXT, "there are /metrics, /healthz and /readyz\n".to_owned()),
        }
    }
}

/// Serves until the token is cancelled.
pub async fn serve(listener: TcpListener, metrics: Arc<Metrics>, shutdown: CancellationToken) {
    let permits = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        // The semaphore is never closed.
        let Ok(permit) = permits.clone().acquire_owned().await else { return };
        let accepted = tokio::select! {
            () = shutdown.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                debug!(%error, "metrics: connection not accepted");
                // Out of file descriptors, most likely: not to be asked again at once.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let metrics = metrics.clone();
        tokio::spawn(async move {
            let service = hyper::service::service_fn(move |request: Request<Incoming>| {
                let (status, kind, text) = metrics.answer(request.uri().path());
                let mut response = Response::new(Full::new(Bytes::from(text)));
                *response.status_mut() = status;
                response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
                async move { Ok::<_, Infallible>(response) }
            });
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEADER_DEADLINE)
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), service);
            if let Err(error) = connection.await {
                debug!(%error, "metrics: connection ended");
            }
            drop(permit);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_happened_can_be_read() {
        let metrics = Metrics::default();
        assert_eq!(metrics.answer("/readyz").0, StatusCode::SERVICE_UNAVAILABLE);
        metrics.runtime_up(true);
        assert_eq!(metrics.answer("/readyz").0, StatusCode::OK);
        metrics.connected(true);
        metrics.task_ended(TaskOutcome::Failed);
        let text = metrics.answer("/metrics").2;
        assert!(text.contains("edgecore_prepull_connected 1"), "{text}");
        assert!(text.contains("edgecore_prepull_tasks_total{outcome=\"failed\"} 1"), "{text}");
        metrics.session(Some("a:1".to_owned()));
        metrics.session(Some("b:2".to_owned()));
        let text = metrics.answer("/metrics").2;
        assert!(text.contains("edgecore_prepull_session{address=\"b:2\"} 1"), "{text}");
        assert!(!text.contains("a:1"), "{text}");
        metrics.session(None);
        assert!(!metrics.answer("/metrics").2.contains("b:2"));
        metrics.plugin_ended("ecr", PluginOutcome::Timeout, Duration::from_secs(60));
        let text = metrics.answer("/metrics").2;
        let name = "edgecore_prepull_credential_provider_exec";
        let runs = format!("{name}s_total{{provider=\"ecr\",outcome=\"timeout\"}} 1");
        assert!(text.contains(&runs), "{text}");
        assert!(text.contains(&format!("{name}_duration_seconds_sum{{provider=\"ecr\"}} 60.0")), "{text}");
        assert_eq!(metrics.answer("/").0, StatusCode::NOT_FOUND);
    }
}
