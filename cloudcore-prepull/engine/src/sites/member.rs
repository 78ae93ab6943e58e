//! A node, as far as its site is concerned.

use std::sync::Arc;

use jiff::Timestamp;

/// A node, as far as its site is concerned.
#[derive(Debug, Default)]
pub(super) struct Member {
    /// The value of its label. `None`: it shares with nobody.
    pub(super) site: Option<Arc<str>>,
    pub(super) is_online: bool,
    /// Until when it is expected back, if it has lost its session just now.
    pub(super) back_until: Option<Timestamp>,
    /// Where it serves its neighbours. `None`: it serves none.
    pub(super) addresses: Option<Arc<[String]>>,
}

impl Member {
    /// Until when it is worth waiting for, rather than fetching once more what it has.
    pub(super) fn awaited_until(&self, now: Timestamp) -> Option<Timestamp> {
        self.back_until.filter(|until| !self.is_online && self.addresses.is_some() && *until > now)
    }

    /// Whether a neighbour can be sent to it.
    pub(super) fn serves(&self) -> bool {
        self.is_online && self.addresses.is_some()
    }
}
