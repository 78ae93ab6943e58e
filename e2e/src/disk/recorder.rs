//! A disk that records each write, so that a power cut can be simulated at any of them later.
//!
//! ```text
//!  ext4 ─▶ loop device ─▶ a file in our own FUSE file system ─▶ Recorder ─▶ the image file
//!                                                                  └─▶ Recording: writes and flushes in their order
//! ```
//!
//! A loop device passes each flush of the file system on as an fsync. So writes before a flush are on disk at each
//! later cut, and writes after the last flush may be lost in any combination: a disk writes its cache in any order.
//! Linux has dm-log-writes for this, if device-mapper is built in.

mod protocol;

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use anyhow::{Context, Result, ensure};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use self::protocol::{Answer, MAX_WRITE, Request};
use crate::chance::Chance;

/// An event on a disk.
#[derive(Clone, Debug)]
enum Event {
    Write { offset: u64, data: Vec<u8> },
    Flush,
}

/// All writes to a disk.
#[derive(Debug)]
pub struct Recording {
    /// The initial content of the disk.
    base: PathBuf,
    events: Vec<Event>,
}

/// A mounted file that records its writes.
#[derive(Debug)]
pub(super) struct Recorder {
    base: PathBuf,
    point: PathBuf,
    events: Arc<Mutex<Vec<Event>>>,
}

impl Recorder {
    /// Shows the image file as [`Self::file`], and records from now on.
    pub(super) fn start(image: &Path) -> Result<Self> {
        let (base, point) = (image.with_extension("base"), image.with_extension("recorded"));
        std::fs::copy(image, &base)?;
        std::fs::create_dir(&point)?;
        let disk = OpenOptions::new().read(true).write(true).open(image)?;
        let size = disk.metadata()?.len();
        let kernel = OpenOptions::new().read(true).write(true).open("/dev/fuse").context("no FUSE here")?;
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0\0", kernel.as_raw_fd());
        let options = std::ffi::CStr::from_bytes_with_nul(options.as_bytes())?;
        mount("prepull-e2e", &point, "fuse", MountFlags::empty(), options)
            .with_context(|| format!("cannot mount {}", point.display()))?;
        let events = Arc::default();
        let noted = Arc::clone(&events);
        // Ends when the file system is unmounted, or with the test.
        thread::spawn(move || serve(&kernel, &disk, size, &noted));
        Ok(Self { base, point, events })
    }

    /// The file to make a loop device of.
    pub(super) fn file(&self) -> PathBuf {
        self.point.join(protocol::NAME)
    }

    /// Number of events so far.
    pub(super) fn so_far(&self) -> usize {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Ends the recording. The loop device must be gone, or going.
    pub(super) fn end(self) -> Result<Recording> {
        unmount(&self.point, UnmountFlags::DETACH)?;
        let events = std::mem::take(&mut *self.events.lock().unwrap_or_else(PoisonError::into_inner));
        Ok(Recording { base: self.base, events })
    }
}

impl Recording {
    /// Number of writes and flushes.
    pub fn len(&self) -> usize {
        self.events.len()
    }

    /// Whether nothing was written.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// `count` cuts, spread over the events from `from` on, at a random one in each part.
    pub fn cuts(&self, from: usize, count: usize, chance: &mut Chance) -> Vec<usize> {
        let all = self.len().saturating_sub(from).max(1);
        let begin = |number: usize| number * all / count;
        let cut = |number| from + begin(number) + chance.below(begin(number + 1) - begin(number));
        (0..count).map(cut).collect()
    }

    /// Writes to a file the state of the disk after a power cut before an event. Each write that wasn't flushed by then
    /// is either included or not.
    pub(super) fn replay(&self, cut: usize, chance: &mut Chance, to: &Path) -> Result<()> {
        let before = self.events.get(..cut).context("no such event")?;
        let flushed = before.iter().rposition(|event| matches!(event, Event::Flush)).unwrap_or(0);
        let copied =
            std::process::Command::new("cp").arg("--sparse=always").args([&self.base, to]).status()?;
        ensure!(copied.success(), "cannot copy {}", self.base.display());
        let disk = OpenOptions::new().write(true).open(to)?;
        for (number, event) in before.iter().enumerate() {
            if let Event::Write { offset, data } = event
                && (number < flushed || chance.happens(0.5))
            {
                disk.write_all_at(data, *offset)?;
            }
        }
        Ok(())
    }
}

fn serve(kernel: &File, disk: &File, size: u64, events: &Mutex<Vec<Event>>) {
    let mut buffer = vec![0; MAX_WRITE + 64 * 1024];
    loop {
        let length = match std::io::Read::read(&mut &*kernel, &mut buffer) {
            Ok(length) => length,
            // The request was interrupted.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            // It's unmounted.
            Err(_) => return,
        };
        let Some((request, answer_to)) = protocol::read(&buffer[..length]) else { continue };
        let note = |event| events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
        let answer = match request {
            Request::Forget => continue,
            Request::Read { offset, length } => {
                let mut data = vec![0; length.min(usize::try_from(size.saturating_sub(offset)).unwrap_or(0))];
                match disk.read_exact_at(&mut data, offset) {
                    Ok(()) => Answer::Data(data),
                    Err(_) => Answer::BROKEN,
                }
            }
            Request::Write { offset, data } => {
                note(Event::Write { offset, data: data.to_owned() });
                match disk.write_all_at(data, offset) {
                    Ok(()) => Answer::written(data.len()),
                    Err(_) => Answer::BROKEN,
                }
            }
            Request::Flush => {
                note(Event::Flush);
                Answer::Data(Vec::new())
            }
            Request::Other(answer) => answer(size),
        };
        let answer = answer.encode(answer_to);
        let _ = std::io::Write::write(&mut &*kernel, &answer);
    }
}
