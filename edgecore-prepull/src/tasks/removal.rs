//! The choice of the images that a task removes, and the record of how far the removal has come. Pure.
//!
//! An image is removed as a whole, with all of its names, or not at all: a name that the job doesn't remove keeps it. So a
//! pod that names the image otherwise never finds its name gone.

use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

use prepull_api::image::{NormalizedReference, Reference};
use prepull_api::task::{ImageRemoval, KeepCode, Removal, RemovalOutcome, RemovalResult};
use serde::{Deserialize, Serialize};

use crate::clock::dates_images;
use crate::images::puller::{HeldImage, normalized_name};

/// How far the removal of a task has come. It's on the disk before the first image goes, so that after a power cut an image
/// that is gone counts as removed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RemovalRecord {
    /// The images to remove, in this order.
    pub planned: Vec<PlannedRemoval>,
    /// The images that stay.
    pub kept: Vec<ImageRemoval>,
}

/// An image to remove.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedRemoval {
    /// Id of the image in the runtime.
    pub id: String,
    /// All names of the image.
    pub names: Vec<String>,
    /// The name for people.
    pub image: String,
    /// Bytes that the removal is expected to free.
    pub bytes: u64,
    /// The end of the removal. `None` until then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<ImageRemoval>,
}

impl RemovalRecord {
    /// The result as it is now. What hasn't ended was stopped; in a dry run, it could be removed.
    pub fn result(&self, dry_run: bool) -> RemovalResult {
        let outcome = |planned: &PlannedRemoval| match &planned.end {
            Some(end) => end.clone(),
            None if dry_run => ImageRemoval {
                image: planned.image.clone(),
                outcome: RemovalOutcome::Removable,
                bytes: planned.bytes,
                ..ImageRemoval::default()
            },
            None => kept_image(&planned.image, KeepCode::Stopped, String::new()),
        };
        RemovalResult::from_images(
            self.planned.iter().map(outcome).chain(self.kept.iter().cloned()).collect(),
        )
    }
}

/// An image that stays.
pub(crate) fn kept_image(image: &str, code: KeepCode, reason: String) -> ImageRemoval {
    ImageRemoval { image: image.to_owned(), code: Some(code), reason, ..ImageRemoval::default() }
}

/// A name of an image on the node.
struct Name {
    text: String,
    /// `None` for a name that isn't a reference.
    reference: Option<NormalizedReference>,
}

impl Name {
    fn from_text(text: &str) -> Self {
        let reference = Reference::parse(text).ok().map(|reference| reference.normalized());
        Self { text: normalized_name(text), reference }
    }

    fn repository(&self) -> Option<String> {
        self.reference.as_ref().map(NormalizedReference::name)
    }

    fn digest(&self) -> Option<&str> {
        self.reference.as_ref()?.digest()
    }
}

/// What a job asks for.
struct RemovalRequest<'a> {
    removal: &'a Removal,
    references: Vec<Name>,
}

impl RemovalRequest<'_> {
    /// The references of the job that name the image. A digest names it under any tag.
    fn references_of(&self, names: &[Name]) -> Vec<&Name> {
        let names_it = |asked: &&Name| match asked.digest() {
            Some(digest) => names
                .iter()
                .any(|name| name.digest() == Some(digest) && name.repository() == asked.repository()),
            None => names.iter().any(|name| name.text == asked.text),
        };
        self.references.iter().filter(names_it).collect()
    }

    fn repositories_of(&self, names: &[Name]) -> BTreeSet<String> {
        let own = names.iter().filter_map(Name::repository);
        own.filter(|repository| self.removal.repositories.contains(repository)).collect()
    }

    /// The first name that the job doesn't remove. Each pull adds a digest to the tag, which goes with the tag; and a digest
    /// in the job is the image itself, with its tags in that repository.
    fn other_name<'n>(&self, names: &'n [Name], references: &[&Name]) -> Option<&'n Name> {
        names.iter().find(|name| {
            let repository = name.repository();
            let goes = |asked: &&Name| {
                let is_twin = name.digest().is_some() || asked.digest().is_some();
                asked.text == name.text || (is_twin && asked.repository() == repository)
            };
            let is_of_repository =
                repository.as_ref().is_some_and(|own| self.removal.repositories.contains(own));
            !is_of_repository && !references.iter().any(goes)
        })
    }
}

