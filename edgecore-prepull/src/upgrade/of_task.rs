//! Upgrades that a task asks for. The agent puts the program on trial and ends; the trial is the launcher's matter, and the
//! task goes on in the program that runs afterwards.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use prepull_api::download::Verification;
use prepull_api::task::{TaskId, Upgrade};
use prepull_program::errors::with_causes;
use prepull_registry::digest::sha256;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::launch::{installed_program, installed_version, is_launched, is_watched};
use super::record::{TaskTrial, UpgradeStage};
use super::{IN_CONTAINER, KEY, UNASKED, UpgradeFiles, put_on_trial, signature_by};

/// How often we look whether a trial has ended. It takes seconds to minutes.
const LOOK: Duration = Duration::from_secs(1);
/// The wait before a restart for a trial that the launcher hasn't begun.
const BEGIN_AGAIN: Duration = Duration::from_secs(60);

/// What keeps tasks from upgrading this machine.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Obstacles {
    /// The agent runs in a container.
    pub(crate) is_container: bool,
    /// A package has installed it.
    pub(crate) is_packaged: bool,
    /// It has no address at which it can be asked whether it's connected.
    pub(crate) is_unasked: bool,
}

/// The part of the agent that upgrades it.
#[derive(Debug)]
pub(crate) struct Upgrades {
    files: UpgradeFiles,
    key: PathBuf,
    obstacles: Obstacles,
    /// Whether this program is the one on trial.
    is_watched: bool,
    /// Whether this program runs in place of the installed one.
    is_launched: bool,
    restart: CancellationToken,
}

impl Upgrades {
    pub(crate) fn new(state_dir: &Path, obstacles: Obstacles) -> Self {
        Self {
            files: UpgradeFiles::in_state_dir(state_dir),
            key: KEY.into(),
            obstacles,
            is_watched: is_watched(),
            is_launched: is_launched(),
            restart: CancellationToken::new(),
        }
    }

    #[cfg(test)]
    pub(crate) fn with_key(self, key: PathBuf) -> Self {
        Self { key, ..self }
    }

    /// Waits until this program is to end, so that another one is tried.
    pub(crate) async fn wait_for_restart(&self) {
        self.restart.cancelled().await;
    }

    /// Checks whether this machine can be upgraded, and returns the signature that the image needs.
    pub(crate) fn check_upgradable(&self, upgrade: Upgrade) -> anyhow::Result<Verification> {
        self.obstacles.check(upgrade)?;
        signature_by(std::slice::from_ref(&self.key))
    }

    /// How far the upgrade of this task has come.
    pub(crate) fn stage(&self, task: &TaskId) -> anyhow::Result<UpgradeStage> {
        let trial = self.files.read_task()?.filter(|trial| trial.task == task.to_string());
        Ok(self.files.read_record()?.stage(trial.as_ref()))
    }

    /// Waits until no program is on trial, and returns how far the upgrade of this task has come. The launcher may have failed to
    /// begin the trial, for example on a full disk. After a minute we then request a restart, if the record can be written.
    ///
    /// # Errors
    /// The record can't be read.
    pub(crate) async fn wait_out_trial(&self, task: &TaskId) -> anyhow::Result<UpgradeStage> {
        let mut began = Instant::now();
        loop {
            let stage = self.stage(task)?;
            if stage != UpgradeStage::OnTrial {
                return Ok(stage);
            }
            if !self.is_watched && began.elapsed() >= BEGIN_AGAIN {
                began = Instant::now();
                match self.files.check_writable() {
                    Ok(()) => self.request_restart(),
                    Err(error) => {
                        warn!(error = %with_causes(error.as_ref()), "an upgrade waits, and can't be tried");
                    }
                }
            }
            sleep(LOOK).await;
        }
    }

