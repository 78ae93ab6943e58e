//! The shares of namespaces in the room of a NodeImage: where there's none left, the namespace with the largest share gives
//! up tags for one with a smaller share.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ObjectReference;
use prepull_api::crd::kruise::{ImageSpec, ImageTagSpec, NodeImageSpec};

use super::owners::round_namespace;
use crate::kruise::TagKey;
use crate::kruise::rules::sandbox_bytes;
use crate::kruise::stored_text::stored_len;

/// Bytes that a NodeImage with this spec and its status has in etcd, roughly. A tag that has failed with a long reason has
/// more: [`super::status`] bounds the message, so that there's room for it in what the API server takes.
pub(super) fn stored_bytes(spec: &NodeImageSpec) -> usize {
    spec.images
        .iter()
        .map(|(name, image)| image_bytes(name, image) + image.tags.iter().map(tag_bytes).sum::<usize>())
        .sum()
}

/// Most bytes of a NodeImage, as [`stored_bytes`] counts them: the API server takes 1.5 MiB, and refuses all of a write that is
/// larger, the requests of other namespaces with it.
const MAX_STORED: usize = 1 << 20;
/// Most bytes of all NodeImages: a quarter of what etcd may have by default, since it keeps earlier versions of each, and other
/// objects.
const ALL_STORED: usize = 512 << 20;
/// A NodeImage has room for some 25 images, even if there are more NodeImages than [`ALL_STORED`] is meant for.
const LEAST_STORED: usize = 32 << 10;

/// Most bytes of each NodeImage, if there are this many.
pub(super) fn most_stored(node_images: usize) -> usize {
    (ALL_STORED / node_images.max(1)).clamp(LEAST_STORED, MAX_STORED)
}

/// The keys of an owner, a secret or a sandbox, and the texts of an owner but its name.
const ENTRY: usize = 300;

/// Bytes of a tag in spec and status.
fn tag_bytes(tag: &ImageTagSpec) -> usize {
    /// The keys and numbers, and an ordinary message.
    const TAG: usize = 900;
    let owner = |owner: &ObjectReference| {
        ENTRY + owner.name.iter().chain(&owner.namespace).map(|text| stored_len(text)).sum::<usize>()
    };
    TAG + 2 * stored_len(&tag.tag) + tag.owner_references.iter().map(owner).sum::<usize>()
}

/// Bytes of an image in spec and status, without its tags.
fn image_bytes(name: &str, image: &ImageSpec) -> usize {
    let sandbox = image.sandbox_config.as_ref().map_or(0, |sandbox| ENTRY + sandbox_bytes(sandbox));
    2 * stored_len(name) + image.pull_secrets.len() * ENTRY + sandbox
}

/// Removes tags of the namespace with the most bytes until `fits`, or until that namespace has hardly more than `of`. Tags that
/// are being pulled, and those without a job, stay. Returns whether it fits; if not, the spec is as it was.
pub(super) fn make_room(
    spec: &mut NodeImageSpec,
    has_begun: &dyn Fn(&TagKey) -> bool,
    of: &str,
    fits: impl Fn(&NodeImageSpec) -> bool,
) -> bool {
    if fits(spec) {
        return true;
    }
    let before = spec.clone();
    while !fits(spec) {
        let Some((image, tag)) = last_tag_of_largest(spec, has_begun, of) else {
            *spec = before;
            return false;
        };
        if let Some(found) = spec.images.get_mut(&image) {
            found.tags.retain(|known| known.tag != tag);
        }
        spec.images.retain(|_, image| !image.tags.is_empty());
    }
    true
}

/// Bytes of a tag, with its part of the image's.
fn share_of(name: &str, image: &ImageSpec, tag: &ImageTagSpec) -> usize {
    tag_bytes(tag) + image_bytes(name, image) / image.tags.len().max(1)
}

fn last_tag_of_largest(
    spec: &NodeImageSpec,
    has_begun: &dyn Fn(&TagKey) -> bool,
    of: &str,
) -> Option<(String, String)> {
    let mut shares: BTreeMap<&str, usize> = BTreeMap::new();
    for (name, image) in &spec.images {
        for tag in &image.tags {
            if let Some(namespace) = round_namespace(&tag.owner_references) {
                *shares.entry(namespace).or_default() += share_of(name, image, tag);
            }
        }
    }
    let (largest, bytes) = shares.iter().max_by_key(|(_, bytes)| **bytes)?;
    let own = shares.get(of).copied().unwrap_or_default();
    let last_of = |(name, image): (&String, &ImageSpec)| {
        let mut tags = image.tags.iter().rev();
        let tag = tags.find(|tag| {
            round_namespace(&tag.owner_references) == Some(*largest)
                && !has_begun(&TagKey::new(name, &tag.tag))
        })?;
        let freed = share_of(name, image, tag);
        // The other way round, the next request would take it back.
        (*largest != of && bytes - freed >= own).then(|| (name.clone(), tag.tag.clone()))
    };
    spec.images.iter().rev().find_map(last_of)
}

#[cfg(test)]
mod tests {
    use prepull_api::crd::kruise::{NodeImageStatus, SandboxConfig, SecretObject};

    use super::*;
    use crate::kruise::node_images::status::desired_status;
    use crate::kruise::node_images::tests::request;

