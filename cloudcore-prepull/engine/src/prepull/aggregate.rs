//! The reports of a job, and what its status shows of its nodes and in its conditions. Pure.

pub(crate) mod conditions;

use prepull_api::crd::report::{MAX_NODES_IN_REPORT, ReportBody};
use prepull_api::crd::status::{MAX_NODES_IN_STATUS, NodePhase, NodeStatus, Summary};
use prepull_api::task::RemovalResult;

/// Number of the first attempt in the first run of a job.
pub const FIRST_ATTEMPT: u32 = 1;

pub(crate) use self::conditions::{FAILED, FINISHED, PAUSED, PROGRESSING, SUSPENDED};
pub use self::conditions::{OtherSpec, Situation, conditions};

/// Bytes of `nodeStatus` as JSON, at most: with what else is in the object it stays below the 256 KiB that an
/// object of a large job may have, and far below etcd's 1.5 MiB. Where the images of all nodes do not fit, the
/// nodes that need no eyes are listed without theirs.
pub const NODE_STATUS_BUDGET: usize = 160 * 1024;

/// Bytes of the nodes of a report as JSON, at most: etcd takes objects of 1.5 MiB. Where long reasons do not fit,
/// they are cut for the nodes that need eyes least.
pub const REPORT_BUDGET: usize = 1024 * 1024;
/// The characters that are left of a reason that was cut.
const SHORT_REASON: usize = 120;

/// How many rounds of a job have begun.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rounds {
    /// Those of `spec.retry`.
    pub retry: u32,
    /// Those of `spec.recheck`.
    pub recheck: u32,
    /// Whether the last one is a re-check.
    pub rechecking: bool,
}

impl Rounds {
    /// How many there are of both kinds. Each begins after the end of the one before.
    pub fn total(self) -> u32 {
        self.retry.saturating_add(self.recheck)
    }
}

/// The number as objects have it, which leave out that of the first run.
pub(crate) fn stored_first_attempt(first_attempt: u32) -> Option<u32> {
    Some(first_attempt).filter(|first| *first > FIRST_ATTEMPT)
}

/// Makes a report of some nodes of a job. `rounds`: those of the job that have begun.
pub fn make_report<'a>(
    job_name: &str,
    index: u32,
    first_attempt: u32,
    rounds: Rounds,
    nodes: impl Iterator<Item = &'a NodeStatus>,
) -> ReportBody {
    let nodes: Vec<&NodeStatus> = nodes.collect();
    let mut summary = Summary { desired: saturating_u32(nodes.len()), ..Summary::default() };
    for node in &nodes {
        *in_phase(&mut summary, node.phase) += 1;
    }
    // Edges make up their reasons. Where each image has long ones, the shortened ones don't fit either.
    let node_status = fit_in_budget(&nodes, REPORT_BUDGET, &[shortened, without_reasons]);
    let Rounds { retry, recheck, rechecking } = rounds;
    let (job_name, retry) = (job_name.to_owned(), Some(retry));
    let first_attempt = stored_first_attempt(first_attempt);
    ReportBody { job_name, index, retry, recheck, rechecking, first_attempt, summary, node_status }
}

/// How many nodes of a job one report holds, by the bytes that the names of each image take in a record: at the usual
/// sizes of the rest they fill two thirds of [`REPORT_BUDGET`].
pub fn nodes_in_report(names: impl Iterator<Item = usize>) -> usize {
    // Name, phase and times of a node; digest, bytes and states of an image.
    let node: usize = 400 + names.map(|names| 250 + names).sum::<usize>();
    (REPORT_BUDGET * 2 / 3 / node).clamp(1, MAX_NODES_IN_REPORT)
}

pub(crate) fn in_phase(summary: &mut Summary, phase: NodePhase) -> &mut u32 {
    match phase {
        NodePhase::Pending => &mut summary.pending,
        NodePhase::InProgress => &mut summary.in_progress,
        NodePhase::Successful => &mut summary.successful,
        NodePhase::Failure => &mut summary.failure,
        NodePhase::Unknown => &mut summary.unknown,
    }
}

fn saturating_u32(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// The nodes of a status: those that need attention first, or all in the job's order if they fit.
pub(crate) fn shown_nodes<'a>(nodes: impl Iterator<Item = &'a NodeStatus>) -> Vec<NodeStatus> {
    let mut ranked: Vec<(usize, &NodeStatus)> = nodes.enumerate().collect();
    if ranked.len() > MAX_NODES_IN_STATUS {
        ranked.sort_by_key(|(at, node)| (rank(node.phase), *at));
        ranked.truncate(MAX_NODES_IN_STATUS);
    }
    let nodes: Vec<&NodeStatus> = ranked.into_iter().map(|(_, node)| node).collect();
    fit_in_budget(&nodes, NODE_STATUS_BUDGET, &[without_details])
}

