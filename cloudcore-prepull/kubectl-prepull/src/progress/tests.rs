//! The texts of a job at 80 and at 160 columns.
#![allow(clippy::unwrap_used)]

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use prepull_api::crd::download::WindowSpec;
use prepull_api::crd::job::{ImagePrePullJob, ImagePrePullJobSpec, RolloutStrategy};
use prepull_api::crd::report::{ImagePrePullReport, ReportBody};
use prepull_api::crd::status::{
    ImageBytes, ImagePrePullJobStatus, JobImageStatus, JobPhase, NodePhase, NodeStatus, RolloutStatus,
    SkippedNode, Summary, Tristate,
};
use prepull_api::failure::FailureCode;
use prepull_api::task::KubeletRecord;

use super::lines::Lines;
use super::render::render_view;
use super::tally::Tally;
use super::view::{JobPace, JobView};
use crate::leader::Leaderless;
use crate::screen::Screen;
use crate::snapshot::assert_snapshot;

const START: Timestamp = Timestamp::constant(1_795_000_000, 0);
const MIB: u64 = 1 << 20;

fn after(seconds: i64) -> Timestamp {
    START + SignedDuration::from_secs(seconds)
}

/// A job of three images in waves.
fn job(phase: JobPhase, summary: Summary) -> ImagePrePullJob {
    let mut spec = ImagePrePullJobSpec::default();
    let image = |name: &str| format!("harbor.example/shop/{name}:v2026.11.22-rc1");
    spec.image_pre_pull_template.images = ["web", "api", "worker"].map(image).to_vec();
    let mut job = ImagePrePullJob::new("spring-release", spec);
    let skipped =
        |name: &str, reason: &str| SkippedNode { node_name: name.to_owned(), reason: reason.to_owned() };
    job.status = Some(ImagePrePullJobStatus {
        observed_generation: Some(1),
        phase,
        start_time: Some(Time(START)),
        summary,
        rollout: Some(RolloutStatus { step: 2, steps: 3, nodes: 25, paused_until: None }),
        skipped_nodes: vec![
            skipped("cloud-1", "not an edge node"),
            skipped("edge-90", "NotReady"),
            skipped("edge-91", "NotReady"),
        ],
        ..ImagePrePullJobStatus::default()
    });
    job
}

fn node(name: &str, phase: NodePhase, done: u64) -> NodeStatus {
    let image = JobImageStatus {
        image: "harbor.example/shop/web:v2026.11.22-rc1".to_owned(),
        status: Tristate::Unknown,
        bytes: Some(ImageBytes { done: done * MIB, total: 180 * MIB, from_peers: None }),
        ..JobImageStatus::default()
    };
    NodeStatus {
        node_name: name.to_owned(),
        phase,
        attempt: 1,
        image_status: if phase == NodePhase::Pending { Vec::new() } else { vec![image] },
        ..NodeStatus::default()
    }
}

fn failed(name: &str, code: FailureCode, reason: &str) -> NodeStatus {
    NodeStatus { code: Some(code), reason: reason.to_owned(), ..node(name, NodePhase::Failure, 90) }
}

fn tally(nodes: Vec<NodeStatus>) -> Tally {
    let body = ReportBody { node_status: nodes, ..ReportBody::default() };
    Tally::of_report(&ImagePrePullReport { body, ..ImagePrePullReport::default() })
}

