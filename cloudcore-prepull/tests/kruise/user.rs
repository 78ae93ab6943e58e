//! Edits of the objects by users.

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt;
use prepull_api::crd::kruise::{
    CompletionPolicy, ImageListPullJob, ImageListPullJobSpec, ImagePullJob, ImagePullJobSpec,
    ImageTagPullPolicy, ImageTagSpec, NodeSelector, PullJobTemplate, PullLimits,
};
use prepull_engine::fleet::event::FleetEvent;

use crate::world::{NODES, World, view};

const IMAGES: [&str; 3] = ["nginx:1", "nginx:2", "app:1"];

impl World {
    pub(crate) fn act_as_user(&mut self) {
        match self.rng.below(22) {
            0..4 if self.pull_jobs.len() < 6 => {
                let spec =
                    ImagePullJobSpec { image: self.rng.pick(&IMAGES).to_owned(), template: self.template() };
                let name = format!("job-{}", self.rng.below(4));
                if !self.pull_jobs.contains_key(&name) {
                    self.log(|| format!("{name} is made: {spec:?}"));
                    self.create_job(ImagePullJob::new(&name, spec));
                }
            }
            4..6 if self.list_jobs.len() < 2 => {
                let count = 1 + self.rng.below(IMAGES.len());
                let images = IMAGES[..count].iter().map(|&image| image.to_owned()).collect();
                let spec = ImageListPullJobSpec { images, template: self.template() };
                let name = format!("list-{}", self.rng.below(2));
                if !self.list_jobs.contains_key(&name) {
                    self.log(|| format!("{name} is made: {spec:?}"));
                    let mut list = ImageListPullJob::new(&name, spec);
                    list.metadata.uid = Some(self.new_uid());
                    list.metadata.namespace = Some("shop".to_owned());
                    self.edited(&mut list.metadata);
                    self.list_jobs.insert(name.clone(), list);
                    self.list_changed(&name, None);
                }
            }
            6..8 => {
                let names: Vec<_> = self.pull_jobs.keys().cloned().collect();
                if !names.is_empty() {
                    let name = names[self.rng.below(names.len())].clone();
                    self.log(|| format!("{name} is deleted"));
                    self.delete_job(&name, None);
                }
            }
            8 => {
                let name = format!("list-{}", self.rng.below(2));
                self.log(|| format!("{name} is deleted"));
                self.delete_list(&name, None);
            }
            9..12 => self.edit_job(),
            12 => self.edit_list(),
            13..17 => self.edit_node_image(),
            17 => {
                let name = self.node().0;
                self.log(|| format!("NodeImage {name} is deleted by hand"));
                self.delete_node_image(&name);
            }
            18 | 19 => self.spoil(),
            _ => {
                let node = self.node();
                if self.nodes.remove(&node).is_some() {
                    self.log(|| format!("Node {node} is deleted"));
                    self.watch.push_back(FleetEvent::NodeGone(node).into());
                } else {
                    self.log(|| format!("Node {node} is made"));
                    self.nodes.insert(node.clone(), view(&node.0));
                    self.watch.push_back(FleetEvent::Node(view(&node.0)).into());
                }
            }
        }
    }

    fn template(&mut self) -> PullJobTemplate {
        let names = self.rng.chance(30).then(|| {
            let count = 1 + self.rng.below(3);
            Some(NODES[..count].iter().map(|&name| name.to_owned()).collect())
        });
        let never = self.rng.chance(20);
        PullJobTemplate {
            selector: names.map(|names| NodeSelector { names, ..NodeSelector::default() }),
            parallelism: self.rng.pick(&[None, Some(0), Some(1), Some(2), Some(10)]).map(IntOrString::Int),
            pull_policy: Some(PullLimits {
                timeout_seconds: Some(self.rng.pick(&[60, 600])),
                backoff_limit: Some(self.rng.pick(&[0, 3])),
            }),
            completion_policy: CompletionPolicy {
                type_: never.then(|| "Never".to_owned()),
                active_deadline_seconds: (!never && self.rng.chance(20)).then_some(1200),
                ttl_seconds_after_finished: (!never && self.rng.chance(30)).then_some(100),
            },
            pull_secrets: if self.rng.chance(50) { vec!["registry".to_owned()] } else { Vec::new() },
            image_pull_policy: self.rng.chance(30).then(|| "Always".to_owned()),
            ..PullJobTemplate::default()
        }
    }

