//! The nodes that the pods of a workload may run on.

use k8s_openapi::api::core::v1::{NodeSelectorRequirement, PodSpec, Taint, Toleration};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};

use crate::order::edge_selector;

/// Taints that come and go with the state of a node. A job looks at that itself.
const PASSING: &str = "node.kubernetes.io/";

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PodPlacement {
    pub(crate) node: Option<String>,
    /// The edge nodes by label.
    pub(crate) selector: LabelSelector,
    /// What cannot be said as a label selector.
    pub(crate) beyond: Option<String>,
    tolerations: Vec<Toleration>,
}

impl PodPlacement {
    /// The choice of nodes by a pod: nodeName, nodeSelector, required node affinity, tolerations.
    pub(crate) fn from_pod(pod: &PodSpec) -> Self {
        let mut selector = edge_selector();
        let mut beyond = None;
        if let Some(labels) = pod.node_selector.clone().filter(|labels| !labels.is_empty()) {
            selector.match_labels = Some(labels);
        }
        let affinity = pod.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
        let required =
            affinity.and_then(|node| node.required_during_scheduling_ignored_during_execution.as_ref());
        match required.map(|required| required.node_selector_terms.as_slice()) {
            None | Some([]) => {}
            Some([term]) if term.match_fields.as_ref().is_none_or(Vec::is_empty) => {
                for requirement in term.match_expressions.iter().flatten() {
                    match label_requirement(requirement) {
                        Some(expression) => {
                            selector.match_expressions.get_or_insert_default().push(expression);
                        }
                        None => beyond = Some(format!("{} {}", requirement.key, requirement.operator)),
                    }
                }
            }
            Some([_]) => beyond = Some("matchFields".to_owned()),
            Some(_) => beyond = Some("several nodeSelectorTerms".to_owned()),
        }
        let tolerations = pod.tolerations.clone().unwrap_or_default();
        Self { node: pod.node_name.clone().filter(|name| !name.is_empty()), selector, beyond, tolerations }
    }

    /// The first taint of a node that keeps the pods away.
    pub(crate) fn kept_away_by<'a>(&self, taints: &'a [Taint]) -> Option<&'a Taint> {
        taints.iter().find(|taint| {
            let matters = matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute");
            let tolerates = |toleration: &Toleration| is_tolerated(taint, toleration);
            matters && !taint.key.starts_with(PASSING) && !self.tolerations.iter().any(tolerates)
        })
    }
}

fn label_requirement(requirement: &NodeSelectorRequirement) -> Option<LabelSelectorRequirement> {
    let NodeSelectorRequirement { key, operator, values } = requirement;
    let is_known = ["In", "NotIn", "Exists", "DoesNotExist"].contains(&operator.as_str());
    is_known.then(|| LabelSelectorRequirement {
        key: key.clone(),
        operator: operator.clone(),
        values: values.clone().filter(|values| !values.is_empty()),
    })
}

fn is_tolerated(taint: &Taint, toleration: &Toleration) -> bool {
    let of = |text: &Option<String>| text.clone().unwrap_or_default();
    let (key, effect) = (of(&toleration.key), of(&toleration.effect));
    let value = match of(&toleration.operator).as_str() {
        "" | "Equal" => of(&toleration.value) == of(&taint.value) && !key.is_empty(),
        "Exists" => true,
        _ => false, // of newer versions
    };
    value && (key.is_empty() || key == taint.key) && (effect.is_empty() || effect == taint.effect)
}

/// A taint as kubectl writes it.
pub(crate) fn describe_taint(taint: &Taint) -> String {
    let value = taint.value.as_ref().filter(|value| !value.is_empty());
    let value = value.map(|value| format!("={value}")).unwrap_or_default();
    format!("{}{value}:{}", taint.key, taint.effect)
}
