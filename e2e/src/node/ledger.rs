//! The ledger of an agent, read from its state directory.

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::EdgeNode;
use crate::cleanup::{SOON, eventually};

/// A task in the ledger of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LedgerTask {
    /// UID of the job.
    pub job: String,
    /// Whether the task has a result.
    pub ended: bool,
    /// Number of images that have ended. 0 once the task has a result.
    pub images_ended: usize,
}

impl EdgeNode {
    /// Reads the tasks in the ledger, which are files under `tasks` in the state directory.
    pub fn read_ledger(&self) -> Result<Vec<LedgerTask>> {
        let dir = self.state_dir().join("tasks");
        let mut tasks = Vec::new();
        for entry in std::fs::read_dir(&dir).into_iter().flatten() {
            let path = entry?.path();
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("json") => {}
                Some("corrupt") => bail!("{} has a broken record: {}", self.name(), path.display()),
                _ => continue,
            }
            // The agent may have removed the file in between.
            let Ok(text) = std::fs::read(&path) else { continue };
            let record: Value = serde_json::from_slice(&text).with_context(|| path.display().to_string())?;
            let job = record["task"]["id"]["job"].as_str().context("a record without a job")?;
            let images = record["images"].as_array().map(Vec::as_slice).unwrap_or_default();
            tasks.push(LedgerTask {
                job: job.to_owned(),
                ended: record["result"].is_object(),
                images_ended: images.iter().filter(|image| image.is_object()).count(),
            });
        }
        Ok(tasks)
    }

    /// Waits until the ledger is empty: the cloud has acknowledged all results.
    pub async fn forgets_all_tasks(&self) -> Result<()> {
        self.ledger_gets("empty", <[LedgerTask]>::is_empty).await
    }

    /// Waits until there is a task in the ledger.
    pub async fn accepts_a_task(&self) -> Result<()> {
        self.ledger_gets("a task", |tasks| !tasks.is_empty()).await
    }

    /// Waits until there is the result of a task in the ledger.
    pub async fn ends_a_task(&self) -> Result<()> {
        self.ledger_gets("a result", |tasks| tasks.iter().any(|task| task.ended)).await
    }

    /// Waits until the ledger satisfies a condition; `what` names it in errors.
    pub async fn ledger_gets(&self, what: &str, is_met: impl Fn(&[LedgerTask]) -> bool) -> Result<()> {
        eventually(&format!("the ledger of {} gets {what}", self.name()), SOON, async || {
            let tasks = self.read_ledger()?;
            ensure!(is_met(&tasks), "it has {tasks:?}");
            Ok(())
        })
        .await
    }
}
