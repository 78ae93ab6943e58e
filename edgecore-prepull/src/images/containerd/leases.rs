//! Leases that keep the content of an unfinished pull, so that the next attempt resumes it.
//!
//! containerd garbage collects the content of a failed pull within a second, whole layers included, because the lease
//! that it creates for the pull ends with it. A pull that names a lease of ours uses that one instead, and ours stays
//! for the next attempt. Tried with containerd 1.6.20: of a layer of 52 MB that broke after 25 MB, the next attempt
//! fetched the other 27 MB with a `Range` request, also after containerd itself had been killed in between. A runtime
//! that does not know the header ignores it.
//!
//! What a lease keeps, the kubelet cannot remove: it evicts pods instead. So leases are deleted as soon as nobody wants
//! them, and their expiry is only for a node whose agent is gone.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use containerd_client::services::v1::leases_client::LeasesClient;
use containerd_client::services::v1::{
    AddResourceRequest, CreateRequest, DeleteRequest, ListRequest, ListResourcesRequest, Resource,
};
use tokio::time::{sleep, timeout};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use super::namespace::namespaced;
use super::unpack::is_extraction;

/// gRPC header in which containerd's clients name the lease of a request.
pub(crate) const LEASE_HEADER: &str = "containerd-lease";
/// Name of a lease without content that is deleted to have containerd collect garbage.
const BROOM: &str = "broom";
const DAY: Duration = Duration::from_secs(24 * 3600);
/// Time for which the content of an unfinished pull is kept although no task wants it: another round of a job comes
/// within a day or never.
const KEPT: Duration = DAY;
/// Longest wait for an answer about a lease: a pull works without one.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time for a pull that was stopped to close the blobs that it was writing: garbage collection passes over open ones.
const CLOSING: Duration = Duration::from_secs(2);

/// Most leases of others that are looked at: the runtime has one for each of its pulls.
const MAX_OTHERS: usize = 32;

/// How the type of a snapshot begins among the resources of a lease. The name of its snapshotter follows.
const SNAPSHOTS: &str = "snapshots/";
/// The type of a blob there.
const CONTENT: &str = "content";

/// For whom leases are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The agent, which deletes all of its leases itself.
    Agent,
    /// A person who pulls by hand. Nobody deletes such a lease if the pull fails, and no agent beside may.
    Person,
}

impl Owner {
    /// Beginning of the ids of the owner's leases.
    fn prefix(self) -> &'static str {
        match self {
            Self::Agent => "edgecore-prepull-",
            Self::Person => "prepull-by-hand-",
        }
    }

    /// Lifetime of a lease. A lease cannot be renewed, and one that expires during a pull takes the fetched content with
    /// it: a machine without a battery for its clock boots with the time at which it was switched off, pulls, and then
    /// jumps forward by as long as it was off.
    fn lifetime(self) -> Duration {
        match self {
            Self::Agent => DAY * 30,
            Self::Person => DAY * 2,
        }
    }
}

/// One lease per image reference.
#[derive(Debug)]
pub(crate) struct Leases {
    client: LeasesClient<Channel>,
    owner: Owner,
    /// Set once the runtime has answered that it knows no leases.
    unsupported: AtomicBool,
}

