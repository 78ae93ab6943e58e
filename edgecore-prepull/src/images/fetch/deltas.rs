//! The search for a delta: what has changed between an image on the node and the one that is pulled.
//!
//! ```text
//!  missing layers ≥ 1 MiB? ─▶ an image of this repository here? ─▶ referrers ─▶ from an image that is here, unpacked?
//!                                                      ─▶ its manifest ─▶ smaller? ─▶ its blobs, in place of the layers
//! ```
//!
//! The manifest of a delta proves nothing, and needn't: a rebuilt layer must have the digest that the image's configuration
//! gives, like an unpacked one.

use std::fmt::Display;

use prepull_api::download::Deltas as Rule;
use prepull_api::failure::FailureCode;
use prepull_api::image::{NormalizedReference, Reference};
use prepull_api::task::NoDelta;
use prepull_delta::manifest::{DeltaManifest, MAX_OFFERS, Offer, WORTHWHILE};
use prepull_registry::manifest::Descriptor;
use prepull_registry::{RegistryError, Repository};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::{Code, Status};

use super::delta::{LayerDeltas, Missing, UnusedDelta};
use super::downloads::Layer;
use super::fetcher::Fetcher;
use super::image::ImageParts;
use super::old_files::OldImageFiles;
use super::runtime::RuntimeFacts;
use crate::images::puller::cri::to_pull_error;
use crate::images::puller::{ErrorClass, PullError, PullRequest};

/// The result of a search.
#[derive(Debug, Default)]
pub(super) enum DeltaSearch {
    /// Too little is missing for a delta.
    #[default]
    Needless,
    Found(Box<LayerDeltas>),
    /// There is none. The reason, if the registry has deltas to this image.
    None(Option<UnusedDelta>),
    /// The registry couldn't be asked.
    Failed(RegistryError),
    /// The container runtime couldn't be asked what the node has.
    Silent(PullError),
}

impl DeltaSearch {
    /// The deltas to use under this rule, and the reason for using none of those that there are.
    ///
    /// # Errors
    /// The rule forbids the whole layers, or the container runtime has ended.
    pub(super) fn under_rule(
        self,
        rule: Rule,
    ) -> Result<(Option<LayerDeltas>, Option<UnusedDelta>), PullError> {
        let none = |unused: Option<UnusedDelta>| {
            if rule == Rule::Require {
                let none = "the registry has no delta to it from an image of the node";
                return Err(no_required_delta(unused.as_ref().map_or(none, |unused| &unused.why)));
            }
            Ok((None, unused))
        };
        match self {
            Self::Found(deltas) => Ok((Some(*deltas), None)),
            Self::None(unused) => none(unused),
            // With its answer, there may be a delta. But a slow runtime is no reason to have no image.
            Self::Silent(error) if rule == Rule::Require || error.class == ErrorClass::RuntimeDown => {
                Err(error)
            }
            Self::Needless | Self::Silent(_) => Ok((None, None)),
            // It may be there next time.
            Self::Failed(error) if rule == Rule::Require => Err(no_given_delta(&error.into())),
            Self::Failed(error) => {
                let why = format!("the registry gives no list of deltas: {error}");
                Ok((None, Some(UnusedDelta::new(NoDelta::Unlisted, why))))
            }
        }
    }
}

/// The failure of an image that may only come by a delta.
fn no_required_delta(why: &str) -> PullError {
    let message = format!("spec.download.deltas is Require, and the image can't come by a delta: {why}");
    PullError::new(ErrorClass::Permanent, message).with_code(FailureCode::NoDelta)
}

/// The failure where the registry doesn't give a delta that it may give next time. It may say "not found" of a delta, which isn't
/// the image.
pub(super) fn no_given_delta(error: &PullError) -> PullError {
    let message =
        format!("spec.download.deltas is Require, and the registry gives no delta: {}", error.message);
    let is_missing = error.class == ErrorClass::NotFound;
    let code = if is_missing { FailureCode::NoDelta } else { error.code };
    let class = if is_missing { ErrorClass::Transient } else { error.class };
    PullError { class, code, message, ..*error }
}

/// The failure of an image that may only come by a delta, where the delta isn't at fault and may be of use next time.
fn passing_failure(unused: &UnusedDelta) -> Option<PullError> {
    let error = no_required_delta(&unused.why);
    match unused.code {
        NoDelta::NoRoom => {
            Some(PullError { class: ErrorClass::NoSpace, code: FailureCode::NoSpace, ..error })
        }
        NoDelta::NotUnpacked => Some(PullError { class: ErrorClass::Transient, ..error }),
        _ => None,
    }
}

/// An image to pull.
#[derive(Clone, Copy)]
pub(super) struct Goal<'a> {
    pub(super) reference: &'a NormalizedReference,
    pub(super) repository: &'a Repository,
    pub(super) image: &'a ImageParts,
    pub(super) facts: &'a RuntimeFacts,
    pub(super) lease: &'a MetadataValue<Ascii>,
    /// Whether its layers may come from neighbours.
    pub(super) is_shared: bool,
}

