//! The images of both references, platform by platform.

use prepull_registry::manifest::Descriptor;

use crate::problem::WrongUsage;

/// The image of one platform.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PlatformImage {
    /// `linux/arm64/v8`, as the configuration has it.
    pub(super) platform: String,
    pub(super) manifest: Descriptor,
    /// The manifest itself.
    pub(super) content: Vec<u8>,
    pub(super) config: Descriptor,
    /// The lowest one first.
    pub(super) layers: Vec<ImageLayer>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ImageLayer {
    pub(super) blob: Descriptor,
    /// Digest of the tar.
    pub(super) diff_id: String,
}

pub(super) struct Pair<'a> {
    pub(super) old: &'a PlatformImage,
    pub(super) new: &'a PlatformImage,
}

impl Pair<'_> {
    /// The layers that a node with the old image has to unpack. One that the old image has too, on others than here, is among
    /// them: a node that rebuilt it has no blob of it.
    pub(super) fn to_unpack(&self) -> &[ImageLayer] {
        let (old, new) = (&self.old.layers, &self.new.layers);
        let same = old.iter().zip(new).take_while(|(old, new)| old.diff_id == new.diff_id).count();
        &new[same..]
    }

    /// Whether the old image has the layer too.
    pub(super) fn is_old(&self, layer: &ImageLayer) -> bool {
        self.old.layers.iter().any(|old| old.diff_id == layer.diff_id)
    }
}

/// The platforms that both have, in the order of the new image; of the named ones if there are any.
pub(super) fn find_pairs<'a>(
    olds: &'a [PlatformImage],
    news: &'a [PlatformImage],
    wanted: &[String],
) -> Result<Vec<Pair<'a>>, WrongUsage> {
    let pairs = news.iter().filter_map(|new| {
        let old = olds.iter().find(|old| old.platform == new.platform)?;
        Some(Pair { old, new })
    });
    // "linux/arm64" names its variants too.
    let is_named = |platform: &str, name: &str| {
        platform.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let pairs: Vec<Pair<'_>> = pairs.collect();
    for name in wanted {
        if !pairs.iter().any(|pair| is_named(&pair.new.platform, name)) {
            let platforms: Vec<&str> = pairs.iter().map(|pair| pair.new.platform.as_str()).collect();
            let platforms = if platforms.is_empty() { "none".to_owned() } else { platforms.join(", ") };
            return Err(WrongUsage(format!("--platform {name}: both images have {platforms}")));
        }
    }
    let is_wanted =
        |pair: &Pair<'_>| wanted.is_empty() || wanted.iter().any(|name| is_named(&pair.new.platform, name));
    Ok(pairs.into_iter().filter(is_wanted).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn images(platforms: &[&str]) -> Vec<PlatformImage> {
        let image = |platform: &&str| PlatformImage {
            platform: (*platform).to_owned(),
            manifest: Descriptor::default(),
            content: Vec::new(),
            config: Descriptor::default(),
            layers: Vec::new(),
        };
        platforms.iter().map(image).collect()
    }

    #[test]
    fn a_layer_on_another_one_is_unpacked_again() {
        let image = |layers: &[&str]| {
            let layer =
                |diff_id: &&str| ImageLayer { blob: Descriptor::default(), diff_id: (*diff_id).to_owned() };
            let layers = layers.iter().map(layer).collect();
            PlatformImage { layers, ..images(&["linux/amd64"]).remove(0) }
        };
        for (old, new, unpacked, old_ones) in [
            (&["base", "deps", "app"][..], &["base", "deps", "app2"][..], &["app2"][..], 0),
            (&["base", "deps", "app"], &["base2", "deps", "app"], &["base2", "deps", "app"], 2),
            (&["base", "app"], &["base", "new", "app"], &["new", "app"], 1),
            (&["base", "app"], &["base"], &[], 0),
        ] {
            let (old, new) = (image(old), image(new));
            let pair = Pair { old: &old, new: &new };
            let found: Vec<_> = pair.to_unpack().iter().map(|layer| layer.diff_id.as_str()).collect();
            assert_eq!(found, unpacked);
            assert_eq!(pair.to_unpack().iter().filter(|layer| pair.is_old(layer)).count(), old_ones);
        }
    }

    #[test]
    fn platforms_of_both_images_are_paired() {
        let olds = images(&["linux/amd64", "linux/arm64/v8", "linux/s390x"]);
        let news = images(&["linux/arm64/v8", "linux/amd64", "linux/riscv64"]);
        let found = |wanted: &[&str]| {
            let wanted: Vec<_> = wanted.iter().map(|name| (*name).to_owned()).collect();
            let pairs = find_pairs(&olds, &news, &wanted)?;
            Ok::<_, WrongUsage>(pairs.iter().map(|pair| pair.new.platform.clone()).collect::<Vec<_>>())
        };
        assert_eq!(found(&[]).unwrap(), ["linux/arm64/v8", "linux/amd64"]);
        assert_eq!(found(&["linux/arm64"]).unwrap(), ["linux/arm64/v8"]);
        let error = found(&["linux/arm"]).unwrap_err().to_string();
        assert_eq!(error, "--platform linux/arm: both images have linux/arm64/v8, linux/amd64");
    }
}
