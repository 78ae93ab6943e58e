//! The plan of a job: which nodes pull what with which secrets, and which are left out and why. Pure.
//!
//! Nodes for which the same overriders match share one [`NodePlan`], so that ten
//! thousand nodes cost ten thousand selector matches and a handful of plans.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use prepull_api::crd::EDGE_LABEL;
use prepull_api::crd::status::{JobImageStatus, SkippedNode};
use prepull_api::credentials::RegistryPattern;
use prepull_api::enroll::hex;
use prepull_api::image::{NormalizedReference, Reference};
use prepull_api::overriders::{OverrideError, SecretRef};
use prepull_api::task::{NodeName, PullPolicy, Removal, Upgrade};
use ring::digest::{SHA256, digest};

use crate::fleet::node_view::{NOT_READY, NodeView};
use crate::prepull::validate::{
    JobImage, NodeSelection, OverriderGroup, SpecRefusal, ValidatedJob, image_rule_field, secret_rule_field,
};

mod keys;
mod labels;
#[cfg(test)]
mod tests;

pub use keys::{
    ResolvedKey, ResolvedVerification, SecretLookup, resolve_key, resolve_pull_secrets, resolve_verification,
    unreadable_text,
};
pub use labels::{may_kubelet_set, self_assigned_labels};

/// The nodes that a job chooses, and those that it leaves out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// The chosen nodes, each once: in the job's order if it names nodes, else in the order of their names.
    pub eligible: Vec<NodeName>,
    /// The nodes that were asked for and cannot be used, in the same order, each with the reason.
    pub skipped: Vec<SkippedNode>,
}

impl Selection {
    /// Takes the names that have no Node out of the skipped ones: they count as failed, unless the job allows them.
    pub fn take_missing(&mut self) -> Vec<NodeName> {
        self.skipped.extract_if(.., |node| is_missing(node)).map(|node| NodeName(node.node_name)).collect()
    }

    /// Whether no node can be used, and one could if it were Ready.
    pub fn waits_for_ready(&self) -> bool {
        self.eligible.is_empty() && self.skipped.iter().any(|node| node.reason == NOT_READY)
    }
}

/// Whether there is no Node of this name.
pub fn is_missing(node: &SkippedNode) -> bool {
    node.reason == NOT_FOUND
}

/// What each node of a job pulls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobPlan {
    /// The plan of each node, never empty, in the order of [`Selection::eligible`].
    pub nodes: Vec<(NodeName, Arc<NodePlan>)>,
    /// See [`Selection::skipped`].
    pub skipped: Vec<SkippedNode>,
}

/// What one node pulls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePlan {
    /// One entry for each image of the job, in the job's order. Overriders may make one reference of two images:
    /// both stay, since the status speaks of each by the job's name for it, and the runtime fetches nothing
    /// twice.
    pub images: Vec<PlannedImage>,
    /// What the node removes, if it doesn't pull.
    pub removal: Option<Arc<Removal>>,
    /// What it does with the program in the only image.
    pub upgrade: Option<Upgrade>,
}

/// One image on one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedImage {
    /// The image as the job names it.
    pub image: String,
    /// The name of the `imageSources` entry, if it is one and has a name.
    pub name: Option<String>,
    /// The reference that is pulled, after the overriders.
    pub pull: NormalizedReference,
    /// Whether an image that is present is pulled again.
    pub policy: PullPolicy,
    /// The secrets to try, in this order. Without any the pull is anonymous.
    pub secrets: Vec<SecretRef>,
}

impl NodePlan {
    /// A fingerprint of the references that are pulled and of the secrets that they are pulled with, and whether the node got
    /// those. The nodes of a site share layers where it's the same.
    pub fn entitlement(&self, has_keys: bool) -> Arc<str> {
        let image = |image: &PlannedImage| {
            let secrets = image.secrets.iter().map(|secret| format!(" {secret:?}"));
            image.pull.to_string() + &secrets.collect::<String>()
        };
        let images: BTreeSet<String> = self.images.iter().map(image).collect();
        let mut text = Vec::from_iter(images).join("\n");
        if !has_keys {
            text.push_str("\nwithout keys");
        }
        // A tracker keeps it for each blob, and it may have 100 KiB.
        hex(digest(&SHA256, text.as_bytes()).as_ref()).into()
    }

