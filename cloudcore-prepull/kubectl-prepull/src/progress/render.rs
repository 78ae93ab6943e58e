//! The text of a view, by the width of the screen.

use prepull_api::crd::status::JobPhase;
use prepull_program::table::align_columns;

use super::tally::fraction;
use super::view::{Alike, Failures, JobView};
use crate::amounts::{format_bytes, format_count, format_duration, format_names, part_of};
use crate::screen::{Paint, Screen, Tone, truncate_text, wrap};

/// Columns of the names of the lines.
const LABEL: usize = 10;
/// Longest bar, in columns.
const LONGEST_BAR: usize = 40;
/// The width where there is no terminal, so that the bars have one.
const USUAL_WIDTH: usize = 100;
/// Groups of failures, of waiting and of skipped nodes that are shown.
const GROUPS: usize = 5;

/// The text. `wide`: with the nodes at work.
pub(crate) fn render_view(view: &JobView, screen: Screen, wide: bool) -> String {
    let page = TextLayout {
        paint: screen.paint,
        width: screen.width.unwrap_or(USUAL_WIDTH),
        is_cut: screen.width.is_some(),
    };
    let mut lines = vec![page.title(view)];
    if !view.reason.is_empty() {
        lines.extend(page.indented(&view.reason, 2));
    }
    lines.push(String::new());
    lines.extend(page.images(view));
    lines.extend(page.nodes(view));
    lines.extend(page.download(view));
    lines.extend(page.parts(view));
    if let Some(wave) = &view.wave {
        let next =
            wave.paused_seconds.map(|left| format!("; the next one begins in {}", format_duration(left)));
        let text = format!(
            "{} of {}, up to {}{}",
            wave.number,
            wave.of,
            format_count(wave.nodes.into(), "node"),
            next.unwrap_or_default()
        );
        lines.extend(page.labelled("wave", &text));
    }
    if wide && !view.at_work.is_empty() {
        lines.push(String::new());
        lines.extend(page.at_work(view));
    }
    if !view.failures.is_empty() {
        lines.push(String::new());
        lines.extend(page.failures(&view.failures));
    }
    let waiting = if view.is_over { "not started" } else { "waiting" };
    let asking = "on which pods may not start offline";
    for (what, tone, groups) in [
        (waiting, Tone::Wait, &view.waiting),
        (asking, Tone::Wait, &view.asking),
        ("skipped", Tone::Dim, &view.skipped),
    ] {
        if !groups.is_empty() {
            lines.push(String::new());
            lines.extend(page.groups(what, tone, groups));
        }
    }
    if let Some(next) = next_step(view) {
        lines.push(String::new());
        lines.extend(page.indented(&next, 0));
    }
    let lines: Vec<_> = lines.iter().map(|line| line.trim_end()).collect();
    format!("{}\n", lines.join("\n"))
}

/// What the person may want to do now.
fn next_step(view: &JobView) -> Option<String> {
    if let Some(namespace) = &view.namespace {
        return next_step_of_kruise(view, namespace);
    }
    let job = &view.job;
    let has_started = view.nodes.desired > 0;
    let has_failures = !view.failures.is_empty();
    match (view.is_over, has_failures) {
        (true, true) if view.cancelled => Some(format!("kubectl prepull failures {job} lists the nodes")),
        (true, false) if view.cancelled => None,
        (true, true) => Some(format!(
            "kubectl prepull failures {job} lists the nodes; kubectl prepull retry {job} tries them again"
        )),
        (true, false) if view.phase == JobPhase::Failure && !has_started => {
            Some(format!("kubectl edit ippj {job}: it is looked at again after each edit"))
        }
        // Its time was over.
        (true, false) if view.phase == JobPhase::Failure => {
            Some(format!("kubectl prepull retry {job} takes it up again"))
        }
        (false, _) if view.suspended => Some(format!("kubectl prepull resume {job} lets it go on")),
        (false, true) => Some(format!("kubectl prepull failures {job} lists the nodes")),
        _ => None,
    }
}

/// The same for a job of OpenKruise, which kubectl changes.
fn next_step_of_kruise(view: &JobView, namespace: &str) -> Option<String> {
    let job = &view.job;
    if !view.failures.is_empty() {
        return Some(format!("kubectl prepull failures {} lists the nodes", view.command_name()));
    }
    match view.phase {
        JobPhase::Init if !view.reason.is_empty() => {
            Some(format!("kubectl -n {namespace} edit {job}: it is looked at again after each edit"))
        }
        JobPhase::InProgress if view.suspended => {
            Some(format!("kubectl -n {namespace} edit {job}: parallelism 0 pauses it"))
        }
        _ => None,
    }
}

