//! Progress of a running job: bars on a terminal, otherwise a line for each change.

use std::collections::BTreeMap;
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use prepull_api::crd::status::{ImagePrePullJobStatus, ImageStatus, NodePhase, NodeStatus, Tristate};

use super::scenario::{Plan, registry_for};
use super::story::{Story, megabytes, short_digest};

/// Redraws a second.
const FRAMES: u8 = 10;
/// Length of a bar. Bars count in thousandths, since the size of an image may be unknown.
const WHOLE: u64 = 1000;
/// Number of steps of an image that get a line of their own without a terminal.
const QUARTERS: u64 = 4;
/// Longest reason on one line of a terminal, in characters.
const REASON: usize = 60;

/// The progress of one job on standard output.
pub(super) struct Live<'a> {
    story: &'a Story,
    view: View,
    width: usize,
}

enum View {
    /// A bar for each node and image.
    Bars(BTreeMap<(String, String), ProgressBar>),
    /// The last line printed for each node and image.
    Lines(BTreeMap<(String, String), String>),
}

impl<'a> Live<'a> {
    pub(super) fn new(story: &'a Story, plan: &Plan) -> Self {
        let pulled = |node: &str, (registry, path): &(&'static str, &str)| {
            format!("{}/{path}", registry_for(node, registry))
        };
        let names =
            plan.nodes.iter().flat_map(|node| plan.images.iter().map(move |image| pulled(node, image)));
        let width = names.map(|name| name.len()).max().unwrap_or(0);
        if !story.is_terminal() {
            return Self { story, view: View::Lines(BTreeMap::new()), width };
        }
        let multi = MultiProgress::with_draw_target(ProgressDrawTarget::stdout_with_hz(FRAMES));
        let mut bars = BTreeMap::new();
        for node in plan.nodes {
            for image in plan.images {
                let bar = multi.add(ProgressBar::new(WHOLE));
                bar.set_style(style());
                bar.set_prefix(format!("{node}  {:<width$}", pulled(node, image)));
                bar.set_message("waits");
                bars.insert(((*node).to_owned(), format!("{}/{}", image.0, image.1)), bar);
            }
        }
        for bar in bars.values() {
            bar.tick();
        }
        Self { story, view: View::Bars(bars), width }
    }

    /// Shows a new status.
    pub(super) fn show(&mut self, status: &ImagePrePullJobStatus) {
        for node in &status.node_status {
            for image in &node.image_status {
                self.show_image(node, image);
            }
        }
    }

    fn show_image(&mut self, node: &NodeStatus, image: &ImageStatus) {
        let key = (node.node_name.clone(), image.image.clone());
        let bytes = image.bytes.unwrap_or_default();
        match &mut self.view {
            View::Bars(bars) => {
                let Some(bar) = bars.get(&key) else { return };
                let part = (bytes.done * WHOLE).checked_div(bytes.total).unwrap_or(0);
                bar.set_position(if image.status == Tristate::True { WHOLE } else { part });
                let message = match image.status {
                    Tristate::Unknown if bytes.total > 0 => {
                        format!("{} of {}", megabytes(bytes.done), megabytes(bytes.total))
                    }
                    _ => self.story.dim(&describe(node, image)),
                };
                bar.set_message(message);
            }
            View::Lines(said) => {
                let word = describe(node, image);
                if said.get(&key) != Some(&word) {
                    let width = self.width;
                    let pulled =
                        if image.pulled_image.is_empty() { &image.image } else { &image.pulled_image };
                    let at = format!("{:.1} s", self.story.elapsed().as_secs_f64());
                    self.story.line(&format!("{at:>7}  {}  {pulled:<width$}  {word}", node.node_name));
                    said.insert(key, word);
                }
            }
        }
    }

    /// Stops and leaves the last state on the screen.
    pub(super) fn finish(self) {
        if let View::Bars(bars) = self.view {
            for bar in bars.into_values() {
                bar.abandon();
            }
        }
    }
}

fn style() -> ProgressStyle {
    let style = ProgressStyle::with_template("   {prefix}  {bar:24}  {msg}");
    // The template is a constant; a wrong one would be seen as the default style.
    style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("━━─")
}

/// Describes the state of an image in a few words.
fn describe(node: &NodeStatus, image: &ImageStatus) -> String {
    let digest = image.digest.as_deref().map(short_digest).unwrap_or_default();
    match image.status {
        Tristate::True if image.attempts == 0 => format!("there already  {digest}"),
        Tristate::True => format!("there  {digest}"),
        Tristate::False => format!("FAILED  {}", end_of(&image.reason)),
        Tristate::Unknown if node.phase == NodePhase::InProgress => {
            let bytes = image.bytes.unwrap_or_default();
            match (bytes.done * QUARTERS).checked_div(bytes.total) {
                Some(quarters) if quarters > 0 => format!("pulls  {} %", quarters * 100 / QUARTERS),
                _ => "pulls".to_owned(),
            }
        }
        Tristate::Unknown => "waits".to_owned(),
    }
}

/// Shortens a reason to its end: it begins with what was tried and ends with why that failed.
fn end_of(reason: &str) -> String {
    let length = reason.chars().count();
    if length <= REASON {
        return reason.to_owned();
    }
    format!("…{}", reason.chars().skip(length - REASON).collect::<String>())
}

/// Formats a duration in seconds.
pub(super) fn seconds(duration: Duration) -> String {
    format!("{:.2} s", duration.as_secs_f64())
}
