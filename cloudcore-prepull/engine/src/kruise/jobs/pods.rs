//! The nodes that pods run on, for jobs with a podSelector.

use std::collections::{BTreeMap, HashMap, HashSet};

use prepull_api::selector::Selector;
use prepull_api::task::NodeName;

use super::Pod;
use super::tally::adjust_count;

/// How many matching pods run on each node that has any.
#[derive(Debug, Default)]
pub(super) struct PodCounts(HashMap<NodeName, u32>);

impl PodCounts {
    pub(super) fn contains(&self, node: &NodeName) -> bool {
        self.0.contains_key(node)
    }

    /// One more pod of the node matches (`add`), or one less.
    pub(super) fn count_pod(&mut self, node: &NodeName, add: bool) {
        let number = self.0.entry(node.clone()).or_default();
        adjust_count(number, add);
        if *number == 0 {
            self.0.remove(node);
        }
    }
}

/// The pods that run somewhere, by namespace and name.
#[derive(Debug, Default)]
pub(super) struct Pods(HashMap<String, BTreeMap<String, Pod>>);

impl Pods {
    /// Adds or replaces a pod. Returns what it was before.
    pub(super) fn put(&mut self, pod: Pod) -> Option<Pod> {
        if pod.node.is_none() {
            return self.remove(&pod.namespace, &pod.name);
        }
        self.0.entry(pod.namespace.clone()).or_default().insert(pod.name.clone(), pod)
    }

    pub(super) fn remove(&mut self, namespace: &str, name: &str) -> Option<Pod> {
        let pods = self.0.get_mut(namespace)?;
        let pod = pods.remove(name);
        if pods.is_empty() {
            self.0.remove(namespace);
        }
        pod
    }

    /// Namespace and name of the pods that are not among those that exist.
    pub(super) fn missing_from(&self, existing: &[Pod]) -> Vec<(String, String)> {
        let existing: HashSet<(&str, &str)> = existing.iter().map(|p| (&*p.namespace, &*p.name)).collect();
        let all = self.0.values().flat_map(BTreeMap::values);
        all.filter(|pod| !existing.contains(&(&*pod.namespace, &*pod.name)))
            .map(|pod| (pod.namespace.clone(), pod.name.clone()))
            .collect()
    }

    pub(super) fn count_matching(&self, namespace: &str, selector: &Selector) -> PodCounts {
        let mut counts = PodCounts::default();
        for pod in self.0.get(namespace).into_iter().flat_map(BTreeMap::values) {
            if let Some(node) = matching_node(pod, selector) {
                counts.count_pod(node, true);
            }
        }
        counts
    }
}

pub(super) fn matching_node<'a>(pod: &'a Pod, selector: &Selector) -> Option<&'a NodeName> {
    pod.node.as_ref().filter(|_| selector.matches(&pod.labels))
}
