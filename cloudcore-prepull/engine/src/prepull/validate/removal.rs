//! The removal of images by a job. Such a job pulls nothing, so that all that is about pulling is a mistake.

use prepull_api::crd::job::ImagePrePullJobSpec;
use prepull_api::crd::remove::RemoveSpec;
use prepull_api::image::Reference;
use prepull_api::task::Removal;
use prepull_api::wire::MAX_IMAGES;
use prepull_window::parse_duration;

use super::{SpecRefusal, TEMPLATE, non_empty, parse_each};

/// The most images of a repository that stay. Nodes have some hundred images.
const MAX_KEPT: i64 = 1_000;

/// `None` for a job that pulls.
pub(super) fn parse_removal(spec: &ImagePrePullJobSpec) -> Result<Option<Removal>, SpecRefusal> {
    let Some(remove) = &spec.image_pre_pull_template.remove else { return Ok(None) };
    if let Some(field) = pulling_fields(spec).into_iter().find_map(|(field, is_set)| is_set.then_some(field))
    {
        let message = "is about pulling, and the job removes images: unset it, or make a job of each";
        return Err(SpecRefusal::new(field, message));
    }
    parse_remove_spec(remove).map(Some)
}

/// The fields that a job which removes images can't have, and whether each is set.
fn pulling_fields(spec: &ImagePrePullJobSpec) -> [(String, bool); 11] {
    let template = &spec.image_pre_pull_template;
    let of_template = |field: &str| format!("{TEMPLATE}.{field}");
    [
        (of_template("images"), !template.images.is_empty()),
        (of_template("imageSources"), !template.image_sources.is_empty()),
        (of_template("registrySecrets"), !template.registry_secrets.is_empty()),
        (of_template("imageSecrets"), non_empty(template.image_secrets.as_ref()).is_some()),
        (of_template("imagePullPolicy"), non_empty(template.image_pull_policy.as_ref()).is_some()),
        (of_template("retryTimes"), template.retry_times != 0),
        ("spec.imagePrePullOverriders".to_owned(), !spec.image_pre_pull_overriders.is_empty()),
        ("spec.download".to_owned(), spec.download.is_some()),
        ("spec.pin".to_owned(), spec.pin),
        ("spec.verify".to_owned(), spec.verify.is_some()),
        ("spec.recheck".to_owned(), spec.recheck != 0),
    ]
}

fn parse_remove_spec(remove: &RemoveSpec) -> Result<Removal, SpecRefusal> {
    let RemoveSpec { images, repositories, older_than, keep_last, dry_run } = remove;
    let field = |name: &str| format!("{TEMPLATE}.remove.{name}");
    let images = parse_each(images, |i, text| {
        let reference =
            Reference::parse(text).map_err(|e| SpecRefusal::new(field(&format!("images[{i}]")), e))?;
        Ok(reference.normalized().to_string())
    })?;
    let repositories = parse_each(repositories, |i, text| {
        let field = || field(&format!("repositories[{i}]"));
        let reference = Reference::parse(text).map_err(|e| SpecRefusal::new(field(), e))?;
        if reference.tag().is_some() || reference.digest().is_some() {
            let message =
                format!("{text:?} names an image: write the repository alone, or put it into images");
            return Err(SpecRefusal::new(field(), message));
        }
        Ok(reference.normalized().name())
    })?;
    if images.is_empty() && repositories.is_empty() {
        let message = "images and repositories are both empty: name what to remove";
        return Err(SpecRefusal::new(field("images"), message));
    }
    for (name, list) in [("images", &images), ("repositories", &repositories)] {
        if list.len() > MAX_IMAGES {
            let message = format!("{} entries; at most {MAX_IMAGES} are allowed: split the job", list.len());
            return Err(SpecRefusal::new(field(name), message));
        }
    }
    let older_than = non_empty(older_than.as_ref()).map(parse_duration).transpose();
    let older_than = older_than.map_err(|message| SpecRefusal::new(field("olderThan"), message))?;
    let kept = keep_last.map(|kept| match u32::try_from(kept) {
        Ok(least) if kept <= MAX_KEPT => Ok(least),
        _ => {
            let message = format!("{kept} is not allowed: write 0 to {MAX_KEPT}");
            Err(SpecRefusal::new(field("keepLast"), message))
        }
    });
    let kept = kept.transpose()?;
    let rule = if older_than.is_some() { "olderThan" } else { "keepLast" };
    match (repositories.is_empty(), older_than.is_some() || kept.is_some()) {
        (false, false) => {
            let message = "needs olderThan or keepLast; keepLast: 0 removes all of their images";
            Err(SpecRefusal::new(field("repositories"), message))
        }
        (true, true) => Err(SpecRefusal::new(
            field(rule),
            "is about repositories, and there are none: name them, or unset it",
        )),
        _ => Ok(Removal {
            images,
            repositories,
            older_than,
            keep_last: kept.unwrap_or_default(),
            dry_run: *dry_run,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removal_is_bounded() {
        let parsed = |images: usize, kept| {
            parse_remove_spec(&RemoveSpec {
                images: vec!["app:1".to_owned(); images],
                repositories: vec!["app".to_owned()],
                keep_last: Some(kept),
                ..RemoveSpec::default()
            })
        };
        assert!(parsed(MAX_IMAGES, MAX_KEPT).is_ok());
        let refused =
            [parsed(MAX_IMAGES + 1, 0), parsed(0, MAX_KEPT + 1)].map(|removal| removal.unwrap_err().field);
        assert_eq!(refused, ["images", "keepLast"].map(|field| format!("{TEMPLATE}.remove.{field}")));
    }
}
