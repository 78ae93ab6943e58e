//! What an agent has on its disk, seen from outside.

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::EdgeNode;
use crate::cleanup::eventually;
use crate::site::SOON;

/// A task that the agent has not forgotten.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LedgerTask {
    /// The UID of the job.
    pub job: String,
    /// Whether its result is there.
    pub ended: bool,
    /// Images that ended, whichever way, as long as the task has not.
    pub images_ended: usize,
}

impl EdgeNode {
    /// The tasks in the ledger: the files under `tasks` in the state directory.
    pub fn ledger(&self) -> Result<Vec<LedgerTask>> {
        let dir = self.state_dir().join("tasks");
        let mut tasks = Vec::new();
        for entry in std::fs::read_dir(&dir).into_iter().flatten() {
            let path = entry?.path();
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("json") => {}
                Some("corrupt") => bail!("{} has a broken record: {}", self.name(), path.display()),
                _ => continue,
            }
            // Forgotten between the two calls.
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

    /// Waits until the agent has forgotten every task: the cloud has acknowledged all there was.
    pub async fn forgets(&self) -> Result<()> {
        self.ledger_gets("empty", <[LedgerTask]>::is_empty).await
    }

    /// Waits until a task is in the ledger.
    pub async fn accepts(&self) -> Result<()> {
        self.ledger_gets("a task", |tasks| !tasks.is_empty()).await
    }

    /// Waits until the result of a task is in the ledger.
    pub async fn ends(&self) -> Result<()> {
        self.ledger_gets("a result", |tasks| tasks.iter().any(|task| task.ended)).await
    }

    /// Waits until the ledger is so.
    pub async fn ledger_gets(&self, what: &str, so: impl Fn(&[LedgerTask]) -> bool) -> Result<()> {
        eventually(&format!("the ledger of {} gets {what}", self.name()), SOON, async || {
            let tasks = self.ledger()?;
            ensure!(so(&tasks), "it has {tasks:?}");
            Ok(())
        })
        .await
    }
}
