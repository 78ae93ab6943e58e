//! The rate limits of one pull: the node's, its task's, and that of the site.

use std::num::NonZeroU64;

use crate::images::puller::PullTerms;
use crate::images::rate::Bucket;

/// The buckets that each byte of a pull must pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct PullBuckets<'a> {
    pub(super) node: &'a Bucket,
    /// The bucket of the task, if it has one.
    pub(super) own: Option<&'a Bucket>,
    /// The site's limit as a whole, for what is fetched without a word from the cloud. Bytes from neighbours don't count.
    pub(super) site: Option<&'a Bucket>,
}

impl<'a> PullBuckets<'a> {
    pub(super) fn new(node: &'a Bucket, terms: &PullTerms<'a>) -> Self {
        Self { node, own: terms.bucket, site: terms.site }
    }

    /// Whether a pull by the runtime would break a limit.
    pub(super) fn are_limited(self) -> bool {
        self.uplink_limit().is_some()
    }

    /// The lowest of all limits, which holds for bytes that cross the uplink.
    pub(super) fn uplink_limit(self) -> Option<NonZeroU64> {
        [self.limit(), self.site.and_then(Bucket::rate)].into_iter().flatten().min()
    }

    /// The lower one of the node's limit and the task's, if there is one.
    pub(super) fn limit(self) -> Option<NonZeroU64> {
        let rates = [self.node.rate(), self.own.and_then(Bucket::rate)];
        rates.into_iter().flatten().min()
    }

    /// Whether the task has a limit of its own.
    pub(super) fn has_own(self) -> bool {
        self.own.is_some_and(|bucket| bucket.rate().is_some())
    }

    /// Takes bytes that have arrived. The task's own limit is suspended while a pull without one waits for them.
    pub(super) async fn take(self, bytes: usize, hurried: bool) {
        self.node.take(bytes).await;
        if let Some(own) = self.own.filter(|_| !hurried) {
            own.take(bytes).await;
        }
    }
}
