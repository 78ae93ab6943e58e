//! Edits of jobs and nodes by users.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, Time};
use prepull_api::crd::EDGE_LABEL;
use prepull_api::crd::job::{ImagePrePullJobSpec, ImagePrePullTemplate};
use prepull_api::task::{JobUid, NodeName};
use prepull_engine::fleet::node_view::NodeView;
use prepull_engine::prepull::controller::Input;

use crate::check::PARKED;
use crate::check::specs::{follow, is_valid};
use crate::cloud::{Boot, Fate, Watched};
use crate::removal::removing;
use crate::world::{World, millis};

mod edits;

const IMAGES: usize = 4;

impl World {
    pub(crate) fn user(&mut self) {
        match self.rng.below(20) {
            0..4 => self.create(),
            4 => self.delete_some(),
            5..14 => self.edit_some(),
            14 => {
                let node = self.rng.below(self.edges.len());
                let (ready, in_pool, in_region) =
                    (self.rng.chance(60), self.rng.chance(80), self.rng.chance(50));
                self.put_node(node, ready, in_pool, in_region);
            }
            15 => {
                let node = self.rng.below(self.edges.len());
                self.delete_node(node);
            }
            _ => {
                let node = self.rng.below(self.edges.len());
                self.put_node(node, true, true, false);
            }
        }
        self.fail_over();
    }

    /// What people do meets a change of leaders: before anybody has seen it, when the leader has, or when its writes are
    /// made as well.
    fn fail_over(&mut self) {
        let when = self.rng.below(100);
        if when >= 9 {
            return;
        }
        if when >= 3 {
            while self.cloud.read_watch(1) || self.cloud.read_watch(0) {}
            self.run_cloud(usize::MAX);
        }
        if when >= 6 {
            while !self.cloud.writes.is_empty() {
                self.finish_write(0, Fate::Answered);
            }
        }
        self.restart_cloud();
    }

    /// `in_pool`: with the label that jobs select by; `in_region`: with the label that overriders select by.
    pub(crate) fn put_node(&mut self, at: usize, ready: bool, in_pool: bool, in_region: bool) {
        let name = NodeName(format!("n{at}"));
        let mut labels = BTreeMap::from([(EDGE_LABEL.to_owned(), String::new())]);
        if in_pool {
            labels.insert("pool".to_owned(), "a".to_owned());
        }
        if in_region {
            labels.insert("region".to_owned(), "x".to_owned());
        }
        let node = NodeView { name: name.clone(), labels, ready };
        if self.api.nodes.insert(name, node.clone()).as_ref() != Some(&node) {
            self.log(|| format!("user: node n{at} ready {ready} in pool {in_pool} in region {in_region}"));
            self.cloud.watched(Watched::Node(node));
        }
    }

    fn delete_node(&mut self, at: usize) {
        let name = NodeName(format!("n{at}"));
        if self.api.nodes.remove(&name).is_some() {
            self.log(|| format!("user: deletes node {name}"));
            self.deleted.insert(name.clone());
            self.check.has_deleted_nodes = true;
            self.cloud.watched(Watched::NodeGone(name));
        }
    }

    pub(crate) fn create(&mut self) {
        let name = format!("job-{}", self.rng.below(self.names));
        if self.api.jobs.values().any(|stored| stored.object.metadata.name.as_ref() == Some(&name)) {
            return;
        }
        let mut good = self.spec();
        if self.removes && self.rng.chance(50) {
            good = removing(good, &mut self.rng);
        }
        let mut spec = good.clone();
        if self.rng.chance(8) {
            edits::make_invalid(&mut spec, &mut self.rng);
        }
        let now = self.time();
        let uid = self.api.create(&name, spec.clone(), now);
        self.log(|| format!("user: creates {name} as {uid}: {}", serde_json::to_string(&spec).unwrap()));
        self.good_specs.insert(uid.clone(), good);
        self.tell(&uid);
    }

