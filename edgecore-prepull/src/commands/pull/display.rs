//! Progress of `pull`. On a terminal it's a bar for each image and for each of its layers in progress; elsewhere it's
//! one line per event.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::sync::{Mutex, PoisonError};

use indicatif::{HumanBytes, MultiProgress, ProgressBar, ProgressDrawTarget};
use prepull_api::task::{ByteProgress, ImagePhase, ImageProgress, ImageResult, ImageTask};

use super::bars::{show_bytes, style};
use super::layers::LayerBars;
use super::wording::{describe_result, summarize};
use crate::images::fetch::ImageDownload;
use crate::images::puller::Present;

pub(super) struct Display {
    images: Vec<ShownImage>,
    /// Absent without a terminal.
    all: Option<MultiProgress>,
    state: Mutex<DisplayState>,
}

struct ShownImage {
    name: String,
    /// The image that the runtime had under the reference before.
    before: Option<Present>,
    /// Absent without a terminal.
    bar: Option<ProgressBar>,
}

/// Indexes of images.
#[derive(Default)]
struct DisplayState {
    ended: BTreeSet<usize>,
    unpacking: BTreeSet<usize>,
    /// The layers of the images that are being downloaded.
    layers: BTreeMap<usize, LayerBars>,
    /// The last wait that was displayed.
    waits: String,
}

impl Display {
    pub(super) fn new(images: &[ImageTask], before: Vec<Option<Present>>, terminal: bool) -> Self {
        let all = terminal.then(|| MultiProgress::with_draw_target(ProgressDrawTarget::stderr()));
        let images = images.iter().zip(before).map(|(image, before)| {
            let name = image.reference.clone();
            let bar = all.as_ref().map(|all| {
                let bar = all.add(ProgressBar::new(0).with_style(style("  {prefix} {msg}")));
                bar.set_prefix(name.clone());
                bar.set_message("waiting");
                bar
            });
            ShownImage { name, before, bar }
        });
        let images = images.collect();
        Self { images, all, state: Mutex::default() }
    }

    /// Whether there are bars, on a terminal.
    pub(super) fn has_bars(&self) -> bool {
        self.all.is_some()
    }

    /// Displays what is being downloaded now.
    pub(super) fn show_downloads(&self, downloads: &[ImageDownload]) {
        let Some(all) = &self.all else { return };
        let mut state = self.lock();
        for (index, ShownImage { name, bar, before: _ }) in self.images.iter().enumerate() {
            let Some(bar) = bar else { continue };
            match downloads.iter().find(|download| download.reference == *name) {
                Some(download) => state.layers.entry(index).or_default().show(all, bar, download),
                // The last layer has arrived, or the attempt has ended.
                None => {
                    if let Some(layers) = state.layers.remove(&index) {
                        layers.clear(all);
                    }
                }
            }
        }
    }

    /// Displays the reason why all images wait, if it has changed.
    pub(super) fn show_waits(&self, waits: &str) {
        let mut state = self.lock();
        if state.waits == waits {
            return;
        }
        waits.clone_into(&mut state.waits);
        for (index, ShownImage { bar, .. }) in self.images.iter().enumerate() {
            if let Some(bar) = bar.as_ref().filter(|_| !state.ended.contains(&index)) {
                bar.set_style(style("  {prefix} {msg}"));
                bar.set_message(if waits.is_empty() { "waiting".to_owned() } else { waits.to_owned() });
            }
        }
        if self.all.is_none() && !waits.is_empty() {
            print_line(&format!("nothing is downloaded: it {waits}"));
        }
    }

    /// Displays the progress of an image.
    pub(super) fn show_progress(&self, image: &ImageProgress) {
        let ImageProgress { index, phase, bytes, attempts, reason, code: _ } = image;
        let index = *index as usize;
        let Some(ShownImage { name, bar, before: _ }) = self.images.get(index) else { return };
        let is_unpacking = bytes.is_some_and(|ByteProgress { done, total }| total > 0 && done >= total);
        match (phase, bar) {
            (ImagePhase::Waiting | ImagePhase::Done | ImagePhase::Other, _) => {}
            (ImagePhase::Pulling, Some(bar)) => match bytes {
                // The runtime has every byte, and unpacks.
                _ if is_unpacking => {
                    bar.set_style(style("  {prefix} {msg}"));
                    bar.set_message("unpacking");
                }
                // If the agent downloads, the layers show more detail, and more often.
                Some(_) if self.lock().layers.contains_key(&index) => {}
                Some(bytes) => show_bytes(bar, *bytes),
                None => bar.set_message("pulling"),
            },
            (ImagePhase::BackingOff, Some(bar)) => {
                bar.set_style(style("  {prefix} {msg}"));
                bar.set_message(format!("trying again: {reason}"));
            }
            (ImagePhase::Pulling, None) if is_unpacking => {
                // Once: unpacking has no progress to show.
                if self.lock().unpacking.insert(index) {
                    print_line(&format!("{name}: unpacking"));
                }
            }
            (ImagePhase::Pulling, None) => {
                let bytes = bytes.map(|bytes| format!(" {}", format_bytes(bytes))).unwrap_or_default();
                print_line(&format!("{name}: pulling{bytes}"));
            }
            // No attempt was made, because the runtime did not answer.
            (ImagePhase::BackingOff, None) if *attempts == 0 => {
                print_line(&format!("{name}: trying again: {reason}"));
            }
            (ImagePhase::BackingOff, None) => {
                print_line(&format!("{name}: try {attempts} failed, trying again: {reason}"));
            }
        }
    }

    /// Displays the result of an image, once.
    pub(super) fn show_result(&self, index: usize, result: &ImageResult) {
        let Some(ShownImage { name, before, bar }) = self.images.get(index) else { return };
        if !self.lock().ended.insert(index) {
            return;
        }
        let text = describe_result(result, before.as_ref());
        let mark = if result.outcome.is_on_node() { '✓' } else { '✗' };
        if let Some(bar) = bar {
            bar.set_style(style(&format!("{mark} {{prefix}} {{msg}}")));
            bar.finish_with_message(text);
        } else {
            print_line(&format!("{mark} {name}: {text}"));
        }
    }

    /// Displays the missing results: the executor doesn't report images that were stopped.
    pub(super) fn show_missing_results(&self, images: &[ImageResult]) {
        for (index, result) in images.iter().enumerate() {
            self.show_result(index, result);
        }
    }

    /// Displays how many images are on this machine now.
    pub(super) fn show_summary(&self, images: &[ImageResult]) {
        let before = self.images.iter().map(|image| image.before.as_ref());
        print_line(&summarize(images.iter().zip(before)));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, DisplayState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn format_bytes(ByteProgress { done, total }: ByteProgress) -> String {
    format!("{} of {}", HumanBytes(done), HumanBytes(total))
}

fn print_line(text: &str) {
    // A closed pipe is no reason to stop pulling.
    let _ = writeln!(std::io::stdout(), "{text}");
}
