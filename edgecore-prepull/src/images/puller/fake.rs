//! Fake [`Puller`] that follows a script.
#![allow(clippy::unwrap_used)]

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use prepull_api::failure::FailureCode;
use prepull_api::task::{ByteProgress, ImageFacts, JobUid, PulledBy, SandboxMetadata};
use prepull_api::wire::Filesystem;
use tokio::time::sleep;

use super::{
    DiskWatch, ErrorClass, HeldImage, JobsToUnpin, Present, ProgressSink, PullError, PullRequest, Pulled,
    Puller, Removed,
};
use crate::images::flushes::{Flushes, ImageDirectories};

/// Course of one fake pull.
#[derive(Clone, Debug)]
pub(crate) enum Act {
    /// Succeeds after this many seconds, and reports bytes after each half of them.
    Take(u64),
    /// Has all bytes after the first number of seconds, and succeeds after the second one.
    Unpack(u64, u64),
    /// Fails with this class and message.
    Fail(ErrorClass, &'static str),
    /// Fails with this class, while another endpoint is silent.
    Undecided(ErrorClass),
    /// Fails because the registry asks for a wait of this many seconds.
    Busy(u64),
    /// Succeeds with this password, and answers 401 otherwise.
    Password(&'static str),
    /// Panics, as a bug would.
    Panic,
}

/// A puller with a script for each reference. A pull without a script takes a second.
#[derive(Debug, Default)]
pub(crate) struct Fake {
    pub(crate) script: Mutex<HashMap<String, VecDeque<Act>>>,
    /// What its disk has refused to others.
    pub(crate) flushes: Flushes,
    pub(crate) state: Mutex<FakePullerState>,
}

#[derive(Debug, Default)]
pub(crate) struct FakePullerState {
    pub(crate) present: Vec<String>,
    /// The id of all images, instead of the usual one.
    pub(crate) id: Option<String>,
    pub(crate) pulls: Vec<String>,
    pub(crate) sandboxes: Vec<Option<SandboxMetadata>>,
    pub(crate) passwords: Vec<Option<String>>,
    /// Whether each pull may share with the site.
    pub(crate) shared: Vec<bool>,
    pub(crate) running: usize,
    /// Largest number of concurrent pulls.
    pub(crate) most: usize,
    pub(crate) dropped: Vec<String>,
    pub(crate) given_up: Vec<String>,
    /// The arguments of each release: the wanted references, and whether to release all others.
    pub(crate) released: Vec<(Vec<String>, Duration)>,
    /// Whether unfinished pulls have left content.
    pub(crate) leftovers: bool,
    /// Errors for the next requests about the file system.
    pub(crate) filesystem_errors: Vec<ErrorClass>,
    /// Number of flushes.
    pub(crate) flushed: usize,
    /// Number of pulls that no flush covers.
    pub(crate) unflushed: usize,
    /// Whether a pull also flushes.
    pub(crate) pulls_to_disk: bool,
    /// Errors for the next flushes.
    pub(crate) flush_errors: Vec<PullError>,
    /// Duration of a flush.
    pub(crate) flush_takes: Duration,
    /// Number of version requests that still find the runtime down.
    pub(crate) outages: usize,
    /// Free percentage of the file system.
    pub(crate) free: u64,
    /// Percentage of the file system with removable images.
    pub(crate) removable: u64,
    /// Images that can be removed.
    pub(crate) held: Vec<HeldImage>,
    /// Errors for the next removals that the caller agrees to.
    pub(crate) removal_errors: Vec<PullError>,
    /// Time from the end of an image to the answer.
    pub(crate) removal_answer: Duration,
    /// Pinned references, each with the job that wants it.
    pub(crate) pins: Vec<(String, JobUid)>,
    /// Warning for each pulled image.
    pub(crate) warning: Option<String>,
    /// Errors for the next pins.
    pub(crate) pin_errors: Vec<PullError>,
    /// The file of images, by their ids.
    pub(crate) files: HashMap<String, Vec<u8>>,
    /// Whether the runtime reports pinned images.
    pub(crate) confirms_pins: bool,
}

impl FakePullerState {
    fn image_id(&self) -> String {
        self.id.clone().unwrap_or_else(|| "sha256:i".to_owned())
    }
}

impl Fake {
    pub(crate) fn new() -> Arc<Self> {
        let fake = Self::default();
        fake.state.lock().unwrap().free = 50;
        Arc::new(fake)
    }

    pub(crate) fn script(&self, reference: &str, acts: impl IntoIterator<Item = Act>) {
        self.script.lock().unwrap().insert(reference.to_owned(), acts.into_iter().collect());
    }

    /// The disk refuses a flush that something else has asked for.
    pub(crate) fn refuse_another(&self) {
        self.flushes.refuse(&image_directories());
    }

    pub(crate) fn pulls(&self) -> Vec<String> {
        self.state.lock().unwrap().pulls.clone()
    }
}

fn image_directories() -> ImageDirectories {
    ImageDirectories { unpacked: "/images".into(), root: "/images".into() }
}

/// Records a pull that is dropped before its end.
struct RunningPull<'a> {
    fake: &'a Fake,
    reference: String,
    ended: bool,
}

impl Drop for RunningPull<'_> {
    fn drop(&mut self) {
        let mut state = self.fake.state.lock().unwrap();
        state.running -= 1;
        if !self.ended {
            state.dropped.push(self.reference.clone());
        }
    }
}