    fn spec(&mut self) -> ImagePrePullJobSpec {
        let rng = &mut self.rng;
        let mut template = ImagePrePullTemplate {
            images: (0..=rng.below(3)).map(|_| format!("r.example/app{}:v1", rng.below(IMAGES))).collect(),
            failure_tolerate: rng.pick(&["0", "0.3", "1", "1"]).to_owned(),
            concurrency: i64::try_from(1 + rng.below(self.edges.len())).unwrap(),
            timeout_seconds: rng.pick(&[5, 20, 60]),
            image_pull_policy: Some(rng.pick(&["IfNotPresent", "Always"]).to_owned()),
            ..ImagePrePullTemplate::default()
        };
        if rng.chance(50) {
            let labels = BTreeMap::from([("pool".to_owned(), "a".to_owned())]);
            template.label_selector =
                Some(LabelSelector { match_labels: Some(labels), ..LabelSelector::default() });
        } else {
            let nodes = 1 + rng.below(self.edges.len());
            template.node_names = (0..nodes).map(|node| format!("n{node}")).collect();
        }
        let allow_missing_nodes = template.node_names.len() % 2 == 1;
        let rollout = rng.chance(30).then(|| edits::rollout(rng));
        // Without a draw, as below.
        let windows = edits::windows(template.images.len() + template.node_names.len());
        let image_pre_pull_overriders = if rng.chance(30) { vec![edits::overrider()] } else { Vec::new() };
        ImagePrePullJobSpec {
            image_pre_pull_template: template,
            suspend: rng.chance(10),
            active_deadline_seconds: rng.chance(15).then(|| rng.pick(&[10, 60, 200])),
            ttl_seconds_after_finished: rng.chance(10).then(|| rng.pick(&[0, 30])),
            rollout,
            retry: if rng.chance(25) { rng.pick(&[1, 2, 3]) } else { 0 },
            follow_nodes: rng.chance(30),
            // Without a draw, so that the seeds that found something still mean what they did.
            allow_missing_nodes,
            image_pre_pull_overriders,
            windows,
            pin: allow_missing_nodes,
            ..ImagePrePullJobSpec::default()
        }
    }

    pub(crate) fn any_job(&mut self) -> Option<JobUid> {
        let at = self.rng.below(self.api.jobs.len());
        self.api.jobs.keys().nth(at).cloned()
    }

    pub(crate) fn delete_some(&mut self) {
        let Some(uid) = self.any_job() else { return };
        // A job with a finalizer is not removed at once.
        if self.rng.chance(30) {
            let now = self.time();
            if let Some(stored) = self.api.jobs.get_mut(&uid) {
                stored.object.metadata.deletion_timestamp = Some(Time(now));
            }
            self.tell(&uid);
        }
        self.delete_job(&uid);
    }

    /// Deletes a report of a job that the leader has in memory.
    pub(crate) fn delete_report(&mut self) {
        if self.cloud.boot != Boot::Up {
            return;
        }
        let is_known = |key: &&(JobUid, u32)| {
            self.is_kept(&key.0) && self.api.overtaken.get(*key).is_none_or(Option::is_some)
        };
        let reports: Vec<_> = self.api.reports.keys().filter(is_known).cloned().collect();
        let Some((job, index)) = self.rng.choose(&reports).cloned() else { return };
        if let Some(report) = self.api.reports.remove(&(job.clone(), index)) {
            self.log(|| format!("user: deletes report {index} of {job}"));
            self.api.deleted_reports.insert((job.clone(), index), report.object);
            self.cloud.push(Input::ReportGone { job, index });
        }
    }

    /// Whether a leader that knows the job has it in memory, and not only that it is over.
    pub(crate) fn is_kept(&self, job: &JobUid) -> bool {
        let status = self.api.jobs.get(job).and_then(|stored| stored.object.status.as_ref());
        let ended = status.and_then(|status| status.completion_time.as_ref());
        self.api.jobs.contains_key(job) && ended.is_none_or(|ended| millis(ended.0) + PARKED > self.now)
    }

    pub(crate) fn delete_job(&mut self, uid: &JobUid) {
        if self.api.jobs.remove(uid).is_some() {
            self.log(|| format!("api: {uid} is deleted"));
            self.cloud.watched(Watched::JobGone(uid.clone()));
        }
    }

    /// Whether a job that is over is re-checked next. The hour decides, so that no seed leads elsewhere by a draw. By then an
    /// image may have been removed.
    fn may_recheck(&mut self, job: &JobUid) -> bool {
        let status = self.api.jobs.get(job).and_then(|stored| stored.object.status.as_ref());
        let is_over = status.is_some_and(|status| status.completion_time.is_some());
        let is_rechecked = is_over && !self.now.is_multiple_of(3);
        if is_rechecked && self.now.is_multiple_of(2) {
            self.remove_image();
        }
        is_rechecked
    }