impl Fetcher {
    /// The deltas for a pull, and the reason for using none of those that there are.
    ///
    /// # Errors
    /// The task requires deltas, and there are none.
    pub(super) async fn deltas_for(
        &self,
        request: &PullRequest<'_>,
        goal: &Goal<'_>,
        layers: &[Layer],
    ) -> Result<(Option<LayerDeltas>, Option<UnusedDelta>), PullError> {
        match self.deltas_rule(request)? {
            Rule::Never => Ok((None, None)),
            rule => self.find_deltas(goal, layers).await.under_rule(rule),
        }
    }

    /// The rule for deltas of a pull.
    ///
    /// # Errors
    /// The task requires what this node doesn't do.
    fn deltas_rule(&self, request: &PullRequest<'_>) -> Result<Rule, PullError> {
        let why_not = if !self.settings.deltas {
            "the node has --deltas=false"
        } else if request.sandbox.is_some() {
            "the job has sandbox metadata, so the container runtime pulls the image"
        } else {
            return match request.terms.deltas {
                Rule::Other => {
                    let message = "spec.download.deltas has a value that only a newer release knows: update edgecore-prepull";
                    Err(PullError::new(ErrorClass::Permanent, message).with_code(FailureCode::NoDelta))
                }
                rule => Ok(rule),
            };
        };
        match request.terms.deltas {
            Rule::Auto | Rule::Never => Ok(Rule::Never),
            Rule::Require | Rule::Other => Err(no_required_delta(why_not)),
        }
    }

    /// Remembers that a delta of an image was of no use. Where the image may come no other way, a failure that passes isn't
    /// remembered: without a pulled image, that would hold until the agent restarts.
    ///
    /// # Errors
    /// The layer may not be downloaded in its place.
    pub(super) fn refuse_delta(
        &self,
        image: &str,
        delta: &str,
        unused: &UnusedDelta,
        is_required: bool,
    ) -> Result<(), PullError> {
        if is_required && let Some(error) = passing_failure(unused) {
            return Err(error);
        }
        self.refused.add_refusal(image, delta, unused.clone());
        if is_required { Err(no_required_delta(&unused.why)) } else { Ok(()) }
    }

    /// Looks for a delta to an image from one that is on the node.
    async fn find_deltas(&self, goal: &Goal<'_>, layers: &[Layer]) -> DeltaSearch {
        let missing = layers.iter().filter(|layer| layer.is_missing());
        let missing = missing.map(|layer| Missing { layer: &layer.descriptor, bytes: layer.missing_bytes() });
        let missing: Vec<_> = missing.collect();
        if all_bytes(&missing) < WORTHWHILE {
            return DeltaSearch::Needless;
        }
        match self.has_image_of(goal.reference).await {
            Ok(true) => {}
            Ok(false) => return DeltaSearch::None(None),
            Err(silent) => return DeltaSearch::Silent(silent),
        }
        match self.search_registry(goal, &missing).await {
            Ok(DeltaSearch::Found(deltas)) => self.open_old_files(*deltas, goal).await,
            Ok(search) => search,
            Err(error) => DeltaSearch::Failed(error),
        }
    }

    /// Opens the files of the earlier image, before anything is downloaded that needs them.
    async fn open_old_files(&self, mut deltas: LayerDeltas, goal: &Goal<'_>) -> DeltaSearch {
        let Goal { facts, lease, .. } = goal;
        let cannot = |why: &dyn Display| {
            let why = format!("cannot read the files of the earlier image: {why}");
            DeltaSearch::None(Some(UnusedDelta::new(NoDelta::OldFiles, why)))
        };
        let old = &mut deltas.old;
        match self.unpacker.open_view(&facts.snapshotter, &old.chain, lease).await {
            Ok((view, directories)) => (old.view, old.directories) = (Some(view), directories),
            Err(status) => {
                let silent = self.silence(&status).map(DeltaSearch::Silent);
                return silent.unwrap_or_else(|| cannot(&status.message()));
            }
        }
        match OldImageFiles::in_directories(&old.directories) {
            Ok(_) => DeltaSearch::Found(Box::new(deltas)),
            Err(error) => cannot(&error),
        }
    }

    /// Whether the node has another image of this repository, from any registry.
    async fn has_image_of(&self, reference: &NormalizedReference) -> Result<bool, PullError> {
        let names = self.unless_silent(self.store.image_names().await)?;
        let is_of = |name: &String| {
            let other = Reference::parse(name);
            other.is_ok_and(|other| other.normalized().repository() == reference.repository())
        };
        Ok(names.iter().any(is_of))
    }

    /// An answer of the runtime. What it refuses is as if it had none.
    ///
    /// # Errors
    /// It has ended, or is late.
    fn unless_silent<T: Default>(&self, answer: Result<T, Status>) -> Result<T, PullError> {
        answer.or_else(|status| self.silence(&status).map_or_else(|| Ok(T::default()), Err))
    }

