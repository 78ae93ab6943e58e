//! The ledger of tasks on disk. Each task is a JSON file in `STATE_DIR/tasks`, so a broken file affects only one task.
//!
//! # Guarantees
//! - When [`Ledger::save`] returns, the record survives a power cut: it's written to a new file, flushed and renamed,
//!   and the directory is flushed. A reader sees the old record or the new one.
//! - A file without a valid record is set aside as `….corrupt`. A file that can't be read now, or that a newer agent
//!   has written, stays in place. Neither stops the agent.
//! - A state directory has one agent at a time.
//!
//! Every function blocks, so don't call them on a thread of the async runtime.

#[cfg(test)]
pub(crate) mod memory;

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use prepull_api::task::TaskId;
use rustix::fs::{FlockOperation, flock};
use serde::Deserialize;
use tracing::warn;

use crate::cloud::identity::REMEDY_OF_DENIAL;
use crate::tasks::agent::{RECORD_FORMAT, TaskRecord};

/// Largest record file that we read: a task fills at most one message (1 MiB), and its results, 256 with a reason of 1
/// KiB each, add less than that.
const MAX_RECORD: u64 = 4 * 1024 * 1024;
const LOCK: &str = "lock";
const TASKS: &str = "tasks";

/// Storage for the records of a node.
pub(crate) trait RecordStore: Send + 'static {
    /// Reads all records. Called once, at the start.
    fn load(&mut self) -> Result<Vec<TaskRecord>, LedgerError>;
    /// Writes a record durably. It replaces an earlier one of the task.
    fn save(&mut self, record: &TaskRecord) -> Result<(), LedgerError>;
    /// Removes the record of a task, if there is one.
    fn remove(&mut self, task: &TaskId) -> Result<(), LedgerError>;
}

/// Failure to open, read or write the ledger.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LedgerError {
    /// Another agent has the state directory: the two would overwrite each other's records.
    #[error(
        "the state directory {0} is in use by another edgecore-prepull: stop that one, or give this one a --state-dir of its own"
    )]
    InUse(PathBuf),
    /// The file or folder belongs to another user.
    #[error("cannot {action} {path}: {REMEDY_OF_DENIAL}")]
    Denied {
        /// The refused operation.
        action: &'static str,
        /// File or directory of the operation.
        path: PathBuf,
    },
    /// The operating system reported an error.
    #[error("cannot {action} {path}")]
    Io {
        /// The failed operation.
        action: &'static str,
        /// File or directory of the operation.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        error: io::Error,
    },
    /// The operating system can't start another thread.
    #[error("cannot start the thread that writes the ledger")]
    Thread(#[source] io::Error),
    /// The record can't be serialised as JSON. This isn't known to happen.
    #[error("cannot serialise the record of task {task}")]
    Serialise {
        /// Task of the record.
        task: TaskId,
        /// Error of the serialiser.
        #[source]
        error: serde_json::Error,
    },
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> LedgerError {
    let path = path.to_owned();
    move |error| match error.kind() {
        io::ErrorKind::PermissionDenied => LedgerError::Denied { action, path },
        _ => LedgerError::Io { action, path, error },
    }
}

/// Reads the records of a state directory that an agent may have locked. What can't be read is left out.
pub(crate) fn read_beside_agent(state_dir: &Path) -> Result<Vec<TaskRecord>, LedgerError> {
    let tasks = state_dir.join(TASKS);
    let mut records = Vec::new();
    for entry in fs::read_dir(&tasks).map_err(io_error("list", &tasks))? {
        let path = entry.map_err(io_error("list", &tasks))?.path();
        if path.extension().is_some_and(|extension| extension == "json") {
            records.extend(read_record(&path).ok());
        }
    }
    records.sort_by(|a, b| (a.accepted, a.id()).cmp(&(b.accepted, b.id())));
    Ok(records)
}

/// The records in a state directory. The directory is locked while this exists.
#[derive(Debug)]
pub(crate) struct Ledger {
    tasks: PathBuf,
    /// The operating system releases the lock when the file is closed, even if the process crashes.
    _lock: File,
}

impl Ledger {
    /// Locks the state directory, and creates it if it is missing.
    pub(crate) fn open(state_dir: &Path) -> Result<Self, LedgerError> {
        let tasks = state_dir.join(TASKS);
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&tasks)
            .map_err(io_error("create the directory", &tasks))?;
        let path = state_dir.join(LOCK);
        let opened = open_lock(&path, |options, path| options.open(path));
        let lock = opened.map_err(io_error("open the lock", &path))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self { tasks, _lock: lock }),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(LedgerError::InUse(state_dir.to_owned())),
            Err(error) => Err(io_error("lock", &path)(error.into())),
        }
    }

    fn path(&self, task: &TaskId) -> PathBuf {
        self.tasks.join(file_name(task))
    }

    fn sync_folder(&self) -> Result<(), LedgerError> {
        File::open(&self.tasks).and_then(|folder| folder.sync_all()).map_err(io_error("flush", &self.tasks))
    }

    fn set_aside(path: &Path, why: &str) {
        let mut name = path.as_os_str().to_owned();
        name.push(".corrupt");
        let aside = PathBuf::from(name);
        match fs::rename(path, &aside) {
            Ok(()) => {
                warn!(file = %aside.display(), reason = why, "task record is unusable and was set aside; the agent forgets this task, and the cloud assigns it again or lets it time out");
            }
            Err(error) => {
                warn!(file = %path.display(), reason = why, %error, "task record is unusable and cannot be set aside");
            }
        }
    }
}

