//! The invariants: what must hold after every step. The numbers in messages are those of the promises in
//! docs/architecture.md.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use prepull_api::crd::job::{ImagePrePullJob, ImagePrePullJobSpec};
use prepull_api::crd::status::{MAX_NODES_IN_STATUS, NodePhase, NodeStatus, Summary};
use prepull_api::task::{JobUid, NodeName, RemovalResult, TaskId};
use prepull_engine::prepull::controller::{Content, PARK_AFTER};
use prepull_engine::prepull::rollout::{RECHECK_TIME, REMOVAL_GRACE, REPORT_GRACE};
use prepull_engine::prepull::validate::{DEFAULT_TIMEOUT, validate};
use prepull_window::Openings;

use crate::api::Api;
use crate::world::{at, millis};

mod course;
mod edges;
mod nodes;
mod removals;
mod runs;
pub(crate) mod specs;

use specs::Delivered;

#[derive(Default)]
pub(crate) struct Check {
    duplicates: bool,
    delivered: BTreeMap<JobUid, Vec<Delivered>>,
    /// What the run of each job began with. Its fixed part stays in force until the run has ended.
    beginnings: BTreeMap<JobUid, ImagePrePullJobSpec>,
    /// What each job is to begin a further run with once it is over.
    next: BTreeMap<JobUid, ImagePrePullJobSpec>,
    /// The spec of each generation that a controller received; `None` where it could not be read.
    asked: BTreeMap<(JobUid, i64), Option<ImagePrePullJobSpec>>,
    /// What each run began with, by the number of its first attempt.
    begun: BTreeMap<(JobUid, u32), ImagePrePullJobSpec>,
    /// The run that each job is in, by the number of its first attempt, as the API server has it.
    runs: BTreeMap<JobUid, u32>,
    /// The run of each job that the leader knows to be in the API server, if one has begun.
    confirmed: BTreeMap<JobUid, Option<u32>>,
    /// When the run of each job began, for the leader.
    run_since: BTreeMap<JobUid, u64>,
    /// `startTime` of each job.
    start_times: BTreeMap<JobUid, u64>,
    /// When the active time of each job began to count at the latest.
    active_since: BTreeMap<JobUid, u64>,
    /// When the last pause of a job ended, as the leader knows it.
    resumed: BTreeMap<JobUid, u64>,
    /// Whether Nodes were deleted.
    pub(crate) has_deleted_nodes: bool,
    /// Jobs that are over for the cloudcore that runs, whether or not it has written so.
    ended: BTreeSet<JobUid>,
    /// Jobs that exceeded their tolerance, as this cloudcore has announced, and could not have fallen below it since.
    exceeded: BTreeSet<JobUid>,
    /// The attempts of nodes with starts that the API server has had.
    recorded: BTreeSet<(JobUid, NodeName, u32)>,
    /// Starts that only late writes of killed cloudcores tell of: job, node, time.
    unread: BTreeSet<(JobUid, NodeName, u64)>,
    /// The references of each task that was dispatched.
    references: BTreeMap<(NodeName, TaskId), Vec<String>>,
    /// Jobs with a cancellation that has reached the leader since the last flush: the effects of its earlier inputs
    /// come out of the next one.
    just_cancelled: BTreeSet<JobUid>,
    /// Jobs that were cancelled while it was not known what they carry out.
    cancelled_while_held: BTreeSet<JobUid>,
    /// The phase of each node in the write that began last.
    emitted: BTreeMap<(JobUid, NodeName), NodePhase>,
    /// Attempt and phase of each node, as the leader of the time wrote them last.
    nodes: BTreeMap<(JobUid, NodeName), (u32, NodePhase)>,
    /// The jobs that have ended, when that was, and with how many rounds and re-checks.
    over: BTreeMap<JobUid, (u64, u32)>,
    /// The last round of each job that was begun, and the attempts of its nodes as the API server had them then.
    rounds: BTreeMap<JobUid, (u32, BTreeMap<NodeName, u32>)>,
    /// Jobs with late results in their reports, and not in their status, when a cloudcore was killed. A leader that finds
    /// such a job over for long does not read its reports.
    behind: BTreeSet<JobUid>,
    /// How many nodes of each job were `Unknown` when the result arrived that they had succeeded.
    late: BTreeMap<JobUid, u32>,
    /// When the last re-check of each job began at the latest.
    rechecks: BTreeMap<JobUid, u64>,
    /// The outcomes of the results that agents have sent.
    said: BTreeMap<(NodeName, TaskId), BTreeSet<u8>>,
    /// Tasks that could not be sent at all.
    unsendable: BTreeSet<(NodeName, TaskId)>,
    /// Tasks that the agents of their nodes are too old for.
    too_old: BTreeSet<(NodeName, TaskId)>,
    /// What agents have removed, by the results that they have sent.
    removals: BTreeMap<(NodeName, TaskId), Vec<RemovalResult>>,
    /// Tasks that had to wait for a secret.
    postponed: BTreeSet<(NodeName, TaskId)>,
    /// Tasks that the cloud has cancelled, whether or not the edge has received that.
    cancelled: BTreeSet<(NodeName, TaskId)>,
    /// Tasks that edges carry out.
    running: BTreeSet<(NodeName, TaskId)>,
}

