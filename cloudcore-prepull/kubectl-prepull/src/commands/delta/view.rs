//! Savings of a delta, and the files that take most of it: as a table, and as an object.

use prepull_delta::make::{Cause, Unshrunk};
use serde::Serialize;

use crate::amounts::format_bytes;
use crate::screen::{Screen, sanitize_line};
use crate::table::with_text;

/// Files in the table. `-o json` has more.
const FILES: usize = 10;
/// A file with less isn't worth a row.
const MIN_ROW: u64 = 16 << 10;

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DeltaReport {
    pub(super) old: String,
    pub(super) new: String,
    pub(super) platforms: Vec<PlatformReport>,
}

/// The delta of one platform.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PlatformReport {
    pub(super) platform: String,
    /// Digests of the delta's manifest, of the old image's and of the new one's.
    pub(super) delta: String,
    pub(super) source: String,
    pub(super) target: String,
    /// Bytes of the delta's layers, and of those that they stand for.
    pub(super) bytes: u64,
    pub(super) whole: u64,
    /// The number of layers that don't change.
    pub(super) reused: usize,
    pub(super) layers: Vec<LayerReport>,
    pub(super) pushed: bool,
}

impl PlatformReport {
    /// Whether it saves a tenth. One that saves less costs a request, and work.
    pub(super) fn is_worth_it(&self) -> bool {
        self.bytes.saturating_mul(10) < self.whole.saturating_mul(9)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct LayerReport {
    pub(super) layer: String,
    pub(super) bytes: u64,
    pub(super) whole: u64,
    pub(super) uncompressed: u64,
    /// Whether it's a diff, or the layer itself.
    pub(super) is_diff: bool,
    pub(super) unshrunk: Vec<FileReport>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct FileReport {
    path: String,
    size: u64,
    sent: u64,
    reason: &'static str,
}

impl From<Unshrunk> for FileReport {
    fn from(Unshrunk { path, size, sent, cause }: Unshrunk) -> Self {
        let reason = match cause {
            Cause::New => "new",
            Cause::Closed => "the old file is for its owner only: the agent has no capability to read it",
            Cause::Changed => "changed",
            Cause::Unlike => "nothing in common with the old file: compressed, or built by another compiler",
            Cause::Large => "above 64 MiB: only what moved as a whole is found",
        };
        Self { path, size, sent, reason }
    }
}

pub(super) fn render(deltas: &DeltaReport, dry_run: bool, screen: Screen) -> String {
    let mut rows = vec![["PLATFORM", "DELTA", "INSTEAD OF", "LAYERS"].map(str::to_owned).to_vec()];
    for report in &deltas.platforms {
        let as_diffs = report.layers.iter().filter(|layer| layer.is_diff).count();
        let (changed, all) = (report.layers.len(), report.layers.len() + report.reused);
        let mut layers = format!("{changed} of {all} changed, {as_diffs} as differences");
        match report.pushed {
            true => {}
            false if dry_run => layers.push_str("; not pushed (--dry-run)"),
            false if changed == 0 => layers.push_str("; nothing to push"),
            false => layers.push_str("; not pushed: it would save less than a tenth"),
        }
        rows.push(vec![
            sanitize_line(&report.platform),
            format_bytes(report.bytes),
            format_bytes(report.whole),
            layers,
        ]);
    }
    let mut text = with_text(&rows, screen.width);
    let files = deltas.platforms.iter().flat_map(|report| {
        let layers = report.layers.iter().filter(|layer| layer.is_diff);
        layers.flat_map(|layer| &layer.unshrunk).map(|file| (report.platform.as_str(), file))
    });
    let mut files: Vec<_> = files.filter(|(_, file)| file.sent >= MIN_ROW).collect();
    files.sort_by_key(|(_, file)| std::cmp::Reverse(file.sent));
    if files.is_empty() {
        return text;
    }
    let mut rows = vec![["SENT", "OF", "PLATFORM", "FILE"].map(str::to_owned).to_vec()];
    for (platform, file) in files.iter().take(FILES) {
        let name = format!("{} ({})", sanitize_line(&file.path), file.reason);
        rows.push(vec![format_bytes(file.sent), format_bytes(file.size), sanitize_line(platform), name]);
    }
    text.push_str("\nThe files that take most of it, roughly:\n");
    text.push_str(&with_text(&rows, screen.width));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(bytes: u64, pushed: bool) -> PlatformReport {
        let file = |path: &str, sent, cause| {
            FileReport::from(Unshrunk { path: path.to_owned(), size: 9 << 20, sent, cause })
        };
        let layer = LayerReport {
            layer: "sha256:d".to_owned(),
            bytes,
            whole: 77 << 20,
            uncompressed: 302 << 20,
            is_diff: true,
            unshrunk: vec![
                file("app/lib/\u{1b}[2Knumpy.so", 2 << 20, Cause::Changed),
                file("app/assets.zip", 3 << 20, Cause::Unlike),
                file("app/small", 100, Cause::New),
            ],
        };
        PlatformReport {
            platform: "linux/amd64".to_owned(),
            delta: "sha256:a".to_owned(),
            source: "sha256:b".to_owned(),
            target: "sha256:c".to_owned(),
            bytes,
            whole: 77 << 20,
            reused: 4,
            layers: vec![layer],
            pushed,
        }
    }

    fn deltas(report: PlatformReport) -> DeltaReport {
        DeltaReport { old: "web:v1".to_owned(), new: "web:v2".to_owned(), platforms: vec![report] }
    }

    #[test]
    fn the_table_shows_what_was_saved() {
        let text = render(&deltas(report(7 << 20, true)), false, Screen::plain(160));
        assert_eq!(
            text,
            "\
PLATFORM      DELTA      INSTEAD OF   LAYERS
linux/amd64   7.00 MiB   77.00 MiB    1 of 5 changed, 1 as differences

The files that take most of it, roughly:
SENT       OF         PLATFORM      FILE
3.00 MiB   9.00 MiB   linux/amd64   app/assets.zip (nothing in common with the old file: compressed, or built by another compiler)
2.00 MiB   9.00 MiB   linux/amd64   app/lib/\u{fffd}[2Knumpy.so (changed)
"
        );
        let narrow = render(&deltas(report(7 << 20, true)), false, Screen::plain(80));
        assert!(narrow.lines().all(|line| line.chars().count() <= 80), "{narrow}");
    }

    #[test]
    fn a_delta_that_saves_little_stays_here() {
        let poor = report(76 << 20, false);
        assert!(!poor.is_worth_it() && report(7 << 20, false).is_worth_it());
        let text = render(&deltas(poor.clone()), false, Screen::plain(160));
        assert!(text.contains("not pushed: it would save less than a tenth"), "{text}");
        assert!(render(&deltas(poor), true, Screen::plain(160)).contains("(--dry-run)"));
    }
}
