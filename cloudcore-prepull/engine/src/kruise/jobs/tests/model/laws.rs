//! What must hold of each action, and at the end.

use std::collections::BTreeMap;

use prepull_api::crd::kruise::ImagePullJobStatus;

use super::super::super::*;
use super::book::Mark;
use super::world::{World, group};
use crate::kruise::Wish;
use crate::shared::events::ObjectEvent;

impl World {
    /// Nobody is asked who cannot answer, and no more nodes than there are slots.
    pub(super) fn may_ask(&self, node: &str, wish: &Wish, again: bool) {
        let job = JobUid(wish.owner.uid.clone().unwrap());
        let book = &self.books[&job];
        assert!(!book.refused && !book.ended, "{job} asks {node}, and is refused or over");
        assert!(self.nodes.get(node).is_some_and(|node| node.online), "{job} asks {node}, which is offline");
        assert!(self.selected(&job).contains(node), "{job} asks {node}, which is none of its nodes");
        let valid = book.valid.as_ref().unwrap();
        assert_eq!((&wish.image, &wish.tag), (&valid.image.0, &valid.image.1));
        assert_eq!(wish.limits.timeout_seconds, Some(i32::try_from(valid.template.timeout).unwrap()));
        match book.mark(node) {
            // It is to hear of a changed wish.
            Mark::Open => return assert!(!again),
            Mark::Waiting => assert!(!again),
            Mark::Anew => assert!(again),
            Mark::Ended(_, at) => {
                let passed = self.now.duration_since(at).as_secs();
                assert!(again && book.is_never() && passed >= 24 * 3600 - 600, "{job} asks {node} too soon");
            }
        }
        let id = group(&self.api[&job]);
        let (busy, slots) = (self.busy(&id), self.parallelism(&id));
        assert!(slots > 0, "{job} is paused");
        assert!(
            busy.contains(node) || busy.len() < usize::try_from(slots).unwrap(),
            "{job} asks {node}: {busy:?} are busy, of {slots}"
        );
    }

    /// A status is news, and its numbers are right.
    pub(super) fn may_say(&self, job: &JobUid, status: &ImagePullJobStatus) {
        let stored = self.api[job].status.as_ref();
        let object = Object::PullJob(job.clone());
        assert!(
            stored != Some(status) || self.unsure.contains(&object),
            "{job} says nothing new: {status:?}"
        );
        let was_over = stored.is_some_and(|stored| stored.completion_time.is_some());
        assert!(!was_over || self.unsure.contains(&object), "{job} is over, and says {status:?}");
        assert_eq!(usize::try_from(status.failed).unwrap(), status.failed_nodes.len());
        assert!(status.failed_nodes.is_sorted());
        let book = &self.books[job];
        assert_eq!(status.completion_time.is_some(), book.ended, "{job}: {status:?}");
        if book.refused {
            assert_eq!((status.desired, status.active, status.succeeded, status.failed), (0, 0, 0, 0));
            return;
        }
        assert!(status.succeeded + status.failed + status.active <= status.desired);
        if book.ended {
            assert!(status.active == 0 && status.succeeded + status.failed == status.desired);
            return;
        }
        let (desired, active, succeeded, failed) = self.counts(job);
        assert_eq!(
            (status.desired, status.active, status.succeeded, &status.failed_nodes),
            (desired, active, succeeded, &failed),
            "{job}"
        );
    }

    /// A job that ends has reason to.
    pub(super) fn may_end(&self, event: &ObjectEvent) {
        let job = &event.object.uid;
        let book = &self.books[job];
        let (desired, _, succeeded, failed) = self.counts(job);
        let all = desired == succeeded + i32::try_from(failed.len()).unwrap();
        let by_deadline = event.note.starts_with("job exceeds activeDeadlineSeconds");
        assert!(!book.is_never() && !book.refused && !book.ended, "{job} ends");
        assert!(all || by_deadline || book.gave_up, "{job} ends before its nodes do: {}", event.note);
        assert_eq!(event.warning, event.reason == "Failed");
    }

    /// Everything has answered: what can end has ended.
    pub(super) fn has_ended(&self) {
        for (uid, job) in &self.api {
            let status = job.status.clone().unwrap_or_default();
            let all = status.desired == status.succeeded + status.failed;
            let over = status.completion_time.is_some() || self.books[uid].is_never();
            assert!(all && over && status.active == 0, "{uid} has not ended: {status:?} {:?}", job.spec);
        }
        for (uid, list) in &self.lists {
            let status = list.status.clone().unwrap_or_default();
            let never = self.list_books[uid]
                .as_ref()
                .is_some_and(|list| list.template.completion == crate::kruise::rules::Completion::Never);
            assert!(status.completion_time.is_some() || never, "{uid} has not ended: {status:?}");
            assert_eq!(status.completed, status.desired, "{uid}");
        }
    }

    /// How the jobs ended that ended by their nodes alone.
    pub(super) fn ends(&self) -> BTreeMap<String, (i32, Vec<String>)> {
        let by_nodes = |uid: &JobUid, status: &ImagePullJobStatus| {
            !self.books[uid].gave_up && status.message == "job has completed"
        };
        let ends = self.api.iter().filter_map(|(uid, job)| {
            let status = job.status.clone().filter(|status| by_nodes(uid, status))?;
            Some((job.metadata.name.clone()?, (status.succeeded, status.failed_nodes)))
        });
        ends.collect()
    }
}
