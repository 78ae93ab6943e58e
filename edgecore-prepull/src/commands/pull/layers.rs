//! The bars of the layers of one image.

use std::collections::BTreeMap;

use indicatif::{MultiProgress, ProgressBar};
use prepull_api::task::ByteProgress;

use super::bars::{show_bytes, style};
use super::wording::shorten_digest;
use crate::images::fetch::{ImageDownload, LayerDownload};

/// Most layers of an image that are shown. After several interrupted pulls, many layers may be partly there.
const SHOWN: usize = 6;

/// The layers of an image that are shown, by digest.
#[derive(Default)]
pub(super) struct LayerBars(BTreeMap<String, ProgressBar>);

impl LayerBars {
    /// Shows the layers in progress below the bar of their image, and their sum in that bar.
    pub(super) fn show(&mut self, all: &MultiProgress, of_image: &ProgressBar, download: &ImageDownload) {
        let sum = total_bytes(download);
        if sum.done < sum.total {
            show_bytes(of_image, sum);
        }
        let arriving = arriving_layers(download);
        self.0.retain(|digest, bar| {
            let stays = arriving.iter().any(|layer| layer.digest == *digest);
            if !stays {
                all.remove(bar);
            }
            stays
        });
        let mut above = of_image.clone();
        for LayerDownload { digest, done, total } in arriving {
            let bar = self.0.entry(digest.clone()).or_insert_with(|| {
                let bar = ProgressBar::new(*total);
                let bar = bar.with_style(style(LINE)).with_prefix(shorten_digest(digest).to_owned());
                let bar = all.insert_after(&above, bar);
                bar.set_position(*done);
                bar.reset_eta();
                bar
            });
            bar.set_position(*done);
            above = bar.clone();
        }
    }

    /// Removes the bars.
    pub(super) fn clear(self, all: &MultiProgress) {
        self.0.values().for_each(|bar| all.remove(bar));
    }
}

/// The line of a layer.
const LINE: &str = "    {prefix} {bar:22} {bytes}/{total_bytes} {bytes_per_sec}";

/// The layers in progress, the lowest one first.
fn arriving_layers(download: &ImageDownload) -> Vec<&LayerDownload> {
    let has_begun = |layer: &&LayerDownload| layer.done > 0 && layer.done < layer.total;
    download.layers.iter().filter(has_begun).take(SHOWN).collect()
}

/// The bytes of all layers together.
fn total_bytes(download: &ImageDownload) -> ByteProgress {
    let sum = |of: fn(&LayerDownload) -> u64| download.layers.iter().map(of).fold(0, u64::saturating_add);
    ByteProgress { done: sum(|layer| layer.done), total: sum(|layer| layer.total) }
}

#[cfg(test)]
mod tests {
    use indicatif::ProgressDrawTarget;

    use super::*;

    fn download(layers: &[(&str, u64)]) -> ImageDownload {
        let layer = |(digest, done): &(&str, u64)| LayerDownload {
            digest: format!("sha256:{digest}"),
            done: *done,
            total: 10,
        };
        ImageDownload { reference: "r.example/a:v1".to_owned(), layers: layers.iter().map(layer).collect() }
    }

    #[test]
    fn arriving_layers_are_shown_all_are_counted() {
        let all = MultiProgress::with_draw_target(ProgressDrawTarget::hidden());
        let of_image = all.add(ProgressBar::new(0));
        let mut bars = LayerBars::default();
        let mut shown = |layers: &[(&str, u64)]| {
            bars.show(&all, &of_image, &download(layers));
            let layers = bars.0.iter().map(|(digest, bar)| (digest.clone(), bar.position()));
            (layers.collect::<Vec<_>>(), of_image.position(), of_image.length())
        };
        let at = |digest: &str, done: u64| (format!("sha256:{digest}"), done);
        assert_eq!(shown(&[("a", 10), ("b", 4), ("c", 0)]), (vec![at("b", 4)], 14, Some(30)));
        assert_eq!(shown(&[("a", 10), ("b", 9), ("c", 1)]), (vec![at("b", 9), at("c", 1)], 20, Some(30)));
        assert_eq!(shown(&[("a", 10), ("b", 10), ("c", 2)]), (vec![at("c", 2)], 22, Some(30)));
        // Many that an earlier pull has left.
        let many = ["a", "b", "c", "d", "e", "f", "g", "h"].map(|digest| (digest, 5));
        assert_eq!(shown(&many).0.len(), SHOWN);
    }
}
