//! Progress of `pull`: bars on a terminal, and one line for each event elsewhere.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::sync::{Mutex, PoisonError};

use indicatif::{HumanBytes, MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use prepull_api::task::{Bytes, ImageOutcome, ImagePhase, ImageProgress, ImageResult, ImageTask};

pub(super) struct Display {
    names: Vec<String>,
    /// One bar for each image; empty if there is no terminal.
    bars: Vec<ProgressBar>,
    _all: Option<MultiProgress>,
    ended: Mutex<BTreeSet<usize>>,
}

impl Display {
    pub(super) fn new(images: &[ImageTask], terminal: bool) -> Self {
        let names: Vec<_> = images.iter().map(|image| image.reference.clone()).collect();
        let all = terminal.then(|| MultiProgress::with_draw_target(ProgressDrawTarget::stderr()));
        let bars = all.iter().flat_map(|all| {
            names.iter().map(|name| {
                let bar = all.add(ProgressBar::new(0).with_style(style("{prefix} {msg}")));
                bar.set_prefix(name.clone());
                bar.set_message("waiting");
                bar
            })
        });
        let bars = bars.collect();
        Self { names, bars, _all: all, ended: Mutex::default() }
    }

    /// Displays the progress of an image.
    pub(super) fn show_progress(&self, image: &ImageProgress) {
        let ImageProgress { index, phase, bytes, attempts, reason } = image;
        let index = *index as usize;
        let name = self.names.get(index).map_or("", String::as_str);
        let Some(bar) = self.bars.get(index) else {
            match phase {
                ImagePhase::Pulling => {
                    let bytes = bytes.map(|bytes| format!(" {}", format_bytes(bytes))).unwrap_or_default();
                    print_line(&format!("{name}: pulling{bytes}"));
                }
                // No attempt was made, because the runtime did not answer.
                ImagePhase::BackingOff if *attempts == 0 => {
                    print_line(&format!("{name}: trying again: {reason}"));
                }
                ImagePhase::BackingOff => {
                    print_line(&format!("{name}: try {attempts} failed, trying again: {reason}"));
                }
                ImagePhase::Waiting | ImagePhase::Done => {}
            }
            return;
        };
        match phase {
            ImagePhase::Waiting | ImagePhase::Done => {}
            ImagePhase::BackingOff => bar.set_message(format!("trying again: {reason}")),
            ImagePhase::Pulling => {
                bar.set_message("pulling");
                if let Some(Bytes { done, total }) = bytes {
                    bar.set_style(style("{prefix} {bar:30} {bytes}/{total_bytes} {bytes_per_sec}"));
                    bar.set_length(*total);
                    bar.set_position(*done);
                }
            }
        }
    }

    /// Displays the result of an image, the first time that it is given.
    pub(super) fn show_result(&self, index: usize, result: &ImageResult) {
        let ImageResult { outcome, digest, id: _, reason, bytes, attempts: _ } = result;
        if !self.ended.lock().unwrap_or_else(PoisonError::into_inner).insert(index) {
            return;
        }
        let digest = digest.as_deref().unwrap_or("digest unknown");
        let bytes = bytes.map(|bytes| format!(", {}", HumanBytes(bytes.total))).unwrap_or_default();
        let text = match outcome {
            ImageOutcome::Pulled => format!("pulled, {digest}{bytes}"),
            ImageOutcome::Present => format!("there already, {digest}"),
            ImageOutcome::Failed => format!("failed: {reason}"),
            ImageOutcome::Stopped => format!("stopped: {reason}"),
        };
        if let Some(bar) = self.bars.get(index) {
            bar.set_style(style("{prefix} {msg}"));
            bar.finish_with_message(text);
        } else {
            print_line(&format!("{}: {text}", self.names.get(index).map_or("", String::as_str)));
        }
    }

    /// Displays the results that are missing: the executor does not report images that were stopped.
    pub(super) fn show_missing_results(&self, images: &[ImageResult]) {
        for (index, result) in images.iter().enumerate() {
            self.show_result(index, result);
        }
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

fn format_bytes(Bytes { done, total }: Bytes) -> String {
    format!("{} of {}", HumanBytes(done), HumanBytes(total))
}

fn print_line(text: &str) {
    // A closed pipe is no reason to stop pulling.
    let _ = writeln!(std::io::stdout(), "{text}");
}
