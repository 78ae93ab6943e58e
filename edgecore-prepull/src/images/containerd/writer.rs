//! Writing into containerd's content store, over gRPC.
//!
//! ```text
//!  STAT (ref, digest, size) ─▶ AlreadyExists: it is there, and the lease keeps it from now on
//!                           ─▶ offset of what earlier writers left
//!  WRITE (offset, data) …   ─▶ offset
//!  COMMIT (offset, size, digest) ─▶ done, or FailedPrecondition: the bytes have another digest, and are in the way
//! ```
//!
//! The stream locks its ref until it ends; the written bytes stay. Each message carries its offset, because containerd
//! takes an offset of 0 for "from the beginning" and discards the bytes that it has.

use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

use containerd_client::services::v1::content_client::ContentClient;
use containerd_client::services::v1::{
    AbortRequest, DeleteContentRequest, ReadContentRequest, StatusRequest, WriteAction, WriteContentRequest,
    WriteContentResponse,
};
use futures::stream;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use super::ingest_files::open_ingest;
use super::labels::Labels;
use super::namespace::leased;
use super::namespace::namespaced;
use super::source::SourceRepository;
use super::to_wire_size;

/// Most unanswered writes. With two, containerd writes one while the other is in transit; more would only be lost if
/// it's killed.
const UNANSWERED: usize = 2;
/// Longest wait for the answer to a write. A disk that takes longer for 128 KiB counts as broken.
const WRITE_PATIENCE: Duration = Duration::from_secs(120);
/// Longest wait for a commit, which flushes the blob to the disk.
const COMMIT_PATIENCE: Duration = Duration::from_secs(1800);
/// Longest wait for a ref to open, in addition to the time for hashing its bytes.
const OPEN_PATIENCE: Duration = Duration::from_secs(60);
/// Bytes a second at which a slow disk and processor hash the existing bytes of a ref before containerd answers.
const SLOWEST_HASH: u64 = 4 << 20;
/// Longest wait for an abort, which deletes a file.
const ABORT_PATIENCE: Duration = Duration::from_secs(30);

/// The role of a blob in its image. containerd's own pulls derive the names of their refs from it, and so do we: a pull
/// by the kubelet then waits for our bytes instead of fetching them again, and resumes from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlobKind {
    Index,
    Manifest,
    Config,
    Layer,
    /// A layer with bytes of neighbours, under a name that only we use: if they're wrong, no pull by the runtime resumes
    /// from them.
    OfPeer,
    /// A layer that was rebuilt as an uncompressed tar. It's deleted after unpacking.
    Tar,
}

/// Prefix of the names of ingests with bytes of neighbours.
pub(super) const PEER_REF: &str = "peer";

/// A blob to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BlobToWrite {
    pub(crate) kind: BlobKind,
    /// `sha256:…`.
    pub(crate) digest: String,
    pub(crate) size: u64,
}

impl BlobToWrite {
    /// The same blob, in the ingest that may have bytes of neighbours.
    pub(crate) fn of_peer(&self) -> Self {
        Self { kind: BlobKind::OfPeer, ..self.clone() }
    }

    /// The name of its ingest.
    pub(crate) fn ingest_name(&self) -> String {
        let kind = match self.kind {
            BlobKind::Index => "index",
            BlobKind::Manifest => "manifest",
            BlobKind::Config => "config",
            BlobKind::Layer => "layer",
            BlobKind::OfPeer => PEER_REF,
            BlobKind::Tar => "tar",
        };
        format!("{kind}-{}", self.digest)
    }
}

/// Reason why a blob couldn't be written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BlobWriteError {
    /// Another writer has the lock.
    #[error("another pull is writing {0}")]
    Locked(String),
    /// The written bytes don't have the digest or the size of the blob.
    #[error("the bytes that arrived are not {digest}: {answer}")]
    Mismatch {
        /// The digest that they should have.
        digest: String,
        /// containerd's answer.
        answer: String,
    },
    /// containerd did not answer in time.
    #[error("containerd did not answer within {0:?}")]
    Silent(Duration),
    /// containerd refused, or is gone.
    #[error(transparent)]
    Refused(#[from] Status),
}

/// Writer into containerd's content service.
#[derive(Clone, Debug)]
pub(crate) struct ContentWriter {
    content: ContentClient<Channel>,
}

impl ContentWriter {
    pub(crate) fn new(channel: Channel) -> Self {
        Self { content: ContentClient::new(channel) }
    }