/// In the middle of its second wave, with everything that may be said.
fn busy() -> JobView {
    let no_room = "harbor.example/shop/web:v2026.11.22-rc1: the disk has 61.20 MiB free, and the image needs 541.00 MiB";
    let denied = "harbor.example/shop/api:v2026.11.22-rc1: the registry refuses the credentials of default/harbor: 401";
    let mut nodes: Vec<_> = (0..14).map(|n| node(&format!("edge-{n}"), NodePhase::Successful, 180)).collect();
    nodes.extend((14..18).map(|n| failed(&format!("edge-{n}"), FailureCode::Unauthorized, denied)));
    nodes.push(failed("edge-18", FailureCode::NoSpace, no_room));
    nodes.extend((19..23).map(|n| node(&format!("edge-{n}"), NodePhase::InProgress, 20 * (n - 18))));
    let waits = "waits for its window, opens at 01:00 Europe/Berlin (Mon 23 Nov)";
    nodes.extend((23..25).map(|n| NodeStatus {
        reason: waits.to_owned(),
        ..node(&format!("edge-{n}"), NodePhase::Pending, 0)
    }));
    let summary = Summary {
        desired: 100,
        pending: 77,
        in_progress: 4,
        successful: 14,
        failure: 5,
        unknown: 0,
        skipped: 3,
    };
    let pace = JobPace { bytes: 41.2 * 1024.0 * 1024.0, done: 0.0012 };
    JobView::new(&job(JobPhase::InProgress, summary), &tally(nodes), Some(pace), after(252))
}

#[test]
fn a_running_job_fits_every_width() {
    for width in [80, 160] {
        let file = |kind: &str| format!("progress/tests/{kind}-{width}.txt");
        assert_snapshot(&file("busy"), &render_view(&busy(), Screen::plain(width), false));
        assert_snapshot(&file("busy-wide"), &render_view(&busy(), Screen::plain(width), true));
    }
    for line in render_view(&busy(), Screen::plain(80), true).lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
}

#[test]
fn an_ended_job_shows_the_next_step() {
    let summary = Summary { desired: 3, successful: 2, failure: 1, ..Summary::default() };
    let mut ended = job(JobPhase::Failure, summary);
    let status = ended.status.get_or_insert_default();
    status.completion_time = Some(Time(after(75)));
    status.rollout = None;
    "1 of 3 nodes failed, and failureTolerate 0.1 allows 0: Unreachable 1".clone_into(&mut status.reason);
    let reason =
        "harbor.example/shop/web:v2026.11.22-rc1: cannot connect to harbor.example: connection refused";
    let updated = |name: &str| {
        let mut node = node(name, NodePhase::Successful, 180);
        node.image_status[0].facts.delta_saved_bytes = Some(175 * MIB);
        node
    };
    let nodes =
        tally(vec![updated("edge-1"), updated("edge-2"), failed("edge-3", FailureCode::Unreachable, reason)]);
    let view = JobView::new(&ended, &nodes, None, after(9_999));
    assert_eq!(view.seconds, Some(75));
    for width in [80, 160] {
        assert_snapshot(
            &format!("progress/tests/ended-{width}.txt"),
            &render_view(&view, Screen::plain(width), false),
        );
    }
}

#[test]
fn sums_of_lies_stay_in_range() {
    let most = i64::MAX.unsigned_abs();
    let mut liar = node("edge-1", NodePhase::Successful, 0);
    let image = &mut liar.image_status[0];
    image.bytes = Some(ImageBytes { done: most, total: most, from_peers: None });
    image.facts.delta_saved_bytes = Some(most);
    let liars = Tally::sum(&[tally(vec![liar.clone(), liar.clone()]), tally(vec![liar])]);
    assert_eq!((liars.bytes.done, liars.bytes.total, liars.delta_saved), (u64::MAX, u64::MAX, u64::MAX));
}

#[test]
fn nodes_whose_kubelet_asks_are_counted() {
    let of = |name: &str, record| {
        let mut node = node(name, NodePhase::Successful, 180);
        node.image_status[0].status = Tristate::True;
        node.image_status[0].facts.kubelet_record = Some(record);
        node.image_status[0].facts.kubelet_record_reason = "the kubelet asks".to_owned();
        node
    };
    let other = KubeletRecord::OtherRepository;
    let nodes = tally(vec![of("a", other), of("b", KubeletRecord::SomeCredentials), of("c", other)]);
    let ended = job(JobPhase::Completed, Summary { desired: 3, successful: 3, ..Summary::default() });
    let text = render_view(&JobView::new(&ended, &nodes, None, after(9)), Screen::plain(80), false);
    let line = "2 nodes on which pods may not start offline: a, c\n  the kubelet asks\n";
    assert!(text.contains(line), "{text}");
}

