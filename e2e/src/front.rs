//! A relay that forwards edges to the ready replica, like a Service.
//!
//! Only readiness counts: the kernel accepts connections even for a process that hangs.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::background;
use crate::plain_http;
use crate::ports::Port;

/// Interval of readiness probes, shorter than the second of a kubelet, since tests wait for it.
const PROBE_INTERVAL: Duration = Duration::from_millis(100);
/// Timeout of a probe, which is the default of Kubernetes.
const PROBE_LIMIT: Duration = Duration::from_secs(1);

/// A relay in front of several replicas. Ends when dropped. Open connections are kept when another replica is ready.
pub struct Front {
    port: Port,
    tasks: Vec<JoinHandle<()>>,
}

/// The addresses of one replica.
#[derive(Clone, Copy, Debug)]
pub struct Backend {
    /// Address for edges.
    pub tunnel: SocketAddr,
    /// Address of `/readyz`.
    pub health: SocketAddr,
}

impl Front {
    /// Starts a relay in front of these replicas, even if they aren't running yet.
    pub fn of(backends: &[Backend]) -> Result<Self> {
        let backends = backends.to_vec();
        let port = Port::reserve()?;
        let runtime = background::runtime()?;
        let _context = runtime.enter();
        let listener = std::net::TcpListener::bind(port.addr())?;
        listener.set_nonblocking(true)?;
        let listener = TcpListener::from_std(listener)?;
        let (ready, target) = watch::channel(None);
        let tasks = vec![runtime.spawn(probe(backends, ready)), runtime.spawn(relay(listener, target))];
        Ok(Self { port, tasks })
    }

    /// Address on which the relay listens.
    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

async fn probe(backends: Vec<Backend>, ready: watch::Sender<Option<SocketAddr>>) {
    loop {
        let asked = backends.iter().map(|backend| async {
            let answer = tokio::time::timeout(PROBE_LIMIT, plain_http::get(backend.health, "/readyz")).await;
            matches!(answer, Ok(Ok((200, _)))).then_some(backend.tunnel)
        });
        let found = futures::future::join_all(asked).await.into_iter().flatten().next();
        ready.send_replace(found);
        tokio::time::sleep(PROBE_INTERVAL).await;
    }
}

async fn relay(listener: TcpListener, target: watch::Receiver<Option<SocketAddr>>) {
    while let Ok((mut client, _)) = listener.accept().await {
        // Without a ready replica the connection is closed, as by a Service without endpoints.
        let Some(target) = *target.borrow() else { continue };
        tokio::spawn(async move {
            if let Ok(mut server) = TcpStream::connect(target).await {
                // Either side may close at any time.
                let _ = copy_bidirectional(&mut client, &mut server).await;
            }
        });
    }
}