    fn add(spec: &mut NodeImageSpec, namespace: &str, image: &str, tag: &str) {
        let owner = ObjectReference { namespace: Some(namespace.to_owned()), ..request("job").owner };
        let tag =
            ImageTagSpec { tag: tag.to_owned(), owner_references: vec![owner], ..ImageTagSpec::default() };
        spec.images.entry(image.to_owned()).or_default().tags.push(tag);
    }

    #[test]
    fn the_largest_share_gives_way_to_smaller_ones() {
        let mut spec = NodeImageSpec::default();
        (0..8).for_each(|n| add(&mut spec, "evil", &format!("e{n}"), "1"));
        (0..4).for_each(|n| add(&mut spec, "large", "one", &n.to_string()));
        let has_begun = |key: &TagKey| *key == TagKey::new("e7", "1");
        let most = |images: usize| move |spec: &NodeImageSpec| spec.images.len() <= images;
        assert!(make_room(&mut spec, &has_begun, "shop", most(8)));
        assert!(
            !spec.images.contains_key("e6") && spec.images.contains_key("e7"),
            "{:?}",
            spec.images.keys()
        );
        // Not beyond an equal share, and never for itself.
        let before = spec.clone();
        assert!(!make_room(&mut spec, &has_begun, "evil", most(7)));
        (0..9).for_each(|n| add(&mut spec, "shop", "two", &n.to_string()));
        let with_shop = spec.clone();
        assert!(!make_room(&mut spec, &has_begun, "shop", most(8)) && spec == with_shop);
        assert!(make_room(&mut spec, &has_begun, "large", most(8)), "shop has the most now");
        assert!(before.images.len() == 8 && spec.images.len() == 8);
    }

    fn sandbox(value: &str) -> SandboxConfig {
        SandboxConfig { labels: Some([("k".to_owned(), value.to_owned())].into()), annotations: None }
    }

    fn set_sandbox(spec: &mut NodeImageSpec, image: &str, bytes: usize) {
        spec.images.get_mut(image).unwrap().sandbox_config = Some(sandbox(&"v".repeat(bytes)));
    }

    #[test]
    fn the_estimate_grows_like_the_object() {
        let bytes = |spec: &NodeImageSpec| {
            let status = desired_status(spec, &NodeImageStatus::default(), |_| None);
            let json = serde_json::to_string(&(spec, status)).unwrap();
            (json.len(), stored_bytes(spec))
        };
        let spec_of = |image: &str, tag: &str| {
            let mut spec = NodeImageSpec::default();
            add(&mut spec, "shop", image, tag);
            spec
        };
        let (small, large) = (spec_of("i", "t"), "x".repeat(200));
        let escaped = "\u{1}".repeat(200);
        let with = |edit: &dyn Fn(&mut ImageSpec)| {
            let mut spec = small.clone();
            edit(spec.images.get_mut("i").unwrap());
            spec
        };
        let secret = SecretObject { namespace: "shop".to_owned(), name: "registry".to_owned() };
        let before = bytes(&small);
        for (what, spec) in [
            ("image", spec_of(&large, "t")),
            ("tag", spec_of("i", &large)),
            ("secret", with(&|image| image.pull_secrets.push(secret.clone()))),
            ("owner", with(&|image| image.tags[0].owner_references.push(request("job").owner))),
            ("name", with(&|image| image.tags[0].owner_references[0].name = Some(large.clone()))),
            ("escaped image", spec_of(&escaped, "t")),
            ("escaped tag", spec_of("i", &escaped)),
            ("escaped sandbox", with(&|image| image.sandbox_config = Some(sandbox(&escaped)))),
        ] {
            let (json, estimate) = bytes(&spec);
            let (json, estimate) = (json - before.0, estimate.saturating_sub(before.1));
            assert!((json..=json + ENTRY).contains(&estimate), "{what}: {estimate} for {json}");
        }
    }

    #[test]
    fn many_node_images_are_smaller() {
        for (node_images, most) in
            [(0, 1 << 20), (512, 1 << 20), (1024, 512 << 10), (10_000, 53_687), (100_000, 32 << 10)]
        {
            assert_eq!(most_stored(node_images), most, "{node_images}");
        }
    }

    #[test]
    fn shares_are_counted_in_bytes() {
        let mut spec = NodeImageSpec::default();
        (0..4).for_each(|n| add(&mut spec, "many", "a", &n.to_string()));
        add(&mut spec, "large", "b", "1");
        set_sandbox(&mut spec, "a", 4_000);
        set_sandbox(&mut spec, "b", 15_000);
        let is_one = |spec: &NodeImageSpec| spec.images.len() == 1;
        assert!(make_room(&mut spec, &|_| false, "shop", is_one));
        assert_eq!(spec.images["a"].tags.len(), 4);
        // Where the shares are equal, none gives way.
        (0..4).for_each(|n| add(&mut spec, "late", "c", &n.to_string()));
        set_sandbox(&mut spec, "c", 4_000);
        let is_less =
            |spec: &NodeImageSpec| spec.images.values().map(|image| image.tags.len()).sum::<usize>() < 8;
        for namespace in ["many", "late"] {
            assert!(!make_room(&mut spec, &|_| false, namespace, is_less));
        }
    }
}