/// The nodes, in their order; whole as long as `budget` bytes of JSON last, those that need eyes first, then as the first of
/// `shorts` makes them by which all of them fit.
fn fit_in_budget(
    nodes: &[&NodeStatus],
    budget: usize,
    shorts: &[fn(&NodeStatus) -> NodeStatus],
) -> Vec<NodeStatus> {
    let sizes: Vec<usize> = nodes.iter().map(|node| size(node)).collect();
    if sizes.iter().sum::<usize>() <= budget {
        return nodes.iter().map(|node| (*node).clone()).collect();
    }
    let (mut shown, mut left) = (Vec::new(), 0);
    for short in shorts {
        shown = nodes.iter().map(|node| short(node)).collect();
        let taken = shown.iter().map(size).sum();
        left = budget.saturating_sub(taken);
        if taken <= budget {
            break;
        }
    }
    let mut by_rank: Vec<usize> = (0..nodes.len()).collect();
    by_rank.sort_by_key(|&at| (rank(nodes[at].phase), at));
    for at in by_rank {
        let more = sizes[at].saturating_sub(size(&shown[at]));
        if more <= left {
            left -= more;
            shown[at] = nodes[at].clone();
        }
    }
    shown
}

/// Bytes as JSON.
fn size(node: &NodeStatus) -> usize {
    struct Count(usize);
    impl std::io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    serde_json::to_writer(&mut count, node).map_or(usize::MAX, |()| count.0)
}

fn rank(phase: NodePhase) -> u8 {
    match phase {
        NodePhase::Failure => 0,
        NodePhase::Unknown => 1,
        NodePhase::InProgress => 2,
        NodePhase::Pending => 3,
        NodePhase::Successful => 4,
    }
}

fn without_details(node: &NodeStatus) -> NodeStatus {
    NodeStatus {
        node_name: node.node_name.clone(),
        phase: node.phase,
        reason: cut_reason(&node.reason),
        code: node.code,
        attempt: node.attempt,
        start_time: node.start_time.clone(),
        recheck: node.recheck.clone(),
        clock: None,
        action_flow: Vec::new(),
        image_status: Vec::new(),
        removal: node.removal.as_ref().map(without_images),
    }
}

/// All that a later life of cloudcore needs, with reasons that are cut.
fn shortened(node: &NodeStatus) -> NodeStatus {
    let mut node = node.clone();
    node.reason = cut_reason(&node.reason);
    if let Some(recheck) = &mut node.recheck {
        recheck.not_checked_reason = cut_reason(&recheck.not_checked_reason);
    }
    node.action_flow.iter_mut().for_each(|action| action.reason = cut_reason(&action.reason));
    for image in node.removal.iter_mut().flat_map(|removal| &mut removal.images) {
        image.reason = cut_reason(&image.reason);
    }
    for image in &mut node.image_status {
        image.reason = cut_reason(&image.reason);
        image.facts.texts().into_iter().for_each(|text| *text = cut_reason(text));
    }
    node
}

/// The same without any reasons; the codes remain.
fn without_reasons(node: &NodeStatus) -> NodeStatus {
    let mut node = shortened(node);
    node.action_flow.iter_mut().for_each(|action| action.reason.clear());
    node.removal = node.removal.as_ref().map(without_images);
    for image in &mut node.image_status {
        image.reason.clear();
        image.facts.texts().into_iter().for_each(String::clear);
    }
    node
}

/// The counts alone.
fn without_images(removal: &RemovalResult) -> RemovalResult {
    RemovalResult { images: Vec::new(), ..removal.clone() }
}

