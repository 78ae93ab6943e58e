//! A job of OpenKruise as people follow it. Pure.

use jiff::Timestamp;
use kube::ResourceExt;
use prepull_api::crd::kruise::{ImageListPullJob, ImagePullJob, PullJobTemplate};
use prepull_api::crd::status::{JobPhase, Summary};

use crate::amounts::seconds_between;
use crate::name::{KruiseKind, KruiseName};
use crate::progress::tally::Tally;
use crate::progress::view::{JobView, ListPart};
use crate::screen::sanitize_line;

/// Messages of a job that runs or has succeeded. We leave them out: the counts show the same.
const USUAL: [&str; 2] = ["job is running", "job has completed"];

pub(super) fn of_job(job: &ImagePullJob, namespace: &str, tally: &Tally, now: Timestamp) -> JobView {
    let status = job.status.clone().unwrap_or_default();
    let started = status.start_time.as_ref().map(|time| time.0);
    let ended = status.completion_time.as_ref().map(|time| time.0);
    let nodes = nodes_of(job);
    let phase = phase(started, ended, nodes.failure > 0);
    let view = JobView {
        images: vec![sanitize_line(&job.spec.image)],
        suspended: is_paused(&job.spec.template),
        nodes,
        ..base_view(&name_of(KruiseKind::Pull, job), namespace, phase, (started, ended), now)
    };
    view.with_tally(tally).with_reason(&status.message, &USUAL)
}

pub(super) fn of_list(
    list: &ImageListPullJob,
    jobs: &[&ImagePullJob],
    namespace: &str,
    tally: &Tally,
    now: Timestamp,
) -> JobView {
    let status = list.status.clone().unwrap_or_default();
    let started = status.start_time.as_ref().map(|time| time.0);
    let ended = status.completion_time.as_ref().map(|time| time.0);
    let phase = phase(started, ended, status.succeeded < status.desired);
    let part = |job: &&ImagePullJob| {
        let status = job.status.as_ref();
        let nodes = nodes_of(job);
        let [started, ended] = [
            status.and_then(|status| status.start_time.as_ref()),
            status.and_then(|status| status.completion_time.as_ref()),
        ]
        .map(|time| time.map(|time| time.0));
        let phase = self::phase(started, ended, nodes.failure > 0);
        ListPart { image: sanitize_line(&job.spec.image), job: job.name_any(), phase, nodes }
    };
    let parts: Vec<_> = jobs.iter().map(part).collect();
    let view = JobView {
        images: list.spec.images.iter().map(|image| sanitize_line(image)).collect(),
        suspended: is_paused(&list.spec.template),
        nodes: sum(&parts),
        parts,
        ..base_view(&name_of(KruiseKind::List, list), namespace, phase, (started, ended), now)
    };
    view.with_tally(tally).with_reason(&status.message, &USUAL)
}

/// The row of a job on the page, where the rows of all namespaces are.
pub(crate) fn job_row(job: &ImagePullJob, now: Timestamp) -> JobView {
    let view = of_job(job, &job.namespace().unwrap_or_default(), &Tally::default(), now);
    JobView { job: row_name(job), ..view }
}

pub(crate) fn row_name(job: &ImagePullJob) -> String {
    format!("{} -n {}", name_of(KruiseKind::Pull, job), job.namespace().unwrap_or_default())
}

fn name_of(kind: KruiseKind, job: &impl ResourceExt) -> KruiseName {
    KruiseName { kind, name: job.name_any() }
}

fn base_view(
    name: &KruiseName,
    namespace: &str,
    phase: JobPhase,
    (started, ended): (Option<Timestamp>, Option<Timestamp>),
    now: Timestamp,
) -> JobView {
    JobView {
        job: name.to_string(),
        namespace: Some(namespace.to_owned()),
        phase,
        is_over: ended.is_some(),
        seconds: started.map(|started| seconds_between(started, ended.unwrap_or(now))),
        ..JobView::default()
    }
}

fn phase(started: Option<Timestamp>, ended: Option<Timestamp>, has_failures: bool) -> JobPhase {
    match (started, ended) {
        (_, Some(_)) if has_failures => JobPhase::Failure,
        (_, Some(_)) => JobPhase::Completed,
        (Some(_), None) => JobPhase::InProgress,
        (None, None) => JobPhase::Init,
    }
}

/// Parallelism 0 pauses a job.
fn is_paused(template: &PullJobTemplate) -> bool {
    use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
    match &template.parallelism {
        Some(IntOrString::Int(nodes)) => *nodes == 0,
        Some(IntOrString::String(nodes)) => nodes == "0",
        None => false,
    }
}

/// A list counts each node once for each image.
fn sum(parts: &[ListPart]) -> Summary {
    parts.iter().fold(Summary::default(), |sum, ListPart { nodes, .. }| Summary {
        desired: sum.desired + nodes.desired,
        pending: sum.pending + nodes.pending,
        in_progress: sum.in_progress + nodes.in_progress,
        successful: sum.successful + nodes.successful,
        failure: sum.failure + nodes.failure,
        ..sum
    })
}

fn nodes_of(job: &ImagePullJob) -> Summary {
    let status = job.status.as_ref();
    let count = |count: i32| u32::try_from(count).unwrap_or(0);
    let [desired, active, succeeded, failed] = status
        .map_or([0; 4], |status| [status.desired, status.active, status.succeeded, status.failed])
        .map(count);
    Summary {
        desired,
        pending: desired.saturating_sub(active + succeeded + failed),
        in_progress: active,
        successful: succeeded,
        failure: failed,
        ..Summary::default()
    }
}
