//! The questions to the registries: some registries at a time, and some images of each.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::stream::{self, StreamExt};
use prepull_api::image::Reference;
use prepull_delta::manifest::WORTHWHILE;
use prepull_registry::manifest::{Descriptor, Manifest, Platform};
use prepull_registry::{
    Chosen, ClientSettings, ErrorKind, HostsFiles, Proxies, RegistryClient, RegistryError, Repository,
    ResolvedReference,
};
use tokio::sync::OnceCell;
use tokio::time::timeout;

use super::deltas::{Costs, costs, find_offers, sum};
use super::{ImageNeeds, LayerSizes, Question, SizeAnswer, SizeArgs, SizedImage};

/// Registries that are asked at the same time. One that does not answer keeps no other waiting, unless there are many.
const REGISTRIES: usize = 8;
/// Images that one registry is asked about at the same time: a person's question must not look like an attack.
const IMAGES: usize = 4;
/// Unpacked sizes of an image's layers that we ask for in parallel, as many as an agent fetches at once.
const LAYERS: usize = 3;
/// Most images of the nodes that we look up for one image to pull: nodes have few versions of it.
const MAX_HELD: usize = 16;
/// Limit for the last bytes of a layer. Where the storage of a registry takes longer, sizes are guessed.
const TRAILER: Duration = Duration::from_secs(10);

/// Asks all of it. What is not answered in time has that as its answer.
pub(super) async fn ask_all(
    args: &SizeArgs,
    wanted: HashMap<Question, ImageNeeds>,
) -> HashMap<(Question, Platform), SizeAnswer> {
    let client = RegistryClient::new(ClientSettings {
        hosts: HostsFiles {
            dirs: args.registry_config_path.iter().cloned().collect(),
            ..HostsFiles::default()
        },
        user_agent: concat!("prepull-plan/", env!("CARGO_PKG_VERSION")).to_owned(),
        proxies: Proxies::from_env(),
        time: None,
    });
    let mut by_registry: HashMap<&str, Vec<(&Question, &ImageNeeds)>> = HashMap::new();
    for (question, wanted) in &wanted {
        by_registry.entry(question.image.registry()).or_default().push((question, wanted));
    }
    let answers = Mutex::new(HashMap::new());
    let all = stream::iter(by_registry.into_values()).for_each_concurrent(REGISTRIES, |questions| {
        let (client, answers) = (&client, &answers);
        async move {
            let unpacked = Unpacked::default();
            let each = stream::iter(questions).for_each_concurrent(IMAGES, |(question, wanted)| {
                let unpacked = &unpacked;
                async move {
                    let found = ask_registry(client, question, wanted, unpacked).await;
                    let found =
                        found.into_iter().map(|(platform, answer)| ((question.clone(), platform), answer));
                    answers.lock().unwrap_or_else(PoisonError::into_inner).extend(found);
                }
            });
            each.await;
        }
    });
    let _ = timeout(args.sizes_timeout, all).await;
    let mut answers = answers.into_inner().unwrap_or_else(PoisonError::into_inner);
    let late = format!("no answer within {}", humantime::format_duration(args.sizes_timeout));
    for (question, wanted) in wanted {
        for platform in wanted.platforms {
            answers.entry((question.clone(), platform)).or_insert_with(|| Err(late.clone()));
        }
    }
    answers
}

async fn ask_registry(
    client: &RegistryClient,
    question: &Question,
    ImageNeeds { platforms, held }: &ImageNeeds,
    unpacked: &Unpacked,
) -> Vec<(Platform, SizeAnswer)> {
    let (repository, resolved) = match resolve(client, question).await {
        Ok(resolved) => resolved,
        Err(error) => {
            let failed = |platform: &Platform| (platform.clone(), Err(error.message.clone()));
            return platforms.iter().map(failed).collect();
        }
    };
    // The platforms share the indexes, also one that the image does not have.
    let (mut answers, at_hand) = (Vec::new(), Mutex::new(BTreeMap::new()));
    for platform in platforms {
        let chosen = repository.choose(resolved.clone(), platform, &at_hand).await;
        let layers = chosen.and_then(|Chosen { manifest: (manifest, content), .. }| {
            Ok((manifest.digest, Manifest::parse(&content)?.distinct_layers()))
        });
        let answer = match layers {
            Ok((manifest, layers)) => {
                let to =
                    PullTarget { repository: &repository, manifest: &manifest, layers: &layers, platform };
                let costs = to.delta_costs(client, question, held).await;
                let layers = unpacked.of_all(&repository, layers).await;
                Ok(Arc::new(SizedImage { layers, costs }))
            }
            Err(error) if error.kind == ErrorKind::PlatformMismatch && platform.architecture.is_empty() => {
                Err("the Node has no label kubernetes.io/arch, by which to choose from the image's platforms"
                    .to_owned())
            }
            Err(error) => Err(error.message),
        };
        answers.push((platform.clone(), answer));
    }
    answers
}

