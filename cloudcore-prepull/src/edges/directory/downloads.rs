//! The rates at which edges download now, by the progress of their tasks.

use std::collections::VecDeque;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::edges::EdgeDownload;
use prepull_api::task::{ImagePhase, ImageProgress, TaskId};
use prepull_api::wire::TaskProgress;

/// The time that a rate is of: shorter, and a slow link looks idle between two reports.
const SPAN: SignedDuration = SignedDuration::from_secs(60);
/// Shortest time between two marks, so that a task has at most a dozen.
const STEP: SignedDuration = SignedDuration::from_secs(5);
/// Tasks of an edge that are followed: an honest one rarely works on more.
const MAX_TASKS: usize = 4;
/// Images of a task that are followed: an honest agent pulls fewer at a time.
const MAX_IMAGES: usize = 16;

/// What one edge downloads.
#[derive(Debug, Default)]
pub(super) struct TaskDownloads(Vec<TaskDownload>);

#[derive(Debug)]
struct TaskDownload {
    task: TaskId,
    /// Whether a part of the bytes may be those of neighbours.
    is_shared: bool,
    /// The images that are being pulled, with their bytes as reported last.
    images: Vec<(u32, u64)>,
    /// Bytes since the task is followed.
    total: u64,
    heard: Timestamp,
    /// Moments with the bytes of that time, the oldest first.
    marks: VecDeque<(Timestamp, u64)>,
}

impl TaskDownloads {
    /// Notes the progress of a task.
    pub(super) fn note_progress(&mut self, progress: &TaskProgress, now: Timestamp) {
        let download = self.find_or_add(&progress.task, now);
        progress.images.iter().for_each(|image| download.count(image));
        download.mark(now);
    }

    /// Notes that the site of the node shares the layers of the task.
    pub(super) fn mark_shared(&mut self, task: &TaskId, now: Timestamp) {
        self.find_or_add(task, now).is_shared = true;
    }

    /// Forgets a task that has ended.
    pub(super) fn forget_task(&mut self, task: &TaskId) {
        self.0.retain(|download| download.task != *task);
    }

    /// The tasks that have got bytes within the last minute.
    pub(super) fn rates(&self, now: Timestamp) -> Vec<EdgeDownload> {
        let rates = self.0.iter().map(|download| EdgeDownload {
            job: download.task.job.clone(),
            bytes_per_second: download.rate(now),
            shared: download.is_shared,
            heard: Time(download.heard),
        });
        rates.filter(|rate| rate.bytes_per_second > 0).collect()
    }

    fn find_or_add(&mut self, task: &TaskId, now: Timestamp) -> &mut TaskDownload {
        let known = self.0.iter().position(|download| download.task == *task);
        let at = known.unwrap_or_else(|| self.add(TaskDownload::new(task.clone(), now)));
        &mut self.0[at]
    }

    /// Takes in a task, if there are too many in place of the one that was silent for the longest time: blobs of a task may be
    /// reported after its end.
    fn add(&mut self, new: TaskDownload) -> usize {
        if self.0.len() < MAX_TASKS {
            self.0.push(new);
            return self.0.len() - 1;
        }
        let silent = self.0.iter().enumerate().min_by_key(|(_, download)| download.heard);
        let at = silent.map_or(0, |(at, _)| at);
        self.0[at] = new;
        at
    }
}

impl TaskDownload {
    fn new(task: TaskId, heard: Timestamp) -> Self {
        Self { task, is_shared: false, images: Vec::new(), total: 0, heard, marks: VecDeque::new() }
    }

    /// Counts the bytes since the last report. The first one of an image may have bytes of an earlier attempt.
    fn count(&mut self, image: &ImageProgress) {
        let Some(bytes) = image.bytes else { return };
        let is_pulled = image.phase == ImagePhase::Pulling;
        match self.images.iter().position(|(index, _)| *index == image.index) {
            Some(at) => {
                let before = self.images[at].1;
                self.total = self.total.saturating_add(bytes.done.saturating_sub(before));
                if is_pulled {
                    self.images[at].1 = bytes.done;
                } else {
                    self.images.swap_remove(at);
                }
            }
            None if is_pulled && self.images.len() < MAX_IMAGES => {
                self.images.push((image.index, bytes.done));
            }
            None => {}
        }
    }

