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
use prepull_delta::{Limits, apply};
use prepull_registry::manifest::Descriptor;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;

use super::delta::{Delta, OldImage, Unused};
use super::download::Download;
use super::old_files::OldFiles;
use super::stop::Stop;
use crate::images::containerd::{Blob, BlobKind, Labels, WriteError, open_blob};
use crate::images::puller::ErrorClass;

/// Media type of an uncompressed layer.
const TAR: &str = "application/vnd.oci.image.layer.v1.tar";
/// Most bytes of a tar that are handed to containerd at once.
const PIECE: usize = 128 * 1024;
/// Pieces between the thread that rebuilds and containerd: one is written while the next is made.
const PIECES: usize = 2;
/// Why a layer couldn't be rebuilt.
pub(super) enum Failure {
    /// The layer must come another way, for this reason.
    Useless(Unused),
    /// The attempt has ended.
    Stop(Stop),
}

impl From<Stop> for Failure {
    fn from(stop: Stop) -> Self {
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

fn wrong(why: &impl ToString) -> Unused {
    Unused::new(NoDelta::WrongLayer, why.to_string())
}

fn useless(why: &str) -> Failure {
    Failure::Useless(wrong(&why))
}

impl Download<'_> {
    /// Rebuilds a layer from a delta that has arrived. Returns the descriptor of its tar, which containerd has checked.
    pub(super) async fn rebuild(
        &self,
        layer: &Descriptor,
        delta: &Delta,
        old: &OldImage,
        diff_id: &str,
    ) -> Result<Descriptor, Failure> {
        // The semaphore is never closed. The thread holds the permit: it may outlast this attempt.
        let turn = self.fetcher.rebuilding.clone().acquire_owned().await;
        let writer = &self.fetcher.writer;
        let size = delta.tar.unwrap_or_default();
        let blob = Blob { kind: BlobKind::Tar, digest: diff_id.to_owned(), size };
        // An earlier attempt may have left the beginning of another delta's tar.
        writer.abort(&blob).await.map_err(|error| Failure::Stop(self.refused(error)))?;
        let opened =
            writer.open(&blob, self.lease).await.map_err(|error| Failure::Stop(self.refused(error)))?;
        let tar = |size| Descriptor {
            media_type: TAR.to_owned(),
            digest: diff_id.to_owned(),
            size,
            annotations: layer.annotations.clone(),
            ..Descriptor::default()
        };
        let Some(mut part) = opened else {
            // Another image has this layer uncompressed.
            let there = self.fetcher.store.blob_size(diff_id).await;
            return there.map(tar).ok_or_else(|| useless("the rebuilt layer was lost"));
        };
        let (sender, mut pieces) = mpsc::channel(PIECES);
        let limits = Limits::of_layer(delta.tar, layer.size);
        let (root, digest) = (self.facts.root.clone(), delta.blob.digest.clone());
        let directories = old.directories.clone();
        let applying = spawn_blocking(move || {
            let _turn = turn;
            let unreadable = "the agent cannot read the files of the content store";
            let diff = open_blob(&root, &digest).ok_or(Unused::new(NoDelta::OldFiles, unreadable))?;
            let old_files = |error: io::Error| Unused::new(NoDelta::OldFiles, error.to_string());
            let mut sources = OldFiles::open(&directories).map_err(old_files)?;
            let mut pieces = Pieces { sender, piece: Vec::with_capacity(PIECE) };
            apply(diff, &mut sources, &mut pieces, &limits).map_err(|error| wrong(&error))?;
            pieces.flush().map_err(|error| wrong(&error))
        });
        let mut refused = None;
        while let Some(piece) = pieces.recv().await {
            if let Err(error) = part.write(piece).await {
                refused = Some(self.refused(error));
                break;
            }
        }
        // Ends the thread at its next piece.
        drop(pieces);
        // A panic of the thread is a bug, and the layer is still to be had.
        let applied: Result<(), Unused> = applying.await.unwrap_or_else(|error| Err(wrong(&error)));
        match refused {
            // The layer takes less room than its tar, and may fit.
            Some(Stop::Failed(error)) if error.class == ErrorClass::NoSpace => {
                drop(part);
                self.discard_tar(&blob).await;
                return Err(Failure::Useless(Unused::new(NoDelta::NoRoom, error.message)));
            }
            Some(stop) => return Err(Failure::Stop(stop)),
            None => {}
        }
        let written = part.offset();
        let committed = match applied {
            Ok(()) => part.commit(&self.source, &Labels::new()).await,
            Err(why) => {
                drop(part);
                self.discard_tar(&blob).await;
                return Err(Failure::Useless(why));
            }
        };
        match committed {
            Ok(()) => Ok(tar(written)),
            Err(WriteError::Mismatch { .. }) => {
                self.discard_tar(&blob).await;
                Err(useless("the delta gives a layer with another digest than that in the image"))
            }
            Err(error) => Err(Failure::Stop(self.refused(error))),
        }
    }

    async fn discard_tar(&self, blob: &Blob) {
        // If that fails, it goes with the lease.
        let _ = self.fetcher.writer.abort(blob).await;
    }
}
