//! Makes room for an image by removing images that nothing needs.
//!
//! ```text
//!  fits ─▶ pulled
//!  doesn't ─▶ what nothing needs ─▶ enough? ─▶ --make-room: removed, one by one, until it fits ─▶ pulled
//!                                      │     └▶ without: pulled if the disk can take it, and the kubelet cleans up
//!                                      └▶ not enough: refused, and nothing is removed
//! ```

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use prepull_api::image::listed_name;
use prepull_registry::Repository;
use prepull_registry::manifest::MAX_MANIFEST;
use tokio::time::sleep;
use tonic::metadata::{Ascii, MetadataValue};

use super::downloads::Layer;
use super::fetcher::Fetcher;
use super::image::{ImageParts, blob_to_write};
use super::removal::{Freed, Removable, Removables};
use super::room::{Awaited, DiskSpace, Room, RoomRules, RoomVerdict, Todo};
use super::runtime::RuntimeFacts;
use super::unpacked::parse_diffs;
use super::unused::{Needed, find_unused};
use crate::images::containerd::{BlobKind, of_blob, of_snapshot};
use crate::images::flushes::ImageDirectories;
use crate::images::puller::cri::to_pull_error;
use crate::images::puller::{ErrorClass, PullError, PullTerms};

/// Number of rounds of removing. Removals may free less than expected, since unfinished pulls of others may hold layers
/// too.
const ROUNDS: u32 = 3;
/// Interval of recording which images are in use, the same as the kubelet's.
const LOOK: Duration = Duration::from_secs(300);

/// An image that needs room.
pub(super) struct Applicant<'a> {
    pub(super) reference: &'a str,
    pub(super) repository: &'a Repository,
    pub(super) image: &'a ImageParts,
    pub(super) layers: &'a Arc<[Layer]>,
    pub(super) facts: &'a RuntimeFacts,
    pub(super) lease: &'a MetadataValue<Ascii>,
    pub(super) terms: &'a PullTerms<'a>,
    /// Whether images may be removed for it, if the node makes room at all.
    pub(super) may_remove: bool,
}

impl Fetcher {
    /// Refuses an image that doesn't fit, before its first byte is fetched. Removes unneeded images if it's allowed to.
    pub(super) async fn check_room(&self, applicant: &Applicant<'_>) -> Result<(), PullError> {
        let Applicant { repository, layers, facts, may_remove, .. } = *applicant;
        let makes_room = may_remove && self.room.borrow().make_room;
        if makes_room {
            self.protect_existing(applicant).await;
        }
        // Later pulls count this one.
        let before = self.downloads.earlier_downloads(layers, repository);
        let Some(room) = self.read_room(facts, may_remove).await else {
            tracing::warn!(root = %facts.directories.root.display(), "the runtime's disk cannot be read, so we can't tell whether the image fits (if the agent runs in a container, mount it there at the same path)");
            return Ok(());
        };
        let own = awaited(layers, Some(repository));
        let others = before.iter().flat_map(|other| awaited(&other.layers, other.repository.get()));
        let todo = Todo::for_layers(own, others, &self.store).await;
        let Err(refusal) = todo.check(&room).await else { return Ok(()) };
        let _turn = self.removing.lock().await;
        self.make_room(applicant, &todo, refusal).await
    }

