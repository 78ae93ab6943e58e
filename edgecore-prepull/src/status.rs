//! The running agent's own view of its connection and its tasks, for a person at the box.
//!
//! ```text
//!  tunnel, node ─▶ StatusBoard ─▶ AgentStatus ─▶ /status (loopback only) ─▶ edgecore-prepull status
//! ```

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use prepull_api::settings::NodeSettings;
use prepull_api::task::{ByteProgress, ImagePhase, ImageProgress, Task, TaskId};
use serde::{Deserialize, Serialize};

/// A rate without a report for this long isn't one of now.
const STALE: Duration = Duration::from_secs(60);

/// The state of the agent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct AgentStatus {
    pub(crate) version: String,
    /// When it was started, in RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) since: Option<String>,
    /// The time of now by the agent, which follows the cloud's; the other times count from it. Agents of earlier releases go by
    /// this machine's clock, and leave it out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) time: Option<String>,
    pub(crate) cloud: CloudStatus,
    /// The settings that the cloud has set, which are in force within the node's own.
    #[serde(skip_serializing_if = "NodeSettings::is_empty")]
    pub(crate) settings: NodeSettings,
    pub(crate) tasks: Vec<TaskStatus>,
}

/// The session with cloudcore-prepull, or the last attempt at one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct CloudStatus {
    pub(crate) connected: bool,
    pub(crate) address: String,
    /// Since when it's connected, or isn't any more; absent before the first session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) since: Option<String>,
    /// Why the last attempt or session ended.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) reason: String,
    /// When the next attempt follows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) next_try: Option<String>,
}

/// A task of the ledger.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct TaskStatus {
    /// The name of its job.
    pub(crate) title: String,
    pub(crate) state: String,
    pub(crate) images: usize,
    /// Images that have ended, well or badly.
    pub(crate) ended: usize,
    /// Why nothing of it is downloaded at the moment.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) waits: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) downloads: Vec<DownloadStatus>,
}

/// An image that is being pulled.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct DownloadStatus {
    pub(crate) image: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bytes: Option<ByteProgress>,
    pub(crate) bytes_per_second: u64,
    /// Why the last attempt failed.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) reason: String,
}

/// Where the parts of the agent write down what they do.
#[derive(Debug, Default)]
pub(crate) struct StatusBoard(Mutex<Board>);

#[derive(Debug, Default)]
struct Board {
    started: Option<Instant>,
    /// Without its times.
    cloud: CloudStatus,
    /// As [`CloudStatus::since`]. Not as dates: the clock may be set while the agent runs.
    since: Option<Instant>,
    /// As [`CloudStatus::next_try`].
    next_try: Option<Instant>,
    settings: NodeSettings,
    tasks: Vec<(TaskId, TaskStatus)>,
    running: BTreeMap<TaskId, RunningTask>,
}

#[derive(Debug, Default)]
struct RunningTask {
    /// The images as the job names them.
    names: Vec<String>,
    waits: String,
    /// The images that have begun and not ended, by their place.
    pulls: BTreeMap<u32, RunningPull>,
}

#[derive(Debug)]
struct RunningPull {
    progress: ImageProgress,
    heard: Instant,
    rate: u64,
}

impl StatusBoard {
    fn lock(&self) -> MutexGuard<'_, Board> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The agent has started.
    pub(crate) fn mark_started(&self, now: Instant) {
        self.lock().started = Some(now);
    }

    /// A session with this address has begun.
    pub(crate) fn mark_connected(&self, address: String, now: Instant) {
        let mut board = self.lock();
        board.cloud = CloudStatus { connected: true, address, ..CloudStatus::default() };
        (board.since, board.next_try) = (Some(now), None);
    }

    /// A session, or an attempt at one, has ended.
    pub(crate) fn mark_disconnected(&self, address: String, reason: String, wait: Duration, now: Instant) {
        let mut board = self.lock();
        // Not connected since the end of the session, and not since the last attempt.
        if board.cloud.connected {
            board.since = Some(now);
        }
        board.next_try = now.checked_add(wait);
        board.cloud = CloudStatus { connected: false, address, reason, ..CloudStatus::default() };
    }

    /// The cloud's settings are in force.
    pub(crate) fn configure(&self, settings: NodeSettings) {
        self.lock().settings = settings;
    }

    /// The tasks of the ledger.
    pub(crate) fn set_tasks(&self, tasks: Vec<(TaskId, TaskStatus)>) {
        self.lock().tasks = tasks;
    }

    /// An executor works on the task.
    pub(crate) fn begin_task(&self, task: &Task) {
        let names = task.images.iter().map(|image| image.image.clone()).collect();
        self.lock().running.insert(task.id.clone(), RunningTask { names, ..RunningTask::default() });
    }

    /// An executor has ended.
    pub(crate) fn end_task(&self, task: &TaskId) {
        self.lock().running.remove(task);
    }

    /// Images have changed.
    pub(crate) fn note_progress(&self, task: &TaskId, images: &[ImageProgress], waits: &str, now: Instant) {
        let mut board = self.lock();
        let Some(running) = board.running.get_mut(task) else { return };
        waits.clone_into(&mut running.waits);
        for progress in images {
            if matches!(progress.phase, ImagePhase::Done | ImagePhase::Other) {
                running.pulls.remove(&progress.index);
                continue;
            }
            let before = running.pulls.get(&progress.index);
            let rate = before.map_or(0, |before| before.rate_until(progress, now));
            let pull = RunningPull { progress: progress.clone(), heard: now, rate };
            running.pulls.insert(progress.index, pull);
        }
    }