    /// Puts a program on trial. Returns whether the caller should restart this program; otherwise it's the same one.
    pub(crate) async fn begin_trial(
        &self,
        task: &TaskId,
        image: &str,
        program: &[u8],
        upgrade: Upgrade,
    ) -> anyhow::Result<bool> {
        // If its file was damaged at the boot, the installed program runs, and a full disk may have kept that out of the record.
        let record = self.files.read_record()?;
        let runs = match record.proved_program().filter(|_| self.is_launched) {
            Some(proved) => proved.digest == sha256(program) && self.files.verified_path(proved).is_ok(),
            None => is_installed(program),
        };
        if runs {
            return Ok(false);
        }
        let trial = put_on_trial(&self.files, &installed_version(), image, program, upgrade.within).await?;
        // Afterwards: a task without a trial would be taken for one that has gone back.
        let written = self.files.write_task(&TaskTrial { task: task.to_string(), digest: trial.digest });
        written.map(|()| true).inspect_err(|error| self.take_back(error))
    }

    /// Ends a trial that hasn't begun: its task fails, so no later start may try the program.
    fn take_back(&self, why: &anyhow::Error) {
        let ended = self.files.read_record().and_then(|mut record| {
            record.go_back(with_causes(why.as_ref()));
            self.files.write_record(&record)
        });
        if let Err(error) = ended {
            warn!(error = %with_causes(error.as_ref()), "a trial can't be taken back, and the next start tries it");
        }
    }

    /// Has this program end.
    pub(crate) fn request_restart(&self) {
        self.restart.cancel();
    }
}

impl Obstacles {
    fn check(self, upgrade: Upgrade) -> anyhow::Result<()> {
        if self.is_container {
            bail!(IN_CONTAINER);
        }
        if self.is_packaged && !upgrade.packaged {
            bail!(
                "a package has installed the agent: upgrade the package, or set upgrade.packages in the job"
            );
        }
        if self.is_unasked {
            bail!(UNASKED);
        }
        Ok(())
    }
}

