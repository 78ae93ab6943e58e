//! The invariants: what must hold after each step, and at the end.

use std::collections::HashSet;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt;
use prepull_api::crd::kruise::{ImageTagSpec, PullPhase};
use prepull_api::overriders::SecretRef;
use prepull_api::task::{ImageOutcome, NodeName, TaskId, TaskOutcome};
use prepull_engine::engine::Input;
use prepull_engine::kruise;
use prepull_engine::kruise::jobs::WriteTarget;
use prepull_engine::kruise::node_images::{Input as To, TagDispatch};

use crate::edge::TaskState;
use crate::world::{Pending, World};

/// Writes that an hour without events may take, over four nodes and a handful of jobs.
const QUIET_WRITES: usize = 60;

impl World {
    /// What must hold after every step.
    pub(crate) fn check(&self) {
        for (node, taken) in &self.slots {
            assert!(*taken >= 0, "{node} has {taken} slots taken");
        }
        let mut under_way: Vec<&NodeName> = self
            .pending
            .iter()
            .filter_map(|pending| match pending {
                Pending::NodeImage(node, _) | Pending::Answer(node, _) => Some(node),
                _ => None,
            })
            .collect();
        under_way.sort_unstable();
        let count = under_way.len();
        under_way.dedup();
        assert_eq!(count, under_way.len(), "two writes of one NodeImage are under way");
        let mut targets: HashSet<WriteTarget> = HashSet::new();
        for pending in &self.pending {
            let target = match pending {
                Pending::Job(write) => write.target(),
                Pending::JobAnswer(target, _) => target.clone(),
                _ => continue,
            };
            assert!(targets.insert(target.clone()), "two writes of {target:?} are under way");
        }
    }

    /// A pull for jobs uses the secrets of one namespace. One that a person asks for may use any.
    pub(crate) fn check_secrets(&self, dispatch: &TagDispatch) {
        let images = self.node_images.get(&dispatch.node.0).map(|object| &object.spec.images);
        let mut tags = images
            .into_iter()
            .flatten()
            .flat_map(|(image, spec)| spec.tags.iter().map(move |tag| (image, tag)));
        let is_of_jobs = tags.any(|(image, tag)| {
            dispatch.task.images[0].image == format!("{image}:{}", tag.tag)
                && i64::from(dispatch.task.id.attempt) == tag.version + 1
                && !tag.owner_references.is_empty()
        });
        let mut namespaces: Vec<_> = dispatch.secrets.iter().map(SecretRef::namespace).collect();
        namespaces.dedup();
        assert!(!is_of_jobs || namespaces.len() <= 1, "a pull for jobs with the secrets of {namespaces:?}");
    }

    /// A result is acknowledged only if the API server has it, or the spec does not ask for it any more.
    pub(crate) fn check_ack(&self, node: &NodeName, task: &TaskId) {
        let (uid, _) = task.job.0.split_once('.').expect("a task of a NodeImage");
        let Some(object) =
            self.node_images.get(&node.0).filter(|object| object.uid().as_deref() == Some(uid))
        else {
            return;
        };
        // The engine cannot know about changes that the watch has not delivered, such as a tag that was removed and added
        // again.
        let is_behind = self.watch.iter().any(|input| {
            matches!(input,
            Input::Kruise(kruise::Input::Node(To::NodeImage(Ok(object)))) if object.name() == *node)
        });
        // What cannot be read asks for nothing; once it can, the tag is pulled again.
        let is_behind = is_behind || self.unreadable.contains(&node.0);
        let Some((image, asked)) = self.dispatched.get(task).filter(|_| !is_behind) else { return };
        let tags = object.spec.images.get(image).map(|image| image.tags.clone()).unwrap_or_default();
        let wanted = tags.iter().find(|tag| tag.tag == asked.tag).is_some_and(|tag| {
            let limits = |tag: &ImageTagSpec| {
                let limits = tag.pull_policy.clone().unwrap_or_default();
                (limits.timeout_seconds, limits.backoff_limit, limits.active_deadline_seconds)
            };
            tag.version == asked.version
                && tag.image_pull_policy == asked.image_pull_policy
                && limits(tag) == limits(asked)
        });
        let statuses = object.status.as_ref().and_then(|status| status.image_statuses.get(image));
        let has_ended = statuses
            .iter()
            .flat_map(|image| &image.tags)
            .any(|tag| tag.tag == asked.tag && tag.has_ended(asked.version));
        // A task that failed under an earlier process of cloudcore is tried again, so that its result may be forgotten.
        let was_done = matches!(self.edges[node].ledger.get(task), Some(TaskState::Finished(result))
            if result.outcome == TaskOutcome::Succeeded);
        assert!(
            !wanted || has_ended || !was_done,
            "{task} of {node} was acknowledged before the API server had it"
        );
    }

