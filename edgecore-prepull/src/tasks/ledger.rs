//! The tasks on the disk: one JSON file for each under `STATE_DIR/tasks`, so that a broken file costs one task.
//!
//! # Guarantees
//! - When [`Ledger::save`] returns, the record survives a power cut: it is written beside its place, flushed,
//!   renamed, and the folder is flushed. A reader sees the old record or the new one.
//! - A file that cannot be read is set aside as `….corrupt` and never stops the agent.
//! - One agent at a time has a state directory.
//!
//! All of it blocks: callers are on a thread that may.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use prepull_api::task::TaskId;
use rustix::fs::{FlockOperation, flock};
use tracing::warn;

use crate::cloud::identity::REMEDY_OF_DENIAL;
use crate::tasks::agent::{RECORD_FORMAT, TaskRecord};

/// A record beyond this is no record of ours: a task is at most one message (1 MiB), and its results, 256 at
/// 1 KiB of reason each, add less than that.
const MAX_RECORD: u64 = 4 * 1024 * 1024;
const LOCK: &str = "lock";
const TASKS: &str = "tasks";

/// Where the records of a node are kept.
pub(crate) trait Store: Send + 'static {
    /// All records, once, at the start.
    fn load(&mut self) -> Result<Vec<TaskRecord>, LedgerError>;
    /// Writes a record for good, in place of an earlier one of that task.
    fn save(&mut self, record: &TaskRecord) -> Result<(), LedgerError>;
    /// Removes the record of a task, if there is one.
    fn remove(&mut self, task: &TaskId) -> Result<(), LedgerError>;
}

/// Why the ledger could not be opened, read or written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LedgerError {
    /// Two agents would overwrite each other's records.
    #[error(
        "the state directory {0} is in use by another edgecore-prepull: stop that one, or give this one a --state-dir of its own"
    )]
    InUse(PathBuf),
    /// It belongs to another user.
    #[error("cannot {action} {path}: {REMEDY_OF_DENIAL}")]
    Denied {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
    },
    /// The system refused.
    #[error("cannot {action} {path}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        #[source]
        error: io::Error,
    },
    /// A record that JSON cannot express. There is none.
    #[error("cannot serialise the record of task {task}")]
    Serialise {
        /// Which.
        task: TaskId,
        /// What serde said.
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

/// The records in a folder, held by a lock for as long as this lives.
#[derive(Debug)]
pub(crate) struct Ledger {
    tasks: PathBuf,
    /// The lock goes with the file, also when the process dies.
    _lock: File,
}

impl Ledger {
    /// Takes the state directory, which is made if it is missing.
    pub(crate) fn open(state_dir: &Path) -> Result<Self, LedgerError> {
        let tasks = state_dir.join(TASKS);
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&tasks)
            .map_err(io_error("create the directory", &tasks))?;
        let path = state_dir.join(LOCK);
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(&path)
            .map_err(io_error("open the lock", &path))?;
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
                warn!(file = %aside.display(), reason = why, "task record set aside: that task is lost to this agent, the cloud will assign it again or let it time out");
            }
            Err(error) => {
                warn!(file = %path.display(), reason = why, %error, "task record is unusable and cannot be set aside");
            }
        }
    }
}

impl Store for Ledger {
    fn load(&mut self) -> Result<Vec<TaskRecord>, LedgerError> {
        let mut records = Vec::new();
        for entry in fs::read_dir(&self.tasks).map_err(io_error("list", &self.tasks))? {
            let path = entry.map_err(io_error("list", &self.tasks))?.path();
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("json") => match read(&path) {
                    Ok(record) => records.push(record),
                    Err(why) => Self::set_aside(&path, &why),
                },
                // Cut short by a crash; what it was to replace is still there.
                Some("new") => {
                    if let Err(error) = fs::remove_file(&path) {
                        warn!(file = %path.display(), %error, "cannot remove a half-written task record");
                    }
                }
                _ => {}
            }
        }
        // read_dir has no order.
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
            // On a full disk the torso would only take room.
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

/// The record of a file, or what is wrong with it.
fn read(path: &Path) -> Result<TaskRecord, String> {
    let mut text = Vec::new();
    let file = File::open(path).map_err(|error| error.to_string())?;
    file.take(MAX_RECORD + 1).read_to_end(&mut text).map_err(|error| error.to_string())?;
    if text.len() as u64 > MAX_RECORD {
        return Err(format!("longer than {MAX_RECORD} bytes"));
    }
    let record: TaskRecord = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
    if record.format > RECORD_FORMAT {
        return Err(format!("format {} of a newer agent; this one knows {RECORD_FORMAT}", record.format));
    }
    let images = record.task.images.len();
    let complete = record.result.as_ref().map_or(record.images.len(), |result| result.images.len()) == images;
    if !complete {
        return Err("the results do not match the images".to_owned());
    }
    // A renamed file would be written to its own name from now on, and read a second time after a restart.
    if path.file_name().is_none_or(|name| name != file_name(record.id()).as_str()) {
        return Err(format!("it is the record of task {}, under a wrong name", record.id()));
    }
    Ok(record)
}

/// A UID as Kubernetes makes it is its own name; any other text, which might have a slash in it, is hashed. The
/// two cannot meet: a plain name has no underscore.
fn file_name(task: &TaskId) -> String {
    const LONGEST: usize = 64;
    let job = &task.job.0;
    let plain =
        (1..=LONGEST).contains(&job.len()) && job.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    let name = if plain {
        job.clone()
    } else {
        use std::fmt::Write;
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
pub(crate) mod memory;
#[cfg(test)]
mod tests;
