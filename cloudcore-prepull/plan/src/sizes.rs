//! Download and disk sizes of each node, from the manifests of the registries.
//!
//! ```text
//! keys of the images, platforms of the nodes ─▶ questions, each once ─▶ ask ─▶ layers ─▶ sizes of images and of nodes
//! ```
//! A registry is asked as the agent of a node would ask it and with the same credentials, but by this machine. The sizes
//! are those of a node that has nothing of its images. Where the registry has a delta from an image that the node's kubelet
//! lists, there's another size beside.

mod ask;
mod deltas;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use prepull_api::credentials::RegistryCredential;
use prepull_api::download::Deltas;
use prepull_api::image::NormalizedReference;
use prepull_api::task::PullPolicy;
use prepull_api::wire::PullKey;
use prepull_engine::prepull::plan::NodePlan;
use prepull_registry::manifest::Platform;
use serde::Serialize;

use self::deltas::{Costs, sum};
use super::Keyed;
use super::nodes::{Held, Receiver};

/// How long all registries together may take.
const DEFAULT_TIMEOUT: &str = "2m";

/// The flags of the sizes.
#[derive(Clone, Debug, clap::Args)]
pub struct SizeArgs {
    /// Ask the registries how much each node would download, and need on its disk
    #[arg(long)]
    pub sizes: bool,
    /// Directory with a hosts.toml for each registry, as containerd reads it: mirrors, CAs [default: none]
    #[arg(long, value_name = "DIR", requires = "sizes")]
    pub registry_config_path: Option<PathBuf>,
    /// How long all registries together may take. What is not answered by then is shown as unknown
    #[arg(
        long, value_name = "TIME", requires = "sizes", default_value = DEFAULT_TIMEOUT,
        value_parser = humantime::parse_duration
    )]
    pub sizes_timeout: Duration,
}

impl Default for SizeArgs {
    fn default() -> Self {
        Self { sizes: false, registry_config_path: None, sizes_timeout: Duration::from_secs(120) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
#[allow(clippy::struct_field_names, reason = "the names of the API")]
pub(super) struct ImageSize {
    /// Compressed bytes of its layers, as `bytes.total` in the status has them.
    pub(super) download_bytes: u64,
    /// Bytes of its layers when they are unpacked: about so many.
    pub(super) unpacked_bytes: u64,
    /// Bytes to download by the smallest delta from an image of the node, if the registry has any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) delta_bytes: Option<u64>,
}

/// What all images of a node take together. Each layer counts once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NodeSize {
    /// Compressed bytes of the layers.
    pub(super) download_bytes: u64,
    /// Compressed and unpacked layers: both are on the disk while an image is unpacked.
    pub(super) disk_bytes: u64,
    /// As `download_bytes`, by the smallest deltas from images of the node, if there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) delta_bytes: Option<u64>,
    /// Images that are not counted, because their size is not known.
    #[serde(skip_serializing_if = "is_zero")]
    pub(super) unknown_images: usize,
}

// serde passes a reference.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_zero(count: &usize) -> bool {
    *count == 0
}

/// What the uplink of a site carries. Each layer counts once for those that share it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SiteSize {
    /// Compressed bytes of the layers where the nodes share them.
    pub(super) shared_bytes: u64,
    /// The same where each node downloads for itself.
    pub(super) unshared_bytes: u64,
    /// Images that are not counted, because their size is not known; on each node that pulls them.
    #[serde(skip_serializing_if = "is_zero")]
    pub(super) unknown_images: usize,
}

/// What a registry is asked: about an image, with the credentials to try, in this order. Anonymously without any.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Question {
    image: NormalizedReference,
    credentials: Vec<RegistryCredential>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct LayerSizes {
    digest: String,
    download: u64,
    unpacked: u64,
}

/// What the nodes need to know of an image.
#[derive(Default)]
struct ImageNeeds {
    platforms: HashSet<Platform>,
    /// Images of the same repository that they have.
    held: BTreeSet<String>,
}

/// An image for one platform.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct SizedImage {
    /// Its layers, each once.
    layers: Vec<LayerSizes>,
    costs: Costs,
}

impl SizedImage {
    /// Bytes to download for each layer, on a node with these images. `None` without a delta from one of them.
    fn by_delta(&self, held: &BTreeSet<Held>) -> Option<&[u64]> {
        let whole = self.layers.iter().map(|layer| layer.download).fold(0, u64::saturating_add);
        let costs = held.iter().filter_map(|held| self.costs.get(&held.digest));
        costs.filter(|costs| sum(costs) < whole).min_by_key(|costs| sum(costs)).map(Vec::as_slice)
    }
}

/// The image, or why nothing is known of it.
type SizeAnswer = Result<Arc<SizedImage>, String>;

#[derive(Default)]
pub(super) struct Sizes {
    answers: HashMap<(Question, Platform), SizeAnswer>,
}

