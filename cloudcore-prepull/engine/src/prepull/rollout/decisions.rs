//! Decisions of a rollout, which the controller carries out.

use prepull_api::task::NodeName;

use crate::shared::writes::StartId;

/// A decision that the controller carries out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RolloutDecision {
    /// Record the node as in progress; once that is written, dispatch its task.
    Start(NodeName),
    /// Dispatch the task once more that the edge has already: its secrets could not be read.
    Redispatch(NodeName),
    /// The node is out of time: cancel its task, if it can be reached.
    Expire(NodeName),
    /// The time of a re-check is over: cancel its task, if the node can be reached.
    StopRecheck(NodeName),
    /// A start that may be in the API server already does not happen: record that.
    Withdraw(NodeName, StartId),
}

/// The decision about a task that an edge holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reattach {
    /// Do nothing: the task is on its way, or its result is.
    Leave,
    /// Nothing either, unless the edge may not know the present terms: it works on the task.
    AtWork,
    /// Send the Assign again.
    Dispatch,
    /// Record the node as in progress; once that is written, dispatch its task.
    Start,
    /// Tell the edge to stop.
    Cancel,
}

/// Whether the job is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RolloutVerdict {
    /// Nodes run or wait.
    Running,
    /// More nodes failed than are tolerated; those that run may end, nothing starts.
    Draining,
    /// Every node ended within the tolerance.
    Completed,
    /// A re-check has ended within the tolerance, in a job that had not started all of its nodes before.
    NotAllStarted,
    /// More nodes failed than are tolerated, and none runs any more.
    Failed,
    /// Every node was deleted before it started.
    NoneLeft,
}
