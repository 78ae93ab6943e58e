//! The kubelet's records of pulls: they show whether it will ask the registry before pods may use an image on the node.
//!
//! By its default policy, `NeverVerifyPreloadedImages`, the kubelet lets any pod use an image that it has no record of.
//! Once it has one, it wants credentials for the very repository that the pod names, also for an image that we have pulled.
//! We read these files and never write them: a record from us would vouch for credentials that the kubelet hasn't seen.

mod records;

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use prepull_api::task::KubeletRecord;
use prepull_api::wire::truncate_note;
use prepull_registry::digest::sha256;
use tokio::time::{Instant, sleep, timeout};

use crate::one_question::OneQuestion;
use records::{Judgement, judge_record, names_reference};

/// The default of the kubelet's `--root-dir`.
pub(crate) const DEFAULT_KUBELET_DIR: &str = "/var/lib/kubelet";
/// Its directory for images, below that.
const IMAGE_MANAGER: &str = "image_manager";
/// Largest file that we read. A record grows with the secrets that it lists, 200 bytes each, and the kubelet stops at about
/// a hundred for each repository.
const MAX_FILE: u64 = 1024 * 1024;
/// Most files of pulls in progress that we look at. The kubelet has one for each image that it is pulling.
const MAX_INTENTS: usize = 256;
/// How long we wait for the kubelet to end its own pull of an image that is on the node. It only has to notice that all
/// layers are there; if it takes longer, it has probably been stopped.
const PULL_PATIENCE: Duration = Duration::from_secs(5);
/// Interval of looking whether it has ended.
const PULL_LOOK: Duration = Duration::from_millis(250);
/// Longest wait for one look, with those before it. It takes milliseconds unless the disk hangs, and the image is reported
/// only afterwards.
const LOOK_PATIENCE: Duration = Duration::from_secs(3);

/// Reason why the kubelet will ask the registry before pods may use an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AskReason {
    /// In one word.
    pub(crate) record: KubeletRecord,
    /// As one sentence, of at most [`prepull_api::wire::MAX_NOTE`] bytes.
    pub(crate) text: String,
}

/// Reads the kubelet's records of pulls.
#[derive(Clone, Debug)]
pub(crate) struct KubeletRecords {
    /// The directory `image_manager`.
    dir: Arc<Path>,
    /// Whether we've logged that the records can't be read.
    is_logged: Arc<AtomicBool>,
    /// On a disk that hangs, each look would keep another thread.
    looks: OneQuestion,
}

/// The result of one look.
#[derive(Debug)]
struct KubeletFinding {
    reason: Option<AskReason>,
    /// Whether the kubelet has begun to pull the image and hasn't ended.
    is_pulling: bool,
}

/// The record of one image.
enum RecordFinding {
    /// No record.
    Nothing,
    /// A record that lets every pod use the image.
    Accessible,
    /// A record that doesn't.
    Asks(AskReason),
}

impl KubeletRecords {
    /// The records of the kubelet with this root directory.
    pub(crate) fn in_root_dir(kubelet_dir: &Path) -> Self {
        Self {
            dir: kubelet_dir.join(IMAGE_MANAGER).into(),
            is_logged: Arc::default(),
            looks: OneQuestion::default(),
        }
    }

    /// Finds the reason why the kubelet will ask the registry before pods may use this image, which is on the node.
    /// `None` if there's no reason, and also if the records can't be read or their disk hangs.
    pub(crate) async fn find_reason(&self, id: &str, reference: &str) -> Option<AskReason> {
        let begun = Instant::now();
        loop {
            let (dir, id, reference) = (self.dir.to_path_buf(), id.to_owned(), reference.to_owned());
            let look = self.looks.ask(move || look_at_records(&dir, &id, &reference));
            let look = timeout(LOOK_PATIENCE, look).await.map_err(io::Error::from).and_then(|asked| asked?);
            match look {
                // The pull adds the missing credentials to the record when it ends.
                Ok(KubeletFinding { is_pulling: true, .. }) if begun.elapsed() < PULL_PATIENCE => {
                    sleep(PULL_LOOK).await;
                }
                Ok(KubeletFinding { reason, .. }) => return reason,
                Err(error) => {
                    self.log_once(&error);
                    return None;
                }
            }
        }
    }

    fn log_once(&self, error: &io::Error) {
        if !self.is_logged.swap(true, Ordering::Relaxed) {
            let dir = self.dir.display();
            tracing::debug!(%dir, %error, "the kubelet's records of pulls can't be read, so no warning will come from them (--kubelet-dir names its root directory)");
        }
    }
}

fn look_at_records(dir: &Path, id: &str, reference: &str) -> io::Result<KubeletFinding> {
    let pulled = dir.join("pulled");
    // Otherwise a missing directory would look like a missing record.
    pulled.metadata()?;
    let reason = match read_record(&pulled, id, reference)? {
        RecordFinding::Accessible => return Ok(KubeletFinding { reason: None, is_pulling: false }),
        RecordFinding::Nothing => None,
        RecordFinding::Asks(reason) => Some(reason),
    };
    let is_pulling = has_intent(&dir.join("pulling"), reference)?;
    let pulling = || reason_of(KubeletRecord::Pulling, "it has begun to pull it and has not ended");
    Ok(KubeletFinding { reason: reason.or_else(|| is_pulling.then(pulling)), is_pulling })
}

fn read_record(pulled: &Path, id: &str, reference: &str) -> io::Result<RecordFinding> {
    // The kubelet names the file after the id as the runtime writes it: containerd with `sha256:`, CRI-O without.
    let digits = id.strip_prefix("sha256:").unwrap_or(id);
    for id in [id, digits] {
        let path = pulled.join(file_name(id));
        let Some(bytes) = read_file(&path)? else { continue };
        return Ok(match judge_record(&bytes, id, reference) {
            Judgement::NotOfThisImage => continue,
            Judgement::Accessible => RecordFinding::Accessible,
            Judgement::Asks { record, because } => RecordFinding::Asks(reason_of(record, &because)),
            Judgement::Unreadable => {
                let because = format!("it can't read its record of it, {}", path.display());
                RecordFinding::Asks(reason_of(KubeletRecord::Unreadable, &because))
            }
        });
    }
    Ok(RecordFinding::Nothing)
}

fn has_intent(pulling: &Path, reference: &str) -> io::Result<bool> {
    let entries = match pulling.read_dir() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        entries => entries?,
    };
    // The name of a file depends on how the pod has written the image, so we look into each.
    for entry in entries.take(MAX_INTENTS) {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        // The others aren't the kubelet's, or are incomplete.
        let is_intent = name.starts_with("sha256-") && !name.ends_with(".tmp");
        if is_intent && read_file(&path)?.is_some_and(|bytes| names_reference(&bytes, reference)) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn file_name(id: &str) -> PathBuf {
    sha256(id.as_bytes()).replace(':', "-").into()
}

/// The content of a file; `None` if there is none.
fn read_file(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let file = match std::fs::File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut bytes = Vec::new();
    file.take(MAX_FILE + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(io::Error::other(format!("{} has more than {MAX_FILE} bytes", path.display())));
    }
    Ok(Some(bytes))
}

fn reason_of(record: KubeletRecord, because: &str) -> AskReason {
    // The meaning comes first, because the end may be cut.
    let text = truncate_note(&format!(
        "by default, the kubelet asks the registry before a pod may use this image: {because}"
    ));
    AskReason { record, text }
}

#[cfg(test)]
mod tests;
