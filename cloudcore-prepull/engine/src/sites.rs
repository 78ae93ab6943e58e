//! The tracker of sites: which node carries which layer over the site's uplink, and who gets it from whom. Pure.
//!
//! ```text
//!  Blobs (wanted, carried, here) ─▶ Book (site, images, digest) ─▶ advance ─▶ Sources (registry, neighbours, wait)
//!                                     ▲ leases, faults, time
//! ```
//!
//! What holds whatever nodes do:
//! - Of each blob, a site has at most one carrier with a lease. Who can reach no neighbour downloads for itself, and is none.
//! - A node is sent only to neighbours that have said that they have the blob as part of the same images.
//! - Nobody waits for ever: who makes no progress loses its lease, and another one takes over.
//!
//! Nothing of it is stored. After a failover the nodes say what they have and want, and the tracker begins with that.

mod assign;
mod book;
mod faults;
mod member;
mod report;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use prepull_api::sites::{BlobNews, BlobState, Blobs, MAX_BLOBS, MAX_PEERS, is_digest};
use prepull_api::task::{NodeName, TaskId};
use prepull_api::wire::Hello;
use serde::{Deserialize, Serialize};

use crate::shared::node_view::NodeView;
use book::{Book, BookId, Seeker, Way};
use faults::Faults;
use member::Member;
pub use report::{CarrierReport, SiteCounters, SiteEvent, SiteEventKind, SiteReport};

/// Shortest time between two looks at a site: a burst of messages is answered at once.
const PACE: Duration = Duration::from_millis(100);
/// Time without enough progress after which a carrier is replaced, and a neighbour is left.
const LEASE: Duration = Duration::from_secs(60);
/// The same for a carrier that has lost its session, and the time that one who has a blob is waited for then: a restart of
/// the agent takes less.
const OFFLINE_LEASE: Duration = Duration::from_secs(30);
/// Time that a carrier has to come back when a neighbour is back: the uplink was gone for all.
const RETURN: Duration = Duration::from_secs(15);
/// Interval of telling a node that waits that it is not forgotten. It is a third of the shortest patience of agents.
const REMINDER: Duration = Duration::from_secs(20);
/// Time for which it is remembered who has a blob that nobody asks for: a wave may begin hours after the one before.
const MEMORY: Duration = Duration::from_secs(6 * 3600);
/// Most blobs of a site that are known at a time, each some hundred bytes and a name for each of its nodes.
const MAX_BOOKS: usize = 4096;
/// Most nodes that are remembered to have a blob.
const MAX_HOLDERS: usize = 256;

const NO_SITE: &str =
    "its Node has no label that says which site it is at (--site-label of cloudcore-prepull)";
const NO_BOOK: &str =
    "its site has too many layers to be kept track of, or others say another size of this one";
pub(crate) const NOT_SHARED: &str = "the job does not share layers any more, or does not wait for the task";

/// How nodes are grouped, and what holds for jobs that do not say whether they share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SiteSettings {
    /// The label of a Node whose value is its site.
    pub label: String,
    /// Whether a job shares that does not say so, and whether NodeImages do.
    pub share_by_default: bool,
}

impl SiteSettings {
    /// The site of a Node with these labels. `None`: it is at none.
    pub fn site_of<'a>(&self, labels: &'a BTreeMap<String, String>) -> Option<&'a str> {
        labels.get(&self.label).map(String::as_str).filter(|site| !site.is_empty())
    }
}

impl Default for SiteSettings {
    fn default() -> Self {
        Self { label: SITE_LABEL.to_owned(), share_by_default: false }
    }
}

/// The label of a Node whose value is its site, unless told otherwise.
pub const SITE_LABEL: &str = prepull_api::edges::SITE_LABEL;

/// What the nodes that carry out a task share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shared {
    /// The references of all its images, in order: who may have these may have their layers.
    pub(crate) images: Arc<str>,
    /// Bytes a second over the uplink of each site.
    pub(crate) max_rate: Option<NonZeroU64>,
}

