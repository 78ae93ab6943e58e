//! Where one test lives: a temporary directory, a log directory, and what its parts share.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

use anyhow::{Context, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::keep::keeping;
use crate::{parts, reaper};

/// In every credential of the tests. No log may contain it, in any encoding: e2e/setup/search-secrets.sh looks.
pub const CANARY: &str = "s3cr3t-canary-";

/// A password for a user, with the [`CANARY`] in it.
pub fn password(user: &str) -> String {
    format!("{CANARY}{user}")
}

/// The places of the tests that run in this process, by name.
static PLACES: LazyLock<Mutex<HashMap<String, Weak<Place>>>> = LazyLock::new(Mutex::default);

/// The names of all places that this process has had.
static SEEN: LazyLock<Mutex<HashSet<String>>> = LazyLock::new(Mutex::default);

/// A temporary directory and a log directory. The former goes with the last part that holds it.
#[derive(Debug)]
pub struct Place {
    name: String,
    dir: PathBuf,
    logs: PathBuf,
}

impl Place {
    /// The place of the calling test, by the name of its thread: the same for all that one test starts.
    pub fn here() -> Result<Arc<Self>> {
        Self::named(&current_test())
    }

    /// The place of that name.
    pub fn named(name: &str) -> Result<Arc<Self>> {
        let mut places = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = places.get(name).and_then(Weak::upgrade) {
            return Ok(place);
        }
        raise_file_limit();
        // Short: the path of a unix socket has room for 107 bytes. Below /tmp: what the reaper removes.
        let dir = tempfile::Builder::new().prefix("prepull-").tempdir_in("/tmp")?.keep();
        reaper::watch_directory(&dir)?;
        let logs = parts::logs_root()?.join(name);
        // Those of an earlier run are not of this one.
        if SEEN.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned()) && logs.exists() {
            std::fs::remove_dir_all(&logs).with_context(|| format!("cannot empty {}", logs.display()))?;
        }
        for path in [&logs, &dir.join("certs.d")] {
            std::fs::create_dir_all(path).with_context(|| format!("cannot create {}", path.display()))?;
        }
        let place = Arc::new(Self { name: name.to_owned(), dir, logs });
        places.insert(name.to_owned(), Arc::downgrade(&place));
        Ok(place)
    }

    /// Of the test.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The temporary directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A new directory in the temporary directory; `name` is only a part of its name.
    pub fn new_dir(&self, name: &str) -> Result<PathBuf> {
        Ok(tempfile::Builder::new().prefix(&format!("{name}-")).rand_bytes(3).tempdir_in(&self.dir)?.keep())
    }

    /// How each containerd of this test reaches registries: containerd's `config_path`, one directory with a
    /// `hosts.toml` for each registry.
    pub fn registry_hosts(&self) -> PathBuf {
        self.dir.join("certs.d")
    }

    /// Where logs go. They stay.
    pub fn logs(&self) -> &Path {
        &self.logs
    }

    /// The log of one part.
    pub fn log_file(&self, part: &str) -> PathBuf {
        self.logs.join(format!("{part}.log"))
    }

    /// The last lines of each log, for a message of what went wrong.
    pub fn log_tails(&self, parts: &[&str]) -> String {
        const LINES: usize = 25;
        let mut files: Vec<_> = std::fs::read_dir(&self.logs).into_iter().flatten().flatten().collect();
        files.sort_by_key(std::fs::DirEntry::file_name);
        let mut sections = Vec::new();
        for file in files {
            let name = file.file_name().to_string_lossy().into_owned();
            if parts.iter().any(|part| name.starts_with(part)) {
                let log = std::fs::read(file.path()).unwrap_or_default();
                let log = tail(&String::from_utf8_lossy(&log), LINES);
                sections.push(format!("--- {name}, the end:\n{log}"));
            }
        }
        sections.push(format!("--- all logs: {}", self.logs.display()));
        sections.join("\n")
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if keeping() {
            return;
        }
        unmount_below(&self.dir);
        // What cannot be removed now is the reaper's.
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// A containerd that was killed while it unpacked leaves a mount behind.
fn unmount_below(dir: &Path) {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = table.lines().filter_map(|line| line.split(' ').nth(4)).map(Path::new);
    let below: Vec<_> = points.filter(|point| point.starts_with(dir)).collect();
    for point in below.iter().rev() {
        let _ = std::process::Command::new("umount").arg("--lazy").arg(point).status();
    }
}

/// The last lines of a text.
pub fn tail(text: &str, lines: usize) -> String {
    let all: Vec<_> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// As many open files as the system lets us have, for us and for whatever we start: a fleet and its cloud take
/// one for each edge, and 1024 is the usual limit.
fn raise_file_limit() {
    /// Root may go beyond its hard limit: as far as any fleet on one machine can.
    const PLENTY: u64 = 1 << 18;
    let limit = getrlimit(Resource::Nofile);
    let plenty = limit.maximum.map(|maximum| maximum.max(PLENTY));
    if setrlimit(Resource::Nofile, Rlimit { current: plenty, maximum: plenty }).is_err() {
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    }
}

/// How many files a process of ours may have open.
pub(crate) fn file_limit() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX))
}

/// `<test binary>.<test>`: cargo runs each test on a thread with the test's name, except where it runs only one.
fn current_test() -> String {
    let binary = std::env::current_exe().unwrap_or_default();
    let binary = binary.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    // Without the hash that cargo adds to tests.
    let binary = binary
        .rsplit_once('-')
        .filter(|(_, hash)| hash.len() == 16)
        .map_or(binary.as_str(), |(name, _)| name);
    let thread = std::thread::current();
    let test = match thread.name() {
        Some(name) if name != "main" && !name.starts_with("tokio") => Some(name.to_owned()),
        // One test of a process that runs no other: its name stands on the command line.
        _ => std::env::args().skip(1).find(|argument| !argument.starts_with('-')),
    };
    let name = test.map_or_else(|| binary.to_owned(), |test| format!("{binary}.{test}"));
    name.replace("::", ".").replace('/', "_")
}
