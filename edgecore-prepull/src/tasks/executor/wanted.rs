//! Images of open tasks, whose content must stay.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use prepull_api::image::listed_name;
use prepull_api::task::{Task, TaskId};

/// The images of the open tasks of the node, running or not.
#[derive(Debug, Default)]
pub(super) struct WantedImages {
    tasks: Mutex<BTreeMap<TaskId, Vec<String>>>,
}

impl WantedImages {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<TaskId, Vec<String>>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the fetched content of a task's images, until [`Self::remove`].
    pub(super) fn add(&self, task: &Task) {
        let mut tasks = self.lock();
        if !tasks.contains_key(&task.id) {
            let references = task.images.iter().map(|image| image.reference.clone()).collect();
            tasks.insert(task.id.clone(), references);
        }
    }

    pub(super) fn remove(&self, task: &TaskId) {
        self.lock().remove(task);
    }

    /// Whether a task other than this one has the image.
    pub(super) fn by_another(&self, task: &TaskId, reference: &str) -> bool {
        let tasks = self.lock();
        let mut others = tasks.iter().filter(|(id, _)| *id != task);
        others.any(|(_, references)| references.iter().any(|other| other == reference))
    }

    /// The images of all open tasks but this one, as the runtime lists them.
    pub(super) fn names_but(&self, task: &TaskId) -> Vec<String> {
        let tasks = self.lock();
        let others = tasks.iter().filter(|(id, _)| *id != task).flat_map(|(_, references)| references);
        others.map(|reference| listed_name(reference).into_owned()).collect()
    }

    /// Whether an open task has an image with one of these names, as the runtime lists them.
    pub(super) fn has_any(&self, names: &[String]) -> bool {
        let tasks = self.lock();
        tasks.values().flatten().any(|reference| names.contains(&listed_name(reference).into_owned()))
    }

    /// The images of all open tasks.
    pub(super) fn references(&self) -> Vec<String> {
        self.lock().values().flatten().cloned().collect()
    }
}
