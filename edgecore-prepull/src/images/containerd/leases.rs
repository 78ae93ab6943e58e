//! Leases that keep the content of an unfinished pull, so that the next attempt resumes it.
//!
//! containerd garbage collects the content of a failed pull within a second, whole layers included, because the lease
//! that it creates for the pull ends with it. A pull that names a lease of ours uses that one instead, and ours stays
//! for the next attempt. Tried with containerd 1.6.20: for a layer of 52 MB that broke after 25 MB, the next attempt
//! fetched the other 27 MB with a `Range` request, even after containerd itself had been killed in between. A runtime
//! that doesn't know the header ignores it.
//!
//! The kubelet can't remove leased content: it evicts pods instead. So we delete a lease as soon as no task wants it,
//! and its expiry only covers a node without an agent.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use containerd_client::services::v1::leases_client::LeasesClient;
use containerd_client::services::v1::{
    AddResourceRequest, CreateRequest, DeleteRequest, Lease, ListRequest, ListResourcesRequest, Resource,
};
use tokio::time::{sleep, timeout};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::namespace::namespaced;
use super::unpack::is_extraction;
use crate::clock::CloudClock;

/// Name of an empty lease. Deleting it triggers containerd's garbage collection.
const BROOM: &str = "broom";
/// Suffix of the names of leases for neighbours.
const NEIGHBOURS: &str = "-neighbours";
/// Time for which a delta is kept after the image was rebuilt from it: the other nodes of a site pull within the hour, or
/// their window comes tomorrow, and then one of them downloads it again.
const SHARED: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);
/// Longest wait for an answer about a lease. A pull also works without one.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time for a stopped pull to close the blobs that it was writing: garbage collection skips open blobs.
const CLOSING: Duration = Duration::from_secs(2);

/// Most foreign leases that we look at: the runtime has one for each of its pulls.
const MAX_OTHERS: usize = 32;

/// The label of a lease with the time at which containerd removes it, by its machine's clock.
const EXPIRE: &str = "containerd.io/gc.expire";
/// Prefix of the type of a snapshot in a lease. The name of its snapshotter follows.
const SNAPSHOTS: &str = "snapshots/";
/// The type of a blob in a lease.
const CONTENT: &str = "content";

/// The owner of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The agent, which deletes all of its leases itself.
    Agent,
    /// A person who pulls by hand. If the pull fails, the lease expires: an agent on the same node must not delete it.
    Person,
}

impl Owner {
    /// Prefix of the ids of the owner's leases.
    fn id_prefix(self) -> &'static str {
        match self {
            Self::Agent => "edgecore-prepull-",
            Self::Person => "prepull-by-hand-",
        }
    }

    /// Lifetime of a lease. It can't be extended, and if it ends during a pull, the fetched content is lost. Where the cloud's
    /// time isn't known, it must outlast a jump of the clock: a machine without a battery for its clock boots with the time at
    /// which it was switched off, pulls, and then jumps forward by the time it was off.
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
    /// Set once the runtime has answered that it doesn't support leases.
    unsupported: AtomicBool,
    /// The cloud's time, for an agent.
    clock: OnceLock<Arc<CloudClock>>,
}

