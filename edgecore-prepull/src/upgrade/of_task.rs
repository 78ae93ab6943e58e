//! Upgrades that a task asks for. The agent puts the program on trial and ends; the trial is the launcher's matter, and the
//! task goes on in the program that runs afterwards.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use prepull_api::download::{Verification, VerificationMode};
use prepull_api::task::{TaskId, Upgrade};
use prepull_registry::digest::sha256;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::launch::installed_program;
use super::program::{print_version, read_keys};
use super::record::{Program, Record};
use super::{Files, KEY, installed_version};
use crate::config::Listen;

/// The directory in which packages put programs; `install` uses another one.
const PACKAGES: &str = "/usr/bin";

/// The part of the agent that upgrades it.
#[derive(Debug)]
pub(crate) struct Upgrades {
    files: Files,
    key: PathBuf,
    /// Why this agent can't be upgraded at all.
    obstacle: Option<&'static str>,
    restart: CancellationToken,
}

/// The program that a task has put on trial.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct TaskTrial {
    task: String,
    digest: String,
}

/// How far the upgrade of a task has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The task has put no program on trial.
    New,
    /// A program is on trial, whether that of the task or another one.
    OnTrial,
    /// The program of the task has proved itself.
    Proved,
    /// The program before runs again, for this reason.
    WentBack(String),
}

impl Upgrades {
    /// `listen`: where the agent can be asked whether it's connected.
    pub(crate) fn new(state_dir: &Path, listen: Listen, is_container: bool) -> Self {
        let obstacle = if is_container {
            Some("the agent runs in a container: Kubernetes upgrades it, with the image of its DaemonSet")
        } else if listen == Listen::Off {
            Some("metricsListen is off, so that a new program can't be asked whether it's connected")
        } else {
            None
        };
        Self { files: Files::of(state_dir), key: KEY.into(), obstacle, restart: CancellationToken::new() }
    }

    /// Waits until this program is to end, so that another one is tried.
    pub(crate) async fn wait_for_restart(&self) {
        self.restart.cancelled().await;
    }

    /// Checks whether this machine can be upgraded, and returns the signature that the image needs.
    pub(crate) fn prepare(&self, upgrade: Upgrade) -> anyhow::Result<Verification> {
        if let Some(obstacle) = self.obstacle {
            bail!(obstacle);
        }
        if !upgrade.packaged && installed_program()?.starts_with(PACKAGES) {
            bail!(
                "a package has installed the agent: upgrade the package, or set upgrade.packages in the job"
            );
        }
        let keys = read_keys(std::slice::from_ref(&self.key))?;
        Ok(Verification { mode: VerificationMode::Enforce, keys, unavailable: None })
    }

    /// How far the upgrade of this task has come.
    pub(crate) fn stage(&self, task: &TaskId) -> anyhow::Result<Stage> {
        let trial = self.files.read_task()?.filter(|trial| trial.task == task.to_string());
        Ok(stage(&self.files.read()?, trial.as_ref()))
    }

    /// Puts a program on trial. Returns whether the caller should restart this program; otherwise it's the same one.
    pub(crate) async fn begin(
        &self,
        task: &TaskId,
        image: &str,
        program: &[u8],
        upgrade: Upgrade,
    ) -> anyhow::Result<bool> {
        let before = self.files.read()?;
        let runs = match before.proved() {
            Some(proved) => proved.digest == sha256(program),
            None => is_installed(program),
        };
        if runs {
            return Ok(false);
        }
        let (digest, path) = self.files.store(program)?;
        let version = match print_version(&path).await {
            Ok(version) => version,
            Err(error) => {
                // Removes the program.
                self.files.write(&before)?;
                return Err(error.context("its program does not run on this machine"));
            }
        };
        let mut record = before;
        let trial = Program { digest: digest.clone(), version, image: image.to_owned() };
        record.try_program(&installed_version(), trial, upgrade.within.as_secs());
        // The record first: a task without a trial would be taken for one that has gone back.
        self.files.write(&record)?;
        self.files.write_task(&TaskTrial { task: task.to_string(), digest })?;
        Ok(true)
    }

    /// Has this program end.
    pub(crate) fn restart(&self) {
        self.restart.cancel();
    }
}

fn stage(record: &Record, trial: Option<&TaskTrial>) -> Stage {
    let Some(TaskTrial { digest, .. }) = trial else {
        return if record.is_trying() { Stage::OnTrial } else { Stage::New };
    };
    if record.is_trying() {
        return Stage::OnTrial;
    }
    let last = record.last().filter(|last| last.program.digest == *digest);
    match last.map(|last| (&last.went_back, &last.program.version)) {
        Some((Some(reason), version)) => {
            Stage::WentBack(format!("{version} has not proved itself: {reason}"))
        }
        Some((None, _)) => Stage::Proved,
        None if record.proved().is_some_and(|proved| proved.digest == *digest) => Stage::Proved,
        None => Stage::WentBack("another program was installed on the machine in between".to_owned()),
    }
}

fn is_installed(program: &[u8]) -> bool {
    let read = installed_program().and_then(|path| std::fs::read(&path).context("cannot read it"));
    read.is_ok_and(|installed| installed == program)
}

impl Files {
    fn read_task(&self) -> anyhow::Result<Option<TaskTrial>> {
        match std::fs::read(&self.task) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(anyhow!(error).context(format!("cannot read {}", self.task.display()))),
            // What can't be read names no task.
            Ok(text) => Ok(serde_json::from_slice(&text).ok()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(version: &str) -> Program {
        Program {
            digest: format!("sha256:{version}"),
            version: version.to_owned(),
            image: format!("agent:{version}"),
        }
    }

    #[test]
    fn a_task_goes_on_where_its_trial_ended() {
        let of = |digest: &str| TaskTrial { task: "uid/1".to_owned(), digest: format!("sha256:{digest}") };
        let mut record = Record::default();
        assert_eq!(stage(&record, None), Stage::New);
        record.try_program("1", program("2"), 60);
        assert_eq!((stage(&record, None), stage(&record, Some(&of("2")))), (Stage::OnTrial, Stage::OnTrial));
        record.prove();
        assert_eq!((stage(&record, None), stage(&record, Some(&of("2")))), (Stage::New, Stage::Proved));

        record.try_program("1", program("3"), 60);
        record.go_back("it ended".to_owned());
        let back = Stage::WentBack("3 has not proved itself: it ended".to_owned());
        assert_eq!(stage(&record, Some(&of("3"))), back);
        assert_eq!(stage(&record, Some(&of("2"))), Stage::Proved);
        // The record was removed with another installation.
        assert!(matches!(stage(&Record::default(), Some(&of("2"))), Stage::WentBack(_)));
    }
}
