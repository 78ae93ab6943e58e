//! Forwards bytes, as fast as the simulated link permits.

use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Result, bail};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{ProxyContext, lock};

/// Largest piece that we read at a time, in bytes.
pub(super) const PIECE: usize = 16 * 1024;
/// Pieces a second on a throttled link, so that it is slow and not jerky.
const PIECES_PER_SECOND: u64 = 20;

/// Forwards both directions until both sides have closed theirs, or one of them fails.
pub(super) async fn both_ways(client: TcpStream, server: TcpStream, shared: &ProxyContext) -> Result<()> {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let up = async {
        let mut buffer = vec![0; PIECE];
        loop {
            let length = from_client.read(&mut buffer).await?;
            if length == 0 {
                return anyhow::Ok(to_server.shutdown().await?);
            }
            shared.wait_for_link().await?;
            to_server.write_all(&buffer[..length]).await?;
        }
    };
    let down = async {
        forward_down(&mut from_server, &mut to_client, shared, |_| {}).await?;
        anyhow::Ok(to_client.shutdown().await?)
    };
    tokio::try_join!(up, down).map(drop)
}

/// Forwards from the server to the client until the server closes. Passes the bytes of each piece to `count`.
pub(super) async fn forward_down(
    server: &mut (impl AsyncRead + Unpin),
    client: &mut (impl AsyncWrite + Unpin),
    shared: &ProxyContext,
    mut count: impl FnMut(usize),
) -> Result<()> {
    let mut buffer = vec![0; PIECE];
    loop {
        let rate = shared.link.borrow().rate;
        let piece = rate
            .map_or(PIECE, |rate| usize::try_from(rate / PIECES_PER_SECOND).unwrap_or(PIECE).clamp(1, PIECE));
        let length = server.read(&mut buffer[..piece]).await?;
        if length == 0 {
            return Ok(());
        }
        send_down(client, &buffer[..length], shared).await?;
        count(length);
    }
}

/// Sends one piece to the client.
pub(super) async fn send_down(
    client: &mut (impl AsyncWrite + Unpin),
    piece: &[u8],
    shared: &ProxyContext,
) -> Result<()> {
    shared.wait_for_link().await?;
    shared.wait_for_room(piece.len() as u64).await;
    let allowed = shared.take_before_cut(piece.len());
    client.write_all(&piece[..allowed]).await?;
    shared.bytes.fetch_add(allowed as u64, Ordering::SeqCst);
    if allowed < piece.len() {
        client.flush().await?;
        bail!("cut on purpose");
    }
    Ok(())
}

impl ProxyContext {
    /// Waits while the link is frozen, and for its delay.
    async fn wait_for_link(&self) -> Result<()> {
        let mut link = self.link.subscribe();
        link.wait_for(|link| !link.frozen).await?;
        let delay = link.borrow().delay;
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
            link.wait_for(|link| !link.frozen).await?;
        }
        Ok(())
    }

    /// Waits until a throttled link has room. All connections share it, and each waits for those before it.
    async fn wait_for_room(&self, bytes: u64) {
        let Some(rate) = self.link.borrow().rate else { return };
        let until = {
            let mut free_at = lock(&self.free_at);
            let from = (*free_at).max(tokio::time::Instant::now());
            *free_at = from + Duration::from_nanos(bytes.saturating_mul(1_000_000_000) / rate);
            *free_at
        };
        tokio::time::sleep_until(until).await;
    }

    /// Takes the next bytes from the budget before a planned cut, and returns their number.
    fn take_before_cut(&self, bytes: usize) -> usize {
        let mut cut_after = lock(&self.cut_after);
        match *cut_after {
            Some(left) if left < bytes => {
                *cut_after = None;
                left
            }
            Some(left) => {
                *cut_after = Some(left - bytes);
                bytes
            }
            None => bytes,
        }
    }
}