fn is_installed(program: &[u8]) -> bool {
    let read = installed_program().and_then(|path| std::fs::read(&path).context("cannot read it"));
    read.is_ok_and(|installed| installed == program)
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::super::{Program, UpgradeRecord};
    use super::*;

    #[test]
    fn what_keeps_a_machine_from_upgrades_is_named() {
        let none = Obstacles::default();
        let container = Obstacles { is_container: true, ..none };
        let package = Obstacles { is_packaged: true, ..none };
        let unasked = Obstacles { is_unasked: true, ..none };
        for (obstacles, packaged, expected) in [
            (none, false, None),
            (container, true, Some(IN_CONTAINER)),
            (package, false, Some("a package has installed the agent")),
            (package, true, None),
            (unasked, true, Some(UNASKED)),
        ] {
            let upgrade = Upgrade { within: Duration::from_secs(60), packaged };
            let said = obstacles.check(upgrade).err().map(|error| error.to_string());
            let fits = |expected: &str| said.as_ref().is_some_and(|said| said.starts_with(expected));
            assert!(expected.map_or(said.is_none(), fits), "{obstacles:?} {said:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_trial_that_never_began_is_requested_again() -> anyhow::Result<()> {
        let task = TaskId { job: prepull_api::task::JobUid("uid".to_owned()), attempt: 1 };
        let program = Program { digest: sha256(b"a"), version: "2".to_owned(), image: "agent:2".to_owned() };
        let mut record = UpgradeRecord::default();
        record.try_program("1", program, 60);
        for (is_watched, is_full, expected) in
            [(false, false, true), (false, true, false), (true, false, false)]
        {
            let dir = tempfile::tempdir()?;
            let upgrades = Upgrades { is_watched, ..Upgrades::new(dir.path(), Obstacles::default()) };
            upgrades.files.write_record(&record)?;
            if is_full {
                // The probe is written to this file first. A full disk refuses the write as well.
                std::fs::create_dir(dir.path().join("upgrade/probe.tmp"))?;
            }
            for (wait, expected) in [(BEGIN_AGAIN / 2, false), (BEGIN_AGAIN * 2, expected)] {
                let waiting = async {
                    tokio::select! {
                        _ = upgrades.wait_out_trial(&task) => false,
                        () = upgrades.wait_for_restart() => true,
                    }
                };
                let is_requested = timeout(wait, waiting).await.unwrap_or(false);
                assert_eq!(is_requested, expected, "watched {is_watched}, full {is_full}, {wait:?}");
            }
        }
        Ok(())
    }

    #[tokio::test]
    async fn without_a_key_or_a_program_nothing_is_tried() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let upgrades = Upgrades {
            key: dir.path().join("upgrade.pub"),
            ..Upgrades::new(dir.path(), Obstacles::default())
        };
        let upgrade = Upgrade { within: Duration::from_secs(60), packaged: false };
        let refused =
            upgrades.check_upgradable(upgrade).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(refused.contains("upgrade.pub: put the public key there"), "{refused}");

        let task = TaskId { job: prepull_api::task::JobUid("uid".to_owned()), attempt: 1 };
        let error = upgrades.begin_trial(&task, "agent:2", b"no program", upgrade).await.err();
        let error = error.map(|error| error.to_string()).unwrap_or_default();
        assert_eq!(error, "the program of agent:2 does not run on this machine");
        assert_eq!(upgrades.stage(&task)?, UpgradeStage::New);
        assert_eq!(std::fs::read_dir(dir.path().join("upgrade/programs"))?.count(), 0);

        let own = std::fs::read(installed_program()?)?;
        assert!(!upgrades.begin_trial(&task, "agent:1", &own, upgrade).await?, "it runs already");
        Ok(())
    }

    #[tokio::test]
    async fn a_proved_program_that_doesnt_run_is_tried() -> anyhow::Result<()> {
        let task = TaskId { job: prepull_api::task::JobUid("uid".to_owned()), attempt: 1 };
        let upgrade = Upgrade { within: Duration::from_secs(60), packaged: false };
        let content = b"#!/bin/sh\necho edgecore-prepull 9.0.0\n";
        let program =
            Program { digest: sha256(content), version: "9.0.0".to_owned(), image: "agent:9".to_owned() };
        let mut record = UpgradeRecord::default();
        record.try_program(&installed_version(), program, 60);
        record.prove();
        for (is_launched, has_file, expected) in
            [(true, true, false), (true, false, true), (false, true, true), (false, false, true)]
        {
            let dir = tempfile::tempdir()?;
            let upgrades = Upgrades { is_launched, ..Upgrades::new(dir.path(), Obstacles::default()) };
            if has_file {
                upgrades.files.store_program(content)?;
            }
            upgrades.files.write_record(&record)?;
            let begun = upgrades.begin_trial(&task, "agent:9", content, upgrade).await?;
            assert_eq!(begun, expected, "launched {is_launched}, file {has_file}");
        }
        Ok(())
    }

    #[tokio::test]
    async fn a_trial_without_its_task_is_taken_back() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let upgrades = Upgrades::new(dir.path(), Obstacles::default());
        // The task is written to this file first. A full disk refuses the write as well.
        std::fs::create_dir_all(dir.path().join("upgrade/task.tmp"))?;
        let task = TaskId { job: prepull_api::task::JobUid("uid".to_owned()), attempt: 1 };
        let upgrade = Upgrade { within: Duration::from_secs(60), packaged: false };
        let program = b"#!/bin/sh\necho edgecore-prepull 9.0.0\n";
        let error = upgrades.begin_trial(&task, "agent:9", program, upgrade).await.err();
        let error = error.map(|error| error.to_string()).unwrap_or_default();
        assert!(error.starts_with("cannot write") && error.ends_with("task.json"), "{error}");
        assert!(!upgrades.files.read_record()?.is_trying());
        Ok(())
    }
}
