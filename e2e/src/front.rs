//! What a Service does for edges: carries their connections to the replica that is ready.
//!
//! It goes by readiness and not by who accepts: the kernel accepts for a process that hangs.

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

/// Between two questions whether a replica is ready: a kubelet asks every second, and tests wait for it.
const PROBE: Duration = Duration::from_millis(100);
/// Who does not answer for so long is not ready: the default of a probe.
const PROBE_LIMIT: Duration = Duration::from_secs(1);

/// A relay. Ends when dropped. Connections that are open stay open, wherever they go.
pub struct Front {
    port: Port,
    tasks: Vec<JoinHandle<()>>,
}

/// One replica.
#[derive(Clone, Copy, Debug)]
pub struct Backend {
    /// Where it listens for edges.
    pub tunnel: SocketAddr,
    /// Where its `/readyz` is.
    pub health: SocketAddr,
}

impl Front {
    /// In front of these replicas, whether they run or not.
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

    /// Where it listens.
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
        tokio::time::sleep(PROBE).await;
    }
}

async fn relay(listener: TcpListener, target: watch::Receiver<Option<SocketAddr>>) {
    while let Ok((mut client, _)) = listener.accept().await {
        // As where a Service has no endpoint: the connection comes to nothing.
        let Some(target) = *target.borrow() else { continue };
        tokio::spawn(async move {
            if let Ok(mut server) = TcpStream::connect(target).await {
                // Either side may go at any time.
                let _ = copy_bidirectional(&mut client, &mut server).await;
            }
        });
    }
}
