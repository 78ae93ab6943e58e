//! Tables about a job that has ended.

use std::collections::BTreeMap;

use prepull_api::crd::status::{ImagePrePullJobStatus, Tristate};

use super::Times;
use super::live::seconds;
use super::story::{Story, megabytes, short_digest, table};

pub(super) fn print_times(story: &Story, times: &Times) {
    let Times { arrived, ended, phase } = times;
    story.blank();
    let arrived = arrived.map_or_else(|| "not seen".to_owned(), seconds);
    story.line(&format!("From the job in the API server to the first task on an edge: {arrived}"));
    story.line(&format!("From the job in the API server to {phase:?}: {}", seconds(*ended)));
}

/// Prints the status of a job, node by node and image by image.
pub(super) fn print_nodes(story: &Story, status: &ImagePrePullJobStatus) {
    story.blank();
    let heading = ["NODE", "PHASE", "PULLED IMAGE", "", "SIZE", "TRIES", "DIGEST"];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    let mut reasons = vec![""];
    for node in &status.node_status {
        for (number, image) in node.image_status.iter().enumerate() {
            let first = |text: String| if number == 0 { text } else { String::new() };
            let mark = match image.status {
                Tristate::True => "ok",
                Tristate::False => "failed",
                Tristate::Unknown => "unknown",
            };
            rows.push(vec![
                first(node.node_name.clone()),
                first(format!("{:?}", node.phase)),
                image.pulled_image.clone(),
                mark.to_owned(),
                image.bytes.map(|bytes| megabytes(bytes.total)).unwrap_or_default(),
                image.attempts.to_string(),
                image.digest.as_deref().map(short_digest).unwrap_or_default().to_owned(),
            ]);
            reasons.push(if image.status == Tristate::True { "" } else { &image.reason });
        }
    }
    for skipped in &status.skipped_nodes {
        rows.push(vec![skipped.node_name.clone(), "left out".to_owned(), skipped.reason.clone()]);
        reasons.push("");
    }
    for (line, reason) in table(&rows).iter().zip(reasons) {
        story.line(line);
        if !reason.is_empty() {
            story.line(&format!("   {reason}"));
        }
    }
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
    for line in table(&rows) {
        story.line(&line);
    }
}
