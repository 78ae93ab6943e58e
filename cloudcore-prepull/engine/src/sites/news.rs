//! Reports of nodes about a blob.

use std::sync::Arc;

use prepull_api::sites::{BlobNews, BlobState};
use prepull_api::task::TaskId;

use super::book::AssignedSource;
use super::nodes::NodeId;
use super::report::SiteEventKind;
use super::site::{NONE, TrackerTurn};

impl TrackerTurn<'_> {
    /// Takes in the state of a blob at a node.
    pub(super) fn note_blob(
        &mut self,
        number: u32,
        node: NodeId,
        task: &Arc<TaskId>,
        blob: &BlobNews,
        succeeded: bool,
    ) {
        let Some(book) = self.site.books.get_mut(&number) else { return };
        let done = blob.done.min(book.id.size);
        match blob.state {
            BlobState::Here => return self.note_here(number, node, succeeded),
            BlobState::Dropped => return self.leave_book(number, node),
            _ => {}
        }
        let is_new = !book.seekers.contains_key(&node);
        if is_new {
            self.site.pairs.forget_gone(self.nodes, node);
            self.add_seeker(number, node, task);
        }
        // Afterwards: a book without nodes is removed.
        self.remove_holder(number, node);
        let Some(book) = self.site.books.get_mut(&number) else { return };
        let (least, confirmed) = (book.least_read(), book.confirmed);
        let Some(seeker) = book.seekers.get_mut(&node) else { return };
        seeker.task.clone_from(task);
        if done < seeker.done {
            self.note_wrong(number, node);
        }
        let Some(book) = self.site.books.get_mut(&number) else { return };
        let Some(seeker) = book.seekers.get_mut(&node) else { return };
        let more = done.saturating_sub(seeker.done);
        seeker.done = done;
        let is_gathering = book.gather_until > self.now;
        match (blob.state, &mut seeker.way) {
            (BlobState::Carrying, AssignedSource::Registry(carry)) => {
                self.site.counters.bytes_carried += more;
                let has_restarted = done < carry.best && carry.alone.is_empty();
                carry.note_reported(done, self.now);
                // Its bytes were wrong or lost: it may restart once.
                if has_restarted && !book.losers.contains(&node) {
                    book.losers.push(node);
                    self.give_lease(number, node);
                }
                return;
            }
            (BlobState::Fetching, AssignedSource::Peer { from, read, is_stream, .. }) => {
                self.site.counters.bytes_shared += more;
                read.renew(done, if *is_stream { 1 } else { least }, self.now);
                if more > 0 {
                    self.site.pairs.note_progress((node, *from));
                }
                if more > 0 && done > confirmed {
                    self.note_confirmed(number, done);
                }
                return;
            }
            (BlobState::Wanted, AssignedSource::Wait) if !is_new => {}
            (BlobState::Carrying, AssignedSource::Wait) if !is_gathering => {
                self.tell_later(number, node);
                self.site.counters.claims_refused += 1;
                self.push_event(node, &blob.digest, SiteEventKind::ClaimRefused);
            }
            _ => self.tell_later(number, node),
        }
        self.note_ahead(number, node);
    }

    fn note_here(&mut self, number: u32, node: NodeId, succeeded: bool) {
        let now = self.now;
        let Some(book) = self.site.books.get_mut(&number) else { return };
        let (size, source) = (book.id.size, book.source_of(node));
        let is_carrier = book.carrier == Some(node);
        let mut is_proven = succeeded;
        if let Some(seeker) = book.seekers.get(&node) {
            is_proven |= seeker.is_proven;
            let more = size.saturating_sub(seeker.done);
            match seeker.way {
                AssignedSource::Peer { .. } => self.site.counters.bytes_shared += more,
                AssignedSource::Registry(_) => self.site.counters.bytes_carried += more,
                AssignedSource::Wait => {}
            }
        }
        if let Some(source) = source {
            self.note_confirmed(number, size);
            self.site.pairs.note_success(self.nodes, node, source, now);
            self.note_proven(number, source);
        }
        let Some(book) = self.site.books.get_mut(&number) else { return };
        if is_carrier {
            book.losers.retain(|loser| *loser != node);
        }
        // The readers stay: from now on they read from a whole holder.
        let readers: Vec<NodeId> = book.readers_of(node).collect();
        for reader in readers {
            if let Some(AssignedSource::Peer { is_stream, .. }) =
                book.seekers.get_mut(&reader).map(|seeker| &mut seeker.way)
                && std::mem::replace(is_stream, false)
            {
                self.nodes[node].streamed -= 1;
            }
        }
        if self.nodes[node].trust.no_holder_until <= now && book.holders.len() < super::MAX_HOLDERS {
            book.holders.entry(node).or_default();
        }
        book.receiving.remove(&node);
        self.end_seeker(number, node);
        if is_proven {
            self.note_proven(number, node);
        }
        self.offer(node);
        self.site.mark(number);
    }

    /// Forgets what was found out with a node that leaves the site: another node may get its number.
    pub(super) fn forget_node(&mut self, node: NodeId) {
        self.site.pairs.forget_all(node);
        for book in self.site.books.values_mut() {
            book.losers.retain(|loser| *loser != node);
            book.suspect.take_if(|(loser, ..)| *loser == node);
            book.found_wrong.take_if(|finder| *finder == node);
            for holder in book.holders.values_mut() {
                holder.complaint.take_if(|reader| *reader == node);
            }
        }
        if self.site.fastest.2 == node {
            self.site.fastest.2 = NONE;
        }
    }

    /// Removes a seeker that has the whole blob. Its readers stay.
    fn end_seeker(&mut self, number: u32, node: NodeId) {
        let Some(book) = self.site.books.get_mut(&number) else { return };
        let readers: Vec<NodeId> = book.readers_of(node).collect();
        for reader in &readers {
            book.readers.remove(&(node, *reader));
        }
        self.remove_seeker(number, node);
        let Some(book) = self.site.books.get_mut(&number) else { return };
        book.readers.extend(readers.iter().map(|reader| (node, *reader)));
        if !book.holders.contains_key(&node) {
            self.detach_readers(number, node);
        }
    }

    /// Notes that a node delivered the blob, or that its task succeeded.
    pub(super) fn note_proven(&mut self, number: u32, node: NodeId) {
        let Some(book) = self.site.books.get_mut(&number) else { return };
        if let Some(holder) = book.holders.get_mut(&node) {
            let is_new = !std::mem::replace(&mut holder.is_proven, true);
            holder.complaint = None;
            // A slow loser is judged by the speed of its successor alone.
            let suspect = book.suspect.take().filter(|(loser, _, slow)| *loser != node && *slow == 0);
            if let Some((loser, ..)) = suspect {
                self.blame(loser);
            }
            if is_new {
                self.stop_needless_carrier(number, node);
                self.offer(node);
            }
        } else if let Some(seeker) = book.seekers.get_mut(&node) {
            seeker.is_proven = true;
        }
    }
}
