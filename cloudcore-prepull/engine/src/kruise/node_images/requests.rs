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
            Some(queued) => *queued = QueuedRequest { request, new_round: new_round || queued.new_round },
            None => self.queue.push(QueuedRequest { request, new_round }),
        }
    }

    /// Takes all requests out, to be applied to a spec.
    pub(super) fn take(&mut self) -> Vec<QueuedRequest> {
        std::mem::take(&mut self.queue)
    }

    /// Puts the requests back that a write carries which begins now.
    pub(super) fn begin_write(&mut self, carried: Vec<QueuedRequest>) {
        self.in_flight = carried.len();
        self.queue = carried;
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
        for QueuedRequest { request, new_round } in carried {
            match self.queue.iter_mut().find(|later| later.request.owner.uid == request.owner.uid) {
                Some(later) => later.new_round |= new_round,
                None => self.queue.push(QueuedRequest { request, new_round }),
            }
        }
        Vec::new()
    }

    /// Keeps all requests for the next NodeImage: this one is gone, and the end of the write that's in flight doesn't count.
    pub(super) fn end_object(&mut self) {
        self.in_flight = 0;
    }

    /// Drops all requests: there is no NodeImage any more.
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
