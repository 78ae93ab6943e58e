//! The tracker of sites: it chooses the node that carries a layer over the site's uplink, and the neighbour that each of
//! the others reads it from. Pure.
//!
//! ```text
//!  Blobs ─▶ Book (entitlement, digest, size) ─▶ look: sources, leases, rates ─▶ Directions (registry, neighbours, wait)
//!             ▲ timers, complaints, sessions
//! ```
//!
//! Rules that hold even if nodes lie:
//! - Only the tracker gives leases, at most one for each blob of a site. A node's claim to carry a blob makes it no carrier.
//! - A node is sent only to neighbours that have said that they have, or receive, the same blob under the same entitlement.
//! - A lease that neighbours can confirm ends when they don't, and a holder counts once a neighbour got the blob from it.
//! - A look works on changes only, and is bounded; memory has a budget.
//!
//! Nothing is stored: after a failover the nodes report what they have.

mod book;
mod leases;
mod look;
mod news;
mod nodes;
mod report;
mod settings;
mod site;
mod sources;
mod survey;
#[cfg(test)]
mod tests;
mod trust;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::num::NonZeroU64;
use std::sync::Arc;

use jiff::Timestamp;
use prepull_api::sites::{BlobState, Blobs, MAX_BLOBS, is_digest};
use prepull_api::task::{JobUid, NodeName, TaskId};
use prepull_api::wire::Hello;

use crate::fleet::node_view::NodeView;
use book::{AssignedSource, BookId};
pub use look::{Direction, Directions};
use nodes::{NodeId, SiteNodes};
pub use report::{CarrierReport, SiteCounters, SiteEvent, SiteEventKind, SiteReport};
pub use settings::{SITE_LABEL, SiteSettings};
use site::{Site, TrackerTurn};

/// Milliseconds since 1970.
type Time = i64;

const SECOND: Time = 1000;
const HOUR: Time = 3600 * SECOND;
/// Shortest time between two looks at a site: a burst of messages is answered at once.
const PACE: Time = 100;
/// Time without progress after which a carrier is replaced, and a neighbour is left.
const LEASE: Time = 60 * SECOND;
/// The same for a node without a session, and how long we wait for such a holder: a restart takes less.
const OFFLINE_LEASE: Time = 30 * SECOND;
/// Time for a node to report its blobs in a new session.
const RETURN: Time = 15 * SECOND;
/// Time from the first node that wants a blob to its lease. After a window the nodes come back within it, so the one with the
/// most bytes goes on.
const GATHER: Time = SECOND;
/// Until this long after its first session, a leader gives no lease at a site with missing nodes: they're on their way,
/// perhaps with half of the blob. Agents come back over the time for which there was no leader.
const GATHER_AT_START: Time = 30 * SECOND;
/// Interval of reminders to a waiting node: a third of the shortest patience of agents.
const REMINDER: Time = 20 * SECOND;
/// We remember the holders of an unwanted blob for this long: the next wave may begin hours later.
const MEMORY: Time = 6 * HOUR;
/// Most blobs that one node may want or have: three images of three hundred layers.
const MAX_BOOKS_OF_NODE: usize = 1024;
/// Most holders of a blob: more serve no one sooner.
const MAX_HOLDERS: usize = 256;
/// Most events that wait for the log: an attack shows in fewer.
const MAX_EVENTS: usize = 256;

const NO_SITE: &str =
    "its Node has no label that says which site it is at (--site-label of cloudcore-prepull)";
const NO_BOOK: &str = "its site has too many layers to track";
pub(crate) const NOT_SHARED: &str = "the job does not share layers any more, or does not wait for the task";

/// How a task shares its blobs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BlobSharing {
    /// The images of the task with the names of their secrets: the nodes with the same ones share.
    pub(crate) entitlement: Arc<str>,
    /// Bytes a second over the uplink of each site.
    pub(crate) max_rate: Option<NonZeroU64>,
    /// Whether the task is known to have succeeded: the node has all of its layers.
    pub(crate) has_succeeded: bool,
}

/// All sites.
#[derive(Debug, Default)]
pub struct Sites {
    settings: SiteSettings,
    nodes: SiteNodes,
    by_name: BTreeMap<Arc<str>, Site>,
    due: BTreeSet<(Time, Arc<str>)>,
    /// For each site, the book that was idle for the longest time.
    idle: BTreeSet<(Time, Arc<str>)>,
    /// Answers that need no look at a site.
    refusals: Vec<Directions>,
    events: VecDeque<SiteEvent>,
    bytes: usize,
    /// When the first session began.
    begun: Option<Time>,
    /// The number of listed nodes of each site that have no session.
    missing: BTreeMap<Arc<str>, usize>,
}

