//! Bars on a terminal, a line for each event elsewhere.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::sync::{Mutex, PoisonError};

use indicatif::{HumanBytes, MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use prepull_api::task::{Bytes, ImageOutcome, ImagePhase, ImageProgress, ImageResult, ImageTask};

pub(super) struct Display {
    names: Vec<String>,
    /// Empty where there is no terminal.
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

    pub(super) fn progress(&self, image: &ImageProgress) {
        let ImageProgress { index, phase, bytes, attempts, reason } = image;
        let index = *index as usize;
        let name = self.names.get(index).map_or("", String::as_str);
        let Some(bar) = self.bars.get(index) else {
            match phase {
                ImagePhase::Pulling => {
                    let bytes = bytes.map(|bytes| format!(" {}", amount(bytes))).unwrap_or_default();
                    line(&format!("{name}: pulling{bytes}"));
                }
                // The runtime was away: that is no try.
                ImagePhase::BackingOff if *attempts == 0 => line(&format!("{name}: trying again: {reason}")),
                ImagePhase::BackingOff => {
                    line(&format!("{name}: try {attempts} failed, trying again: {reason}"));
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

    pub(super) fn ended(&self, index: usize, result: &ImageResult) {
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
            line(&format!("{}: {text}", self.names.get(index).map_or("", String::as_str)));
        }
    }

    /// Shows the end of whatever has not been shown: what was stopped is not reported by itself.
    pub(super) fn end(&self, images: &[ImageResult]) {
        for (index, result) in images.iter().enumerate() {
            self.ended(index, result);
        }
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

fn amount(Bytes { done, total }: Bytes) -> String {
    format!("{} of {}", HumanBytes(done), HumanBytes(total))
}

fn line(text: &str) {
    // A closed pipe is no reason to stop pulling.
    let _ = writeln!(std::io::stdout(), "{text}");
}
