//! The proxies of the environment, as Go's programs read them, and so containerd: `HTTP_PROXY`, `HTTPS_PROXY` and `NO_PROXY`,
//! or the same in lower case.

use std::io;
use std::net::IpAddr;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{HOST, PROXY_AUTHORIZATION};
use http::uri::Authority;
use http::{HeaderValue, Request, StatusCode, Uri};
use http_body_util::Empty;
use hyper::client::conn::http1;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use ipnet::IpNet;
use percent_encoding::percent_decode_str;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tower::Service;

use crate::connect_error::ConnectError;
use crate::error::error_chain;

/// Most bytes of the head of a proxy's answer. One that refuses may have a page behind it, which we don't read.
const MAX_ANSWER: usize = 16 << 10;

/// Which proxy a request goes through.
#[derive(Clone, Debug, Default)]
pub struct Proxies {
    http: Option<Proxy>,
    https: Option<Proxy>,
    except: Vec<Exception>,
    /// Variables with a value that isn't a proxy.
    unusable: Vec<String>,
}

/// An HTTP proxy, and how we authenticate to it. Printed without the user.
#[derive(Clone, PartialEq, Eq)]
pub struct Proxy {
    /// As it's configured, with the user.
    whole: Uri,
    /// Scheme, host and port, without the user.
    pub(crate) uri: Uri,
    /// The value of `Proxy-Authorization`.
    pub(crate) authorization: Option<HeaderValue>,
}

impl std::fmt::Display for Proxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let scheme = self.uri.scheme_str().unwrap_or_default();
        write!(f, "{scheme}://{}", self.uri.authority().map_or("", Authority::as_str))
    }
}

impl std::fmt::Debug for Proxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.uri.fmt(f)
    }
}

/// An entry of `NO_PROXY`.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Exception {
    Everything,
    Network(IpNet),
    Address { address: IpAddr, port: Option<String> },
    Domain { suffix: String, itself: bool, port: Option<String> },
}

impl Proxies {
    /// The proxies that the environment of this process names.
    pub fn from_env() -> Self {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    /// The proxies that an environment names.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Self {
        let either = |name: &str| {
            let value = |name: String| {
                let value = variable(&name).filter(|value| !value.is_empty())?;
                Some((name, value))
            };
            value(name.to_owned()).or_else(|| value(name.to_lowercase()))
        };
        let mut unusable = Vec::new();
        let mut proxy = |name: &str| {
            let (name, value) = either(name)?;
            let proxy = Proxy::parse(&value);
            if proxy.is_none() {
                unusable.push(name);
            }
            proxy
        };
        let (http, https) = (proxy("HTTP_PROXY"), proxy("HTTPS_PROXY"));
        let except = either("NO_PROXY").map(|(_, text)| parse_exceptions(&text)).unwrap_or_default();
        Self { http, https, except, unusable }
    }

    /// A sentence on each variable with a value that isn't a proxy. It's ignored, as Go's programs do: the environment is
    /// often that of containerd as well, and a node that works without the proxy must not stop. The sentences have no values,
    /// since these may contain a password.
    pub fn flaws(&self) -> impl Iterator<Item = String> {
        self.unusable.iter().map(|name| {
            format!("{name} is ignored, since its value isn't the URL of a proxy: set http://[USER:PASSWORD@]HOST:PORT, or unset it")
        })
    }

    /// The proxy for a TLS connection to a host, if any. An IPv6 address comes without brackets.
    pub fn of_host(&self, host: &str, port: u16) -> Option<Proxy> {
        let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        self.for_uri(&format!("https://{host}:{port}").parse().ok()?).cloned()
    }

    /// The proxy for a request, if any.
    pub fn for_uri(&self, uri: &Uri) -> Option<&Proxy> {
        let https = uri.scheme_str() == Some("https");
        let proxy = if https { &self.https } else { &self.http };
        let proxy = proxy.as_ref()?;
        let host = uri.host()?.trim_matches(['[', ']']).to_ascii_lowercase();
        let port = uri.port_u16().unwrap_or(if https { 443 } else { 80 }).to_string();
        let address: Option<IpAddr> = host.parse().ok();
        let own = host == "localhost" || address.is_some_and(|address| address.is_loopback());
        let excepted = self.except.iter().any(|exception| exception.matches(&host, address, &port));
        (!own && !excepted).then_some(proxy)
    }
}