    /// Opens a blob for writing. `None` if the store has it: then the lease keeps it from now on.
    ///
    /// containerd flushes its record of a blob, but not the directory of the blob's file. After a power cut it may have
    /// a record without a file, and fail each pull that needs the blob. Such a record is deleted here.
    pub(crate) async fn open(
        &self,
        blob: &BlobToWrite,
        lease: &MetadataValue<Ascii>,
    ) -> Result<Option<PartialBlob>, BlobWriteError> {
        let opened = self.open_unless_known(blob, lease).await?;
        if opened.is_some() || !self.has_lost_file(blob).await {
            return Ok(opened);
        }
        tracing::warn!(
            blob = blob.digest,
            "the file of a blob is lost, perhaps in a power cut; it is fetched again"
        );
        self.delete(&blob.digest).await?;
        self.open_unless_known(blob, lease).await
    }

    /// Whether the store has a record of a blob without its file.
    async fn has_lost_file(&self, blob: &BlobToWrite) -> bool {
        let request = namespaced(ReadContentRequest { digest: blob.digest.clone(), offset: 0, size: 1 });
        let mut content = self.content.clone();
        let read = async { content.read(request).await?.into_inner().message().await };
        matches!(timeout(OPEN_PATIENCE, read).await, Ok(Err(status)) if status.code() == Code::NotFound)
    }