/// What a node is told of some blobs. The tickets are signed where the key is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Directions {
    /// The node.
    pub node: NodeName,
    /// The task that it has named.
    pub task: TaskId,
    /// For each blob, where to get it. At most [`MAX_BLOBS`].
    pub blobs: Vec<(String, Direction)>,
}

/// Where a node gets a blob from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the registry.
    Registry {
        /// Why from no neighbour; empty for the carrier.
        alone: &'static str,
        /// Its part of the site's limit, in bytes a second.
        max_rate: Option<NonZeroU64>,
    },
    /// From the first of these neighbours that delivers; each with its addresses.
    Peers(Vec<(NodeName, Arc<[String]>)>),
    /// From nobody yet.
    Wait,
}

/// All sites.
#[derive(Debug, Default)]
pub struct Sites {
    settings: SiteSettings,
    members: BTreeMap<NodeName, Member>,
    by_name: BTreeMap<Arc<str>, Site>,
    /// What nodes are told without a look at their site.
    refusals: Vec<Directions>,
}

/// What is known of one site.
#[derive(Debug, Default)]
struct Site {
    books: BTreeMap<BookId, Book>,
    /// The limits of bytes a second over the uplink, for images that have one.
    rates: BTreeMap<Arc<str>, NonZeroU64>,
    faults: Faults,
    /// When it is to be looked at.
    due: Option<Timestamp>,
    looked_at: Option<Timestamp>,
}

impl Site {
    fn mark(&mut self, now: Timestamp) {
        let earliest = self.looked_at.map_or(now, |last| last.saturating_add(PACE).unwrap_or(now));
        self.wake(earliest.max(now));
    }

    /// The limit of the uplink for these images. One for images that no node shares here is forgotten at the next look.
    fn limit(&mut self, shared: &Shared, now: Timestamp) {
        let Shared { images, max_rate } = shared;
        if self.rates.get(images).copied() != *max_rate {
            match *max_rate {
                Some(rate) => _ = self.rates.insert(images.clone(), rate),
                None => _ = self.rates.remove(images),
            }
            self.mark(now);
        }
    }

    fn wake(&mut self, at: Timestamp) {
        self.due = Some(self.due.map_or(at, |due| due.min(at)));
    }
}

impl Sites {
    /// With these settings.
    pub fn new(settings: SiteSettings) -> Self {
        Self { settings, ..Self::default() }
    }

    /// How nodes are grouped.
    pub fn settings(&self) -> &SiteSettings {
        &self.settings
    }

    /// These are all Nodes that there are.
    pub(crate) fn set_nodes(&mut self, nodes: &[NodeView], now: Timestamp) {
        let listed: BTreeSet<&NodeName> = nodes.iter().map(|node| &node.name).collect();
        let gone: Vec<_> = self.members.keys().filter(|name| !listed.contains(name)).cloned().collect();
        for node in gone {
            self.set_labels(&node, None, now);
        }
        for node in nodes {
            self.set_labels(&node.name, Some(&node.labels), now);
        }
    }

    /// A Node is new or has changed; `None`: it is gone.
    pub(crate) fn set_labels(
        &mut self,
        node: &NodeName,
        labels: Option<&BTreeMap<String, String>>,
        now: Timestamp,
    ) {
        let site = labels.and_then(|labels| self.settings.site_of(labels));
        let member = self.members.entry(node.clone()).or_default();
        if member.site.as_deref() != site {
            let new: Option<Arc<str>> = site.map(Arc::from);
            if let Some(old) = std::mem::replace(&mut member.site, new) {
                self.leave(node, &old, now);
            }
        }
        if labels.is_none() && self.members.get(node).is_some_and(|member| !member.is_online) {
            self.members.remove(node);
        }
    }

    fn leave(&mut self, node: &NodeName, site: &Arc<str>, now: Timestamp) {
        let Some(site) = self.by_name.get_mut(site) else { return };
        for book in site.books.values_mut() {
            book.forget(node, now);
        }
        site.mark(now);
    }

