//! The site, as the blobs of one image share it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use prepull_api::task::TaskId;
use prepull_api::wire::truncate_note;
use tokio::time::Instant;

use crate::cloud::identity::Identity;
use crate::images::puller::PullTerms;
use crate::images::site::Hub;

/// How this node gets blobs from its neighbours.
#[derive(Clone, Debug)]
pub(crate) struct Neighbourhood {
    pub(crate) hub: Arc<Hub>,
    /// The certificate that neighbours are shown.
    pub(crate) identity: Identity,
}

/// What the blobs of one image share of it.
pub(super) struct ImageSharing<'a> {
    pub(super) neighbourhood: &'a Neighbourhood,
    /// The task that names the image.
    pub(super) task: &'a TaskId,
    pub(super) site_limited: bool,
    pub(super) deadline: Option<Instant>,
    pub(super) from_peers: AtomicU64,
    pub(super) why_not: OnceLock<String>,
}

impl<'a> ImageSharing<'a> {
    /// `None` where the task doesn't share.
    pub(super) fn new(neighbourhood: &'a Neighbourhood, terms: &PullTerms<'a>) -> Option<Self> {
        let PullTerms { shared_for, site_limited, deadline, .. } = *terms;
        let (task, from_peers, why_not) = (shared_for?, AtomicU64::new(0), OnceLock::new());
        Some(Self { neighbourhood, task, site_limited, deadline, from_peers, why_not })
    }

    /// Bytes that neighbours have delivered.
    pub(super) fn delivered(&self) -> Option<u64> {
        Some(self.from_peers.load(Ordering::Relaxed)).filter(|bytes| *bytes > 0)
    }

    /// The first reason for a blob that could come from no neighbour; empty if there is none.
    pub(super) fn why_not(&self) -> String {
        self.why_not.get().map(|why| truncate_note(why)).unwrap_or_default()
    }
}