/// What the node has, and what it's needed for.
#[derive(Clone, Copy)]
pub(crate) struct NodeHoldings<'a> {
    /// All images.
    pub(crate) held: &'a [HeldImage],
    /// Images of other tasks.
    pub(crate) wanted: &'a [String],
    /// The time, by which images are old.
    pub(crate) now: SystemTime,
}

/// Chooses the images to remove.
pub(crate) fn choose_images(removal: &Removal, node: NodeHoldings<'_>) -> RemovalRecord {
    let NodeHoldings { held, wanted, now } = node;
    let references = removal.images.iter().map(|image| Name::from_text(image)).collect();
    let asked = RemovalRequest { removal, references };
    let named: Vec<(&HeldImage, Vec<Name>)> = held
        .iter()
        .map(|image| (image, image.names.iter().map(|name| Name::from_text(name)).collect()))
        .collect();
    let newest = newest_first(&asked, &named, now);
    let mut record = RemovalRecord::default();
    let mut found = BTreeSet::new();
    for (image, names) in &named {
        let references = asked.references_of(names);
        found.extend(references.iter().map(|reference| reference.text.clone()));
        let repositories = asked.repositories_of(names);
        if references.is_empty() && repositories.is_empty() {
            continue;
        }
        let tag = names.iter().find(|name| name.digest().is_none());
        let shown = references.first().copied().or(tag).or(names.first());
        let shown = shown.map_or(image.id.as_str(), |name| name.text.as_str());
        let spared = || {
            let mut rules = repositories.iter().filter_map(|repository| newest.get(repository));
            if references.is_empty() {
                rules.find_map(|newest| spare_reason(removal, image, newest, now))
            } else {
                None
            }
        };
        let is_wanted = || names.iter().any(|name| wanted.contains(&name.text));
        let reason = image
            .needed
            .map(|code| (code, String::new()))
            .or_else(|| is_wanted().then_some((KeepCode::Wanted, String::new())))
            .or_else(spared)
            .or_else(|| {
                asked
                    .other_name(names, &references)
                    .map(|other| (KeepCode::OtherName, also_called(&other.text)))
            });
        match reason {
            Some((code, reason)) => record.kept.push(kept_image(shown, code, reason)),
            None => record.planned.push(PlannedRemoval {
                id: image.id.clone(),
                names: names.iter().map(|name| name.text.clone()).collect(),
                image: shown.to_owned(),
                bytes: 0,
                end: None,
            }),
        }
    }
    let absent = asked.references.iter().filter(|asked| !found.contains(&asked.text));
    record.kept.extend(absent.map(|asked| kept_image(&asked.text, KeepCode::NotPresent, String::new())));
    record
}

/// Decides again about an image that was chosen a while ago: it may have got another name since, or be the last one of its
/// repository. Returns why it stays, if it does.
pub(crate) fn stays_by_now(
    removal: &Removal,
    node: NodeHoldings<'_>,
    planned: &PlannedRemoval,
) -> Option<ImageRemoval> {
    let mut held = node.held.to_vec();
    let image = held.iter_mut().find(|image| image.id == planned.id)?;
    if let Some(other) = image.names.iter().find(|name| !planned.names.contains(&normalized_name(name))) {
        return Some(kept_image(&planned.image, KeepCode::OtherName, also_called(other)));
    }
    // A power cut may have come between the removal of two of its names, and one may be another image's by now.
    image.names.extend(planned.names.iter().cloned());
    let shown: Vec<_> =
        image.names.iter().map(|name| normalized_name(name)).chain([image.id.clone()]).collect();
    let RemovalRecord { planned: chosen, kept } =
        choose_images(removal, NodeHoldings { held: &held, ..node });
    if chosen.iter().any(|again| again.id == planned.id) {
        return None;
    }
    let stays = kept.into_iter().find(|stays| shown.contains(&stays.image));
    Some(stays.unwrap_or_else(|| not_chosen(planned)))
}

