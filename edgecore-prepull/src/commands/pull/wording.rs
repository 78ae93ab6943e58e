//! Texts of `pull` about images that have ended.

use indicatif::HumanBytes;
use prepull_api::task::{ImageFacts, ImageOutcome, ImageResult};

use crate::images::puller::Present;

/// Hex digits of a digest that people compare; more would make lines wrap.
const DIGEST_DIGITS: usize = 12;

/// The result of an image in a few words. `before` is the image that the runtime had under the reference.
pub(super) fn describe_result(result: &ImageResult, before: Option<&Present>) -> String {
    let digest = result.digest.as_deref().map_or("digest unknown", shorten_digest);
    match result.outcome {
        _ if was_there(result, before) => format!("already there, {digest}"),
        ImageOutcome::Pulled | ImageOutcome::Present => {
            let bytes = result.bytes.map(|bytes| format!(", {}", HumanBytes(bytes.total)));
            format!("pulled, {digest}{}{}", bytes.unwrap_or_default(), describe_delta(&result.facts))
        }
        ImageOutcome::Failed | ImageOutcome::Other => format!("failed: {}", result.reason),
        ImageOutcome::Stopped => format!("stopped: {}", result.reason),
    }
}

/// What a delta has saved, and why there was none for a layer.
fn describe_delta(facts: &ImageFacts) -> String {
    let saved = facts.delta_saved_bytes.filter(|saved| *saved > 0);
    let saved = saved.map(|saved| format!(", a delta saved {}", HumanBytes(saved)));
    let none =
        facts.no_delta.map(|code| format!(", no delta ({}): {}", code.as_str(), facts.no_delta_reason));
    format!("{}{}", saved.unwrap_or_default(), none.unwrap_or_default())
}

/// One line about all images, with the same mark as the lines of single images.
pub(super) fn summarize<'a>(images: impl Iterator<Item = (&'a ImageResult, Option<&'a Present>)>) -> String {
    let (mut pulled, mut there, mut missing) = (0, 0, 0);
    for (result, before) in images {
        match result.outcome {
            ImageOutcome::Failed | ImageOutcome::Stopped | ImageOutcome::Other => missing += 1,
            _ if was_there(result, before) => there += 1,
            ImageOutcome::Pulled | ImageOutcome::Present => pulled += 1,
        }
    }
    let mark = if missing == 0 { '✓' } else { '✗' };
    let counts = [(pulled, "pulled"), (there, "already there"), (missing, "not on this machine")];
    let counts = counts.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}"));
    let all = pulled + there + missing;
    let images = if all == 1 { "image" } else { "images" };
    format!("{mark} {all} {images}: {}", counts.collect::<Vec<_>>().join(", "))
}

/// Whether the runtime already had this very image. A pull still asks the registry, and ends immediately.
fn was_there(result: &ImageResult, before: Option<&Present>) -> bool {
    match result.outcome {
        ImageOutcome::Present => true,
        ImageOutcome::Pulled => before.is_some_and(|before| {
            let same = |now: &Option<String>, before: &Option<String>| now.is_some() && now == before;
            same(&result.digest, &before.digest) || (result.digest.is_none() && same(&result.id, &before.id))
        }),
        ImageOutcome::Failed | ImageOutcome::Stopped | ImageOutcome::Other => false,
    }
}

pub(super) fn shorten_digest(digest: &str) -> &str {
    let digits = digest.find(':').map_or(0, |colon| colon + 1) + DIGEST_DIGITS;
    digest.get(..digits).unwrap_or(digest)
}

#[cfg(test)]
mod tests {
    use prepull_api::task::{ByteProgress, NoDelta};

    use super::*;

    fn digest(digit: char) -> String {
        format!("sha256:{}", digit.to_string().repeat(64))
    }

    fn result(outcome: ImageOutcome) -> ImageResult {
        let is_on_node = outcome.is_on_node();
        ImageResult {
            digest: is_on_node.then(|| digest('a')),
            id: is_on_node.then(|| digest('b')),
            reason: if is_on_node { String::new() } else { "because".to_owned() },
            bytes: Some(ByteProgress { done: 1 << 20, total: 1 << 20 }),
            attempts: 1,
            ..ImageResult::new(outcome)
        }
    }

    fn present(digest: Option<String>) -> Present {
        Present { digest, id: Some(self::digest('b')) }
    }

    #[test]
    fn present_images_differ_from_pulled_ones() {
        let pulled = result(ImageOutcome::Pulled);
        let said = "pulled, sha256:aaaaaaaaaaaa, 1.00 MiB";
        assert_eq!(describe_result(&pulled, None), said);
        // The registry has replaced the image under this name.
        assert_eq!(describe_result(&pulled, Some(&present(Some(digest('c'))))), said);
        // The same configuration under another manifest has new layers.
        assert_eq!(describe_result(&pulled, Some(&present(None))), said);
        let there = "already there, sha256:aaaaaaaaaaaa";
        assert_eq!(describe_result(&pulled, Some(&present(Some(digest('a'))))), there);
        assert_eq!(describe_result(&result(ImageOutcome::Present), None), there);
        let nameless = ImageResult { digest: None, ..pulled };
        assert_eq!(describe_result(&nameless, Some(&present(None))), "already there, digest unknown");
        assert_eq!(describe_result(&result(ImageOutcome::Failed), None), "failed: because");
    }

    #[test]
    fn deltas_are_said() {
        let of = |facts| describe_result(&ImageResult { facts, ..result(ImageOutcome::Pulled) }, None);
        let saved = ImageFacts { delta_saved_bytes: Some(1 << 19), ..ImageFacts::default() };
        assert_eq!(of(saved), "pulled, sha256:aaaaaaaaaaaa, 1.00 MiB, a delta saved 512.00 KiB");
        let none = ImageFacts {
            delta_saved_bytes: Some(0),
            no_delta: Some(NoDelta::WrongLayer),
            no_delta_reason: "another digest".to_owned(),
            ..ImageFacts::default()
        };
        assert_eq!(of(none), "pulled, sha256:aaaaaaaaaaaa, 1.00 MiB, no delta (WrongLayer): another digest");
    }

    #[test]
    fn the_summary_counts_images_on_the_machine() {
        let all = [ImageOutcome::Pulled, ImageOutcome::Present, ImageOutcome::Failed, ImageOutcome::Stopped];
        let all = all.map(result);
        let of = |results: &[ImageResult]| summarize(results.iter().map(|result| (result, None)));
        assert_eq!(of(&all), "✗ 4 images: 1 pulled, 1 already there, 2 not on this machine");
        assert_eq!(of(&all[..2]), "✓ 2 images: 1 pulled, 1 already there");
        assert_eq!(of(&all[..1]), "✓ 1 image: 1 pulled");
    }
}
