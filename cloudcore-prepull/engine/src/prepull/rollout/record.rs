//! The record of a node, as progress and results change it.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::crd::status::{Action, ActionStatus, ImageBytes, JobImageStatus, NodeStatus, Tristate};
use prepull_api::failure::FailureCode;
use prepull_api::task::{
    ByteProgress, ImageOutcome, ImageResult, MAX_REMOVALS, RemovalResult, TaskOutcome, TaskResult,
};
use prepull_api::wire::{TaskProgress, truncate_note, truncate_reason};

use crate::prepull::plan::NodePlan;

/// The images of a node before anything is known of them.
pub(super) fn fresh_images(plan: &NodePlan) -> Vec<JobImageStatus> {
    plan.images
        .iter()
        .map(|image| JobImageStatus {
            image: image.image.clone(),
            name: image.name.clone(),
            pulled_image: image.pull.to_string(),
            ..JobImageStatus::default()
        })
        .collect()
}

pub(super) fn begin_again(record: &mut NodeStatus) {
    if record.attempt > 0 {
        record.attempt += 1;
    }
    record.start_time = None;
    record.recheck = None;
    record.action_flow.clear();
    record.removal = record.removal.as_ref().map(RemovalResult::before_next_attempt);
    for image in record.image_status.iter_mut().filter(|image| image.status != Tristate::True) {
        (image.status, image.attempts, image.code) = (Tristate::Unknown, 0, None);
        image.reason.clear();
    }
}

/// The answer of a node that was only asked to look.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RecheckFinding {
    /// Every image is there, as it was pulled.
    Present,
    /// At least one is missing, for this reason.
    Missing(String),
    /// No image is known to be missing, and not all of them are known to be there, for this reason.
    Unclear(String),
}

/// Notes which images a node still has. What is known of their pulls stays.
pub(super) fn apply_look(record: &mut NodeStatus, result: &TaskResult, now: Timestamp) -> RecheckFinding {
    let seen = last_seen(record).map_or(String::new(), |seen| format!("it was there at {seen:.0}, and "));
    let (mut missing, mut unclear) = (Vec::new(), None);
    if result.images.len() != record.image_status.len() {
        unclear = Some(match &result.reason {
            reason if reason.is_empty() => "its answer does not fit the images".to_owned(),
            reason => reason.clone(),
        });
    }
    for (image, found) in record.image_status.iter_mut().zip(&result.images) {
        let other = found.digest.as_ref().filter(|_| image.digest.is_some() && found.digest != image.digest);
        let reason = match (found.outcome, found.code, other) {
            (ImageOutcome::Pulled | ImageOutcome::Present, _, None) => {
                (image.status, image.pinned) = (Tristate::True, found.pinned.or(image.pinned));
                continue;
            }
            (ImageOutcome::Pulled | ImageOutcome::Present, _, Some(other)) => {
                format!("the node has another image of this name now, {other}: {seen}something replaced it")
            }
            (ImageOutcome::Failed, Some(FailureCode::NotPresent), _) => {
                format!("{seen}something removed it since, such as the kubelet's image garbage collection")
            }
            (ImageOutcome::Failed | ImageOutcome::Stopped | ImageOutcome::Other, ..) => {
                unclear = Some(found.reason.clone());
                continue;
            }
        };
        image.reason = truncate_reason(&reason);
        (image.status, image.code) = (Tristate::False, Some(FailureCode::Removed));
        (image.digest, image.bytes, image.pinned) = (None, None, None);
        missing.push(image.pulled_image.clone());
    }
    if unclear.is_none() || !missing.is_empty() {
        let recheck = record.recheck.get_or_insert_default();
        recheck.checked_time = Some(Time(now));
        recheck.not_checked_reason.clear();
    }
    match (missing.as_slice(), unclear) {
        ([], None) => RecheckFinding::Present,
        ([], Some(reason)) => RecheckFinding::Unclear(reason),
        ([image], _) => RecheckFinding::Missing(format!("removed since it was pulled: {image}")),
        (images, _) => RecheckFinding::Missing(format!(
            "{} images removed since they were pulled: {}",
            images.len(),
            images.join(", ")
        )),
    }
}

/// Longest digest that is kept: one of SHA-512 has 135 bytes. Edges make them up, and a report of 256 images has room for no
/// longer ones.
const MAX_DIGEST: usize = 160;

