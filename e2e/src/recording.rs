//! A command's output with the time of each line, and its drawing for the docs.

use std::fmt::Write as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncBufReadExt, BufReader};

/// The output of a command that has ended.
#[derive(Clone, Debug)]
pub struct OutputRecording {
    /// Its exit status.
    pub status: i32,
    /// The lines of both outputs, each with the time since the start.
    pub lines: Vec<(Duration, String)>,
}

impl OutputRecording {
    /// Fails unless the command has ended with this status and printed all of these words.
    pub fn is(&self, status: i32, words: &[&str]) -> Result<()> {
        let lines: Vec<_> = self.lines.iter().map(|(_, line)| line.as_str()).collect();
        let all = lines.join("\n");
        ensure!(self.status == status, "it ended with {}, not {status}: {all}", self.status);
        for word in words {
            ensure!(all.contains(word), "{word:?} is not in: {all}");
        }
        Ok(())
    }

    /// An SVG in which each line appears at its time, below `command`. It plays once; a viewer without animations shows
    /// the end. Each of `replaced` is an address of the test and what a reader would see in its place.
    pub fn draw(&self, command: &str, replaced: &[(&str, &str)]) -> Result<String> {
        let end = self.lines.last().map_or(0.0, |(time, _)| time.as_secs_f64()) + SHOWN_BEFORE_END;
        let mut shown = vec![(0.0, format!("$ {command}"))];
        for (time, line) in &self.lines {
            let line = replaced.iter().fold(line.clone(), |line, (from, to)| line.replace(from, to));
            shown.push((time.as_secs_f64(), line));
        }
        let (mut texts, mut offsets, mut times) = (String::new(), String::new(), String::new());
        for (row, (time, line)) in shown.iter().enumerate() {
            let (line, y) = (escape(line), (row + 1) * ROW_HEIGHT);
            let hidden =
                format!("<animate attributeName=\"opacity\" from=\"0\" to=\"0\" dur=\"{time:.2}s\"/>");
            let hidden = if *time > 0.0 { hidden } else { String::new() };
            let colour =
                if line.starts_with("$ ") || line.starts_with("==&gt;") { " class=\"c\"" } else { "" };
            writeln!(texts, "<text{colour} x=\"12\" y=\"{y}\" xml:space=\"preserve\">{line}{hidden}</text>")?;
            let separator = if row == 0 { "" } else { ";" };
            write!(offsets, "{separator}0 -{}", offset(row))?;
            write!(times, "{separator}{:.4}", time / end)?;
        }
        let (width, height, last) = (840, (ROWS + 1) * ROW_HEIGHT, offset(shown.len() - 1));
        Ok(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\">\n\
             <style>text{{font:13px monospace;fill:#ddd}}.c{{fill:#8f8}}</style>\n\
             <rect width=\"100%\" height=\"100%\" rx=\"6\" fill=\"#222\"/>\n\
             <g transform=\"translate(0 -{last})\">\n\
             <animateTransform attributeName=\"transform\" type=\"translate\" calcMode=\"discrete\" dur=\"{end:.2}s\" \
             values=\"{offsets}\" keyTimes=\"{times}\"/>\n{texts}</g>\n</svg>\n"
        ))
    }
}

/// Rows of the drawn terminal, and the height of one in pixels.
const ROWS: usize = 30;
const ROW_HEIGHT: usize = 17;
/// Columns of the drawn terminal: a longer line is cut.
const COLUMNS: usize = 104;
/// Seconds that the animation goes on after the last line.
const SHOWN_BEFORE_END: f64 = 1.0;

/// By how many pixels the terminal has scrolled when this row is its last one.
fn offset(row: usize) -> usize {
    (row + 1).saturating_sub(ROWS) * ROW_HEIGHT
}

fn escape(line: &str) -> String {
    let mut cut: String = line.chars().take(COLUMNS).collect();
    if cut.len() < line.len() {
        cut.pop();
        cut.push('…');
    }
    cut.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Runs a command and records both of its outputs in one.
pub async fn record_command(command: Command) -> Result<OutputRecording> {
    let mut shell = tokio::process::Command::new("sh");
    shell.args(["-c", "exec \"$0\" \"$@\" 2>&1"]).arg(command.get_program()).args(command.get_args());
    shell.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    shell.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
    let began = Instant::now();
    let mut child = shell.spawn().context("cannot start sh")?;
    let mut out = BufReader::new(child.stdout.take().context("no stdout")?).lines();
    let mut lines = Vec::new();
    while let Some(line) = out.next_line().await? {
        lines.push((began.elapsed(), line));
    }
    let status = child.wait().await?.code().context("a signal has ended it")?;
    Ok(OutputRecording { status, lines })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drawing_shows_each_line_at_its_time() {
        let line = |tenths: u64, line: &str| (Duration::from_millis(tenths * 100), line.to_owned());
        let recording =
            OutputRecording { status: 0, lines: vec![line(5, "a <b> of 127.0.0.1:80"), line(20, "end")] };
        let drawn = recording.draw("run", &[("127.0.0.1:80", "registry.example")]).unwrap();
        assert!(drawn.contains(">$ run</text>"), "{drawn}");
        assert!(drawn.contains("a &lt;b&gt; of registry.example<animate"), "{drawn}");
        assert!(
            drawn.contains("end<animate attributeName=\"opacity\" from=\"0\" to=\"0\" dur=\"2.00s\"/>"),
            "{drawn}"
        );
        assert!(drawn.contains("keyTimes=\"0.0000;0.1667;0.6667\""), "{drawn}");
    }

    #[test]
    fn a_full_terminal_scrolls() {
        assert_eq!((offset(0), offset(ROWS - 1), offset(ROWS)), (0, 0, ROW_HEIGHT));
    }
}
