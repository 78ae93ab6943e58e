//! The plan as a table for people.

use std::fmt::Write;

use super::{ImageReport, NodeReport, Report, SkippedReport};

/// Renders one line per node and image, then the skipped nodes.
pub(super) fn render(report: &Report) -> String {
    let Report { nodes, skipped } = report;
    let has_errors = nodes.iter().flat_map(|node| &node.images).any(|image| image.error.is_some());
    let mut header = vec!["NODE", "IMAGE", "PULL", "POLICY", "SECRETS"];
    if has_errors {
        header.push("ERROR");
    }
    let mut rows = vec![header.into_iter().map(str::to_owned).collect::<Vec<_>>()];
    for NodeReport { name, images } in nodes {
        for ImageReport { image, pull, secrets, pull_policy, error } in images {
            let secrets = if secrets.is_empty() { "<none>".to_owned() } else { secrets.join(",") };
            let mut row = vec![name.clone(), image.clone(), pull.clone(), pull_policy.to_string(), secrets];
            if has_errors {
                row.push(error.clone().unwrap_or_default());
            }
            rows.push(row);
        }
    }
    let mut text = align(&rows);
    if !skipped.is_empty() {
        let mut rows = vec![vec!["SKIPPED NODE".to_owned(), "REASON".to_owned()]];
        rows.extend(skipped.iter().map(|SkippedReport { name, reason }| vec![name.clone(), reason.clone()]));
        text.push('\n');
        text.push_str(&align(&rows));
    }
    text
}

/// Aligns columns three spaces apart, as kubectl does, without trailing spaces.
fn align(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width =
        |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|c| c.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            // Writing to a String does not fail.
            let _ = write!(line, "{cell:<width$}   ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}