impl Puller for Fake {
    async fn pull(&self, request: PullRequest<'_>, progress: ProgressSink<'_>) -> Result<Pulled, PullError> {
        let PullRequest { reference, credential, sandbox, terms, fetched_for: _ } = request;
        {
            let mut state = self.state.lock().unwrap();
            state.pulls.push(reference.to_owned());
            state.sandboxes.push(sandbox.cloned());
            state.passwords.push(credential.map(|credential| credential.password.expose().to_owned()));
            state.shared.push(terms.shared_for.is_some());
            state.running += 1;
            state.most = state.most.max(state.running);
        }
        let mut running = RunningPull { fake: self, reference: reference.to_owned(), ended: false };
        let act = self.script.lock().unwrap().get_mut(reference).and_then(VecDeque::pop_front);
        let result = match act.unwrap_or(Act::Take(1)) {
            Act::Take(seconds) => {
                for done in [50, 100] {
                    sleep(Duration::from_millis(seconds * 500)).await;
                    progress(ByteProgress { done, total: 100 });
                }
                Ok(())
            }
            Act::Unpack(download, unpack) => {
                sleep(Duration::from_secs(download)).await;
                progress(ByteProgress { done: 100, total: 100 });
                sleep(Duration::from_secs(unpack)).await;
                Ok(())
            }
            Act::Fail(class, message) => Err(PullError::new(class, message)),
            Act::Undecided(class) => {
                Err(PullError::new(class, "and one is silent").with_code(FailureCode::Unreachable))
            }
            Act::Busy(seconds) => {
                let retry_after = Some(Duration::from_secs(seconds));
                Err(PullError { retry_after, ..PullError::new(ErrorClass::Transient, "429") })
            }
            Act::Password(password) => match credential {
                Some(credential) if credential.password.expose() == password => Ok(()),
                _ => Err(PullError::new(ErrorClass::Auth, "401 Unauthorized")),
            },
            Act::Panic => panic!("a bug"),
        };
        running.ended = true;
        result?;
        let mut state = self.state.lock().unwrap();
        state.present.push(reference.to_owned());
        state.unflushed += usize::from(!state.pulls_to_disk);
        Ok(Pulled {
            warning: state.warning.clone(),
            digest: Some("sha256:d".to_owned()),
            id: Some(state.image_id()),
            bytes: Some(ByteProgress { done: 100, total: 100 }),
            is_flushed: state.pulls_to_disk,
            facts: ImageFacts {
                pulled_by_reason: "the fake has no agent".to_owned(),
                ..PulledBy::Runtime.into()
            },
            ..Pulled::default()
        })
    }

    async fn look_up(&self, reference: &str) -> Result<Option<Present>, PullError> {
        let state = self.state.lock().unwrap();
        let there = state.present.iter().any(|present| present == reference);
        Ok(there.then(|| Present { digest: Some("sha256:d".to_owned()), id: Some(state.image_id()) }))
    }

