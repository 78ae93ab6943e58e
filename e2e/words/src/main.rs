//! Measures how plainly this repository is written, and fails where a rate is above its ceiling.
//!
//! ```text
//! git ls-files ──▶ Rust: source.rs (comments, strings, code) ──▶ names.rs (functions, types, tests) ─┐
//!              └─▶ Markdown, shell, YAML, TOML: text.rs ─────────────────────────────────────────────┴──▶ rows.rs
//! ```

use std::collections::{HashMap, HashSet};
use std::io::Write as _;
use std::process::{Command, ExitCode};

mod names;
mod rows;
mod source;
mod text;

// No `println!`, which panics if the reader has gone, as `head` does.
macro_rules! say {
    ($($part:tt)*) => { drop(writeln!(std::io::stdout(), $($part)*)) };
}

const USAGE: &str = "\
Usage: words [--show ROW] [--base REV] [PATH]...

  --show ROW   print the lines that count for a row of the table
  --base REV   look only at the lines added since REV: each listed word there is an offence
  PATH         measure only files below these paths, without ceilings";

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(reason) => {
            eprintln!("words: {reason}");
            ExitCode::from(2)
        }
    }
}

/// Whether everything is within its ceiling.
fn run() -> Result<bool, String> {
    let (mut show, mut base, mut paths) = (None, None, Vec::new());
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--show" => show = Some(args.next().ok_or(USAGE)?),
            "--base" => base = Some(args.next().ok_or(USAGE)?),
            "--help" => {
                say!("{USAGE}");
                return Ok(true);
            }
            path if !path.starts_with('-') => paths.push(path.to_owned()),
            _ => return Err(USAGE.to_owned()),
        }
    }
    let mut tree = rows::Tree::default();
    for path in
        git(&[&["ls-files", "--"][..], &paths.iter().map(String::as_str).collect::<Vec<_>>()].concat())?
            .lines()
    {
        // A file that was removed and not yet committed.
        if let Ok(content) = std::fs::read_to_string(path) {
            tree.read_file(path, &content);
        }
    }
    let rows = tree.measure();
    if let Some(base) = base {
        let added = added_lines(&git(&[
            "diff",
            "--merge-base",
            "--unified=0",
            "--no-color",
            "--no-ext-diff",
            &base,
        ])?);
        return Ok(report_added(&rows, &added));
    }
    if let Some(name) = show {
        let row =
            rows.iter().find(|row| row.name.contains(&name)).ok_or_else(|| format!("no row {name:?}"))?;
        row.found.iter().for_each(|place| say!("{place}"));
        return Ok(true);
    }
    Ok(report_table(&rows, paths.is_empty()))
}

fn report_table(rows: &[rows::RateRow], whole_tree: bool) -> bool {
    say!("{:44} {:>7} {:>8} {:>6}", "", "now", "ceiling", "goal");
    let mut within = true;
    for row in rows {
        let above = whole_tree && row.is_beyond(row.ceiling);
        within &= !above;
        let remark = if above { "  beyond its ceiling: words --show" } else { "" };
        say!("{:44} {:>7.1} {:>8} {:>6}{remark}", row.name, row.now, row.ceiling, row.goal);
    }
    within
}

fn report_added(rows: &[rows::RateRow], added: &HashMap<String, HashSet<usize>>) -> bool {
    let mut clean = true;
    for row in rows.iter().filter(|row| row.offends_when_added) {
        for place in &row.found {
            if added.get(&place.path).is_some_and(|lines| lines.contains(&place.line)) {
                say!("{place}   [{}]", row.name);
                clean = false;
            }
        }
    }
    if !clean {
        say!("CONTRIBUTING.md has plainer words for these");
    }
    clean
}

/// Lines that a diff without context adds, by file.
fn added_lines(diff: &str) -> HashMap<String, HashSet<usize>> {
    let mut added: HashMap<String, HashSet<usize>> = HashMap::new();
    let mut path = String::new();
    for line in diff.lines() {
        if let Some(name) = line.strip_prefix("+++ b/") {
            name.clone_into(&mut path);
        } else if let Some(hunk) = line.strip_prefix("@@ ") {
            let range = hunk.split_whitespace().find_map(|word| word.strip_prefix('+')).unwrap_or("0");
            let (first, count) = range.split_once(',').unwrap_or((range, "1"));
            let first: usize = first.parse().unwrap_or(0);
            let count: usize = count.parse().unwrap_or(0);
            added.entry(path.clone()).or_default().extend(first..first + count);
        }
    }
    added
}

fn git(args: &[&str]) -> Result<String, String> {
    let output = Command::new("git").args(args).output().map_err(|error| format!("git: {error}"))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(format!("git {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr)))
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn reads_added_lines_from_a_diff() {
        let added = super::added_lines("+++ b/a.rs\n@@ -3 +4,2 @@ fn a()\n+x\n+y\n@@ -9,2 +11,0 @@\n");
        let mut lines: Vec<_> = added["a.rs"].iter().copied().collect();
        lines.sort_unstable();
        assert_eq!(lines, [4, 5]);
    }
}
