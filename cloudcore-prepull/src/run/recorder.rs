//! The recording of what the engine takes in, for `--record`: see [`prepull_engine::recording`].

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, TrySendError, channel, sync_channel};
use std::time::Duration;

use anyhow::{Context, ensure};
use jiff::Timestamp;
use prepull_engine::engine::{Action, Input};
use prepull_engine::recording::{RecordingEntry, count_actions};
use prepull_engine::sites::SiteSettings;
use tracing::{error, info};

/// Lines that wait for the disk: a few seconds of the busiest fleet. The engine never waits for a recording.
const LINES: usize = 16_384;
/// Bytes of the lines that wait: a line may be a message of 1 MiB, or a list of all nodes. One line may always wait.
const WAITING_BYTES: usize = 64 << 20;
/// A recording grows no further than this, so that a forgotten flag does not fill a disk: some days of a quiet
/// fleet, or ten jobs over 10,000 nodes.
const MAX_BYTES: u64 = 1 << 30;
/// At the end of the program the lines that still wait are written, unless the disk hangs.
const LAST_LINES: Duration = Duration::from_secs(1);

/// A file that can be recorded to. It is opened by a standby as well, which would find out otherwise when it has to
/// lead.
pub(super) struct RecordFile {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl RecordFile {
    /// Opens the file to go on with it, or makes it, readable by its owner only: it holds names and labels.
    pub(super) fn open(path: &Path) -> anyhow::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path);
        let file = file.with_context(|| format!("cannot open --record {}", path.display()))?;
        let metadata = file.metadata();
        let bytes = metadata.with_context(|| format!("cannot read --record {}", path.display()))?.len();
        ensure!(
            bytes < MAX_BYTES,
            "--record {} has reached 1 GiB: move it away, or give another file",
            path.display()
        );
        Ok(Self { path: path.to_owned(), file, bytes })
    }
}

/// Writes a recording on a thread of its own. If a write fails, we log it once and end the recording: one with a hole
/// in it could not be played.
pub(super) struct Recorder {
    path: PathBuf,
    lines: Option<SyncSender<Vec<u8>>>,
    /// Bytes of the lines that wait.
    waiting: Arc<AtomicUsize>,
    /// Disconnected once the thread has ended.
    ended: Receiver<()>,
    /// Size of the file once every line is written.
    bytes: u64,
}

impl Recorder {
    /// Records what a leader's engine takes in.
    pub(super) fn begin(
        RecordFile { path, file, bytes }: RecordFile,
        kruise_node_selector: Option<String>,
        sites: SiteSettings,
    ) -> anyhow::Result<Self> {
        let (lines, queue) = sync_channel(LINES);
        let (ends, ended) = channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        std::thread::Builder::new()
            .name("recorder".to_owned())
            .spawn({
                let (path, waiting) = (path.clone(), Arc::clone(&waiting));
                move || {
                    let _ends: Sender<()> = ends;
                    if let Err(error) = write_lines(file, &queue, &waiting) {
                        report_end(&path, &error.to_string());
                    }
                }
            })
            .context("cannot start the recorder's thread")?;
        info!(file = %path.display(), "recording what the engine takes in");
        let mut recorder = Self { path, lines: Some(lines), waiting, ended, bytes };
        // A process that was killed may have left half a line.
        recorder.push(b"\n".to_vec());
        let version = env!("CARGO_PKG_VERSION").to_owned();
        recorder.queue_entry(&RecordingEntry::Begin { version, kruise_node_selector, sites });
        Ok(recorder)
    }

    /// The engine takes this in.
    pub(super) fn note_input(&mut self, input: &Input, at: Timestamp) {
        self.queue_entry(&RecordingEntry::Input { at: at.to_string(), input });
    }

    /// The engine was asked what is to be done, and answered this.
    pub(super) fn note_flush(&mut self, actions: &[Action], at: Timestamp) {
        self.queue_entry(&RecordingEntry::Flush { at: at.to_string(), actions: count_actions(actions) });
    }

    fn queue_entry(&mut self, entry: &RecordingEntry<&Input>) {
        if self.lines.is_none() {
            return;
        }
        match entry.to_line() {
            Ok(line) => self.push(line),
            Err(error) => self.give_up(&format!("an input cannot be written as JSON: {error}")),
        }
    }

