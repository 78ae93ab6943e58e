//! The plan as a table for people.

use std::fmt::Write;
use std::time::Duration;

use super::download::lines;
use super::sites::SiteReport;
use super::sizes::NodeSize;
use super::{ImageReport, NodeReport, PlanReport, SkippedReport};
use humantime::format_duration;
use prepull_api::text::human_bytes;
use prepull_program::table::align_columns;

/// Renders one line per image for all nodes that pull the same, or per image and repository that the nodes remove; then
/// the skipped nodes, then the warnings.
pub(super) fn render(report: &PlanReport) -> String {
    let PlanReport { nodes, remove, sites, download, skipped, warnings } = report;
    let images = || nodes.iter().flat_map(|node| &node.images);
    let has_errors = images().any(|image| image.error.is_some() || image.size_error.is_some());
    let has_sizes = nodes.iter().any(|node| node.size.is_some());
    let mut header = vec!["NODES", "IMAGE", "PULL", "POLICY", "SECRETS"];
    let has_deltas = images().any(|image| image.size.is_some_and(|size| size.delta_bytes.is_some()));
    if has_sizes {
        header.extend(["DOWNLOAD", "UNPACKED"]);
    }
    if has_deltas {
        header.push("BY DELTA");
    }
    if has_errors {
        header.push("ERROR");
    }
    let mut rows = vec![header.into_iter().map(str::to_owned).collect::<Vec<_>>()];
    let groups = grouped(nodes.iter().map(|NodeReport { name, images, .. }| (name.as_str(), images)));
    for (images, names) in groups {
        for (line, ImageReport { image, pull, secrets, pull_policy, error, size, size_error }) in
            images.iter().enumerate()
        {
            let names = if line == 0 { listed(&names) } else { String::new() };
            let secrets = if secrets.is_empty() { "<none>".to_owned() } else { secrets.join(",") };
            let mut row = vec![names, image.clone(), pull.clone(), pull_policy.to_string(), secrets];
            if has_sizes {
                let sizes = size.map(|size| [size.download_bytes, size.unpacked_bytes].map(human_bytes));
                row.extend(sizes.unwrap_or_else(|| ["unknown", "unknown"].map(str::to_owned)));
            }
            if has_deltas {
                let bytes = size.and_then(|size| size.delta_bytes);
                row.push(bytes.map_or_else(|| "-".to_owned(), human_bytes));
            }
            if has_errors {
                row.push(error.as_ref().or(size_error.as_ref()).cloned().unwrap_or_default());
            }
            rows.push(row);
        }
    }
    if let Some(remove) = remove {
        let names: Vec<&str> = nodes.iter().map(|node| node.name.as_str()).collect();
        rows = remove.rows(listed(&names));
    }
    let mut text = align_columns(&rows, 3);
    if remove.as_ref().is_some_and(|remove| remove.dry_run) {
        text.push_str("\ndry run: nothing is removed, and the status has what would be\n");
    }
    if has_sizes {
        text.push('\n');
        text.push_str(&align_columns(&node_rows(nodes), 3));
    }
    if !sites.is_empty() {
        text.push('\n');
        text.push_str(&align_columns(&site_rows(sites), 3));
    }
    if !skipped.is_empty() {
        let mut rows = vec![vec!["SKIPPED NODES".to_owned(), "REASON".to_owned()]];
        let groups = grouped(skipped.iter().map(|SkippedReport { name, reason }| (name.as_str(), reason)));
        rows.extend(groups.into_iter().map(|(reason, names)| vec![listed(&names), reason.clone()]));
        text.push('\n');
        text.push_str(&align_columns(&rows, 3));
    }
    let download = download.iter().flat_map(lines).collect::<Vec<_>>();
    if !download.is_empty() {
        text.push('\n');
    }
    for line in download {
        // Writing to a String does not fail.
        let _ = writeln!(text, "{line}");
    }
    if !warnings.is_empty() {
        text.push('\n');
    }
    for warning in warnings {
        // Writing to a String does not fail.
        let _ = writeln!(text, "warning: {warning}");
    }
    text
}

