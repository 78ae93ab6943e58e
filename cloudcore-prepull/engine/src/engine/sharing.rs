//! Entitlement of nodes to layers of their neighbours: the images that its task names, and the credentials that it got for
//! them.
//!
//! Which credentials a node got isn't stored. After a failover a node reads nothing from neighbours until its task is sent
//! to it once more; what it has it may serve, since a reader needs the entitlement, and not the server.

use jiff::Timestamp;
use prepull_api::sites::{BlobNews, BlobState, Blobs};
use prepull_api::task::{NodeName, TaskId, TaskOutcome, TaskResult};
use prepull_api::wire::CloudMessage;

use super::{Action, Engine};
use crate::kruise;
use crate::kruise::node_images::is_of_node_image;
use crate::prepull::controller;
use crate::shared::access::LayerAccess;
use crate::sites::{BlobSharing, NOT_SHARED};

/// Most entitlements with known credentials: as many as running jobs with secrets. Beyond it all are forgotten, and the
/// next node with each of them fixes its credentials.
const MAX_ENTITLEMENTS: usize = 1024;

/// The task of a dispatch that has ended.
pub(super) fn sent_task(input: &controller::Input) -> Option<(NodeName, TaskId)> {
    let controller::Input::Dispatched { job, node, attempt, .. } = input else { return None };
    Some((node.clone(), TaskId { job: job.clone(), attempt: *attempt }))
}

const OLDER_KEYS: &str =
    "its registry credentials are older than those that the cloud gave last for these images";

impl Engine {
    /// A node reports the blobs of a task. Sites share only the blobs of tasks the node must carry out.
    pub(super) fn note_blobs(&mut self, node: &NodeName, mut blobs: Blobs, now: Timestamp) {
        let Some((shared, access)) = self.shared_by(node, &blobs.task) else {
            // The task was cancelled, or its job deleted, before the node could report what it dropped.
            self.sites.end_task(node, &blobs.task, now);
            return self.sites.refuse(node, blobs, NOT_SHARED);
        };
        if let Some(refusal) = self.access_refusal(&shared, access) {
            let (held, wanted): (Vec<_>, Vec<_>) =
                blobs.blobs.into_iter().partition(|blob| blob.state == BlobState::Here);
            // It is no reader any more of what it was before.
            let dropped = |blob: &BlobNews| BlobNews { state: BlobState::Dropped, ..blob.clone() };
            blobs.blobs = held.into_iter().chain(wanted.iter().map(dropped)).collect();
            let refused = Blobs { task: blobs.task.clone(), blobs: wanted, failures: Vec::new(), ..blobs };
            self.sites.note_blobs(node, &shared, blobs, now);
            if !refusal.is_empty() {
                self.sites.refuse(node, refused, refusal);
            }
            return;
        }
        self.sites.note_blobs(node, &shared, blobs, now);
    }

    /// Why the node may not read from neighbours; empty if it should wait until its task is sent once more.
    fn access_refusal(&mut self, shared: &BlobSharing, access: LayerAccess) -> Option<&'static str> {
        match access {
            LayerAccess::Open => None,
            LayerAccess::Keys(keys) => {
                let last = self.last_keys.entry(shared.entitlement.clone()).or_insert(keys);
                (*last != keys).then_some(OLDER_KEYS)
            }
            LayerAccess::Awaited => Some(""),
            LayerAccess::Ended => Some(NOT_SHARED),
        }
    }

    /// A task was sent: its credentials are the last ones.
    pub(super) fn note_keys(&mut self, node: &NodeName, task: &TaskId) {
        if let Some((BlobSharing { entitlement, .. }, LayerAccess::Keys(keys))) = self.shared_by(node, task) {
            if self.last_keys.len() >= MAX_ENTITLEMENTS && !self.last_keys.contains_key(&entitlement) {
                self.last_keys.clear();
            }
            self.last_keys.insert(entitlement, keys);
        }
    }

    /// A node seeks nothing for a task that it must give up, even if it doesn't report that.
    pub(super) fn end_cancelled(&mut self, actions: &[Action], now: Timestamp) {
        for action in actions {
            if let Action::Prepull(controller::Action::Send(node, message))
            | Action::Kruise(kruise::Action::Send(node, message)) = action
                && let CloudMessage::Cancel { task, .. } = message
            {
                self.sites.end_task(node, task, now);
            }
        }
    }

    fn shared_by(&self, node: &NodeName, task: &TaskId) -> Option<(BlobSharing, LayerAccess)> {
        let by_default = self.sites.settings().share_by_default;
        if !is_of_node_image(task) {
            return self.prepull.shared_by(node, task, by_default);
        }
        let kruise = self.kruise.as_ref().filter(|_| by_default)?;
        let entitlement = kruise.entitlement(node, task)?;
        Some((BlobSharing { entitlement, max_rate: None, has_succeeded: false }, LayerAccess::Open))
    }

    /// A task has succeeded: its node has all of its blobs.
    pub(super) fn note_success(&mut self, node: &NodeName, result: &TaskResult, now: Timestamp) {
        if result.outcome == TaskOutcome::Succeeded
            && let Some((shared, _)) = self.shared_by(node, &result.task)
        {
            self.sites.note_success(node, &shared.entitlement, now);
        }
    }
}

#[cfg(test)]
mod tests;