    /// A session of the node has begun.
    pub(crate) fn connect(&mut self, node: &NodeName, hello: &Hello, now: Timestamp) {
        let member = self.members.entry(node.clone()).or_default();
        (member.is_online, member.back_until) = (true, None);
        member.addresses =
            hello.peer.as_ref().filter(|door| door.is_valid()).map(|door| door.addresses.as_slice().into());
        let Some(site) = member.site.clone().and_then(|site| self.by_name.get_mut(&site)) else { return };
        site.faults.forget_connections(node);
        let back = now.saturating_add(RETURN).unwrap_or(now);
        for book in site.books.values_mut() {
            book.reconnect(node, back);
            // The uplink may have been gone for all of them; whoever comes first must not begin what another one has half.
            book.prolong_offline_carrier(back, |node| {
                self.members.get(node).is_some_and(|member| member.is_online)
            });
        }
        site.mark(now);
    }

    /// The session of the node has ended.
    pub(crate) fn disconnect(&mut self, node: &NodeName, now: Timestamp) {
        let Some(member) = self.members.get_mut(node) else { return };
        let until = now.saturating_add(OFFLINE_LEASE).unwrap_or(now);
        (member.is_online, member.back_until) = (false, Some(until));
        if member.site.is_none() {
            self.members.remove(node);
            return;
        }
        let Some(site) = member.site.clone().and_then(|site| self.by_name.get_mut(&site)) else { return };
        for book in site.books.values_mut() {
            book.shorten(node, until);
        }
        site.mark(now);
    }

    /// What a node says of the blobs of a task, which names these images. They are what entitles it to a blob, and what
    /// entitles others to have it from this node.
    pub(crate) fn note(&mut self, node: &NodeName, shared: &Shared, news: Blobs, now: Timestamp) {
        let images = &shared.images;
        let Blobs { task, blobs, failures, reads_streams } = news;
        let Some(member) = self.members.get(node).filter(|member| member.is_online) else { return };
        let Some(name) = member.site.clone() else {
            return self.refuse(node, Blobs { task, blobs, failures, reads_streams }, NO_SITE);
        };
        let site = self.by_name.entry(name).or_default();
        site.limit(shared, now);
        let mut refused = Vec::new();
        let has_failures = !failures.is_empty();
        for failure in failures.into_iter().take(MAX_BLOBS) {
            let id = BookId { images: images.clone(), digest: failure.digest.clone() };
            let Some(book) = site.books.get_mut(&id) else { continue };
            // Only of a neighbour that it was sent to: it has no say in the others. And not of one that is away: it is
            // known to be, and may be back in a moment.
            let is_online = self.members.get(&failure.peer).is_some_and(|member| member.is_online);
            if book.note_failure(node, &failure) && is_online {
                site.faults.note(node, &failure, now);
            }
        }
        let mut has_changed = has_failures;
        for blob in blobs.into_iter().take(MAX_BLOBS).filter(|blob| is_digest(&blob.digest)) {
            let id = BookId { images: images.clone(), digest: blob.digest.clone() };
            if !site.books.contains_key(&id) {
                if blob.state == BlobState::Dropped {
                    continue;
                }
                if !site.make_room() {
                    refused.push(blob);
                    continue;
                }
                site.books.insert(id.clone(), Book::new(blob.size));
            }
            match site.books.get_mut(&id) {
                // Of two sizes one is wrong, and nobody here can tell which; each node checks what it gets.
                Some(book) if book.size != blob.size && blob.state != BlobState::Dropped => {
                    refused.push(blob);
                }
                Some(book) => has_changed |= note_blob(book, node, &task, &blob, &mut site.faults, now),
                None => {}
            }
        }
        if has_changed {
            site.mark(now);
        }
        self.refuse(node, Blobs { task, blobs: refused, failures: Vec::new(), reads_streams }, NO_BOOK);
    }

    /// The limit for these images is another one from now on.
    pub(crate) fn limit(&mut self, shared: &Shared, now: Timestamp) {
        for site in self.by_name.values_mut() {
            site.limit(shared, now);
        }
    }