    /// The state at this moment, which is this time of day.
    pub(crate) fn read(&self, now: Instant, wall: SystemTime) -> AgentStatus {
        let board = self.lock();
        let date = |at: Instant| {
            let date = wall + at.saturating_duration_since(now);
            text_of(date.checked_sub(now.saturating_duration_since(at)).unwrap_or(UNIX_EPOCH))
        };
        let tasks = board.tasks.iter().map(|(id, status)| match board.running.get(id) {
            Some(running) => TaskStatus {
                waits: running.waits.clone(),
                downloads: running.downloads(now),
                ..status.clone()
            },
            None => status.clone(),
        });
        AgentStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            since: board.started.map(date),
            time: Some(text_of(wall)),
            cloud: CloudStatus {
                since: board.since.map(date),
                next_try: board.next_try.map(date),
                ..board.cloud.clone()
            },
            settings: board.settings.clone(),
            tasks: tasks.collect(),
        }
    }
}

impl RunningTask {
    fn downloads(&self, now: Instant) -> Vec<DownloadStatus> {
        let download = |(index, pull): (&u32, &RunningPull)| DownloadStatus {
            image: self.names.get(*index as usize).cloned().unwrap_or_default(),
            bytes: pull.progress.bytes,
            bytes_per_second: if now.saturating_duration_since(pull.heard) < STALE { pull.rate } else { 0 },
            reason: pull.progress.reason.clone(),
        };
        self.pulls.iter().map(download).collect()
    }
}

impl RunningPull {
    /// Bytes a second between two reports.
    fn rate_until(&self, next: &ImageProgress, now: Instant) -> u64 {
        let done = |progress: &ImageProgress| progress.bytes.map_or(0, |bytes| bytes.done);
        let millis = now.saturating_duration_since(self.heard).as_millis().max(1);
        let bytes = u128::from(done(next).saturating_sub(done(&self.progress)));
        u64::try_from(bytes * 1000 / millis).unwrap_or(u64::MAX)
    }
}

/// The time in RFC 3339. It has none before 1970, where a clock that isn't set may begin.
fn text_of(time: SystemTime) -> String {
    humantime::format_rfc3339_seconds(time.max(UNIX_EPOCH)).to_string()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use prepull_api::task::{ImageTask, JobUid, PullPolicy};

    use super::*;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn an_outage_lasts_since_its_session_ended() {
        let (board, start) = (StatusBoard::default(), Instant::now());
        let read = |seconds| board.read(start + Duration::from_secs(seconds), at(seconds)).cloud;
        board.mark_connected("a:1".to_owned(), start + Duration::from_secs(10));
        assert_eq!(read(15).since.unwrap(), "1970-01-01T00:00:10Z");
        for attempt in [20, 30] {
            let (wait, attempt) = (Duration::from_secs(5), start + Duration::from_secs(attempt));
            board.mark_disconnected("b:1".to_owned(), "refused".to_owned(), wait, attempt);
        }
        let cloud = read(32);
        assert!(!cloud.connected && cloud.reason == "refused" && cloud.address == "b:1");
        assert_eq!(cloud.since.unwrap(), "1970-01-01T00:00:20Z");
        assert_eq!(cloud.next_try.unwrap(), "1970-01-01T00:00:35Z");
    }

    #[test]
    fn a_clock_that_is_set_ages_nothing() {
        let (board, start) = (StatusBoard::default(), Instant::now());
        board.mark_started(start);
        board.mark_connected("a:1".to_owned(), start + Duration::from_secs(10));
        let read = |wall| board.read(start + Duration::from_secs(60), wall);
        let status = read(at(1_800_000_060));
        assert_eq!(status.time.unwrap(), "2027-01-15T08:01:00Z");
        assert_eq!(status.since.unwrap(), "2027-01-15T08:00:00Z");
        assert_eq!(status.cloud.since.unwrap(), "2027-01-15T08:00:10Z");
        // The machine boots in 1970.
        assert_eq!(read(at(30)).since.unwrap(), "1970-01-01T00:00:00Z");
    }

    #[test]
    fn a_running_task_shows_its_downloads() {
        let (board, began) = (StatusBoard::default(), Instant::now());
        let id = TaskId { job: JobUid("u".to_owned()), attempt: 1 };
        let image = ImageTask {
            image: "web:v1".to_owned(),
            policy: PullPolicy::Always,
            ..ImageTask::new("docker.io/library/web:v1")
        };
        let task = Task { title: "spring".to_owned(), ..Task::new(id.clone(), vec![image]) };
        let status = TaskStatus { title: "spring".to_owned(), images: 1, ..TaskStatus::default() };
        board.set_tasks(vec![(id.clone(), status)]);
        board.begin_task(&task);
        let progress = |phase, done| ImageProgress {
            bytes: Some(ByteProgress { done, total: 9_000 }),
            attempts: 1,
            ..ImageProgress::new(0, phase)
        };
        board.note_progress(&id, &[progress(ImagePhase::Pulling, 1_000)], "", began);
        let later = began + Duration::from_secs(2);
        board.note_progress(&id, &[progress(ImagePhase::Pulling, 5_000)], "waits: its job is paused", later);
        let shown = board.read(later, at(0)).tasks.remove(0);
        assert_eq!(
            (shown.downloads[0].image.as_str(), shown.downloads[0].bytes_per_second),
            ("web:v1", 2_000)
        );
        assert_eq!(shown.waits, "waits: its job is paused");
        assert_eq!(board.read(later + STALE, at(0)).tasks[0].downloads[0].bytes_per_second, 0);
        board.note_progress(&id, &[progress(ImagePhase::Done, 9_000)], "", later);
        assert_eq!(board.read(later, at(0)).tasks[0].downloads, []);
        board.end_task(&id);
        assert!(board.lock().running.is_empty());
    }
}
