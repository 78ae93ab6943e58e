//! Progress of a run on standard error, so that standard output has only the figures.

use std::io::{IsTerminal, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Interval of lines during a long step, without a terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Reports the steps of a run.
pub struct Teller {
    begun: Instant,
}

/// Progress of several steps that each count up to the number of nodes.
pub struct Counter {
    begun: Instant,
    total: usize,
    bar: Option<ProgressBar>,
    /// The last step that was reported as complete, and the time of the last line.
    last: Mutex<(&'static str, Instant)>,
}

impl Default for Teller {
    fn default() -> Self {
        Self::new()
    }
}

impl Teller {
    /// Creates a teller, and starts its clock.
    pub fn new() -> Self {
        Self { begun: Instant::now() }
    }

    /// Reports a step that begins or is done.
    pub fn step(&self, text: &str) {
        write_line(self.begun, text);
    }

    /// Begins steps that each count up to this number.
    pub fn counter(&self, total: usize) -> Counter {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(Some(total as u64), ProgressDrawTarget::stderr());
            // The template is a constant; a wrong one would be seen as the default style.
            let style = ProgressStyle::with_template("          {bar:40} {pos} {msg}");
            bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("━━─"))
        });
        Counter { begun: self.begun, total, bar, last: Mutex::new(("", self.begun)) }
    }
}

impl Counter {
    /// Shows how far a step is.
    pub fn show(&self, what: &'static str, done: usize) {
        if let Some(bar) = &self.bar {
            bar.set_message(what);
            return bar.set_position(done as u64);
        }
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if done == self.total && last.0 != what || last.1.elapsed() >= LINE_EVERY {
            // The completion of a step is always written, and only once.
            *last = (if done == self.total { what } else { last.0 }, Instant::now());
            write_line(self.begun, &format!("{done} of {} {what}", self.total));
        }
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Writes a line to standard error. The run continues if the reader is gone.
fn write_line(begun: Instant, text: &str) {
    let _ = writeln!(std::io::stderr(), "{:>7.1} s {text}", begun.elapsed().as_secs_f64());
}