/// An image to pull, for one platform.
struct PullTarget<'a> {
    repository: &'a Repository,
    manifest: &'a str,
    layers: &'a [Descriptor],
    platform: &'a Platform,
}

impl PullTarget<'_> {
    /// The bytes that deltas leave to download, for nodes with these images.
    async fn delta_costs(
        &self,
        client: &RegistryClient,
        question: &Question,
        held: &BTreeSet<String>,
    ) -> Costs {
        let sizes: Vec<u64> = self.layers.iter().map(|layer| layer.size).collect();
        if held.is_empty() || sum(&sizes) < WORTHWHILE {
            return Costs::new();
        }
        let offers = find_offers(self.repository, self.manifest).await;
        let mut configurations = HashMap::new();
        for digest in held.iter().take(if offers.is_empty() { 0 } else { MAX_HELD }) {
            if let Some(configuration) = self.configuration_of(client, question, digest).await {
                configurations.insert(digest.clone(), configuration);
            }
        }
        costs(self.repository, &offers, self.layers, &configurations).await
    }

    /// The configuration of an image that nodes have, if this registry has the image.
    async fn configuration_of(
        &self,
        client: &RegistryClient,
        question: &Question,
        digest: &str,
    ) -> Option<String> {
        let image = Reference::parse(&format!("{}@{digest}", question.image.name())).ok()?.normalized();
        let question = Question { image, credentials: question.credentials.clone() };
        let (repository, resolved) = resolve(client, &question).await.ok()?;
        let Chosen { manifest: (_, content), .. } =
            repository.choose(resolved, self.platform, &()).await.ok()?;
        Some(Manifest::parse(&content).ok()?.config.digest)
    }
}

/// Asks with each credential until the registry accepts one, as an agent does. Of several refusals, "not found"
/// is the most useful.
async fn resolve(
    client: &RegistryClient,
    question: &Question,
) -> Result<(Repository, ResolvedReference), RegistryError> {
    let Question { image, credentials } = question;
    let mut refusal: Option<RegistryError> = None;
    let anonymous = credentials.is_empty().then_some(None);
    for credential in credentials.iter().map(Some).chain(anonymous) {
        let repository = client.repository(image, credential)?;
        match repository.resolve().await {
            Ok(resolved) => return Ok((repository, resolved)),
            Err(error) if error.kind == ErrorKind::NotFound => refusal = Some(error),
            Err(error) if error.kind == ErrorKind::Unauthorized => refusal = refusal.or(Some(error)),
            Err(error) => return Err(error),
        }
    }
    // There was at least one, which was refused.
    Err(refusal.unwrap_or_else(|| unreachable!("without credentials it is asked anonymously")))
}

/// The unpacked sizes of the layers of one registry, each asked for once.
#[derive(Default)]
struct Unpacked {
    by_digest: Mutex<HashMap<String, Arc<OnceCell<u64>>>>,
    /// The registry's storage cannot be asked from here.
    failed: AtomicBool,
}

impl Unpacked {
    async fn of_all(&self, repository: &Repository, layers: Vec<Descriptor>) -> Vec<LayerSizes> {
        let one = |layer: Descriptor| async move {
            // A layer is no smaller than it is compressed: so the agent counts as well.
            let unpacked = self.unpacked_size(repository, &layer).await.max(layer.size);
            LayerSizes { digest: layer.digest, download: layer.size, unpacked }
        };
        stream::iter(layers).map(one).buffered(LAYERS).collect().await
    }

    async fn unpacked_size(&self, repository: &Repository, layer: &Descriptor) -> u64 {
        let cell = {
            let mut by_digest = self.by_digest.lock().unwrap_or_else(PoisonError::into_inner);
            by_digest.entry(layer.digest.clone()).or_default().clone()
        };
        let ask = async {
            if layer.is_foreign() || self.failed.load(Ordering::Relaxed) {
                return layer.guess_unpacked();
            }
            let told = timeout(TRAILER, repository.unpacked_size(layer)).await;
            if !matches!(told, Ok(Ok(_))) {
                self.failed.store(true, Ordering::Relaxed);
            }
            let told = told.ok().and_then(Result::ok).flatten();
            told.unwrap_or_else(|| layer.guess_unpacked())
        };
        *cell.get_or_init(|| ask).await
    }
}