    /// Bytes that earlier writers have left of a blob. 0 without an answer, as for an ingest that doesn't exist.
    pub(crate) async fn written_bytes(&self, blob: &BlobToWrite) -> u64 {
        let request = namespaced(StatusRequest { r#ref: blob.ingest_name() });
        let mut content = self.content.clone();
        let Ok(Ok(answer)) = timeout(ABORT_PATIENCE, content.status(request)).await else { return 0 };
        answer.into_inner().status.map_or(0, |status| from_wire(status.offset))
    }

    /// Opens the bytes of a blob that is being written, of a containerd with this root.
    pub(crate) async fn read_ingest(&self, blob: &BlobToWrite, root: PathBuf) -> Option<File> {
        let name = blob.ingest_name();
        spawn_blocking(move || open_ingest(&root, &name)).await.ok()?
    }

    async fn open_unless_known(
        &self,
        blob: &BlobToWrite,
        lease: &MetadataValue<Ascii>,
    ) -> Result<Option<PartialBlob>, BlobWriteError> {
        let (requests, mut queue) = mpsc::channel(UNANSWERED);
        let total = to_wire_size(blob.size);
        let stat = WriteContentRequest {
            action: WriteAction::Stat.into(),
            r#ref: blob.ingest_name(),
            total,
            expected: blob.digest.clone(),
            ..WriteContentRequest::default()
        };
        // There's room for it: the channel is empty.
        let _ = requests.try_send(stat);
        let queue = stream::poll_fn(move |context| queue.poll_recv(context));
        let request = leased(queue, lease);
        let patience = OPEN_PATIENCE + Duration::from_secs(blob.size / SLOWEST_HASH);
        let mut content = self.content.clone();
        let opening = async {
            let mut answers = content.write(request).await?.into_inner();
            let first = next(&mut answers).await?;
            Ok::<_, Status>((answers, from_wire(first.offset)))
        };
        match timeout(patience, opening).await {
            Ok(Ok((answers, offset))) => Ok(Some(PartialBlob {
                digest: blob.digest.clone(),
                size: blob.size,
                requests,
                answers,
                unanswered: 0,
                offset,
                acknowledged: offset,
            })),
            Ok(Err(status)) if status.code() == Code::AlreadyExists => Ok(None),
            Ok(Err(status)) => Err(to_write_error(status, &blob.digest)),
            Err(_) => Err(BlobWriteError::Silent(patience)),
        }
    }

    /// Deletes a blob. It's no error if there is none.
    pub(crate) async fn delete(&self, digest: &str) -> Result<(), BlobWriteError> {
        let request = namespaced(DeleteContentRequest { digest: digest.to_owned() });
        match timeout(ABORT_PATIENCE, self.content.clone().delete(request)).await {
            Ok(Err(status)) if status.code() != Code::NotFound => Err(to_write_error(status, digest)),
            Ok(_) => Ok(()),
            Err(_) => Err(BlobWriteError::Silent(ABORT_PATIENCE)),
        }
    }

    /// Discards the bytes of a blob that has no writer. Without this, a pull that resumes from wrong bytes would fail
    /// each time.
    pub(crate) async fn abort(&self, blob: &BlobToWrite) -> Result<(), BlobWriteError> {
        let request = namespaced(AbortRequest { r#ref: blob.ingest_name() });
        match timeout(ABORT_PATIENCE, self.content.clone().abort(request)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(status)) if status.code() == Code::NotFound => Ok(()),
            Ok(Err(status)) => Err(to_write_error(status, &blob.digest)),
            Err(_) => Err(BlobWriteError::Silent(ABORT_PATIENCE)),
        }
    }
}

/// A partial blob, locked for other writers until this is dropped.
#[derive(Debug)]
pub(crate) struct PartialBlob {
    digest: String,
    size: u64,
    requests: mpsc::Sender<WriteContentRequest>,
    answers: Streaming<WriteContentResponse>,
    unanswered: usize,
    offset: u64,
    acknowledged: u64,
}

impl PartialBlob {
    /// Number of bytes that are written or in transit.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// Number of bytes that are in the file for sure.
    pub(crate) fn acknowledged(&self) -> u64 {
        self.acknowledged
    }

    /// Waits until all bytes are acknowledged.
    pub(crate) async fn await_acknowledgements(&mut self) -> Result<(), BlobWriteError> {
        while self.unanswered > 0 {
            self.await_answer(WRITE_PATIENCE).await?;
        }
        Ok(())
    }

    /// Appends bytes.
    pub(crate) async fn write(&mut self, data: Vec<u8>) -> Result<(), BlobWriteError> {
        let length = data.len() as u64;
        let request = WriteContentRequest {
            action: WriteAction::Write.into(),
            offset: to_wire_size(self.offset),
            data,
            ..WriteContentRequest::default()
        };
        self.send(request, WRITE_PATIENCE).await?;
        self.offset += length;
        while self.unanswered >= UNANSWERED {
            self.await_answer(WRITE_PATIENCE).await?;
        }
        Ok(())
    }

    /// Commits the blob if the written bytes have its digest and size, with a label for its source and with labels for
    /// its references.
    pub(crate) async fn commit(
        mut self,
        source: &SourceRepository,
        labels: &Labels,
    ) -> Result<(), BlobWriteError> {
        self.await_acknowledgements().await?;
        let request = WriteContentRequest {
            action: WriteAction::Commit.into(),
            offset: to_wire_size(self.offset),
            total: to_wire_size(self.size),
            expected: self.digest.clone(),
            labels: labels.clone().into_iter().chain([source.label()]).collect(),
            ..WriteContentRequest::default()
        };
        let committed = match self.send(request, COMMIT_PATIENCE).await {
            Ok(()) => self.await_answer(COMMIT_PATIENCE).await,
            Err(error) => Err(error),
        };
        match committed {
            // Another writer was faster, with another ref.
            Err(BlobWriteError::Refused(status)) if status.code() == Code::AlreadyExists => Ok(()),
            committed => committed,
        }
    }

    async fn send(&mut self, request: WriteContentRequest, patience: Duration) -> Result<(), BlobWriteError> {
        match timeout(patience, self.requests.send(request)).await {
            Ok(Ok(())) => {
                self.unanswered += 1;
                Ok(())
            }
            // The call has ended: the last answer has the reason.
            Ok(Err(_)) => loop {
                self.await_answer(patience).await?;
            },
            Err(_) => Err(BlobWriteError::Silent(patience)),
        }
    }

    async fn await_answer(&mut self, patience: Duration) -> Result<(), BlobWriteError> {
        let answer = timeout(patience, next(&mut self.answers)).await;
        let answer = answer
            .map_err(|_| BlobWriteError::Silent(patience))?
            .map_err(|status| to_write_error(status, &self.digest))?;
        self.acknowledged = self.acknowledged.max(from_wire(answer.offset));
        self.unanswered = self.unanswered.saturating_sub(1);
        Ok(())
    }
}

async fn next(answers: &mut Streaming<WriteContentResponse>) -> Result<WriteContentResponse, Status> {
    let ended = || Status::unavailable("containerd ended the write without a word");
    answers.message().await?.ok_or_else(ended)
}

fn to_write_error(status: Status, digest: &str) -> BlobWriteError {
    let answer = status.message();
    // A broken connection has the same code, but tonic's text lacks this word.
    if status.code() == Code::Unavailable && answer.contains(" locked") {
        return BlobWriteError::Locked(digest.to_owned());
    }
    let of_content = ["unexpected commit digest", "unexpected commit size", "failed size validation"];
    if of_content.iter().any(|needle| answer.contains(needle)) {
        return BlobWriteError::Mismatch { digest: digest.to_owned(), answer: answer.to_owned() };
    }
    BlobWriteError::Refused(status)
}

fn from_wire(size: i64) -> u64 {
    u64::try_from(size).unwrap_or(0)
}