impl Sites {
    /// No sites yet, with these settings.
    pub fn new(settings: SiteSettings) -> Self {
        Self { settings, ..Self::default() }
    }

    /// How nodes are grouped.
    pub fn settings(&self) -> &SiteSettings {
        &self.settings
    }

    /// How long a blob without a lease waits for nodes that have more of it.
    fn gather_time(&self, site: &str, now: Time) -> Time {
        let left = self.begun.map_or(0, |begun| begun + GATHER_AT_START - now);
        if left > GATHER && self.missing.contains_key(site) { left } else { GATHER }
    }

    /// Counts a node among the missing ones of its site, by whether it was one of them and is one now.
    fn count_missing(&mut self, before: Option<Arc<str>>, now: Option<Arc<str>>) {
        if before == now {
            return;
        }
        if let Some(site) = before
            && let Some(count) = self.missing.get_mut(&site)
        {
            *count -= 1;
            if *count == 0 {
                self.missing.remove(&site);
            }
        }
        if let Some(site) = now {
            *self.missing.entry(site).or_default() += 1;
        }
    }

    /// Works on a site, and updates its entries in `due` and `idle`.
    fn work_on<T>(
        &mut self,
        name: &Arc<str>,
        now: Time,
        work: impl FnOnce(&mut TrackerTurn<'_>) -> T,
    ) -> Option<T> {
        let gather = self.gather_time(name, now);
        let site = self.by_name.get_mut(name)?;
        let before = (site.due, site.idle.first().map(|idle| idle.0));
        let (nodes, events, bytes) = (&mut self.nodes, &mut self.events, &mut self.bytes);
        let result = work(&mut TrackerTurn { site, nodes, events, bytes, now, gather, steps: usize::MAX });
        site.due = site.next_look();
        let after = (site.due, site.idle.first().map(|idle| idle.0));
        for (index, before, after) in
            [(&mut self.due, before.0, after.0), (&mut self.idle, before.1, after.1)]
        {
            if before != after {
                before.inspect(|at| _ = index.remove(&(*at, name.clone())));
                index.extend(after.map(|at| (at, name.clone())));
            }
        }
        if site.books.is_empty() {
            after.0.inspect(|at| _ = self.due.remove(&(*at, name.clone())));
            self.by_name.remove(name);
        }
        Some(result)
    }

    /// Takes the full list of Nodes.
    pub(crate) fn set_nodes(&mut self, nodes: &[NodeView], now: Timestamp) {
        for node in nodes {
            self.set_labels(&node.name, Some(&node.labels), now);
        }
        if self.nodes.listed_ids().count() > nodes.len() {
            let listed: BTreeSet<&NodeName> = nodes.iter().map(|node| &node.name).collect();
            let known: Vec<NodeName> =
                self.nodes.listed_ids().map(|id| self.nodes[id].name.clone()).collect();
            for name in known.iter().filter(|name| !listed.contains(name)) {
                self.set_labels(name, None, now);
            }
        }
    }

    /// Takes the labels of a new or changed Node; `None`: it is gone.
    pub(crate) fn set_labels(
        &mut self,
        node: &NodeName,
        labels: Option<&BTreeMap<String, String>>,
        now: Timestamp,
    ) {
        let site = labels.and_then(|labels| self.settings.site_of(labels));
        let id = self.nodes.id_or_new(node);
        let missing = self.nodes[id].missing_at();
        self.nodes[id].is_listed = labels.is_some();
        if self.nodes[id].site.as_deref() != site {
            let new: Option<Arc<str>> = site.map(Arc::from);
            if let Some(old) = std::mem::replace(&mut self.nodes[id].site, new) {
                self.work_on(&old, now.as_millisecond(), |turn| {
                    for number in turn.nodes[id].books.clone() {
                        turn.leave_book(number, id);
                        turn.update_indexes(number);
                    }
                    turn.forget_node(id);
                });
            }
        }
        self.count_missing(missing, self.nodes[id].missing_at());
        if labels.is_none() && !self.nodes[id].is_online {
            self.nodes.remove(id);
        }
    }

    /// A session of the node has begun.
    pub(crate) fn connect(&mut self, node: &NodeName, hello: &Hello, now: Timestamp) {
        let id = self.nodes.id_or_new(node);
        self.begun.get_or_insert(now.as_millisecond());
        self.count_missing(self.nodes[id].missing_at(), None);
        let member = &mut self.nodes[id];
        (member.is_online, member.back_until, member.reads_streams) = (true, 0, false);
        member.online_since = now.as_millisecond();
        let door = hello.peer.as_ref().filter(|door| door.is_valid());
        member.streams = door.is_some_and(|door| door.streams);
        member.addresses = door.map(|door| door.addresses.as_slice().into());
        let Some(site) = member.site.clone() else { return };
        let now = now.as_millisecond();
        self.work_on(&site, now, |turn| {
            turn.site.pairs.forget_connections(turn.nodes, id);
            for number in turn.nodes[id].books.clone() {
                turn.note_return(number, id);
                turn.site.mark(number);
            }
            // The uplink may have been gone for all of them: the first one to return mustn't restart a blob that another
            // node has half of.
            for number in turn.site.leases.clone() {
                let carrier = turn.site.books.get(&number).and_then(|book| book.carrier);
                if let Some(carrier) = carrier.filter(|carrier| !turn.nodes[*carrier].is_online) {
                    // Not beyond its own time to return: boxes may begin sessions for ever.
                    let end = (now + RETURN).min(turn.nodes[carrier].back_until + RETURN);
                    turn.limit_time(number, carrier, |until| until.max(end));
                }
            }
        });
    }

    /// The session of the node has ended.
    pub(crate) fn disconnect(&mut self, node: &NodeName, now: Timestamp) {
        let (Some(id), now) = (self.nodes.id(node), now.as_millisecond()) else { return };
        let until = now + OFFLINE_LEASE;
        let missing = self.nodes[id].missing_at();
        (self.nodes[id].is_online, self.nodes[id].back_until) = (false, until);
        self.count_missing(missing, self.nodes[id].missing_at());
        if let Some(site) = self.nodes[id].site.clone() {
            self.work_on(&site, now, |turn| {
                for number in turn.nodes[id].books.clone() {
                    turn.limit_time(number, id, |end| end.min(until));
                    turn.wake_book(number, until);
                }
            });
        } else {
            self.nodes.remove(id);
        }
    }

    /// Takes in a node's report about the blobs of a task.
    pub(crate) fn note_blobs(
        &mut self,
        node: &NodeName,
        shared: &BlobSharing,
        mut news: Blobs,
        now: Timestamp,
    ) {
        let Some(id) = self.nodes.id(node).filter(|id| self.nodes[*id].is_online) else { return };
        if self.nodes[id].site.is_none() {
            return self.refuse(node, news, NO_SITE);
        }
        self.nodes[id].reads_streams = news.reads_streams;
        loop {
            news = self.note_within(id, shared, news, now);
            // The node is refused only if all of the memory is in use: what it can take of it has a bound of its own.
            if news.blobs.is_empty() || !self.make_room(now.as_millisecond()) {
                return self.refuse(node, news, NO_BOOK);
            }
        }
    }

    /// Takes in what fits into the memory. Returns the rest.
    fn note_within(&mut self, id: NodeId, shared: &BlobSharing, news: Blobs, now: Timestamp) -> Blobs {
        let Some(name) = self.nodes[id].site.clone() else { return news };
        let site = self
            .by_name
            .entry(name.clone())
            .or_insert_with(|| Site { name: name.clone(), ..Site::default() });
        site.set_rate(&news.task.job, shared.max_rate);
        let (task, budget) = (Arc::new(news.task.clone()), self.settings.memory);
        let Blobs { blobs, failures, .. } = news;
        let now = now.as_millisecond();
        let mut too_many = Vec::new();
        let rest = self.work_on(&name, now, |turn| {
            let entitlement = &shared.entitlement;
            let mut failed = Vec::new();
            for failure in failures.iter().take(MAX_BLOBS) {
                let books = turn.books_of(entitlement, &failure.digest);
                failed.extend(books.into_iter().filter(|number| turn.note_failure(*number, id, failure)));
            }
            for number in failed {
                turn.set_way(number, id, AssignedSource::Wait);
            }
            let mut rest = Vec::new();
            for blob in blobs.into_iter().take(MAX_BLOBS).filter(|blob| is_digest(&blob.digest)) {
                let digest = blob.digest.as_str().into();
                let book = BookId { entitlement: entitlement.clone(), digest, size: blob.size };
                let known = turn.site.ids.get(&book).copied();
                if blob.state == BlobState::Dropped && known.is_none() {
                    continue;
                }
                if known.is_none() && *turn.bytes >= budget {
                    rest.push(blob);
                    continue;
                }
                let number = known.unwrap_or_else(|| turn.add_book(book));
                if turn.join_book(number, id) {
                    turn.note_blob(number, id, &task, &blob, shared.has_succeeded);
                    turn.part_with_book(number, id);
                } else {
                    turn.push_event(id, &blob.digest, SiteEventKind::TooManyBlobs);
                    too_many.push(blob);
                }
                turn.update_indexes(number);
            }
            rest
        });
        let of = |blobs| Blobs { task: (*task).clone(), blobs, failures: Vec::new(), reads_streams: false };
        let node = self.nodes[id].name.clone();
        self.refuse(&node, of(too_many), NO_BOOK);
        of(rest.unwrap_or_default())
    }

    /// Forgets the blob that no node wanted for the longest time, of any site.
    fn make_room(&mut self, now: Time) -> bool {
        let oldest = self.idle.first().map(|(_, name)| name.clone());
        #[allow(
            clippy::redundant_closure_for_method_calls,
            reason = "the method alone has too narrow a lifetime"
        )]
        oldest.and_then(|name| self.work_on(&name, now, |turn| turn.make_room())).unwrap_or(false)
    }

    /// A task of the node isn't shared any more: the node wants nothing for it, and carries nothing.
    pub(crate) fn end_task(&mut self, node: &NodeName, task: &TaskId, now: Timestamp) {
        self.change_books(node, now, |turn, number, id| {
            let seeker = turn.site.books.get(&number).and_then(|book| book.seekers.get(&id));
            if seeker.is_some_and(|seeker| *seeker.task == *task) {
                turn.remove_seeker(number, id);
            }
        });
    }

    /// A task of the node has succeeded: it has all of the task's blobs.
    pub(crate) fn note_success(&mut self, node: &NodeName, entitlement: &Arc<str>, now: Timestamp) {
        self.change_books(node, now, |turn, number, id| {
            if turn.site.books.get(&number).is_some_and(|book| book.id.entitlement == *entitlement) {
                turn.note_proven(number, id);
            }
        });
    }

    /// Changes the books of a node, one after the other.
    fn change_books(
        &mut self,
        node: &NodeName,
        now: Timestamp,
        mut change: impl FnMut(&mut TrackerTurn<'_>, u32, NodeId),
    ) {
        let Some(id) = self.nodes.id(node) else { return };
        let Some(name) = self.nodes[id].site.clone() else { return };
        self.work_on(&name, now.as_millisecond(), |turn| {
            for number in turn.nodes[id].books.clone() {
                change(turn, number, id);
            }
        });
    }

    /// Changes the limit of a job.
    pub(crate) fn limit_job(&mut self, job: &JobUid, max_rate: Option<NonZeroU64>, now: Timestamp) {
        let names: Vec<Arc<str>> = self
            .by_name
            .iter()
            .filter(|(_, site)| !site.carrying.is_empty())
            .map(|(name, _)| name.clone())
            .collect();
        for name in names {
            self.work_on(&name, now.as_millisecond(), |turn| turn.site.set_rate(job, max_rate));
        }
    }

    /// Sends a node to the registry for the blobs that it wants.
    pub(crate) fn refuse(&mut self, node: &NodeName, news: Blobs, why: &'static str) {
        let wanted = news.blobs.into_iter().take(MAX_BLOBS).filter(|blob| blob.state == BlobState::Wanted);
        let blobs: Vec<_> =
            wanted.map(|blob| (blob.digest, Direction::Registry { alone: why, max_rate: None })).collect();
        if !blobs.is_empty() {
            self.refusals.push(Directions { node: node.clone(), task: news.task, blobs });
        }
    }

    /// When [`Self::flush`] must run next even without an input.
    pub(crate) fn next_wakeup(&self) -> Option<Timestamp> {
        let idle = self.idle.first().map(|(since, _)| since + MEMORY);
        let at = [self.due.first().map(|due| due.0), idle].into_iter().flatten().min();
        at.and_then(|at| Timestamp::from_millisecond(at).ok())
    }

    /// The directions that are due.
    pub(crate) fn flush(&mut self, now: Timestamp) -> Vec<Directions> {
        let (mut told, now) = (std::mem::take(&mut self.refusals), now.as_millisecond());
        while self.idle.first().is_some_and(|(since, _)| since + MEMORY <= now) && self.make_room(now) {}
        while let Some((_, name)) = self.due.first().filter(|(at, _)| *at <= now).cloned() {
            self.work_on(&name, now, |turn| turn.look_at_site(&mut told));
        }
        told
    }

    /// Events since the last call.
    pub(crate) fn take_events(&mut self) -> Vec<SiteEvent> {
        std::mem::take(&mut self.events).into()
    }

    /// Bytes of memory of all sites, roughly.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes + self.nodes.cost()
    }
}
