//! Leases that keep the content of an unfinished pull, so that the next attempt resumes it.
//!
//! containerd garbage collects the content of a failed pull within a second, whole layers included, because the lease
//! that it creates for the pull ends with it. A pull that names a lease of ours uses that one instead, and ours stays
//! for the next attempt. Tried with containerd 1.6.20: of a layer of 52 MB that broke after 25 MB, the next attempt
//! fetched the other 27 MB with a `Range` request, also after containerd itself had been killed in between. A runtime
//! that does not know the header ignores it.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use containerd_client::services::v1::leases_client::LeasesClient;
use containerd_client::services::v1::{CreateRequest, DeleteRequest};
use tokio::time::timeout;
use tonic::Code;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;

use super::namespace::namespaced;

/// gRPC header in which containerd's clients name the lease of a request.
pub(crate) const LEASE_HEADER: &str = "containerd-lease";
/// Period after which an image gets a new lease. containerd's own leases of pulls expire after a day too: a
/// pull is resumed within a day or never, and the space of an abandoned one is free soon after.
const DAY: Duration = Duration::from_secs(24 * 3600);
/// Lifetime of a lease. A lease cannot be renewed, and one that expires during a pull takes the fetched content with
/// it. Therefore each day has a lease of its own, which also references the content of the day before that the pull
/// meets, and which has at least one day left at any moment of its day.
const LIFETIME: Duration = DAY.saturating_mul(2);
/// Longest wait for an answer about a lease: a pull works without one.
const PATIENCE: Duration = Duration::from_secs(5);

/// One lease per image reference and day.
#[derive(Debug)]
pub(crate) struct Leases {
    client: LeasesClient<Channel>,
    /// Set once the runtime has answered that it knows no leases.
    unsupported: AtomicBool,
}

impl Leases {
    pub(crate) fn new(channel: Channel) -> Self {
        Self { client: LeasesClient::new(channel), unsupported: AtomicBool::new(false) }
    }

    /// Creates today's lease of the reference, unless an earlier attempt has, and returns the value for
    /// [`LEASE_HEADER`]. `None` if the runtime has no leases or does not answer in time: pull without.
    pub(crate) async fn acquire(&self, reference: &str) -> Option<MetadataValue<Ascii>> {
        if self.unsupported.load(Ordering::Relaxed) {
            return None;
        }
        let now = SystemTime::now();
        let id = lease_id(reference, days_since_1970(now));
        let expire = humantime::format_rfc3339_seconds(now + LIFETIME).to_string();
        let labels = HashMap::from([("containerd.io/gc.expire".to_owned(), expire)]);
        let request = namespaced(CreateRequest { id: id.clone(), labels });
        match timeout(PATIENCE, self.client.clone().create(request)).await.ok()? {
            Ok(_) => {}
            // Created by an earlier attempt, whose content is to be resumed.
            Err(status) if status.code() == Code::AlreadyExists => {}
            Err(status) => {
                if status.code() == Code::Unimplemented {
                    self.unsupported.store(true, Ordering::Relaxed);
                }
                return None;
            }
        }
        id.parse().ok()
    }

    /// Deletes the leases of a pull that is done, or that nobody will resume.
    pub(crate) async fn release(&self, reference: &str) {
        if self.unsupported.load(Ordering::Relaxed) {
            return;
        }
        let today = days_since_1970(SystemTime::now());
        for day in today.saturating_sub(2)..=today {
            let request = namespaced(DeleteRequest { id: lease_id(reference, day), sync: false });
            // Most days have no lease, and one that cannot be deleted expires.
            let _ = timeout(PATIENCE, self.client.clone().delete(request)).await;
        }
    }
}

fn days_since_1970(now: SystemTime) -> u64 {
    now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs() / DAY.as_secs()
}

fn lease_id(reference: &str, day: u64) -> String {
    let hash = ring::digest::digest(&ring::digest::SHA256, reference.as_bytes());
    hash.as_ref().iter().take(16).fold(format!("edgecore-prepull-{day}-"), |mut id, byte| {
        // Writing to a String cannot fail.
        let _ = write!(id, "{byte:02x}");
        id
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_day_has_a_lease_that_outlives_it_by_a_day() {
        let noon = SystemTime::UNIX_EPOCH + DAY * 20_000 + DAY / 2;
        let evening = noon + DAY / 2 - Duration::from_secs(1);
        let next = evening + Duration::from_secs(1);
        let of = |reference, moment| lease_id(reference, days_since_1970(moment));
        assert_eq!(of("r.io/a:1", noon), of("r.io/a:1", evening));
        assert_ne!(of("r.io/a:1", evening), of("r.io/a:1", next));
        assert_ne!(of("r.io/a:1", noon), of("r.io/a:2", noon));
        // A lease created in the first moment of the day may be used in the last.
        assert!(LIFETIME >= DAY + DAY);
    }
}
