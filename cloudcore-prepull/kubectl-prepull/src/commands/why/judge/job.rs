//! The points about a job on a node.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::status::{Action, NodePhase, NodeStatus};
use prepull_api::failure::FailureCode;
use prepull_api::selector::Selector;

use super::super::facts::{OfJob, is_chosen};
use crate::amounts::{format_duration, seconds_between};
use crate::checklist::Point;
use crate::jobs;
use crate::progress::tally::reason_of;

/// The point of a job; none if the job has nothing to do with the node, and was not asked for.
pub(super) fn point(
    of: &OfJob,
    name: &str,
    node: Option<&Node>,
    is_named: bool,
    now: Timestamp,
) -> Option<Point> {
    let OfJob { job, record } = of;
    if let Some(record) = record {
        return Some(of_record(job, record, now));
    }
    let status = job.status.as_ref();
    let skipped =
        status.and_then(|status| status.skipped_nodes.iter().find(|skipped| skipped.node_name == name));
    let job_name = job.name_any();
    if let Some(skipped) = skipped {
        return Some(Point::bad(format!("job {job_name} skips it: {}", skipped.reason), joining_remedy(job)));
    }
    let is_chosen = is_chosen(job, name, node);
    if status.is_none_or(|status| status.start_time.is_none()) {
        let reason = status.map(|status| status.reason.as_str()).filter(|reason| !reason.is_empty());
        let reason = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
        let begun = || {
            Point::open(format!("job {job_name} has not begun{reason}")).with_remedy(format!(
                "kubectl prepull status {job_name}; kubectl edit ippj {job_name} corrects it"
            ))
        };
        return (is_named || is_chosen == Some(true)).then(begun);
    }
    let selector = selector(job);
    if !is_named {
        return None;
    }
    Some(match is_chosen {
        Some(true) => Point::bad(
            format!("job {job_name} began before it was chosen by it, or skips it"),
            joining_remedy(job),
        ),
        _ if selector.is_some() => Point::bad(
            format!(
                "job {job_name} is for nodes with {}, and not for this one",
                selector.unwrap_or_default()
            ),
            format!("give {name} the labels, or make another job: kubectl prepull run IMAGE --node {name}"),
        ),
        _ => Point::bad(
            format!("job {job_name} names its nodes, and not this one"),
            format!("make another job: kubectl prepull run IMAGE --node {name}"),
        ),
    })
}

fn selector(job: &ImagePrePullJob) -> Option<String> {
    let selector = job.spec.image_pre_pull_template.label_selector.as_ref()?;
    let text = Selector::try_from(selector).ok()?.to_string();
    Some(if text.is_empty() { "the label of edge nodes".to_owned() } else { format!("the labels {text}") })
}

/// How a node joins a job that has begun without it.
fn joining_remedy(job: &ImagePrePullJob) -> String {
    let name = job.name_any();
    let has_begun = job.status.as_ref().is_some_and(|status| status.start_time.is_some());
    if !has_begun && !jobs::is_over(job) {
        "mend that: the job begins once one of its nodes is Ready".to_owned()
    } else if jobs::is_over(job) {
        format!(
            "mend that, and let it join in another round: set spec.followNodes (kubectl edit ippj {name}), and kubectl prepull retry {name}"
        )
    } else if job.spec.follow_nodes {
        "mend that: it joins the job within seconds then (spec.followNodes)".to_owned()
    } else {
        format!(
            "mend that, and let nodes join: kubectl patch ippj {name} --type=merge -p '{{\"spec\":{{\"followNodes\":true}}}}'"
        )
    }
}

fn of_record(job: &ImagePrePullJob, record: &NodeStatus, now: Timestamp) -> Point {
    let name = job.name_any();
    let attempt = if record.attempt > 1 { format!(", attempt {}", record.attempt) } else { String::new() };
    let reason = reason_of(record);
    let because = if reason.is_empty() { String::new() } else { format!(": {reason}") };
    let since = record
        .start_time
        .as_ref()
        .map(|start| format!(" for {}", format_duration(seconds_between(start.0, now))));
    let watch = format!("kubectl prepull status {name} --watch");
    match record.phase {
        NodePhase::Successful => of_success(job, record, now),
        NodePhase::Pending | NodePhase::InProgress if job.spec.pause && !job.spec.cancel => Point::bad(
            format!("job {name} is paused: nothing of it is downloaded"),
            format!("kubectl prepull resume {name}"),
        ),
        NodePhase::InProgress => {
            Point::good(format!("job {name} is at work on it{}{attempt}{because}", since.unwrap_or_default()))
                .with_remedy(watch)
        }
        NodePhase::Pending if job.spec.cancel => Point::bad(
            format!("job {name} was cancelled, and has not started it"),
            "make another job: kubectl prepull run IMAGE",
        ),
        NodePhase::Pending if job.spec.suspend => Point::bad(
            format!("job {name} is suspended, and has not started it"),
            format!("kubectl prepull resume {name}"),
        ),
        NodePhase::Pending if reason.is_empty() => {
            let at_a_time = job.spec.image_pre_pull_template.concurrency;
            Point::open(format!("job {name} has selected it, and works on {at_a_time} nodes at a time: it waits")).with_remedy(format!(
                "{watch}; kubectl edit ippj {name} and a larger concurrency, if the registry and the links bear it"
            ))
        }
        NodePhase::Pending => {
            Point::open(format!("job {name} has selected it, and it waits{because}")).with_remedy(watch)
        }
        NodePhase::Failure | NodePhase::Unknown => {
            let code = record.code.unwrap_or(FailureCode::Other);
            let retry = if job.spec.cancel {
                "then make another job, since this one was cancelled: kubectl prepull run IMAGE".to_owned()
            } else if jobs::is_over(job) {
                format!("then kubectl prepull retry {name}")
            } else {
                format!("then, when the job is over, kubectl prepull retry {name}")
            };
            Point::bad(
                format!("job {name} has failed on it, {code}{attempt}{because}"),
                format!("{}; {retry}", look_at(code)),
            )
        }
    }
}

