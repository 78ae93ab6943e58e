//! Messages from the cloud to an edge, a frame on each line. Other lines are events on the node: see [`FuzzedNode::handle_event_line`].
//!
//! With any input, the agent's answers and records stay within their size limits, and it keeps and runs no more tasks
//! than allowed.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU32;
use std::time::{Duration, Instant, UNIX_EPOCH};

use edgecore_prepull::tasks::agent::{
    AgentEffect, AgentEvent, Execution, Now, TaskAgent, TaskEnd, TaskRecord, WallClock,
};
use prepull_api::task::{ImageOutcome, ImageResult, TaskId, TaskOutcome};
use prepull_api::wire::{CloudMessage, MAX_OPEN_TASKS, decode_frame, encode_frame, truncate_reason};

/// The largest record that the agent reads again.
const MAX_RECORD: usize = 4 * 1024 * 1024;

pub(crate) fn run(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let mut node = FuzzedNode::new();
    node.handle_event(AgentEvent::Loaded(Vec::new()));
    node.handle_event(AgentEvent::Connected);
    for line in text.split('\n') {
        match decode_frame::<CloudMessage>(line) {
            Ok(message) => {
                let again = encode_frame(&message).and_then(|frame| decode_frame(&frame));
                assert_eq!(again.ok().as_ref(), Some(&message), "{line}");
                node.receive_message(message);
            }
            Err(_) => node.handle_event_line(line),
        }
    }
    node.finish_pending_work();
}

struct FuzzedNode {
    agent: TaskAgent,
    now: Now,
    disk: BTreeMap<TaskId, TaskRecord>,
    writes: VecDeque<TaskRecord>,
    running: VecDeque<Execution>,
    /// The executor's reason for a failed image. Empty if it was pulled.
    reason: String,
}

const MAX_TASKS: NonZeroU32 = NonZeroU32::new(2).unwrap();

impl FuzzedNode {
    fn new() -> Self {
        let wall = UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let now = Now { monotonic: Instant::now(), wall, boot: None };
        Self {
            agent: TaskAgent::new(MAX_TASKS),
            now,
            disk: BTreeMap::new(),
            writes: VecDeque::new(),
            running: VecDeque::new(),
            reason: String::new(),
        }
    }

    fn receive_message(&mut self, message: CloudMessage) {
        match message {
            CloudMessage::Assign(assign) => self.handle_event(AgentEvent::Assign(assign)),
            CloudMessage::ResultAck { task } => self.handle_event(AgentEvent::ResultAck(task)),
            CloudMessage::Cancel { task, reason } => self.handle_event(AgentEvent::Cancel { task, reason }),
            CloudMessage::Settings(settings) => self.handle_event(AgentEvent::Windows(settings.windows)),
            CloudMessage::Welcome(_)
            | CloudMessage::Unpin { .. }
            | CloudMessage::Sources(_)
            | CloudMessage::Trust(_)
            | CloudMessage::Goaway { .. }
            | CloudMessage::Other => {}
        }
    }

