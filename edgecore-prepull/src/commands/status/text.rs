//! The status as text for a person.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use humantime::{format_duration, parse_rfc3339};
use indicatif::HumanBytes;
use prepull_api::text::to_plain_line;
use prepull_api::wire::Filesystem;

use super::{BoxReport, IdentityStatus, Looked, RuntimeStatus};
use crate::settings::describe_settings;
use crate::status::{AgentStatus, CloudStatus, DownloadStatus, TaskStatus};
use crate::upgrade::{Program, TrialOutcome};

/// The log that has the reasons.
const LOG: &str = "journalctl -u edgecore-prepull shows the reason";
/// Longest text of another program in a line.
const LONGEST: usize = 300;

pub(super) fn render_report(report: &BoxReport, now: SystemTime) -> String {
    let BoxReport { identity, agent, upgrade, runtime, window, tasks } = report;
    let mut lines = vec![of_identity(identity, now)];
    match agent {
        Looked::Known(agent) => {
            let since = agent.since.as_deref().map(|since| format!(" for {}", time_since(since, now)));
            lines.push(format!(
                "✓ the agent {} runs{}",
                plain_line(&agent.version),
                since.unwrap_or_default()
            ));
            lines.push(of_cloud(&agent.cloud, now));
        }
        Looked::Error(error) => lines.push(format!(
            "✗ the agent: {}; systemctl status edgecore-prepull shows whether it runs, and {LOG}",
            plain_line(error)
        )),
    }
    if let Looked::Known(AgentStatus { settings, .. }) = agent
        && !settings.is_empty()
    {
        lines.push(format!("  the cloud has set: {}", plain_line(&describe_settings(settings))));
    }
    lines.extend(upgrade.as_ref().map(of_upgrade));
    lines.extend(of_runtime(runtime));
    lines.extend(window.as_ref().map(|waits| format!("! downloads: the node {}", plain_line(waits))));
    let tasks = match (agent, tasks) {
        (Looked::Known(agent), _) => agent.tasks.as_slice(),
        (_, Some(Looked::Known(tasks))) => tasks.as_slice(),
        (_, Some(Looked::Error(error))) => {
            lines.push(format!("! tasks are not known: {}", plain_line(error)));
            &[]
        }
        (Looked::Error(_), None) => &[],
    };
    if tasks.is_empty() && !matches!(report.tasks, Some(Looked::Error(_))) {
        lines.push("  no tasks".to_owned());
    }
    let mut text = lines.join("\n");
    text.push('\n');
    for task in tasks {
        of_task(task, &mut text);
    }
    text
}

fn of_identity(identity: &Looked<IdentityStatus>, now: SystemTime) -> String {
    match identity {
        Looked::Known(IdentityStatus { node, certificate_until, has_expired: false }) => format!(
            "✓ node {}: its certificate is good for {}",
            plain_line(node),
            parse_rfc3339(certificate_until)
                .ok()
                .and_then(|until| until.duration_since(now).ok())
                .map_or_else(|| "a while".to_owned(), short_time)
        ),
        Looked::Known(IdentityStatus { node, certificate_until, has_expired: true }) => format!(
            "✗ node {}: its certificate ended at {certificate_until}. The agent renews it within --renew-grace of the cloud; \
             after that it needs another token",
            plain_line(node)
        ),
        Looked::Error(error) => format!("✗ {}", plain_line(error)),
    }
}

fn of_upgrade(TrialOutcome { program, went_back }: &TrialOutcome) -> String {
    let Program { version, image, .. } = program;
    match went_back {
        None => format!("  upgraded to {} of {}", plain_line(version), plain_line(image)),
        Some(reason) => {
            format!("! {} of {} was given up: {}", plain_line(version), plain_line(image), plain_line(reason))
        }
    }
}

fn of_cloud(cloud: &CloudStatus, now: SystemTime) -> String {
    let CloudStatus { connected, address, since, reason, next_try } = cloud;
    let since = since.as_deref().map(|since| time_since(since, now));
    if *connected {
        return format!("✓ connected to {} for {}", plain_line(address), since.unwrap_or_default());
    }
    if address.is_empty() {
        return format!("✗ not connected yet; {LOG}");
    }
    let since = since.map_or_else(|| "since its start".to_owned(), |since| format!("for {since}"));
    let next = next_try.as_deref().and_then(|next| parse_rfc3339(next).ok());
    let next = next.and_then(|next| next.duration_since(now).ok());
    let next = next.map_or_else(|| "now".to_owned(), |wait| format!("in {}", short_time(wait)));
    format!("✗ not connected {since}: {}: {}; tries again {next}", plain_line(address), plain_line(reason))
}

fn of_runtime(runtime: &Looked<RuntimeStatus>) -> Vec<String> {
    let RuntimeStatus { version, disk, pinning_jobs } = match runtime {
        Looked::Known(runtime) => runtime,
        Looked::Error(error) => return vec![format!("✗ {}", plain_line(error))],
    };
    let mut lines = vec![format!("✓ {} answers", plain_line(version))];
    lines.push(match disk {
        Looked::Known(Filesystem { mountpoint, available, capacity }) => format!(
            "  {} of {} are free at {}",
            HumanBytes(*available),
            HumanBytes(*capacity),
            plain_line(mountpoint)
        ),
        Looked::Error(error) => format!("! its disk is not known: {}", plain_line(error)),
    });
    lines.extend(pinning_jobs.filter(|jobs| *jobs > 0).map(|jobs| {
        let noun = if jobs == 1 { "job keeps" } else { "jobs keep" };
        format!("  {jobs} {noun} images from the kubelet's garbage collection")
    }));
    lines
}

fn of_task(task: &TaskStatus, text: &mut String) {
    let TaskStatus { title, state, images, ended, waits, downloads } = task;
    // Writing to a String does not fail.
    let _ =
        writeln!(text, "  {}: {ended} of {images} images ended; it {}", plain_line(title), plain_line(state));
    if !waits.is_empty() {
        let _ = writeln!(text, "    {}", plain_line(waits));
    }
    for DownloadStatus { image, bytes, bytes_per_second, reason } in downloads {
        let bytes = bytes.map_or_else(
            || "has begun".to_owned(),
            |bytes| format!("{} of {}", HumanBytes(bytes.done), HumanBytes(bytes.total)),
        );
        let failed = if reason.is_empty() {
            String::new()
        } else {
            format!("; the last attempt failed: {}", plain_line(reason))
        };
        let rate = HumanBytes(*bytes_per_second);
        let _ = writeln!(text, "    {}  {bytes}, {rate}/s{failed}", plain_line(image));
    }
}

fn time_since(since: &str, now: SystemTime) -> String {
    let since = parse_rfc3339(since).ok().and_then(|since| now.duration_since(since).ok());
    short_time(since.unwrap_or_default())
}

/// A time in its two largest units.
fn short_time(time: Duration) -> String {
    let text = format_duration(Duration::from_secs(time.as_secs())).to_string();
    text.split(' ').take(2).collect::<Vec<_>>().join(" ")
}

/// A text of another program, as one line without control characters.
fn plain_line(text: &str) -> String {
    to_plain_line(text, LONGEST)
}
