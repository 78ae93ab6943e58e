//! The tables of rates: sites, then nodes.

use prepull_program::table::align_columns;

use super::{NodeRate, Rates, SiteRate};
use crate::amounts::{format_bytes, format_duration};
use crate::screen::{Screen, Tone, sanitize_line, wrap};
use crate::table::{GAP, with_text};

/// Nodes that are listed without -o wide: a screen has about as many lines.
const LISTED: usize = 15;

pub(super) fn render(rates: &Rates, screen: Screen, is_wide: bool) -> String {
    let below = |text: &str| wrap(text, screen.width.unwrap_or(usize::MAX)).join("\n");
    let Some(oldest) = rates.nodes.iter().map(|rate| rate.age_seconds).max() else {
        return format!("{}\n", below("Nothing is downloaded now, as far as the agents have reported."));
    };
    let head = |titles: &[&str]| titles.iter().map(|title| (*title).to_owned()).collect::<Vec<_>>();
    let mut sites = vec![head(&["SITE", "UPLINK", "NODES", "JOBS"])];
    sites.extend(rates.sites.iter().map(site_cells));
    let listed = if is_wide { rates.nodes.len() } else { LISTED.min(rates.nodes.len()) };
    let mut nodes = vec![head(&["NODE", "SITE", "RATE", "JOB", "REPORTED"])];
    nodes.extend(rates.nodes.iter().take(listed).map(node_cells));
    let mut lines = vec![
        with_bold_head(&with_text(&sites, screen.width), screen),
        with_bold_head(&align_columns(&nodes, GAP), screen),
    ];
    if listed < rates.nodes.len() {
        lines.push(format!("{} more with -o wide\n", rates.nodes.len() - listed));
    }
    let note = format!(
        "No figure is older than {}. kubectl prepull set JOB rate=512Ki makes a job slower, kubectl prepull pause JOB stops its \
         downloads.",
        format_duration(oldest)
    );
    lines.push(format!("{}\n", below(&note)));
    lines.join("\n")
}

/// The text with a bold head.
fn with_bold_head(table: &str, screen: Screen) -> String {
    let (head, rest) = table.split_once('\n').unwrap_or((table, ""));
    format!("{}\n{rest}", screen.paint.with_tone(Tone::Bold, head))
}

fn site_cells(row: &SiteRate) -> Vec<String> {
    let jobs: Vec<_> = row.jobs.iter().map(|job| sanitize_line(job)).collect();
    vec![
        row.site.as_deref().map_or_else(|| "-".to_owned(), sanitize_line),
        format!("{}/s", format_bytes(row.uplink_bytes_per_second)),
        row.nodes.to_string(),
        jobs.join(", "),
    ]
}

fn node_cells(row: &NodeRate) -> Vec<String> {
    let from = if row.shared { ", with neighbours" } else { "" };
    vec![
        sanitize_line(row.node.as_str()),
        row.site.as_deref().map_or_else(|| "-".to_owned(), sanitize_line),
        format!("{}/s{from}", format_bytes(row.bytes_per_second)),
        sanitize_line(&row.job),
        format!("{} ago", format_duration(row.age_seconds)),
    ]
}
