//! Keeps what a broken pull has fetched, so that the next try goes on where it broke.
//!
//! containerd removes everything of a pull that failed, whole layers included, within a second: what it fetches
//! hangs on a lease that ends with the pull. A pull that names a lease of ours in its request uses that one
//! instead, which stays for the next try. Seen with containerd 1.6.20: of a layer of 52 MB that broke after 25 MB
//! the next try fetched the other 27 MB, with a `Range` request, also when containerd itself had been killed in
//! between. A runtime that does not know the header ignores it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use containerd_client::services::v1::leases_client::LeasesClient;
use containerd_client::services::v1::{CreateRequest, DeleteRequest};
use tokio::time::timeout;
use tonic::Code;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;

use super::namespaced;

/// The header by which containerd's clients name the lease of a request.
pub(super) const HEADER: &str = "containerd-lease";
/// containerd's own leases of pulls live for a day. Whoever goes on with the image does so within that; the room
/// of a pull that nobody goes on with is free again soon after it.
const DAY: Duration = Duration::from_secs(24 * 3600);
/// A lease cannot be renewed, and one that ends under a pull takes what was fetched with it. So each day has its
/// own, which takes over what the pull meets of the one before, and at any moment has a day to live.
const LIFE: Duration = DAY.saturating_mul(2);
/// A lease is worth a short wait and no longer.
const PATIENCE: Duration = Duration::from_secs(5);

/// The leases of pulls, one for each reference.
#[derive(Debug)]
pub(super) struct Leases {
    client: LeasesClient<Channel>,
    absent: AtomicBool,
}

impl Leases {
    pub(super) fn new(channel: Channel) -> Self {
        Self { client: LeasesClient::new(channel), absent: AtomicBool::new(false) }
    }

    /// The lease of a pull, for its header. None where the runtime has none: the pull does without.
    pub(super) async fn hold(&self, reference: &str) -> Option<MetadataValue<Ascii>> {
        if self.absent.load(Ordering::Relaxed) {
            return None;
        }
        let now = SystemTime::now();
        let id = id(reference, today(now));
        let expire = humantime::format_rfc3339_seconds(now + LIFE).to_string();
        let labels = HashMap::from([("containerd.io/gc.expire".to_owned(), expire)]);
        let request = namespaced(CreateRequest { id: id.clone(), labels });
        match timeout(PATIENCE, self.client.clone().create(request)).await.ok()? {
            Ok(_) => {}
            // An earlier try's: just what it is for.
            Err(status) if status.code() == Code::AlreadyExists => {}
            Err(status) => {
                if status.code() == Code::Unimplemented {
                    self.absent.store(true, Ordering::Relaxed);
                }
                return None;
            }
        }
        id.parse().ok()
    }

    /// Nobody goes on with this pull: it is done, or given up.
    pub(super) async fn release(&self, reference: &str) {
        if self.absent.load(Ordering::Relaxed) {
            return;
        }
        let today = today(SystemTime::now());
        for day in today.saturating_sub(2)..=today {
            let request = namespaced(DeleteRequest { id: id(reference, day), sync: false });
            // It may not exist; and if it cannot be removed, it expires.
            let _ = timeout(PATIENCE, self.client.clone().delete(request)).await;
        }
    }
}

fn today(now: SystemTime) -> u64 {
    now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs() / DAY.as_secs()
}

fn id(reference: &str, day: u64) -> String {
    use std::fmt::Write;
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
    fn each_day_has_a_lease_that_lives_on_for_another_day() {
        let noon = SystemTime::UNIX_EPOCH + DAY * 20_000 + DAY / 2;
        let evening = noon + DAY / 2 - Duration::from_secs(1);
        let next = evening + Duration::from_secs(1);
        let of = |reference, moment| id(reference, today(moment));
        assert_eq!(of("r.io/a:1", noon), of("r.io/a:1", evening));
        assert_ne!(of("r.io/a:1", evening), of("r.io/a:1", next));
        assert_ne!(of("r.io/a:1", noon), of("r.io/a:2", noon));
        // Made in the first moment of the day, used in the last.
        assert!(LIFE >= DAY + DAY);
    }
}