    async fn read_file(&self, id: &str, _path: &str, _most: u64) -> Result<Vec<u8>, String> {
        self.state.lock().unwrap().files.get(id).cloned().ok_or_else(|| "no such image".to_owned())
    }

    async fn read_filesystem(&self) -> Result<Filesystem, PullError> {
        let mut state = self.state.lock().unwrap();
        if let Some(class) = state.filesystem_errors.pop() {
            let message = match class {
                ErrorClass::RuntimeDown => "connection refused",
                _ => "no answer",
            };
            return Err(PullError::new(class, message));
        }
        Ok(Filesystem { mountpoint: "/images".to_owned(), available: state.free, capacity: 100 })
    }

    async fn removable_bytes(&self, _wanted: &[String]) -> u64 {
        self.state.lock().unwrap().removable
    }

    async fn held_images(&self) -> Result<Vec<HeldImage>, PullError> {
        Ok(self.state.lock().unwrap().held.clone())
    }

    async fn weigh(&self, ids: &[String]) -> Result<Vec<u64>, PullError> {
        let state = self.state.lock().unwrap();
        let size =
            |id: &String| state.held.iter().find(|image| image.id == *id).map_or(0, |image| image.size);
        Ok(ids.iter().map(size).collect())
    }

    async fn remove(
        &self,
        id: &str,
        agrees: impl FnOnce(&[HeldImage]) -> bool + Send,
    ) -> Result<Removed, PullError> {
        sleep(Duration::from_secs(1)).await;
        let (freed, answer) = {
            let mut state = self.state.lock().unwrap();
            let Some(at) = state.held.iter().position(|image| image.id == id) else {
                return Ok(Removed::Absent);
            };
            if !agrees(&state.held) {
                return Ok(Removed::Declined);
            }
            if let Some(error) = state.removal_errors.pop() {
                return Err(error);
            }
            (state.held.remove(at).size, state.removal_answer)
        };
        sleep(answer).await;
        Ok(Removed::Freed(freed))
    }

    async fn watch_disk(&self) -> DiskWatch {
        self.flushes.mark(&image_directories()).into()
    }

    async fn flush(&self) -> Result<(), PullError> {
        // Anything that doesn't wait for this happens before it.
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        let takes = self.state.lock().unwrap().flush_takes;
        sleep(takes).await;
        let mut state = self.state.lock().unwrap();
        if let Some(error) = state.flush_errors.pop() {
            return Err(error);
        }
        state.flushed += 1;
        state.unflushed = 0;
        Ok(())
    }

    fn has_unflushed(&self) -> bool {
        self.state.lock().unwrap().unflushed > 0
    }

    async fn give_up(&self, reference: &str) {
        self.state.lock().unwrap().given_up.push(reference.to_owned());
    }

    async fn release_unwanted(
        &self,
        wanted: impl Fn() -> Vec<String> + Send + Sync,
        least_age: Duration,
    ) -> bool {
        let mut state = self.state.lock().unwrap();
        state.released.push((wanted(), least_age));
        state.leftovers
    }

    async fn pin(&self, reference: &str, _id: Option<&str>, job: &JobUid) -> Result<bool, PullError> {
        let mut state = self.state.lock().unwrap();
        if let Some(error) = state.pin_errors.pop() {
            return Err(error);
        }
        state.pins.push((reference.to_owned(), job.clone()));
        Ok(state.confirms_pins)
    }

    async fn unpin(&self, jobs: JobsToUnpin<'_>) -> Result<(), PullError> {
        self.state.lock().unwrap().pins.retain(|(_, job)| match jobs {
            JobsToUnpin::Jobs(over) => !over.contains(job),
            JobsToUnpin::All => false,
        });
        Ok(())
    }

    async fn pinning_jobs(&self) -> Option<Vec<JobUid>> {
        Some(self.state.lock().unwrap().pins.iter().map(|(_, job)| job.clone()).collect())
    }

    async fn read_version(&self) -> Result<String, PullError> {
        let mut state = self.state.lock().unwrap();
        if state.outages > 0 {
            state.outages -= 1;
            return Err(PullError::new(ErrorClass::RuntimeDown, "connection refused"));
        }
        Ok("fake 1".to_owned())
    }
}