/// Whether this has the form of a digest, `algorithm:hex`.
fn is_plausible_digest(text: &str) -> bool {
    let is_of = |part: &str, more: &str| {
        !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || more.contains(c))
    };
    text.len() <= MAX_DIGEST
        && text.split_once(':').is_some_and(|(algorithm, hex)| is_of(algorithm, "+._-") && is_of(hex, "=_-"))
}

/// Whether this has the form of [`ImageFacts::signed_by`](prepull_api::task::ImageFacts::signed_by), and so its length.
fn is_fingerprint(text: &str) -> bool {
    let is_hex = |c: u8| c.is_ascii_digit() || (b'a'..=b'f').contains(&c);
    text.strip_prefix("sha256:").is_some_and(|hex| hex.len() == 12 && hex.bytes().all(is_hex))
}

/// When the images of a node were known to be there last.
fn last_seen(record: &NodeStatus) -> Option<Timestamp> {
    let checked = record.recheck.as_ref().and_then(|recheck| recheck.checked_time.as_ref());
    let pulled = record.action_flow.iter().rfind(|action| action.action == Action::Pull);
    checked.or(pulled.map(|pulled| &pulled.time)).map(|time| time.0)
}

pub(super) fn apply_progress(
    record: &mut NodeStatus,
    plan: &NodePlan,
    progress: &TaskProgress,
    now: Timestamp,
) {
    if record.image_status.len() != plan.images.len() {
        record.image_status = fresh_images(plan);
    }
    record.reason = truncate_reason(&progress.waits);
    // Images are touched only after the checks.
    if record.action_flow.is_empty() && !progress.images.is_empty() {
        record.action_flow = vec![
            action_status(Action::Check, Tristate::True, "", now),
            action_status(Action::Pull, Tristate::Unknown, "", now),
        ];
    }
    for moment in &progress.images {
        // The index comes from the edge: one that points nowhere is not ours to die of.
        let Some(image) = record.image_status.get_mut(moment.index as usize) else { continue };
        image.bytes = moment.bytes.map(|amount| image_bytes(amount, None)).or(image.bytes);
        image.attempts = moment.attempts;
        image.reason = truncate_reason(&moment.reason);
        image.code = moment.code;
    }
}

pub(super) fn apply_result(
    record: &mut NodeStatus,
    plan: Option<&NodePlan>,
    result: &TaskResult,
    now: Timestamp,
) {
    let removes = result.removal.is_some() || plan.is_some_and(|plan| plan.removal.is_some());
    if let Some(plan) = plan
        && record.image_status.len() != plan.images.len()
    {
        record.image_status = fresh_images(plan);
    }
    for (image, result) in record.image_status.iter_mut().zip(&result.images) {
        let ImageResult {
            outcome,
            digest,
            id: _,
            reason,
            code,
            bytes: amount,
            attempts,
            pinned,
            facts,
            from_peers,
            took: _,
            ended: _,
        } = result;
        image.status = match outcome {
            ImageOutcome::Pulled | ImageOutcome::Present => Tristate::True,
            ImageOutcome::Failed | ImageOutcome::Other => Tristate::False,
            ImageOutcome::Stopped => Tristate::Unknown,
        };
        image.code = (!outcome.is_on_node()).then(|| code.unwrap_or(FailureCode::Other));
        image.digest = digest.clone().filter(|digest| is_plausible_digest(digest));
        image.reason = truncate_reason(reason);
        image.bytes = amount.map(|amount| image_bytes(amount, *from_peers)).or(image.bytes);
        image.attempts = *attempts;
        image.pinned = *pinned;
        image.facts = facts.clone();
        image.facts.signed_by = facts.signed_by.clone().filter(|key| is_fingerprint(key));
        // More than the image has can't be spared.
        let size = image.bytes.map_or(0, |bytes| bytes.total);
        image.facts.delta_saved_bytes = facts.delta_saved_bytes.map(|saved| saved.min(size));
        image.facts.texts().into_iter().for_each(|text| *text = truncate_note(text));
    }
    if let Some(removal) = &result.removal {
        let before = record.removal.take().unwrap_or_default();
        record.removal = Some(removal_of(removal, &before));
    }
    let check = match &result.check {
        Some(check) if check.passed => action_status(Action::Check, Tristate::True, "", now),
        Some(check) => action_status(Action::Check, Tristate::False, &check.reason, now),
        None => action_status(Action::Check, Tristate::Unknown, &result.reason, now),
    };
    let checked =
        record.action_flow.first().filter(|first| first.status == check.status).cloned().unwrap_or(check);
    let passed = checked.status == Tristate::True;
    record.action_flow = vec![checked];
    if passed {
        let (status, reason) = match result.outcome {
            TaskOutcome::Succeeded => (Tristate::True, ""),
            TaskOutcome::Failed | TaskOutcome::DeadlineExceeded | TaskOutcome::Other => {
                (Tristate::False, result.reason.as_str())
            }
            TaskOutcome::Cancelled => (Tristate::Unknown, result.reason.as_str()),
        };
        let step = if removes { Action::Remove } else { Action::Pull };
        record.action_flow.push(action_status(step, status, reason, now));
    }
}

