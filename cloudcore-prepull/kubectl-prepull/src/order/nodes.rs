//! The flags that choose the nodes of a job.

use anyhow::anyhow;
use clap::Args;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use prepull_api::selector::Selector;

use crate::problem::WrongUsage;

/// The flags that choose the nodes, of each command that makes a job.
#[derive(Debug, Args)]
pub(crate) struct ChosenNodes {
    /// Label selector of the nodes; edge nodes alone take part.
    #[arg(short = 'l', long, value_name = "SELECTOR", value_parser = Selector::parse, conflicts_with = "nodes")]
    pub(crate) selector: Option<Selector>,
    /// A node; may be repeated.
    #[arg(long = "node", value_name = "NAME")]
    pub(crate) nodes: Vec<String>,
}

impl ChosenNodes {
    /// The label selector as a job has it, if one is set.
    pub(crate) fn selector(&self) -> anyhow::Result<Option<LabelSelector>> {
        let object_form = |selector: &Selector| {
            LabelSelector::try_from(selector)
                .map_err(|error| anyhow!(WrongUsage(format!("--selector {selector}: {error}"))))
        };
        self.selector.as_ref().map(object_form).transpose()
    }
}
