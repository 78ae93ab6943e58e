//! The pool: API servers that the tests of one run share, one test at a time. A test's leftovers are
//! [deleted](super::sweep) before the next test gets the server.
//!
//! ```text
//! $PREPULL_E2E_POOL/              created by with-parts.sh, and removed by it when the run ends
//!   reaper                        a pipe for the ids of processes to kill when the run ends
//!   0/, 1/, …                     slots, as many as tests have run at the same time
//!     lock                        locked by the test that has the server
//!     changed                     exists after a test that may have changed definitions or rights, until they are restored
//!     idle                        exists while no test has the server: path of the server's directory
//!     server-…/                   kubeconfigs, certificates, data
//! ```
//!
//! A test that's killed leaves no `idle` behind, so no other test uses its server in an unknown state: it runs unused
//! until the end of the run.

use std::fs::{File, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::server::{Server, kubeconfig};
use super::{ACCOUNT, Cluster, Serving, client, restore, sweep};
use crate::cleanup::Child;
use crate::keep::keeps_everything;
use crate::parts;

/// Logs of the server that are linked into the log directory of the test.
const LOGS: [&str; 2] = ["etcd.log", "kube-apiserver.log"];

/// The environment of the servers. They mostly wait, several at a time. With a thread for each of two cores an idle
/// kube-apiserver takes 6 % of a core, with a single thread 2 %. The less frequent garbage collection saves more than a
/// tenth of its CPU time.
const ENVIRONMENT: [(&str, &str); 2] = [("GOMAXPROCS", "1"), ("GOGC", "400")];
/// File of a slot whose last test may have changed definitions or rights.
const CHANGED: &str = "changed";
/// Flag of an etcd that doesn't wait for the disk: its data ends with the run.
const WITHOUT_SYNC: &str = "--unsafe-no-fsync";

/// The turn of one test, which ends when this value is dropped or the process ends.
pub(super) struct Turn {
    slot: PathBuf,
    /// Directory of the server.
    dir: PathBuf,
    logs: PathBuf,
    /// Whether the test may change definitions and rights.
    changes: bool,
    /// Dropped last, after `idle` was written.
    #[expect(dead_code, reason = "held for its lock")]
    lock: File,
}

impl Turn {
    /// Takes an idle server and deletes everything from it, or starts a new one. `changes`: the test may change definitions
    /// and rights, which are restored for the next one.
    pub(super) async fn take(pool: &Path, changes: bool) -> Result<Self> {
        let (number, slot, lock) = free_slot(pool)?;
        let logs = parts::logs_root()?.join(format!("shared-cluster-{number}"));
        std::fs::create_dir_all(&logs)?;
        let dir = match take_idle(&slot, &logs).await? {
            Some(dir) => dir,
            None => start(pool, &slot, &logs).await?,
        };
        Ok(Self { slot, dir, logs, changes, lock })
    }

    /// Kubeconfig for `admin` or `cloudcore`.
    pub(super) fn kubeconfig(&self, name: &str) -> PathBuf {
        kubeconfig(&self.dir, name)
    }

    /// Links the logs of the server into the log directory of a test.
    pub(super) fn link_logs(&self, logs: &Path) -> Result<()> {
        for name in LOGS {
            let link = logs.join(name);
            if !link.exists() {
                symlink(self.logs.join(name), link)?;
            }
        }
        Ok(())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if !keeps_everything() {
            // If this fails, the next test starts another server.
            if self.changes && std::fs::write(self.slot.join(CHANGED), "").is_err() {
                return;
            }
            let _ = std::fs::write(self.slot.join("idle"), self.dir.as_os_str().as_encoded_bytes());
        }
    }
}

/// Finds and locks the first slot that no test has.
fn free_slot(pool: &Path) -> Result<(usize, PathBuf, File)> {
    for number in 0.. {
        let slot = pool.join(number.to_string());
        // Without a pool the run has ended, and our files would never be removed.
        match std::fs::create_dir(&slot) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(error).with_context(|| format!("cannot create {}", slot.display()));
            }
            _ => {}
        }
        let lock = File::options().create(true).append(true).open(slot.join("lock"))?;
        match lock.try_lock() {
            Ok(()) => return Ok((number, slot, lock)),
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error).context("cannot lock a server of the pool"),
        }
    }
    unreachable!("there is always another number")
}

/// Takes the idle server of the slot, if there is one, deletes everything from it, and returns its directory.
async fn take_idle(slot: &Path, logs: &Path) -> Result<Option<PathBuf>> {
    let mark = slot.join("idle");
    let Ok(dir) = std::fs::read_to_string(&mark) else { return Ok(None) };
    // If this process dies from here on, the state of the server is unknown.
    std::fs::remove_file(&mark)?;
    let dir = PathBuf::from(dir);
    let has_changed = std::fs::remove_file(slot.join(CHANGED)).is_ok();
    let client = client(&kubeconfig(&dir, "admin")).await?;
    let cleaned =
        if has_changed { restore::everything(&client).await } else { sweep::everything(&client).await };
    match cleaned {
        Ok(()) => Ok(Some(dir)),
        Err(error) => {
            std::fs::write(logs.join("sweep-failed.log"), format!("{}: {error:#}\n", dir.display()))?;
            Ok(None)
        }
    }
}

/// Starts a server that outlives this process, and returns its directory.
async fn start(pool: &Path, slot: &Path, logs: &Path) -> Result<PathBuf> {
    let dir = tempfile::Builder::new().prefix("server-").tempdir_in(slot)?.keep();
    let spawn = {
        let (pool, logs) = (pool.to_owned(), logs.to_owned());
        Box::new(move |name: &str, mut command: Command| {
            command.envs(ENVIRONMENT);
            if name == "etcd" {
                command.arg(WITHOUT_SYNC);
            }
            Child::spawn_for_the_run(&pool, &logs, name, command)
        })
    };
    let cluster = Cluster::serve(Server::new(dir.clone(), ACCOUNT, spawn).await?).await?;
    cluster.install().await?;
    if let Serving::Own(server) = &*cluster.serving {
        server.lock().unwrap_or_else(std::sync::PoisonError::into_inner).outlive_us();
    }
    Ok(dir)
}