    /// Lets a node download for itself what it wants to share.
    pub(crate) fn refuse(&mut self, node: &NodeName, news: Blobs, why: &'static str) {
        let wanted = news.blobs.into_iter().take(MAX_BLOBS).filter(|blob| blob.state == BlobState::Wanted);
        let blobs: Vec<_> =
            wanted.map(|blob| (blob.digest, Direction::Registry { alone: why, max_rate: None })).collect();
        if !blobs.is_empty() {
            self.refusals.push(Directions { node: node.clone(), task: news.task, blobs });
        }
    }

    /// When [`Self::flush`] is to be called although nothing happened.
    pub(crate) fn next_wakeup(&self) -> Option<Timestamp> {
        self.by_name.values().filter_map(|site| site.due).min()
    }

    /// What nodes are to be told now.
    pub(crate) fn flush(&mut self, now: Timestamp) -> Vec<Directions> {
        let mut told = std::mem::take(&mut self.refusals);
        for site in self.by_name.values_mut().filter(|site| site.due.is_some_and(|due| due <= now)) {
            site.looked_at = Some(now);
            site.due = None;
            site.advance(&self.members, now, &mut told);
        }
        self.by_name.retain(|_, site| !site.books.is_empty());
        told
    }
}

/// Takes in what a node says of a blob. Returns whether the site is to be looked at.
fn note_blob(
    book: &mut Book,
    node: &NodeName,
    task: &TaskId,
    blob: &BlobNews,
    faults: &mut Faults,
    now: Timestamp,
) -> bool {
    let done = blob.done.min(blob.size);
    match blob.state {
        BlobState::Here => {
            if let Some(Seeker { way: Way::Peers { peers, .. }, .. }) = book.seekers.get(node) {
                faults.note_success(node, peers.first());
            }
            book.seekers.remove(node);
            if book.holders.len() < MAX_HOLDERS {
                book.holders.insert(node.clone());
            }
            true
        }
        BlobState::Dropped => book.seekers.remove(node).is_some(),
        state => {
            book.holders.remove(node);
            let is_new = !book.seekers.contains_key(node);
            let seeker = book.seekers.entry(node.clone()).or_insert_with(|| Seeker::new(task.clone(), now));
            seeker.task = task.clone();
            seeker.done = done;
            let least = book.size / 512;
            match (state, &mut seeker.way) {
                (BlobState::Carrying, Way::Registry { lease, .. })
                | (BlobState::Fetching, Way::Peers { lease, .. }) => {
                    lease.renew(done, least, now);
                    false
                }
                // It goes on with what it was told before a failover, or before its lease was gone.
                (BlobState::Carrying, Way::Wait) => {
                    book.claim(node, done, now);
                    true
                }
                // It does something else than it was told, or begins anew: it is told once more.
                (BlobState::Wanted, Way::Wait) => is_new,
                _ => {
                    seeker.is_told = false;
                    true
                }
            }
        }
    }
}

impl Site {
    /// Whether there is room for another book, where the one that was idle for the longest time may give way.
    fn make_room(&mut self) -> bool {
        if self.books.len() < MAX_BOOKS {
            return true;
        }
        let idle = self.books.iter().filter_map(|(id, book)| Some((book.idle_since?, id)));
        let Some((_, oldest)) = idle.min() else { return false };
        let oldest = oldest.clone();
        self.books.remove(&oldest);
        true
    }

    /// Lets the site go on as far as it can.
    fn advance(&mut self, members: &BTreeMap<NodeName, Member>, now: Timestamp, told: &mut Vec<Directions>) {
        self.faults.expire(now);
        let mut wakeups = Vec::new();
        let is_online = |node: &NodeName| members.get(node).is_some_and(|member| member.is_online);
        for book in self.books.values_mut() {
            book.expire(now, &mut self.faults, is_online);
        }
        self.books.retain(|_, book| {
            let end = book.note_idle(now).map(|since| since.saturating_add(MEMORY).unwrap_or(since));
            wakeups.extend(end);
            end.is_none_or(|end| end > now)
        });
        wakeups.extend(assign::assign(&mut self.books, members, &self.faults, now));
        self.divide_rates();
        wakeups.extend(self.tell(members, now, told));
        wakeups.extend(self.faults.next_end(now));
        let next = wakeups.into_iter().chain(self.leases()).min();
        if let Some(at) = next {
            self.wake(at.max(now.saturating_add(PACE).unwrap_or(now)));
        }
    }

