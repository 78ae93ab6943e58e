//! An edge as the tunnel sees it: a ledger, and tasks that take time. The agent itself has a model of its own.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use prepull_api::task::{ImageOutcome, ImageResult, TaskId, TaskOutcome, TaskResult};
use prepull_api::wire::{CloudMessage, EdgeMessage, OpenPhase, OpenTask};

/// How far a task in the ledger is.
pub(crate) enum TaskState {
    Running,
    NeedsKeys,
    Finished(TaskResult),
}

#[derive(Default)]
pub(crate) struct Edge {
    pub(crate) ledger: BTreeMap<TaskId, TaskState>,
    pub(crate) session: Option<u64>,
    /// Messages to the edge that are in flight, in this session.
    pub(crate) downward: VecDeque<CloudMessage>,
    pub(crate) upward: VecDeque<EdgeMessage>,
}

impl Edge {
    pub(crate) fn open(&self) -> Vec<OpenTask> {
        let phase = |state: &TaskState| match state {
            TaskState::Running => OpenPhase::Running,
            TaskState::NeedsKeys => OpenPhase::NeedsKeys,
            TaskState::Finished(_) => OpenPhase::Finished,
        };
        self.ledger
            .iter()
            .map(|(task, state)| OpenTask { task: task.clone(), phase: phase(state), limited: false })
            .collect()
    }

    pub(crate) fn cut(&mut self) {
        self.session = None;
        self.downward.clear();
        self.upward.clear();
    }

    pub(crate) fn connect(&mut self, session: u64) {
        self.cut();
        self.session = Some(session);
        let results: Vec<_> = self
            .ledger
            .values()
            .filter_map(|state| match state {
                TaskState::Finished(result) => Some(EdgeMessage::Result(result.clone())),
                _ => None,
            })
            .collect();
        self.upward.extend(results);
    }

    pub(crate) fn restart(&mut self) {
        self.cut();
        for state in self.ledger.values_mut() {
            if matches!(state, TaskState::Running) {
                *state = TaskState::NeedsKeys;
            }
        }
    }

    pub(crate) fn running(&self) -> Vec<TaskId> {
        let running = self.ledger.iter().filter(|(_, state)| matches!(state, TaskState::Running));
        running.map(|(task, _)| task.clone()).collect()
    }

    pub(crate) fn end(&mut self, task: &TaskId, outcome: ImageOutcome) {
        let result = TaskResult {
            removal: None,
            task: task.clone(),
            outcome: match outcome {
                ImageOutcome::Pulled | ImageOutcome::Present => TaskOutcome::Succeeded,
                ImageOutcome::Failed | ImageOutcome::Other => TaskOutcome::Failed,
                ImageOutcome::Stopped => TaskOutcome::Cancelled,
            },
            reason: String::new(),
            check: None,
            images: vec![ImageResult {
                reason: "ended by the test".to_owned(),
                attempts: 1,
                ..ImageResult::new(outcome)
            }],
            took: Duration::from_secs(1),
        };
        self.ledger.insert(task.clone(), TaskState::Finished(result.clone()));
        self.send(EdgeMessage::Result(result));
    }

    fn send(&mut self, message: EdgeMessage) {
        if self.session.is_some() {
            self.upward.push_back(message);
        }
    }

    pub(crate) fn receive(&mut self, message: CloudMessage) {
        match message {
            CloudMessage::Assign(assign) => {
                let id = assign.task.id;
                match self.ledger.get(&id) {
                    Some(TaskState::Finished(result)) => self.send(EdgeMessage::Result(result.clone())),
                    Some(_) => {
                        self.ledger.insert(id.clone(), TaskState::Running);
                        self.send(EdgeMessage::Accepted { task: id });
                    }
                    None => {
                        let earlier: Vec<_> =
                            self.ledger.keys().filter(|known| known.job == id.job).cloned().collect();
                        if earlier.iter().any(|known| known.attempt > id.attempt) {
                            // The agent refuses a task if it has a later attempt of it.
                            self.ledger.remove(&id);
                            let mut aside = Self { session: self.session, ..Self::default() };
                            aside.end(&id, ImageOutcome::Stopped);
                            self.upward.append(&mut aside.upward);
                            return;
                        }
                        for task in earlier {
                            if !matches!(self.ledger.get(&task), Some(TaskState::Finished(_))) {
                                self.end(&task, ImageOutcome::Stopped);
                            }
                        }
                        self.ledger.insert(id.clone(), TaskState::Running);
                        self.send(EdgeMessage::Accepted { task: id });
                    }
                }
            }
            CloudMessage::Cancel { task, .. } => match self.ledger.get(&task) {
                Some(TaskState::Finished(result)) => self.send(EdgeMessage::Result(result.clone())),
                Some(_) => self.end(&task, ImageOutcome::Stopped),
                None => {}
            },
            CloudMessage::ResultAck { task } => {
                if matches!(self.ledger.get(&task), Some(TaskState::Finished(_))) {
                    self.ledger.remove(&task);
                }
            }
            CloudMessage::Welcome(_)
            | CloudMessage::Settings(_)
            | CloudMessage::Unpin { .. }
            | CloudMessage::Sources(_)
            | CloudMessage::Trust(_)
            | CloudMessage::Goaway { .. }
            | CloudMessage::Other => {}
        }
    }
}
