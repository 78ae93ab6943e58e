//! Output of the demo: numbered steps with the time, and lines below them.

use std::cell::Cell;
use std::io::{IsTerminal, Stdout};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tokio::io::{AsyncBufReadExt, BufReader};

/// Width of a step's title, so that the times are aligned.
const TITLE: usize = 66;

/// The output of the demo on standard output.
pub(super) struct Story {
    began: Instant,
    steps: Cell<u32>,
    out: Stdout,
    terminal: bool,
    colours: bool,
}

/// Writes a line to standard output. The demo continues if the reader is gone.
macro_rules! say {
    ($story:expr $(, $($line:tt)+)?) => {{
        use std::io::Write;
        let _ = writeln!(&$story.out $(, $($line)+)?);
    }};
}

impl Story {
    pub(super) fn new() -> Self {
        let out = std::io::stdout();
        let terminal = out.is_terminal();
        let colours = terminal && std::env::var_os("NO_COLOR").is_none();
        Self { began: Instant::now(), steps: Cell::new(0), out, terminal, colours }
    }

    /// Time since the demo began.
    pub(super) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    pub(super) fn begin_step(&self, title: &str) {
        self.steps.set(self.steps.get() + 1);
        let at = format!("{:.1} s", self.began.elapsed().as_secs_f64());
        let title = format!("{}. {title:<TITLE$}", self.steps.get());
        say!(self, "\n{}{}", self.bold(&title), self.dim(&format!("{at:>8}")));
    }

    pub(super) fn print_line(&self, text: &str) {
        say!(self, "   {text}");
    }

    pub(super) fn print_blank_line(&self) {
        say!(self);
    }

    /// Prints a command that the reader could have typed.
    pub(super) fn print_command(&self, command: &str) {
        say!(self, "   {}", self.bold(&format!("$ {command}")));
    }

    /// Prints a command and its output.
    pub(super) fn print_output(&self, command: &str, output: &str) {
        self.print_command(command);
        for line in output.lines() {
            say!(self, "   {line}");
        }
    }

    /// Runs a command, and passes on what it prints: below the step, or to the terminal itself, where it draws.
    pub(super) async fn run(&self, words: &str, command: Command) -> Result<ExitStatus> {
        self.print_command(words);
        let mut command = tokio::process::Command::from(command);
        command.stdin(Stdio::null()).kill_on_drop(true);
        if !self.terminal {
            command.stdout(Stdio::piped());
        }
        let mut child = command.spawn().with_context(|| format!("cannot start {words}"))?;
        if let Some(out) = child.stdout.take() {
            let mut lines = BufReader::new(out).lines();
            while let Some(line) = lines.next_line().await? {
                if line.is_empty() { self.print_blank_line() } else { self.print_line(&line) }
            }
        }
        Ok(child.wait().await?)
    }

    /// Prints an expectation, and whether it was met.
    pub(super) fn print_check(&self, good: bool, text: &str) {
        say!(self, "   {} {text}", self.mark(good));
    }

    pub(super) fn print_note(&self, text: &str) {
        say!(self, "\n{text}");
    }

    pub(super) fn print_failure(&self, error: &anyhow::Error) {
        let causes = error.chain().map(ToString::to_string).collect::<Vec<_>>();
        let text = format!("the demo stopped: {}", causes.join("\n  because "));
        say!(self, "\n{}", self.paint("31", &text));
    }

    pub(super) fn mark(&self, good: bool) -> String {
        if good { self.paint("32", "✓") } else { self.paint("31", "✗") }
    }

    pub(super) fn bold(&self, text: &str) -> String {
        self.paint("1", text)
    }

    pub(super) fn dim(&self, text: &str) -> String {
        self.paint("2", text)
    }

    fn paint(&self, code: &str, text: &str) -> String {
        if self.colours { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// Formats bytes as `12.3 MB`.
pub(super) fn megabytes(bytes: u64) -> String {
    // Count in tenths, so that we need no float.
    let tenths = bytes / 100_000;
    format!("{}.{} MB", tenths / 10, tenths % 10)
}

/// Shortens a digest for comparison by eye.
pub(super) fn short_digest(digest: &str) -> &str {
    digest.get(.."sha256:".len() + 12).unwrap_or(digest)
}

/// Formats rows with aligned columns.
pub(super) fn align_columns(rows: &[Vec<String>]) -> Vec<String> {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width =
        |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<_> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_columns_aligned() {
        assert_eq!((megabytes(0), megabytes(25_165_824)), ("0.0 MB".to_owned(), "25.1 MB".to_owned()));
        assert_eq!(short_digest("sha256:0123456789abcdef"), "sha256:0123456789ab");
        let rows =
            [vec!["a".to_owned(), "bcd".to_owned()], vec!["efg".to_owned(), "h".to_owned(), "i".to_owned()]];
        assert_eq!(align_columns(&rows), ["a    bcd", "efg  h    i"]);
    }
}