    /// Stops the faults, and checks that everything ends.
    pub(crate) fn settle(&mut self) {
        self.log(|| "the faults stop".to_owned());
        self.calm = true;
        if self.cloud.is_none() {
            self.start();
        }
        self.mend_all();
        // Paused jobs are resumed.
        let paused: Vec<_> = self.pull_jobs.keys().cloned().collect();
        for name in paused {
            let job = self.pull_jobs.get_mut(&name).unwrap();
            if job.owner_references().is_empty() {
                job.spec.template.parallelism = Some(IntOrString::Int(2));
                self.touch(&name);
            }
        }
        let lists: Vec<_> = self.list_jobs.keys().cloned().collect();
        for name in lists {
            let list = self.list_jobs.get_mut(&name).unwrap();
            list.spec.template.parallelism = Some(IntOrString::Int(2));
            self.touch(&name);
        }
        self.settle_for(200, Duration::from_secs(1));
        self.settle_for(90, Duration::from_secs(30));
        self.check_ends();
        // By now everything that was due has been done.
        self.writes = 0;
        self.settle_for(90, Duration::from_secs(40));
        let writes = self.writes;
        assert!(writes <= QUIET_WRITES, "{writes} writes in an hour in which nothing happens");
        self.check_ends();
    }

    pub(crate) fn settle_for(&mut self, count: usize, between: Duration) {
        for _ in 0..count {
            self.settle_once();
            self.advance_time(between);
        }
        self.settle_once();
    }

    fn settle_once(&mut self) {
        self.collect_orphans();
        for node in self.edges.keys().cloned().collect::<Vec<_>>() {
            if self.edges[&node].session.is_none() {
                self.connect(&node);
            }
            while let Some(message) = self.edges.get_mut(&node).unwrap().downward.pop_front() {
                self.edges.get_mut(&node).unwrap().receive(message);
            }
            for task in self.edges[&node].running() {
                self.edges.get_mut(&node).unwrap().end(&task, ImageOutcome::Pulled);
            }
        }
        for _ in 0..12 {
            self.deliver_messages();
        }
        while !self.watch.is_empty() {
            self.deliver();
        }
        for _ in 0..self.pending.len() {
            self.end_pending();
        }
    }

    fn check_ends(&self) {
        for (name, job) in &self.pull_jobs {
            let status = job.status.clone().unwrap_or_default();
            let never = job.spec.template.completion_policy.type_.as_deref() == Some("Never");
            let ended = status.succeeded + status.failed == status.desired && status.active == 0;
            assert!(ended, "{name} has not ended: {status:?}");
            assert!(never || status.completion_time.is_some(), "{name} is not over: {status:?}");
        }
        for (name, list) in &self.list_jobs {
            let status = list.status.clone().unwrap_or_default();
            if list.spec.template.completion_policy.type_.as_deref() == Some("Never") {
                continue;
            }
            assert_eq!(status.completed, status.desired, "{name} has not ended: {status:?}");
        }
        for (name, object) in &self.node_images {
            for (image, spec) in &object.spec.images {
                for tag in &spec.tags {
                    let status = object.status.clone().unwrap_or_default();
                    let of_tag = status.image_statuses.get(image).map(|image| image.tags.clone());
                    let of_tag = of_tag.iter().flatten().find(|known| known.tag == tag.tag);
                    let ended = of_tag.is_some_and(|known| {
                        known.has_ended(tag.version)
                            && matches!(known.phase, PullPhase::Succeeded | PullPhase::Failed)
                    });
                    assert!(ended, "{image}:{} of {name} has not ended: {of_tag:?}", tag.tag);
                }
            }
        }
        assert_eq!(
            self.node_images.keys().collect::<Vec<_>>(),
            self.nodes.keys().map(|name| &name.0).collect::<Vec<_>>(),
            "a NodeImage for each Node"
        );
        for (node, edge) in &self.edges {
            assert!(edge.ledger.is_empty(), "{node} still has {:?}", edge.open());
        }
        assert!(self.slots.values().all(|taken| *taken == 0), "slots are still taken: {:?}", self.slots);
        assert!(self.pending.is_empty(), "writes are still under way");
    }
}
