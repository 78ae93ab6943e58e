//! Tables about a job that has ended.

use std::collections::BTreeMap;
use std::time::Duration;

use super::DemoTimes;
use super::story::{Story, align_columns, short_digest};

pub(super) fn print_times(story: &Story, times: &DemoTimes) {
    let DemoTimes { arrived, ended, phase } = times;
    story.print_blank_line();
    let arrived = arrived.map_or_else(|| "not seen".to_owned(), format_seconds);
    story.print_line(&format!("From the job in the API server to the first task on an edge: {arrived}"));
    story.print_line(&format!("From the job in the API server to {phase:?}: {}", format_seconds(*ended)));
}

/// Prints the images of a containerd.
pub(super) fn print_images(story: &Story, node: &str, images: &BTreeMap<String, String>) {
    let mut rows = Vec::new();
    for (number, (reference, digest)) in images.iter().enumerate() {
        let name = if number == 0 { node } else { "" };
        rows.push(vec![format!("{name:<6}"), reference.clone(), short_digest(digest).to_owned()]);
    }
    if rows.is_empty() {
        rows.push(vec![node.to_owned(), "nothing".to_owned()]);
    }
    for line in align_columns(&rows) {
        story.print_line(&line);
    }
}

/// Formats a duration in seconds.
fn format_seconds(duration: Duration) -> String {
    format!("{:.2} s", duration.as_secs_f64())
}