    fn push(&mut self, line: Vec<u8>) {
        let Some(lines) = &self.lines else { return };
        self.bytes += line.len() as u64;
        if self.bytes > MAX_BYTES {
            return self.give_up("the file has reached 1 GiB: move it away");
        }
        let size = line.len();
        let waiting = self.waiting.fetch_add(size, Ordering::Relaxed);
        if waiting > 0 && waiting + size > WAITING_BYTES {
            return self.give_up("the disk is too slow");
        }
        match lines.try_send(line) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => self.give_up("the disk is too slow"),
            // The thread has said why.
            Err(TrySendError::Disconnected(_)) => self.lines = None,
        }
    }

    fn give_up(&mut self, reason: &str) {
        self.lines = None;
        report_end(&self.path, reason);
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.lines = None;
        let _ = self.ended.recv_timeout(LAST_LINES);
    }
}

fn report_end(file: &Path, reason: &str) {
    error!(file = %file.display(), reason, "the recording has ended; another one begins at the next start");
}

/// Writes what comes, and hands it to the kernel whenever nothing more waits, so that a kill costs little.
fn write_lines(file: File, lines: &Receiver<Vec<u8>>, waiting: &AtomicUsize) -> std::io::Result<()> {
    let mut file = BufWriter::new(file);
    while let Ok(first) = lines.recv() {
        for line in std::iter::once(first).chain(lines.try_iter()) {
            file.write_all(&line)?;
            waiting.fetch_sub(line.len(), Ordering::Relaxed);
        }
        file.flush()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;
    use std::os::unix::fs::PermissionsExt as _;

    use prepull_engine::fleet::event::FleetEvent;
    use prepull_engine::recording::replay;

    use super::*;

    fn record(file: &Path, kruise_node_selector: Option<&str>) -> Recorder {
        Recorder::begin(
            RecordFile::open(file).unwrap(),
            kruise_node_selector.map(str::to_owned),
            SiteSettings::default(),
        )
        .unwrap()
    }

    #[test]
    fn a_recording_survives_restarts_and_replays() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("engine.recording");
        for _ in 0..2 {
            let mut recorder = record(&file, Some("a=b"));
            recorder.note_input(&FleetEvent::Nodes(Vec::new()).into(), Timestamp::UNIX_EPOCH);
            recorder.note_flush(&[], Timestamp::UNIX_EPOCH);
        }
        let replayed = replay(BufReader::new(File::open(&file).unwrap()), |_, _| {}).unwrap();
        assert_eq!((replayed.leaders, replayed.inputs), (2, 2));
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_recording_ends_at_its_size_limit() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("engine.recording");
        let mut recorder = record(&file, None);
        recorder.bytes = MAX_BYTES;
        for _ in 0..2 {
            recorder.note_input(&Input::Tick, Timestamp::UNIX_EPOCH);
        }
        drop(recorder);
        let replayed = replay(BufReader::new(File::open(&file).unwrap()), |_, _| {}).unwrap();
        assert_eq!((replayed.leaders, replayed.inputs), (1, 0));
    }

    #[test]
    fn an_unopenable_file_names_its_flag() {
        let error = RecordFile::open(Path::new("/nonexistent/engine.recording")).err().unwrap();
        assert_eq!(error.to_string(), "cannot open --record /nonexistent/engine.recording");
    }

    #[test]
    fn a_full_file_names_the_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("engine.recording");
        // The file has a hole: it takes no room.
        File::create(&path).unwrap().set_len(MAX_BYTES).unwrap();
        let error = RecordFile::open(&path).err().unwrap().to_string();
        assert!(error.ends_with("has reached 1 GiB: move it away, or give another file"), "{error}");
    }

    #[test]
    fn a_hanging_disk_bounds_the_queue() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("engine.recording");
        let mut recorder = record(&file, None);
        // The disk hangs: these bytes wait and do not go away.
        recorder.waiting.fetch_add(WAITING_BYTES, Ordering::Relaxed);
        recorder.note_input(&Input::Tick, Timestamp::UNIX_EPOCH);
        assert!(recorder.lines.is_none());
    }
}
