//! The Kubernetes events about one job.

use prepull_api::crd::status::SkippedNode;
use prepull_api::task::{JobUid, NodeName};
use prepull_api::wire::truncate_reason;

use super::super::{Action, Effects};
use crate::shared::counted::counted_len;
use crate::shared::events::{ObjectEvent, ObjectKind};
use crate::shared::objects::ObjectId;
use crate::shared::reasons;

/// The most events about single nodes, per job and run of cloudcore: the reports name every node, the events are for a
/// person who watches, and a fleet that fails as a whole must not flood the API server.
const MAX_NODE_EVENTS: u32 = 20;

#[derive(Debug)]
pub(super) struct JobEvents {
    job: ObjectId,
    node_events: u32,
    /// What was said last about secrets that nodes wait for.
    withheld: String,
}

impl JobEvents {
    pub(super) fn new(job: ObjectId) -> Self {
        Self { job, node_events: 0, withheld: String::new() }
    }

    pub(super) fn uid(&self) -> &JobUid {
        &self.job.uid
    }

    pub(super) fn name(&self) -> &str {
        &self.job.name
    }

    pub(super) fn emit_normal(&self, reason: &'static str, note: &str, effects: &mut Effects<'_>) {
        self.emit(false, reason, note, effects);
    }

    pub(super) fn emit_warning(&self, reason: &'static str, note: &str, effects: &mut Effects<'_>) {
        self.emit(true, reason, note, effects);
    }

    /// Emits a warning about a single node, unless there have been [too many](MAX_NODE_EVENTS).
    pub(super) fn emit_node_warning(&mut self, reason: &'static str, note: &str, effects: &mut Effects<'_>) {
        if self.node_events < MAX_NODE_EVENTS {
            self.node_events += 1;
            self.emit_warning(reason, note, effects);
        }
    }

    /// Warns that nodes wait for the owners of secrets: once, however many of them there are, and however often they try.
    pub(super) fn emit_withheld(&mut self, reason: &str, effects: &mut Effects<'_>) {
        if self.withheld != reason {
            reason.clone_into(&mut self.withheld);
            self.emit_node_warning(reasons::SECRET_WITHHELD, reason, effects);
        }
    }

    /// Warns of the nodes that a job leaves out, and of names that have no Node.
    pub(super) fn emit_left_out(
        &self,
        skipped: &[SkippedNode],
        missing: &[NodeName],
        effects: &mut Effects<'_>,
    ) {
        if !skipped.is_empty() {
            let nodes = skipped.iter().map(|node| format!("{} ({})", node.node_name, node.reason));
            let note = format!("{} skipped: {}", counted_len(skipped.len(), "node"), some_of(nodes));
            self.emit_warning(reasons::NODES_SKIPPED, &note, effects);
        }
        if !missing.is_empty() {
            let (count, nodes) = (missing.len(), some_of(missing.iter().map(ToString::to_string)));
            let remedy = "correct nodeNames, or set allowMissingNodes to skip such names";
            let count = counted_len(count, "name");
            let note = format!("{count} without a Node, counted as failed: {nodes}; {remedy}");
            self.emit_warning(reasons::NODES_MISSING, &note, effects);
        }
    }

    fn emit(&self, warning: bool, reason: &'static str, note: &str, effects: &mut Effects<'_>) {
        effects.emit(Action::Event(ObjectEvent {
            kind: ObjectKind::ImagePrePullJob,
            object: self.job.clone(),
            warning,
            reason,
            note: truncate_reason(note),
        }));
    }
}

/// As many nodes as a person reads.
pub(super) fn some_of(nodes: impl ExactSizeIterator<Item = String>) -> String {
    const SHOWN: usize = 5;
    let more = nodes.len().saturating_sub(SHOWN);
    let mut shown: Vec<_> = nodes.take(SHOWN).collect();
    if more > 0 {
        shown.push(format!("{more} more"));
    }
    shown.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_names_at_most_five_nodes() {
        let names = |count: usize| some_of((0..count).map(|n| format!("n{n}")));
        assert_eq!([names(5), names(7)], ["n0, n1, n2, n3, n4", "n0, n1, n2, n3, n4, 2 more"]);
    }
}