    /// Decides about an image that doesn't fit. Only one pull at a time does this, so that no two remove images for the
    /// same room.
    async fn make_room(
        &self,
        applicant: &Applicant<'_>,
        todo: &Todo<'_>,
        mut refusal: String,
    ) -> Result<(), PullError> {
        let Applicant { reference, facts, terms, may_remove, .. } = *applicant;
        let mut pieces = blobs_of(applicant.image);
        let mut has_chains = false;
        for _ in 0..ROUNDS {
            let Some(room) = self.read_room(facts, may_remove).await else { break };
            match todo.fits(&room) {
                Ok(()) => return Ok(()),
                Err(reason) => refusal = reason,
            }
            let mut found = self.removables(facts, terms.wanted, &pieces).await;
            if !has_chains && found.as_ref().is_ok_and(|found| found.count() > 0) {
                // Only now: for an image that's refused anyway, we ask the registry nothing.
                pieces.extend(self.chains_of(applicant).await);
                has_chains = true;
                found = self.removables(facts, terms.wanted, &pieces).await;
            }
            let removables = match found {
                Ok(removables) => removables,
                Err(error) => {
                    tracing::warn!(%error, "cannot find out which images the node needs, so none counts as free");
                    break;
                }
            };
            if removables.count() > 0 {
                // A guess would remove too many images.
                todo.ask_sizes().await;
            }
            let chosen = match todo.decide(&refusal, &room, &removables) {
                RoomVerdict::Remove(chosen) => chosen,
                RoomVerdict::Refuse(reason) => {
                    refusal = reason;
                    break;
                }
                RoomVerdict::LeftToKubelet => {
                    tracing::info!(
                        image = reference,
                        "the image takes the disk above --image-gc-high-threshold, from where on the kubelet removes images that nothing needs"
                    );
                    return Ok(());
                }
            };
            for (image, freed) in chosen {
                self.remove_unused(image, freed, applicant).await;
                if self.read_room(facts, may_remove).await.is_some_and(|room| todo.fits(&room).is_ok()) {
                    return Ok(());
                }
            }
        }
        Err(PullError::new(ErrorClass::NoRoom, refusal))
    }

    /// Removes an image, unless something needs it by now: since it was chosen, the registry was asked for sizes, and others
    /// were removed. Pulls of its names wait for that.
    async fn remove_unused(&self, image: &Removable, freed: Freed, applicant: &Applicant<'_>) {
        let (Removable { id, last_needed, .. }, name) = (image, image.name());
        let Applicant { reference: room_for, terms, .. } = applicant;
        // Before the runtime is asked what it has: none of its names moves to another image until this one is gone.
        let reserved = terms.reserve.map(|reserve| reserve(&image.names));
        if matches!(reserved, Some(None)) {
            return;
        }
        let may_go = async {
            let survey = self.survey().await?;
            self.uses.note_uses(&survey.listing, SystemTime::now());
            Ok::<_, PullError>(survey.may_go(image))
        };
        let removed = match may_go.await {
            Ok(true) => self.runtime.remove(id).await,
            Ok(false) => return,
            Err(error) => Err(error),
        };
        match removed {
            Ok(()) => {
                let unneeded = SystemTime::now().duration_since(*last_needed).unwrap_or_default();
                let (bytes, days) = (freed.bytes(), unneeded.as_secs() / (24 * 3600));
                tracing::info!(
                    image = name,
                    id,
                    bytes,
                    days,
                    room_for,
                    "removed an image that nothing needs, to make room"
                );
                if let Some(metrics) = &self.metrics {
                    metrics.count_removed(bytes);
                }
            }
            Err(error) => {
                tracing::warn!(image = name, id, %error, "an image that nothing needs cannot be removed");
            }
        }
    }

    /// The images that may be removed now. `pieces` are those of the image that needs the room.
    async fn removables(
        &self,
        facts: &RuntimeFacts,
        wanted: &[String],
        pieces: &BTreeSet<String>,
    ) -> Result<Removables, PullError> {
        let refused = |status| to_pull_error(&status, "", &self.endpoint);
        let listing = self.runtime.list().await?;
        let holdings = self.holdings.read(&facts.snapshotter).await.map_err(refused)?;
        let now = SystemTime::now();
        self.uses.note_uses(&listing, now);
        let wanted = wanted.iter().map(|reference| listed_name(reference).into_owned());
        let names = wanted.chain(facts.sandbox.clone()).collect();
        let unused = find_unused(&listing, &holdings, Needed { names: &names, pieces }, &self.uses, now);
        let mut sizes = unused.blobs;
        for name in unused.snapshots {
            // A missing snapshot frees nothing.
            let usage = self.holdings.usage(&facts.snapshotter, &name).await.unwrap_or_default();
            let (unpacked, inodes) = usage;
            sizes.insert(name, Freed { content: 0, unpacked, inodes });
        }
        Ok(Removables::new(unused.images, sizes))
    }

