//! The upgrade of agents by a job.

use std::ops::RangeInclusive;
use std::time::Duration;

use prepull_api::crd::job::ImagePrePullJobSpec;
use prepull_api::task::Upgrade;
use prepull_window::parse_duration;

use super::{SpecRefusal, TEMPLATE, non_empty};

/// The time that a version has by default: an agent connects within seconds, and waits longest where cloudcore restarts.
const WITHIN: Duration = Duration::from_secs(120);
/// The times that it may have, in seconds, as for `edgecore-prepull upgrade --within`.
const BOUNDS: RangeInclusive<u64> = 10..=86_400;

/// `None` for a job that doesn't upgrade agents. `timeout`: that of a node.
pub(super) fn parse_upgrade(
    spec: &ImagePrePullJobSpec,
    timeout: Duration,
) -> Result<Option<Upgrade>, SpecRefusal> {
    let template = &spec.image_pre_pull_template;
    let Some(upgrade) = &template.upgrade else { return Ok(None) };
    let of_template = |field: &str| format!("{TEMPLATE}.{field}");
    if template.images.len() + template.image_sources.len() != 1 {
        let message = "an upgrade takes exactly one image, that of the agent";
        return Err(SpecRefusal::new(of_template("images"), message));
    }
    let excluded = [
        ("spec.verify", spec.verify.is_some(), "each machine verifies the image with its own key"),
        (
            "spec.recheck",
            spec.recheck != 0,
            "the version of an agent is on its node: `kubectl prepull nodes`",
        ),
    ];
    for (field, is_set, why) in excluded {
        if is_set {
            let message = format!("has no effect on an upgrade ({why}): unset it");
            return Err(SpecRefusal::new(field.to_owned(), message));
        }
    }
    let within = non_empty(upgrade.within.as_ref()).map(parse_duration).transpose();
    let field = || of_template("upgrade.within");
    let within = within.map_err(|message| SpecRefusal::new(field(), message))?.unwrap_or(WITHIN);
    if !BOUNDS.contains(&within.as_secs()) {
        return Err(SpecRefusal::new(field(), "must be from 10s to 24h"));
    }
    if within >= timeout {
        let seconds = timeout.as_secs();
        let message = format!("must be shorter than timeoutSeconds ({seconds}), which has the download too");
        return Err(SpecRefusal::new(field(), message));
    }
    Ok(Some(Upgrade { within, packaged: upgrade.packages }))
}
