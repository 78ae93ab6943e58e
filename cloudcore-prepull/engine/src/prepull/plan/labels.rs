//! The labels by which a node could choose itself into a job, and so get the job's secrets.
//!
//! The admission plugin NodeRestriction lets a kubelet set labels of its own Node: all but those below `kubernetes.io` and
//! `k8s.io`, and of these some that kubelets have always set.

use prepull_api::crd::EDGE_LABEL;
use prepull_api::overriders::SecretRule;
use prepull_api::selector::Selector;

use crate::prepull::validate::{NodeSelection, ValidatedJob};

/// Label prefixes that a kubelet may set although they are in reserved domains; their subdomains count too.
const KUBELET_DOMAINS: [&str; 2] = ["kubelet.kubernetes.io", "node.kubernetes.io"];
/// Further ones that it may set.
const KUBELET_LABELS: [&str; 11] = [
    "beta.kubernetes.io/arch",
    "beta.kubernetes.io/instance-type",
    "beta.kubernetes.io/os",
    "failure-domain.beta.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "kubernetes.io/arch",
    "kubernetes.io/hostname",
    "kubernetes.io/os",
    "node.kubernetes.io/instance-type",
    "topology.kubernetes.io/region",
    "topology.kubernetes.io/zone",
];

/// A warning about a job with secrets that chooses nodes, or what they pull with, by labels that a node may give itself.
pub fn self_assigned_labels(job: &ValidatedJob) -> Option<String> {
    if !has_secrets(job) {
        return None;
    }
    let by_labels = match &job.nodes {
        NodeSelection::Labels(selector) => {
            Some(("spec.imagePrePullTemplate.labelSelector".to_owned(), selector))
        }
        NodeSelection::Names(_) => None,
    };
    let groups = job.overriders.iter().enumerate();
    let groups =
        groups.map(|(index, group)| (format!("spec.imagePrePullOverriders[{index}]"), &group.selector));
    let found = by_labels.into_iter().chain(groups).filter_map(|(field, selector)| {
        let labels = open_labels(selector);
        (!labels.is_empty()).then(|| format!("{} in {field}", labels.join(", ")))
    });
    let found: Vec<_> = found.collect();
    (!found.is_empty()).then(|| {
        format!(
            "warning: a node may give itself the labels of these selectors, and get the job's registry secrets by that: \
             {}; use labels below node-restriction.kubernetes.io/",
            found.join("; ")
        )
    })
}

/// Whether any node may be sent a secret for the job.
fn has_secrets(job: &ValidatedJob) -> bool {
    let added = job.overriders.iter().flat_map(|group| &group.secret_rules).any(SecretRule::adds);
    added
        || job.fallback_secret.is_some()
        || !job.registry_secrets.is_empty()
        || job.images.iter().any(|image| image.secret.is_some())
}

/// The labels by which a node could choose itself; none where it needs another one as well that it cannot give itself.
/// Every node of a job has the label of edge nodes: that one is no protection.
fn open_labels(selector: &Selector) -> Vec<&str> {
    let keys = || selector.keys().filter(|(key, _)| *key != EDGE_LABEL);
    if keys().any(|(key, must_be_present)| must_be_present && !may_kubelet_set(key)) {
        return Vec::new();
    }
    keys().map(|(key, _)| key).filter(|key| may_kubelet_set(key)).collect()
}

/// Whether a kubelet may set this label of its own Node.
pub fn may_kubelet_set(key: &str) -> bool {
    let Some((domain, _)) = key.split_once('/') else { return true };
    let is_below =
        |parent: &str| domain.strip_suffix(parent).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
    let is_reserved = is_below("kubernetes.io") || is_below("k8s.io");
    !is_reserved || KUBELET_LABELS.contains(&key) || KUBELET_DOMAINS.into_iter().any(is_below)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_open_as_noderestriction_leaves_them() {
        for key in [
            "site",
            "example.com/site",
            "kubernetes.io.example.com/site",
            "xkubernetes.io/site",
            "kubernetes.io/arch",
            "kubernetes.io/hostname",
            "topology.kubernetes.io/zone",
            "node.kubernetes.io/anything",
            "kubelet.kubernetes.io/anything",
            "team.node.kubernetes.io/anything",
        ] {
            assert!(may_kubelet_set(key), "{key}");
        }
        for key in [
            "node-restriction.kubernetes.io/site",
            "team.node-restriction.kubernetes.io/site",
            "node-role.kubernetes.io/edge",
            "kubernetes.io/site",
            "k8s.io/site",
            "example.k8s.io/site",
            "xnode.kubernetes.io/anything",
        ] {
            assert!(!may_kubelet_set(key), "{key}");
        }
    }

    #[test]
    fn only_protected_labels_close_a_selector() {
        for (selector, open) in [
            ("node-role.kubernetes.io/edge", ""),
            ("node-role.kubernetes.io/edge,site=a", "site"),
            ("site in (a,b),!spare", "site spare"),
            ("node-restriction.kubernetes.io/site=a", ""),
            ("node-restriction.kubernetes.io/site=a,disk=ssd", ""),
            ("!node-restriction.kubernetes.io/spare,disk=ssd", "disk"),
            ("node-restriction.kubernetes.io/site!=a,disk=ssd", "disk"),
            ("kubernetes.io/arch=arm64", "kubernetes.io/arch"),
        ] {
            assert_eq!(open_labels(&Selector::parse(selector).unwrap()).join(" "), open, "{selector}");
        }
    }
}