/// A blob as a resource of a lease.
pub(crate) fn of_blob(digest: &str) -> Resource {
    Resource { id: digest.to_owned(), r#type: "content".to_owned() }
}

/// A snapshot as a resource of a lease.
pub(crate) fn of_snapshot(snapshotter: &str, name: &str) -> Resource {
    Resource { id: name.to_owned(), r#type: format!("snapshots/{snapshotter}") }
}

impl Leases {
    pub(crate) fn new(channel: Channel, owner: Owner) -> Self {
        let (unsupported, clock) = (AtomicBool::new(false), OnceLock::new());
        Self { client: LeasesClient::new(channel), owner, unsupported, clock }
    }

    /// Has leases outlive the moment at which this machine's clock is set to the time of this one. Only the first call counts.
    pub(crate) fn follow_clock(&self, clock: Arc<CloudClock>) {
        let _ = self.clock.set(clock);
    }

    /// The later one of this machine's time and the cloud's.
    fn latest_time(&self, machine: SystemTime) -> SystemTime {
        self.clock.get().map_or(machine, |clock| machine.max(UNIX_EPOCH + clock.now()))
    }

    /// The end of a lease that is created now.
    pub(crate) fn end_after(&self, lifetime: Duration, machine: SystemTime) -> SystemTime {
        self.latest_time(machine) + lifetime
    }

    /// Creates the lease of the reference, unless an earlier attempt has done so, and returns the value for
    /// [`LEASE_HEADER`]. `None` if the runtime has no leases or doesn't answer in time: pull without one.
    pub(crate) async fn acquire(&self, reference: &str) -> Option<MetadataValue<Ascii>> {
        let id = lease_id(self.owner, reference);
        self.create(&id).await.then(|| id.parse().ok()).flatten()
    }

    /// Adds existing blobs and snapshots to a lease. Anything that can't be added is fetched or unpacked again if it
    /// gets lost.
    pub(crate) async fn add_resources(
        &self,
        lease: &MetadataValue<Ascii>,
        resources: impl Iterator<Item = Resource>,
    ) {
        let Ok(id) = lease.to_str() else { return };
        for resource in resources {
            let request = namespaced(AddResourceRequest { id: id.to_owned(), resource: Some(resource) });
            let added = timeout(PATIENCE, self.client.clone().add_resource(request)).await;
            if let Ok(Err(status)) = added {
                tracing::debug!(lease = id, %status, "cannot be kept by the lease");
            }
        }
    }

    /// Keeps blobs that no image needs for neighbours, for [`SHARED`].
    pub(crate) async fn keep_for_neighbours(&self, reference: &str, digests: &[&str]) {
        let id = neighbours_id(self.owner, reference, digests);
        if self.create_for(&id, SHARED).await
            && let Ok(lease) = id.parse()
        {
            let blobs: Vec<_> = digests.iter().map(|digest| of_blob(digest)).collect();
            self.add_resources(&lease, blobs.into_iter()).await;
        }
    }

    /// Deletes the lease of a completed pull. From now on the image keeps the content.
    pub(crate) async fn release(&self, reference: &str) {
        self.delete(lease_id(self.owner, reference), false).await;
    }

    /// Deletes the lease of an abandoned pull, and has containerd remove its content.
    pub(crate) async fn give_up(self: &Arc<Self>, reference: &str) {
        self.delete(lease_id(self.owner, reference), true).await;
        self.sweep_later();
    }

    /// Deletes the leases of references that aren't in `wanted` and were created at least this long ago. Returns whether a
    /// lease of ours is left.
    pub(crate) async fn release_unwanted(
        self: &Arc<Self>,
        wanted: impl Fn() -> Vec<String>,
        least_age: Duration,
    ) -> bool {
        if self.unsupported.load(Ordering::Relaxed) {
            return false;
        }
        let mut client = self.client.clone();
        let list = client.list(namespaced(ListRequest { filters: Vec::new() }));
        // Without an answer we don't know: ask again.
        let Ok(answer) = timeout(PATIENCE, list).await else { return true };
        let leases = match answer {
            Ok(answer) => answer.into_inner().leases,
            Err(status) => return !self.notice_unsupported(&status),
        };
        // Each deletion takes seconds, and a task may begin in between with a lease that an earlier one left.
        let is_wanted = |id: &str| wanted().iter().any(|reference| lease_id(self.owner, reference) == *id);
        let now = self.latest_time(SystemTime::now());
        let (mut left, mut deleted) = (false, false);
        for lease in leases.into_iter().filter(|lease| lease.id.starts_with(self.owner.id_prefix())) {
            let created = creation_time(&lease, self.owner.lifetime());
            if is_as_old(created, least_age, now) && !is_wanted(&lease.id) {
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

    /// Number of our leases. `None` if the runtime has no leases, or doesn't answer.
    pub(crate) async fn count(&self) -> Option<usize> {
        let list = self.client.clone().list(namespaced(ListRequest { filters: Vec::new() })).await;
        let leases = list.ok()?.into_inner().leases;
        Some(leases.iter().filter(|lease| lease.id.starts_with(self.owner.id_prefix())).count())
    }

    /// Finds a foreign lease that holds this content, except those in `ignored`.
    pub(crate) async fn other_holder(&self, digest: &str, ignored: &HashSet<String>) -> Option<String> {
        let list = self.client.clone().list(namespaced(ListRequest { filters: Vec::new() })).await;
        let leases = list.ok()?.into_inner().leases;
        let is_ours =
            |id: &str| [Owner::Agent, Owner::Person].iter().any(|owner| id.starts_with(owner.id_prefix()));
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

    /// Snapshots that an earlier pull with this lease was unpacking when it was killed, by snapshotter and name. Empty
    /// for a person: two processes that pull one image by hand share a lease, so the snapshot may be the other's work
    /// in progress. The agent runs only one pull of an image at a time.
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
    pub(crate) async fn kept_blobs(&self, lease: &MetadataValue<Ascii>) -> Option<Vec<String>> {
        let resources = self.resources(lease).await?.into_iter();
        Some(resources.filter(|resource| resource.r#type == CONTENT).map(|resource| resource.id).collect())
    }

    async fn resources(&self, lease: &MetadataValue<Ascii>) -> Option<Vec<Resource>> {
        let request = namespaced(ListResourcesRequest { id: lease.to_str().ok()?.to_owned() });
        let answer = timeout(PATIENCE, self.client.clone().list_resources(request)).await.ok()?;
        Some(answer.ok()?.into_inner().resources)
    }

    async fn create(&self, id: &str) -> bool {
        self.create_for(id, self.owner.lifetime()).await
    }

    async fn create_for(&self, id: &str, lifetime: Duration) -> bool {
        if self.unsupported.load(Ordering::Relaxed) {
            return false;
        }
        let end = self.end_after(lifetime, SystemTime::now());
        let labels = HashMap::from([(EXPIRE.to_owned(), humantime::format_rfc3339_seconds(end).to_string())]);
        let request = namespaced(CreateRequest { id: id.to_owned(), labels });
        match timeout(PATIENCE, self.client.clone().create(request)).await {
            Ok(Ok(_)) => true,
            // An earlier attempt created it, and we resume that one's content.
            Ok(Err(status)) if status.code() == Code::AlreadyExists => true,
            Ok(Err(status)) => {
                self.notice_unsupported(&status);
                false
            }
            Err(_) => false,
        }
    }

    /// Deletes a lease. With `sync`, containerd answers after its garbage collection. If it fails,
    /// [`Self::release_unwanted`] tries again.
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

    /// Collects garbage again later, for blobs that were still open the first time.
    fn sweep_later(self: &Arc<Self>) {
        let leases = Arc::clone(self);
        tokio::spawn(async move {
            sleep(CLOSING).await;
            let broom = format!("{}{BROOM}", leases.owner.id_prefix());
            if leases.create(&broom).await {
                leases.delete(broom, true).await;
            }
        });
    }
}

/// When a lease with this lifetime was created: by its expiry, which follows the cloud's time, if that's later than by the
/// machine's clock.
fn creation_time(lease: &Lease, lifetime: Duration) -> Option<SystemTime> {
    let by_machine = lease.created_at.and_then(|at| SystemTime::try_from(at).ok());
    let expires = lease.labels.get(EXPIRE).and_then(|text| humantime::parse_rfc3339(text).ok());
    by_machine.max(expires.and_then(|end| end.checked_sub(lifetime)))
}

/// Whether a lease with this creation time is at least this old. One without a time counts as old. Every one is at least zero
/// old, also where the clock was set back.
fn is_as_old(created: Option<SystemTime>, least_age: Duration, now: SystemTime) -> bool {
    let Some(created) = created else { return true };
    now.duration_since(created).unwrap_or_default() >= least_age
}

fn lease_id(owner: Owner, reference: &str) -> String {
    let hash = ring::digest::digest(&ring::digest::SHA256, reference.as_bytes());
    hash.as_ref().iter().take(16).fold(owner.id_prefix().to_owned(), |mut id, byte| {
        // Writing to a String cannot fail.
        let _ = write!(id, "{byte:02x}");
        id
    })
}

/// The name of a lease for neighbours. The next update of the same reference has another one, with an hour of its own: containerd
/// can't move the end of a lease.
fn neighbours_id(owner: Owner, reference: &str, digests: &[&str]) -> String {
    format!("{}{NEIGHBOURS}", lease_id(owner, &format!("{reference} {}", digests.join(" "))))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::images::runtime::RuntimeEndpoint;
    use crate::images::runtime::fake::{FakeAnswers, serve};

    #[test]
    fn each_reference_and_owner_has_a_lease() {
        let of = |owner| [lease_id(owner, "r.io/a:1"), lease_id(owner, "r.io/a:2")];
        let [first, second] = of(Owner::Agent);
        assert_eq!(of(Owner::Agent), [first.clone(), second.clone()]);
        assert_ne!(first, second);
        for by_hand in of(Owner::Person) {
            assert!(!by_hand.starts_with(Owner::Agent.id_prefix()), "an agent beside must not delete it");
        }
    }

    #[test]
    fn each_update_is_kept_for_neighbours_by_itself() {
        let of = |digests: &[&str]| neighbours_id(Owner::Agent, "r.io/a:1", digests);
        let first = of(&["sha256:a", "sha256:b"]);
        assert_eq!(of(&["sha256:a", "sha256:b"]), first);
        assert_ne!(of(&["sha256:a", "sha256:c"]), first);
        assert!(first.starts_with(Owner::Agent.id_prefix()) && first.ends_with(NEIGHBOURS), "{first}");
    }

    /// A service with the leases of `a` and `b`, which counts deletions.
    #[derive(Clone, Default)]
    struct FakeLeases(Arc<AtomicUsize>);

    impl FakeAnswers for FakeLeases {
        const SERVICE: &'static str = "containerd.services.leases.v1.Leases";

        fn answer(&self, method: &str) -> Result<Vec<u8>, Status> {
            if method == "Delete" {
                self.0.fetch_add(1, Ordering::Relaxed);
                return Ok(Vec::new());
            }
            // Field 1 of ListResponse is a lease, with its id as field 1.
            let field = |content: &[u8]| [&[10, u8::try_from(content.len()).unwrap()], content].concat();
            let lease = |name| field(&field(lease_id(Owner::Agent, name).as_bytes()));
            Ok(["a", "b"].map(lease).concat())
        }
    }

    #[tokio::test]
    async fn tidying_spares_what_becomes_wanted() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, fake) = (dir.path().join("containerd.sock"), FakeLeases::default());
        let _server = serve(&socket, fake.clone());
        let endpoint: RuntimeEndpoint = format!("unix://{}", socket.display()).parse().unwrap();
        let leases = Arc::new(Leases::new(endpoint.connect_lazily(), Owner::Agent));
        let deleted = || fake.0.load(Ordering::Relaxed);
        let wanted = || if deleted() == 0 { Vec::new() } else { vec!["b".to_owned()] };
        assert!(leases.release_unwanted(wanted, Duration::ZERO).await, "one is left");
        assert_eq!(deleted(), 1);
    }

    #[test]
    fn the_age_follows_the_clouds_time() {
        let cloud = UNIX_EPOCH + DAY * 20_000;
        let made_at = |machine: SystemTime, end: SystemTime| {
            let labels = HashMap::from([(EXPIRE.to_owned(), humantime::format_rfc3339(end).to_string())]);
            creation_time(&Lease { created_at: Some(machine.into()), labels, ..Lease::default() }, DAY * 30)
        };
        assert_eq!(made_at(UNIX_EPOCH + DAY, cloud + DAY * 30), Some(cloud), "the clock wasn't set");
        assert_eq!(made_at(cloud, cloud + DAY * 30), Some(cloud));
        assert_eq!(made_at(cloud, cloud + SHARED), Some(cloud), "for neighbours");
        assert_eq!(creation_time(&Lease::default(), DAY), None);
    }

    #[test]
    fn unwanted_leases_go_by_their_age() {
        let now = SystemTime::UNIX_EPOCH + DAY * 20_000;
        let old = |age| is_as_old(Some(now - age), DAY, now);
        assert_eq!((old(Duration::ZERO), old(DAY / 25 * 24), old(DAY)), (false, false, true));
        // The clock was set back in between.
        assert!(!is_as_old(Some(now + DAY), DAY, now));
        assert!(is_as_old(Some(now + DAY), Duration::ZERO, now));
        assert!(is_as_old(None, DAY, now));
    }
}
