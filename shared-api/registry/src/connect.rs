//! Connections: to the addresses that may be reached, through the proxy of the environment, with TLS.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt};
use http::Uri;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::dns::{GaiResolver, Name};
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tower::Service;

use crate::address::Reach;
use crate::connect_error::{ConnectError, ESTABLISH};
use crate::proxy::{Proxies, Proxy};

/// Limit for TCP to one address, unless hosts.toml has a `dial_timeout`.
pub(crate) const DIAL: Duration = Duration::from_secs(10);

/// Longest wait for the addresses of a name that a proxy will resolve: a machine behind one may have no DNS.
const LOOK_UP: Duration = Duration::from_secs(2);

/// The connection of a response.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer {
    /// The other end; `None` behind a proxy.
    pub(crate) address: Option<IpAddr>,
}

/// Makes connections of one kind: with one TLS configuration, and to as far as one may reach.
#[derive(Clone)]
pub(crate) struct Connector(Arc<Inner>);

struct Inner {
    direct: HttpConnector<CheckedResolver>,
    to_proxy: HttpConnector,
    tls: TlsConnector,
    proxies: Arc<Proxies>,
    reach: Reach,
}

impl Connector {
    pub(crate) fn new(
        tls: ClientConfig,
        proxies: Arc<Proxies>,
        reach: Reach,
        dial: Duration,
        receive_buffer: Option<usize>,
    ) -> Self {
        let mut direct =
            HttpConnector::new_with_resolver(CheckedResolver { resolver: GaiResolver::new(), reach });
        let mut to_proxy = HttpConnector::new();
        // Linux takes twice as much, for what it needs itself, and fills nearly all of it with large packets.
        let receive_buffer = receive_buffer.map(|bytes| bytes / 2);
        direct.enforce_http(false);
        direct.set_connect_timeout(Some(dial));
        direct.set_nodelay(true);
        direct.set_recv_buffer_size(receive_buffer);
        to_proxy.enforce_http(false);
        to_proxy.set_connect_timeout(Some(dial));
        to_proxy.set_nodelay(true);
        to_proxy.set_recv_buffer_size(receive_buffer);
        Self(Arc::new(Inner { direct, to_proxy, tls: TlsConnector::from(Arc::new(tls)), proxies, reach }))
    }
}

impl Service<Uri> for Connector {
    type Response = Stream;
    type Error = ConnectError;
    type Future = BoxFuture<'static, Result<Stream, ConnectError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ConnectError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let inner = Arc::clone(&self.0);
        async move { timeout(ESTABLISH, inner.connect(uri)).await.unwrap_or(Err(ConnectError::TooSlow)) }
            .boxed()
    }
}

impl Inner {
    async fn connect(&self, uri: Uri) -> Result<Stream, ConnectError> {
        let host = uri.host().ok_or(ConnectError::NoHost)?.trim_matches(['[', ']']).to_owned();
        // An address in the URL meets no resolver.
        if let Ok(address) = host.parse()
            && let Some(class) = self.reach.refuses(address)
        {
            return Err(ConnectError::Refused { host, address, class });
        }
        let secure = uri.scheme_str() == Some("https");
        let (tcp, proxied) = match self.proxies.for_uri(&uri) {
            None => (self.dial_direct(uri).await?, false),
            Some(proxy) => {
                self.check_name(&host).await?;
                (self.dial_proxy(proxy, uri, secure).await?, true)
            }
        };
        let peer = if proxied { None } else { tcp.peer_addr().ok() };
        let peer = Peer { address: peer.as_ref().map(SocketAddr::ip) };
        if !secure {
            return Ok(Stream { io: TokioIo::new(Box::new(tcp)), peer, absolute_form: proxied });
        }
        let name = ServerName::try_from(host);
        let name =
            name.map_err(|error| ConnectError::Tls(io::Error::new(io::ErrorKind::InvalidInput, error)))?;
        let io = self.tls.connect(name, tcp).await.map_err(ConnectError::Tls)?;
        Ok(Stream { io: TokioIo::new(Box::new(io)), peer, absolute_form: false })
    }

    async fn dial_direct(&self, uri: Uri) -> Result<TcpStream, ConnectError> {
        match self.direct.clone().call(uri).await {
            Ok(io) => Ok(io.into_inner()),
            Err(error) => {
                Err(find_refusal(&error)
                    .unwrap_or_else(|| ConnectError::Tcp(crate::error::error_chain(&error))))
            }
        }
    }

    /// Refuses a name if this machine knows only forbidden addresses of it. The proxy resolves it again, and its own rules
    /// decide about a name that it knows otherwise, or that we don't know.
    async fn check_name(&self, host: &str) -> Result<(), ConnectError> {
        let Ok(name) = host.parse::<Name>() else { return Ok(()) };
        if self.reach == Reach::Any {
            return Ok(());
        }
        let mut resolver = CheckedResolver { resolver: GaiResolver::new(), reach: self.reach };
        match timeout(LOOK_UP, resolver.call(name)).await {
            Ok(Err(error)) => find_refusal(error.as_ref()).map_or(Ok(()), Err),
            Ok(Ok(_)) | Err(_) => Ok(()),
        }
    }

    async fn dial_proxy(&self, proxy: &Proxy, uri: Uri, tunnel: bool) -> Result<TcpStream, ConnectError> {
        if tunnel {
            return proxy.tunnel(self.to_proxy.clone(), uri).await;
        }
        proxy.check_scheme()?;
        let io = self.to_proxy.clone().call(proxy.uri.clone()).await;
        Ok(io.map_err(|error| proxy.connect_error(crate::error::error_chain(&error)))?.into_inner())
    }
}

/// Resolves names, and leaves out the addresses that must not be reached: checked here, a name cannot change its address
/// between the check and the connection.
#[derive(Clone)]
struct CheckedResolver {
    resolver: GaiResolver,
    reach: Reach,
}

impl Service<Name> for CheckedResolver {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = Box<dyn std::error::Error + Send + Sync>;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let Self { mut resolver, reach } = self.clone();
        let host = name.as_str().to_owned();
        async move {
            let all: Vec<SocketAddr> = resolver.call(name).await?.collect();
            let refused = all.iter().find_map(|at| Some((at.ip(), reach.refuses(at.ip())?)));
            let fine: Vec<SocketAddr> =
                all.into_iter().filter(|at| reach.refuses(at.ip()).is_none()).collect();
            match refused {
                Some((address, class)) if fine.is_empty() => {
                    Err(ConnectError::Refused { host, address, class }.into())
                }
                _ => Ok(fine.into_iter()),
            }
        }
        .boxed()
    }
}

fn find_refusal(error: &(dyn std::error::Error + 'static)) -> Option<ConnectError> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(ConnectError::Refused { host, address, class }) = error.downcast_ref() {
            return Some(ConnectError::Refused { host: host.clone(), address: *address, class });
        }
        next = error.source();
    }
    None
}

/// A connection, with TLS or without.
pub(crate) struct Stream {
    io: TokioIo<Box<dyn Io>>,
    peer: Peer,
    /// Whether requests name the whole URL, as a proxy wants to have them.
    absolute_form: bool,
}

trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

impl Connection for Stream {
    fn connected(&self) -> Connected {
        Connected::new().proxy(self.absolute_form).extra(self.peer)
    }
}

impl Read for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl Write for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
