//! Jobs that remove images: their specs, and how an edge carries out their tasks.

use edgecore_prepull::tasks::agent::AgentEvent;
use edgecore_prepull::tasks::removal::{PlannedRemoval, RemovalRecord};
use prepull_api::crd::job::ImagePrePullJobSpec;
use prepull_api::crd::remove::RemoveSpec;
use prepull_api::task::{ImageRemoval, KeepCode, Removal, RemovalOutcome, TaskId, TaskOutcome};

use crate::rng::Rng;
use crate::world::World;

/// Bytes that the removal of an image frees.
const FREED: u64 = 1_000;

/// The same job, which removes what it would have pulled.
pub(crate) fn removing(mut spec: ImagePrePullJobSpec, rng: &mut Rng) -> ImagePrePullJobSpec {
    let template = &mut spec.image_pre_pull_template;
    let images = std::mem::take(&mut template.images);
    let dry_run = rng.chance(30);
    template.remove = Some(if rng.chance(70) {
        RemoveSpec { images, dry_run, ..RemoveSpec::default() }
    } else {
        let repositories = vec!["r.example/app0".to_owned(), "r.example/app1".to_owned()];
        RemoveSpec { repositories, keep_last: Some(rng.pick(&[0, 1])), dry_run, ..RemoveSpec::default() }
    });
    template.image_pull_policy = None;
    spec.image_pre_pull_overriders.clear();
    spec.pin = false;
    spec
}

/// Edits the fixed part of a job that removes, to a valid value.
pub(crate) fn edit_fixed_part(spec: &mut ImagePrePullJobSpec, rng: &mut Rng) {
    let template = &mut spec.image_pre_pull_template;
    let Some(remove) = &mut template.remove else { return };
    match rng.below(4) {
        0 => remove.dry_run = !remove.dry_run,
        1 => remove.images = vec!["r.example/app2:v1".to_owned()],
        2 => {
            template.remove = None;
            template.images = vec!["r.example/app1:v1".to_owned()];
        }
        _ => {
            template.label_selector = None;
            template.node_names = vec!["n0".to_owned()];
        }
    }
}

impl World {
    /// Makes one step of a task that removes. Returns whether anything happened.
    pub(crate) fn remove_for_task(&mut self, at: usize, id: &TaskId) -> bool {
        let Some(exec) = self.edges[at].execs.get(id) else { return false };
        let Some(removal) = exec.work.task.removal.clone() else { return false };
        let Some(mut record) = exec.removal.clone() else {
            let before = exec.work.removal.clone();
            let record = before.unwrap_or_else(|| self.choose(at, id, &removal));
            self.note_removal(at, id, record);
            return true;
        };
        let waits = |planned: &&mut PlannedRemoval| planned.end.is_none();
        let Some(planned) = record.planned.iter_mut().find(waits).filter(|_| !removal.dry_run) else {
            let failed = record.planned.iter().flat_map(|planned| &planned.end);
            let failed = failed.filter(|end| end.outcome == RemovalOutcome::Failed).count();
            let outcome = if failed > 0 { TaskOutcome::Failed } else { TaskOutcome::Succeeded };
            self.end(at, id, outcome, if failed > 0 { "an image could not be removed" } else { "" });
            return true;
        };
        if !exec.may_remove {
            return false;
        }
        let edge = &self.edges[at];
        let is_known = edge.disk.get(id).is_some_and(|record| record.removal.is_some());
        assert!(is_known || edge.unsaved.contains(id), "n{at} removes for {id}, and its disk knows nothing");
        let works = self.calm || self.rng.chance(90);
        if works {
            self.edges[at].images.remove(&planned.id);
        }
        let (outcome, bytes) =
            if works { (RemovalOutcome::Removed, FREED) } else { (RemovalOutcome::Failed, 0) };
        self.log(|| format!("n{at}: {} goes for {id}: {outcome:?}", planned.id));
        let image = planned.image.clone();
        planned.end = Some(ImageRemoval { image, outcome, bytes, ..ImageRemoval::default() });
        self.note_removal(at, id, record);
        true
    }

    fn note_removal(&mut self, at: usize, id: &TaskId, record: RemovalRecord) {
        if let Some(exec) = self.edges[at].execs.get_mut(id) {
            exec.removal = Some(record.clone());
        }
        self.on_edge(at, AgentEvent::Removal(id.clone(), Box::new(record)));
    }

    /// Chooses the images to remove. Some are in use.
    fn choose(&mut self, at: usize, id: &TaskId, removal: &Removal) -> RemovalRecord {
        let edge = &self.edges[at];
        let others = edge.execs.iter().filter(|(task, _)| *task != id);
        let wanted: Vec<_> = others
            .flat_map(|(_, exec)| exec.work.task.images.iter().map(|image| image.reference.clone()))
            .collect();
        let kept = |image: &str, code| ImageRemoval {
            image: image.to_owned(),
            code: Some(code),
            ..ImageRemoval::default()
        };
        let mut record = RemovalRecord::default();
        let absent = removal.images.iter().filter(|image| !edge.images.contains(*image));
        record.kept.extend(absent.map(|image| kept(image, KeepCode::NotPresent)));
        let mut spared = removal.keep_last;
        for image in &edge.images {
            let is_named = removal.images.contains(image);
            let is_of = |repository: &String| {
                image.strip_prefix(repository.as_str()).is_some_and(|rest| rest.starts_with(':'))
            };
            if !is_named && !removal.repositories.iter().any(is_of) {
                continue;
            }
            if wanted.contains(image) {
                record.kept.push(kept(image, KeepCode::Wanted));
            } else if self.rng.chance(20) {
                record.kept.push(kept(image, KeepCode::InUse));
            } else if !is_named && spared > 0 {
                spared -= 1;
                record.kept.push(kept(image, KeepCode::KeepLast));
            } else {
                let (id, names) = (image.clone(), vec![image.clone()]);
                record.planned.push(PlannedRemoval { image: id.clone(), id, names, bytes: FREED, end: None });
            }
        }
        record
    }
}