    /// Divides the limits of the uplink among those who download over it.
    fn divide_rates(&mut self) {
        let books = &self.books;
        self.rates.retain(|images, _| books.keys().any(|id| id.images == *images));
        let is_carrying = |seeker: &Seeker| matches!(seeker.way, Way::Registry { .. });
        let mut carrying: BTreeMap<&Arc<str>, u64> = BTreeMap::new();
        for (id, book) in books {
            let count = book.seekers.values().filter(|seeker| is_carrying(seeker)).count() as u64;
            *carrying.entry(&id.images).or_default() += count;
        }
        let part = |images: &Arc<str>| {
            let rate = self.rates.get(images)?.get() / carrying.get(images)?.max(&1);
            Some(NonZeroU64::new(rate).unwrap_or(NonZeroU64::MIN))
        };
        let parts: BTreeMap<Arc<str>, NonZeroU64> =
            self.rates.keys().filter_map(|images| Some((images.clone(), part(images)?))).collect();
        for (id, book) in &mut self.books {
            let part = parts.get(&id.images).copied();
            for seeker in book.seekers.values_mut().filter(|seeker| is_carrying(seeker)) {
                if std::mem::replace(&mut seeker.max_rate, part) != part {
                    seeker.is_told = false;
                }
            }
        }
    }

    fn leases(&self) -> impl Iterator<Item = Timestamp> {
        self.books.values().flat_map(Book::leases)
    }

    /// Tells the nodes what is new for them, and those that wait that they are not forgotten. Returns when that is due next.
    fn tell(
        &mut self,
        members: &BTreeMap<NodeName, Member>,
        now: Timestamp,
        told: &mut Vec<Directions>,
    ) -> Option<Timestamp> {
        let mut next: Option<Timestamp> = None;
        let mut by_task: BTreeMap<(NodeName, TaskId), Vec<(String, Direction)>> = BTreeMap::new();
        for (id, book) in &mut self.books {
            for (node, seeker) in &mut book.seekers {
                if !members.get(node).is_some_and(|member| member.is_online) {
                    continue;
                }
                let due = seeker.told_at.saturating_add(REMINDER).unwrap_or(now);
                let is_due = !seeker.is_told || (seeker.way == Way::Wait && due <= now);
                if is_due {
                    (seeker.is_told, seeker.told_at) = (true, now);
                    let direction = match &seeker.way {
                        Way::Wait => Direction::Wait,
                        Way::Registry { alone, .. } => {
                            Direction::Registry { alone, max_rate: seeker.max_rate }
                        }
                        Way::Peers { peers, .. } => Direction::Peers(
                            peers
                                .iter()
                                .take(MAX_PEERS)
                                .filter_map(|peer| {
                                    Some((peer.clone(), members.get(peer)?.addresses.clone()?))
                                })
                                .collect(),
                        ),
                    };
                    let blobs = by_task.entry((node.clone(), seeker.task.clone())).or_default();
                    blobs.push((id.digest.clone(), direction));
                }
                if seeker.way == Way::Wait {
                    let due = seeker.told_at.saturating_add(REMINDER).unwrap_or(now);
                    next = Some(next.map_or(due, |next| next.min(due)));
                }
            }
        }
        for ((node, task), mut blobs) in by_task {
            while !blobs.is_empty() {
                let rest = blobs.split_off(blobs.len().min(MAX_BLOBS));
                told.push(Directions { node: node.clone(), task: task.clone(), blobs });
                blobs = rest;
            }
        }
        next
    }
}
