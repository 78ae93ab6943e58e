//! A look at a site: due timers, then sources and leases, then directions for its nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;
use std::sync::Arc;

use prepull_api::sites::{MAX_BLOBS, MAX_PEERS};
use prepull_api::task::{NodeName, TaskId};

use super::REMINDER;
use super::book::{AssignedSource, Carry};
use super::nodes::NodeId;
use super::site::{NONE, STEPS, TrackerTurn};

/// Sources of some blobs for one node. The shell adds the tickets, since it has the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Directions {
    /// The node.
    pub node: NodeName,
    /// The task in its report.
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
    /// From nowhere yet.
    Wait,
}

/// Most blobs that one look sends sources for: the rest follows 20 ms later.
const TELLS: usize = 1024;

type BlobDirection = (String, Direction);

impl TrackerTurn<'_> {
    /// Does everything that is due, within the bound of steps.
    pub(super) fn look_at_site(&mut self, told: &mut Vec<Directions>) {
        (self.site.looked_at, self.steps) = (self.now, STEPS);
        self.site.pairs.expire(self.now);
        let mut reminded = Vec::new();
        while let Some((at, number, node)) = self.site.timers.first().copied()
            && at <= self.now
            && self.steps > 0
        {
            self.site.timers.pop_first();
            let books = if number == NONE { self.nodes[node].books.len() } else { 0 };
            self.steps = self.steps.saturating_sub(1 + books);
            match (number, node) {
                (NONE, node) => reminded.push(node),
                (number, NONE) => self.site.mark(number),
                (number, node) => self.expire_seeker(number, node),
            }
        }
        self.match_nodes();
        self.give_leases();
        self.match_nodes();
        self.divide_rates();
        self.send_directions(reminded, told);
        self.site.is_behind = self.steps == 0 || !self.site.to_tell.is_empty();
    }

    /// Sends nodes their new sources. A waiting node gets a reminder, about one blob of each task.
    fn send_directions(&mut self, reminded: Vec<NodeId>, told: &mut Vec<Directions>) {
        let mut by_task: BTreeMap<(NodeName, Arc<TaskId>), Vec<BlobDirection>> = BTreeMap::new();
        for node in reminded {
            let of = &self.nodes[node];
            // It may have moved to another site.
            if of.waiting == 0 || !self.is_of_site(node) {
                self.site.has_reminder.remove(&node);
                continue;
            }
            let mut tasks = BTreeSet::new();
            for number in &of.books {
                let Some(book) = self.site.books.get(number) else { continue };
                let Some(seeker) =
                    book.seekers.get(&node).filter(|of| matches!(of.way, AssignedSource::Wait))
                else {
                    continue;
                };
                if of.is_online && tasks.insert(seeker.task.clone()) {
                    let blobs = by_task.entry((of.name.clone(), seeker.task.clone())).or_default();
                    blobs.push((book.id.digest.to_string(), Direction::Wait));
                }
            }
            self.site.timers.insert((self.now + REMINDER, NONE, node));
        }
        for _ in 0..TELLS.min(self.site.to_tell.len()) {
            let Some((node, number)) = self.site.to_tell.pop_front() else { break };
            let Some(book) = self.site.books.get_mut(&number) else { continue };
            let gathers = book.gather_until > self.now;
            let Some(seeker) = book.seekers.get_mut(&node).filter(|seeker| !seeker.is_told) else { continue };
            if !self.nodes[node].is_online {
                continue;
            }
            let direction = match &seeker.way {
                // It gets its source at the end of that time.
                AssignedSource::Wait if gathers => continue,
                AssignedSource::Wait => Direction::Wait,
                AssignedSource::Registry(carry) => {
                    let Carry { alone, max_rate, .. } = **carry;
                    Direction::Registry { alone, max_rate }
                }
                AssignedSource::Peer { from, others, .. } => {
                    let peers = std::iter::once(from).chain(others.iter().filter(|other| *other != from));
                    let peer = |id: &NodeId| {
                        Some((self.nodes[*id].name.clone(), self.nodes[*id].addresses.clone()?))
                    };
                    Direction::Peers(peers.take(MAX_PEERS).filter_map(peer).collect())
                }
            };
            seeker.is_told = true;
            let blobs = by_task.entry((self.nodes[node].name.clone(), seeker.task.clone())).or_default();
            blobs.push((book.id.digest.to_string(), direction));
        }
        for ((node, task), mut blobs) in by_task {
            while !blobs.is_empty() {
                let rest = blobs.split_off(blobs.len().min(MAX_BLOBS));
                told.push(Directions { node: node.clone(), task: (*task).clone(), blobs });
                blobs = rest;
            }
        }
    }
}