/// A blob, as leases name it.
pub(crate) fn of_blob(digest: &str) -> Resource {
    Resource { id: digest.to_owned(), r#type: "content".to_owned() }
}

/// A snapshot, as leases name it.
pub(crate) fn of_snapshot(snapshotter: &str, name: &str) -> Resource {
    Resource { id: name.to_owned(), r#type: format!("snapshots/{snapshotter}") }
}

/// A request whose content the lease keeps.
pub(super) fn leased<T>(message: T, lease: &MetadataValue<Ascii>) -> Request<T> {
    let mut request = namespaced(message);
    request.metadata_mut().insert(LEASE_HEADER, lease.clone());
    request
}

impl Leases {
    pub(crate) fn new(channel: Channel, owner: Owner) -> Self {
        Self { client: LeasesClient::new(channel), owner, unsupported: AtomicBool::new(false) }
    }

    /// Creates the lease of the reference, unless an earlier attempt has, and returns the value for [`LEASE_HEADER`].
    /// `None` if the runtime has no leases or does not answer in time: pull without.
    pub(crate) async fn acquire(&self, reference: &str) -> Option<MetadataValue<Ascii>> {
        let id = lease_id(self.owner, reference);
        self.create(&id).await.then(|| id.parse().ok()).flatten()
    }

    /// Keeps blobs and snapshots by a lease, as far as they are there. What cannot be kept is fetched or unpacked again if
    /// it is lost.
    pub(crate) async fn keep(&self, lease: &MetadataValue<Ascii>, resources: impl Iterator<Item = Resource>) {
        let Ok(id) = lease.to_str() else { return };
        for resource in resources {
            let request = namespaced(AddResourceRequest { id: id.to_owned(), resource: Some(resource) });
            let added = timeout(PATIENCE, self.client.clone().add_resource(request)).await;
            if let Ok(Err(status)) = added {
                tracing::debug!(lease = id, %status, "cannot be kept by the lease");
            }
        }
    }

    /// Deletes the lease of a pull that is done. The image keeps the content from now on.
    pub(crate) async fn release(&self, reference: &str) {
        self.delete(lease_id(self.owner, reference), false).await;
    }

    /// Deletes the lease of a pull that nobody will resume, and has containerd remove the content.
    pub(crate) async fn give_up(self: &Arc<Self>, reference: &str) {
        self.delete(lease_id(self.owner, reference), true).await;
        self.sweep_later();
    }

    /// Deletes the leases that no reference in `wanted` has: those that are older than a day, or all of them. Returns
    /// whether a lease of ours is left.
    pub(crate) async fn release_unwanted(self: &Arc<Self>, wanted: &[String], all: bool) -> bool {
        if self.unsupported.load(Ordering::Relaxed) {
            return false;
        }
        let mut client = self.client.clone();
        let list = client.list(namespaced(ListRequest { filters: Vec::new() }));
        // Without an answer nothing is known: ask again.
        let Ok(answer) = timeout(PATIENCE, list).await else { return true };
        let leases = match answer {
            Ok(answer) => answer.into_inner().leases,
            Err(status) => return !self.notice_unsupported(&status),
        };
        let wanted: HashSet<String> =
            wanted.iter().map(|reference| lease_id(self.owner, reference)).collect();
        let now = SystemTime::now();
        let (mut left, mut deleted) = (false, false);
        for lease in leases.into_iter().filter(|lease| lease.id.starts_with(self.owner.prefix())) {
            let created = lease.created_at.and_then(|at| SystemTime::try_from(at).ok());
            if !wanted.contains(&lease.id) && (all || has_passed(created, now)) {
                self.delete(lease.id, true).await;
                deleted = true;
            } else {
                left = true;
            }
        }
        if deleted {
            self.sweep_later();
        }
        left
    }

    /// Number of our leases. `None` if the runtime has no leases, or does not answer.
    pub(crate) async fn count(&self) -> Option<usize> {
        let list = self.client.clone().list(namespaced(ListRequest { filters: Vec::new() })).await;
        let leases = list.ok()?.into_inner().leases;
        Some(leases.iter().filter(|lease| lease.id.starts_with(self.owner.prefix())).count())
    }

    /// Finds a lease of somebody else that holds this content, other than those in `ignored`.
    pub(crate) async fn other_holder(&self, digest: &str, ignored: &HashSet<String>) -> Option<String> {
        let list = self.client.clone().list(namespaced(ListRequest { filters: Vec::new() })).await;
        let leases = list.ok()?.into_inner().leases;
        let is_ours =
            |id: &str| [Owner::Agent, Owner::Person].iter().any(|owner| id.starts_with(owner.prefix()));
        let others =
            leases.into_iter().map(|lease| lease.id).filter(|id| !is_ours(id) && !ignored.contains(id));
        for id in others.take(MAX_OTHERS) {
            let request = namespaced(ListResourcesRequest { id: id.clone() });
            let Ok(answer) = self.client.clone().list_resources(request).await else { continue };
            if answer.into_inner().resources.iter().any(|resource| resource.id == digest) {
                return Some(id);
            }
        }
        None
    }

    /// What an earlier pull with this lease was unpacking when it was killed, by snapshotter and name. Nothing for a person:
    /// two processes that pull one image by hand have one lease, and what is half unpacked may be the other's. The agent has
    /// one pull of an image at a time.
    pub(crate) async fn half_unpacked(&self, lease: &MetadataValue<Ascii>) -> Vec<(String, String)> {
        if self.owner == Owner::Person {
            return Vec::new();
        }
        let resources = self.resources(lease).await.unwrap_or_default();
        let half = resources.into_iter().filter(|resource| is_extraction(&resource.id));
        half.filter_map(|Resource { id, r#type }| Some((r#type.strip_prefix(SNAPSHOTS)?.to_owned(), id)))
            .collect()
    }

    /// Digests of the blobs that a lease keeps. `None` without an answer.
    pub(crate) async fn blobs(&self, lease: &MetadataValue<Ascii>) -> Option<Vec<String>> {
        let resources = self.resources(lease).await?.into_iter();
        Some(resources.filter(|resource| resource.r#type == CONTENT).map(|resource| resource.id).collect())
    }

    async fn resources(&self, lease: &MetadataValue<Ascii>) -> Option<Vec<Resource>> {
        let request = namespaced(ListResourcesRequest { id: lease.to_str().ok()?.to_owned() });
        let answer = timeout(PATIENCE, self.client.clone().list_resources(request)).await.ok()?;
        Some(answer.ok()?.into_inner().resources)
    }

    async fn create(&self, id: &str) -> bool {
        if self.unsupported.load(Ordering::Relaxed) {
            return false;
        }
        let expire = humantime::format_rfc3339_seconds(SystemTime::now() + self.owner.lifetime()).to_string();
        let labels = HashMap::from([("containerd.io/gc.expire".to_owned(), expire)]);
        let request = namespaced(CreateRequest { id: id.to_owned(), labels });
        match timeout(PATIENCE, self.client.clone().create(request)).await {
            Ok(Ok(_)) => true,
            // Created by an earlier attempt, whose content is to be resumed.
            Ok(Err(status)) if status.code() == Code::AlreadyExists => true,
            Ok(Err(status)) => {
                self.notice_unsupported(&status);
                false
            }
            Err(_) => false,
        }
    }

    /// Deletes a lease; with `sync`, containerd answers when it has collected garbage. One that cannot be deleted is
    /// met again by [`Self::release_unwanted`].
    async fn delete(&self, id: String, sync: bool) {
        if self.unsupported.load(Ordering::Relaxed) {
            return;
        }
        let request = namespaced(DeleteRequest { id, sync });
        let _ = timeout(PATIENCE, self.client.clone().delete(request)).await;
    }

    fn notice_unsupported(&self, status: &Status) -> bool {
        let unsupported = status.code() == Code::Unimplemented;
        if unsupported {
            self.unsupported.store(true, Ordering::Relaxed);
        }
        unsupported
    }

    /// Collects garbage once more, for what was still open at first.
    fn sweep_later(self: &Arc<Self>) {
        let leases = Arc::clone(self);
        tokio::spawn(async move {
            sleep(CLOSING).await;
            let broom = format!("{}{BROOM}", leases.owner.prefix());
            if leases.create(&broom).await {
                leases.delete(broom, true).await;
            }
        });
    }
}

/// Whether a lease that was created then is a day old. One without a time counts as old.
fn has_passed(created: Option<SystemTime>, now: SystemTime) -> bool {
    created.is_none_or(|created| now.duration_since(created).is_ok_and(|age| age >= KEPT))
}

fn lease_id(owner: Owner, reference: &str) -> String {
    let hash = ring::digest::digest(&ring::digest::SHA256, reference.as_bytes());
    hash.as_ref().iter().take(16).fold(owner.prefix().to_owned(), |mut id, byte| {
        // Writing to a String cannot fail.
        let _ = write!(id, "{byte:02x}");
        id
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reference_has_a_lease_of_its_own_for_each_owner() {
        let of = |owner| [lease_id(owner, "r.io/a:1"), lease_id(owner, "r.io/a:2")];
        let [first, second] = of(Owner::Agent);
        assert_eq!(of(Owner::Agent), [first.clone(), second.clone()]);
        assert_ne!(first, second);
        for by_hand in of(Owner::Person) {
            assert!(!by_hand.starts_with(Owner::Agent.prefix()), "an agent beside must not delete it");
        }
    }

    #[test]
    fn what_nobody_wants_is_kept_for_a_day() {
        let now = SystemTime::UNIX_EPOCH + KEPT * 20_000;
        let old = |age| has_passed(Some(now - age), now);
        assert_eq!((old(Duration::ZERO), old(KEPT / 25 * 24), old(KEPT)), (false, false, true));
        // The clock was set back since.
        assert!(!has_passed(Some(now + KEPT), now));
        assert!(has_passed(None, now));
    }
}
