//! The overriders of a job: rules for groups of nodes.

use prepull_api::crd::job::{OverrideRule, OverriderEntry};
use prepull_api::overriders::{ImageRule, OverrideError, SecretRule};
use prepull_api::selector::Selector;

use super::{SpecRefusal, parse_each};

/// The rules for the nodes of one label selector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverriderGroup {
    /// The nodes that the rules are for.
    pub selector: Selector,
    /// The selector as the job has it.
    pub label_text: String,
    /// In order.
    pub image_rules: Vec<ImageRule>,
    /// In order.
    pub secret_rules: Vec<SecretRule>,
}

pub(super) fn overrider_group(index: usize, entry: &OverriderEntry) -> Result<OverriderGroup, SpecRefusal> {
    let group = &entry.image_pre_pull_overrider;
    Ok(OverriderGroup {
        selector: Selector::parse(&group.node_label).map_err(|e| {
            SpecRefusal::new(
                format!("spec.imagePrePullOverriders[{index}].imagePrePullOverrider.nodeLabel"),
                e,
            )
        })?,
        label_text: group.node_label.clone(),
        image_rules: parse_each(&group.overriders.image_overriders, |i, rule| {
            let OverrideRule { component, operator, value } = rule;
            ImageRule::parse(component, operator, value.as_deref())
                .map_err(|e| bad_rule(&image_rule_field(index, i), &e))
        })?,
        secret_rules: parse_each(&group.overriders.secret_overriders, |i, rule| {
            let OverrideRule { component, operator, value } = rule;
            SecretRule::parse(component, operator, value.as_deref())
                .map_err(|e| bad_rule(&secret_rule_field(index, i), &e))
        })?,
    })
}

pub(crate) fn image_rule_field(group: usize, rule: usize) -> String {
    format!("spec.imagePrePullOverriders[{group}].imagePrePullOverrider.overriders.imageOverriders[{rule}]")
}

pub(crate) fn secret_rule_field(group: usize, rule: usize) -> String {
    format!("spec.imagePrePullOverriders[{group}].imagePrePullOverrider.overriders.secretOverriders[{rule}]")
}

fn bad_rule(field: &str, error: &OverrideError) -> SpecRefusal {
    let part = match error {
        OverrideError::Component { .. } => "component",
        OverrideError::Operator(_) | OverrideError::RemoveRepository => "operator",
        _ => "value",
    };
    SpecRefusal::new(format!("{field}.{part}"), error)
}
