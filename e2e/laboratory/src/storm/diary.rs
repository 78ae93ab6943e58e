//! The log of events, line by line: on standard output and in a file beside the logs.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result};

/// Most lines about broken promises that are kept: one broken promise may break hundreds of times.
const MOST_BROKEN: usize = 100;

/// The diary of a storm. Its clones write to the same file.
#[derive(Clone)]
pub(super) struct Diary(Arc<Mutex<Pages>>);

struct Pages {
    begun: Instant,
    file: File,
    broken: Vec<String>,
}

impl Diary {
    pub(super) fn create_at(path: &Path) -> Result<Self> {
        let file = File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self(Arc::new(Mutex::new(Pages { begun: Instant::now(), file, broken: Vec::new() }))))
    }

    /// Records an event.
    #[allow(clippy::print_stdout)]
    pub(super) fn note_event(&self, text: &str) {
        let mut pages = self.pages();
        let line = format!("{:>8.2} s {text}", pages.begun.elapsed().as_secs_f64());
        println!("{line}");
        // The storm continues if the disk of the logs is full.
        let _ = writeln!(pages.file, "{line}");
    }

    /// Records a broken promise.
    pub(super) fn note_broken(&self, text: &str) {
        self.note_event(&format!("BROKEN: {text}"));
        let mut pages = self.pages();
        if pages.broken.len() < MOST_BROKEN {
            pages.broken.push(text.to_owned());
        }
    }

    /// All promises that were broken.
    pub(super) fn all_broken(&self) -> Vec<String> {
        self.pages().broken.clone()
    }

    fn pages(&self) -> MutexGuard<'_, Pages> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