/// A job that has succeeded on the node. That its images are there is known of a moment in the past.
fn of_success(job: &ImagePrePullJob, record: &NodeStatus, now: Timestamp) -> Point {
    let name = job.name_any();
    let ago = |time: &Time| format_duration(seconds_between(time.0, now));
    let pulled = record.action_flow.iter().rfind(|action| action.action == Action::Pull);
    let pulled = pulled.map(|pulled| format!(": pulled {} ago", ago(&pulled.time))).unwrap_or_default();
    let recheck = record.recheck.as_ref();
    let checked = recheck.and_then(|recheck| recheck.checked_time.as_ref()).map(ago);
    let not_checked = recheck.map(|recheck| recheck.not_checked_reason.as_str()).unwrap_or_default();
    let since = match (checked, not_checked) {
        (Some(checked), "") => {
            return Point::good(format!(
                "job {name} has succeeded on it{pulled}, and its images were still there {checked} ago"
            ));
        }
        (Some(checked), why) => {
            format!(", checked {checked} ago, and not checked by the last re-check: {why}")
        }
        (None, "") => ", not checked since".to_owned(),
        (None, why) => format!(", not checked since, and not by the last re-check: {why}"),
    };
    let point = Point::good(format!("job {name} has succeeded on it{pulled}{since}"));
    if jobs::is_over(job) {
        point.with_remedy(format!(
            "kubectl prepull verify {name} asks the nodes whether their images are still there"
        ))
    } else {
        point
    }
}

/// What to look at, as the table of failure codes in docs/api.md has it.
fn look_at(code: FailureCode) -> &'static str {
    match code {
        FailureCode::Unauthorized => "look at the password in the secret, and which secret the image uses",
        FailureCode::NotFound => {
            "look at repository and tag: the registry has no such image, or hides it from these credentials"
        }
        FailureCode::SecretUnusable => {
            "see to that secret; its owner allows its use by kubectl prepull allow NAMESPACE/SECRET JOB"
        }
        FailureCode::InvalidImage => "look at the reference and at the image",
        FailureCode::PlatformMismatch => "build the image for this platform, or leave the node out",
        FailureCode::NotPresent => "imagePullPolicy is Never: choose another one, or load the image",
        FailureCode::Unreachable => "look at DNS, network, proxy and certificates on the node",
        FailureCode::RateLimited => "the registry limits requests: a smaller concurrency, or a mirror",
        FailureCode::RegistryError => "see to the registry",
        FailureCode::NoSpace => "make room on the disk of the node",
        FailureCode::RuntimeDown => "see to the container runtime on the node",
        FailureCode::Timeout => "a longer timeoutSeconds, or a faster link",
        FailureCode::CheckFailed => "see to disk, cpu or memory of the node, by the reason",
        FailureCode::Cancelled => "it was cancelled",
        FailureCode::NodeNotFound => "check the name of the node",
        FailureCode::Offline => "see to the agent and its link",
        FailureCode::NoResult | FailureCode::Internal | FailureCode::Other => {
            "look at the agent's log: journalctl -u edgecore-prepull"
        }
        FailureCode::Removed => {
            "its kubelet removes unused images when the disk fills: make room, or keep them by spec.pin"
        }
        FailureCode::AgentTooOld => "upgrade edgecore-prepull on these nodes, then: kubectl prepull retry",
        FailureCode::NoDelta => "make a delta from a version that the nodes have: kubectl prepull delta",
        FailureCode::UpgradeFailed => {
            "the version before runs; `edgecore-prepull status` on the node has the reason"
        }
        FailureCode::SignatureInvalid => "look at the signature: cosign verify --key",
    }
}
