//! The spec of an object, parsed once.

use prepull_api::crd::settings::ImagePrePullSettingsSpec;
use prepull_api::settings::{KEEP_UNFINISHED, NodeSettings};
use prepull_window::parse_duration;

use crate::fleet::node_view::NodeView;
use crate::prepull::validate::{NodeSelection, SpecRefusal, parse_node_selection, parse_rate, parse_windows};

/// A spec that has been read.
#[derive(Debug)]
pub(super) struct Parsed {
    /// None where that is invalid itself: it may be any node.
    choice: Option<NodeSelection>,
    pub(super) settings: Result<NodeSettings, SpecRefusal>,
}

impl Parsed {
    /// Whether it chooses this node, or may do so.
    pub(super) fn chooses(&self, node: &NodeView) -> bool {
        match &self.choice {
            Some(NodeSelection::Names(names)) => names.contains(&node.name),
            Some(NodeSelection::Labels(selector)) => selector.matches(&node.labels),
            None => true,
        }
    }
}

pub(super) fn parse_spec(spec: &ImagePrePullSettingsSpec) -> Parsed {
    match parse_choice(spec) {
        Ok(choice) => Parsed { choice: Some(choice), settings: parse_settings(spec) },
        Err(refusal) => Parsed { choice: None, settings: Err(refusal) },
    }
}

fn parse_choice(spec: &ImagePrePullSettingsSpec) -> Result<NodeSelection, SpecRefusal> {
    parse_node_selection("spec", &spec.node_names, spec.label_selector.as_ref())
}

fn parse_settings(spec: &ImagePrePullSettingsSpec) -> Result<NodeSettings, SpecRefusal> {
    let threshold = |percent: i64| {
        u8::try_from(percent).ok().filter(|percent| (1..=100).contains(percent)).ok_or_else(|| {
            let message = format!("{percent} is not a percentage: write a number from 1 to 100");
            SpecRefusal::new("spec.imageGcHighThreshold", message)
        })
    };
    let keep_unfinished = |text: &String| {
        parse_duration(text)
            .and_then(|time| {
                let refusal = || format!("{text:?} is not allowed: write 1m to 336h");
                KEEP_UNFINISHED.contains(&time).then_some(time).ok_or_else(refusal)
            })
            .map_err(|message| SpecRefusal::new("spec.keepUnfinished", message))
    };
    Ok(NodeSettings {
        max_download_rate: parse_rate(spec.max_download_rate.as_ref(), "spec.maxDownloadRate")?,
        peer_max_upload_rate: parse_rate(spec.peer_max_upload_rate.as_ref(), "spec.peerMaxUploadRate")?,
        windows: parse_windows(&spec.windows)?,
        image_gc_high_threshold: spec.image_gc_high_threshold.map(threshold).transpose()?,
        make_room: spec.make_room,
        keep_unfinished: spec.keep_unfinished.as_ref().map(keep_unfinished).transpose()?,
    })
}