/// The screen, with the ways in which lines are laid out on it.
struct TextLayout {
    paint: Paint,
    width: usize,
    /// Whether lines are cut and wrapped at the width.
    is_cut: bool,
}

impl TextLayout {
    fn title(&self, view: &JobView) -> String {
        let (phase, tone) = phase_of(view);
        let word = if view.is_over { "after" } else { "for" };
        let time =
            view.seconds.map(|seconds| format!("  {word} {}", format_duration(seconds))).unwrap_or_default();
        let round = if view.round == 0 { String::new() } else { format!("  retry {}", view.round) };
        format!(
            "{}  {}{time}{round}",
            self.paint.with_tone(Tone::Bold, &view.command_name()),
            self.paint.with_tone(tone, phase)
        )
    }

    fn images(&self, view: &JobView) -> Vec<String> {
        let Some(first) = view.images.first() else { return Vec::new() };
        let more = match view.images.len() - 1 {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let room = self.room().saturating_sub(more.len());
        let first = if self.is_cut { truncate_text(first, room) } else { first.clone() };
        let label = if view.removal.is_some() { "removes" } else { "images" };
        vec![format!("{label:LABEL$}{first}{more}")]
    }

    fn nodes(&self, view: &JobView) -> Vec<String> {
        let nodes = &view.nodes;
        if nodes.desired == 0 {
            return Vec::new();
        }
        let left = view
            .seconds_left
            .map(|left| format!(", about {} left", format_duration(left)))
            .unwrap_or_default();
        let text = format!("{} of {}{left}", view.ended_nodes(), nodes.desired);
        let tone = if nodes.failure + nodes.unknown > 0 { Tone::Wait } else { Tone::Good };
        let mut lines = vec![self.bar(&format!("{}s", view.noun()), view.done, tone, &text)];
        let counts = [
            (nodes.successful, "successful", Tone::Good),
            (nodes.failure, "failed", Tone::Bad),
            (nodes.unknown, "unknown", Tone::Bad),
            (nodes.in_progress, "at work", Tone::Bold),
            (nodes.pending, if view.is_over { "not started" } else { "waiting" }, Tone::Wait),
            (nodes.skipped, "skipped", Tone::Dim),
        ];
        let shown = counts.iter().filter(|(nodes, ..)| *nodes > 0);
        let shown: Vec<_> = shown
            .map(|(nodes, what, tone)| self.paint.with_tone(*tone, &format!("{nodes} {what}")))
            .collect();
        lines.push(format!("{:LABEL$}{}", "", shown.join(", ")));
        lines
    }

    fn download(&self, view: &JobView) -> Vec<String> {
        if let Some(removal) = view.removal.as_ref().filter(|_| !view.is_over) {
            return self.labelled("so far", &removal.sentence(view.dry_run));
        }
        if view.bytes.total == 0 {
            return Vec::new();
        }
        let rate =
            view.bytes_per_second.map(|rate| format!(", {}/s", format_bytes(rate))).unwrap_or_default();
        let text = format!("{}{rate}", part_of(view.bytes.done, view.bytes.total));
        let mut lines =
            vec![self.bar("download", fraction(view.bytes.done, view.bytes.total), Tone::Good, &text)];
        if view.delta_saved_bytes > 0 {
            let saved = part_of(view.delta_saved_bytes, view.bytes.total);
            lines.push(format!("{:LABEL$}deltas saved {saved}", ""));
        }
        lines
    }

    fn parts(&self, view: &JobView) -> Vec<String> {
        if view.parts.is_empty() {
            return Vec::new();
        }
        let mut rows = vec![["PHASE", "NODES", "FAILED", "IMAGE"].map(str::to_owned)];
        rows.extend(view.parts.iter().map(|part| {
            let nodes = &part.nodes;
            let ended = nodes.successful + nodes.failure;
            let failed = if nodes.failure == 0 { "-".to_owned() } else { nodes.failure.to_string() };
            [
                name_of(part.phase).to_owned(),
                format!("{ended} of {}", nodes.desired),
                failed,
                part.image.clone(),
            ]
        }));
        let table = align_columns(&rows, 3);
        let lines = table
            .lines()
            .map(|line| if self.is_cut { truncate_text(line, self.width) } else { line.to_owned() });
        std::iter::once(String::new()).chain(lines).collect()
    }

    /// A line with a bar, which takes what the text leaves.
    fn bar(&self, label: &str, part: f64, tone: Tone, text: &str) -> String {
        let length = self.room().saturating_sub(text.chars().count() + 2).clamp(8, LONGEST_BAR);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
        // columns
        let full = ((length as f64 * part) as usize).min(length);
        let bar = format!(
            "{}{}",
            self.paint.with_tone(tone, &"━".repeat(full)),
            self.paint.with_tone(Tone::Dim, &"─".repeat(length - full))
        );
        format!("{label:LABEL$}{bar}  {text}")
    }

    fn at_work(&self, view: &JobView) -> Vec<String> {
        let mut rows = vec![["AT WORK", "DOWNLOADED", ""].map(str::to_owned)];
        rows.extend(view.at_work.iter().map(|node| {
            let bytes = if node.bytes.total == 0 {
                "-".to_owned()
            } else {
                part_of(node.bytes.done, node.bytes.total)
            };
            [node.node.clone(), bytes, node.reason.clone()]
        }));
        let table = align_columns(&rows, 3);
        let mut lines: Vec<_> = table
            .lines()
            .map(|line| if self.is_cut { truncate_text(line, self.width) } else { line.to_owned() })
            .collect();
        let more = u64::from(view.nodes.in_progress).saturating_sub(view.at_work.len() as u64);
        if more > 0 {
            lines.push(format!("and {more} more"));
        }
        lines
    }

    fn failures(&self, failures: &[Failures]) -> Vec<String> {
        let mut rows = vec![["FAILED", "NODES", "SUCH AS"].map(str::to_owned)];
        rows.extend(failures.iter().take(GROUPS).map(|failures| {
            [
                failures.code.to_string(),
                failures.nodes.to_string(),
                format_names(&failures.examples, failures.nodes),
            ]
        }));
        let table = align_columns(&rows, 3);
        let mut shown = table.lines();
        let mut lines: Vec<_> =
            shown.next().map(|title| self.paint.with_tone(Tone::Bad, title)).into_iter().collect();
        for (line, failures) in shown.zip(failures) {
            lines.push(if self.is_cut { truncate_text(line, self.width) } else { line.to_owned() });
            let others = if failures.nodes_with_reason < failures.nodes {
                format!(" (on {} of them)", failures.nodes_with_reason)
            } else {
                String::new()
            };
            if !failures.reason.is_empty() {
                lines.extend(self.indented(&format!("{}{others}", failures.reason), 2));
            }
        }
        lines.extend(more_groups(failures.len()));
        lines
    }

    fn groups(&self, what: &str, tone: Tone, groups: &[Alike]) -> Vec<String> {
        let mut lines = Vec::new();
        for group in groups.iter().take(GROUPS) {
            let nodes = format!(
                "{} {what}: {}",
                format_count(group.nodes, "node"),
                format_names(&group.examples, group.nodes)
            );
            lines.push(
                self.paint
                    .with_tone(tone, &if self.is_cut { truncate_text(&nodes, self.width) } else { nodes }),
            );
            lines.extend(self.indented(&group.reason, 2));
        }
        lines.extend(more_groups(groups.len()));
        lines
    }

    fn labelled(&self, label: &str, text: &str) -> Vec<String> {
        let wrapped = if self.is_cut { wrap(text, self.room()) } else { vec![text.to_owned()] };
        let label = |index| if index == 0 { label } else { "" };
        wrapped.iter().enumerate().map(|(index, line)| format!("{:LABEL$}{line}", label(index))).collect()
    }

    fn indented(&self, text: &str, columns: usize) -> Vec<String> {
        let wrapped = if self.is_cut { wrap(text, self.width - columns) } else { vec![text.to_owned()] };
        wrapped.iter().map(|line| format!("{:columns$}{line}", "")).collect()
    }

    fn room(&self) -> usize {
        self.width - LABEL
    }
}

/// The state of a job in one word or a few, the same everywhere, and its colour.
pub(crate) fn phase_of(view: &JobView) -> (&'static str, Tone) {
    match view.phase {
        _ if view.refused => ("Refused", Tone::Bad),
        _ if view.is_over && view.cancelled => ("Cancelled", Tone::Wait),
        _ if !view.is_over && view.paused => ("Paused", Tone::Wait),
        _ if !view.is_over && view.suspended => ("Suspended", Tone::Wait),
        JobPhase::Completed if view.nodes.failure + view.nodes.unknown > 0 => {
            ("Completed with failures", Tone::Wait)
        }
        JobPhase::Completed => ("Completed", Tone::Good),
        JobPhase::Failure => ("Failure", Tone::Bad),
        JobPhase::InProgress => ("InProgress", Tone::Bold),
        JobPhase::Init => ("Init", Tone::Wait),
    }
}

pub(crate) fn name_of(phase: JobPhase) -> &'static str {
    match phase {
        JobPhase::Init => "Init",
        JobPhase::InProgress => "InProgress",
        JobPhase::Completed => "Completed",
        JobPhase::Failure => "Failure",
    }
}

fn more_groups(groups: usize) -> Option<String> {
    let more = groups.saturating_sub(GROUPS);
    (more > 0).then(|| format!("and {more} more reasons"))
}
