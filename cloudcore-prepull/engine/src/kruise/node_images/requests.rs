//! The jobs' requests for tags that are not in the NodeImage's spec yet.

use std::sync::Arc;

use prepull_api::task::JobUid;

use super::owners::job_of;
use crate::kruise::TagRequest;

#[derive(Clone, Debug)]
pub(super) struct QueuedRequest {
    pub(super) request: Arc<TagRequest>,
    /// Whether to pull an ended tag once more.
    pub(super) new_round: bool,
    /// Whether a write that carried it has failed.
    pub(super) has_failed: bool,
}

#[derive(Debug, Default)]
pub(super) struct RequestQueue {
    /// In the order in which they came; those in flight come first.
    queue: Vec<QueuedRequest>,
    /// How many of them are in the write of the spec that is in flight.
    in_flight: usize,
}

impl RequestQueue {
    /// Adds a request. It replaces an earlier one of the same job unless that is being written.
    pub(super) fn push(&mut self, request: Arc<TagRequest>, new_round: bool) {
        let waiting = self.queue.iter_mut().skip(self.in_flight);
        match waiting.into_iter().find(|queued| queued.request.owner.uid == request.owner.uid) {
            Some(queued) => {
                let new_round = new_round || queued.new_round;
                *queued = QueuedRequest { request, new_round, has_failed: false };
            }
            None => self.queue.push(QueuedRequest { request, new_round, has_failed: false }),
        }
    }

    /// Takes all requests out, to be applied to a spec. Those that have failed come last.
    pub(super) fn take(&mut self) -> Vec<QueuedRequest> {
        let mut queue = std::mem::take(&mut self.queue);
        queue.sort_by_key(|queued| queued.has_failed);
        queue
    }

    /// Puts the requests back that a write carries which begins now.
    pub(super) fn begin_write(&mut self, carried: Vec<QueuedRequest>) {
        self.in_flight = carried.len();
        self.queue = carried;
    }

    /// Whether the write that is in flight carries one request and no other.
    pub(super) fn is_one_in_flight(&self) -> bool {
        self.in_flight == 1
    }

    /// Puts requests back that have to wait for something else than a write.
    pub(super) fn put_back(&mut self, requests: Vec<QueuedRequest>) {
        self.queue.extend(requests);
    }

    /// Ends the write that carries requests. Returns those that are in the spec now; after a write that failed they wait
    /// behind the others.
    pub(super) fn end_write(&mut self, succeeded: bool) -> Vec<QueuedRequest> {
        let carried = std::mem::take(&mut self.in_flight).min(self.queue.len());
        let carried: Vec<_> = self.queue.drain(..carried).collect();
        if succeeded {
            return carried;
        }
        for QueuedRequest { request, new_round, .. } in carried {
            match self.queue.iter_mut().find(|later| later.request.owner.uid == request.owner.uid) {
                Some(later) => later.new_round |= new_round,
                None => self.queue.push(QueuedRequest { request, new_round, has_failed: true }),
            }
        }
        Vec::new()
    }

    /// Keeps all requests for the next NodeImage: this one is gone, and the end of the write that's in flight doesn't count.
    pub(super) fn end_object(&mut self) {
        self.end_write(false);
    }

    /// Drops all requests: the jobs go on without the node.
    pub(super) fn clear(&mut self) {
        // The end of the write that is in flight must not take out requests that come after this.
        *self = Self::default();
    }
}

impl QueuedRequest {
    pub(super) fn job(&self) -> Option<JobUid> {
        job_of(&self.request.owner)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::kruise::node_images::tests::request;

    #[test]
    fn an_old_write_keeps_later_requests() {
        let mut queue = RequestQueue::default();
        queue.push(Arc::new(request("one")), false);
        let carried = queue.take();
        queue.begin_write(carried);
        queue.clear();
        queue.push(Arc::new(request("two")), false);
        assert_eq!(queue.end_write(true).len(), 0);
        assert_eq!(queue.take().len(), 1);
    }

    #[test]
    fn a_failed_request_comes_last_and_gives_way_to_a_later_one() {
        let mut queue = RequestQueue::default();
        queue.push(Arc::new(request("one")), true);
        let carried = queue.take();
        queue.begin_write(carried);
        queue.end_write(false);
        queue.push(Arc::new(request("two")), false);
        let carried = queue.take();
        assert_eq!(carried.iter().map(|queued| queued.job().unwrap().0).collect::<Vec<_>>(), ["two", "one"]);
        queue.begin_write(carried);
        let later = Arc::new(TagRequest { image_pull_policy: Some("Always".to_owned()), ..request("one") });
        queue.push(later.clone(), false);
        queue.end_object();
        let kept = queue.take();
        let of_one = kept.iter().find(|queued| queued.request == later).unwrap();
        assert_eq!((kept.len(), of_one.new_round), (2, true));
    }

    #[test]
    fn a_later_request_replaces_the_waiting_one() {
        let mut queue = RequestQueue::default();
        queue.push(Arc::new(request("one")), true);
        let later = Arc::new(TagRequest { image_pull_policy: Some("Always".to_owned()), ..request("one") });
        queue.push(later.clone(), false);
        queue.push(Arc::new(request("two")), false);
        let waiting = queue.take();
        let [one, two] = waiting.as_slice() else { panic!("{waiting:?}") };
        assert_eq!((&one.request, one.new_round, two.new_round), (&later, true, false));
        // What is being written is not replaced.
        queue.begin_write(waiting);
        queue.push(Arc::new(request("one")), false);
        assert_eq!(queue.end_write(true).len(), 2);
        assert_eq!(queue.take().len(), 1);
    }
}
