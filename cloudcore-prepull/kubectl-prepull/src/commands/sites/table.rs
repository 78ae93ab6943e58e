//! The tables of sites and of the downloads of one site.

use jiff::Timestamp;
use prepull_api::edges::sites::{SiteActivity, SiteDownload, SiteList};
use prepull_program::table::align_columns;

use crate::amounts::{format_bytes, format_duration, part_of, seconds_between};
use crate::screen::{Screen, Tone, sanitize_line, wrap};
use crate::table::{GAP, with_text};

const COLUMNS: [&str; 11] = [
    "SITE", "NODES", "LAYERS", "WAITING", "CARRIERS", "UPLINK", "SHARED", "LOST", "CARRIED", "REFUSED",
    "DELISTED",
];
/// Columns on a narrow screen: the first ones.
const NARROW: usize = 8;
/// Width of a screen that has room for all columns.
const ROOM: usize = 120;
/// Characters of a digest that are shown, as container tools do.
const SHORT_DIGEST: usize = 12;

pub(super) fn render(
    list: &SiteList,
    with_downloads: bool,
    screen: Screen,
    is_wide: bool,
    now: Timestamp,
) -> String {
    if list.items.is_empty() {
        let since = format_duration(seconds_between(list.known_since.0, now));
        let text = format!(
            "No site fits: the list has sites with layers shared lately. The leader has led for {since}, and the site \
             of a Node is its label {}.",
            sanitize_line(&list.site_label)
        );
        return format!("{}\n", wrap(&text, screen.width.unwrap_or(usize::MAX)).join("\n"));
    }
    let columns =
        if is_wide || screen.width.is_none_or(|width| width >= ROOM) { COLUMNS.len() } else { NARROW };
    let mut rows = vec![COLUMNS[..columns].iter().map(|title| (*title).to_owned()).collect::<Vec<_>>()];
    rows.extend(list.items.iter().map(|site| cells(site)[..columns].to_vec()));
    let mut text = with_bold_head(&align_columns(&rows, GAP), screen);
    for site in list.items.iter().filter(|_| with_downloads) {
        text.push('\n');
        text.push_str(&downloads(site, screen, now));
    }
    text
}

/// The text with a bold head.
fn with_bold_head(table: &str, screen: Screen) -> String {
    let (head, rest) = table.split_once('\n').unwrap_or((table, ""));
    format!("{}\n{rest}", screen.paint.with_tone(Tone::Bold, head))
}

fn cells(site: &SiteActivity) -> [String; COLUMNS.len()] {
    [
        sanitize_line(&site.name),
        site.nodes.to_string(),
        site.layers.to_string(),
        site.waiting.to_string(),
        site.carriers.to_string(),
        format!("{}/s", format_bytes(site.uplink_bytes_per_second)),
        format_bytes(site.bytes_shared),
        site.leases_lost.to_string(),
        format_bytes(site.bytes_carried),
        site.claims_refused.to_string(),
        site.holders_delisted.to_string(),
    ]
}

fn downloads(site: &SiteActivity, screen: Screen, now: Timestamp) -> String {
    if site.downloads.is_empty() {
        return "Nothing is downloaded over its uplink now.\n".to_owned();
    }
    let row = |download: &SiteDownload| {
        let digest = download.digest.trim_start_matches("sha256:").chars().take(SHORT_DIGEST);
        vec![
            sanitize_line(download.node.as_str()),
            sanitize_line(&digest.collect::<String>()),
            part_of(download.done, download.size),
            format!("{}/s", format_bytes(download.bytes_per_second)),
            format_duration(seconds_between(download.since.0, now)),
            download
                .alone
                .as_deref()
                .map_or_else(|| "for its site".to_owned(), |why| format!("alone: {}", sanitize_line(why))),
        ]
    };
    let head = ["NODE", "LAYER", "DONE", "RATE", "SINCE", "WHY"].map(str::to_owned).to_vec();
    let rows: Vec<_> = std::iter::once(head).chain(site.downloads.iter().map(row)).collect();
    with_bold_head(&with_text(&rows, screen.width), screen)
}
