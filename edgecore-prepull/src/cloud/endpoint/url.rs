//! A URL of cloudcore: parsed once, and dialled at every address of its host.

use std::fmt;
use std::io;
use std::time::Duration;

use hyper::Uri;
use prepull_registry::{Proxies, Proxy};
use rustls_pki_types::ServerName;
use tokio::net::{TcpSocket, TcpStream, lookup_host};
use tokio::time::timeout;

/// Connect deadline per address; a name may have several addresses. The kernel resends a SYN after 1 s and after 3 s. A
/// host that has answered none of the three is down or behind a firewall, so we try the next address.
pub(crate) const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

/// The scheme of the tunnel's URLs.
pub(crate) const TUNNEL_SCHEME: &str = "wss";
/// The scheme of the URLs for joining and for renewing the certificate.
pub(crate) const ENROLL_SCHEME: &str = "https";

/// The host, port and path of a URL, and the way there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CloudEndpoint {
    /// A name or an address; an IPv6 address without its brackets.
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) path: String,
    /// The proxy that we connect through; without one, directly.
    pub(crate) proxy: Option<Proxy>,
}

/// The authority, and the proxy on the way.
impl fmt::Display for CloudEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.authority())?;
        match &self.proxy {
            Some(proxy) => write!(f, " through {proxy}"),
            None => Ok(()),
        }
    }
}

/// A URL, or a list of URLs, that cannot be dialled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadUrl {
    /// The text is not a URL of the expected form.
    #[error("{url:?} is not a URL of the form {scheme}://HOST[:PORT][/PATH]")]
    Form {
        /// The text as it was given.
        url: String,
        /// The scheme that it must have.
        scheme: &'static str,
    },
    /// The list is empty.
    #[error("{} has no URL of the form {scheme}://HOST[:PORT][/PATH]", flag_of_scheme(scheme))]
    None {
        /// The scheme that a URL must have.
        scheme: &'static str,
    },
    /// The list is longer than we can try in a reasonable time.
    #[error("{} has {count} URLs: at most {most} are taken", flag_of_scheme(scheme))]
    TooMany {
        /// The scheme of the URLs.
        scheme: &'static str,
        /// Number of URLs in the list.
        count: usize,
        /// Largest number allowed.
        most: usize,
    },
}

/// The flag of `join` and of `run` that takes the URLs of a scheme.
fn flag_of_scheme(scheme: &str) -> &'static str {
    if scheme == TUNNEL_SCHEME { "--tunnel-url" } else { "--enroll-url" }
}

/// Parses a host: a name or an address, with or without the brackets of a URL.
pub(crate) fn parse_host(text: &str) -> Option<&str> {
    let host = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    ServerName::try_from(host).ok().map(|_| host)
}

impl CloudEndpoint {
    /// Parses a URL. Any scheme other than `scheme` is refused, so that we never send anything unencrypted.
    pub(crate) fn parse(url: &str, scheme: &'static str) -> Result<Self, BadUrl> {
        let bad = || BadUrl::Form { url: url.to_owned(), scheme };
        let uri: Uri = url.parse().map_err(|_| bad())?;
        let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(bad)?;
        if uri.scheme_str() != Some(scheme) || uri.authority().is_some_and(|a| a.as_str().contains('@')) {
            return Err(bad());
        }
        let host = parse_host(host).ok_or_else(bad)?.to_owned();
        let (port, path) = (uri.port_u16().unwrap_or(443), uri.path().to_owned());
        Ok(Self { host, port, path, proxy: None })
    }

    /// The same endpoint through its proxy, if it has one.
    pub(crate) fn through_proxy(&self, proxies: &Proxies) -> Option<Self> {
        let proxy = proxies.of_host(&self.host, self.port)?;
        Some(Self { proxy: Some(proxy), ..self.clone() })
    }

    /// `HOST:PORT`, as in URLs and in the `Host` header.
    pub(crate) fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    /// The name that the server's certificate must be valid for.
    pub(crate) fn server_name(&self) -> io::Result<ServerName<'static>> {
        ServerName::try_from(self.host.clone()).map_err(io::Error::other)
    }

    /// Connects to the first address of the host that accepts, trying each for up to `deadline`. A proxy has that time
    /// for all of them.
    pub(crate) async fn connect(&self, deadline: Duration) -> io::Result<TcpStream> {
        if let Some(proxy) = &self.proxy {
            return proxy.connect(&self.host, self.port, deadline).await;
        }
        let resolved = timeout(deadline, lookup_host((self.host.as_str(), self.port))).await??;
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for address in resolved {
            let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
            socket.set_keepalive(true)?;
            socket.set_nodelay(true)?;
            match timeout(deadline, socket.connect(address)).await {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(error)) => last = error,
                Err(late) => last = late.into(),
            }
        }
        Err(last)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn only_the_right_scheme_is_accepted() {
        let parse = |url| CloudEndpoint::parse(url, "wss");
        let tunnel = parse("wss://cloud.example:10000/v1/edge").unwrap();
        assert_eq!((tunnel.authority().as_str(), tunnel.path.as_str()), ("cloud.example:10000", "/v1/edge"));
        assert_eq!(parse("wss://[::1]:7").unwrap().authority(), "[::1]:7");
        assert_eq!(
            parse("wss://[::1]:7").unwrap().server_name().unwrap(),
            ServerName::try_from("::1").unwrap()
        );
        assert_eq!(parse("wss://192.0.2.1/").unwrap().port, 443);
        for bad in [
            "",
            "cloud.example",
            "ws://cloud.example",
            "https://cloud.example",
            "wss://",
            "wss://a@b",
            "wss://a b",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
