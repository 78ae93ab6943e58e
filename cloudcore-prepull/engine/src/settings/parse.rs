//! The spec of an object, parsed once.

use std::collections::BTreeSet;

use prepull_api::crd::settings::ImagePrePullSettingsSpec;
use prepull_api::selector::Selector;
use prepull_api::settings::{KEEP_UNFINISHED, NodeSettings};
use prepull_api::task::NodeName;
use prepull_window::parse_duration;

use crate::fleet::node_view::NodeView;
use crate::prepull::validate::{NodeSelection, Refusal, nodes, rate, windows};

/// A spec that has been read.
#[derive(Debug)]
pub(super) struct Parsed {
    /// None where that is invalid itself: it may be any node.
    choice: Option<Choice>,
    pub(super) settings: Result<NodeSettings, Refusal>,
}

#[derive(Debug)]
enum Choice {
    Names(BTreeSet<NodeName>),
    Labels(Selector),
}

impl Parsed {
    /// Whether it chooses this node, or may do so.
    pub(super) fn chooses(&self, node: &NodeView) -> bool {
        match &self.choice {
            Some(Choice::Names(names)) => names.contains(&node.name),
            Some(Choice::Labels(selector)) => selector.matches(&node.labels),
            None => true,
        }
    }
}

pub(super) fn parse(spec: &ImagePrePullSettingsSpec) -> Parsed {
    match choice(spec) {
        Ok(choice) => Parsed { choice: Some(choice), settings: settings(spec) },
        Err(refusal) => Parsed { choice: None, settings: Err(refusal) },
    }
}

fn choice(spec: &ImagePrePullSettingsSpec) -> Result<Choice, Refusal> {
    Ok(match nodes("spec", &spec.node_names, spec.label_selector.as_ref())? {
        NodeSelection::Names(names) => Choice::Names(names.into_iter().collect()),
        NodeSelection::Labels(selector) => Choice::Labels(selector),
    })
}

fn settings(spec: &ImagePrePullSettingsSpec) -> Result<NodeSettings, Refusal> {
    let threshold = |percent: i64| {
        u8::try_from(percent).ok().filter(|percent| (1..=100).contains(percent)).ok_or_else(|| {
            let message = format!("{percent} is not a percentage: write a number from 1 to 100");
            Refusal::new("spec.imageGcHighThreshold", message)
        })
    };
    let keep_unfinished = |text: &String| {
        parse_duration(text)
            .and_then(|time| {
                let refusal = || format!("{text:?} is not allowed: write 1m to 336h");
                KEEP_UNFINISHED.contains(&time).then_some(time).ok_or_else(refusal)
            })
            .map_err(|message| Refusal::new("spec.keepUnfinished", message))
    };
    Ok(NodeSettings {
        max_download_rate: rate(spec.max_download_rate.as_ref(), "spec.maxDownloadRate")?,
        peer_max_upload_rate: rate(spec.peer_max_upload_rate.as_ref(), "spec.peerMaxUploadRate")?,
        windows: windows(&spec.windows)?,
        image_gc_high_threshold: spec.image_gc_high_threshold.map(threshold).transpose()?,
        make_room: spec.make_room,
        keep_unfinished: spec.keep_unfinished.as_ref().map(keep_unfinished).transpose()?,
    })
}