impl Proxy {
    fn parse(text: &str) -> Option<Self> {
        let whole = |text: &str| {
            text.parse::<Uri>().ok().filter(|uri| uri.scheme().is_some() && uri.host().is_some())
        };
        let uri = whole(text).or_else(|| whole(&format!("http://{text}")))?;
        let authority = uri.authority()?;
        let (user, place) = match authority.as_str().rsplit_once('@') {
            Some((user, place)) => (Some(user), place),
            None => (None, authority.as_str()),
        };
        let authorization = user.and_then(|user| {
            let (name, password) = user.split_once(':').unwrap_or((user, ""));
            let (name, password) =
                (percent_decode_str(name).collect(), percent_decode_str(password).collect());
            let plain: Vec<u8> = [name, b":".to_vec(), password].concat();
            let mut value = HeaderValue::try_from(format!("Basic {}", STANDARD.encode(plain))).ok()?;
            value.set_sensitive(true);
            Some(value)
        });
        let whole = uri.clone();
        let uri = format!("{}://{place}", uri.scheme_str()?).parse().ok()?;
        Some(Self { whole, uri, authorization })
    }

    /// The proxy's URI, with user and password: for a client that connects by itself, and never to be printed.
    pub fn uri_with_user(&self) -> Uri {
        self.whole.clone()
    }

    /// Connects to a host by the proxy's `CONNECT`. The proxy resolves the host's name.
    ///
    /// # Errors
    /// The proxy doesn't answer within `deadline`, refuses, or isn't spoken to in plain HTTP. The error names it.
    pub async fn connect(&self, host: &str, port: u16, deadline: Duration) -> io::Result<TcpStream> {
        let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        let uri = format!("https://{host}:{port}").parse().map_err(io::Error::other)?;
        let mut connector = HttpConnector::new();
        connector.enforce_http(false);
        connector.set_nodelay(true);
        let late = || self.connect_error(format!("no answer within {} s", deadline.as_secs()));
        let connected = timeout(deadline, self.tunnel(connector, uri)).await;
        connected.unwrap_or_else(|_| Err(late())).map_err(io::Error::other)
    }

    /// Connects to the host of a URI by `CONNECT`, with the connector for the way to the proxy.
    pub(crate) async fn tunnel(
        &self,
        mut connector: HttpConnector,
        uri: Uri,
    ) -> Result<TcpStream, ConnectError> {
        self.check_scheme()?;
        let place = uri.authority().map_or("", Authority::as_str);
        let place = if uri.port().is_some() { place.to_owned() } else { format!("{place}:443") };
        let failed = |error: &(dyn std::error::Error + 'static)| self.connect_error(error_chain(error));
        let io = connector.call(self.uri.clone()).await.map_err(|error| failed(&error))?;
        let mut request = Request::connect(&place).header(HOST, &place).body(Empty::<Bytes>::new());
        if let (Ok(request), Some(authorization)) = (&mut request, &self.authorization) {
            request.headers_mut().insert(PROXY_AUTHORIZATION, authorization.clone());
        }
        let request = request.map_err(|error| failed(&error))?;
        let handshake = http1::Builder::new().max_buf_size(MAX_ANSWER).handshake(io).await;
        let (mut sender, driver) = handshake.map_err(|error| failed(&error))?;
        let place = &place;
        let connected = async move {
            let response = sender.send_request(request).await.map_err(|error| failed(&error))?;
            let status = response.status();
            if !status.is_success() {
                return Err(self.connect_error(explain_refusal(status, place)));
            }
            hyper::upgrade::on(response).await.map_err(|error| failed(&error))
        };
        // The driver moves the bytes until the connection is ours; if it fails, so does `connected`. It ends as well when the
        // sender is dropped, which `connected` owns: a proxy that refuses may keep the connection.
        let (connected, _) = tokio::join!(connected, driver.with_upgrades());
        match connected?.downcast::<TokioIo<TcpStream>>() {
            Ok(parts) if parts.read_buf.is_empty() => Ok(parts.io.into_inner()),
            // The client speaks first in TLS.
            _ => Err(self.connect_error(format!("what answers at {place} is no TLS server"))),
        }
    }

    /// Refuses a scheme that we don't speak.
    pub(crate) fn check_scheme(&self) -> Result<(), ConnectError> {
        match self.uri.scheme_str().unwrap_or_default() {
            "http" => Ok(()),
            scheme => Err(ConnectError::ProxyScheme(scheme.to_owned())),
        }
    }

    pub(crate) fn connect_error(&self, cause: String) -> ConnectError {
        ConnectError::Proxy { proxy: self.to_string(), cause }
    }
}

/// Why a proxy doesn't connect us, with the remedy. Some answer 401 to a wrong password, as tinyproxy does.
fn explain_refusal(status: StatusCode, place: &str) -> String {
    match status {
        StatusCode::PROXY_AUTHENTICATION_REQUIRED | StatusCode::UNAUTHORIZED => {
            format!(
                "it refuses the user and password ({status}): set HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT"
            )
        }
        _ => format!(
            "it doesn't connect to {place} ({status}): let it CONNECT there, or add the host to NO_PROXY"
        ),
    }
}

fn parse_exceptions(text: &str) -> Vec<Exception> {
    let entries = text.split(',').map(|entry| entry.trim().to_ascii_lowercase());
    entries.filter_map(|entry| Exception::parse(&entry)).collect()
}

impl Exception {
    fn parse(entry: &str) -> Option<Self> {
        if entry == "*" {
            return Some(Self::Everything);
        }
        if let Ok(network) = entry.parse() {
            return Some(Self::Network(network));
        }
        let is_port = |port: &str| !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit());
        let (host, port) = match entry.rsplit_once(':') {
            Some((host, port)) if is_port(port) && (!host.contains(':') || host.starts_with('[')) => {
                (host, Some(port.to_owned()))
            }
            _ => (entry, None),
        };
        let host = host.trim_matches(['[', ']']);
        if let Ok(address) = host.parse() {
            return Some(Self::Address { address, port });
        }
        let host = host.strip_prefix('*').filter(|rest| rest.starts_with('.')).unwrap_or(host);
        match host.strip_prefix('.') {
            _ if host.is_empty() => None,
            Some(_) => Some(Self::Domain { suffix: host.to_owned(), itself: false, port }),
            None => Some(Self::Domain { suffix: format!(".{host}"), itself: true, port }),
        }
    }

