//! Connections to the API server, and when one of them counts as dead.
//!
//! A connection may die without a word: a firewall forgets it, or one of several API servers loses its power. Then three
//! things notice, and the next connection may lead to another API server:
//!
//! - The kernel, by keepalive probes and by data that isn't acknowledged, in [`DEAD_AFTER`].
//! - The watches, behind a load balancer that still acknowledges what it can't deliver: each lasts 30 s, and one that is
//!   silent for longer is begun again ([`super::watch::watcher_config`]). By then the pool has dropped what went silent with it.
//! - The read timeout, for all other requests.

use std::time::Duration;

use hyper::body::Incoming;
use hyper::{Request, Response};
use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use kube::client::retry::RetryPolicy;
use kube::client::{Body, ClientBuilder, ConfigExt as _};
use kube::{Config, Error};
use tower::retry::RetryLayer;
use tower::util::BoxService;
use tower::{BoxError, ServiceBuilder, ServiceExt as _};

/// How long a connection may be idle before the kernel probes it.
const PROBE_AFTER: Duration = Duration::from_secs(10);
/// The time between two probes without an answer.
const PROBE_EVERY: Duration = Duration::from_secs(5);
/// After this time without an acknowledgement, of probes or of data, the kernel gives a connection up.
const DEAD_AFTER: Duration = Duration::from_secs(30);
/// An API server that doesn't answer a handshake in this time won't: the next attempt may reach another one.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a request may go without a byte of an answer. The API server itself ends a request after 60 s.
const READ_TIMEOUT: Duration = Duration::from_secs(65);
/// After this time an unused connection isn't used again. Shorter than a watch waits: when a silent watch is begun again,
/// it doesn't get a connection that went silent at the same time.
const UNUSED_FOR: Duration = Duration::from_secs(20);

type Service = BoxService<Request<Body>, Response<Incoming>, BoxError>;

/// The layers that [`ClientBuilder::try_from`] would make, on connections with our own socket options.
pub(super) fn client_builder(config: Config) -> Result<ClientBuilder<Service>, Error> {
    if config.proxy_url.is_some() {
        // In a cluster there's none on the way. A kubeconfig, or the environment beside one, may name one.
        let remedy = "cloudcore-prepull reaches the API server directly: unset HTTPS_PROXY, and take `proxy-url` out of the \
                      kubeconfig";
        return Err(Error::Service(remedy.into()));
    }
    let mut connector = TimeoutConnector::new(config.rustls_https_connector_with_connector(tcp_connector())?);
    connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
    connector.set_read_timeout(Some(READ_TIMEOUT));
    // The timeout counts from the request, not from the last use of the connection.
    connector.set_reset_reader_on_write(true);
    connector.set_write_timeout(config.write_timeout);
    let client = Client::builder(TokioExecutor::new())
        .pool_idle_timeout(UNUSED_FOR)
        .pool_timer(TokioTimer::new())
        .build(connector);
    let retry = config.default_retry.then(|| RetryLayer::new(RetryPolicy::server_retry()));
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(retry)
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(client)
        .boxed();
    Ok(ClientBuilder::new(service, config.default_namespace))
}

fn tcp_connector() -> HttpConnector {
    let mut tcp = HttpConnector::new();
    // The URI is https; TLS is the connector around this one.
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_keepalive(Some(PROBE_AFTER));
    tcp.set_keepalive_interval(Some(PROBE_EVERY));
    tcp.set_tcp_user_timeout(Some(DEAD_AFTER));
    tcp
}
