//! The place of a test: its temporary directory, its log directory, and the shared state of its parts.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

use anyhow::{Context, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::keep::keeps_everything;
use crate::{parts, reaper};

/// Text in every credential of the tests. No log may contain it in any encoding: see e2e/setup/search-secrets.sh.
pub const CANARY: &str = "s3cr3t-canary-";

/// Password of a user, which contains the [`CANARY`].
pub fn password(user: &str) -> String {
    format!("{CANARY}{user}")
}

/// Name of the directories with a directory for each registry.
pub(crate) const HOSTS: &str = "certs.d";

/// Places of the tests that run in this process, by name.
static PLACES: LazyLock<Mutex<HashMap<String, Weak<Place>>>> = LazyLock::new(Mutex::default);

/// Names of all places that this process has had.
static SEEN: LazyLock<Mutex<HashSet<String>>> = LazyLock::new(Mutex::default);

/// The directories of a test. The temporary one is removed with the last part that holds the place.
#[derive(Debug)]
pub struct Place {
    dir: PathBuf,
    logs: PathBuf,
}

impl Place {
    /// The place of the calling test, found by the name of its thread, so that all parts of a test share one.
    pub fn here() -> Result<Arc<Self>> {
        Self::with_name(&current_test())
    }

    /// The place with this name.
    pub fn with_name(name: &str) -> Result<Arc<Self>> {
        let mut places = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = places.get(name).and_then(Weak::upgrade) {
            return Ok(place);
        }
        raise_file_limit();
        // Short, since the path of a unix socket has at most 107 bytes. Below /tmp, where the reaper may remove it.
        let dir = tempfile::Builder::new().prefix("prepull-").tempdir_in("/tmp")?.keep();
        reaper::watch_directory(&dir)?;
        let logs = parts::logs_root()?.join(name);
        // Logs of an earlier run are removed.
        if SEEN.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned()) && logs.exists() {
            std::fs::remove_dir_all(&logs).with_context(|| format!("cannot empty {}", logs.display()))?;
        }
        for path in [&logs, &dir.join(HOSTS)] {
            std::fs::create_dir_all(path).with_context(|| format!("cannot create {}", path.display()))?;
        }
        let place = Arc::new(Self { dir, logs });
        places.insert(name.to_owned(), Arc::downgrade(&place));
        Ok(place)
    }

    /// Temporary directory of the test.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Creates a directory in the temporary directory, with `name` as the beginning of its name.
    pub fn new_dir(&self, name: &str) -> Result<PathBuf> {
        Ok(tempfile::Builder::new().prefix(&format!("{name}-")).rand_bytes(3).tempdir_in(&self.dir)?.keep())
    }

    /// Directory of registry hosts for all containerds of this test, with a `hosts.toml` in one directory for each
    /// registry. Each containerd has links to them: see [`Self::share_registry_hosts`].
    pub fn registry_hosts(&self) -> PathBuf {
        self.dir.join(HOSTS)
    }

    /// Gives each containerd of this test a link to each registry host for which it has nothing yet.
    pub fn share_registry_hosts(&self) -> Result<()> {
        let hosts: Vec<_> = std::fs::read_dir(self.registry_hosts())?.flatten().collect();
        for part in std::fs::read_dir(&self.dir)?.flatten() {
            let links = part.path().join(HOSTS);
            for host in hosts.iter().filter(|_| links.is_dir()) {
                match std::os::unix::fs::symlink(host.path(), links.join(host.file_name())) {
                    Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                        return Err(error.into());
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Log directory of the test, which is kept.
    pub fn logs(&self) -> &Path {
        &self.logs
    }

    /// Log file of a part.
    pub fn log_file(&self, part: &str) -> PathBuf {
        self.logs.join(format!("{part}.log"))
    }

    /// The last lines of the logs of these parts, for error messages.
    pub fn log_tails(&self, parts: &[&str]) -> String {
        const LINES: usize = 25;
        let mut files: Vec<_> = std::fs::read_dir(&self.logs).into_iter().flatten().flatten().collect();
        files.sort_by_key(std::fs::DirEntry::file_name);
        let mut sections = Vec::new();
        for file in files {
            let name = file.file_name().to_string_lossy().into_owned();
            if parts.iter().any(|part| name.starts_with(part)) {
                let log = std::fs::read(file.path()).unwrap_or_default();
                let log = last_lines(&String::from_utf8_lossy(&log), LINES);
                sections.push(format!("--- {name}, the end:\n{log}"));
            }
        }
        sections.push(format!("--- all logs: {}", self.logs.display()));
        sections.join("\n")
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if keeps_everything() {
            return;
        }
        unmount_below(&self.dir);
        // The reaper removes what cannot be removed now.
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// Unmounts everything below a directory: a containerd that was killed while it unpacked leaves a mount behind.
pub(crate) fn unmount_below(dir: &Path) {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = table.lines().filter_map(|line| line.split(' ').nth(4)).map(Path::new);
    let below: Vec<_> = points.filter(|point| point.starts_with(dir)).collect();
    for point in below.iter().rev() {
        let _ = std::process::Command::new("umount").arg("--lazy").arg(point).status();
    }
}

/// Returns the last lines of a text.
pub fn last_lines(text: &str, lines: usize) -> String {
    let all: Vec<_> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// Raises the limit of open files for this process and its children as far as possible: a fleet and its cloud need one
/// for each edge, and the usual limit is 1024.
fn raise_file_limit() {
    /// Root may exceed the hard limit; this is enough for any fleet on one machine.
    const PLENTY: u64 = 1 << 18;
    let limit = getrlimit(Resource::Nofile);
    let plenty = limit.maximum.map(|maximum| maximum.max(PLENTY));
    if setrlimit(Resource::Nofile, Rlimit { current: plenty, maximum: plenty }).is_err() {
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    }
}

/// Number of files that this process may have open.
pub(crate) fn file_limit() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX))
}

/// Name of the calling test, `<test binary>.<test>`. The test harness runs each test on a thread with its name, unless
/// it runs only one.
fn current_test() -> String {
    let binary = std::env::current_exe().unwrap_or_default();
    let binary = binary.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    // Cargo adds a hash to the names of test binaries.
    let binary = binary
        .rsplit_once('-')
        .filter(|(_, hash)| hash.len() == 16)
        .map_or(binary.as_str(), |(name, _)| name);
    let thread = std::thread::current();
    let test = match thread.name() {
        Some(name) if name != "main" && !name.starts_with("tokio") => Some(name.to_owned()),
        // The name of an only test is on the command line.
        _ => std::env::args().skip(1).find(|argument| !argument.starts_with('-')),
    };
    let name = test.map_or_else(|| binary.to_owned(), |test| format!("{binary}.{test}"));
    name.replace("::", ".").replace('/', "_")
}
