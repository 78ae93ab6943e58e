//! Says on standard error what is being done: the figures alone go to standard output.

use std::io::{IsTerminal, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Between two lines of a step that takes long, where nobody looks at a terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// The one who tells.
pub struct Teller {
    begun: Instant,
}

/// Counts up to a number of nodes, several times.
pub(super) struct Counter {
    begun: Instant,
    total: usize,
    bar: Option<ProgressBar>,
    /// What was last written, and when.
    last: Mutex<(&'static str, Instant)>,
}

impl Default for Teller {
    fn default() -> Self {
        Self::new()
    }
}

impl Teller {
    /// The clock starts.
    pub fn new() -> Self {
        Self { begun: Instant::now() }
    }

    /// What comes next, or is done.
    pub fn step(&self, text: &str) {
        say(self.begun, text);
    }

    pub(super) fn counter(&self, total: usize) -> Counter {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(Some(total as u64), ProgressDrawTarget::stderr());
            // A constant: a wrong one shows as another look.
            let style = ProgressStyle::with_template("          {bar:40} {pos} {msg}");
            bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("━━─"))
        });
        Counter { begun: self.begun, total, bar, last: Mutex::new(("", self.begun)) }
    }
}

impl Counter {
    pub(super) fn show(&self, what: &'static str, done: usize) {
        if let Some(bar) = &self.bar {
            bar.set_message(what);
            return bar.set_position(done as u64);
        }
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if done == self.total && last.0 != what || last.1.elapsed() >= LINE_EVERY {
            // Said once when it is complete, whatever was said before.
            *last = (if done == self.total { what } else { last.0 }, Instant::now());
            say(self.begun, &format!("{done} of {} {what}", self.total));
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

/// A reader who has left is no reason to stop.
fn say(begun: Instant, text: &str) {
    let _ = writeln!(std::io::stderr(), "{:>7.1} s {text}", begun.elapsed().as_secs_f64());
}