fn cut_reason(reason: &str) -> String {
    reason.chars().take(SHORT_REASON).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use jiff::Timestamp;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use prepull_api::crd::status::{Action, ActionStatus, JobImageStatus, Tristate};
    use prepull_api::task::ImageRemoval;

    use super::*;

    fn node(name: &str, phase: NodePhase, images: usize) -> NodeStatus {
        let image = JobImageStatus {
            image: "registry.example/team/application:v1.2.3".to_owned(),
            status: Tristate::True,
            digest: Some(format!("sha256:{}", "a".repeat(64))),
            ..JobImageStatus::default()
        };
        NodeStatus {
            node_name: name.to_owned(),
            phase,
            image_status: vec![image; images],
            ..NodeStatus::default()
        }
    }

    #[test]
    fn up_to_200_nodes_keep_their_order() {
        let nodes: Vec<_> = (0..200)
            .map(|n| {
                node(&format!("n{n}"), if n == 150 { NodePhase::Failure } else { NodePhase::Successful }, 1)
            })
            .collect();
        let names: Vec<_> = shown_nodes(nodes.iter()).into_iter().map(|n| n.node_name).collect();
        assert_eq!(names, (0..200).map(|n| format!("n{n}")).collect::<Vec<_>>());
    }

    #[test]
    fn beyond_200_the_failing_come_first() {
        let phase = |n| match n {
            990.. => NodePhase::Failure,
            980.. => NodePhase::Unknown,
            970.. => NodePhase::InProgress,
            960.. => NodePhase::Pending,
            _ => NodePhase::Successful,
        };
        let nodes: Vec<_> = (0..1000).map(|n| node(&format!("n{n}"), phase(n), 1)).collect();
        let view = shown_nodes(nodes.iter());
        assert_eq!(view.len(), 200);
        let firsts: Vec<_> = view.iter().step_by(10).take(5).map(|node| node.node_name.as_str()).collect();
        assert_eq!(firsts, ["n990", "n980", "n970", "n960", "n0"]);
    }

    #[test]
    fn the_view_stays_small_but_keeps_failures() {
        let nodes: Vec<_> = (0..200)
            .map(|n| {
                node(&format!("n{n}"), if n >= 195 { NodePhase::Failure } else { NodePhase::Successful }, 40)
            })
            .collect();
        let view = shown_nodes(nodes.iter());
        assert!(serde_json::to_string(&view).unwrap().len() <= NODE_STATUS_BUDGET + 200);
        assert!(view[195..].iter().all(|n| n.image_status.len() == 40));
        assert!(view[..195].iter().any(|n| n.image_status.is_empty()));
    }

    #[test]
    fn long_reasons_cannot_exceed_a_reports_budget() {
        let capacity = nodes_in_report(std::iter::repeat_n(2 * 40, 10));
        assert!((100..MAX_NODES_IN_REPORT).contains(&capacity), "{capacity}");
        let nodes: Vec<_> = (0..capacity)
            .map(|n| {
                let mut node = node(&format!("node-{n}"), NodePhase::Failure, 10);
                node.image_status.iter_mut().for_each(|image| image.reason = "x".repeat(1024));
                node
            })
            .collect();
        let report = make_report("job", 3, FIRST_ATTEMPT, Rounds::default(), nodes.iter());
        assert!(serde_json::to_string(&report).unwrap().len() < REPORT_BUDGET + 1000);
        assert_eq!((report.node_status.len(), report.summary.failure as usize), (capacity, capacity));
        // What a later life of cloudcore needs is there, whole or not.
        assert!(report.node_status.iter().all(|node| node.image_status.len() == 10));
        // A reason is whole, or its beginning.
        let cut = "x".repeat(SHORT_REASON);
        let lengths: BTreeSet<_> =
            report.node_status.iter().map(|node| node.image_status[0].reason.len()).collect();
        assert_eq!(lengths, [cut.len(), 1024].into());
        assert_eq!(nodes_in_report(std::iter::once(2)), MAX_NODES_IN_REPORT);
        assert_eq!(nodes_in_report(std::iter::once(24_000)), 28);
        assert_eq!(nodes_in_report(std::iter::repeat_n(2, 10_000)), 1);
    }

    #[test]
    fn liars_cannot_exceed_a_reports_budget() {
        let capacity = nodes_in_report(std::iter::repeat_n(2 * 5, 256));
        let nodes: Vec<_> = (0..capacity)
            .map(|n| {
                let mut node = node(&format!("node-{n}"), NodePhase::Failure, 256);
                for image in &mut node.image_status {
                    "r/a:1".clone_into(&mut image.image);
                    for reason in image.facts.texts().into_iter().chain([&mut image.reason]) {
                        *reason = "\u{1f4a5}".repeat(256);
                    }
                    image.digest = Some(format!("sha512:{}", "f".repeat(128)));
                    image.facts.signed_by = Some(format!("sha256:{}", "f".repeat(12)));
                }
                node
            })
            .collect();
        let report = make_report("job", 0, FIRST_ATTEMPT, Rounds::default(), nodes.iter());
        assert!(serde_json::to_string(&report).unwrap().len() <= REPORT_BUDGET + 1000);
        let names = |nodes: &[NodeStatus]| nodes.iter().map(|n| n.node_name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&report.node_status), names(&nodes));
    }

    #[test]
    fn reasons_without_room_are_cut_short() {
        let mut whole = node("n", NodePhase::Failure, 1);
        whole.reason = "é".repeat(1024);
        whole.image_status[0].reason.clone_from(&whole.reason);
        whole.image_status[0].facts.kubelet_record_reason.clone_from(&whole.reason);
        whole.action_flow.push(ActionStatus {
            action: Action::Pull,
            status: Tristate::False,
            reason: whole.reason.clone(),
            time: Time(Timestamp::UNIX_EPOCH),
        });
        let counts = RemovalResult { removed: 1, ..RemovalResult::default() };
        whole.removal = Some(RemovalResult { images: vec![ImageRemoval::default()], ..counts.clone() });
        let cut = "é".repeat(SHORT_REASON);
        let shortened = fit_in_budget(&[&whole], 0, &[shortened]).remove(0);
        let image = &shortened.image_status[0];
        let reasons = [
            &shortened.reason,
            &image.reason,
            &image.facts.kubelet_record_reason,
            &shortened.action_flow[0].reason,
        ];
        assert_eq!(reasons, [&cut; 4]);
        let bare = fit_in_budget(&[&whole], 0, &[without_details]).remove(0);
        assert_eq!((&bare.reason, bare.phase, bare.image_status.len()), (&cut, NodePhase::Failure, 0));
        assert_eq!(bare.removal, Some(counts));
    }

    #[test]
    fn rounds_of_both_kinds_count() {
        assert_eq!(Rounds { retry: 2, recheck: 1, rechecking: true }.total(), 3);
    }
}