    /// Bytes of the image file system that [`Self::check_room`] may free.
    pub(super) async fn removable_bytes(&self, wanted: &[String]) -> Result<u64, PullError> {
        let Ok(facts) = self.runtime.read_facts(self.settings.hosts_dir.as_deref()).await else {
            return Ok(0);
        };
        let all = self.removables(&facts, wanted, &BTreeSet::new()).await?.freed_by_all();
        let room = self.read_room(&facts, true).await;
        let is_one = room.is_some_and(|room| room.content.device == room.images.device);
        Ok(if is_one { all.bytes() } else { all.unpacked })
    }

    /// Protects the existing parts of the image, so that they don't go with an older version that's removed.
    async fn protect_existing(&self, applicant: &Applicant<'_>) {
        let Applicant { layers, facts, lease, .. } = *applicant;
        let there: Vec<_> =
            layers.iter().filter(|layer| layer.written_bytes() == layer.descriptor.size).collect();
        if there.is_empty() {
            return;
        }
        let blobs = there.iter().map(|layer| blob_to_write(BlobKind::Layer, &layer.descriptor).digest);
        let chains = self.chains_of(applicant).await;
        let snapshots = chains.iter().map(|chain| of_snapshot(&facts.snapshotter, chain));
        self.leases.add_resources(lease, blobs.map(|digest| of_blob(&digest)).chain(snapshots)).await;
    }

    /// Names of the snapshots of the image's layers.
    async fn chains_of(&self, Applicant { repository, image, .. }: &Applicant<'_>) -> Vec<String> {
        let config = self.read_config(repository, image).await.unwrap_or_default();
        parse_diffs(&config).into_iter().map(|diff| diff.chain_id).collect()
    }

    /// The configuration of an image, from the content store or from the registry.
    pub(super) async fn read_config(&self, repository: &Repository, image: &ImageParts) -> Option<Vec<u8>> {
        match self.store.read(&image.config.digest).await {
            Some(config) => Some(config),
            None => repository.small_blob(&image.config, MAX_MANIFEST).await.ok(),
        }
    }

    async fn read_room(&self, facts: &RuntimeFacts, may_remove: bool) -> Option<Room> {
        let ImageDirectories { unpacked: images, root: content } = facts.directories.clone();
        // statvfs may block for long if the file system's server is dead.
        let read = self
            .filesystem
            .ask(move || Ok::<_, io::Error>((DiskSpace::read(&content)?, DiskSpace::read(&images)?)));
        let (content, images) = read.await.ok()?.ok()?;
        let rules = *self.room.borrow();
        let rules = RoomRules { make_room: rules.make_room && may_remove, ..rules };
        Some(Room { content, images, rules })
    }

    /// Records which images are in use, in an endless loop. The most recently used go last.
    pub(super) async fn watch_uses(&self) -> Infallible {
        loop {
            match self.runtime.list().await {
                Ok(listing) => self.uses.note_uses(&listing, SystemTime::now()),
                Err(error) => tracing::debug!(%error, "cannot find out which images are in use"),
            }
            sleep(LOOK).await;
        }
    }
}

/// The digests of all blobs of an image.
fn blobs_of(image: &ImageParts) -> BTreeSet<String> {
    let documents = image.documents.iter().map(|document| document.blob.digest.clone());
    let layers = image.layers.iter().map(|layer| layer.digest.clone());
    documents.chain(layers).chain([image.config.digest.clone()]).collect()
}

/// The layers of an image that were missing when its pull began. One that had arrived doesn't say whether it's unpacked, where
/// another blob with the same content was.
fn awaited<'a>(layers: &'a [Layer], repository: Option<&'a Repository>) -> impl Iterator<Item = Awaited<'a>> {
    // A delta that has arrived is still to become a tar and files.
    let missing = layers.iter().filter(|layer| layer.is_missing() || layer.delta.is_some());
    missing.map(move |layer| Awaited {
        layer: layer.blob_to_fetch(),
        flight: &layer.flight,
        rebuilt: layer.delta.as_ref().map(|delta| delta.rebuilt_sizes(&layer.descriptor)),
        repository,
    })
}