    /// Handles a line that isn't a frame.
    fn handle_event_line(&mut self, line: &str) {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "saved" => self.save_record(),
            "unsaved" => {
                if let Some(record) = self.writes.pop_front() {
                    let (task, reason) = (record.id().clone(), rest.to_owned());
                    self.handle_event(AgentEvent::PersistFailed { task, reason });
                }
            }
            "ends" => {
                self.reason = truncate_reason(rest);
                self.end_oldest_task();
            }
            "crashes" => {
                if let Some(execution) = self.running.pop_front() {
                    let (task, reason) = (execution.task.id, rest.to_owned());
                    self.handle_event(AgentEvent::Crashed { task, reason });
                }
            }
            "disconnects" => self.handle_event(AgentEvent::Disconnected),
            "connects" => self.handle_event(AgentEvent::Connected),
            "restarts" => {
                self.agent = TaskAgent::new(MAX_TASKS);
                self.writes.clear();
                self.running.clear();
                let records = self.disk.values().cloned().collect();
                self.handle_event(AgentEvent::Loaded(records));
                self.handle_event(AgentEvent::Connected);
            }
            "waits" => {
                let wait = Duration::from_millis(rest.parse().unwrap_or(0));
                let after = |now: Now| Some((now.monotonic.checked_add(wait)?, now.wall.checked_add(wait)?));
                if let Some((monotonic, wall)) = after(self.now) {
                    self.now = Now { monotonic, wall, boot: None };
                }
                self.handle_event(AgentEvent::Tick);
            }
            // The clock of the node is set.
            "dates" => {
                self.now.wall = UNIX_EPOCH + Duration::from_secs(u64::from(rest.parse().unwrap_or(0_u32)));
            }
            // A record as another version of the agent may have left it.
            "record" => {
                if let Ok(record) = serde_json::from_str::<TaskRecord>(rest) {
                    let images = record.task.images.len();
                    let ends =
                        record.result.as_ref().map_or(record.images.len(), |result| result.images.len());
                    if ends == images && images > 0 && self.disk.len() < MAX_OPEN_TASKS {
                        self.disk.insert(record.id().clone(), record);
                    }
                }
            }
            _ => {}
        }
    }

    fn handle_event(&mut self, event: AgentEvent) {
        for effect in self.agent.handle(event, self.now) {
            match effect {
                AgentEffect::Persist(record) => {
                    assert!(
                        !self.writes.iter().any(|other| other.id() == record.id()),
                        "two writes at a time"
                    );
                    self.writes.push_back(*record);
                }
                AgentEffect::Forget(task) => {
                    self.writes.retain(|record| *record.id() != task);
                    self.disk.remove(&task);
                }
                AgentEffect::Start(execution) => self.running.push_back(*execution),
                AgentEffect::MayRemove(_) => {}
                AgentEffect::Stop { task, reason } => {
                    assert!(self.running.iter().any(|execution| execution.task.id == task));
                    self.reason = reason;
                }
                AgentEffect::Renew(task, terms) => {
                    let running = self.running.iter_mut().find(|execution| execution.task.id == task);
                    running.expect("a task that runs").terms = terms;
                }
                AgentEffect::Send(message) => {
                    assert!(
                        encode_frame(&message).is_ok(),
                        "a message that the tunnel does not take: {message:?}"
                    );
                }
            }
        }
        assert!(self.running.len() <= MAX_TASKS.get() as usize);
        assert!(self.agent.len() <= MAX_OPEN_TASKS);
        for execution in &self.running {
            assert_eq!(execution.terms.keys.len(), execution.task.images.len(), "a key for each image");
        }
    }

    fn save_record(&mut self) {
        let Some(record) = self.writes.pop_front() else { return };
        let text = serde_json::to_vec(&record).expect("a record");
        assert!(text.len() <= MAX_RECORD, "a record of {} bytes", text.len());
        let read: TaskRecord = serde_json::from_slice(&text).expect("the record");
        assert_eq!(read, record, "a record is read as it was written");
        assert!(record.accepted >= WallClock(0));
        let task = record.id().clone();
        self.disk.insert(task.clone(), record);
        self.handle_event(AgentEvent::Persisted(task));
    }

    /// The executor that runs longest ends its task.
    fn end_oldest_task(&mut self) {
        let Some(execution) = self.running.pop_front() else { return };
        let Execution { task, check, done, removal: _, terms: _ } = execution;
        let outcome = if self.reason.is_empty() { ImageOutcome::Pulled } else { ImageOutcome::Failed };
        let image = ImageResult { reason: self.reason.clone(), attempts: 1, ..ImageResult::new(outcome) };
        let images = done.into_iter().map(|done| done.unwrap_or_else(|| image.clone())).collect();
        let outcome = if self.reason.is_empty() { TaskOutcome::Succeeded } else { TaskOutcome::Failed };
        let end = TaskEnd { removal: None, outcome, reason: self.reason.clone(), check, images };
        self.handle_event(AgentEvent::Ended(task.id, end));
    }

    /// Completes all pending work: each task has a result on disk.
    fn finish_pending_work(&mut self) {
        self.reason.clear();
        while !(self.writes.is_empty() && self.running.is_empty()) {
            self.save_record();
            self.end_oldest_task();
        }
    }
}