/// In milliseconds.
const RECHECK: u64 = RECHECK_TIME.as_secs() * 1_000;

pub(crate) const PARKED: u64 = PARK_AFTER.as_secs() * 1_000;

fn is_final(phase: NodePhase) -> bool {
    matches!(phase, NodePhase::Successful | NodePhase::Failure | NodePhase::Unknown)
}

fn timeout(spec: &ImagePrePullJobSpec) -> u64 {
    match u64::try_from(spec.image_pre_pull_template.timeout_seconds).unwrap() {
        0 => u64::try_from(DEFAULT_TIMEOUT.as_millis()).unwrap(),
        seconds => seconds * 1000,
    }
}

/// How long a node may be silent after its time, in milliseconds.
fn grace(spec: &ImagePrePullJobSpec) -> u64 {
    let removes = spec.image_pre_pull_template.remove.is_some();
    u64::try_from(if removes { REMOVAL_GRACE } else { REPORT_GRACE }.as_millis()).unwrap()
}

/// When a node is out of time that started then, in a job with this spec.
fn deadline(spec: &ImagePrePullJobSpec, start: u64) -> u64 {
    let job = ImagePrePullJob { spec: spec.clone(), ..ImagePrePullJob::default() };
    let windows = validate(&job).unwrap().download.windows;
    let timeout = Duration::from_millis(timeout(spec));
    millis(Openings::new(&windows, Duration::ZERO, None).after_open_time(at(start), timeout)) + grace(spec)
}

impl Check {
    pub(crate) fn new(duplicates: bool) -> Self {
        Self { duplicates, ..Self::default() }
    }

    /// All that the leader has heard has come out.
    pub(crate) fn flushed(&mut self) {
        self.just_cancelled.clear();
    }

    /// `unread`: the write is one of a killed cloudcore, and the leader had read the object before it. The leader does
    /// not know it, and will replace it.
    pub(crate) fn landed(&mut self, api: &Api, job: &JobUid, content: &Content, unread: bool) {
        match content {
            Content::Report(report) => {
                add_up(&report.summary, report.node_status.iter());
                self.recorded(job, report);
                if unread {
                    self.unread(job, report);
                }
                // The reports of a deleted job are garbage-collected, and a late write may create one again.
                if !unread && api.jobs.contains_key(job) {
                    self.leave(api, job);
                    self.report(api, job, report);
                }
                self.concurrency(api, job);
                self.waves(api, job);
            }
            Content::Status(status) => {
                assert!(status.node_status.len() <= MAX_NODES_IN_STATUS, "(8)");
                let Summary { desired, pending, in_progress, successful, failure, unknown, skipped: _ } =
                    status.summary;
                assert_eq!(pending + in_progress + successful + failure + unknown, desired, "(8) {job}");
                if !unread {
                    self.status(api, job, status);
                }
            }
        }
    }
}

fn add_up<'a>(summary: &Summary, nodes: impl Iterator<Item = &'a NodeStatus>) {
    let counted = Summary { skipped: summary.skipped, ..count(nodes) };
    assert_eq!(*summary, counted, "(8) the summary does not add up");
}

/// The nodes in each phase.
fn count<'a>(nodes: impl Iterator<Item = &'a NodeStatus>) -> Summary {
    let mut counted = Summary::default();
    for node in nodes {
        counted.desired += 1;
        *match node.phase {
            NodePhase::Pending => &mut counted.pending,
            NodePhase::InProgress => &mut counted.in_progress,
            NodePhase::Successful => &mut counted.successful,
            NodePhase::Failure => &mut counted.failure,
            NodePhase::Unknown => &mut counted.unknown,
        } += 1;
    }
    counted
}
