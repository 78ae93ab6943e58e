//! Why there is no connection, directly or through a proxy.

use std::io;
use std::net::IpAddr;
use std::time::Duration;

/// Limit for names, TCP to all addresses, the tunnel of a proxy and TLS, together.
pub(crate) const ESTABLISH: Duration = Duration::from_secs(30);

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectError {
    #[error("{host} is at {address}, a {class} address, to which no registry may lead")]
    Refused { host: String, address: IpAddr, class: &'static str },
    #[error("proxies of the scheme {0} are left to the container runtime")]
    ProxyScheme(String),
    #[error("proxy {proxy}: {cause}")]
    Proxy { proxy: String, cause: String },
    #[error("{0}")]
    Tcp(String),
    #[error("TLS: {0}")]
    Tls(#[source] io::Error),
    #[error("no connection within {} s", ESTABLISH.as_secs())]
    TooSlow,
    #[error("the URL has no host")]
    NoHost,
}
