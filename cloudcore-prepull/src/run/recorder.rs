//! The recording of what the engine takes in, for `--record`: see [`prepull_engine::recording`].

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, SyncSender, TrySendError, channel, sync_channel};
use std::time::Duration;

use anyhow::Context;
use jiff::Timestamp;
use prepull_engine::engine::{Action, Input};
use prepull_engine::recording::{Entry, count};
use tracing::{error, info};

/// Lines that wait for the disk: a few seconds of the busiest fleet. The engine never waits for a recording.
const LINES: usize = 16_384;
/// A recording grows no further than this, so that a forgotten flag does not fill a disk: some days of a quiet
/// fleet, or ten jobs over 10,000 nodes.
const MAX_BYTES: u64 = 1 << 30;
/// At the end of the program the lines that still wait are written, unless the disk hangs.
const LAST_LINES: Duration = Duration::from_secs(1);

/// Writes a recording on a thread of its own. Where that cannot go on it says so once, and the recording ends: one with
/// a hole in it could not be played.
pub(super) struct Recorder {
    lines: Option<SyncSender<Vec<u8>>>,
    /// Disconnected once the thread has ended.
    ended: Receiver<()>,
    bytes: u64,
}

impl Recorder {
    /// Goes on with the file, or makes it, readable by its owner only: it holds names and labels.
    pub(super) fn open(path: &Path, kruise_node_selector: Option<String>) -> anyhow::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path);
        let file = file.with_context(|| format!("open --record {}", path.display()))?;
        let bytes = file.metadata().with_context(|| format!("read --record {}", path.display()))?.len();
        let (lines, waiting) = sync_channel(LINES);
        let (ends, ended) = channel();
        std::thread::Builder::new()
            .name("recorder".to_owned())
            .spawn(move || {
                let _ends: Sender<()> = ends;
                if let Err(error) = write_lines(file, &waiting) {
                    error!(%error, "the recording has ended: --record cannot be written");
                }
            })
            .context("start the recorder's thread")?;
        let mut recorder = Self { lines: Some(lines), ended, bytes };
        // A process that was killed may have left half a line.
        recorder.push(b"\n".to_vec());
        let version = env!("CARGO_PKG_VERSION").to_owned();
        recorder.record(&Entry::Begin { version, kruise_node_selector });
        info!(file = %path.display(), "recording what the engine takes in");
        Ok(recorder)
    }

    /// The engine takes this in.
    pub(super) fn input(&mut self, input: &Input, at: Timestamp) {
        self.record(&Entry::Input { at: at.to_string(), input });
    }

    /// The engine was asked what is to be done, and answered this.
    pub(super) fn flush(&mut self, actions: &[Action], at: Timestamp) {
        self.record(&Entry::Flush { at: at.to_string(), actions: count(actions) });
    }

    fn record(&mut self, entry: &Entry<&Input>) {
        if self.lines.is_none() {
            return;
        }
        match entry.to_line() {
            Ok(line) => self.push(line),
            Err(error) => self.end(&format!("an input cannot be written as JSON: {error}")),
        }
    }

    fn push(&mut self, line: Vec<u8>) {
        let Some(lines) = &self.lines else { return };
        self.bytes += line.len() as u64;
        if self.bytes > MAX_BYTES {
            return self.end("the file has reached 1 GiB; move it away and start again");
        }
        match lines.try_send(line) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => self.end("the disk is too slow"),
            // The thread has said why.
            Err(TrySendError::Disconnected(_)) => self.lines = None,
        }
    }

    fn end(&mut self, reason: &str) {
        self.lines = None;
        error!(reason, "the recording of --record has ended");
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.lines = None;
        let _ = self.ended.recv_timeout(LAST_LINES);
    }
}

/// Writes what comes, and hands it to the kernel whenever nothing more waits, so that a kill costs little.
fn write_lines(file: File, waiting: &Receiver<Vec<u8>>) -> std::io::Result<()> {
    let mut file = BufWriter::new(file);
    while let Ok(line) = waiting.recv() {
        file.write_all(&line)?;
        while let Ok(line) = waiting.try_recv() {
            file.write_all(&line)?;
        }
        file.flush()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;
    use std::os::unix::fs::PermissionsExt as _;

    use prepull_engine::prepull::controller;
    use prepull_engine::recording::replay;

    use super::*;

    #[test]
    fn a_recording_goes_on_after_a_restart_and_can_be_played() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("engine.recording");
        for _ in 0..2 {
            let mut recorder = Recorder::open(&file, Some("a=b".to_owned())).unwrap();
            recorder.input(&controller::Input::Nodes(Vec::new()).into(), Timestamp::UNIX_EPOCH);
            recorder.flush(&[], Timestamp::UNIX_EPOCH);
        }
        let replayed = replay(BufReader::new(File::open(&file).unwrap()), |_, _| {}).unwrap();
        assert_eq!((replayed.leaders, replayed.inputs), (2, 2));
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_recording_ends_where_it_has_reached_its_bound() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("engine.recording");
        let mut recorder = Recorder::open(&file, None).unwrap();
        recorder.bytes = MAX_BYTES;
        for _ in 0..2 {
            recorder.input(&Input::TICK, Timestamp::UNIX_EPOCH);
        }
        drop(recorder);
        let replayed = replay(BufReader::new(File::open(&file).unwrap()), |_, _| {}).unwrap();
        assert_eq!((replayed.leaders, replayed.inputs), (1, 0));
    }

    #[test]
    fn a_file_that_cannot_be_opened_is_named_with_its_flag() {
        let error = Recorder::open(Path::new("/nonexistent/engine.recording"), None).err().unwrap();
        assert_eq!(error.to_string(), "open --record /nonexistent/engine.recording");
    }
}