/// The result of a node's removal, within the bounds of a report. `before`: what the record had.
fn removal_of(result: &RemovalResult, before: &RemovalResult) -> RemovalResult {
    let RemovalResult { removed, kept, freed_bytes, removed_before: _, freed_before: _, images } = result;
    let mut images: Vec<_> = images.iter().take(MAX_REMOVALS).cloned().collect();
    for image in &mut images {
        image.image = truncate_note(&image.image);
        image.reason = truncate_reason(&image.reason);
        image.bytes = image.bytes.min(MOST);
    }
    let freed_bytes = (*freed_bytes).min(MOST);
    let RemovalResult { removed_before, freed_before, .. } = *before;
    RemovalResult { removed: *removed, kept: *kept, freed_bytes, removed_before, freed_before, images }
}

/// Why a node has failed, by its result: its checks, or the first image that is missing. An edge without codes reports
/// only the outcome.
pub(super) fn code_of(result: &TaskResult) -> FailureCode {
    if result.check.as_ref().is_some_and(|check| !check.passed) {
        return FailureCode::CheckFailed;
    }
    let by_outcome = match result.outcome {
        TaskOutcome::Cancelled => return FailureCode::Cancelled,
        TaskOutcome::DeadlineExceeded => FailureCode::Timeout,
        TaskOutcome::Failed | TaskOutcome::Succeeded | TaskOutcome::Other => FailureCode::Other,
    };
    let missing = result.images.iter().find(|image| !image.outcome.is_on_node());
    missing.and_then(|image| image.code).unwrap_or(by_outcome)
}

/// Why a node has failed, in the words of its edge. One that is newer may end a task as we don't know it.
pub(super) fn reason_of(result: &TaskResult) -> String {
    let newer = "its edgecore-prepull is newer and ended the task in a way that isn't known here: update cloudcore-prepull";
    match result.outcome {
        TaskOutcome::Other if result.reason.is_empty() => newer.to_owned(),
        _ => truncate_reason(&result.reason),
    }
}

fn action_status(action: Action, status: Tristate, reason: &str, now: Timestamp) -> ActionStatus {
    ActionStatus { action, status, reason: truncate_reason(reason), time: Time(now) }
}

/// An API server keeps integers of 64 bits with a sign. It would round a greater one, which only a node that lies sends,
/// and the whole report could not be read again.
const MOST: u64 = i64::MAX.unsigned_abs();

fn image_bytes(ByteProgress { done, total }: ByteProgress, from_peers: Option<u64>) -> ImageBytes {
    let from_peers = from_peers.map(|bytes| bytes.min(MOST));
    ImageBytes { done: done.min(MOST), total: total.min(MOST), from_peers }
}

#[cfg(test)]
mod tests {
    use super::{is_fingerprint, is_plausible_digest};

    #[test]
    fn a_keys_fingerprint_has_one_form() {
        assert!(is_fingerprint("sha256:0123456789ab"));
        for bad in [
            "",
            "sha256:",
            "sha256:0123456789a",
            "sha256:0123456789abc",
            "sha256:0123456789AB",
            "sha256:\u{1b}[2J12345678",
            "sha512:0123456789ab",
        ] {
            assert!(!is_fingerprint(bad), "{bad:?}");
        }
    }

    #[test]
    fn a_digest_has_the_form_of_one() {
        let sha512 = format!("sha512:{}", "0f".repeat(64));
        for good in ["sha256:other", "sha256+b64u:LCa0a2j_xo=", &sha512] {
            assert!(is_plausible_digest(good), "{good}");
        }
        for bad in
            ["", "sha256", "sha256:", ":00", "sha256:0 0", "sha256:\u{1b}[2J", &format!("{sha512}{sha512}")]
        {
            assert!(!is_plausible_digest(bad), "{bad:?}");
        }
    }
}
