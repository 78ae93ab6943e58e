//! The programs and their record in the state directory.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use prepull_registry::digest::sha256;

use super::record::{Program, TaskTrial, UpgradeRecord};
use crate::cloud::identity::replace_file;

/// Largest program that we keep, in bytes. The agent has about 12 MiB.
pub(crate) const MOST_BYTES: u64 = 128 << 20;

/// The directory `upgrade` of the state directory.
#[derive(Debug)]
pub(crate) struct UpgradeFiles {
    record: PathBuf,
    /// The task that has put a program on trial last.
    task: PathBuf,
    programs: PathBuf,
}

impl UpgradeFiles {
    pub(crate) fn in_state_dir(state_dir: &Path) -> Self {
        let dir = state_dir.join("upgrade");
        Self { record: dir.join("record.json"), task: dir.join("task.json"), programs: dir.join("programs") }
    }

    /// The record; without one, and with a damaged one, the installed program runs.
    pub(crate) fn read_record(&self) -> anyhow::Result<UpgradeRecord> {
        let Some(text) = read_if_present(&self.record)? else { return Ok(UpgradeRecord::default()) };
        // The next write replaces it. Without one, no upgrade could ever mend a box that can't be reached.
        Ok(serde_json::from_slice(&text).unwrap_or_else(|error| {
            tracing::error!(file = %self.record.display(), %error, "the record of upgrades is damaged: the installed program runs");
            UpgradeRecord::default()
        }))
    }

    /// Writes the record, so that it survives a power cut, and removes the programs that it doesn't name.
    pub(crate) fn write_record(&self, record: &UpgradeRecord) -> anyhow::Result<()> {
        self.make_dirs()?;
        let text = serde_json::to_vec_pretty(record)?;
        replace_file(&self.record, &text, 0o600)
            .with_context(|| format!("cannot write {}", self.record.display()))?;
        self.remove_unnamed(record);
        Ok(())
    }

    /// Removes the programs that this record doesn't name, and what a power cut has left of one.
    pub(super) fn remove_unnamed(&self, record: &UpgradeRecord) {
        let kept: Vec<_> = record.digests().map(|digest| self.path(digest)).collect();
        for entry in fs::read_dir(&self.programs).into_iter().flatten().flatten() {
            if !kept.contains(&entry.path()) {
                // The next call tries again.
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// Checks that a record as long as the current one could be written now. A file of its own: another process may be
    /// writing the record.
    pub(super) fn check_writable(&self) -> anyhow::Result<()> {
        let probe = self.record.with_file_name("probe");
        let written = fs::read(&self.record).and_then(|text| replace_file(&probe, &text, 0o600));
        // It's replaced by the next one.
        let _ = fs::remove_file(&probe);
        written.with_context(|| format!("cannot write {}", probe.display()))
    }

    /// The task that has put a program on trial last. A file that is damaged names none.
    pub(super) fn read_task(&self) -> anyhow::Result<Option<TaskTrial>> {
        Ok(read_if_present(&self.task)?.and_then(|text| serde_json::from_slice(&text).ok()))
    }

    /// Writes the task of a trial, so that it survives a power cut.
    pub(super) fn write_task(&self, trial: &TaskTrial) -> anyhow::Result<()> {
        let text = serde_json::to_vec(trial)?;
        replace_file(&self.task, &text, 0o600)
            .with_context(|| format!("cannot write {}", self.task.display()))
    }

    /// Stores a program, so that it survives a power cut. Returns its digest and its path.
    pub(crate) fn store_program(&self, program: &[u8]) -> anyhow::Result<(String, PathBuf)> {
        self.make_dirs()?;
        let digest = sha256(program);
        let path = self.path(&digest);
        replace_file(&path, program, 0o700).with_context(|| format!("cannot write {}", path.display()))?;
        Ok((digest, path))
    }

    /// The path of a program that is what it was when it was stored.
    pub(crate) fn verified_path(&self, program: &Program) -> anyhow::Result<PathBuf> {
        let path = self.path(&program.digest);
        let content = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        if sha256(&content) != program.digest {
            bail!("{} is damaged", path.display());
        }
        Ok(path)
    }

    fn path(&self, digest: &str) -> PathBuf {
        self.programs.join(digest.trim_start_matches("sha256:"))
    }

    fn make_dirs(&self) -> anyhow::Result<()> {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.programs)
            .with_context(|| format!("cannot create {}", self.programs.display()))
    }
}

/// The content of a file. `None` if it isn't there.
fn read_if_present(path: &Path) -> anyhow::Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        content => content.map(Some).with_context(|| format!("cannot read {}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn only_named_and_undamaged_programs_stay() {
        let dir = tempfile::tempdir().unwrap();
        let files = UpgradeFiles::in_state_dir(dir.path());
        assert_eq!(files.read_record().unwrap(), UpgradeRecord::default());
        fs::create_dir_all(dir.path().join("upgrade")).unwrap();
        fs::write(&files.record, "{\"base\": ").unwrap();
        assert_eq!(files.read_record().unwrap(), UpgradeRecord::default());
        let (digest, path) = files.store_program(b"a program").unwrap();
        let (_, other) = files.store_program(b"another").unwrap();
        let program = Program { digest, version: "2".to_owned(), image: "agent:2".to_owned() };
        let mut record = UpgradeRecord::default();
        record.try_program("1", program.clone(), 60);
        files.write_record(&record).unwrap();
        assert_eq!(files.read_record().unwrap(), record);
        assert!(path.exists() && !other.exists());
        assert_eq!(files.verified_path(&program).unwrap(), path);
        fs::write(&path, "a progr").unwrap();
        assert!(files.verified_path(&program).unwrap_err().to_string().ends_with("is damaged"));
    }
}