fn also_called(name: &str) -> String {
    format!("the node also has it as {name}")
}

/// A rule that no longer names the image: only where the task itself has changed.
fn not_chosen(planned: &PlannedRemoval) -> ImageRemoval {
    kept_image(&planned.image, KeepCode::NotPresent, "the job doesn't name it any more".to_owned())
}

/// The ids of the images of a repository, the newest first. `None` where the age of one isn't known.
type Newest = Option<Vec<String>>;

fn newest_first(
    asked: &RemovalRequest<'_>,
    named: &[(&HeldImage, Vec<Name>)],
    now: SystemTime,
) -> BTreeMap<String, Newest> {
    let of = |repository: &String| {
        let own = named.iter().filter(|(_, names)| asked.repositories_of(names).contains(repository));
        let aged = own.map(|(image, _)| Some((arrival(image, now)?, image.id.clone())));
        let mut aged: Vec<_> = aged.collect::<Option<_>>()?;
        aged.sort_unstable_by(|one, other| other.cmp(one));
        Some(aged.into_iter().map(|(_, id)| id).collect())
    };
    asked.removal.repositories.iter().map(|repository| (repository.clone(), of(repository))).collect()
}

/// When the node got an image. `None` where its clock was wrong then, or is now.
fn arrival(image: &HeldImage, now: SystemTime) -> Option<SystemTime> {
    image.created.filter(|created| dates_images(*created) && *created <= now)
}