    fn matches(&self, host: &str, address: Option<IpAddr>, at: &str) -> bool {
        let fits = |port: &Option<String>| port.as_ref().is_none_or(|port| port == at);
        match self {
            Self::Everything => true,
            Self::Network(network) => address.is_some_and(|address| network.contains(&address)),
            Self::Address { address: own, port } => address == Some(*own) && fits(port),
            Self::Domain { suffix, itself, port } => {
                (host.ends_with(suffix.as_str()) || (*itself && host == &suffix[1..])) && fits(port)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    fn proxies(variables: &[(&str, &str)]) -> Proxies {
        Proxies::from_variables(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    fn way(proxies: &Proxies, uri: &str) -> Option<String> {
        proxies.for_uri(&uri.parse().unwrap()).map(|proxy| proxy.uri.to_string())
    }

    #[test]
    fn each_scheme_has_its_proxy_in_either_case_of_letters() {
        let both =
            proxies(&[("HTTP_PROXY", "plain.example:3128"), ("https_proxy", "http://tls.example:3129")]);
        assert_eq!(way(&both, "http://r.example/v2/").unwrap(), "http://plain.example:3128/");
        assert_eq!(way(&both, "https://r.example/v2/").unwrap(), "http://tls.example:3129/");
        let upper = proxies(&[("HTTPS_PROXY", "http://a.example"), ("https_proxy", "http://b.example")]);
        assert_eq!(way(&upper, "https://r.example/").unwrap(), "http://a.example/");
        assert_eq!(way(&upper, "http://r.example/"), None);
        assert_eq!(way(&proxies(&[("HTTP_PROXY", "")]), "http://r.example/"), None);
    }

    #[test]
    fn a_value_that_is_no_url_is_named_without_it() {
        for wrong in ["hunter2 proxy.example", "http://proxy example:3128"] {
            let proxies = proxies(&[("HTTP_PROXY", "plain.example:3128"), ("https_proxy", wrong)]);
            let flaws: Vec<_> = proxies.flaws().collect();
            assert!(
                matches!(&flaws[..], [flaw] if flaw.starts_with("https_proxy is ignored")),
                "{wrong}: {flaws:?}"
            );
            assert!(!flaws[0].contains(wrong), "{flaws:?}");
            assert_eq!(way(&proxies, "https://r.example/"), None, "{wrong}");
        }
        assert_eq!(proxies(&[("HTTPS_PROXY", "socks5://proxy.example:1080")]).flaws().count(), 0);
    }

    #[test]
    fn hosts_are_those_of_tls() {
        let proxies = proxies(&[("HTTPS_PROXY", "proxy.example:3128"), ("NO_PROXY", "10.0.0.0/8,fd00::/8")]);
        for (host, proxied) in
            [("cloud.example", true), ("10.0.0.1", false), ("2001:db8::1", true), ("fd00::1", false)]
        {
            let found = proxies.of_host(host, 10_000).map(|proxy| proxy.to_string());
            assert_eq!(found.as_deref(), proxied.then_some("http://proxy.example:3128"), "{host}");
        }
    }

    #[test]
    fn a_proxys_user_is_never_printed() {
        let proxies = proxies(&[("HTTPS_PROXY", "http://me:p%40ss@proxy.example:3128")]);
        let uri = "https://r.example/".parse().unwrap();
        let proxy = proxies.for_uri(&uri).unwrap();
        assert_eq!(proxy.authorization.as_ref().unwrap(), &format!("Basic {}", STANDARD.encode("me:p@ss")));
        assert_eq!(
            (proxy.to_string().as_str(), format!("{proxy:?}").as_str()),
            ("http://proxy.example:3128", "http://proxy.example:3128/")
        );
        assert!(!format!("{proxies:?}").contains("ss@"), "{proxies:?}");
    }

    #[test]
    fn exceptions_are_read_as_go_reads_them() {
        for (no_proxy, uri, direct) in [
            ("example.com", "https://example.com/", true),
            ("example.com", "https://a.example.com/", true),
            ("example.com", "https://notexample.com/", false),
            (".example.com", "https://example.com/", false),
            (".example.com", "https://a.example.com/", true),
            ("*.example.com", "https://a.example.com/", true),
            ("*.example.com", "https://example.com/", false),
            ("example.com:8443", "https://example.com/", false),
            ("example.com:8443", "https://example.com:8443/", true),
            ("example.com:443", "https://example.com/", true),
            (" EXAMPLE.com , other", "https://example.com/", true),
            ("10.0.0.0/8", "https://10.1.2.3/", true),
            ("10.0.0.0/8", "https://11.1.2.3/", false),
            ("10.1.2.3", "https://10.1.2.3:5000/", true),
            ("10.1.2.3:5001", "https://10.1.2.3:5000/", false),
            ("fd00::/8", "https://[fd00::1]:5000/", true),
            ("[fd00::1]:5000", "https://[fd00::1]:5000/", true),
            ("*", "https://any.example/", true),
            ("", "https://localhost:5000/", true),
            ("", "https://127.0.0.2/", true),
            ("", "https://[::1]/", true),
            ("", "https://any.example/", false),
        ] {
            let proxies = proxies(&[("HTTPS_PROXY", "proxy.example"), ("NO_PROXY", no_proxy)]);
            assert_eq!(way(&proxies, uri).is_none(), direct, "{no_proxy:?} {uri}");
        }
    }

    #[tokio::test]
    async fn a_tunnel_carries_bytes_both_ways() {
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let proxy = Proxy::parse(&listener.local_addr().unwrap().to_string()).unwrap();
        tokio::spawn(async move {
            let (mut tcp, _) = listener.accept().await.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(tcp.read_u8().await.unwrap());
            }
            tcp.write_all(b"HTTP/1.1 200 Yes\r\n\r\n").await.unwrap();
            let said = tcp.read_u8().await.unwrap();
            tcp.write_u8(said + 1).await.unwrap();
        });
        let mut tunnel = proxy.connect("r.example", 443, Duration::from_secs(5)).await.unwrap();
        tunnel.write_u8(1).await.unwrap();
        assert_eq!(timeout(Duration::from_secs(5), tunnel.read_u8()).await.unwrap().unwrap(), 2);
    }

    #[tokio::test]
    async fn a_refusing_proxy_costs_no_wait() {
        for (answer, says) in [
            ("407 No\r\nContent-Length: 0", "it refuses the user and password (407"),
            ("403 No\r\nContent-Length: 0", "it doesn't connect to r.example:443 (403"),
            // The page behind the head never comes.
            ("403 No\r\nContent-Length: 9999", "it doesn't connect to r.example:443 (403"),
            ("403 No\r\nTransfer-Encoding: chunked", "it doesn't connect to r.example:443 (403"),
        ] {
            let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
            let proxy = Proxy::parse(&listener.local_addr().unwrap().to_string()).unwrap();
            let serving = tokio::spawn(async move {
                let (mut tcp, _) = listener.accept().await.unwrap();
                tcp.read_u8().await.unwrap();
                tcp.write_all(format!("HTTP/1.1 {answer}\r\n\r\n").as_bytes()).await.unwrap();
                // Keeps the connection for as long as we do.
                tcp.read_to_end(&mut Vec::new()).await
            });
            let connected = proxy.connect("r.example", 443, Duration::from_secs(5)).await;
            let error = connected.unwrap_err().to_string();
            assert!(error.contains(says), "{answer:?}: {error}");
            timeout(Duration::from_secs(5), serving).await.unwrap().unwrap().unwrap();
        }
    }
}
