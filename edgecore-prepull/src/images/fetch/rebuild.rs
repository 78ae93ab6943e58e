//! Rebuilds a layer from a delta and the files of an earlier image, as an uncompressed tar in the content store.
//!
//! ```text
//!  delta (file of the store) ─┐
//!                             ├─▶ apply, in a thread ─▶ pieces ─▶ content store, which checks the digest ─▶ unpacked
//!  old files (a view) ────────┘                                                              └▶ then the tar is deleted
//! ```
//!
//! We read the old files where the snapshotter has them, and mount nothing. A wrong file, or a lie in the delta, gives a tar
//! with another digest, which containerd refuses.

use std::io::{self, Write};

use prepull_api::task::NoDelta;
use prepull_delta::{ApplyLimits, apply_diff};
use prepull_registry::manifest::Descriptor;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;

use super::delta::{Delta, OldImage, UnusedDelta};
use super::download::Download;
use super::old_files::OldImageFiles;
use super::stop::FetchStop;
use crate::images::containerd::{BlobKind, BlobToWrite, BlobWriteError, Labels, open_blob};
use crate::images::puller::ErrorClass;

/// Media type of an uncompressed layer.
const TAR: &str = "application/vnd.oci.image.layer.v1.tar";
/// Most bytes of a tar that are handed to containerd at once.
const PIECE: usize = 128 * 1024;
/// Pieces between the thread that rebuilds and containerd: one is written while the next is made.
const PIECES: usize = 2;
/// Why a layer couldn't be rebuilt.
pub(super) enum RebuildFailure {
    /// The layer must come another way, for this reason.
    Useless(UnusedDelta),
    /// The attempt has ended.
    Stop(FetchStop),
}

impl From<FetchStop> for RebuildFailure {
    fn from(stop: FetchStop) -> Self {
        Self::Stop(stop)
    }
}

/// Hands pieces of the tar to the task that writes them.
struct Pieces {
    sender: mpsc::Sender<Vec<u8>>,
    piece: Vec<u8>,
}

impl Write for Pieces {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let taken = data.len().min(PIECE - self.piece.len());
        self.piece.extend_from_slice(&data[..taken]);
        if self.piece.len() == PIECE {
            self.flush()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.piece.is_empty() {
            return Ok(());
        }
        let piece = std::mem::replace(&mut self.piece, Vec::with_capacity(PIECE));
        self.sender.blocking_send(piece).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

fn wrong_layer(why: &impl ToString) -> UnusedDelta {
    UnusedDelta::new(NoDelta::WrongLayer, why.to_string())
}

fn useless_delta(why: &str) -> RebuildFailure {
    RebuildFailure::Useless(wrong_layer(&why))
}

/// The tar of a rebuilt layer in the content store, which containerd has checked.
pub(super) struct RebuiltTar {
    pub(super) tar: Descriptor,
    /// Whether we have written it. Otherwise another image has the layer uncompressed, or an attempt that was killed has left
    /// it, which goes with the lease.
    pub(super) is_ours: bool,
}

impl Download<'_> {
    /// Rebuilds a layer from a delta that has arrived.
    pub(super) async fn rebuild(
        &self,
        layer: &Descriptor,
        delta: &Delta,
        old: &OldImage,
        diff_id: &str,
    ) -> Result<RebuiltTar, RebuildFailure> {
        // The semaphore is never closed. The thread holds the permit: it may outlast this attempt.
        let turn = self.fetcher.rebuilding.clone().acquire_owned().await;
        let writer = &self.fetcher.writer;
        let size = delta.tar.unwrap_or_default();
        let blob = BlobToWrite { kind: BlobKind::Tar, digest: diff_id.to_owned(), size };
        // An earlier attempt may have left the beginning of another delta's tar.
        writer.abort(&blob).await.map_err(|error| RebuildFailure::Stop(self.write_failed(error)))?;
        let opened = writer
            .open(&blob, self.lease)
            .await
            .map_err(|error| RebuildFailure::Stop(self.write_failed(error)))?;
        let tar = |size| Descriptor {
            media_type: TAR.to_owned(),
            digest: diff_id.to_owned(),
            size,
            annotations: layer.annotations.clone(),
            ..Descriptor::default()
        };
        let Some(mut part) = opened else {
            let there = self.fetcher.store.look_up_blob(diff_id).await;
            return there
                .map(|blob| RebuiltTar { tar: tar(blob.size), is_ours: false })
                .ok_or_else(|| useless_delta("the rebuilt layer was lost"));
        };
        let (sender, mut pieces) = mpsc::channel(PIECES);
        // No more than there is room for.
        let limits = ApplyLimits::of_layer(delta.most_tar(layer), layer.size);
        let (root, digest) = (self.facts.directories.root.clone(), delta.blob.digest.clone());
        let directories = old.directories.clone();
        let applying = spawn_blocking(move || {
            let _turn = turn;
            let unreadable = "the agent cannot read the files of the content store";
            let diff = open_blob(&root, &digest).ok_or(UnusedDelta::new(NoDelta::OldFiles, unreadable))?;
            let old_files = |error: io::Error| UnusedDelta::new(NoDelta::OldFiles, error.to_string());
            let mut sources = OldImageFiles::in_directories(&directories).map_err(old_files)?;
            let mut pieces = Pieces { sender, piece: Vec::with_capacity(PIECE) };
            apply_diff(diff, &mut sources, &mut pieces, &limits).map_err(|error| wrong_layer(&error))?;
            pieces.flush().map_err(|error| wrong_layer(&error))
        });
        let mut refused = None;
        while let Some(piece) = pieces.recv().await {
            if let Err(error) = part.write(piece).await {
                refused = Some(self.write_failed(error));
                break;
            }
        }
        // Ends the thread at its next piece.
        drop(pieces);
        // A panic of the thread is a bug, and the layer is still to be had.
        let applied: Result<(), UnusedDelta> =
            applying.await.unwrap_or_else(|error| Err(wrong_layer(&error)));
        match refused {
            // The layer takes less room than its tar, and may fit.
            Some(FetchStop::Failed(error)) if error.class == ErrorClass::NoSpace => {
                drop(part);
                self.discard_tar(&blob).await;
                return Err(RebuildFailure::Useless(UnusedDelta::new(NoDelta::NoRoom, error.message)));
            }
            Some(stop) => return Err(RebuildFailure::Stop(stop)),
            None => {}
        }
        let written = part.offset();
        let committed = match applied {
            Ok(()) => part.commit(&self.source, &Labels::new()).await,
            Err(why) => {
                drop(part);
                self.discard_tar(&blob).await;
                return Err(RebuildFailure::Useless(why));
            }
        };
        match committed {
            // A layer without compression is its own tar, and belongs to the image.
            Ok(()) => Ok(RebuiltTar { tar: tar(written), is_ours: diff_id != layer.digest }),
            Err(BlobWriteError::Mismatch { .. }) => {
                self.discard_tar(&blob).await;
                Err(useless_delta("the delta gives a layer with another digest than that in the image"))
            }
            Err(error) => Err(RebuildFailure::Stop(self.write_failed(error))),
        }
    }

    async fn discard_tar(&self, blob: &BlobToWrite) {
        // If that fails, it goes with the lease.
        let _ = self.fetcher.writer.abort(blob).await;
    }
}