/// What all images of a node take together: for each node, and for all.
fn node_rows(nodes: &[NodeReport]) -> Vec<Vec<String>> {
    let has_deltas =
        nodes.iter().any(|node| node.size.as_ref().is_some_and(|size| size.delta_bytes.is_some()));
    let mut rows = vec![["NODES", "DOWNLOAD OF EACH", "DISK OF EACH"].map(str::to_owned).to_vec()];
    if has_deltas {
        rows[0].push("BY DELTAS".to_owned());
    }
    let sized =
        || nodes.iter().filter_map(|NodeReport { name, size, .. }| Some((name.as_str(), size.as_ref()?)));
    let row = |names: String, size: &NodeSize, disk: Option<u64>| {
        let shown = |bytes| human_of(bytes, size.unknown_images);
        let mut row = vec![names, shown(size.download_bytes), disk.map(shown).unwrap_or_default()];
        if has_deltas {
            row.push(shown(size.delta_bytes.unwrap_or(size.download_bytes)));
        }
        row
    };
    let groups = grouped(sized());
    rows.extend(groups.into_iter().map(|(size, names)| row(listed(&names), size, Some(size.disk_bytes))));
    if nodes.len() > 1 {
        let mut all = NodeSize::default();
        for (_, size) in sized() {
            all.download_bytes = all.download_bytes.saturating_add(size.download_bytes);
            let by_deltas = size.delta_bytes.unwrap_or(size.download_bytes);
            all.delta_bytes = Some(all.delta_bytes.unwrap_or(0).saturating_add(by_deltas));
            all.unknown_images += size.unknown_images;
        }
        rows.push(row(format!("all {} together", nodes.len()), &all, None));
    }
    rows
}

/// What the uplink of each site carries, beside what it would carry otherwise.
fn site_rows(sites: &[SiteReport]) -> Vec<Vec<String>> {
    let has_sizes = sites.iter().any(|site| site.size.is_some());
    let has_times = sites.iter().any(|site| site.least_seconds.is_some());
    let shared = sites.iter().any(|site| site.shared);
    let mut header = vec!["SITE", "NODES"];
    if has_sizes {
        header.extend(["UPLINK", if shared { "EACH NODE FOR ITSELF" } else { "IF SHARED" }]);
    }
    if has_times {
        header.push("AT LEAST");
    }
    let row = |SiteReport { site, nodes, shared, size, least_seconds }: &SiteReport| {
        let names: Vec<&str> = nodes.iter().map(String::as_str).collect();
        let mut row = vec![site.clone(), listed(&names)];
        if let Some(size) = size {
            let bytes =
                [size.shared_bytes, size.unshared_bytes].map(|bytes| human_of(bytes, size.unknown_images));
            let [with, without] = bytes;
            row.extend(if *shared { [with, without] } else { [without, with] });
        }
        row.extend(least_seconds.map(|seconds| format_duration(Duration::from_secs(seconds)).to_string()));
        row
    };
    let header = header.into_iter().map(str::to_owned).collect();
    [header].into_iter().chain(sites.iter().map(row)).collect()
}

/// Bytes of images; `unknown_images` of them have no known size.
fn human_of(bytes: u64, unknown_images: usize) -> String {
    match (unknown_images, bytes) {
        (0, _) => human_bytes(bytes),
        (_, 0) => "unknown".to_owned(),
        _ => format!("at least {}", human_bytes(bytes)),
    }
}

/// The names that have the same value, in the order in which each value comes first.
fn grouped<'a, T: PartialEq>(nodes: impl Iterator<Item = (&'a str, &'a T)>) -> Vec<(&'a T, Vec<&'a str>)> {
    let mut groups: Vec<(&T, Vec<&str>)> = Vec::new();
    for (name, value) in nodes {
        match groups.iter_mut().find(|(of_group, _)| *of_group == value) {
            Some((_, names)) => names.push(name),
            None => groups.push((value, vec![name])),
        }
    }
    groups
}

/// The names of nodes, as many as a person reads.
fn listed(names: &[&str]) -> String {
    const LISTED: usize = 3;
    match names.len() {
        0..=LISTED => names.join(","),
        count => format!("{} and {} more", names[..LISTED].join(","), count - LISTED),
    }
}
