//! What is to be done for a node now, and when to look again.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use prepull_api::crd::kruise::{ImageSpec, ImageTagSpec, NodeImageSpec, NodeImageStatus};
use prepull_api::selector::Selector;
use prepull_api::wire::truncate_reason;

use super::super::super::{Liveness, Standing};
use super::super::edit::{self, Effect, job_of};
use super::super::status::{Difference, desired, difference};
use super::super::work::State;
use super::super::{Action, Around, Out, Write};
use super::{Held, Key, Observed, give_place, object_id, told};
use crate::shared::events::{ObjectEvent, ObjectKind};
use crate::shared::pacing::{Moment, TokenBucket};
use crate::shared::reasons;

/// Between two writes of one status that tell of ends: what ends together is told together.
const ENDS_GAP: Duration = Duration::from_millis(300);
/// Between two writes of one status that tell of progress.
const PROGRESS_GAP: Duration = Duration::from_secs(5);
/// Before the first of them: an image that is there by then needs one write less.
const PROGRESS_FIRST: Duration = Duration::from_secs(3);
/// When there are too many of them over all nodes: see [`progress_budget`](super::super::progress_budget).
const PROGRESS_WAIT: Duration = Duration::from_secs(1);

/// Tasks in a node's ledger, those that wait for their acknowledgement included: half of what it takes
/// ([`prepull_api::wire::MAX_OPEN_TASKS`]), the other half is for ImagePrePullJobs. A node that is full answers with a
/// failure, though nothing is wrong but that the API server is slow.
const LEDGER: usize = prepull_api::wire::MAX_OPEN_TASKS / 2;

impl Held {
    /// Goes on as far as it can. Returns when to look again, though nothing happens.
    pub(in super::super) fn settle(
        &mut self,
        selector: &Selector,
        budget: &mut TokenBucket<Timestamp>,
        around: &mut Around<'_>,
        out: &mut Out<'_>,
    ) -> Option<Timestamp> {
        self.align(around.now, out);
        let mut wakeup = Wakeup::default();
        self.give_up(around, &mut wakeup, out);
        self.dispatch(around, &mut wakeup, out);
        if !self.write.in_flight && !self.blocked {
            match self.write.not_before.filter(|not_before| *not_before > around.now) {
                Some(not_before) => wakeup.at(not_before),
                None => self.write(selector, budget, around, &mut wakeup, out),
            }
        }
        wakeup.0
    }

