//! Floods of connections by a client without certificate or token.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{sleep, timeout};

/// Most unanswered connection attempts.
const OPENING: usize = 1000;
/// Interval at which it opens connections.
const STEP: Duration = Duration::from_millis(10);
/// If a flood hasn't opened its connections by then, it's too weak. Most take two seconds.
const WEAK: Duration = Duration::from_secs(20);

/// The address of the edges.
pub const EDGES_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// An address of this machine, other than that of the edges unless `last` is 1.
pub fn elsewhere(last: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(127, 0, 0, last))
}

/// Opens a connection from an address of this machine.
pub async fn connect_from(from: IpAddr, to: SocketAddr) -> Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    // The address of the edges is used by default.
    if from != EDGES_ADDRESS {
        socket.bind((from, 0).into())?;
    }
    Ok(socket.connect(to).await?)
}

/// A flood, on a thread of its own, until it is dropped.
pub struct Flood {
    opened: Arc<AtomicU32>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    begun: Instant,
}

impl Flood {
    /// Opens connections at this rate, sends `first_bytes` on each, and nothing more. It keeps `most_held` of them
    /// open: older ones have no further effect.
    pub fn start(
        from: IpAddr,
        to: SocketAddr,
        per_second: u32,
        first_bytes: Vec<u8>,
        most_held: usize,
    ) -> Result<Self> {
        let (opened, stop) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, stopped) = (Arc::clone(&opened), Arc::clone(&stop));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let flood = async move {
            let (mut held, mut opening) = (VecDeque::new(), FuturesUnordered::new());
            let (begun, mut attempts) = (Instant::now(), 0.0);
            while !stopped.load(Ordering::Relaxed) {
                while attempts < begun.elapsed().as_secs_f64() * f64::from(per_second)
                    && opening.len() < OPENING
                {
                    opening.push(async {
                        let mut stream = connect_from(from, to).await?;
                        stream.write_all(&first_bytes).await?;
                        anyhow::Ok(stream)
                    });
                    attempts += 1.0;
                }
                let _ = timeout(STEP, async {
                    while let Some(opened) = opening.next().await {
                        if let Ok(stream) = opened {
                            held.push_back(stream);
                            count.fetch_add(1, Ordering::Relaxed);
                        }
                        while held.len() > most_held {
                            held.pop_front();
                        }
                    }
                    sleep(STEP).await;
                })
                .await;
            }
        };
        let thread = std::thread::Builder::new().name("flood".to_owned());
        let thread = thread.spawn(move || runtime.block_on(flood)).context("no thread for the flood")?;
        Ok(Self { opened, stop, thread: Some(thread), begun: Instant::now() })
    }

    /// Waits until it has opened this many connections, and so exhausted the available places.
    ///
    /// # Errors
    /// If the flood is too weak.
    pub async fn has_opened(&self, connections: u32) -> Result<()> {
        while self.opened.load(Ordering::Relaxed) < connections {
            let (opened, rate) = (self.opened.load(Ordering::Relaxed), self.rate());
            ensure!(
                self.begun.elapsed() < WEAK,
                "{opened} connections, {rate:.0} a second: too weak an attack"
            );
            sleep(STEP).await;
        }
        Ok(())
    }

    /// Connections that were opened so far, per second.
    pub fn rate(&self) -> f64 {
        f64::from(self.opened.load(Ordering::Relaxed)) / self.begun.elapsed().as_secs_f64()
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