    fn edit_some(&mut self) {
        let Some(uid) = self.any_job() else { return };
        // An edit of the fixed part before the start makes it a different job.
        let status = self.api.jobs.get(&uid).and_then(|stored| stored.object.status.as_ref());
        let started = status.is_some_and(|status| status.start_time.is_some());
        let edges = self.edges.len();
        let is_rechecked = self.may_recheck(&uid);
        let what = self.rng.below(20);
        let (rng, good) = (&mut self.rng, &self.good_specs[&uid]);
        match what {
            0 => self.api.spoil(&uid),
            1 | 2 => self.api.edit(&uid, |spec| edits::make_invalid(spec, rng)),
            3 | 4 | 7 if started => self.api.edit(&uid, |spec| edits::edit_fixed_part(spec, edges, rng)),
            5 => self.api.edit(&uid, |spec| spec.clone_from(good)),
            6 => {
                let begun = self.check.beginning(&uid);
                let undone = begun.map_or_else(|| good.clone(), |begun| follow(begun, good));
                self.api.edit(&uid, |spec| *spec = undone);
            }
            _ => self.api.edit(&uid, |spec| edits::edit_or_recheck(spec, edges, rng, is_rechecked)),
        }
        self.note_spec(&uid);
    }

    /// Edits a job so that it still ends.
    pub(crate) fn edit_without_suspension(&mut self) {
        let Some(uid) = self.any_job() else { return };
        let (edges, fixed) = (self.edges.len(), self.rng.chance(20));
        let is_rechecked = self.may_recheck(&uid);
        let rng = &mut self.rng;
        self.api.edit(&uid, |spec| {
            let before = spec.clone();
            if fixed {
                edits::edit_fixed_part(spec, edges, rng);
            } else {
                edits::edit_or_recheck(spec, edges, rng, is_rechecked);
            }
            (spec.suspend, spec.pause) = (false, false);
            // What is about pulling would be refused.
            if spec.image_pre_pull_template.remove.is_some() && !is_valid(spec) {
                *spec = before;
            }
        });
        self.note_spec(&uid);
    }

    /// Notes the job's present spec. Its valid parts are kept in case the rest is undone.
    fn note_spec(&mut self, uid: &JobUid) {
        let Some(object) = self.api.read(uid) else { return };
        let Some(good) = self.good_specs.get_mut(uid) else { return };
        if let Ok(job) = &object
            && is_valid(&job.spec)
        {
            good.clone_from(&job.spec);
        }
        self.log(|| match &object {
            Ok(job) => format!("user: edits {uid}: {}", serde_json::to_string(&job.spec).unwrap()),
            Err(_) => format!("user: makes {uid} unreadable"),
        });
        self.cloud.watched(Watched::Job(object));
    }

    /// Ends suspensions, makes every node ready, and undoes edits that were refused.
    pub(crate) fn release_jobs(&mut self) {
        let jobs: Vec<_> = self.api.jobs.keys().cloned().collect();
        for uid in jobs {
            let mut good = self.good_specs[&uid].clone();
            // The spec that the job began with may be unknown.
            if let Some(beginning) = self.check.beginning(&uid) {
                good = follow(beginning, &good);
            }
            self.api.edit(&uid, |spec| {
                *spec = good;
                (spec.suspend, spec.pause) = (false, false);
            });
            self.note_spec(&uid);
        }
        for node in 0..self.edges.len() {
            let in_region = self.rng.chance(50);
            self.put_node(node, true, true, in_region);
        }
    }

    /// Whether the job follows its whole spec.
    pub(crate) fn is_followed(&self, uid: &JobUid) -> bool {
        let (object, beginning) = (self.api.read(uid), self.check.beginning(uid));
        let is_same =
            |spec: &ImagePrePullJobSpec| beginning.is_none_or(|beginning| follow(beginning, spec) == *spec);
        object.is_some_and(|object| object.is_ok_and(|job| is_same(&job.spec)))
    }

    fn tell(&mut self, uid: &JobUid) {
        if let Some(object) = self.api.read(uid) {
            self.cloud.watched(Watched::Job(object));
        }
    }
}
