//! Passages: TCP forwarding between network namespaces, independent of the cables.

use std::net::{SocketAddr, TcpListener as StdListener, TcpStream as StdStream};
use std::time::Duration;

use anyhow::Result;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::Space;
use crate::background;

/// Pieces in flight in one direction of a connection: 300 ms of a link that carries a few MiB a second.
const ON_THE_WAY: usize = 64;
/// Largest piece that we read at a time, in bytes.
const PIECE: usize = 16 * 1024;

/// Forwards TCP connections from an address in one namespace to an address in another one. Ends, with its connections,
/// when dropped.
pub struct Passage(#[expect(dead_code, reason = "held for its drop")] DropGuard);

/// An address in a namespace; without a namespace, in that of this process.
type PassageEnd<'a> = (Option<&'a Space>, SocketAddr);

impl Passage {
    /// Forwards a loopback address of one namespace to the same address in another one.
    pub fn between_spaces(from: Option<&Space>, to: Option<&Space>, addr: SocketAddr) -> Result<Self> {
        Self::open((from, addr), (to, addr), Duration::ZERO)
    }

    /// Opens a passage that delays every piece, without delaying those behind it further.
    pub(crate) fn open(from: PassageEnd<'_>, to: PassageEnd<'_>, delay: Duration) -> Result<Self> {
        Self::open_to_target(from, to.0, move || Some(to.1), delay)
    }

    /// Opens a passage to the address that `target` returns for each connection. Without an address the connection is
    /// closed, like a Service without endpoints.
    pub(crate) fn open_to_target(
        from: PassageEnd<'_>,
        to: Option<&Space>,
        target: impl Fn() -> Option<SocketAddr> + Send + 'static,
        delay: Duration,
    ) -> Result<Self> {
        let listener = run_in_space(from.0, move || StdListener::bind(from.1))?;
        listener.set_nonblocking(true)?;
        let stop = CancellationToken::new();
        let (stopped, space) = (stop.clone(), to.cloned());
        let runtime = background::runtime()?;
        runtime.spawn(async move {
            let Ok(listener) = TcpListener::from_std(listener) else { return };
            while let Some(Ok((stream, _))) = stopped.run_until_cancelled(listener.accept()).await {
                let Some(addr) = target() else { continue };
                let (space, stopped) = (space.clone(), stopped.clone());
                tokio::spawn(async move {
                    // If one side breaks, both connections are dropped.
                    let _ = stopped.run_until_cancelled(carry_connection(stream, space, addr, delay)).await;
                });
            }
        });
        Ok(Self(stop.drop_guard()))
    }
}

fn run_in_space<T: Send + 'static>(
    space: Option<&Space>,
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> Result<T> {
    match space {
        Some(space) => space.run(work),
        None => Ok(work()?),
    }
}

async fn carry_connection(
    from: TcpStream,
    space: Option<Space>,
    addr: SocketAddr,
    delay: Duration,
) -> Result<()> {
    let connect = move || run_in_space(space.as_ref(), move || StdStream::connect(addr));
    let to = tokio::task::spawn_blocking(connect).await??;
    to.set_nonblocking(true)?;
    let to = TcpStream::from_std(to)?;
    for stream in [&from, &to] {
        stream.set_nodelay(true)?;
    }
    let ((from_read, from_write), (to_read, to_write)) = (from.into_split(), to.into_split());
    tokio::try_join!(one_way(from_read, to_write, delay), one_way(to_read, from_write, delay))?;
    Ok(())
}

async fn one_way(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, delay: Duration) -> Result<()> {
    let (sender, mut pieces) = mpsc::channel::<(Instant, Vec<u8>)>(ON_THE_WAY);
    let read = async move {
        let mut buffer = vec![0; PIECE];
        loop {
            let length = from.read(&mut buffer).await?;
            if length == 0 || sender.send((Instant::now() + delay, buffer[..length].to_vec())).await.is_err()
            {
                return anyhow::Ok(());
            }
        }
    };
    let write = async move {
        while let Some((due, piece)) = pieces.recv().await {
            sleep_until(due).await;
            to.write_all(&piece).await?;
        }
        anyhow::Ok(to.shutdown().await?)
    };
    tokio::try_join!(read, write)?;
    Ok(())
}
