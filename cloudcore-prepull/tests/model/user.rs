//! What people do with jobs and nodes.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, Time};
use prepull_api::crd::EDGE_LABEL;
use prepull_api::crd::job::{ImagePrePullJobSpec, ImagePrePullTemplate, RolloutStrategy};
use prepull_api::task::{JobUid, NodeName};
use prepull_engine::shared::node_view::NodeView;

use crate::cloud::Watched;
use crate::world::World;

const IMAGES: usize = 4;

impl World {
    pub(crate) fn user(&mut self) {
        match self.rng.below(20) {
            0..4 => self.create(),
            4 => self.delete_some(),
            5..14 => self.edit_some(),
            14 => {
                let (node, ready, labelled) =
                    (self.rng.below(self.edges.len()), self.rng.chance(50), self.rng.chance(80));
                self.put_node(node, ready, labelled);
            }
            15 => {
                let node = self.rng.below(self.edges.len());
                self.delete_node(node);
            }
            _ => {
                let node = self.rng.below(self.edges.len());
                self.put_node(node, true, true);
            }
        }
    }

    pub(crate) fn put_node(&mut self, at: usize, ready: bool, labelled: bool) {
        let name = NodeName(format!("n{at}"));
        let mut labels = BTreeMap::from([(EDGE_LABEL.to_owned(), String::new())]);
        if labelled {
            labels.insert("pool".to_owned(), "a".to_owned());
        }
        let node = NodeView { name: name.clone(), labels, ready };
        if self.api.nodes.insert(name, node.clone()).as_ref() != Some(&node) {
            self.log(|| format!("user: node n{at} ready {ready} labelled {labelled}"));
            self.cloud.watched(Watched::Node(node));
        }
    }

    fn delete_node(&mut self, at: usize) {
        let name = NodeName(format!("n{at}"));
        if self.api.nodes.remove(&name).is_some() {
            self.log(|| format!("user: deletes node {name}"));
            self.deleted.insert(name.clone());
            self.cloud.watched(Watched::NodeGone(name));
        }
    }

    pub(crate) fn create(&mut self) {
        let name = format!("job-{}", self.rng.below(self.names));
        if self.api.jobs.values().any(|stored| stored.object.metadata.name.as_ref() == Some(&name)) {
            return;
        }
        let spec = self.spec();
        let now = self.time();
        let uid = self.api.create(&name, spec.clone(), now);
        self.log(|| format!("user: creates {name} as {uid}: {}", serde_json::to_string(&spec).unwrap()));
        self.first_images.insert(uid.clone(), spec.image_pre_pull_template.images);
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
        if rng.chance(8) {
            "many".clone_into(&mut template.failure_tolerate);
        }
        if rng.chance(50) {
            let labels = BTreeMap::from([("pool".to_owned(), "a".to_owned())]);
            template.label_selector =
                Some(LabelSelector { match_labels: Some(labels), ..LabelSelector::default() });
        } else {
            let nodes = 1 + rng.below(self.edges.len());
            template.node_names = (0..nodes).map(|node| format!("n{node}")).collect();
        }
        let steps = ["1", "50%", "100%"];
        let from = rng.below(3);
        let rollout = rng.chance(30).then(|| RolloutStrategy {
            steps: steps[from..].iter().map(|step| (*step).to_owned()).collect(),
            pause_seconds: rng.pick(&[0, 5, 40]),
        });
        ImagePrePullJobSpec {
            image_pre_pull_template: template,
            suspend: rng.chance(10),
            active_deadline_seconds: rng.chance(15).then(|| rng.pick(&[10, 60, 200])),
            ttl_seconds_after_finished: rng.chance(10).then(|| rng.pick(&[0, 30])),
            rollout,
            follow_nodes: rng.chance(30),
            ..ImagePrePullJobSpec::default()
        }
    }

    fn any_job(&mut self) -> Option<JobUid> {
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

    pub(crate) fn delete_job(&mut self, uid: &JobUid) {
        if self.api.jobs.remove(uid).is_some() {
            self.log(|| format!("api: {uid} is deleted"));
            self.cloud.watched(Watched::JobGone(uid.clone()));
        }
    }

    fn edit_some(&mut self) {
        let Some(uid) = self.any_job() else { return };
        // An edit before the start makes it a different job.
        let status = self.api.jobs.get(&uid).and_then(|stored| stored.object.status.as_ref());
        let started = status.is_some_and(|status| status.start_time.is_some());
        let edges = self.edges.len();
        let rng = &mut self.rng;
        let (what, yes) = (rng.below(11), rng.chance(50));
        let concurrency = i64::try_from(1 + rng.below(edges)).unwrap();
        let timeout = rng.pick(&[5, 20, 60]);
        let tolerance = rng.pick(&["0", "0.3", "1"]);
        let time = rng.pick(&[10, 60, 200]);
        let image = format!("r.example/app{}:v1", rng.below(IMAGES));
        let mut line = String::new();
        self.api.edit(&uid, |spec| {
            let template = &mut spec.image_pre_pull_template;
            match what {
                0 | 1 => template.concurrency = concurrency,
                2 => template.timeout_seconds = timeout,
                3 => tolerance.clone_into(&mut template.failure_tolerate),
                4 | 5 => spec.suspend = yes,
                6 => spec.active_deadline_seconds = yes.then_some(time),
                7 => spec.follow_nodes = yes,
                8 | 9 => spec.retry += 1,
                _ if yes && started => template.images = vec![image],
                _ => {
                    spec.rollout = Some(RolloutStrategy { steps: vec!["50%".to_owned()], pause_seconds: 5 });
                }
            }
            line = serde_json::to_string(&spec).unwrap();
        });
        self.log(|| format!("user: edits {uid}: {line}"));
        self.tell(&uid);
    }

    /// Ends suspensions, makes every node ready, and undoes edits that were refused.
    pub(crate) fn release_jobs(&mut self) {
        let jobs: Vec<_> = self.api.jobs.keys().cloned().collect();
        for uid in jobs {
            let images = self.first_images.get(&uid).cloned();
            self.api.edit(&uid, |spec| {
                spec.suspend = false;
                if let Some(images) = images {
                    spec.image_pre_pull_template.images = images;
                }
            });
            self.tell(&uid);
        }
        for node in 0..self.edges.len() {
            self.put_node(node, true, true);
        }
    }

    fn tell(&mut self, uid: &JobUid) {
        if let Some(object) = self.api.read(uid) {
            self.cloud.watched(Watched::Job(Ok(object)));
        }
    }
}
