//! Writing into containerd's content store, over gRPC.
//!
//! ```text
//!  STAT (ref, digest, size) ─▶ AlreadyExists: it is there, and the lease keeps it from now on
//!                           ─▶ offset of what earlier writers left
//!  WRITE (offset, data) …   ─▶ offset
//!  COMMIT (offset, size, digest) ─▶ done, or FailedPrecondition: the bytes have another digest, and are in the way
//! ```
//!
//! The stream holds a lock on its ref until it ends; what was written stays. Each message carries its offset, because
//! containerd takes an offset of 0 for "from the beginning" and throws away what it has.

use std::time::Duration;

use containerd_client::services::v1::content_client::ContentClient;
use containerd_client::services::v1::{
    AbortRequest, DeleteContentRequest, ReadContentRequest, WriteAction, WriteContentRequest,
    WriteContentResponse,
};
use futures::stream;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use super::labels::Labels;
use super::leases::leased;
use super::namespace::namespaced;
use super::source::Source;
use super::to_wire_size;

/// Writes that containerd may still owe an answer for. Two let it write the one while the other one is on its way; more
/// would be lost with it when it is killed.
const UNANSWERED: usize = 2;
/// Longest wait for the answer to a write. A disk that takes longer for 128 KiB is as good as gone.
const WRITE_PATIENCE: Duration = Duration::from_secs(120);
/// Longest wait for a commit, which flushes the blob to the disk.
const COMMIT_PATIENCE: Duration = Duration::from_secs(1800);
/// Longest wait for a ref to open, besides the time that its bytes take.
const OPEN_PATIENCE: Duration = Duration::from_secs(60);
/// Bytes a second at which a slow disk and processor hash what a ref has, before containerd answers.
const SLOWEST_HASH: u64 = 4 << 20;
/// Longest wait for an abort, which deletes a file.
const ABORT_PATIENCE: Duration = Duration::from_secs(30);

/// What a blob is to its image. containerd's own pulls name their refs after it, and so do we: a pull by the kubelet
/// then waits for our bytes instead of fetching them again, and goes on with what we leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlobKind {
    Index,
    Manifest,
    Config,
    Layer,
    /// Bytes of a neighbour, under a name that nobody else knows: if they are wrong, no pull by the runtime goes on with
    /// them.
    OfPeer,
}

/// How the names of ingests with bytes of neighbours begin.
pub(super) const PEER_REF: &str = "peer";

/// A blob that is to be in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Blob {
    pub(crate) kind: BlobKind,
    /// `sha256:…`.
    pub(crate) digest: String,
    pub(crate) size: u64,
}

impl Blob {
    /// The name of its ingest.
    fn ingest(&self) -> String {
        let kind = match self.kind {
            BlobKind::Index => "index",
            BlobKind::Manifest => "manifest",
            BlobKind::Config => "config",
            BlobKind::Layer => "layer",
            BlobKind::OfPeer => PEER_REF,
        };
        format!("{kind}-{}", self.digest)
    }
}

/// Why a blob could not be written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WriteError {
    /// Somebody else writes to it.
    #[error("another pull is writing {0}")]
    Locked(String),
    /// What was written has not the digest or the size of the blob.
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

    /// Opens a blob for writing. `None` if it is there: then the lease keeps it from now on.
    ///
    /// containerd flushes its record of a blob, and not the directory that the blob's file was moved to. After a power cut
    /// it may know of a blob whose file is lost, and fail each pull that needs it. Such a record is deleted here.
    pub(crate) async fn open(
        &self,
        blob: &Blob,
        lease: &MetadataValue<Ascii>,
    ) -> Result<Option<PartialBlob>, WriteError> {
        let opened = self.open_unless_known(blob, lease).await?;
        if opened.is_some() || !self.has_lost_file(blob).await {
            return Ok(opened);
        }
        tracing::warn!(
            blob = blob.digest,
            "the file of a blob is lost, perhaps in a power cut; it is fetched again"
        );
        let request = namespaced(DeleteContentRequest { digest: blob.digest.clone() });
        match timeout(ABORT_PATIENCE, self.content.clone().delete(request)).await {
            Ok(Err(status)) if status.code() != Code::NotFound => return Err(explain(status, &blob.digest)),
            Ok(_) => {}
            Err(_) => return Err(WriteError::Silent(ABORT_PATIENCE)),
        }
        self.open_unless_known(blob, lease).await
    }

    /// Whether there is no file of a blob that the store has a record of.
    async fn has_lost_file(&self, blob: &Blob) -> bool {
        let request = namespaced(ReadContentRequest { digest: blob.digest.clone(), offset: 0, size: 1 });
        let mut content = self.content.clone();
        let read = async { content.read(request).await?.into_inner().message().await };
        matches!(timeout(OPEN_PATIENCE, read).await, Ok(Err(status)) if status.code() == Code::NotFound)
    }

    async fn open_unless_known(
        &self,
        blob: &Blob,
        lease: &MetadataValue<Ascii>,
    ) -> Result<Option<PartialBlob>, WriteError> {
        let (requests, mut queue) = mpsc::channel(UNANSWERED);
        let total = to_wire_size(blob.size);
        let stat = WriteContentRequest {
            action: WriteAction::Stat.into(),
            r#ref: blob.ingest(),
            total,
            expected: blob.digest.clone(),
            ..WriteContentRequest::default()
        };
        // There is room for it: the channel is empty.
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
            })),
            Ok(Err(status)) if status.code() == Code::AlreadyExists => Ok(None),
            Ok(Err(status)) => Err(explain(status, &blob.digest)),
            Err(_) => Err(WriteError::Silent(patience)),
        }
    }

    /// Throws away what there is of a blob that nobody writes. Without this, a pull that resumes wrong bytes fails for
    /// ever.
    pub(crate) async fn abort(&self, blob: &Blob) -> Result<(), WriteError> {
        let request = namespaced(AbortRequest { r#ref: blob.ingest() });
        match timeout(ABORT_PATIENCE, self.content.clone().abort(request)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(status)) if status.code() == Code::NotFound => Ok(()),
            Ok(Err(status)) => Err(explain(status, &blob.digest)),
            Err(_) => Err(WriteError::Silent(ABORT_PATIENCE)),
        }
    }
}