impl Sizes {
    /// Asks the registries about the images of these nodes: each of them once, however often it is there.
    pub(super) async fn ask_registries<'a>(
        args: &SizeArgs,
        rule: Deltas,
        nodes: impl Iterator<Item = (&'a [Keyed<'a>], &'a Receiver)>,
    ) -> Self {
        let mut all: HashMap<Question, ImageNeeds> = HashMap::new();
        for (images, receiver) in nodes {
            for question in images.iter().filter_map(|image| question(image).ok().flatten()) {
                let repository = question.image.repository().to_owned();
                let wanted = all.entry(question).or_default();
                wanted.platforms.insert(receiver.platform.clone());
                if rule != Deltas::Never {
                    let held = receiver.held.iter().filter(|held| held.repository == repository);
                    wanted.held.extend(held.map(|held| held.digest.clone()));
                }
            }
        }
        Self { answers: ask::ask_all(args, all).await }
    }

    pub(super) fn of_image(&self, image: &Keyed<'_>, receiver: &Receiver) -> Result<ImageSize, String> {
        let found = self.find_answer(image, &receiver.platform)?;
        let all = |of: fn(&LayerSizes) -> u64| found.layers.iter().map(of).fold(0, u64::saturating_add);
        Ok(ImageSize {
            download_bytes: all(|layer| layer.download),
            delta_bytes: found.by_delta(&receiver.held).map(sum),
            unpacked_bytes: all(|layer| layer.unpacked),
        })
    }

    pub(super) fn of_node(&self, images: &[Keyed<'_>], receiver: &Receiver) -> NodeSize {
        let (mut size, mut by_delta, mut seen) = (NodeSize::default(), 0_u64, HashSet::new());
        for image in images {
            let Ok(found) = self.find_answer(image, &receiver.platform) else {
                size.unknown_images += 1;
                continue;
            };
            let left = found.by_delta(&receiver.held);
            for (index, LayerSizes { digest, download, unpacked }) in found.layers.iter().enumerate() {
                if seen.insert(digest.clone()) {
                    let left = left.and_then(|left| left.get(index)).unwrap_or(download);
                    by_delta = by_delta.saturating_add(*left);
                    size.download_bytes = size.download_bytes.saturating_add(*download);
                    size.disk_bytes = size.disk_bytes.saturating_add(*download).saturating_add(*unpacked);
                }
            }
        }
        size.delta_bytes = Some(by_delta).filter(|by_delta| *by_delta < size.download_bytes);
        size
    }

    /// What the uplink of a site carries, with the images of its nodes. Nodes share among those that pull
    /// the same images.
    pub(super) fn of_site<'b>(
        &self,
        nodes: impl Iterator<Item = (&'b NodePlan, &'b [Keyed<'b>], &'b Receiver)>,
    ) -> SiteSize {
        let (mut site, mut seen) = (SiteSize::default(), HashSet::new());
        // Many nodes share plan, platform and earlier images.
        let mut sizes: HashMap<(*const NodePlan, &Receiver), NodeSize> = HashMap::new();
        for (plan, images, receiver) in nodes {
            let size = sizes.entry((plan, receiver)).or_insert_with(|| {
                let entitled = plan.entitlement(true);
                for found in
                    images.iter().filter_map(|image| self.find_answer(image, &receiver.platform).ok())
                {
                    for LayerSizes { digest, download, .. } in &found.layers {
                        if seen.insert((entitled.clone(), digest.clone())) {
                            site.shared_bytes = site.shared_bytes.saturating_add(*download);
                        }
                    }
                }
                self.of_node(images, receiver)
            });
            site.unshared_bytes = site.unshared_bytes.saturating_add(size.download_bytes);
            site.unknown_images += size.unknown_images;
        }
        site
    }

    fn find_answer(&self, image: &Keyed<'_>, platform: &Platform) -> SizeAnswer {
        let Some(question) = question(image)? else { return Ok(Arc::default()) };
        let answer = self.answers.get(&(question, platform.clone())).cloned();
        answer.unwrap_or_else(|| Err("it was not asked for".to_owned())) // impossible: all that is shown was asked
    }
}

/// The question about an image; `None` if no node fetches anything of it. Fails if its credentials are missing.
fn question(image: &Keyed<'_>) -> Result<Option<Question>, String> {
    let Keyed { planned, resolved } = image;
    let credentials = match resolved.as_ref().map(|resolved| &resolved.key) {
        _ if planned.policy == PullPolicy::Never => return Ok(None),
        Some(PullKey::Credentials { credentials }) => credentials.clone(),
        Some(PullKey::Anonymous { .. } | PullKey::Other) => Vec::new(),
        Some(PullKey::Unavailable { .. }) => return Err("no usable credentials".to_owned()),
        None if planned.secrets.is_empty() => Vec::new(),
        None => return Err("its secrets are not known: add --secrets".to_owned()),
    };
    Ok(Some(Question { image: planned.pull.clone(), credentials }))
}
