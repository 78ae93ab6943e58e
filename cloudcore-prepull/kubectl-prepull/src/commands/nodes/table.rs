//! The table of the edges, by the width of the screen.

use std::fmt::Write;

use jiff::Timestamp;
use prepull_api::edges::{EdgeList, ListedEdge};
use prepull_program::table::align_columns;

use crate::amounts::{format_bytes, format_duration, part_of, seconds_between};
use crate::screen::{Screen, Tone, sanitize_line, wrap};
use crate::table::GAP;

/// The columns, and which are left out first where there is no room: those with the greatest number.
const COLUMNS: [(&str, u8); 12] = [
    ("NAME", 0),
    ("CONNECTED", 0),
    ("READY", WIDE),
    ("VERSION", 5),
    ("RUNTIME", 7),
    ("OS", WIDE),
    ("ARCH", 6),
    ("SITE", 3),
    ("FREE", 1),
    ("USED", WIDE),
    ("TASKS", 4),
    ("CERTIFICATE", 2),
];
/// Only with `-o wide`.
const WIDE: u8 = 9;

pub(super) struct Table {
    now: Timestamp,
    rows: Vec<(Tone, [String; COLUMNS.len()])>,
    sums: Option<Sums>,
    /// Whether it is not known of some edge when it was last connected.
    has_unknown: bool,
}

struct Sums {
    total: usize,
    connected: usize,
    known_since: Timestamp,
}

impl Table {
    pub(super) fn new(now: Timestamp) -> Self {
        Self { now, rows: Vec::new(), sums: None, has_unknown: false }
    }

    pub(super) fn add(&mut self, page: &EdgeList) {
        let now = self.now;
        self.rows.extend(page.items.iter().map(|edge| (tone(edge, now), cells(edge, now))));
        let EdgeList { total, connected, .. } = *page;
        self.has_unknown |= page.items.iter().any(|edge| !edge.connected && edge.last_seen.is_none());
        self.sums = Some(Sums { total, connected, known_since: page.known_since.0 });
    }

    /// The text. `wide`: with all columns, however narrow the screen is.
    pub(super) fn render(&self, screen: Screen, wide: bool) -> String {
        let mut lines = Vec::new();
        if !self.rows.is_empty() {
            let columns = self.columns(screen.width.filter(|_| !wide), wide);
            let row =
                |cells: &[String]| columns.iter().map(|&column| cells[column].clone()).collect::<Vec<_>>();
            let mut rows = vec![row(&COLUMNS.map(|(title, _)| title.to_owned()))];
            rows.extend(self.rows.iter().map(|(_, cells)| row(cells)));
            let tones = std::iter::once(Tone::Bold).chain(self.rows.iter().map(|(tone, _)| *tone));
            let table = align_columns(&rows, GAP);
            lines.extend(table.lines().zip(tones).map(|(line, tone)| match tone {
                Tone::Good => line.to_owned(),
                tone => screen.paint.with_tone(tone, line),
            }));
            lines.push(String::new());
        }
        lines.extend(wrap(&self.summary(), screen.width.unwrap_or(usize::MAX)));
        format!("{}\n", lines.join("\n"))
    }

    fn columns(&self, width: Option<usize>, wide: bool) -> Vec<usize> {
        let widest = |column: usize| {
            let cells = self.rows.iter().map(|(_, cells)| cells[column].chars().count());
            cells.chain([COLUMNS[column].0.len()]).max().unwrap_or(0)
        };
        let mut columns: Vec<usize> = (0..COLUMNS.len()).filter(|&c| wide || COLUMNS[c].1 < WIDE).collect();
        let Some(width) = width else { return columns };
        while columns.iter().map(|&column| widest(column) + GAP).sum::<usize>() > width + GAP {
            // The last one of those that matter least.
            let least = columns.iter().enumerate().max_by_key(|(_, column)| COLUMNS[**column].1);
            match least {
                Some((at, &column)) if COLUMNS[column].1 > 0 => columns.remove(at),
                _ => break,
            };
        }
        columns
    }

    fn summary(&self) -> String {
        let Some(Sums { total, connected, known_since }) = &self.sums else { return String::new() };
        if *total == 0 {
            return "No edge fits: edges are Nodes with the label node-role.kubernetes.io/edge.".to_owned();
        }
        let noun = if *total == 1 { "edge" } else { "edges" };
        let mut text = format!("{connected} of {total} {noun} connected.");
        if self.has_unknown {
            let since = format_duration(seconds_between(*known_since, self.now));
            // Writing to a String does not fail.
            let _ = write!(text, " Who was connected before is not known: the leader has led for {since}.");
        }
        text
    }
}

fn tone(edge: &ListedEdge, now: Timestamp) -> Tone {
    let is_expired = edge.certificate_until.as_ref().is_some_and(|until| until.0 <= now);
    match edge {
        _ if edge.revoked || is_expired => Tone::Bad,
        ListedEdge { connected: false, .. } => Tone::Wait,
        _ => Tone::Good,
    }
}

fn cells(edge: &ListedEdge, now: Timestamp) -> [String; COLUMNS.len()] {
    let ago = |time: &Timestamp| format_duration(seconds_between(*time, now));
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let connected = match (edge.connected, &edge.connected_since, &edge.last_seen) {
        (true, Some(since), _) => ago(&since.0),
        (true, None, _) => "yes".to_owned(),
        (false, _, Some(seen)) => format!("no, {} ago", ago(&seen.0)),
        (false, ..) => "no".to_owned(),
    };
    let certificate = match &edge.certificate_until {
        _ if edge.revoked => Some("revoked".to_owned()),
        Some(until) if until.0 <= now => Some(format!("ended {} ago", ago(&until.0))),
        Some(until) => Some(format_duration(seconds_between(now, until.0))),
        None => None,
    };
    let tasks = edge.tasks.map(|tasks| match edge.max_tasks {
        Some(most) => format!("{tasks}/{most}"),
        None => tasks.to_string(),
    });
    let used = |free: u64, all: u64| part_of(all.saturating_sub(free), all);
    [
        edge.name.to_string(),
        connected,
        if edge.ready { "yes" } else { "no" }.to_owned(),
        or_dash(edge.version.as_deref().map(sanitize_line)),
        or_dash(edge.runtime.as_deref().map(sanitize_line)),
        or_dash(edge.os.as_deref().map(sanitize_line)),
        or_dash(edge.arch.as_deref().map(sanitize_line)),
        or_dash(edge.site.as_deref().map(sanitize_line)),
        or_dash(edge.disk.as_ref().map(|disk| format_bytes(disk.available))),
        or_dash(edge.disk.as_ref().map(|disk| {
            format!("{} {}", used(disk.available, disk.capacity), sanitize_line(&disk.mountpoint))
        })),
        or_dash(tasks),
        or_dash(certificate),
    ]
}