    /// The error of a runtime that has ended, or is late. `None` if it has answered.
    fn silence(&self, status: &Status) -> Option<PullError> {
        let error = to_pull_error(status, "", &self.endpoint);
        let is_late = status.code() == Code::DeadlineExceeded;
        (is_late || error.class == ErrorClass::RuntimeDown).then_some(error)
    }

    async fn search_registry(
        &self,
        goal: &Goal<'_>,
        missing: &[Missing<'_>],
    ) -> Result<DeltaSearch, RegistryError> {
        let Goal { repository, facts, image, .. } = *goal;
        let manifest = image.manifest_digest();
        let (mut failure, mut reason) = (None, None);
        for place in repository.referrer_places() {
            let referrers = match place.referrers(manifest).await {
                Ok(referrers) => referrers,
                Err(error) => {
                    failure = Some(error);
                    continue;
                }
            };
            let mut offers = Vec::new();
            for referrer in referrers.iter() {
                match read_offer(referrer) {
                    Ok(Some(offer)) if offer.target == manifest => offers.push((offer, referrer)),
                    Ok(_) => {}
                    Err(error) => {
                        let why = format!("delta {}: {error}", referrer.digest);
                        reason = Some(UnusedDelta::new(NoDelta::Malformed, why));
                    }
                }
            }
            let mut fitting = Vec::new();
            let offered = offers.len();
            for (offer, referrer) in offers {
                match self.unless_silent(self.unpacked_image(&offer.source_config, facts).await) {
                    Ok(Some(source)) => fitting.push((offer, referrer, source)),
                    Ok(None) => {}
                    Err(silent) => return Ok(DeltaSearch::Silent(silent)),
                }
            }
            if fitting.is_empty() && offered > 0 {
                let why = format!(
                    "the registry has {offered} deltas to this image, and none is from an image of the node"
                );
                reason.get_or_insert(UnusedDelta::new(NoDelta::OtherSource, why));
            }
            // The smallest first; those of other publishers don't announce it.
            fitting.sort_by_key(|(offer, ..)| offer.download.unwrap_or(u64::MAX));
            let whole = all_bytes(missing);
            let (mut best, mut compared): (Option<(u64, LayerDeltas)>, bool) = (None, false);
            for (offer, referrer, source) in fitting.into_iter().take(MAX_OFFERS) {
                let content = match repository.fetch_manifest(referrer).await {
                    Ok(content) => content,
                    // The next one may be whole: a registry that was cleaned up lists what it has deleted.
                    Err(error) => {
                        failure = Some(error);
                        continue;
                    }
                };
                let parsed = match DeltaManifest::parse(&content) {
                    Ok(parsed) if parsed.target == manifest => parsed,
                    Ok(_) => continue,
                    Err(error) => {
                        let why = format!("delta {}: {error}", offer.digest);
                        reason = Some(UnusedDelta::new(NoDelta::Malformed, why));
                        continue;
                    }
                };
                compared = true;
                let mut refused = None;
                let may_use = |delta: &str| {
                    let why = self.refused.refusal_reason(manifest, delta);
                    let may = why.is_none();
                    refused = refused.take().or(why);
                    may
                };
                let Some(deltas) = LayerDeltas::new(&parsed, source, missing, may_use) else {
                    reason = reason.or(refused);
                    continue;
                };
                let cost = deltas.cost(missing);
                if best.as_ref().map_or(whole, |(least, _)| *least) > cost {
                    best = Some((cost, deltas));
                }
            }
            match best {
                Some((_, deltas)) => return Ok(DeltaSearch::Found(Box::new(deltas))),
                None if compared => {
                    let why = "no delta of the registry is smaller than the layers";
                    reason.get_or_insert(UnusedDelta::new(NoDelta::TooLarge, why));
                }
                None => {}
            }
        }
        match (reason, failure) {
            (None, Some(error)) => Err(error),
            (reason, _) => Ok(DeltaSearch::None(reason)),
        }
    }

    /// The snapshot with all files of an image, if the node has it unpacked.
    async fn unpacked_image(&self, config: &str, facts: &RuntimeFacts) -> Result<Option<String>, Status> {
        let Some(chain) = self.store.snapshot_of(config, &facts.snapshotter).await? else { return Ok(None) };
        Ok(self.store.find_unpacked(&facts.snapshotter, &chain).await?.then_some(chain))
    }
}

fn all_bytes(missing: &[Missing<'_>]) -> u64 {
    missing.iter().map(|missing| missing.bytes).fold(0, u64::saturating_add)
}

fn read_offer(referrer: &Descriptor) -> Result<Option<Offer>, prepull_delta::manifest::ManifestError> {
    let Descriptor { digest, size, artifact_type, annotations, .. } = referrer;
    Offer::of_referrer(digest, *size, artifact_type.as_deref(), annotations)
}

#[cfg(test)]
mod tests;