impl RecordStore for Ledger {
    fn load(&mut self) -> Result<Vec<TaskRecord>, LedgerError> {
        let mut records = Vec::new();
        for entry in fs::read_dir(&self.tasks).map_err(io_error("list", &self.tasks))? {
            let path = entry.map_err(io_error("list", &self.tasks))?.path();
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("json") => match read_record(&path) {
                    Ok(record) => records.push(record),
                    Err(Unusable::Corrupt(why)) => Self::set_aside(&path, &why),
                    Err(Unusable::NotNow(why)) => {
                        warn!(file = %path.display(), reason = why, "task record cannot be read and is left where it is; the agent reads it again when it starts the next time, unless the cloud assigns this task again");
                    }
                },
                // A write that a crash interrupted: the old record is still there.
                Some("new") => {
                    if let Err(error) = fs::remove_file(&path) {
                        warn!(file = %path.display(), %error, "cannot remove an unfinished task record");
                    }
                }
                _ => {}
            }
        }
        // read_dir returns files in no order; the agent queues tasks in the order of their acceptance.
        records.sort_by(|a, b| (a.accepted, a.id()).cmp(&(b.accepted, b.id())));
        Ok(records)
    }

    fn save(&mut self, record: &TaskRecord) -> Result<(), LedgerError> {
        let text = serde_json::to_vec(record)
            .map_err(|error| LedgerError::Serialise { task: record.id().clone(), error })?;
        let path = self.path(record.id());
        let new = path.with_extension("json.new");
        let written = OpenOptions::new()
            .create(true)
            .truncate(true)
            .write(true)
            .mode(0o600)
            .open(&new)
            .and_then(|mut file| file.write_all(&text).and_then(|()| file.sync_all()));
        if let Err(error) = written {
            // On a full disk, the unfinished file would only take up space.
            let _ = fs::remove_file(&new);
            return Err(io_error("write", &new)(error));
        }
        fs::rename(&new, &path).map_err(io_error("replace", &path))?;
        self.sync_folder()
    }

    fn remove(&mut self, task: &TaskId) -> Result<(), LedgerError> {
        let path = self.path(task);
        match fs::remove_file(&path) {
            Ok(()) => self.sync_folder(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(io_error("remove", &path)(error)),
        }
    }
}

/// Opens the lock, and creates it if it's missing. An existing one on a read-only file system is only read, which suffices to
/// lock it: the agent then connects, and refuses tasks with that reason.
///
/// # Errors
/// That of opening it to write.
fn open_lock(path: &Path, open: impl Fn(&OpenOptions, &Path) -> io::Result<File>) -> io::Result<File> {
    let error = match open(OpenOptions::new().create(true).truncate(false).write(true).mode(0o600), path) {
        Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => error,
        opened => return opened,
    };
    let lock = open(OpenOptions::new().read(true), path);
    if lock.is_ok() {
        warn!(file = %path.display(), %error, "the state directory can't be written; the agent refuses tasks until it can");
    }
    lock.map_err(|_| error)
}

/// Reason why a file has no usable record.
enum Unusable {
    /// It has no valid record.
    Corrupt(String),
    /// It may have one: reading failed, or a newer agent has written it.
    NotNow(String),
}

/// Reads the record in a file.
fn read_record(path: &Path) -> Result<TaskRecord, Unusable> {
    /// The part of a record that every agent understands.
    #[derive(Deserialize)]
    struct RecordFormat {
        format: u32,
    }
    let corrupt = |why: String| Err(Unusable::Corrupt(why));
    let text = read_file(path).map_err(|error| Unusable::NotNow(error.to_string()))?;
    if text.len() as u64 > MAX_RECORD {
        return corrupt(format!("longer than {MAX_RECORD} bytes"));
    }
    let parsed: Result<RecordFormat, _> = serde_json::from_slice(&text);
    if let Ok(RecordFormat { format }) = parsed
        && format > RECORD_FORMAT
    {
        let why = format!("format {format} of a newer agent; this one knows {RECORD_FORMAT}");
        return Err(Unusable::NotNow(why));
    }
    let record = match serde_json::from_slice::<TaskRecord>(&text) {
        Ok(record) => record.without_unknown(),
        Err(error) => return corrupt(error.to_string()),
    };
    let images = record.task.images.len();
    let complete = record.result.as_ref().map_or(record.images.len(), |result| result.images.len()) == images;
    if !complete {
        return corrupt("the results do not match the images".to_owned());
    }
    // Otherwise the record would be saved under its right name, and this file would be read again after a restart.
    if path.file_name().is_none_or(|name| name != file_name(record.id()).as_str()) {
        return corrupt(format!("it is the record of task {}, under a wrong file name", record.id()));
    }
    Ok(record)
}

/// Reads a file, up to one byte more than the maximum.
fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    File::open(path)?.take(MAX_RECORD + 1).read_to_end(&mut text)?;
    Ok(text)
}

/// Names the file of a task. A UID in Kubernetes' format is used directly; any other text, which might contain a slash,
/// is hashed. The two never collide, because only hashed names contain an underscore.
fn file_name(task: &TaskId) -> String {
    const LONGEST: usize = 64;
    let job = &task.job.0;
    let plain =
        (1..=LONGEST).contains(&job.len()) && job.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    let name = if plain {
        job.clone()
    } else {
        let hash = ring::digest::digest(&ring::digest::SHA256, job.as_bytes());
        hash.as_ref().iter().fold("_".to_owned(), |mut name, byte| {
            // Writing to a String cannot fail.
            let _ = write!(name, "{byte:02x}");
            name
        })
    };
    format!("{name}.{}.json", task.attempt)
}

#[cfg(test)]
mod tests;