    /// Whether some image names a secret.
    pub(crate) fn names_secrets(&self) -> bool {
        self.images.iter().any(|image| !image.secrets.is_empty())
    }

    /// Whether these records of images are of this plan, or of none: a node that was never sent anything has none.
    pub fn is_of(&self, images: &[JobImageStatus]) -> bool {
        images.is_empty()
            || images.len() == self.images.len()
                && self
                    .images
                    .iter()
                    .zip(images)
                    .all(|(planned, recorded)| planned.pull.to_string() == recorded.pulled_image)
    }
}

const NOT_FOUND: &str = "not found";

/// Chooses the nodes of a job: edge nodes that are Ready, each once.
pub fn select_nodes(job: &ValidatedJob, nodes: &BTreeMap<NodeName, NodeView>) -> Selection {
    let mut selection = Selection::default();
    let mut take = |name: &NodeName, reason: Option<&str>| {
        if let Some(reason) = reason {
            selection.skipped.push(SkippedNode { node_name: name.0.clone(), reason: reason.to_owned() });
        } else {
            selection.eligible.push(name.clone());
        }
    };
    match &job.nodes {
        NodeSelection::Names(names) => {
            for name in names.listed() {
                take(name, nodes.get(name).map_or(Some(NOT_FOUND), NodeView::why_unfit));
            }
        }
        NodeSelection::Labels(selector) => {
            for (name, node) in nodes.iter().filter(|(_, node)| selector.matches(&node.labels)) {
                take(name, node.why_unfit());
            }
        }
    }
    selection
}

/// Plans a job. Refuses it if no node is eligible, or if an overrider makes an invalid reference or secret.
pub fn plan_job(job: &ValidatedJob, nodes: &BTreeMap<NodeName, NodeView>) -> Result<JobPlan, SpecRefusal> {
    let Selection { eligible, skipped } = select_nodes(job, nodes);
    if eligible.is_empty() {
        return Err(no_eligible_node(job, &skipped));
    }
    let mut shared = SharedPlans::default();
    // Every eligible node is in the map: it was chosen from there.
    let eligible = eligible.into_iter().filter_map(|name| nodes.get(&name).map(|node| (name, node)));
    let planned = eligible.map(|(name, node)| Ok((name, shared.plan_one(job, node)?)));
    Ok(JobPlan { nodes: planned.collect::<Result<_, _>>()?, skipped })
}

/// Whether the job would choose this node now.
pub fn chooses_node(job: &ValidatedJob, node: &NodeView) -> bool {
    node.why_unfit().is_none() && asks_for(job, node)
}

/// Whether the job asks for this node, which it may not be able to use.
pub fn asks_for(job: &ValidatedJob, node: &NodeView) -> bool {
    match &job.nodes {
        NodeSelection::Names(names) => names.contains(&node.name),
        NodeSelection::Labels(selector) => selector.matches(&node.labels),
    }
}

/// Plans a single node, whether or not the job would choose it now: after a restart of cloudcore it may be NotReady and
/// in progress.
pub fn plan_one(job: &ValidatedJob, node: &NodeView) -> Result<Arc<NodePlan>, SpecRefusal> {
    SharedPlans::default().plan_one(job, node)
}

/// The plans of one job, by the indexes of the overriders that apply.
#[derive(Debug, Default)]
pub struct SharedPlans(BTreeMap<Vec<usize>, Arc<NodePlan>>);

impl SharedPlans {
    /// Plans a node as [`plan_one`] does, once for all nodes with the same overriders.
    pub fn plan_one(&mut self, job: &ValidatedJob, node: &NodeView) -> Result<Arc<NodePlan>, SpecRefusal> {
        self.of_groups(job, matching_groups(job, node))
    }

    /// The plan of a node that was sent its task when it had other labels. `plan`: the one by its present labels;
    /// `images`: the records of that time. It is the plan by any overriders that make these references, with their
    /// secrets; if none do, the present plan with the recorded references.
    pub fn plan_as_recorded(
        &mut self,
        job: &ValidatedJob,
        plan: &Arc<NodePlan>,
        images: &[JobImageStatus],
    ) -> Arc<NodePlan> {
        let single = (0..job.overriders.len()).map(|group| vec![group]);
        for groups in std::iter::once(Vec::new()).chain(single) {
            // One that is impossible made no record.
            let _ = self.of_groups(job, groups);
        }
        if let Some(known) = self.0.values().find(|known| known.is_of(images)) {
            return Arc::clone(known);
        }
        let mut plan = NodePlan::clone(plan);
        for (planned, recorded) in plan.images.iter_mut().zip(images) {
            if let Ok(reference) = Reference::parse(&recorded.pulled_image) {
                planned.pull = reference.normalized();
            }
        }
        Arc::new(plan)
    }

