//! The spec of an object, parsed once.

use std::collections::BTreeSet;

use prepull_api::crd::settings::ImagePrePullSettingsSpec;
use prepull_api::download::MAX_WINDOWS;
use prepull_api::selector::Selector;
use prepull_api::settings::NodeSettings;

use crate::prepull::validate::{Refusal, rate, window};
use crate::shared::node_view::NodeView;

/// A spec that has been read.
#[derive(Debug)]
pub(super) struct Parsed {
    /// None where that is invalid itself: it may be any node.
    choice: Option<Choice>,
    pub(super) settings: Result<NodeSettings, Refusal>,
}

#[derive(Debug)]
enum Choice {
    Names(BTreeSet<String>),
    Labels(Selector),
}

impl Parsed {
    /// Whether it chooses this node, or may do so.
    pub(super) fn chooses(&self, node: &NodeView) -> bool {
        match &self.choice {
            Some(Choice::Names(names)) => names.contains(node.name.as_str()),
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
    match (spec.node_names.as_slice(), &spec.label_selector) {
        ([], None) => {
            Err(Refusal::new("spec", "neither nodeNames nor labelSelector is set: set exactly one of them"))
        }
        ([_, ..], Some(_)) => {
            Err(Refusal::new("spec", "nodeNames and labelSelector are both set: keep exactly one of them"))
        }
        (names, None) => Ok(Choice::Names(names.iter().cloned().collect())),
        ([], Some(selector)) => Selector::try_from(selector)
            .map(Choice::Labels)
            .map_err(|error| Refusal::new("spec.labelSelector", error)),
    }
}

fn settings(spec: &ImagePrePullSettingsSpec) -> Result<NodeSettings, Refusal> {
    let rate_of = |text: &Option<String>, field: &str| {
        text.as_deref().filter(|text| !text.is_empty()).map(|text| rate(text, field)).transpose()
    };
    if spec.windows.len() > MAX_WINDOWS {
        let message = format!("{} windows; at most {MAX_WINDOWS} are allowed", spec.windows.len());
        return Err(Refusal::new("spec.windows", message));
    }
    let windows = spec.windows.iter().enumerate().map(|(index, spec)| window(index, spec));
    let threshold = |percent: i64| {
        u8::try_from(percent).ok().filter(|percent| (1..=100).contains(percent)).ok_or_else(|| {
            let message = format!("{percent} is not a percentage: write a number from 1 to 100");
            Refusal::new("spec.imageGcHighThreshold", message)
        })
    };
    Ok(NodeSettings {
        max_download_rate: rate_of(&spec.max_download_rate, "spec.maxDownloadRate")?,
        peer_max_upload_rate: rate_of(&spec.peer_max_upload_rate, "spec.peerMaxUploadRate")?,
        windows: windows.collect::<Result<_, _>>()?,
        image_gc_high_threshold: spec.image_gc_high_threshold.map(threshold).transpose()?,
        make_room: spec.make_room,
    })
}
