//! The bytes of a stream, written into an ingest as they arrive.

use futures::FutureExt;
use prepull_registry::{BlobStream, HostId, RegistryError};

use super::buckets::PullBuckets;
use super::download::Download;
use super::ingest::Filling;
use crate::images::containerd::BlobWriteError;
use crate::images::site::Seeker;

/// Most bytes that are handed to containerd at once. What has arrived is handed on without waiting for more.
const CHUNK: usize = 128 * 1024;
/// The same under a limit, which holds only from the second chunk on. While a chunk is paid for, neighbours that read the blob
/// get nothing, and they leave after 30 s: that's 546 bytes a second.
const SMALL_CHUNK: usize = 16 * 1024;
/// Least number of bytes that count as progress: with fewer, a registry that sends single bytes would be asked for ever.
pub(super) const PROGRESS: u64 = 64 * 1024;

/// How far a blob has come.
pub(super) enum Filled {
    /// All bytes are there, the last ones from this host.
    Whole(Option<HostId>),
    /// The rest comes from elsewhere, or another pull goes first.
    LetGo,
    /// What a neighbour has sent is wrong, as it has found out.
    Spoiled,
}

/// Why bytes stopped arriving.
pub(super) enum Broken {
    LetGo,
    Registry(RegistryError),
    Store(BlobWriteError),
}

fn chunk_size(buckets: PullBuckets<'_>, is_of_peer: bool) -> usize {
    let limit = if is_of_peer { buckets.limit() } else { buckets.uplink_limit() };
    if limit.is_some() { SMALL_CHUNK } else { CHUNK }
}

impl Download<'_> {
    /// Writes what arrives. A registry without ranges begins at the beginning. We skip what is there already: that takes
    /// as much from the link as a new download would, and nothing of the disk.
    pub(super) async fn pour(
        &self,
        stream: &mut BlobStream,
        filling: &mut Filling<'_>,
        seeker: Option<&Seeker>,
        is_of_peer: bool,
    ) -> Result<(), Broken> {
        let mut skip = filling.part.offset().saturating_sub(stream.offset());
        let most = chunk_size(self.buckets, is_of_peer);
        let mut end = Ok(false);
        while let Ok(false) = end {
            if *self.letting_go.borrow() || seeker.is_some_and(Seeker::is_redirected) {
                return Err(Broken::LetGo);
            }
            let mut chunk = Vec::new();
            let mut arrived = 0;
            let mut next = match seeker {
                None => stream.next().await,
                Some(seeker) => tokio::select! {
                    // What has arrived counts.
                    biased;
                    next = stream.next() => next,
                    () = seeker.wait_for_redirect() => return Err(Broken::LetGo),
                },
            };
            loop {
                match next {
                    Some(Ok(bytes)) => {
                        arrived += bytes.len();
                        let skipped = usize::try_from(skip).unwrap_or(usize::MAX).min(bytes.len());
                        skip -= skipped as u64;
                        chunk.extend_from_slice(&bytes[skipped..]);
                    }
                    Some(Err(error)) => end = Err(error),
                    None => end = Ok(true),
                }
                if !matches!(end, Ok(false)) || arrived >= most {
                    break;
                }
                match stream.next().now_or_never() {
                    Some(more) => next = more,
                    None => break,
                }
            }
            // Written first and paid for then: what has crossed the link is not lost while it waits.
            if !chunk.is_empty() {
                filling.write(chunk).await.map_err(Broken::Store)?;
                if let Some(seeker) = seeker {
                    seeker.set_done(filling.part.offset());
                }
            }
            self.count_arrived(arrived, is_of_peer);
            self.buckets.take(arrived, filling.is_hurried()).await;
            match (seeker, self.buckets.site) {
                _ if is_of_peer => {}
                (Some(seeker), site) => seeker.take_bytes(arrived, site).await,
                (None, Some(site)) => site.take(arrived).await,
                (None, None) => {}
            }
        }
        end.map(drop).map_err(Broken::Registry)
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::*;
    use crate::images::rate::Bucket;

    #[test]
    fn a_sites_limit_makes_small_chunks() {
        let (free, slow) = (Bucket::new(None), Bucket::new(NonZeroU64::new(2048)));
        let size = |node, site, is_of_peer| {
            chunk_size(PullBuckets { node, own: None, site: Some(site) }, is_of_peer)
        };
        assert_eq!((size(&free, &free, false), size(&free, &slow, false)), (CHUNK, SMALL_CHUNK));
        assert_eq!((size(&free, &slow, true), size(&slow, &free, true)), (CHUNK, SMALL_CHUNK));
    }
}