#[test]
fn a_job_that_nobody_serves_says_so() {
    let mut job = ImagePrePullJob::new("web", ImagePrePullJobSpec::default());
    job.metadata.creation_timestamp = Some(Time(START));
    let view = |seconds| JobView::new(&job, &Tally::default(), None, after(seconds));
    assert_eq!(view(9).reason, "");
    assert!(view(10).reason.starts_with("no cloudcore-prepull has looked at it yet"), "{:?}", view(10));
    job.metadata.generation = Some(1);
    assert!(!JobView::new(&job, &Tally::default(), None, after(10)).is_over);
}

#[test]
fn without_a_leader_nothing_is_new() {
    let gone = Leaderless { since: START, holder: Some("a-1".to_owned()) };
    let view = busy().without_leader(Some(&gone));
    assert!(view.reason.contains("a-1 does not renew its Lease"), "{}", view.reason);
    assert_eq!((view.bytes_per_second, view.seconds_left), (None, None));
    assert_eq!(busy().without_leader(None), busy());
    let over = JobView { is_over: true, ..busy() };
    assert_eq!(over.clone().without_leader(Some(&gone)), over);
}

#[test]
fn failures_are_grouped_by_code() {
    let nodes = |from: u32| {
        let reason = |n| if n % 3 == 0 { "rare" } else { "common" };
        (from..from + 30).map(|n| failed(&format!("n{n}"), FailureCode::NoSpace, reason(n))).collect()
    };
    let tally = Tally::sum(&[tally(nodes(0)), tally(nodes(30))]);
    let view = JobView::new(&job(JobPhase::Failure, Summary::default()), &tally, None, after(1));
    let [failures] = &view.failures[..] else { panic!("{:?}", view.failures) };
    assert_eq!((failures.nodes, failures.nodes_with_reason, failures.reason.as_str()), (60, 40, "common"));
    assert_eq!(failures.examples, ["n0", "n1", "n2"]);
}

#[test]
fn the_time_left_needs_nodes_at_work() {
    let mut half = Summary { desired: 10, successful: 4, in_progress: 2, pending: 4, ..Summary::default() };
    let at_work = || tally((0..2).map(|n| node(&format!("n{n}"), NodePhase::InProgress, 90)).collect());
    // Four nodes and two halves in a hundred seconds.
    let view = JobView::new(&job(JobPhase::InProgress, half.clone()), &at_work(), None, after(100));
    assert_eq!(view.seconds_left, Some(100));
    assert_eq!(view.bytes_per_second, Some(1_887_437), "180 MiB in 100 s");
    let mut windows = job(JobPhase::InProgress, half.clone());
    windows.spec.windows.push(WindowSpec::default());
    assert_eq!(JobView::new(&windows, &at_work(), None, after(100)).seconds_left, None, "windows close");
    let mut closed = node("n1", NodePhase::InProgress, 90);
    closed.reason = "waits for its window".to_owned();
    let closed = tally(vec![node("n0", NodePhase::InProgress, 90), closed]);
    let view = JobView::new(&job(JobPhase::InProgress, half.clone()), &closed, None, after(100));
    assert_eq!(view.seconds_left, None, "the box has windows");
    let mut waves = job(JobPhase::InProgress, half.clone());
    waves.spec.rollout = Some(RolloutStrategy { steps: Vec::new(), pause_seconds: 600 });
    let pace = Some(JobPace { bytes: 1.0, done: 0.005 });
    assert_eq!(JobView::new(&waves, &at_work(), pace, after(100)).seconds_left, Some(100 + 600));
    assert_eq!(JobView::new(&waves, &at_work(), None, after(100)).seconds_left, None, "it may have paused");
    let paused = |status: &mut ImagePrePullJobStatus| {
        status.rollout.as_mut().unwrap().paused_until = Some(Time(after(130)));
    };
    paused(waves.status.as_mut().unwrap());
    assert_eq!(JobView::new(&waves, &at_work(), pace, after(100)).seconds_left, Some(100 + 30));
    let mut last = job(JobPhase::InProgress, half.clone());
    last.status.as_mut().unwrap().rollout.as_mut().unwrap().step = 3;
    assert_eq!(JobView::new(&last, &at_work(), None, after(100)).seconds_left, Some(100), "no pauses");
    last.spec.rollout.clone_from(&waves.spec.rollout);
    assert_eq!(JobView::new(&last, &at_work(), None, after(100)).seconds_left, None, "it has paused twice");
    let mut again = job(JobPhase::InProgress, half.clone());
    again.status.get_or_insert_default().retry = 1;
    assert_eq!(JobView::new(&again, &at_work(), None, after(100)).bytes_per_second, None, "it had ended");
    let mut resumed = job(JobPhase::InProgress, half.clone());
    let mut condition: Condition = serde_json::from_value(serde_json::json!({
        "type": "Suspended", "status": "False", "reason": "NotSuspended", "message": "",
        "lastTransitionTime": after(0).to_string(),
    }))
    .unwrap();
    resumed.status.get_or_insert_default().conditions = vec![condition.clone()];
    assert_eq!(JobView::new(&resumed, &at_work(), None, after(100)).seconds_left, Some(100));
    condition.last_transition_time = Time(after(50));
    resumed.status.get_or_insert_default().conditions = vec![condition];
    assert_eq!(JobView::new(&resumed, &at_work(), None, after(100)).seconds_left, None, "it was suspended");
    half.in_progress = 0;
    let view = JobView::new(&job(JobPhase::InProgress, half), &Tally::default(), None, after(100));
    assert_eq!((view.seconds_left, view.bytes_per_second), (None, None));
}