    /// Makes an object unreadable, or readable again.
    fn spoil(&mut self) {
        let mut names: Vec<_> = self.pull_jobs.keys().chain(self.list_jobs.keys()).cloned().collect();
        names.extend(self.node_images.keys().cloned());
        if let Some(name) = self.rng.choose(&names).cloned() {
            let mends = !self.unreadable.insert(name.clone());
            self.log(|| format!("{name} is {}", if mends { "readable again" } else { "unreadable" }));
            if mends {
                self.unreadable.remove(&name);
            }
            self.touch(&name);
        }
    }

    /// Makes all objects readable.
    pub(crate) fn mend_all(&mut self) {
        for name in std::mem::take(&mut self.unreadable) {
            self.log(|| format!("{name} is readable again"));
            self.touch(&name);
        }
    }

    /// An object has another spec.
    pub(crate) fn touch(&mut self, name: &str) {
        let jobs = self.pull_jobs.get_mut(name).map(|job| &mut job.metadata);
        let lists = self.list_jobs.get_mut(name).map(|list| &mut list.metadata);
        let images = self.node_images.get_mut(name).map(|object| &mut object.metadata);
        let Some(metadata) = jobs.or(lists).or(images) else { return };
        self.version += 1;
        metadata.resource_version = Some(self.version.to_string());
        *metadata.generation.get_or_insert(0) += 1;
        self.job_changed(name, None);
        self.list_changed(name, None);
        self.node_image_changed(name);
    }

    fn edit_job(&mut self) {
        let names: Vec<_> = self.pull_jobs.keys().cloned().collect();
        if names.is_empty() {
            return;
        }
        let name = names[self.rng.below(names.len())].clone();
        let (what, parallelism) = (self.rng.below(4), self.rng.pick(&[0, 1, 3]));
        let (image, timeout) = (self.rng.pick(&IMAGES), self.rng.pick(&[60, 90]));
        self.unreadable.remove(&name);
        let job = self.pull_jobs.get_mut(&name).unwrap();
        match what {
            0..2 => job.spec.template.parallelism = Some(IntOrString::Int(parallelism)),
            2 => {
                let limits = PullLimits { timeout_seconds: Some(timeout), backoff_limit: None };
                job.spec.template.pull_policy = Some(limits);
            }
            _ if job.owner_references().is_empty() => image.clone_into(&mut job.spec.image),
            _ => {}
        }
        let spec = job.spec.clone();
        self.log(|| format!("{name} is edited: {spec:?}"));
        self.touch(&name);
    }

    fn edit_list(&mut self) {
        let name = format!("list-{}", self.rng.below(2));
        let (count, parallelism) = (1 + self.rng.below(IMAGES.len()), self.rng.pick(&[0, 1, 3]));
        let other_work = self.rng.chance(50);
        self.unreadable.remove(&name);
        let Some(list) = self.list_jobs.get_mut(&name) else { return };
        list.spec.images = IMAGES[..count].iter().map(|&image| image.to_owned()).collect();
        list.spec.template.parallelism = Some(IntOrString::Int(parallelism));
        if other_work {
            let policy = &mut list.spec.template.image_pull_policy;
            *policy = if policy.is_none() { Some("Always".to_owned()) } else { None };
        }
        let spec = list.spec.clone();
        self.log(|| format!("{name} is edited: {spec:?}"));
        self.touch(&name);
    }

    fn edit_node_image(&mut self) {
        let name = self.node().0;
        let (what, image) = (self.rng.below(4), self.rng.pick(&IMAGES));
        let (image, tag) = image.split_once(':').unwrap();
        let version = self.new_version();
        self.unreadable.remove(&name);
        let Some(object) = self.node_images.get_mut(&name) else { return };
        let tags = &mut object.spec.images.entry(image.to_owned()).or_default().tags;
        match (what, tags.iter_mut().find(|known| known.tag == tag)) {
            (0, Some(known)) => known.version += 1,
            (1, Some(known)) => known.version = (known.version - 1).max(0),
            (2, Some(_)) => tags.retain(|known| known.tag != tag),
            (_, Some(known)) => known.image_pull_policy = Some("Always".to_owned()),
            (_, None) => tags.push(ImageTagSpec {
                tag: tag.to_owned(),
                pull_policy: Some(ImageTagPullPolicy {
                    ttl_seconds_after_finished: Some(60),
                    ..ImageTagPullPolicy::default()
                }),
                ..ImageTagSpec::default()
            }),
        }
        object.spec.images.retain(|_, image| !image.tags.is_empty());
        object.metadata.resource_version = Some(version);
        let spec = object.spec.clone();
        self.log(|| format!("NodeImage {name} is edited by hand: {spec:?}"));
        self.node_image_changed(&name);
    }
}