/// Why an image of a repository stays by `keepLast` or `olderThan`.
fn spare_reason(
    removal: &Removal,
    image: &HeldImage,
    newest: &Newest,
    now: SystemTime,
) -> Option<(KeepCode, String)> {
    let unknown = || Some((KeepCode::AgeUnknown, String::new()));
    if removal.keep_last > 0 {
        let Some(newest) = newest else { return unknown() };
        let kept = usize::try_from(removal.keep_last).unwrap_or(usize::MAX);
        if newest.iter().take(kept).any(|id| *id == image.id) {
            return Some((KeepCode::KeepLast, String::new()));
        }
    }
    let older_than = removal.older_than?;
    let Some(arrival) = arrival(image, now) else { return unknown() };
    let is_young = now.duration_since(arrival).is_ok_and(|age| age <= older_than);
    is_young.then_some((KeepCode::TooYoung, String::new()))
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;
    use std::time::Duration;

    use prepull_api::task::MAX_REMOVALS;

    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    /// An image of this many days, with these names.
    fn image(id: &str, days: u32, names: &[&str]) -> HeldImage {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        let created = Some(now() - DAY * days);
        HeldImage { id: id.to_owned(), names, created, needed: None, size: 1 }
    }

    fn now() -> SystemTime {
        SystemTime::UNIX_EPOCH + DAY * 20_000
    }

    fn of_images(images: &[&str]) -> Removal {
        Removal { images: images.iter().map(|image| (*image).to_owned()).collect(), ..Removal::default() }
    }

    fn of_repository(keep_last: u32, days: Option<u32>) -> Removal {
        let older_than = days.map(|days| DAY * days);
        Removal { repositories: vec!["r.io/app".to_owned()], keep_last, older_than, ..Removal::default() }
    }

    /// The ids of the images to remove, and the codes of the others.
    fn chosen(removal: &Removal, held: &[HeldImage]) -> (Vec<String>, Vec<KeepCode>) {
        let record = choose_images(removal, node(held));
        let codes = record.kept.iter().filter_map(|kept| kept.code).collect();
        (record.planned.into_iter().map(|planned| planned.id).collect(), codes)
    }

    fn node(held: &[HeldImage]) -> NodeHoldings<'_> {
        static WANTED: LazyLock<[String; 1]> = LazyLock::new(|| ["r.io/wanted:1".to_owned()]);
        NodeHoldings { held, wanted: &*WANTED, now: now() }
    }

    fn digest(character: char) -> String {
        format!("r.io/app@sha256:{}", character.to_string().repeat(64))
    }

    #[test]
    fn a_reference_removes_its_image() {
        let held = [
            image("a", 1, &["r.io/app:1", &digest('a')]),
            image("b", 1, &["r.io/app:2", "r.io/app:stable", &digest('b')]),
        ];
        let nothing: &[KeepCode] = &[];
        for (asked, removed, codes) in [
            (&["r.io/app:1"][..], &["a"][..], nothing),
            (&["r.io/app:3"], &[], &[KeepCode::NotPresent]),
            (&["r.io/app:2"], &[], &[KeepCode::OtherName]),
            (&["r.io/app:2", "r.io/app:stable"], &["b"], nothing),
            (&[&digest('b')], &["b"], nothing),
            (&["r.io/app:1", &digest('b')], &["a", "b"], nothing),
        ] {
            let (found, kept) = chosen(&of_images(asked), &held);
            assert_eq!(
                (&found[..], &kept[..]),
                (&removed.iter().map(ToString::to_string).collect::<Vec<_>>()[..], codes),
                "{asked:?}"
            );
        }
    }

    #[test]
    fn what_is_needed_stays() {
        for code in [KeepCode::InUse, KeepCode::PinnedByJob, KeepCode::PinnedByRuntime] {
            let held = [HeldImage { needed: Some(code), ..image("a", 9, &["r.io/app:1"]) }];
            assert_eq!(chosen(&of_images(&["r.io/app:1"]), &held), (Vec::new(), vec![code]));
            assert_eq!(chosen(&of_repository(0, Some(1)), &held), (Vec::new(), vec![code]));
        }
        let held = [image("a", 9, &["r.io/wanted:1"])];
        assert_eq!(chosen(&of_images(&["r.io/wanted:1"]), &held), (Vec::new(), vec![KeepCode::Wanted]));
    }

    #[test]
    fn old_images_of_a_repository_go() {
        let held = [
            image("new", 1, &["r.io/app:3"]),
            image("mid", 10, &["r.io/app:2"]),
            image("old", 30, &["r.io/app:1"]),
            image("other", 50, &["r.io/apple:1"]),
        ];
        for (keep_last, days, removed) in [
            (0, Some(20), &["old"][..]),
            (0, Some(10), &["old"]),
            (0, Some(9), &["mid", "old"]),
            (1, None, &["mid", "old"]),
            (2, None, &["old"]),
            (2, Some(40), &[]),
            (0, None, &["new", "mid", "old"]),
            (9, None, &[]),
        ] {
            let (found, _) = chosen(&of_repository(keep_last, days), &held);
            assert_eq!(found, removed, "{keep_last} {days:?}");
        }
    }

    #[test]
    fn an_unknown_age_keeps_an_image() {
        let unknown = HeldImage { created: None, ..image("a", 0, &["r.io/app:1"]) };
        let future = HeldImage { created: Some(now() + DAY), ..image("b", 0, &["r.io/app:2"]) };
        let rules = [of_repository(0, Some(1)), of_repository(1, None)];
        for rule in &rules {
            let (removed, codes) = chosen(rule, std::slice::from_ref(&unknown));
            assert_eq!((removed, codes), (Vec::new(), vec![KeepCode::AgeUnknown]));
        }
        for (rule, images) in rules.iter().zip([1, 2]) {
            // The clock was set back, so that the newest image isn't known either.
            let held = [future.clone(), image("c", 9, &["r.io/app:3"])];
            let (removed, codes) = chosen(rule, &held);
            assert_eq!((removed.len(), codes), (2 - images, vec![KeepCode::AgeUnknown; images]));
        }
    }

    #[test]
    fn an_image_of_1970_is_not_old() {
        let booted =
            HeldImage { created: Some(SystemTime::UNIX_EPOCH + DAY), ..image("new", 0, &["r.io/app:3"]) };
        let held = [booted, image("mid", 10, &["r.io/app:2"]), image("old", 30, &["r.io/app:1"])];
        assert_eq!(
            chosen(&of_repository(0, Some(20)), &held),
            (vec!["old".to_owned()], vec![KeepCode::AgeUnknown, KeepCode::TooYoung])
        );
        assert_eq!(chosen(&of_repository(1, None), &held).1, [KeepCode::AgeUnknown; 3]);
    }

    #[test]
    fn what_has_come_since_keeps_an_image() {
        let planned = PlannedRemoval {
            id: "a".to_owned(),
            image: "r.io/app:1".to_owned(),
            names: vec!["r.io/app:1".to_owned(), digest('a')],
            ..PlannedRemoval::default()
        };
        let stays = |removal: &Removal, held: &[HeldImage]| {
            stays_by_now(removal, node(held), &planned).map(|stays| stays.code)
        };
        let removal = of_images(&["r.io/app:1"]);
        assert_eq!(stays(&removal, &[]), None);
        assert_eq!(stays(&removal, &[image("a", 9, &["r.io/app:1"])]), None);
        for (held, code) in [
            (image("a", 9, &["r.io/app:1", "r.io/app:stable"]), KeepCode::OtherName),
            (image("a", 9, &["r.io/app:stable"]), KeepCode::OtherName),
            (image("a", 9, &["r.io/app:1", "r.io/wanted:1"]), KeepCode::OtherName),
            (HeldImage { needed: Some(KeepCode::InUse), ..image("a", 9, &["r.io/app:1"]) }, KeepCode::InUse),
        ] {
            assert_eq!(stays(&removal, std::slice::from_ref(&held)), Some(Some(code)), "{held:?}");
        }
        // A power cut came after its tag was gone.
        let half = image("a", 9, &[&digest('a')]);
        assert_eq!(stays(&removal, &[half]), None);
        // The newer ones were removed by others, so this one is the last.
        let held = [image("a", 9, &["r.io/app:1"])];
        assert_eq!(stays(&of_repository(1, None), &held), Some(Some(KeepCode::KeepLast)));
    }

    #[test]
    fn an_image_of_another_repository_too_stays() {
        let held = [image("a", 90, &["r.io/app:1", "r.io/copy:1"])];
        assert_eq!(chosen(&of_repository(0, None), &held), (Vec::new(), vec![KeepCode::OtherName]));
        let both = Removal { images: vec!["r.io/copy:1".to_owned()], ..of_repository(0, None) };
        assert_eq!(chosen(&both, &held).0, ["a"]);
    }

    #[test]
    fn a_record_tells_how_far_the_removal_has_come() {
        let gone = ImageRemoval { outcome: RemovalOutcome::Removed, bytes: 7, ..ImageRemoval::default() };
        let planned = |end| PlannedRemoval { bytes: 5, end, ..PlannedRemoval::default() };
        let record = RemovalRecord { planned: vec![planned(Some(gone)), planned(None)], kept: Vec::new() };
        let result = record.result(false);
        assert_eq!((result.removed, result.kept, result.freed_bytes), (1, 1, 7));
        assert_eq!(result.images[1].code, Some(KeepCode::Stopped));
        let dry = RemovalRecord { planned: vec![planned(None); 2 * MAX_REMOVALS], kept: Vec::new() };
        assert_eq!((dry.result(true).removed, dry.result(true).freed_bytes), (100, 500));
    }
}