#[test]
fn without_terminal_each_change_is_one_line() {
    let mut lines = Lines::default();
    let mut text = lines.describe_changes(&busy());
    assert_eq!(lines.describe_changes(&busy()), [""; 0]);
    let mut view = busy();
    view.nodes.successful += 1;
    view.bytes_per_second = None;
    text.extend(lines.describe_changes(&view));
    view.suspended = true;
    text.extend(lines.describe_changes(&view));
    assert_snapshot("progress/tests/lines.txt", &format!("{}\n", text.join("\n")));
    // How many wait changes from second to second while their secret is looked for.
    let waits = |view: &mut JobView, nodes: &str, secret: &str| {
        view.reason = format!("{nodes} waiting: secret {secret}");
    };
    waits(&mut view, "12 nodes", "default/harbor");
    assert_eq!(lines.describe_changes(&view).len(), 1);
    waits(&mut view, "1 node", "default/harbor");
    assert_eq!(lines.describe_changes(&view), [""; 0]);
    waits(&mut view, "1 node", "default/other");
    assert_eq!(lines.describe_changes(&view).len(), 1);
}

#[test]
fn an_ended_job_has_no_waiting_nodes() {
    let summary = Summary { desired: 3, successful: 2, pending: 1, ..Summary::default() };
    let waits =
        NodeStatus { reason: "the time of the job was over".to_owned(), ..node("e", NodePhase::Pending, 0) };
    let tally = tally(vec![waits]);
    let mut ended = job(JobPhase::Failure, summary);
    let text = render_view(&JobView::new(&ended, &tally, None, after(9)), Screen::plain(80), false);
    assert!(text.contains("2 successful, 1 not started") && text.contains("1 node not started: e"), "{text}");
    assert!(text.ends_with("kubectl prepull retry spring-release takes it up again\n"), "{text}");
    // There is no way back.
    ended.spec.cancel = true;
    let text = render_view(&JobView::new(&ended, &tally, None, after(9)), Screen::plain(80), false);
    assert!(!text.contains("retry"), "{text}");
}

#[test]
fn time_alone_is_no_news() {
    let view = |at| {
        let summary = Summary { desired: 3, in_progress: 3, ..Summary::default() };
        JobView::new(&job(JobPhase::InProgress, summary), &Tally::default(), None, after(at))
    };
    assert_ne!(view(60), view(61));
    assert_eq!(view(60).without_clock(), view(61).without_clock());
}