/// A part of a blob, which nobody else may write to until this is dropped.
#[derive(Debug)]
pub(crate) struct PartialBlob {
    digest: String,
    size: u64,
    requests: mpsc::Sender<WriteContentRequest>,
    answers: Streaming<WriteContentResponse>,
    unanswered: usize,
    offset: u64,
}

impl PartialBlob {
    /// Number of bytes that are there, or on their way.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// Appends bytes.
    pub(crate) async fn write(&mut self, data: Vec<u8>) -> Result<(), WriteError> {
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
            self.answer(WRITE_PATIENCE).await?;
        }
        Ok(())
    }

    /// Makes the blob of what was written, if that has its digest and its size, with a label that tells where it is from,
    /// and with those that say what it refers to.
    pub(crate) async fn commit(mut self, source: &Source, labels: &Labels) -> Result<(), WriteError> {
        while self.unanswered > 0 {
            self.answer(WRITE_PATIENCE).await?;
        }
        let request = WriteContentRequest {
            action: WriteAction::Commit.into(),
            offset: to_wire_size(self.offset),
            total: to_wire_size(self.size),
            expected: self.digest.clone(),
            labels: labels.clone().into_iter().chain([source.label()]).collect(),
            ..WriteContentRequest::default()
        };
        let committed = match self.send(request, COMMIT_PATIENCE).await {
            Ok(()) => self.answer(COMMIT_PATIENCE).await,
            Err(error) => Err(error),
        };
        match committed {
            // Somebody else was faster, with another ref.
            Err(WriteError::Refused(status)) if status.code() == Code::AlreadyExists => Ok(()),
            committed => committed,
        }
    }

    async fn send(&mut self, request: WriteContentRequest, patience: Duration) -> Result<(), WriteError> {
        match timeout(patience, self.requests.send(request)).await {
            Ok(Ok(())) => {
                self.unanswered += 1;
                Ok(())
            }
            // The call has ended: the last answer says why.
            Ok(Err(_)) => loop {
                self.answer(patience).await?;
            },
            Err(_) => Err(WriteError::Silent(patience)),
        }
    }

    async fn answer(&mut self, patience: Duration) -> Result<(), WriteError> {
        let answer = timeout(patience, next(&mut self.answers)).await;
        answer.map_err(|_| WriteError::Silent(patience))?.map_err(|status| explain(status, &self.digest))?;
        self.unanswered = self.unanswered.saturating_sub(1);
        Ok(())
    }
}

async fn next(answers: &mut Streaming<WriteContentResponse>) -> Result<WriteContentResponse, Status> {
    let ended = || Status::unavailable("containerd ended the write without a word");
    answers.message().await?.ok_or_else(ended)
}

fn explain(status: Status, digest: &str) -> WriteError {
    let answer = status.message();
    // A status that tonic made of a broken connection has the same code, and no such text.
    if status.code() == Code::Unavailable && answer.contains(" locked") {
        return WriteError::Locked(digest.to_owned());
    }
    let of_content = ["unexpected commit digest", "unexpected commit size", "failed size validation"];
    if of_content.iter().any(|needle| answer.contains(needle)) {
        return WriteError::Mismatch { digest: digest.to_owned(), answer: answer.to_owned() };
    }
    WriteError::Refused(status)
}

fn from_wire(size: i64) -> u64 {
    u64::try_from(size).unwrap_or(0)
}