    /// What has had its time ends here, whatever the node does.
    fn give_up(&mut self, around: &Around<'_>, wakeup: &mut Wakeup, out: &mut Out<'_>) {
        let (now, mut over) = (around.now, Vec::<(Key, &'static str)>::new());
        let Some(object) = &self.object else { return };
        for (key, work) in &mut self.works {
            if matches!(work.state, State::Ended { .. }) {
                continue;
            }
            let tag = tag_of(&object.spec, key).map(|(_, tag)| tag);
            if !tag.is_some_and(|tag| edit::is_over(tag, around.liveness)) {
                let Some(due) = work.gives_up() else { continue };
                if due > now {
                    wakeup.at(due);
                    continue;
                }
            }
            if work.is_out() {
                out.cancel(work.sent.clone(), work.gave_up());
            }
            give_place(work, out);
            over.push((key.clone(), work.gave_up()));
        }
        for (key, why) in over {
            self.fail(&key, why.to_owned(), now, out);
        }
    }

    /// Sends what waits, as long as the node has places.
    fn dispatch(&mut self, around: &mut Around<'_>, wakeup: &mut Wakeup, out: &mut Out<'_>) {
        let (Some(_), Some(object)) = (self.session, &self.object) else { return };
        let now = around.now;
        let in_ledger = self.works.values().filter(|work| work.is_in_ledger()).count();
        let mut room = LEDGER.saturating_sub(in_ledger);
        let mut waiting: Vec<(Option<Timestamp>, Key)> = Vec::new();
        for (key, work) in self.works.iter().filter(|(_, work)| matches!(work.state, State::Waiting)) {
            if let Some(not_before) = work.not_before.filter(|not_before| *not_before > now) {
                wakeup.at(not_before);
                continue;
            }
            let made = tag_of(&object.spec, key).and_then(|(_, tag)| tag.created_at.as_ref());
            waiting.push((made.map(|time| time.0), key.clone()));
        }
        // Who came first is served first.
        waiting.sort_unstable();
        for (_, key) in waiting {
            let Some((image, tag)) = tag_of(&object.spec, &key) else { continue };
            let Some(work) = self.works.get_mut(&key) else { continue };
            if room == 0 || !(around.take)(&self.name) {
                return;
            }
            room -= 1;
            work.has_place = true;
            work.state = State::Resolving;
            work.sent = work.task.clone();
            out.act(Action::Dispatch(Box::new(work.order(&self.name, &key.0, image, tag, now))));
        }
    }

    /// Makes the write that is due, if there is one.
    fn write(
        &mut self,
        selector: &Selector,
        budget: &mut TokenBucket<Timestamp>,
        around: &Around<'_>,
        wakeup: &mut Wakeup,
        out: &mut Out<'_>,
    ) {
        let Some(node) = &self.node else {
            if let Some(object) = &self.object {
                out.write(Write::Delete { uid: object.uid.clone() });
                self.begin(0);
            }
            return;
        };
        let Some(object) = &self.object else {
            if self.is_to_be_made(selector) {
                out.write(Write::Create(Arc::new(node.labels.clone())));
                self.begin(0);
            }
            return;
        };
        let now = around.now;
        let none = NodeImageStatus::default();
        let status = object.status.as_ref().unwrap_or(&none);
        let mut spec = object.spec.clone();
        let (mut changed, next) = edit::prune(&mut spec, status, around.liveness, now);
        if let Some(next) = next {
            wakeup.at(next);
        }
        let (mut kept, mut settled, mut full) = (Vec::new(), Vec::new(), Vec::new());
        for (wish, again) in std::mem::take(&mut self.wishes) {
            // Of a job that has gone, or ended, before it could be written.
            if !job_of(&wish.owner).is_some_and(|job| (around.liveness)(&job) == Liveness::Active) {
                continue;
            }
            match edit::apply(&mut spec, status, &wish, again, now) {
                Effect::Changed => kept.push((wish, again)),
                Effect::None => settled.push(wish),
                Effect::Full { disowned } => {
                    changed |= disowned;
                    full.push(wish);
                }
            }
        }
        changed |= !kept.is_empty();
        self.wishes = kept;
        let (uid, version) = (object.uid.clone(), object.version.clone());
        if changed || *object.labels != node.labels {
            let labels = Arc::new(node.labels.clone());
            out.write(Write::Spec { uid: uid.clone(), version, labels, spec: Box::new(spec) });
            self.begin(self.wishes.len());
        } else {
            self.write_status(budget, now, wakeup, out);
        }
        for wish in settled {
            self.answer(&wish, out);
        }
        for wish in full {
            // The job is not to wait for room that may never come.
            let note = format!("image {}: the NodeImage has as many images as it may have", wish.image);
            out.act(Action::Event(ObjectEvent {
                kind: ObjectKind::NodeImage,
                object: object_id(&self.name, &uid),
                warning: true,
                reason: reasons::PULL_IMAGE_FAILED,
                note: truncate_reason(&note),
            }));
            if let Some(job) = job_of(&wish.owner) {
                let what = (job, (wish.image.clone(), wish.tag.clone()));
                out.act(told(&self.name, what, Standing::Failed(now)));
            }
        }
    }

    fn write_status(
        &mut self,
        budget: &mut TokenBucket<Timestamp>,
        now: Timestamp,
        wakeup: &mut Wakeup,
        out: &mut Out<'_>,
    ) {
        let Some(object) = &self.object else { return };
        let status = self.desired(object);
        let Some(difference) = difference(&status, object.status.as_ref()) else {
            self.write.progress_since = None;
            return;
        };
        let after = |since: Option<Timestamp>, gap: Duration| {
            since.and_then(|since| since.checked_add(gap).ok()).unwrap_or(Timestamp::MIN)
        };
        let due = match difference {
            Difference::Ended | Difference::Gone => after(self.write.last, ENDS_GAP),
            Difference::Progress => {
                let since = *self.write.progress_since.get_or_insert(now);
                after(self.write.last, PROGRESS_GAP).max(after(Some(since), PROGRESS_FIRST))
            }
        };
        if due > now {
            return wakeup.at(due);
        }
        if difference == Difference::Progress && budget.try_take(1.0, now).is_err() {
            return wakeup.at(now.after(PROGRESS_WAIT));
        }
        let (uid, version) = (object.uid.clone(), object.version.clone());
        out.write(Write::Status { uid, version, status: Box::new(status) });
        self.begin(0);
        (self.write.last, self.write.progress_since) = (Some(now), None);
    }

    fn desired(&self, object: &Observed) -> NodeImageStatus {
        let none = NodeImageStatus::default();
        desired(&object.spec, object.status.as_ref().unwrap_or(&none), |name, tag| {
            let key = (name.to_owned(), tag.tag.clone());
            let refused = self.refused.get(&key).cloned();
            refused.or_else(|| self.works.get(&key).map(|work| work.status(tag)))
        })
    }

    fn begin(&mut self, wishes: usize) {
        self.write.in_flight = true;
        self.write.wishes = wishes;
        self.write.replaces = self.object.as_ref().map(|object| object.version.clone());
    }
}

fn tag_of<'a>(spec: &'a NodeImageSpec, key: &Key) -> Option<(&'a ImageSpec, &'a ImageTagSpec)> {
    let image = spec.images.get(&key.0)?;
    image.tags.iter().find(|tag| tag.tag == key.1).map(|tag| (image, tag))
}

/// The earliest of several moments.
#[derive(Default)]
struct Wakeup(Option<Timestamp>);

impl Wakeup {
    fn at(&mut self, at: Timestamp) {
        self.0 = Some(self.0.map_or(at, |known| known.min(at)));
    }
}