    fn of_groups(&mut self, job: &ValidatedJob, groups: Vec<usize>) -> Result<Arc<NodePlan>, SpecRefusal> {
        if let Some(plan) = self.0.get(&groups) {
            return Ok(Arc::clone(plan));
        }
        let plan = Arc::new(node_plan(job, &groups)?);
        self.0.insert(groups, Arc::clone(&plan));
        Ok(plan)
    }
}

fn matching_groups(job: &ValidatedJob, node: &NodeView) -> Vec<usize> {
    let groups = job.overriders.iter().enumerate();
    groups.filter(|(_, group)| group.selector.matches(&node.labels)).map(|(index, _)| index).collect()
}

fn node_plan(job: &ValidatedJob, groups: &[usize]) -> Result<NodePlan, SpecRefusal> {
    let images = job.images.iter().map(|image| planned_image(job, image, groups));
    Ok(NodePlan {
        images: images.collect::<Result<_, _>>()?,
        removal: job.removal.clone(),
        upgrade: job.upgrade,
    })
}

fn planned_image(
    job: &ValidatedJob,
    image: &JobImage,
    groups: &[usize],
) -> Result<PlannedImage, SpecRefusal> {
    let groups = || groups.iter().filter_map(|index| Some((*index, job.overriders.get(*index)?)));
    let JobImage { image: text, name, reference, secret, policy } = image;

    let mut reference = reference.clone();
    for (g, group) in groups() {
        for (r, rule) in group.image_rules.iter().enumerate() {
            reference = rule
                .apply(&reference)
                .map_err(|error| rule_fails(image_rule_field(g, r), group, text, &error))?;
        }
    }
    let pull = reference.normalized();

    let mut secrets: Vec<_> = secret
        .as_ref()
        .or_else(|| registry_secret(job, &pull))
        .or(job.fallback_secret.as_ref())
        .into_iter()
        .cloned()
        .collect();
    for (g, group) in groups() {
        for (r, rule) in group.secret_rules.iter().enumerate() {
            secrets = rule
                .apply(secrets)
                .map_err(|error| rule_fails(secret_rule_field(g, r), group, text, &error))?;
        }
    }

    Ok(PlannedImage {
        image: text.clone(),
        name: name.clone(),
        pull,
        policy: policy.unwrap_or_else(|| reference.default_pull_policy()),
        secrets,
    })
}

/// The secret of the most specific registry pattern that matches; of equally specific ones the first.
fn registry_secret<'a>(job: &'a ValidatedJob, pull: &NormalizedReference) -> Option<&'a SecretRef> {
    let matching = RegistryPattern::select(&job.registry_secrets, |(pattern, _)| pattern, pull);
    matching.first().map(|(_, secret)| secret)
}

fn rule_fails(field: String, group: &OverriderGroup, image: &str, error: &OverrideError) -> SpecRefusal {
    let message = format!("for nodes with {:?}, image {image:?}: {error}", group.label_text);
    SpecRefusal::new(field, message)
}

fn no_eligible_node(job: &ValidatedJob, skipped: &[SkippedNode]) -> SpecRefusal {
    /// How many nodes the message names; `status.skippedNodes` has the others.
    const EXAMPLES: usize = 3;

    let field = match job.nodes {
        NodeSelection::Names(_) => "spec.imagePrePullTemplate.nodeNames",
        NodeSelection::Labels(_) => "spec.imagePrePullTemplate.labelSelector",
    };
    if skipped.is_empty() {
        return SpecRefusal::new(field, "no node matches: check the labels of the edge nodes");
    }
    let mut examples: Vec<_> =
        skipped.iter().take(EXAMPLES).map(|node| format!("{} is {}", node.node_name, node.reason)).collect();
    if skipped.len() > EXAMPLES {
        examples.push(format!("{} more", skipped.len() - EXAMPLES));
    }
    SpecRefusal::new(
        field,
        format!(
            "no node is eligible: {} (a node needs the label {EDGE_LABEL} and must be Ready)",
            examples.join(", ")
        ),
    )
}