    fn mark(&mut self, now: Timestamp) {
        self.heard = now;
        if self.marks.back().is_none_or(|(at, _)| now.duration_since(*at) >= STEP) {
            self.marks.push_back((now, self.total));
        }
        while self.marks.get(1).is_some_and(|(at, _)| now.duration_since(*at) >= SPAN) {
            self.marks.pop_front();
        }
    }

    /// Bytes a second over the last minute, or since the first report if that is less.
    fn rate(&self, now: Timestamp) -> u64 {
        let age = |at: Timestamp| now.duration_since(at);
        let before = self.marks.iter().rev().find(|(at, _)| age(*at) >= SPAN);
        let Some((at, total)) = before.or(self.marks.front()) else { return 0 };
        if age(self.heard) >= SPAN {
            return 0;
        }
        let seconds = u64::try_from(age(*at).min(SPAN).as_secs()).unwrap_or(0);
        self.total.saturating_sub(*total) / seconds.max(1)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use prepull_api::task::{ByteProgress, JobUid};

    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn task(number: u32) -> TaskId {
        TaskId { job: JobUid("u".to_owned()), attempt: number }
    }

    fn progress(number: u32, index: u32, phase: ImagePhase, done: u64) -> TaskProgress {
        let bytes = Some(ByteProgress { done, total: 1 << 40 });
        let image = ImageProgress { bytes, attempts: 1, ..ImageProgress::new(index, phase) };
        TaskProgress { task: task(number), images: vec![image], waits: String::new() }
    }

    fn rate(downloads: &TaskDownloads, second: i64) -> u64 {
        downloads.rates(at(second)).iter().map(|rate| rate.bytes_per_second).sum()
    }

    #[test]
    fn the_rate_is_that_of_the_last_minute() {
        let mut downloads = TaskDownloads::default();
        // It goes on with what an earlier attempt has left.
        downloads.note_progress(&progress(1, 0, ImagePhase::Pulling, 1_000_000), at(0));
        assert_eq!(rate(&downloads, 0), 0);
        for second in 1..=300 {
            let done = 1_000_000 + u64::try_from(second).unwrap() * 100;
            downloads.note_progress(&progress(1, 0, ImagePhase::Pulling, done), at(second));
        }
        assert_eq!(rate(&downloads, 300), 100);
        let found = downloads.rates(at(310));
        assert_eq!((found[0].heard.0, found[0].shared), (at(300), false));
        assert!(found[0].bytes_per_second < 100, "nothing came for ten seconds");
        assert_eq!(rate(&downloads, 360), 0);
        assert!(downloads.0[0].marks.len() <= 14, "{}", downloads.0[0].marks.len());
    }

    #[test]
    fn ended_images_and_tasks_are_forgotten() {
        let mut downloads = TaskDownloads::default();
        downloads.note_progress(&progress(1, 0, ImagePhase::Pulling, 0), at(0));
        downloads.note_progress(&progress(1, 0, ImagePhase::Done, 500), at(10));
        downloads.note_progress(&progress(1, 0, ImagePhase::Done, 500), at(10));
        assert_eq!((rate(&downloads, 10), downloads.0[0].images.len()), (50, 0));
        downloads.mark_shared(&task(1), at(10));
        assert!(downloads.rates(at(10))[0].shared);
        downloads.forget_task(&task(1));
        assert_eq!(downloads.rates(at(10)), []);
    }

    #[test]
    fn late_blobs_of_ended_tasks_hide_no_other() {
        let mut downloads = TaskDownloads::default();
        for number in 0..9 {
            downloads.note_progress(&progress(number, 0, ImagePhase::Pulling, 0), at(i64::from(number)));
            downloads.forget_task(&task(number));
            downloads.mark_shared(&task(number), at(i64::from(number)));
        }
        for (second, done) in [(20, 0), (30, 1000)] {
            downloads.note_progress(&progress(9, 0, ImagePhase::Pulling, done), at(second));
        }
        assert_eq!(rate(&downloads, 30), 100);
    }

    #[test]
    fn an_edge_takes_bounded_memory() {
        let mut downloads = TaskDownloads::default();
        for (second, number) in (0..1000).zip(0..) {
            downloads.note_progress(&progress(number, number, ImagePhase::Pulling, 0), at(second));
            downloads.note_progress(&progress(0, number, ImagePhase::Pulling, 0), at(second));
        }
        assert_eq!((downloads.0.len(), downloads.0[0].images.len()), (MAX_TASKS, MAX_IMAGES));
    }
}
