//! Keeps what a pull has fetched, so that the next try goes on from there.
//!
//! containerd holds the content of a pull by a lease that ends with the request. So when a try fails, or when the
//! agent is killed, the layers that are whole and the beginnings of the others are garbage at once, and all of it
//! is fetched again. A request may bring a lease of its own instead, which outlives it:
//! <https://github.com/containerd/containerd/blob/v1.6.20/docs/garbage-collection.md>.
//!
//! It is given back when the image is there (the image holds its content by itself) and when nobody will go on
//! with the pull. A runtime without leases (CRI-O) pulls just as well, from the start.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use containerd_client::services::v1::leases_client::LeasesClient;
use containerd_client::services::v1::{CreateRequest, DeleteRequest, ListRequest};
use tokio::time::timeout;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use super::progress::request;

/// As long as containerd's own leases of pulls: for an agent that is never started again.
const LIFETIME: Duration = Duration::from_secs(24 * 3600);
/// A lease is a write of some bytes. Where it takes longer, the pull begins without one.
const PATIENCE: Duration = Duration::from_secs(5);
/// The lease of a request, by containerd's name for it.
const HEADER: &str = "containerd-lease";
/// Marks our leases: the reference that they are for.
const LABEL: &str = "edgecore-prepull/reference";
/// containerd removes the lease after this moment.
const EXPIRES: &str = "containerd.io/gc.expire";

/// Leases in containerd.
#[derive(Debug)]
pub(super) struct Leases {
    client: LeasesClient<Channel>,
    /// By id: those of the pulls that run now.
    used: Mutex<HashSet<String>>,
    count: AtomicU64,
    absent: AtomicBool,
}

/// The lease of one try. What it holds stays when this is dropped.
#[derive(Debug)]
pub(super) struct Lease<'a> {
    leases: &'a Leases,
    id: String,
    header: MetadataValue<Ascii>,
}

impl Leases {
    pub(super) fn new(channel: Channel) -> Self {
        Self {
            client: LeasesClient::new(channel),
            used: Mutex::default(),
            count: AtomicU64::new(0),
            absent: AtomicBool::new(false),
        }
    }

    /// A lease for a try to pull the reference. It takes over what an earlier one holds as the pull meets it.
    /// None where the runtime gives none.
    pub(super) async fn take(&self, reference: &str) -> Option<Lease<'_>> {
        if self.absent.load(Ordering::Relaxed) {
            return None;
        }
        let now = SystemTime::now();
        let nanos = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
        let id = format!("edgecore-prepull-{nanos}-{}", self.count.fetch_add(1, Ordering::Relaxed));
        let header = id.parse().ok()?;
        // Before it exists: it must not be given back in between.
        used(&self.used).insert(id.clone());
        let lease = Lease { leases: self, id: id.clone(), header };
        let expires = humantime::format_rfc3339_seconds(now + LIFETIME).to_string();
        let labels = HashMap::from([(LABEL.to_owned(), reference.to_owned()), (EXPIRES.to_owned(), expires)]);
        let mut client = self.client.clone();
        let created = timeout(PATIENCE, client.create(request(CreateRequest { id, labels }))).await;
        match created {
            Ok(Ok(_)) => Some(lease),
            Ok(Err(status)) => {
                self.note(&status);
                None
            }
            Err(_) => None,
        }
    }

    /// Gives back every lease for the reference that no pull uses.
    pub(super) async fn release(&self, reference: &str) {
        if self.absent.load(Ordering::Relaxed) {
            return;
        }
        if let Ok(Err(status)) = timeout(PATIENCE, self.try_release(reference)).await {
            self.note(&status);
        }
    }

    async fn try_release(&self, reference: &str) -> Result<(), Status> {
        let mut client = self.client.clone();
        let filters = vec![format!("labels.\"{LABEL}\"==\"{reference}\"")];
        let list = client.list(request(ListRequest { filters })).await?.into_inner().leases;
        for lease in list {
            if !used(&self.used).contains(&lease.id) {
                client.delete(request(DeleteRequest { id: lease.id, sync: false })).await?;
            }
        }
        Ok(())
    }

    fn note(&self, status: &Status) {
        if status.code() == Code::Unimplemented {
            self.absent.store(true, Ordering::Relaxed);
        } else {
            tracing::debug!(%status, "no lease");
        }
    }
}

impl Lease<'_> {
    /// Has a request hold what it fetches by this lease.
    pub(super) fn put_on<T>(&self, request: &mut Request<T>) {
        request.metadata_mut().insert(HEADER, self.header.clone());
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        used(&self.leases.used).remove(&self.id);
    }
}

fn used(used: &Mutex<HashSet<String>>) -> MutexGuard<'_, HashSet<String>> {
    used.lock().unwrap_or_else(PoisonError::into_inner)
}
